//! `planc run`: trains a plan.

mod checkpoint;
mod compare;

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ir::plan::Plan;
use runtime::{
    Event, LoadReport, Place, RunError, SaveReport, StepReport, TokenWidth, TrainOptions,
};
use serde_json::json;

use crate::ckpt::clean;
use crate::input::{self, PlanArgs};
use crate::place::PlaceArgs;
use crate::report::{Failure, Format, Outcome, Ui, print_aside, print_progress};
use crate::table::{grouped, plural, short};
use crate::words::mesh_text;

/// Trains a plan; a model is compiled first.
///
/// Without `--data` it trains on generated tokens, without `--weights` it starts from random
/// weights; both depend on the seed and not on the mesh. Every rank is a thread, or a process that
/// torchrun or Slurm started.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,
    /// Train up to this step, counted from the beginning also after --load; by default those of the model.
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Token files: .bin, .safetensors with a tensor `tokens`, or text read as bytes.
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
    /// Print every K-th step, besides the first and the last.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    /// Seed of weights, dropout and generated data; by default that of the checkpoint or the model.
    #[arg(long)]
    seed: Option<u64>,
    /// Run every instruction on the CPU too, and name the first that differs. Slow.
    #[arg(long, value_enum, value_name = "DEVICE")]
    compare: Option<Reference>,
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

/// What `--compare` compares with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Reference {
    /// The CPU.
    Cpu,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    if args.steps == Some(0) {
        return Err(Failure::new("PL0609", "`--steps 0` trains nothing")
            .help("give at least 1, or leave it out for the model's own number of steps"));
    }
    if args.compare.is_some() && !args.place.is_cuda() {
        return Err(Failure::new("PL0609", "`--compare cpu` compares the CPU with itself")
            .help("add `--device cuda`"));
    }
    let plan = args.plan.plan()?;
    let (report, comparisons) = channel();
    let compare = args.compare.map(|Reference::Cpu| report);
    let place = args.place.place(compare).map_err(|it| failure(&it, &args.plan.input))?;
    let speaks = place.launch.is_first();
    let options = args.options(place);
    // Other processes say what goes wrong, and nothing else.
    let quiet = Ui { quiet: ui.quiet || !speaks, ..*ui };
    let mut log = Log::new(&plan, args, &options, &quiet);
    log.heard = speaks;
    let result = runtime::train(&plan, &options, |it| log.event(&it));
    log.bar.finish_and_clear();
    result.map_err(|it| failure(&it, &args.plan.input))?;
    log.end();
    // The session is gone, and with it all that could send more.
    drop(options);
    if args.compare.is_some() { compare::report(&plan, &comparisons, ui) } else { Ok(()) }
}

impl Args {
    fn options(&self, place: Place) -> TrainOptions {
        TrainOptions {
            steps: self.steps,
            data: self.data.clone(),
            token_width: self.token_type.map(|it| match it {
                TokenType::U8 => TokenWidth::U8,
                TokenType::U16 => TokenWidth::U16,
                TokenType::U32 => TokenWidth::U32,
            }),
            weights: self.weights.clone(),
            metrics: self.metrics.clone(),
            log_every: self.log_every,
            seed: self.seed,
            save: self.checkpoint.save(),
            load: self.checkpoint.load(),
            resume: self.checkpoint.resume(),
            place,
        }
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
    // What would fix it is the last part of the message.
    match message.rsplit_once("; ") {
        Some((what, fix)) => Failure::new(error.code(), what).help(fix),
        None => Failure::new(error.code(), message),
    }
}

/// What the user sees of a run: a bar on stderr if that is a terminal, steps on stdout.
struct Log<'a> {
    ui: &'a Ui,
    options: &'a TrainOptions,
    steps: u64,
    bar: ProgressBar,
    /// Printed with the first step, so that a run that cannot start prints no results.
    title: String,
    /// Steps that were done before.
    start: u64,
    began: Instant,
    /// Somebody reads stdout; training goes on without.
    heard: bool,
    /// A loss that is no number was reported.
    warned: bool,
    first: Option<StepReport>,
    last: Option<StepReport>,
    tokens: u64,
    busy: Duration,
}

