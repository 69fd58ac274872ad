//! What the user sees of a run: a bar on stderr if that is a terminal, and a log on stdout, for people or, with
//! `--log-format json`, an object a line.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ir::plan::Plan;
use runtime::signals::signal_name;
use runtime::{
    Event, LoadReport, RunError, SaveReport, Skip, StepLine, StepReport, Stop, TrainOptions,
};
use serde::Serialize;

use crate::controls::clean;
use crate::report::{Format, Ui, print_aside, print_progress, warning};
use crate::table::{bytes, grouped, plural, short};
use crate::words::mesh_text;

/// A line of the log. Fields keep their names and meanings; there may be more of them later.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line<'a> {
    /// Before the first other line.
    Start {
        plan: &'a str,
        mesh: &'a str,
        ranks: u64,
        parameters: u64,
        steps: u64,
        weights: &'a str,
        data: &'a str,
    },
    Step(StepLine),
    /// Training goes on behind `step`.
    Loaded {
        path: String,
        step: u64,
        seed: u64,
        bytes: u64,
        extra_memory: u64,
        seconds: f64,
    },
    /// Training goes on from an older step than some that were saved.
    RolledBack {
        steps: &'a [u64],
    },
    Saved {
        path: String,
        bytes: u64,
        seconds: f64,
        waited: f64,
    },
    /// A signal has ended the run.
    Stopped {
        signal: &'a str,
        step: u64,
        saved: bool,
    },
    Warning {
        message: &'a str,
    },
    /// The run ended early. Why is on stderr, too.
    Error {
        code: &'a str,
        message: &'a str,
    },
    /// The run is over.
    Summary {
        steps: u64,
        skipped_nonfinite: u64,
        skipped_no_labels: u64,
        seconds: f64,
        first_loss: Option<f64>,
        loss: Option<f64>,
        tokens: u64,
        tokens_per_s: f64,
    },
}

/// What a run starts from.
#[derive(Debug)]
pub struct Sources {
    /// A checkpoint, a file, or `random`.
    pub weights: String,
    /// A file, or `generated`.
    pub data: String,
}

/// See the [module docs](self).
pub struct Log<'a> {
    ui: &'a Ui,
    format: Format,
    plan: &'a Plan,
    options: &'a TrainOptions,
    sources: Sources,
    steps: u64,
    bar: ProgressBar,
    /// Printed before the first line of a run that has started, so that one that cannot prints no results.
    title: Option<String>,
    /// Steps that were done before.
    start: u64,
    began: Instant,
    /// Somebody reads stdout; training goes on without.
    heard: bool,
    /// Steps that were skipped since they were not finite, and since no label of them counted.
    skipped: [u64; 2],
    /// A signal has ended the run.
    stop: Option<Stop>,
    first: Option<StepReport>,
    last: Option<StepReport>,
    tokens: u64,
    busy: Duration,
}

