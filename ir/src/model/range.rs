//! Ranges of the numbers in a model, checked before anything is built from them.
//!
//! Every module checks its own in [`ModuleDef::check`](super::modules::ModuleDef::check), with a
//! [`Fields`] that knows where the module is. What depends on other numbers (a width, the mesh) is
//! checked while elaborating.

use super::error::{At, ModelError, Problem};
use super::modules::Module;
use super::schema::{Batch, Model, OptimizerSpec, ParamOptions, Units};
use crate::graph::Init;
use crate::quant::{Recipe, RecipeError};
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
    match model.optimizer {
        OptimizerSpec::AdamW { betas, eps, weight_decay }
        | OptimizerSpec::Adam { betas, eps, weight_decay } => {
            fields.fraction("optimizer.betas[0]", betas.0)?;
            fields.fraction("optimizer.betas[1]", betas.1)?;
            fields.positive("optimizer.eps", eps)?;
            fields.not_negative("optimizer.weight_decay", weight_decay)?;
        }
        OptimizerSpec::Sgd { momentum, weight_decay } => {
            fields.fraction("optimizer.momentum", momentum)?;
            fields.not_negative("optimizer.weight_decay", weight_decay)?;
        }
    }
    fields.schedule("schedule", &model.schedule)?;
    if let Some(it) = model.clip_norm {
        fields.positive("clip_norm", it)?;
    }
    fields.recipe("recipe", &model.recipe)?;
    for (pattern, options) in &model.parameters.0 {
        Fields::new(&format!("parameters[\"{pattern}\"]")).options("", options)?;
    }
    fields.modules("layers", &model.layers)
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

    fn number(&self, ok: bool, field: &str, value: f64, expected: &str) -> Result<(), ModelError> {
        self.require(ok, field, number_text(value), expected)
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

    /// Any real number.
    pub fn finite(&self, field: &str, value: f64) -> Result<(), ModelError> {
        self.number(value.is_finite(), field, value, "finite")
    }

    /// A number above 0.
    pub fn positive(&self, field: &str, value: f64) -> Result<(), ModelError> {
        self.number(value.is_finite() && value > 0.0, field, value, "more than 0 and finite")
    }

    /// A number from 0 on.
    pub fn not_negative(&self, field: &str, value: f64) -> Result<(), ModelError> {
        self.number(value.is_finite() && value >= 0.0, field, value, "at least 0 and finite")
    }

    /// A probability or a rate that leaves something.
    pub fn fraction(&self, field: &str, value: f64) -> Result<(), ModelError> {
        self.number((0.0..1.0).contains(&value), field, value, "at least 0 and below 1")
    }

    /// How a parameter starts.
    pub fn init(&self, field: &str, init: Option<Init>) -> Result<(), ModelError> {
        match init {
            None | Some(Init::Zeros | Init::Ones) => Ok(()),
            Some(Init::Normal { mean, std }) => {
                self.finite(&format!("{field}.mean"), mean)?;
                self.not_negative(&format!("{field}.std"), std)
            }
            Some(Init::Uniform { low, high }) => {
                self.finite(&format!("{field}.low"), low)?;
                self.finite(&format!("{field}.high"), high)?;
                let expected = format!("more than low, which is {low}");
                self.number(low < high, &format!("{field}.high"), high, &expected)
            }
        }
    }

    /// The learning rate over steps.
    fn schedule(&self, field: &str, schedule: &Schedule) -> Result<(), ModelError> {
        self.not_negative(&format!("{field}.lr"), schedule.lr)?;
        match schedule.decay {
            Decay::Constant => Ok(()),
            Decay::Linear { until, min } | Decay::Cosine { until, min } => {
                self.not_negative(&format!("{field}.decay.min"), min)?;
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
        recipe.check().map_err(fail)
    }

    /// Options of a parameter.
    pub fn options(&self, field: &str, options: &ParamOptions) -> Result<(), ModelError> {
        let dot = if field.is_empty() { "" } else { "." };
        self.init(&format!("{field}{dot}init"), options.init)
    }
}

/// `1`, `0.5`, `1e21`.
pub(crate) fn number_text(value: f64) -> String {
    let text = format!("{value:?}");
    text.strip_suffix(".0").unwrap_or(&text).to_string()
}

/// The error of a tensor that is too large.
pub(super) fn too_large(name: &str, shape: &[u64]) -> Problem {
    Problem::Range {
        field: format!("the shape of `{name}`"),
        found: format!("{shape:?}"),
        expected: "one of at most 2^46 elements".to_string(),
    }
}
