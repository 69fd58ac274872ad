//! The training loop: data, schedule and metrics around a [`Session`].

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use ir::plan::{Plan, Role};
use serde::Serialize;

use crate::data::{Data, TokenWidth};
use crate::error::RunError;
use crate::place::Place;
use crate::session::{Session, SessionOptions, StepReport};
use crate::weights::Weights;

/// What `planc run` can be told; what is absent is taken from the plan.
#[derive(Debug, Clone, Default)]
pub struct TrainOptions {
    /// Steps to train.
    pub steps: Option<u64>,
    /// Token files; none for synthetic data.
    pub data: Vec<PathBuf>,
    /// Element type of `.bin` files.
    pub token_width: Option<TokenWidth>,
    /// `.safetensors` files with all parameters; none for initial values.
    pub weights: Vec<PathBuf>,
    /// Where to write a line of JSON a step.
    pub metrics: Option<PathBuf>,
    /// How often [`TrainOptions::logs`] says yes; 0 is as 1.
    pub log_every: u64,
    /// Seed of initial weights, dropout and synthetic data.
    pub seed: Option<u64>,
    /// Where to run.
    pub place: Place,
}

/// One line of `--metrics`. JSON has no NaN: it is `null`.
#[derive(Debug, Clone, Serialize)]
struct Metrics {
    step: u64,
    loss: Option<f64>,
    grad_norm: Option<f64>,
    lr: f64,
    tokens_per_s: f64,
    tokens: u64,
}

/// Inputs that the loop fills.
const INPUTS: [&str; 5] = ["tokens", "labels", "lr", "step", "seed"];

impl TrainOptions {
    /// Whether to report this step: the first, each `log_every`-th, and the last.
    pub fn logs(&self, step: u64, steps: u64) -> bool {
        step == 1 || step == steps || step.is_multiple_of(self.log_every.max(1))
    }

    /// How many steps a plan will be trained.
    pub fn steps(&self, plan: &Plan) -> u64 {
        self.steps.unwrap_or(plan.run.steps)
    }
}

/// Trains a plan and calls `on_step` after every step. The session that it returns has the weights.
pub fn train(
    plan: &Plan,
    options: &TrainOptions,
    mut on_step: impl FnMut(&StepReport),
) -> Result<Session, RunError> {
    let inputs = plan.buffers.values().filter(|it| it.role == Role::Input);
    if let Some(input) = inputs.map(|it| &it.name).find(|it| !INPUTS.contains(&it.as_str())) {
        return Err(RunError::UnknownInput { name: input.clone() });
    }
    check_batch(plan)?;
    let seed = options.seed.unwrap_or(plan.run.seed);
    // Ranks meet first: what goes wrong on one of them then ends all.
    let hosted = options.place.host(plan, &[("seed", seed), ("steps", options.steps(plan))])?;
    let data = match open_data(plan, options, seed) {
        Ok(data) => data,
        Err(error) => return Err(hosted.fail(error)),
    };
    let session = SessionOptions { seed, ..SessionOptions::default() };
    let session = options.place.start(plan, &session, hosted)?;
    match run(&session, &data, options, &mut on_step) {
        Ok(()) => Ok(session),
        Err(error) => Err(session.fail(error)),
    }
}

fn open_data(plan: &Plan, options: &TrainOptions, seed: u64) -> Result<Data, RunError> {
    let data = match options.data.is_empty() {
        true => Data::synthetic(&plan.run, seed),
        false => Data::open(&options.data, &plan.run, options.token_width)?,
    };
    data.check_steps(options.steps(plan))?;
    Ok(data)
}

fn run(
    session: &Session,
    data: &Data,
    options: &TrainOptions,
    on_step: &mut dyn FnMut(&StepReport),
) -> Result<(), RunError> {
    let plan = session.plan();
    if !options.weights.is_empty() {
        session.load_weights(&Weights::open(plan, &options.weights)?)?;
    }
    let metrics = options.metrics.as_deref().filter(|_| session.is_first());
    let mut metrics = metrics.map(MetricsFile::create).transpose()?;
    session.prepare()?;
    for step in 1..=options.steps(plan) {
        let batch = data.batch(step - 1)?;
        let report = session.step(&batch, plan.run.schedule.at(step - 1), step)?;
        if let Some(metrics) = &mut metrics {
            metrics.write(&report)?;
        }
        on_step(&report);
    }
    Ok(())
}

/// Batches of data are what the micro-batches of the program read.
fn check_batch(plan: &Plan) -> Result<(), RunError> {
    let Some(tokens) = plan.buffer("tokens") else { return Ok(()) };
    let read = plan.buffers[tokens].ty.n_elements().checked_mul(plan.micro_batches.into());
    match plan.run.global_batch.checked_mul(plan.run.sequence) {
        Some(batch) if batch > 0 && Some(batch) == read => Ok(()),
        _ => Err(RunError::bad_plan("run", "has another batch than `tokens`")),
    }
}

struct MetricsFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl MetricsFile {
    fn create(path: &Path) -> Result<MetricsFile, RunError> {
        let file = File::create(path).map_err(|it| RunError::write(path, &it))?;
        Ok(MetricsFile { path: path.to_path_buf(), out: BufWriter::new(file) })
    }

    /// Writes a line at once, so that a run that is killed leaves all that it did.
    fn write(&mut self, report: &StepReport) -> Result<(), RunError> {
        let line = Metrics {
            step: report.step,
            loss: report.loss.map(f64::from),
            grad_norm: report.grad_norm.map(f64::from),
            lr: report.lr,
            tokens_per_s: report.tokens_per_s(),
            tokens: report.tokens,
        };
        let fail = |it: std::io::Error| RunError::write(&self.path, &it);
        serde_json::to_writer(&mut self.out, &line).map_err(|it| fail(it.into()))?;
        self.out.write_all(b"\n").map_err(fail)?;
        self.out.flush().map_err(fail)
    }
}
