//! `TransformerLayer`: attention and MLP with a norm before each, added to the residual stream.
//!
//! ```text
//! x = x + dropout(self_attn(input_layernorm(x)))
//! x = x + dropout(mlp(post_attention_layernorm(x)))
//! ```

use smallvec::smallvec;

use super::norm::Norm;
use super::residual::add;
use super::{Attention, Common, LayerNormMlp, ModuleDef, MultiheadAttention, yes};
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::range::Fields;
use crate::ops::Dropout;

module! {
    /// See the [module docs](self).
    pub struct TransformerLayer {
        /// The attention, part `self_attn`.
        pub attention: MultiheadAttention,
        /// The MLP, part `mlp`.
        pub mlp: LayerNormMlp,
        /// The norm before each.
        #[serde(default)]
        pub norm: Norm,
        /// Projections have biases.
        #[serde(default = "yes")]
        pub bias: bool,
        /// Probability with which an element is dropped before it is added to the stream.
        #[serde(default)]
        pub hidden_dropout: f64,
    }
}

impl ModuleDef for TransformerLayer {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        for (field, part, name) in
            [("attention", "self_attn", &self.attention.name), ("mlp", "mlp", &self.mlp.name)]
        {
            let why = format!("write `names: {{\"{part}\": ..}}` in the layer");
            fields.of(field).no_effect(&[("name", !name.is_empty())], &why)?;
        }
        self.attention.check(&fields.of("attention"))?;
        self.mlp.check(&fields.of("mlp"))?;
        self.norm.check(fields, "norm")?;
        fields.real("hidden_dropout", self.hidden_dropout, Dropout::RATE)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let norm = self.attention.norm.unwrap_or(self.norm);
        let normal = cx.scoped_part("input_layernorm", |cx| norm.apply(cx, x))?;
        let bias = self.attention.bias.unwrap_or(self.bias);
        let branch = cx.part("attention", "self_attn", self.attention.common(), |cx| {
            self.attention.attend(cx, normal, bias)
        })?;
        let x = add(cx, "attn_residual", x, branch, self.hidden_dropout)?;
        let norm = self.mlp.norm.unwrap_or(self.norm);
        let normal = cx.scoped_part("post_attention_layernorm", |cx| norm.apply(cx, x))?;
        let bias = self.mlp.bias.unwrap_or(self.bias);
        let branch =
            cx.part("mlp", "mlp", self.mlp.common(), |cx| self.mlp.project(cx, normal, bias))?;
        Ok(smallvec![add(cx, "mlp_residual", x, branch, self.hidden_dropout)?])
    }

    fn is_layer(&self) -> bool {
        true
    }

    fn attentions(&self, path: &str, tp_mesh: Option<&str>, found: &mut Vec<Attention>) {
        let tp_mesh = self.attention.tp_mesh.as_deref().or(tp_mesh);
        self.attention.attentions(&format!("{path}.attention"), tp_mesh, found);
    }
}
