//! `planc run`: trains a plan.

mod checkpoint;
mod compare;
mod log;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;

use ::checkpoint::CheckpointError;
use ir::plan::Plan;
use runtime::{OnNonfinite, Place, RunError, Signals, TokenWidth, TraceOptions, TrainOptions};

use crate::controls::clean;
use crate::input::{self, PlanArgs};
use crate::lint;
use crate::output::{self, ForceArgs, Output, is_same_file};
use crate::place::{self, PlaceArgs};
use crate::report::{Failure, Format, Outcome, Ui};
use crate::target;

use log::{Log, Sources, files};

/// Trains a plan; a model is compiled first.
///
/// Without `--data` a run that starts trains on generated tokens, without `--weights` it starts from random
/// weights; both depend on the seed and not on the mesh. Every rank is a thread, or a process that
/// torchrun or Slurm started.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,
    /// Train up to this step, counted from the beginning also after --load; by default those of the model.
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Token files: .bin, .safetensors with a tensor `tokens`, or text read as bytes. After --load or --resume, by
    /// default the files of the checkpoint.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Element type of .bin files; by default u16, or u32 where the vocabulary needs it.
    #[arg(long, value_enum, value_name = "TYPE")]
    token_type: Option<TokenType>,
    /// Initial weights by parameter name.
    #[arg(long, value_name = "FILE.safetensors", num_args = 1.., conflicts_with = "load")]
    weights: Vec<PathBuf>,
    /// Write one line of JSON a step; after --load, behind those that are there.
    #[arg(long, value_name = "FILE.jsonl")]
    metrics: Option<PathBuf>,
    /// Write event files for TensorBoard into this folder; after --load, a new one that goes on.
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
    /// The log on stdout for people or for programs, an object a line; by default as --format.
    #[arg(long, value_enum)]
    log_format: Option<Format>,
    #[command(flatten)]
    force: ForceArgs,
    /// Write when each instruction ran, beside when it was predicted to, for Perfetto (ui.perfetto.dev).
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// The steps to trace, as in 5 or 5..7; by default the last.
    #[arg(long, value_name = "A..B", requires = "trace", value_parser = steps)]
    trace_steps: Option<RangeInclusive<u64>>,
    /// The machine of the predicted timeline: a name or a profile, as of `planc compile --target`.
    #[arg(long, value_name = "NAME|FILE.ron", requires = "trace")]
    target: Option<String>,
    /// Print every K-th step, besides the first and the last.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    /// Seed of weights, dropout and generated data; by default that of the checkpoint or the model.
    #[arg(long)]
    seed: Option<u64>,
    /// Run every instruction on the CPU too, and name the first that differs. Slow.
    #[arg(long, value_enum, value_name = "DEVICE")]
    compare: Option<Reference>,
    /// What to do with a step whose loss, or norm of gradients, is not finite. It changes no weight in any case.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = NonfiniteArg::Skip)]
    on_nonfinite: NonfiniteArg,
    /// Stop after more than N such steps in a row.
    #[arg(long, value_name = "N", default_value_t = OnNonfinite::MAX)]
    max_nonfinite: u64,
    #[command(flatten)]
    checkpoint: checkpoint::CheckpointArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TokenType {
    U8,
    U16,
    U32,
}

/// The reaction to a step that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum NonfiniteArg {
    /// Go on with the next batch.
    Skip,
    /// Stop at the first.
    Stop,
}

/// What `--compare` compares with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Reference {
    /// The CPU.
    Cpu,
}

/// Runs the command. A run that a signal ended has the exit code that shells give the signal.
pub fn run(args: &Args, ui: &Ui) -> Outcome<ExitCode> {
    if args.steps == Some(0) {
        return Err(Failure::new("PL0609", "`--steps 0` trains nothing")
            .help("give at least 1, or leave it out for the model's own number of steps"));
    }
    if args.compare.is_some() && !args.place.is_cuda() {
        return Err(Failure::new("PL0609", "`--compare cpu` compares the CPU with itself")
            .help("add `--device cuda`"));
    }
    let (report, comparisons) = channel();
    let compare = args.compare.map(|Reference::Cpu| report);
    let place = args.place.place(compare, ui).map_err(|it| failure(&it, &args.plan.input))?;
    let speaks = place.launch.is_first();
    // Rank 0 writes. Other processes may find its files there, in part.
    if speaks {
        place::told(args.check_outputs(), &place)?;
    }
    let plan = place::plan(&args.plan, &place, ui)?;
    if speaks && !ui.quiet {
        lint::tell_repeated(&plan, ui);
    }
    let options = args.options(&plan, place, ui)?;
    // Other processes say what goes wrong, and nothing else.
    let quiet = Ui { quiet: ui.quiet || !speaks, ..*ui };
    let mut log = Log::new(&plan, &options, args.sources(), (&quiet, args.log_format(ui)), speaks);
    let result = runtime::train(&plan, &options, |it| log.event(&it));
    match result {
        Ok(_) => log.end(),
        Err(error) => {
            log.failed(&error);
            return Err(failure(&error, &args.plan.input));
        }
    }
    let stop = log.stop();
    // The session is gone, and with it all that could send more.
    drop(options);
    if args.compare.is_some() {
        compare::report(&plan, &comparisons, speaks.then_some(ui.format))?;
    }
    Ok(stop.map_or(ExitCode::SUCCESS, |it| ExitCode::from(128 + it.signal)))
}