impl<'a> Log<'a> {
    /// The log of a run; `speaks` if this process is the one that says what goes on.
    pub fn new(
        plan: &'a Plan,
        options: &'a TrainOptions,
        sources: Sources,
        (ui, format): (&'a Ui, Format),
        speaks: bool,
    ) -> Log<'a> {
        let steps = options.steps(plan);
        let bar = if ui.quiet { ProgressBar::hidden() } else { ProgressBar::new(steps) };
        let style = "{bar:24} {pos}/{len} steps, {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        let mut res = Log {
            ui,
            format,
            plan,
            options,
            sources,
            steps,
            bar,
            title: None,
            start: 0,
            began: Instant::now(),
            heard: speaks,
            skipped: [0; 2],
            stop: None,
            first: None,
            last: None,
            tokens: 0,
            busy: Duration::ZERO,
        };
        res.title = Some(res.title());
        res
    }

    /// What happened.
    pub fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Data(paths) => {
                self.sources.data = files(paths, "generated");
                self.title = self.title.as_ref().map(|_| self.title());
            }
            Event::Loaded(report) => self.loaded(report),
            Event::RolledBack(steps) => self.rolled_back(steps),
            Event::Step(report) => self.step(report),
            Event::Saved(report) => self.saved(report),
            Event::Stopped(stop) => self.stopped(*stop),
            Event::Warning(text) => self.warn(&clean(text)),
        }
    }

    fn loaded(&mut self, report: &LoadReport) {
        self.start = report.step;
        self.bar.set_position(report.step.min(self.steps));
        let line = Line::Loaded {
            path: report.path.display().to_string(),
            step: report.step,
            seed: report.seed,
            bytes: report.bytes,
            extra_memory: report.extra_memory,
            seconds: report.seconds,
        };
        self.say(&line, || loaded_text(report));
    }

    fn rolled_back(&mut self, steps: &[u64]) {
        let text = || {
            let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
            let steps = steps.join(", ");
            format!(
                "goes on from an older step: checkpoints of {steps} go once there is a new one\n"
            )
        };
        self.say(&Line::RolledBack { steps }, text);
    }

    fn saved(&mut self, report: &SaveReport) {
        let line = Line::Saved {
            path: report.path.display().to_string(),
            bytes: report.bytes,
            seconds: report.seconds,
            waited: report.waited.as_secs_f64(),
        };
        self.say(&line, || saved_text(report));
    }

    fn stopped(&mut self, stop: Stop) {
        self.stop = Some(stop);
        let Stop { signal, step, saved } = stop;
        let signal = signal_name(signal);
        let steps = self.steps;
        let saved_text = if saved { "saved" } else { "not saved, as there is no `--save`" };
        let text =
            || format!("{signal}: stopped after step {step} of {steps}, which is {saved_text}\n");
        self.say(&Line::Stopped { signal, step, saved }, text);
    }

    /// The signal that has ended the run before its last step, if one has.
    pub fn stop(&self) -> Option<Stop> {
        self.stop
    }

    fn warn(&mut self, message: &str) {
        // What is quiet still warns; who reads a log in JSON finds warnings in it.
        if self.format == Format::Json && !self.ui.quiet {
            return self.say(&Line::Warning { message }, String::new);
        }
        self.bar.suspend(|| print_aside(&warning(self.ui, None, message)));
    }

    fn step(&mut self, report: &StepReport) {
        self.bar.set_message(report.loss.map_or(String::new(), |it| format!("loss {it:.4}")));
        self.bar.inc(1);
        self.tokens += report.tokens;
        self.busy += Duration::from_secs_f64(report.seconds);
        if self.first.is_none() || self.options.logs(report.step, self.steps) {
            self.say(&Line::Step(StepLine::of(report)), || step_text(report));
        }
        let mut warnings = report.warnings.clone();
        if let Some(skip) = report.skipped {
            let (count, why) = match skip {
                Skip::Nonfinite => (0, "the loss or the norm of the gradients is not finite"),
                Skip::NoLabels => (1, "no label of its batch counts"),
            };
            self.skipped[count] += 1;
            // The summary has their number.
            if self.skipped[count] == 1 {
                warnings.push(format!("step {} is skipped: {why}", report.step));
            }
        }
        warnings.iter().for_each(|it| self.warn(it));
        self.first.get_or_insert_with(|| report.clone());
        self.last = Some(report.clone());
    }

    /// The run ended early.
    pub fn failed(&mut self, error: &RunError) {
        self.bar.finish_and_clear();
        if self.format == Format::Json && self.title.is_none() {
            let message = error.to_string();
            self.say(&Line::Error { code: error.code(), message: &message }, String::new);
        }
    }

    /// The run is over.
    pub fn end(&mut self) {
        self.bar.finish_and_clear();
        let (Some(first), Some(last)) = (self.first.clone(), self.last.clone()) else {
            // Nothing was left to do.
            return self.say_title();
        };
        let seconds = self.began.elapsed().as_secs_f64();
        let tokens_per_s = self.tokens as f64 / self.busy.as_secs_f64().max(1e-9);
        let skipped = self.skipped;
        let line = Line::Summary {
            skipped_nonfinite: skipped[0],
            skipped_no_labels: skipped[1],
            steps: last.step,
            seconds,
            first_loss: first.loss.map(f64::from),
            loss: last.loss.map(f64::from),
            tokens: self.tokens,
            tokens_per_s,
        };
        let steps = plural(last.step - self.start, "step");
        self.say(&line, || {
            let loss = match (first.loss, last.loss) {
                (Some(a), Some(b)) => format!(", loss {a:.4} -> {b:.4}"),
                _ => String::new(),
            };
            let tps = grouped(tokens_per_s as u64);
            let skipped = skipped_text(skipped);
            format!("trained {steps} in {seconds:.1} s{loss}, {tps} tokens/s{skipped}\n")
        });
    }

    /// Prints a line in the format of the log, behind the title if it is the first.
    fn say(&mut self, line: &Line<'_>, text: impl FnOnce() -> String) {
        if self.ui.quiet {
            return;
        }
        self.say_title();
        let text = match self.format {
            Format::Text => text(),
            Format::Json => json_line(line),
        };
        self.tell(&text);
    }

    fn say_title(&mut self) {
        if let Some(title) = self.title.take().filter(|_| !self.ui.quiet) {
            self.tell(&title);
        }
    }

    fn tell(&mut self, text: &str) {
        if self.heard {
            self.heard = self.bar.suspend(|| print_progress(text));
        }
    }

    fn title(&self) -> String {
        let (plan, Sources { weights, data }) = (self.plan, &self.sources);
        let parameters: u64 =
            plan.params.iter().map(|it| plan.buffers[it.buffer].ty.n_elements()).sum();
        let mesh = mesh_text(&plan.mesh);
        match self.format {
            Format::Text => format!(
                "{} on {mesh}, {} parameters\nweights: {weights}; data: {data}\n",
                plan.name,
                short(parameters)
            ),
            Format::Json => json_line(&Line::Start {
                plan: &plan.name,
                mesh: &mesh,
                ranks: plan.mesh.n_ranks(),
                parameters,
                steps: self.steps,
                weights,
                data,
            }),
        }
    }
}

