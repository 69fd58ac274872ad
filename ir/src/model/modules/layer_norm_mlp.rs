//! `LayerNormMlp`: a norm, a column-parallel projection, an activation, a row-parallel projection.
//!
//! Gated activations have two first projections, the segments `gate_proj` and `up_proj`.

use smallvec::smallvec;

use super::activation::Function;
use super::linear::{Parallel, Projection};
use super::norm::Norm;
use super::{Common, ModuleDef};
use crate::Value;
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::params::Start;
use crate::model::range::Fields;

module! {
    /// See the [module docs](self).
    pub struct LayerNormMlp {
        /// Features between the projections, of each segment.
        pub ffn: u64,
        /// The activation.
        #[serde(default = "default_activation")]
        pub activation: Function,
        /// The norm: that of the layer around, or `LayerNorm()`.
        #[serde(default)]
        pub norm: Option<Norm>,
        /// Projections have biases: as in the layer around, or yes.
        #[serde(default)]
        pub bias: Option<bool>,
        /// How the first projections start; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// How the last projection starts; the model's `output_init` by default.
        #[serde(default)]
        pub output_init: Option<Init>,
    }
}

fn default_activation() -> Function {
    Function::Gelu
}

impl ModuleDef for LayerNormMlp {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.size("ffn", self.ffn)?;
        self.norm.map_or(Ok(()), |it| it.check(fields, "norm"))?;
        fields.init("init", self.init)?;
        fields.init("output_init", self.output_init)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let norm = self.norm.unwrap_or_default();
        let normal = cx.scoped_part("layer_norm", |cx| norm.apply(cx, x))?;
        Ok(smallvec![self.project(cx, normal, self.bias.unwrap_or(true))?])
    }
}

impl LayerNormMlp {
    /// All but the norm.
    pub(super) fn project(
        &self,
        cx: &mut Cx<'_>,
        x: Value,
        bias: bool,
    ) -> Result<Value, ModelError> {
        let width = cx.width(x);
        let start = Start::of("init", self.init, cx.model.init);
        let output_default = cx.model.output_init.map_or(start, Start::from);
        let output_start = Start::of("output_init", self.output_init, output_default);
        let first: &[&str] =
            if self.activation.is_gated() { &["gate_proj", "up_proj"] } else { &["up_proj"] };
        let mut hidden = Values::new();
        for key in first {
            let parallel = Parallel::column(cx);
            let projection = Projection { out: self.ffn, bias, parallel, start, options: None };
            hidden.push(cx.scoped_part(key, |cx| projection.apply(cx, x))?);
        }
        let hidden = self.activation.apply(cx, "act", &hidden)?;
        let (parallel, start) = (Parallel::Row, output_start);
        let projection = Projection { out: width, bias, parallel, start, options: None };
        cx.scoped_part("down_proj", |cx| projection.apply(cx, hidden))
    }
}
