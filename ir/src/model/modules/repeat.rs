//! `Repeat`: the same modules several times, each with parameters of its own.
//!
//! Iteration `i` is called `prefix.i`, is an FSDP unit of its own (see [`Units`]), and is what
//! activation checkpointing works on.
//!
//! [`Units`]: crate::model::schema::Units

use super::{Attention, Common, Module, ModuleDef, attentions_in};
use crate::graph::Checkpoint;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{At, ModelError, Problem};
use crate::model::names::join;
use crate::model::range::Fields;
use crate::ops::{CollectiveKind, OpKind};
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
        let (start, end) = (self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16);
        let expected = format!("at most n, which is {}", self.n);
        fields.require(start <= self.n, "num_layers_at_start_in_bf16", start, &expected)?;
        let rest = self.n - start;
        let expected = format!("at most {rest}, the layers that are not at the start");
        fields.require(end <= rest, "num_layers_at_end_in_bf16", end, &expected)?;
        fields.modules("body", &self.body)
    }

    fn build(&self, cx: &mut Cx<'_>, mut values: Values) -> Result<Values, ModelError> {
        let (checkpoint, at) = match &self.checkpoint {
            Some(own) => (own, cx.here("checkpoint")),
            None => (&cx.model.checkpoint, At::Path("checkpoint".into())),
        };
        check_ops(checkpoint, at)?;
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
        Ok(values)
    }

    fn attentions(&self, path: &str, tp_mesh: Option<&str>, found: &mut Vec<Attention>) {
        attentions_in(&self.body, &format!("{path}.body"), tp_mesh, found);
    }
}

/// What is kept or recomputed are results of ops that exist, or of a kind of collective.
fn check_ops(checkpoint: &Checkpoint, at: At) -> Result<(), ModelError> {
    let named = match checkpoint {
        Checkpoint::None | Checkpoint::Full => return Ok(()),
        Checkpoint::Selective(ops) | Checkpoint::Recompute(ops) => ops,
    };
    let known = || {
        let ops = OpKind::ALL.iter().filter(|it| **it != OpKind::Collective);
        ops.map(|it| it.name()).chain(CollectiveKind::NAMES)
    };
    match named.iter().find(|it| !known().any(|op| op == it.as_str())) {
        None => Ok(()),
        Some(it) => {
            let known = known().map(str::to_string).collect();
            let (owner, found) = (Some("op".to_string()), it.clone());
            Err(Problem::UnknownVariant { owner, found, known }.at(at))
        }
    }
}
