//! `Repeat`: the same modules several times, each with parameters of its own.
//!
//! Iteration `i` is called `prefix.i`, is an FSDP unit of its own (see [`Units`]), and is what
//! activation checkpointing works on.
//!
//! [`Units`]: crate::model::schema::Units

use super::{Attention, Common, Module, ModuleDef, attentions_in};
use crate::graph::Checkpoint;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::names::join;
use crate::model::range::Fields;
use crate::quant::Recipe;

module! {
    /// See the [module docs](self).
    pub struct Repeat {
        /// How often.
        pub n: u32,
        /// Path of the iterations.
        pub prefix: String,
        /// The modules of one iteration.
        pub body: Vec<Module>,
        /// Activation checkpointing of these layers; the model's by default.
        #[serde(default)]
        pub checkpoint: Option<Checkpoint>,
        /// How many iterations, from the first on, are in `Bf16`. Megatron's name.
        #[serde(default)]
        pub num_layers_at_start_in_bf16: u32,
        /// How many iterations, up to the last, are in `Bf16`. Megatron's name.
        #[serde(default)]
        pub num_layers_at_end_in_bf16: u32,
    }
}

impl ModuleDef for Repeat {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.repeats("n", self.n.into())?;
        fields.name("prefix", &self.prefix)?;
        let (start, end) = (self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16);
        let expected = format!("at most n, which is {}", self.n);
        fields.require(start <= self.n, "num_layers_at_start_in_bf16", start, &expected)?;
        let rest = self.n - start;
        let expected = format!("at most {rest}, the layers that are not at the start");
        fields.require(end <= rest, "num_layers_at_end_in_bf16", end, &expected)?;
        self.checkpoint.as_ref().map_or(Ok(()), |it| fields.checkpoint("checkpoint", it))?;
        fields.modules("body", &self.body)
    }

    fn build(&self, cx: &mut Cx<'_>, mut values: Values) -> Result<Values, ModelError> {
        let checkpoint = self.checkpoint.as_ref().unwrap_or(&cx.model.checkpoint);
        let before = cx.builder.graph.nodes.len();
        let quantized = self.num_layers_at_start_in_bf16..self.n - self.num_layers_at_end_in_bf16;
        for index in 0..self.n {
            let name = join(&self.prefix, &index.to_string()).into_owned();
            values = cx.repeated(&name, index, checkpoint, |cx| {
                if !quantized.contains(&index) {
                    cx.set_recipe(&Recipe::Bf16);
                }
                cx.chain("body", &self.body, values)
            })?;
            cx.check_size(index, self.n)?;
        }
        if let Some(own) = &self.checkpoint {
            cx.check_checkpoint(own, before, cx.here("checkpoint"))?;
        }
        Ok(values)
    }

    fn attentions(&self, path: &str, tp_mesh: Option<&str>, found: &mut Vec<Attention>) {
        attentions_in(&self.body, &format!("{path}.body"), tp_mesh, found);
    }
}
