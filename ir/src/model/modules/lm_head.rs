//! `LmHead`: logits over the vocabulary, vocabulary-parallel; the vocabulary may be uneven.
//!
//! It is in `Bf16` unless its own `recipe` says otherwise, whatever is around it: as is usual with
//! TransformerEngine, and what torchao's filters leave out.
//!
//! With `chunks` the sequence is cut into so many pieces, and the loss and its gradients are taken of one
//! after the other: the logits of one piece are in memory at a time.

use super::{Common, ModuleDef};
use crate::Value;
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::params::{ParamSpec, Start};
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
        /// Pieces of the sequence of which logits are made one after the other; only a loss can follow.
        #[serde(default = "one")]
        pub chunks: u64,
        /// How the weight starts; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// Options of the weight.
        #[serde(default)]
        pub weight: ParamOptions,
    }
}

fn one() -> u64 {
    1
}

impl ModuleDef for LmHead {
    fn common(&self) -> Common<'_> {
        let recipe = self.recipe.as_ref().unwrap_or(&Recipe::Bf16);
        Common { recipe: Some(recipe), ..self.common_options() }
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.optional_size("vocab", self.vocab)?;
        fields.chunks("chunks", self.chunks)?;
        fields.init("init", self.init)?;
        fields.options("weight", &self.weight)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let vocab = self.vocab.unwrap_or(cx.builder.graph.run.vocab);
        let shape = [vocab, cx.width(x)];
        let start = Start::of("init", self.init, cx.model.init);
        let mut spec = ParamSpec::new("weight", &shape, start);
        spec.options = Some(("weight", &self.weight));
        let weight = cx.param(spec.cut(0, cx.tp.cut()))?;
        let bias = match self.bias {
            true => {
                let shape = [vocab];
                let spec = ParamSpec::new("bias", &shape, Init::Zeros);
                Some(cx.param(spec.cut(0, cx.tp.cut()))?)
            }
            false => None,
        };
        let chunks = cx.chunks("input", x, self.chunks)?;
        chunks.iter().map(|(part, x)| self.logits(cx, part, *x, weight, bias)).collect()
    }
}

impl LmHead {
    /// Logits of `x`, named with `part` at the end.
    fn logits(
        &self,
        cx: &mut Cx<'_>,
        part: &str,
        x: Value,
        weight: Value,
        bias: Option<Value>,
    ) -> Result<Value, ModelError> {
        let fprop = Matmul { transpose_b: true, ..Matmul::default() };
        let product = if self.bias { "product" } else { "logits" };
        let mut logits = cx.op(&format!("{product}{part}"), fprop, &[x, weight])?;
        if let Some(bias) = bias {
            logits = cx.op(&format!("logits{part}"), BiasAdd {}, &[logits, bias])?;
        }
        let precision = &cx.model.precision;
        if let Some(to) = precision.output.filter(|&it| it != precision.compute) {
            logits = cx.op(&format!("logits.output{part}"), Cast { to }, &[logits])?;
        }
        Ok(logits)
    }
}