impl<'a> Log<'a> {
    fn new(plan: &Plan, args: &Args, options: &'a TrainOptions, ui: &'a Ui) -> Log<'a> {
        let steps = options.steps(plan);
        let bar = if ui.quiet { ProgressBar::hidden() } else { ProgressBar::new(steps) };
        let style = "{bar:24} {pos}/{len} steps, {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Log {
            ui,
            options,
            steps,
            bar,
            title: title(plan, args),
            start: 0,
            began: Instant::now(),
            heard: true,
            warned: false,
            first: None,
            last: None,
            tokens: 0,
            busy: Duration::ZERO,
        }
    }

    fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Loaded(report) => self.loaded(report),
            Event::Step(report) => self.step(report),
            Event::Saved(report) => self.saved(report),
            Event::Warning(text) => self.warn(&clean(text)),
        }
    }

    fn loaded(&mut self, report: &LoadReport) {
        self.start = report.step;
        self.bar.set_position(report.step.min(self.steps));
        match self.ui.format {
            Format::Text => self.title.push_str(&checkpoint::loaded_text(report)),
            Format::Json if self.ui.quiet => (),
            Format::Json => self.say(&format!("{}\n", checkpoint::loaded_json(report))),
        }
    }

    fn saved(&mut self, report: &SaveReport) {
        if !self.ui.quiet {
            let line = match self.ui.format {
                Format::Text => checkpoint::saved_text(report),
                Format::Json => format!("{}\n", checkpoint::saved_json(report)),
            };
            self.say(&line);
        }
    }

    fn warn(&self, warning: &str) {
        let text = match self.ui.format {
            Format::Text => format!("warning: {warning}\n"),
            Format::Json => format!("{}\n", json!({ "warning": warning })),
        };
        self.bar.suspend(|| print_aside(&text));
    }

    fn step(&mut self, report: &StepReport) {
        self.bar.set_message(report.loss.map_or(String::new(), |it| format!("loss {it:.4}")));
        self.bar.inc(1);
        self.tokens += report.tokens;
        self.busy += Duration::from_secs_f64(report.seconds);
        let logged = self.first.is_none() || self.options.logs(report.step, self.steps);
        if logged && !self.ui.quiet {
            let line = match self.ui.format {
                Format::Text if self.first.is_none() => self.title.clone() + &step_text(report),
                Format::Text => step_text(report),
                Format::Json => format!("{}\n", step_json(report)),
            };
            self.say(&line);
        }
        let mut warnings = report.warnings.clone();
        if let Some(loss) = report.loss.filter(|it| !it.is_finite() && !self.warned) {
            self.warned = true;
            warnings.push(format!("loss is {loss} at step {}", report.step));
        }
        warnings.iter().for_each(|it| self.warn(it));
        self.first.get_or_insert_with(|| report.clone());
        self.last = Some(report.clone());
    }

    fn say(&mut self, text: &str) {
        if self.heard {
            self.heard = self.bar.suspend(|| print_progress(text));
        }
    }

    fn end(&mut self) {
        let (Some(first), Some(last)) = (&self.first, &self.last) else {
            if self.ui.format == Format::Text && !self.ui.quiet {
                self.say(&self.title.clone());
            }
            return;
        };
        let seconds = self.began.elapsed().as_secs_f64();
        let tps = self.tokens as f64 / self.busy.as_secs_f64().max(1e-9);
        if self.ui.format == Format::Json {
            let summary = json!({
                "steps": last.step,
                "seconds": seconds,
                "first_loss": first.loss,
                "loss": last.loss,
                "tokens": self.tokens,
                "tokens_per_s": tps,
            });
            return self.say(&format!("{}\n", json!({ "summary": summary })));
        }
        let loss = match (first.loss, last.loss) {
            (Some(a), Some(b)) => format!(", loss {a:.4} -> {b:.4}"),
            _ => String::new(),
        };
        let steps = plural(last.step - self.start, "step");
        let tps = grouped(tps as u64);
        self.say(&format!("trained {steps} in {seconds:.1} s{loss}, {tps} tokens/s\n"));
    }
}

fn title(plan: &Plan, args: &Args) -> String {
    let parameters: u64 =
        plan.params.iter().map(|it| plan.buffers[it.buffer].ty.n_elements()).sum();
    let list = |files: &[PathBuf], none: &str| match files {
        [] => none.to_string(),
        [file] => file.display().to_string(),
        files => format!("{} files", files.len()),
    };
    format!(
        "{} on {}, {} parameters\nweights: {}; data: {}\n",
        plan.name,
        mesh_text(&plan.mesh),
        short(parameters),
        match args.checkpoint.weights() {
            Some(folder) => folder.display().to_string(),
            None => list(&args.weights, "random"),
        },
        list(&args.data, "generated"),
    )
}

/// `step:  10  loss: 4.2344  grad_norm: 2.2000  lr: 1.0e-3  tps: 27,483`.
fn step_text(report: &StepReport) -> String {
    let mut res = format!("step: {:>3}", report.step);
    if let Some(loss) = report.loss {
        res.push_str(&format!("  loss: {loss:7.4}"));
    }
    if let Some(norm) = report.grad_norm {
        res.push_str(&format!("  grad_norm: {norm:7.4}"));
    }
    res.push_str(&format!("  lr: {:.2e}", report.lr));
    res.push_str(&format!("  tps: {}\n", grouped(report.tokens_per_s() as u64)));
    res
}

fn step_json(report: &StepReport) -> serde_json::Value {
    json!({
        "step": report.step,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "tokens_per_s": report.tokens_per_s(),
        "tokens": report.tokens,
    })
}
