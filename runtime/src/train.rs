//! The training loop: data, schedule and metrics around a [`Session`].

use std::path::{Path, PathBuf};

use std::sync::Arc;
use std::time::Instant;

use checkpoint::save::Position;
use checkpoint::save::folder::{checkpoints, newest, remove_leftovers, step_name};
use checkpoint::save::{FolderLock, run_id};
use ir::checkpoint::CheckpointLayout;
use ir::plan::{Plan, Role};
use ir::random::stream_key;
use kernels::Proved;
use serde::Serialize;

use crate::checkpoint::load::{LoadOptions, LoadReport, Loaded};
use crate::checkpoint::save::{SaveOptions, SaveReport, Saved, Saver};
use crate::comm::control::Wish;
use crate::data::{Batch, Data, DataRecord, TokenWidth};
use crate::error::RunError;
use crate::exec::MemoryUse;
use crate::launch::{Hosted, HostedRank};
use crate::output::AppendFile;
use crate::place::Place;
use crate::session::{Session, SessionOptions, Skip, StepReport};
use crate::signals::Signals;
use crate::tensorboard::EventFile;
use crate::trace::{Trace, TraceOptions};
use crate::weights::Weights;

/// What `planc run` can be told; what is absent is taken from the plan.
#[derive(Debug, Clone, Default)]
pub struct TrainOptions {
    /// The step to train up to, counted from the beginning, also if a checkpoint is loaded.
    pub steps: Option<u64>,
    /// Token files; none for synthetic data.
    pub data: Vec<PathBuf>,
    /// Element type of `.bin` files.
    pub token_width: Option<TokenWidth>,
    /// True if the data may differ from that of the checkpoint to go on from; without files, it is synthetic then.
    pub change_data: bool,
    /// `.safetensors` files with all parameters; none for initial values.
    pub weights: Vec<PathBuf>,
    /// Where to write a line of JSON a step; added to what is there if a checkpoint is loaded.
    pub metrics: Option<PathBuf>,
    /// Where to write event files for TensorBoard.
    pub tensorboard: Option<PathBuf>,
    /// What to trace.
    pub trace: Option<TraceOptions>,
    /// How often [`TrainOptions::logs`] says yes; 0 is as 1.
    pub log_every: u64,
    /// Whether reports of steps to log have memory, which is asked of the device.
    pub memory: bool,
    /// Seed of initial weights, dropout and synthetic data.
    pub seed: Option<u64>,
    /// The reaction to a step whose loss or gradients are not finite.
    pub on_nonfinite: OnNonfinite,
    /// When and where to save; never, if not given.
    pub save: Option<SaveOptions>,
    /// The checkpoint to go on from.
    pub load: Option<LoadOptions>,
    /// Whether to start where there is no checkpoint to go on from.
    pub resume: bool,
    /// Signals that end the run early, or have it save.
    pub signals: Option<Arc<Signals>>,
    /// Where to run.
    pub place: Place,
}

/// The reaction to a step whose loss, or norm of gradients, is not finite. Such a step never changes weights or
/// states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnNonfinite {
    /// It goes on with the next batch, unless as many steps in a row as this were not finite.
    Skip(u64),
    /// It ends.
    Stop,
}

impl OnNonfinite {
    /// The default of the most steps in a row that are skipped.
    pub const MAX: u64 = 10;

    /// The most steps in a row that may not be finite.
    fn most(self) -> u64 {
        match self {
            OnNonfinite::Skip(most) => most,
            OnNonfinite::Stop => 0,
        }
    }
}

impl Default for OnNonfinite {
    fn default() -> OnNonfinite {
        OnNonfinite::Skip(OnNonfinite::MAX)
    }
}

