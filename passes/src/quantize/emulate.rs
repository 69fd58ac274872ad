//! MXFP8 and NVFP4 where no hardware multiplies their codes: GEMMs on the numbers that codes stand for.
//!
//! ```text
//! %y = matmul %x, %w         %x.rows = round_mx %x
//!                            %y = matmul %x.rows, %w.full
//!
//! %dw = matmul %dy, %x       %x.rht = hadamard %x
//!                            %a = amax %x.rht
//!                            %x.columns = round_nvfp4(along:Columns) %x.rht, %a
//!                            %dw = matmul %dy.columns, %x.columns
//! ```
//!
//! Rows and columns differ but for square blocks, and each is made where its reader is, from the same value.

use ir::graph::Def;
use ir::ops::{Along, Amax, Hadamard, RoundMx, RoundNvFp4};
use ir::placement::Sharding;
use ir::quant::{QuantSpec, Scaling};
use ir::random::stream_key;
use ir::{BuildError, DType, TensorType, Value};

use super::block::block;
use super::{Walk, fp8};

/// Whether codes are not what is multiplied.
pub(super) fn is_emulated(scaling: Scaling) -> bool {
    match scaling {
        Scaling::Mx { .. } | Scaling::NvFp4 { .. } => true,
        Scaling::Current { .. } | Scaling::Delayed { .. } | Scaling::Block { .. } => false,
    }
}

impl Walk<'_> {
    /// What the rows or columns of the codes of `value` stand for.
    pub(super) fn rounded(
        &mut self,
        value: Value,
        spec: QuantSpec,
        columns: bool,
    ) -> Result<Value, BuildError> {
        if self.gemms.param[value].is_some_and(|it| self.gemms.weights[it].is_some()) {
            return Ok(value);
        }
        let square = block(spec.scaling).is_some_and(|it| it[0] > 1);
        let along = match (square, columns) {
            (true, _) => Along::Square,
            (false, true) => Along::Columns,
            (false, false) => Along::Rows,
        };
        // A weight is rounded again for the backward pass, so that none is kept for it.
        let key = (value, spec, along, self.builder.section);
        if let Some(&known) = self.rounded.get(&key) {
            return Ok(known);
        }
        let name = self.name(value);
        let res = self.round(&name, value, spec, along)?;
        self.rounded.insert(key, res);
        Ok(res)
    }

    /// What codes of `value` stand for; names begin with `name`.
    pub(super) fn round(
        &mut self,
        name: &str,
        value: Value,
        spec: QuantSpec,
        along: Along,
    ) -> Result<Value, BuildError> {
        let suffix = match along {
            Along::Rows => "rows",
            Along::Columns => "columns",
            Along::Square => "rounded",
        };
        let res = format!("{name}.{suffix}");
        let Scaling::NvFp4 { hadamard, stochastic, .. } = spec.scaling else {
            return self.builder.op(&res, RoundMx { to: fp8(spec.format), along }, &[value]);
        };
        let value = match hadamard && along == Along::Columns {
            true => self.builder.op(&format!("{name}.rht"), Hadamard {}, &[value])?,
            false => value,
        };
        let amax = self.builder.op(&format!("{res}.amax"), Amax::default(), &[value])?;
        let mut inputs = vec![value, amax];
        if stochastic {
            inputs.push(self.seed());
        }
        let stochastic = stochastic.then(|| stream_key(&res));
        self.builder.op(&res, RoundNvFp4 { along, pieces: Vec::new(), stochastic }, &inputs)
    }

    /// The seed of this micro-batch, which dropout reads as well.
    fn seed(&mut self) -> Value {
        if let Some(seed) = self.seed {
            return seed;
        }
        let ty = TensorType::scalar(DType::I32);
        let values = &self.builder.graph.values;
        let is_seed = |it: &Value| {
            let data = &values[*it];
            data.def == Def::Input && data.name == "seed" && data.ty == ty
        };
        let seed = match values.keys().find(is_seed) {
            Some(seed) => seed,
            None => {
                let seed = self.builder.leaf("seed", ty, Def::Input);
                self.builder.pin(seed, Sharding::replicated(0));
                seed
            }
        };
        self.seed = Some(seed);
        seed
    }
}
