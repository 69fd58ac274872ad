//! `LmHead`: logits over the vocabulary, vocabulary-parallel; the vocabulary may be uneven.
//!
//! It is in `Bf16` unless its own `recipe` says otherwise, whatever is around it: as is usual with
//! TransformerEngine, and what torchao's filters leave out.

use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::params::ParamSpec;
use crate::model::range::Fields;
use crate::model::schema::ParamOptions;
use crate::ops::{BiasAdd, Cast, Matmul};
use crate::quant::Recipe;

module! {
    /// See the [module docs](self).
    pub struct LmHead {
        /// Size of the vocabulary; that of the `Embedding` by default.
        #[serde(default)]
        pub vocab: Option<u64>,
        /// It has a bias, as BERT's head for masked tokens does.
        #[serde(default)]
        pub bias: bool,
        /// How the weight starts; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// Options of the weight.
        #[serde(default)]
        pub weight: ParamOptions,
    }
}

impl ModuleDef for LmHead {
    fn common(&self) -> Common<'_> {
        let recipe = self.recipe.as_ref().unwrap_or(&Recipe::Bf16);
        Common { recipe: Some(recipe), ..self.common_options() }
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.optional_size("vocab", self.vocab)?;
        fields.init("init", self.init)?;
        fields.options("weight", &self.weight)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let vocab = self.vocab.unwrap_or(cx.builder.graph.run.vocab);
        let shape = [vocab, cx.width(x)];
        let mut spec = ParamSpec::new("weight", &shape, self.init.unwrap_or(cx.model.init));
        spec.masked = true;
        spec.options = Some(&self.weight);
        let weight = cx.param(spec.cut(0, cx.tp.cut()))?;
        let fprop = Matmul { transpose_b: true, ..Matmul::default() };
        let product = if self.bias { "product" } else { "logits" };
        let mut logits = cx.op(product, fprop, &[x, weight])?;
        if self.bias {
            let shape = [vocab];
            let mut spec = ParamSpec::new("bias", &shape, Init::Zeros);
            spec.masked = true;
            let bias = cx.param(spec.cut(0, cx.tp.cut()))?;
            logits = cx.op("logits", BiasAdd {}, &[logits, bias])?;
        }
        let precision = &cx.model.precision;
        if let Some(to) = precision.output.filter(|&it| it != precision.compute) {
            logits = cx.op("logits.output", Cast { to }, &[logits])?;
        }
        Ok(smallvec![logits])
    }
}
