//! `Repeat`: the same modules several times, each with parameters of its own.
//!
//! Iteration `i` is called `prefix.i`, counted from `first`. Layers are the `TransformerLayer`s in it; an iteration
//! that has none is a layer itself.

use serde::{Deserialize, Deserializer};

use super::{Attention, Common, Module, ModuleDef, attentions_in, layers_in};
use crate::graph::Checkpoint;
use crate::model::elaborate::{Cx, Numbers, Values};
use crate::model::error::{ModelError, Problem};
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
        /// The number of the first iteration.
        #[serde(default)]
        pub first: u32,
        /// The modules of one iteration.
        pub body: Vec<Module>,
        /// Activation checkpointing of these layers; the model's by default.
        #[serde(default, deserialize_with = "given")]
        pub checkpoint: Option<Checkpoint>,
        /// The number of layers from the first on that stay in `Bf16`. Megatron's name.
        #[serde(default)]
        pub num_layers_at_start_in_bf16: u32,
        /// The number of layers up to the last that stay in `Bf16`. Megatron's name.
        #[serde(default)]
        pub num_layers_at_end_in_bf16: u32,
    }
}

/// A policy that the model states. RON would read `None` as a field that is left out.
fn given<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Checkpoint>, D::Error> {
    Checkpoint::deserialize(from).map(Some)
}

impl Repeat {
    /// Layers of one iteration.
    fn layers_each(&self) -> u64 {
        layers_in(&self.body).max(1)
    }

    /// Returns true if a whole iteration is one layer.
    fn is_layer_each(&self) -> bool {
        match &self.body[..] {
            [only] if only.def().is_layer() => true,
            body => layers_in(body) == 0,
        }
    }

    /// Refuses numbers that another `Repeat` of the same prefix has.
    fn claim_numbers(&self, cx: &mut Cx<'_>) -> Result<(), ModelError> {
        let (prefix, first) = (cx.param_name(&self.prefix), u64::from(self.first));
        let range = first..first + u64::from(self.n);
        let overlap = |it: &&Numbers| it.range.start < range.end && range.start < it.range.end;
        if let Some(other) = cx.numbers.iter().filter(|it| it.prefix == prefix).find(overlap) {
            let (other, other_at) = (other.range.clone(), other.at.clone());
            return Err(cx.error("prefix", Problem::Numbers { prefix, range, other, other_at }));
        }
        let at = cx.here("").to_string();
        cx.numbers.push(Numbers { prefix, range, at });
        Ok(())
    }
}

impl ModuleDef for Repeat {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.repeats("n", self.n.into())?;
        fields.name("prefix", &self.prefix)?;
        let layers = self.n_layers();
        let start = u64::from(self.num_layers_at_start_in_bf16);
        let end = u64::from(self.num_layers_at_end_in_bf16);
        let expected = format!("at most {layers}, the layers of this `Repeat`");
        fields.require(start <= layers, "num_layers_at_start_in_bf16", start, &expected)?;
        let rest = layers - start;
        let expected = format!("at most {rest}, the layers that are not at the start");
        fields.require(end <= rest, "num_layers_at_end_in_bf16", end, &expected)?;
        self.checkpoint.as_ref().map_or(Ok(()), |it| fields.checkpoint("checkpoint", it))?;
        fields.modules("body", &self.body)
    }

    fn build(&self, cx: &mut Cx<'_>, mut values: Values) -> Result<Values, ModelError> {
        self.claim_numbers(cx)?;
        let before = cx.builder.graph.nodes.len();
        let own = self.checkpoint.clone().unwrap_or_else(|| cx.checkpoint.clone());
        let checkpoint = std::mem::replace(&mut cx.checkpoint, own);
        let around = cx.quantized.clone();
        let (first, end) = (cx.n_layers, cx.n_layers + self.n_layers());
        let start = first + u64::from(self.num_layers_at_start_in_bf16);
        let end = end - u64::from(self.num_layers_at_end_in_bf16);
        cx.quantized = start.max(around.start)..end.min(around.end);
        for index in 0..self.n {
            let number = u64::from(self.first) + u64::from(index);
            let name = join(&self.prefix, &number.to_string()).into_owned();
            values = if self.is_layer_each() {
                cx.layer(&name, |cx| cx.chain("body", &self.body, values))?
            } else {
                cx.scoped(&name, |cx| {
                    let mut layers = (cx.n_layers..).take(self.layers_each() as usize);
                    if !layers.any(|it| cx.quantized.contains(&it)) {
                        cx.set_recipe(&Recipe::Bf16);
                    }
                    cx.chain("body", &self.body, values)
                })?
            };
            cx.check_size(index, self.n)?;
        }
        if let Some(own) = &self.checkpoint {
            cx.check_checkpoint(own, before, cx.here("checkpoint"))?;
        }
        (cx.checkpoint, cx.quantized) = (checkpoint, around);
        Ok(values)
    }

    fn n_layers(&self) -> u64 {
        u64::from(self.n).saturating_mul(self.layers_each())
    }

    fn attentions(&self, path: &str, tp_mesh: Option<&str>, found: &mut Vec<Attention>) {
        attentions_in(&self.body, &format!("{path}.body"), tp_mesh, found);
    }
}