/// What happens while a plan is trained.
#[derive(Debug)]
pub enum Event<'a> {
    /// Training goes on with the files that the checkpoint names.
    Data(&'a [PathBuf]),
    /// A checkpoint was loaded; training goes on from there.
    Loaded(&'a LoadReport),
    /// The folder to save into has these steps after the one that training goes on from; they are removed
    /// once there is a new checkpoint.
    RolledBack(&'a [u64]),
    /// A step was done.
    Step(&'a StepReport),
    /// A checkpoint was saved.
    Saved(&'a SaveReport),
    /// A signal has ended the run after a step.
    Stopped(Stop),
    /// What the user should know.
    Warning(&'a str),
}

/// An end before the last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop {
    /// The signal: 15 for SIGTERM.
    pub signal: u8,
    /// The last step.
    pub step: u64,
    /// True if its checkpoint is there.
    pub saved: bool,
}

/// A step as it is written down: a line of `--metrics`, of a log in JSON, the scalars of TensorBoard. JSON
/// has no NaN: it is `null`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepLine {
    /// Which step, from 1.
    pub step: u64,
    /// The loss, if the plan has one.
    pub loss: Option<f64>,
    /// The norm of all gradients before clipping, if the plan has it.
    pub grad_norm: Option<f64>,
    /// The learning rate.
    pub lr: f64,
    /// Tokens of the global batch a second.
    pub tokens_per_s: f64,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// How long the step took.
    pub seconds: f64,
    /// Bytes of the fullest rank of the process that reports, if it was asked.
    pub memory_bytes: Option<u64>,
    /// The reason for which the step changed neither weights nor states, if it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skip>,
}

impl StepLine {
    /// Of a report.
    pub fn of(report: &StepReport) -> StepLine {
        StepLine {
            step: report.step,
            loss: report.loss.map(f64::from),
            grad_norm: report.grad_norm.map(f64::from),
            lr: report.lr,
            tokens_per_s: report.tokens_per_s(),
            tokens: report.tokens,
            seconds: report.seconds,
            memory_bytes: report.memory_bytes,
            skipped: report.skipped,
        }
    }

    /// What there is of it, by the names of its fields.
    pub fn scalars(&self) -> Vec<(&'static str, f64)> {
        let all = [
            ("loss", self.loss),
            ("grad_norm", self.grad_norm),
            ("lr", Some(self.lr)),
            ("tokens_per_s", Some(self.tokens_per_s)),
            ("memory_bytes", self.memory_bytes.map(|it| it as f64)),
            ("skipped", self.skipped.map(|_| 1.0)),
        ];
        all.into_iter().filter_map(|it| Some((it.0, it.1?))).collect()
    }
}

/// Inputs that the loop fills.
const INPUTS: [&str; 4] = ["tokens", "labels", "lr", "seed"];

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

/// Trains a plan and tells of every step. The session that it returns has the weights.
pub fn train(
    plan: &Proved,
    options: &TrainOptions,
    mut on_event: impl FnMut(Event<'_>),
) -> Result<Session, RunError> {
    let inputs = plan.buffers.values().filter(|it| it.role == Role::Input);
    if let Some(input) = inputs.map(|it| &it.name).find(|it| !INPUTS.contains(&it.as_str())) {
        return Err(RunError::UnknownInput { name: input.clone() });
    }
    check_batch(plan)?;
    // Ranks meet first: what goes wrong on one of them then ends all.
    let hosted = options.place.host(plan, &facts(plan, options))?;
    let start = match Start::of(plan, options, &hosted, &mut on_event) {
        Ok(start) => start,
        Err(error) => return Err(hosted.fail(error)),
    };
    let session = SessionOptions { seed: start.position.seed, ..SessionOptions::default() };
    let session = options.place.start(plan, &session, hosted)?;
    let mut trace = match &options.trace {
        Some(it) if session.is_first() => {
            Some(Trace::create(plan, it, &session.ranks_here()).map_err(|it| session.fail(it))?)
        }
        Some(_) | None => None,
    };
    let result = run(&session, start, options, trace.as_mut(), &mut on_event);
    if let Some(Err(error)) = trace.map(|it| it.finish(result.as_ref().err())) {
        on_event(Event::Warning(&not_written(&error)));
    }
    match result {
        Ok(()) => Ok(session),
        Err(error) => Err(session.fail(error)),
    }
}

/// What must be the same on all ranks.
fn facts(plan: &Plan, options: &TrainOptions) -> Vec<(&'static str, u64)> {
    let mut res =
        vec![("seed", options.seed.unwrap_or(plan.run.seed)), ("steps", options.steps(plan))];
    if let Some(it) = &options.trace {
        res.push(("trace", stream_key(&format!("{:?}", it.steps))));
    }
    // Folders may have another name on another machine.
    if let Some(it) = &options.save {
        res.push((
            "save",
            stream_key(&format!("{:?}", (it.every, it.keep, it.background, it.busy, it.overwrite))),
        ));
    }
    res.push(("on-nonfinite", options.on_nonfinite.most()));
    if let Some(it) = &options.load {
        res.push((
            "load",
            stream_key(&format!(
                "{:?}",
                (
                    (&it.allow_missing, &it.allow_unexpected, it.cast),
                    (options.resume, options.change_data)
                )
            )),
        ));
    }
    res
}

/// Where training starts: at the beginning, or where a checkpoint ends.
struct Start {
    position: Position,
    loaded: Option<Loaded>,
    data: Data,
    /// The description of the data in checkpoints.
    record: DataRecord,
    /// Files that the checkpoint names, where none are given.
    named: Vec<PathBuf>,
    /// Warnings about the data.
    warnings: Vec<String>,
    /// The same on all ranks, and differs between runs.
    run: String,
    /// The lock of the folder to save into, in the process of rank 0.
    lock: Option<FolderLock>,
    /// Steps that were saved into the folder and are no part of what this run goes on from.
    abandoned: Vec<u64>,
}

impl Start {
    fn of(
        plan: &Plan,
        options: &TrainOptions,
        hosted: &Hosted,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Start, RunError> {
        let first = &hosted.ranks[0];
        let run = match first.is_thread() {
            true => run_id(),
            false => {
                let sent =
                    first.control.broadcast((first.rank == 0).then(|| run_id().into_bytes()))?;
                String::from_utf8_lossy(&sent).into_owned()
            }
        };
        // Before anybody looks at what is there.
        let lock = match &options.save {
            Some(save) if first.rank == 0 => {
                let mut told = |it: String| on_event(Event::Warning(&it));
                let lock = FolderLock::acquire(&save.folder, &run, &mut told)?;
                remove_leftovers(&lock, None)?;
                Some(lock)
            }
            _ => None,
        };
        let load = match (&options.load, options.resume) {
            (Some(load), true) => resumed(load, first)?,
            (load, _) => load.clone(),
        };
        let loaded = load.map(|it| Loaded::open(plan, &it)).transpose()?;
        if let Some(it) = loaded.as_ref().filter(|_| !first.is_thread()) {
            agree(first, it)?;
        }
        // One looks, so that all see the same.
        let abandoned = match &options.save {
            Some(save) if first.rank == 0 => abandoned(save, loaded.as_ref())?,
            _ => Vec::new(),
        };
        let saved = loaded.as_ref().and_then(|it| it.seed);
        let seed = options.seed.or(saved).unwrap_or(plan.run.seed);
        let position = match &loaded {
            Some(it) => it.at(seed),
            None => Position { step: 0, sample: 0, seed, finite: true },
        };
        let chosen = chosen_data(options, loaded.as_ref())?;
        let data = match chosen.files.is_empty() {
            true => Data::synthetic(&plan.run, seed),
            false => Data::open(&chosen.files, &plan.run, chosen.width)?,
        };
        // One hashes: what it reads is as large for all.
        let record =
            data.record(first.rank == 0 && (options.save.is_some() || loaded.is_some()))?;
        let warnings = match &loaded {
            Some(it) => {
                if let (Some(then), false) = (&chosen.record, options.change_data) {
                    check_data(it, then, &record)?;
                }
                data_warnings(it, chosen.record.as_ref(), &record)
            }
            None => Vec::new(),
        };
        let named = if options.data.is_empty() { chosen.files } else { Vec::new() };
        let steps = options.steps(plan).saturating_sub(position.step);
        data.check_steps(position.sample / plan.run.global_batch + steps)?;
        Ok(Start { position, loaded, data, record, named, warnings, run, lock, abandoned })
    }

    /// What is saved from here on.
    fn layout(&self, plan: &Plan) -> Result<CheckpointLayout, RunError> {
        let layout = match &self.loaded {
            Some(it) => it.layout.clone(),
            None => CheckpointLayout::to_save(plan)?,
        };
        let data = serde_json::to_string(&self.record).expect("paths of text are JSON");
        Ok(CheckpointLayout { data: Some(data), ..layout })
    }
}

/// The data to read, and what the checkpoint says of it.
struct ChosenData {
    files: Vec<PathBuf>,
    width: Option<TokenWidth>,
    record: Option<DataRecord>,
}

/// The files that are given, else those that the checkpoint names; an error if one of these is not there.
fn chosen_data(options: &TrainOptions, loaded: Option<&Loaded>) -> Result<ChosenData, RunError> {
    // What planc cannot read is as good as none.
    let record: Option<DataRecord> =
        loaded.and_then(|it| serde_json::from_str(it.layout.data.as_deref()?).ok());
    let (mut files, mut width) = (options.data.clone(), options.token_width);
    let then = record.as_ref().filter(|_| !options.change_data);
    if let (Some(loaded), Some(then)) = (loaded, then) {
        width = width.or(then.token_type);
        if files.is_empty() {
            let missing = then.files.iter().filter(|it| !it.path.exists());
            let missing = missing
                .map(|it| format!("`{}`, of {} bytes, is not there", it.path.display(), it.bytes));
            none_differs(loaded, missing.collect())?;
            files.extend(then.files.iter().map(|it| it.path.clone()));
        }
    }
    Ok(ChosenData { files, width, record })
}

/// An error if this is not the data that the checkpoint was trained on. Any data may follow generated tokens.
fn check_data(loaded: &Loaded, then: &DataRecord, now: &DataRecord) -> Result<(), RunError> {
    match then.files.is_empty() {
        true => Ok(()),
        false => none_differs(loaded, then.differences(now)),
    }
}

fn none_differs(loaded: &Loaded, differences: Vec<String>) -> Result<(), RunError> {
    match differences.is_empty() {
        true => Ok(()),
        false => Err(RunError::DataDiffers { path: loaded.path().to_path_buf(), differences }),
    }
}

/// Warnings about data that is not, or may not be, that of the checkpoint.
fn data_warnings(loaded: &Loaded, then: Option<&DataRecord>, now: &DataRecord) -> Vec<String> {
    let sample = loaded.sample;
    let other = || format!("going on with sample {sample} of other data than before");
    match then {
        // Weights alone were trained on nothing that a run could go on with.
        None if loaded.step == 0 => Vec::new(),
        None => vec![
            "the checkpoint does not say which data it was trained on (PyTorch or an earlier version of \
             planc saved it), so that the data is not compared"
                .to_string(),
        ],
        Some(then) if then.files.is_empty() != now.files.is_empty() => match now.files.is_empty() {
            true => vec![format!("{}: generated tokens", other())],
            false => vec![format!("{}, which were generated tokens", other())],
        },
        Some(then) if !then.differences(now).is_empty() => vec![other()],
        Some(then) if then.sequence != now.sequence && !now.files.is_empty() => vec![format!(
            "a sample has {} tokens and had {}: sample {sample} is at another place of the data",
            now.sequence, then.sequence
        )],
        Some(_) => Vec::new(),
    }
}

/// What to load of a folder that may have no checkpoint yet, as rank 0 sees it.
fn resumed(load: &LoadOptions, rank: &HostedRank) -> Result<Option<LoadOptions>, RunError> {
    let found = || -> Result<Option<String>, RunError> {
        // Folders may have another name on another machine.
        let relative = |it: PathBuf| {
            let name = it.strip_prefix(&load.path).expect("it is within it");
            format!("./{}", name.display())
        };
        Ok(newest(&load.path)?.map(relative))
    };
    let found = match rank.is_thread() {
        true => found()?.unwrap_or_default(),
        false => {
            let sent = match rank.rank {
                0 => Some(found()?.unwrap_or_default().into_bytes()),
                _ => None,
            };
            String::from_utf8_lossy(&rank.control.broadcast(sent)?).into_owned()
        }
    };
    Ok(found.strip_prefix("./").map(|it| match it {
        "" => load.clone(),
        name => LoadOptions { path: load.path.join(name), ..load.clone() },
    }))
}

/// The steps in the folder to save into that go once there is a new checkpoint; an error if they may not.
fn abandoned(save: &SaveOptions, loaded: Option<&Loaded>) -> Result<Vec<u64>, RunError> {
    let there = checkpoints(&save.folder)?;
    let from = loaded.and_then(|it| Some((it.step, it.path().canonicalize().ok()?)));
    let of = from.as_ref().and_then(|it| it.1.parent());
    match (from.as_ref(), there.last()) {
        (_, None) => Ok(Vec::new()),
        (Some((step, path)), _) if of.is_some_and(|it| is_same_folder(it, &save.folder)) => {
            let newer = |&it: &u64| it > *step && !path.ends_with(step_name(it));
            Ok(there.into_iter().filter(newer).collect())
        }
        _ if save.overwrite => Ok(there),
        (_, Some(&step)) => Err(RunError::FolderInUse { path: save.folder.clone(), step }),
    }
}

/// An error, unless this rank has opened the checkpoint of rank 0: `latest` may name another one to a machine
/// that sees the folder late.
fn agree(rank: &HostedRank, loaded: &Loaded) -> Result<(), RunError> {
    let own = format!("step {}, sample {}", loaded.step, loaded.sample);
    let sent = rank.control.broadcast((rank.rank == 0).then(|| own.clone().into_bytes()))?;
    let first = String::from_utf8_lossy(&sent);
    match first == own {
        true => Ok(()),
        false => Err(RunError::RanksDiffer {
            who: format!("rank {} and rank 0 differ", rank.rank),
            differences: vec![format!("checkpoints of {own} and of {first}")],
        }),
    }
}

fn run(
    session: &Session,
    mut start: Start,
    options: &TrainOptions,
    mut trace: Option<&mut Trace<'_>>,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<(), RunError> {
    let plan = session.plan();
    let mut saver = match &options.save {
        Some(save) => {
            let layout = Arc::new(start.layout(plan)?);
            let held = (start.run.clone(), start.lock.take());
            let mut saver = Saver::new(session, layout, held, save, options.place.timeout)?;
            saver.abandon(start.abandoned.clone());
            if start.loaded.is_some() {
                saver.went_on_from(start.position.step);
            }
            Some(saver)
        }
        None => None,
    };
    if !start.named.is_empty() {
        on_event(Event::Data(&start.named));
    }
    let Start { mut position, loaded, data, warnings, abandoned, .. } = start;
    let from = loaded.as_ref().map(|it| it.path().to_path_buf());
    let mut lines = Lines::open(session, options, from.as_ref().map(|_| position.step))?;
    if let Some(loaded) = loaded {
        let report = loaded.apply(session, position.seed)?;
        report.warnings.iter().chain(&warnings).for_each(|it| on_event(Event::Warning(it)));
        on_event(Event::Loaded(&report));
        if !abandoned.is_empty() {
            on_event(Event::RolledBack(&abandoned));
        }
    } else {
        if !options.weights.is_empty() {
            session.load_weights(&Weights::open(plan, &options.weights)?)?;
        }
        session.prepare()?;
    }
    let steps = options.steps(plan);
    let batch_size = plan.run.global_batch;
    let signals = options.signals.as_deref();
    if let Some(it) = signals {
        it.begin();
    }
    let mut stop = None;
    if position.step >= steps {
        let done = position.step;
        on_event(Event::Warning(&format!(
            "the checkpoint has done {done} of {steps} steps, so that there is nothing to train; --steps \
             counts from the beginning"
        )));
        // What was loaded is saved as this mesh holds it, but never over itself: it may have had more.
        if let Some(saver) = &mut saver
            && !from.is_some_and(|it| is_same_folder(&it, &saver.target(position.step)))
        {
            saver.save(session, position, true, &mut |it| tell(it, on_event))?;
        }
    }
    if let Some(trace) = &options.trace
        && !(position.step + 1..=steps).any(|it| trace.has(it, steps))
    {
        on_event(Event::Warning(&format!(
            "none of the steps to trace is run: these are steps {} to {steps}",
            position.step + 1
        )));
    }
    let mut nonfinite = Nonfinite::default();
    for step in position.step + 1..=steps {
        let batch = data.batch(position.sample / batch_size)?;
        let lr = plan.run.schedule.at(step - 1);
        let traced = options.trace.as_ref().is_some_and(|it| it.has(step, steps));
        let mut report = match traced {
            true => traced_step(session, &batch, lr, step, trace.as_deref_mut())?,
            false => session.step(&batch, lr, step)?,
        };
        if report.skipped == Some(Skip::Nonfinite) {
            report = nonfinite.look_into(session, &batch, report, on_event)?;
        }
        if lines.is_any() || options.memory && options.logs(step, steps) {
            let all = session.memory()?;
            report.memory_bytes = all.iter().map(MemoryUse::bytes).max();
        }
        lines.write(&mut report);
        on_event(Event::Step(&report));
        nonfinite.count(&report, options.on_nonfinite)?;
        let finite = report.skipped != Some(Skip::Nonfinite);
        position = Position { step, sample: position.sample + batch_size, finite, ..position };
        let wish = match step < steps {
            true => session.agree(step, signals.and_then(Signals::wish))?,
            false => None,
        };
        if let Some(Wish::Stop(signal)) = wish {
            stop = Some(Stop { signal, step, saved: saver.is_some() });
        }
        match &mut saver {
            Some(saver) => {
                saver.followed_by(finite);
                let mut told = |it| tell(it, on_event);
                saver.poll(&mut told)?;
                if wish.is_some() || saver.is_due(step, steps) {
                    let is_last = step == steps || stop.is_some();
                    saver.save(session, position, is_last, &mut told)?;
                }
            }
            None if wish == Some(Wish::Save) => {
                on_event(Event::Warning("SIGUSR1 has nothing saved: there is no `--save`"));
            }
            None => (),
        }
        if stop.is_some() {
            break;
        }
    }
    if let Some(saver) = &mut saver {
        saver.finish(&mut |it| tell(it, on_event))?;
    }
    if let Some(it) = stop {
        on_event(Event::Stopped(it));
    }
    Ok(())
}

/// The steps that were not finite.
#[derive(Debug, Default)]
struct Nonfinite {
    /// The number of them since the last step that was applied.
    in_a_row: u64,
    /// One has been repeated, to find where it begins.
    is_searched: bool,
}

impl Nonfinite {
    /// Repeats the first step that is not finite, and says what makes the first number that is not. Returns the report
    /// of the repeat.
    fn look_into(
        &mut self,
        session: &Session,
        batch: &Batch,
        report: StepReport,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<StepReport, RunError> {
        if std::mem::replace(&mut self.is_searched, true) {
            return Ok(report);
        }
        let StepReport { step, lr, seconds, .. } = report;
        let (again, found) = session.search_step(batch, lr, step)?;
        for it in &found {
            on_event(Event::Warning(&format!("step {step} is not finite: {it}")));
        }
        if again.skipped.is_none() {
            on_event(Event::Warning(&format!(
                "step {step} was not finite, and its repeat is: this machine computes other numbers from the same \
                 data. Training goes on with the repeat"
            )));
        }
        Ok(StepReport { seconds, ..again })
    }

    /// Counts a step that was reported; an error if too many in a row were not finite.
    fn count(&mut self, report: &StepReport, on_nonfinite: OnNonfinite) -> Result<(), RunError> {
        match report.skipped {
            Some(Skip::Nonfinite) => self.in_a_row += 1,
            Some(Skip::NoLabels) => {}
            None => self.in_a_row = 0,
        }
        match self.in_a_row > on_nonfinite.most() {
            true => Err(RunError::Nonfinite { step: report.step, in_a_row: self.in_a_row }),
            false => Ok(()),
        }
    }
}

fn is_same_folder(a: &Path, b: &Path) -> bool {
    // A folder that cannot be found is not one that was loaded from.
    a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b))
}

fn tell(saved: Saved, on_event: &mut dyn FnMut(Event<'_>)) {
    match saved {
        Saved::Done(report) => {
            on_event(Event::Saved(&report));
            for it in &report.left {
                let what = "an older checkpoint is still there";
                on_event(Event::Warning(&format!("{what}: {it} [{}]", it.code())));
            }
        }
        Saved::Failed(error) => on_event(Event::Warning(&format!("{error} [{}]", error.code()))),
        Saved::Skipped(step) => {
            let why = "the one before is still being written";
            on_event(Event::Warning(&format!("step {step} is not saved: {why}")));
        }
    }
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

/// A step of which every rank keeps times: all do, so that none replays what another queues call by call.
fn traced_step(
    session: &Session,
    batch: &Batch,
    lr: f64,
    step: u64,
    trace: Option<&mut Trace<'_>>,
) -> Result<StepReport, RunError> {
    let origin = trace.as_ref().map_or_else(Instant::now, |it| it.origin());
    let recorders = session.record(origin)?;
    let report = session.step(batch, lr, step);
    let failure = trace.and_then(|trace| {
        let ranks: Vec<_> = recorders.iter().map(|it| (it.0, it.1.take())).collect();
        trace.step(step, &ranks);
        trace.failure().map(not_written)
    });
    let mut report = report?;
    report.warnings.extend(failure);
    session.stop_recording()?;
    Ok(report)
}

/// The warning about a file for people to look at that a run goes on without.
fn not_written(error: &RunError) -> String {
    format!("{error} [{}]; the run goes on without", error.code())
}

/// Files that get a line a step.
struct Lines {
    metrics: Option<MetricsFile>,
    tensorboard: Option<EventFile>,
    /// Errors that the user has heard of.
    told: Vec<RunError>,
}

impl Lines {
    /// Those that were asked for, on the process that reports; `after` is the step of the checkpoint that the
    /// run goes on from, behind which they go on.
    fn open(
        session: &Session,
        options: &TrainOptions,
        after: Option<u64>,
    ) -> Result<Lines, RunError> {
        let metrics = options.metrics.as_deref().filter(|_| session.is_first());
        let tensorboard = options.tensorboard.as_deref().filter(|_| session.is_first());
        Ok(Lines {
            metrics: metrics.map(|it| MetricsFile::open(it, after.is_some())).transpose()?,
            tensorboard: tensorboard.map(|it| EventFile::create(it, after)).transpose()?,
            told: Vec::new(),
        })
    }

    fn is_any(&self) -> bool {
        self.metrics.is_some() || self.tensorboard.is_some()
    }

    /// Adds a step to each file. A file that cannot be written lacks the step, and the report gets a warning, once
    /// for each error: no run ends for it.
    fn write(&mut self, report: &mut StepReport) {
        let line = StepLine::of(report);
        let metrics = self.metrics.as_mut().map(|it| it.write(&line));
        let events = self.tensorboard.as_mut().map(|it| it.write(line.step, &line.scalars()));
        for error in [metrics, events].into_iter().flatten().filter_map(Result::err) {
            if !self.told.contains(&error) {
                report.warnings.push(not_written(&error));
                self.told.push(error);
            }
        }
    }
}

struct MetricsFile {
    path: PathBuf,
    out: AppendFile,
}

impl MetricsFile {
    /// A new file; or one that the steps before are in, if they were done by another run.
    fn open(path: &Path, append: bool) -> Result<MetricsFile, RunError> {
        let out = AppendFile::open(path, append).map_err(|it| RunError::write(path, &it))?;
        Ok(MetricsFile { path: path.to_path_buf(), out })
    }

    fn write(&mut self, line: &StepLine) -> Result<(), RunError> {
        let fail = |it: std::io::Error| RunError::write(&self.path, &it);
        let mut text = serde_json::to_vec(line).map_err(|it| fail(it.into()))?;
        text.push(b'\n');
        self.out.push(&text).map_err(fail)
    }
}
