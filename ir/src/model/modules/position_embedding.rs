//! `PositionEmbedding`: a learned row for each position, added to every sequence.
//!
//! The rows of a sequence are one long bias: `x[b (s d)] + table[(s d)]`.

use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::params::{ParamSpec, Start};
use crate::model::range::Fields;
use crate::model::schema::ParamOptions;
use crate::ops;

module! {
    /// See the [module docs](self).
    pub struct PositionEmbedding {
        /// Rows of the table: the longest sequence.
        pub positions: u64,
        /// How the table starts; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// Options of the table.
        #[serde(default)]
        pub weight: ParamOptions,
    }
}

impl ModuleDef for PositionEmbedding {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.size("positions", self.positions)?;
        fields.init("init", self.init)?;
        fields.options("weight", &self.weight)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        if self.positions < cx.model.sequence {
            let (field, found) = ("positions".to_string(), self.positions.to_string());
            let expected = format!("at least the sequence, which is {}", cx.model.sequence);
            return Err(cx.error("positions", Problem::Range { field, found, expected }));
        }
        let shape = [self.positions, cx.width(x)];
        let start = Start::of("init", self.init, cx.model.init);
        let mut spec = ParamSpec::new("weight", &shape, start);
        spec.options = Some(("weight", &self.weight));
        let table = cx.param(spec)?;
        let (sequence, inner) = (cx.model.sequence, cx.width(x));
        let rows = match self.positions == sequence {
            true => table,
            false => cx.op("rows", ops::SliceDim { dim: 0, start: 0, len: sequence }, &[table])?,
        };
        let bias = cx.op("bias", ops::MergeDims { dim: 0 }, &[rows])?;
        let flat = cx.op("flat", ops::MergeDims { dim: 1 }, &[x])?;
        let sum = cx.op("sum", ops::BiasAdd {}, &[flat, bias])?;
        let sum = cx.op("", ops::SplitDim { dim: 1, inner }, &[sum])?;
        cx.pin_stream(sum)?;
        Ok(smallvec![sum])
    }
}
