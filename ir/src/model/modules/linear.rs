//! `Linear`: `x W^T + b`, column-parallel, row-parallel or replicated.
//!
//! A fused weight is declared as segments. Each is a parameter of its own, so it is cut on its own
//! and no layout depends on the size of an axis: a gate and an up projection of 3 rows each are not
//! 6 rows that two ranks could share.
//!
//! ```text
//! Column  weight [tp, _]  bias [tp]   output cut over its features
//! Row     weight [_, tp]  bias [_]    output reduced into the residual stream, then the bias
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use super::{Common, ModuleDef, yes};
use crate::Value;
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::params::{ParamSpec, Start};
use crate::model::range::Fields;
use crate::model::schema::{Ordered, ParamOptions};
use crate::ops::{BiasAdd, Matmul};
use crate::placement::{DimLayout, Sharding};

module! {
    /// See the [module docs](self).
    pub struct Linear {
        /// Features of the input; those that it has by default.
        #[serde(default)]
        pub in_features: Option<u64>,
        /// Features of the output; the sum of the segments by default.
        #[serde(default)]
        pub out_features: Option<u64>,
        /// Segments of the output by name, each a tensor of its own: `{"gate": 64, "up": 64}`.
        #[serde(default)]
        pub fused: Ordered<u64>,
        /// It has a bias.
        #[serde(default = "yes")]
        pub bias: bool,
        /// Which side of the weight is cut over the tensor-parallel axis; none by default.
        #[serde(default)]
        pub parallel_mode: Option<ParallelMode>,
        /// How the weight starts; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// Options of the weight, or of all its segments.
        #[serde(default)]
        pub weight: ParamOptions,
    }
}

/// Which side of a weight is cut over the tensor-parallel axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ParallelMode {
    /// The outputs.
    Column,
    /// The inputs.
    Row,
}

/// How a projection is laid out.
#[derive(Debug, Clone)]
pub(super) enum Parallel {
    /// Replicated.
    None,
    /// Outputs are cut like `compute`, and in storage like `storage`.
    Column { compute: DimLayout, storage: DimLayout },
    /// Inputs are cut over the tensor-parallel axis.
    Row,
}

/// One projection: a weight, and perhaps a bias, of the module at hand.
pub(super) struct Projection<'s> {
    pub out: u64,
    pub bias: bool,
    pub parallel: Parallel,
    pub start: Start,
    pub options: Option<(&'s str, &'s ParamOptions)>,
}

impl Parallel {
    /// Outputs cut over the whole tensor-parallel axis.
    pub(super) fn column(cx: &Cx<'_>) -> Parallel {
        Parallel::Column { compute: cx.tp.cut(), storage: cx.tp.cut() }
    }
}

impl Projection<'_> {
    /// Projects `x`; the result has the name of the module at hand.
    pub(super) fn apply(self, cx: &mut Cx<'_>, x: Value) -> Result<Value, ModelError> {
        let shape = [self.out, cx.width(x)];
        let mut weight = ParamSpec::new("weight", &shape, self.start);
        weight.options = self.options;
        let bias_shape = [self.out];
        let mut bias = ParamSpec::new("bias", &bias_shape, Init::Zeros);
        match &self.parallel {
            Parallel::None => (),
            Parallel::Column { compute, storage } => {
                weight = weight.cut(0, compute.clone());
                weight.storage = Some(Sharding::replicated(2).with_dim(0, storage.clone()));
                bias = bias.cut(0, compute.clone());
                bias.storage = Some(Sharding::replicated(1).with_dim(0, storage.clone()));
            }
            Parallel::Row => weight = weight.cut(1, cx.tp.cut()),
        }
        let weight = cx.param(weight)?;
        let fprop = Matmul { transpose_b: true, ..Matmul::default() };
        let mut res = cx.op(if self.bias { "product" } else { "" }, fprop, &[x, weight])?;
        let row = matches!(self.parallel, Parallel::Row);
        if row {
            cx.pin_stream(res)?;
        }
        if self.bias {
            let bias = cx.param(bias)?;
            res = cx.op("", BiasAdd {}, &[res, bias])?;
            if row {
                cx.pin_stream(res)?;
            }
        }
        Ok(res)
    }
}

/// The projections of `x` that a [`Linear`] or a `LayerNormLinear` is.
pub(super) struct Projections<'s> {
    pub in_features: Option<u64>,
    pub out_features: Option<u64>,
    pub fused: &'s Ordered<u64>,
    pub bias: bool,
    pub parallel_mode: Option<ParallelMode>,
    pub init: Option<Init>,
    pub options: &'s ParamOptions,
}

/// Checks the sizes of a [`Linear`] or a `LayerNormLinear`.
pub(super) fn check_sizes(
    fields: &Fields,
    in_features: Option<u64>,
    out_features: Option<u64>,
    fused: &Ordered<u64>,
) -> Result<(), ModelError> {
    fields.optional_size("in_features", in_features)?;
    fields.optional_size("out_features", out_features)?;
    fused.0.iter().try_for_each(|(name, it)| {
        let field = format!("fused[\"{name}\"]");
        fields.name(&field, name)?;
        fields.size(&field, *it)
    })
}

impl Projections<'_> {
    pub(super) fn apply(self, cx: &mut Cx<'_>, x: Value) -> Result<Values, ModelError> {
        let width = cx.width(x);
        if let Some(expected) = self.in_features.filter(|&it| it != width) {
            let (module, what) = (cx.title(), "in_features".to_string());
            return Err(
                cx.error("in_features", Problem::Size { module, what, expected, found: width })
            );
        }
        let sum = self.fused.0.iter().map(|it| it.1).sum();
        let out = match (self.out_features, self.fused.0.is_empty()) {
            (Some(out), true) => out,
            (Some(out), false) if out != sum => {
                let expected = format!("{sum}, the sum of the segments");
                let (field, found) = ("out_features".to_string(), out.to_string());
                return Err(cx.error("out_features", Problem::Range { field, found, expected }));
            }
            (_, false) => sum,
            (None, true) => {
                let (owner, field) = (Some("Linear".to_string()), "out_features".to_string());
                return Err(cx.error("", Problem::MissingField { owner, field }));
            }
        };
        let parallel = match self.parallel_mode {
            None => Parallel::None,
            Some(ParallelMode::Column) => Parallel::column(cx),
            Some(ParallelMode::Row) => Parallel::Row,
        };
        let start = Start::of("init", self.init, cx.model.init);
        let segment = |out| Projection {
            out,
            bias: self.bias,
            parallel: parallel.clone(),
            start,
            options: Some(("weight", self.options)),
        };
        if self.fused.0.is_empty() {
            return Ok(smallvec![segment(out).apply(cx, x)?]);
        }
        let mut res = Values::new();
        for (name, out) in &self.fused.0 {
            res.push(cx.scoped_part(name, |cx| segment(*out).apply(cx, x))?);
        }
        Ok(res)
    }
}

impl ModuleDef for Linear {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        check_sizes(fields, self.in_features, self.out_features, &self.fused)?;
        fields.init("init", self.init)?;
        fields.options("weight", &self.weight)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let projections = Projections {
            in_features: self.in_features,
            out_features: self.out_features,
            fused: &self.fused,
            bias: self.bias,
            parallel_mode: self.parallel_mode,
            init: self.init,
            options: &self.weight,
        };
        projections.apply(cx, x)
    }
}
