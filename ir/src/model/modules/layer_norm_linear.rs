//! `LayerNormLinear`: a norm, then a [`Linear`](super::Linear) that is column-parallel or replicated.

use super::linear::{ParallelMode, Projections, check_sizes};
use super::norm::Norm;
use super::{Common, ModuleDef, yes};
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::range::Fields;
use crate::model::schema::{Ordered, ParamOptions};

module! {
    /// See the [module docs](self).
    pub struct LayerNormLinear {
        /// The norm; its parameters are those of the part `layer_norm`.
        #[serde(default)]
        pub norm: Norm,
        /// Features of the input; those that it has by default.
        #[serde(default)]
        pub in_features: Option<u64>,
        /// Features of the output; the sum of the segments by default.
        #[serde(default)]
        pub out_features: Option<u64>,
        /// Segments of the output by name, each a tensor of its own.
        #[serde(default)]
        pub fused: Ordered<u64>,
        /// It has a bias.
        #[serde(default = "yes")]
        pub bias: bool,
        /// `Column`, or replicated by default.
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

impl ModuleDef for LayerNormLinear {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        self.norm.check(fields, "norm")?;
        check_sizes(fields, self.in_features, self.out_features, &self.fused)?;
        fields.init("init", self.init)?;
        fields.options("weight", &self.weight)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        if self.parallel_mode == Some(ParallelMode::Row) {
            let (field, found) = ("parallel_mode".to_string(), "Row".to_string());
            let expected = "Column: a norm needs all features of its input".to_string();
            return Err(cx.error("parallel_mode", Problem::Range { field, found, expected }));
        }
        let x = cx.one(&inputs)?;
        let x = cx.scoped_part("layer_norm", |cx| self.norm.apply(cx, x))?;
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
