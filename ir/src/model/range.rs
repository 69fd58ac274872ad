//! Ranges of the numbers in a model, checked before anything is built from them.
//!
//! Every module checks its own in [`ModuleDef::check`](super::modules::ModuleDef::check), with a
//! [`Fields`] that knows where the module is. What depends on other numbers (a width, the mesh) is
//! checked while elaborating.

use super::error::{At, ModelError, Problem};
use super::modules::{Common, Module};
use super::schema::{Batch, Model, ParamOptions, Units};
use crate::graph::{Checkpoint, Init, Optimizer};
use crate::ops::{AdamW, ClipScale, CollectiveKind, OpKind, Sgd};
use crate::quant::{GemmRole, Recipe, RecipeError};
use crate::range::{Ranged, RealRange, number_text};
use crate::run::{Decay, Run, Schedule};

/// No size is larger, so that products of two that fit a tensor can be computed.
pub const MAX_SIZE: u64 = 1 << 40;

/// The most pieces of a sequence; an op that joins them names each with a letter.
const MAX_CHUNKS: u64 = 128;

/// How often a `Repeat` may repeat.
const MAX_REPEAT: u64 = 10_000;

/// Checks all numbers of a model.
pub(super) fn check(model: &Model) -> Result<(), ModelError> {
    let fields = Fields::new("");
    fields.name("name", &model.name)?;
    for (n, axes) in &model.meshes {
        axes.iter().try_for_each(|it| fields.name(&format!("meshes[{n}]"), it))?;
    }
    let batch = match model.batch {
        Batch::Global(it) | Batch::PerReplica(it) => it,
    };
    fields.size("batch", batch)?;
    fields.size("sequence", model.sequence)?;
    fields.size("micro_batches", model.micro_batches.into())?;
    fields.size("steps", model.steps)?;
    if let Units::Layers(n) = model.fsdp.units {
        fields.size("fsdp.units", n.into())?;
    }
    fields.init("init", Some(model.init))?;
    fields.init("output_init", model.output_init)?;
    check_training(model.optimizer.into(), model.clip_norm)?;
    fields.schedule("schedule", &model.schedule)?;
    fields.checkpoint("checkpoint", &model.checkpoint)?;
    fields.recipe("recipe", &model.recipe)?;
    for (pattern, options) in &model.parameters.0 {
        Fields::new(&format!("parameters[\"{pattern}\"]")).options("", options)?;
    }
    fields.modules("layers", &model.layers)
}

/// Checks the numbers of an optimizer and of clipping.
pub(crate) fn check_training(
    optimizer: Optimizer,
    clip_norm: Option<f64>,
) -> Result<(), ModelError> {
    let fields = Fields::new("");
    match optimizer {
        Optimizer::AdamW { betas, eps, weight_decay }
        | Optimizer::Adam { betas, eps, weight_decay } => {
            fields.real("optimizer.betas[0]", betas.0, AdamW::BETA)?;
            fields.real("optimizer.betas[1]", betas.1, AdamW::BETA)?;
            fields.real("optimizer.eps", eps, AdamW::EPS)?;
            fields.real("optimizer.weight_decay", weight_decay, AdamW::WEIGHT_DECAY)?;
        }
        Optimizer::Sgd { momentum, weight_decay } => {
            fields.real("optimizer.momentum", momentum, Sgd::MOMENTUM)?;
            fields.real("optimizer.weight_decay", weight_decay, Sgd::WEIGHT_DECAY)?;
        }
    }
    clip_norm.map_or(Ok(()), |it| fields.real("clip_norm", it, ClipScale::MAX_NORM))
}

/// Checks the numbers that a program has of a run, as a model would have them.
pub(crate) fn check_run(run: &Run) -> Result<(), ModelError> {
    let fields = Fields::new("");
    fields.size("global_batch", run.global_batch)?;
    fields.size("sequence", run.sequence)?;
    fields.size("steps", run.steps)?;
    fields.size("vocab", run.vocab)?;
    fields.schedule("schedule", &run.schedule)
}

/// The fields of the model, or of one module.
pub struct Fields {
    path: String,
}

impl Fields {
    /// Those of what is at `path`.
    pub fn new(path: &str) -> Fields {
        Fields { path: path.to_string() }
    }

    /// Those of the module that is this field.
    pub fn of(&self, field: &str) -> Fields {
        Fields { path: self.join(field) }
    }

    fn join(&self, field: &str) -> String {
        let dot = if self.path.is_empty() || field.is_empty() { "" } else { "." };
        format!("{}{dot}{field}", self.path)
    }

    /// Checks a list of modules.
    pub fn modules(&self, field: &str, modules: &[Module]) -> Result<(), ModelError> {
        let modules = modules.iter().enumerate();
        modules
            .into_iter()
            .try_for_each(|(i, it)| it.def().check(&self.of(&format!("{field}[{i}]"))))
    }

    /// An error unless `ok`.
    pub fn require(
        &self,
        ok: bool,
        field: &str,
        found: impl ToString,
        expected: &str,
    ) -> Result<(), ModelError> {
        if ok {
            return Ok(());
        }
        let (found, expected) = (found.to_string(), expected.to_string());
        let problem = Problem::Range { field: field.to_string(), found, expected };
        Err(problem.at(At::Path(self.join(field))))
    }

    /// A size: at least 1.
    pub fn size(&self, field: &str, value: u64) -> Result<(), ModelError> {
        self.require(value > 0, field, value, "at least 1")?;
        self.require(value <= MAX_SIZE, field, value, "at most 2^40")
    }