/// Steps `A..B`, both included, or one.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let number = |it: &str| it.trim().parse::<u64>().map_err(|_| format!("`{it}` is no step"));
    match (number(first)?, number(last)?) {
        (0, _) => Err("steps count from 1".to_string()),
        (first, last) if first > last => Err(format!("{first} is behind {last}")),
        (first, last) => Ok(first..=last),
    }
}

impl Args {
    /// Refuses files to write that are read, that are one file, or that planc did not write.
    fn check_outputs(&self) -> Outcome {
        let target = self.target.as_ref().map(PathBuf::from);
        let inputs = || {
            let files = std::iter::once(&self.plan.input).chain(&self.data).chain(&self.weights);
            files.chain(&target).map(PathBuf::as_path)
        };
        let file = |flag, path, format| Output { flag, path, format, force: self.force.force };
        if let Some(path) = &self.trace {
            file("--trace", path, output::Format::Trace).check(inputs())?;
        }
        if let Some(path) = &self.metrics {
            file("--metrics", path, output::Format::Metrics).check(inputs())?;
        }
        match (&self.trace, &self.metrics) {
            (Some(trace), Some(metrics)) if is_same_file(trace, metrics) => {
                let message = format!("`--trace` and `--metrics` both name `{}`", trace.display());
                Err(Failure::new("PL0613", message).help("name two files"))
            }
            _ => Ok(()),
        }
    }

    fn options(&self, plan: &Plan, place: Place, ui: &Ui) -> Outcome<TrainOptions> {
        let signals = Signals::install().map_err(|it| {
            Failure::new("PL0601", format!("cannot take signals over: {}", input::reason(&it)))
        })?;
        Ok(TrainOptions {
            steps: self.steps,
            data: self.data.clone(),
            token_width: self.token_type.map(|it| match it {
                TokenType::U8 => TokenWidth::U8,
                TokenType::U16 => TokenWidth::U16,
                TokenType::U32 => TokenWidth::U32,
            }),
            change_data: self.checkpoint.change_data(),
            weights: self.weights.clone(),
            metrics: self.metrics.clone(),
            tensorboard: self.tensorboard.clone(),
            trace: self.trace(plan)?,
            log_every: self.log_every,
            memory: self.log_format(ui) == Format::Json,
            seed: self.seed,
            on_nonfinite: match self.on_nonfinite {
                NonfiniteArg::Skip => OnNonfinite::Skip(self.max_nonfinite),
                NonfiniteArg::Stop => OnNonfinite::Stop,
            },
            save: self.checkpoint.save(),
            load: self.checkpoint.load(),
            resume: self.checkpoint.resume(),
            signals: Some(Arc::new(signals)),
            place,
        })
    }

    fn trace(&self, plan: &Plan) -> Outcome<Option<TraceOptions>> {
        let Some(path) = self.trace.clone() else { return Ok(None) };
        // What plans for GPUs are measured on most.
        let default = if self.place.is_cuda() { "h200" } else { "cpu" };
        let target = target::load(self.target.as_deref().unwrap_or(default))?;
        target::Prediction::of(plan, &target)?;
        Ok(Some(TraceOptions { path, steps: self.trace_steps.clone(), target }))
    }

    fn sources(&self) -> Sources {
        let weights = match self.checkpoint.weights() {
            Some(folder) => folder.display().to_string(),
            None => files(&self.weights, "random"),
        };
        Sources { weights, data: files(&self.data, "generated") }
    }

    fn log_format(&self, ui: &Ui) -> Format {
        self.log_format.unwrap_or(ui.format)
    }
}

/// Returns true if a file of a checkpoint could not be written.
fn is_of_writing(error: &RunError) -> bool {
    match error {
        RunError::Checkpoint(it) => {
            matches!(&**it, CheckpointError::Io { what, .. } if *what != "read")
        }
        // The rank may be of another process, from which only text comes.
        RunError::NotSaved { why, .. } => {
            why.starts_with("cannot ") && !why.starts_with("cannot read")
        }
        _ => false,
    }
}

/// An error of the runtime, as the user sees it.
pub fn failure(error: &RunError, input: &Path) -> Box<Failure> {
    if error.is_bug() {
        return Failure::bug(format!("{error} [{}], running {}", error.code(), input.display()));
    }
    if let RunError::Io { doing, path, why } = error {
        let message = format!("cannot {doing} `{}`: {}", path.display(), input::reason(why));
        return Failure::new(error.code(), message);
    }
    // Keys are text out of files.
    let lines: Vec<String> = error.to_string().lines().map(clean).collect();
    let message = input::without_errno(&lines.join("\n"));
    if is_of_writing(error) {
        return Failure::new(error.code(), message).help(crate::ckpt::WRITING);
    }
    // What would fix it is the last part of the message.
    match message.rsplit_once("; ") {
        Some((what, fix)) => Failure::new(error.code(), what).help(fix),
        None => Failure::new(error.code(), message),
    }
}