/// `; 3 steps skipped: 2 not finite, 1 without labels`.
fn skipped_text([nonfinite, no_labels]: [u64; 2]) -> String {
    if nonfinite + no_labels == 0 {
        return String::new();
    }
    let parts = [(nonfinite, "not finite"), (no_labels, "without labels")];
    let parts = parts.into_iter().filter(|it| it.0 > 0).map(|(n, why)| format!("{n} {why}"));
    let parts = parts.collect::<Vec<String>>().join(", ");
    format!("; {} skipped: {parts}", plural(nonfinite + no_labels, "step"))
}

/// `none`, the file, or how many they are.
pub fn files(files: &[PathBuf], none: &str) -> String {
    match files {
        [] => none.to_string(),
        [file] => file.display().to_string(),
        files => format!("{} files", files.len()),
    }
}

fn json_line(line: &Line<'_>) -> String {
    format!("{}\n", serde_json::to_string(line).unwrap_or_else(|it| it.to_string()))
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
    if report.skipped.is_some() {
        res.push_str("  skipped");
    }
    res.push_str(&format!("  tps: {}\n", grouped(report.tokens_per_s() as u64)));
    res
}

/// `resumed from ckpt/step-50 at step 51; read 1.40 MiB in 0.02 s, with 64.0 KiB of memory besides`.
fn loaded_text(report: &LoadReport) -> String {
    format!(
        "resumed from {} at step {}; read {} in {:.2} s, with {} of memory besides\n",
        report.path.display(),
        report.step + 1,
        bytes(report.bytes),
        report.seconds,
        bytes(report.extra_memory),
    )
}

/// `saved ckpt/step-50: 1.40 MiB in 0.03 s`.
fn saved_text(report: &SaveReport) -> String {
    let waited = report.waited.as_secs_f64();
    let waited = match waited < report.seconds {
        true => format!(", of which training waited {waited:.2} s"),
        false => String::new(),
    };
    let (path, n) = (report.path.display(), bytes(report.bytes));
    format!("saved {path}: {n} in {:.2} s{waited}\n", report.seconds)
}