    /// A size that may be left out.
    pub fn optional_size(&self, field: &str, value: Option<u64>) -> Result<(), ModelError> {
        value.map_or(Ok(()), |it| self.size(field, it))
    }

    /// How often something is repeated.
    pub fn repeats(&self, field: &str, value: u64) -> Result<(), ModelError> {
        self.require((1..=MAX_REPEAT).contains(&value), field, value, "from 1 to 10000")
    }

    /// Pieces in which something is made.
    pub fn chunks(&self, field: &str, value: u64) -> Result<(), ModelError> {
        self.require((1..=MAX_CHUNKS).contains(&value), field, value, "from 1 to 128")
    }

    /// A real number in its range.
    pub fn real(&self, field: &str, value: f64, range: RealRange) -> Result<(), ModelError> {
        match range.missed_by(value) {
            None => Ok(()),
            Some(expected) => self.require(false, field, number_text(value), &expected),
        }
    }

    /// Real numbers of what is this field, each in its range.
    pub fn numbers(&self, field: &str, numbers: &[Ranged]) -> Result<(), ModelError> {
        numbers
            .iter()
            .try_for_each(|it| self.real(&format!("{field}.{}", it.name), it.value, it.range))
    }

    /// A name that the model declares.
    pub fn name(&self, field: &str, name: &str) -> Result<(), ModelError> {
        let ok = !name.chars().any(|it| it.is_control() || is_invisible(it));
        self.require(ok, field, format!("{name:?}"), "without control or invisible characters")
    }

    /// Checks the options that modules of every kind have.
    pub(super) fn common(&self, common: Common<'_>) -> Result<(), ModelError> {
        self.name("name", common.name)?;
        let paths = &common.names.0;
        paths.iter().try_for_each(|(key, path)| self.name(&format!("names[\"{key}\"]"), path))
    }

    /// Returns an error if a part of a module sets one of these fields, which the part does not read.
    pub(super) fn no_effect(&self, fields: &[(&str, bool)], why: &str) -> Result<(), ModelError> {
        match fields.iter().find(|it| it.1) {
            None => Ok(()),
            Some((field, _)) => {
                let at = At::Path(self.join(field));
                let (field, why) = (field.to_string(), why.to_string());
                Err(Problem::NoEffect { field, why }.at(at))
            }
        }
    }

    /// Checks that a policy of activation checkpointing lists ops that exist, or kinds of collectives.
    pub(super) fn checkpoint(
        &self,
        field: &str,
        checkpoint: &Checkpoint,
    ) -> Result<(), ModelError> {
        let known = || {
            let ops = OpKind::ALL.iter().filter(|it| **it != OpKind::Collective);
            ops.map(|it| it.name()).chain(CollectiveKind::ALL.map(CollectiveKind::name))
        };
        let listed = checkpoint.listed();
        let Some(found) = listed.iter().find(|it| !known().any(|op| op == it.as_str())) else {
            return Ok(());
        };
        let known = known().map(str::to_string).collect();
        let (owner, found) = (Some("op".to_string()), found.clone());
        let problem = Problem::UnknownVariant { owner, found, known };
        Err(problem.at(At::Path(self.join(field))))
    }

    /// Checks the numbers of an init.
    pub fn init(&self, field: &str, init: Option<Init>) -> Result<(), ModelError> {
        init.map_or(Ok(()), |it| self.numbers(field, &it.numbers()))
    }

    /// The learning rate over steps.
    fn schedule(&self, field: &str, schedule: &Schedule) -> Result<(), ModelError> {
        self.real(&format!("{field}.lr"), schedule.lr, RealRange::NotNegative)?;
        match schedule.decay {
            Decay::Constant => Ok(()),
            Decay::Linear { until, min } | Decay::Cosine { until, min } => {
                self.real(&format!("{field}.decay.min"), min, RealRange::NotNegative)?;
                let warmup = schedule.warmup;
                let expected = format!("more than warmup, which is {warmup}");
                self.require(until > warmup, &format!("{field}.decay.until"), until, &expected)
            }
        }
    }

    /// How GEMMs are quantized.
    pub fn recipe(&self, field: &str, recipe: &Recipe) -> Result<(), ModelError> {
        let fail = |it: RecipeError| {
            let field = format!("{field}.{}", it.field);
            let at = At::Path(self.join(&field));
            Problem::Range { field, found: it.found, expected: it.expected }.at(at)
        };
        recipe.check().map_err(fail)?;
        let both = |it: &GemmRole| it.operands().iter().all(|it| recipe.spec(*it).is_some());
        let is_idle = *recipe != Recipe::Bf16 && !GemmRole::ALL.iter().any(both);
        let why = "a GEMM is quantized if both its operands are, such as `input` and `weight`";
        self.no_effect(&[(field, is_idle)], why)
    }

    /// Options of a parameter.
    pub fn options(&self, field: &str, options: &ParamOptions) -> Result<(), ModelError> {
        let dot = if field.is_empty() { "" } else { "." };
        self.init(&format!("{field}{dot}init"), options.init)
    }
}

/// Characters that change how the text around them is shown: zero-width ones and those that turn its direction.
fn is_invisible(it: char) -> bool {
    matches!(it, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The error of a tensor that is too large.
pub(super) fn too_large(name: &str, shape: &[u64]) -> Problem {
    Problem::Range {
        field: format!("the shape of `{name}`"),
        found: format!("{shape:?}"),
        expected: "one of at most 2^46 elements".to_string(),
    }
}
