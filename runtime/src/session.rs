//! `Session`: the ranks of a plan that run in this process, ready to run its sections.
//!
//! Each rank is a thread that lives as long as the session and works on what it is sent; all ranks of
//! the plan are here, or one of them (see [`launch`](crate::launch)). Ranks fail together, wherever
//! they run: an error or a panic on one ends all, and the first cause is what every later call
//! returns. A step is:
//!
//! ```text
//! write lr and step
//! for each micro-batch m: write seed, tokens and labels (rows m*B/M .. of the global batch); run `step`
//! run `update`; read results from the first rank here: they are the same on all
//! ```

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use ir::DType;
use ir::checkpoint::histories;
use ir::graph::Name;
use ir::model::axes_text;
use ir::ops::Tensor;
use ir::placement::{Chunk, CopyRuns, DimLayout, ReduceOp, copy_runs, for_each_copy};
use ir::plan::{Buffer, Plan, PlanSection, Role};
use ir::random::{philox4x32_10, stream_key};
use kernels::Proved;
use smallvec::SmallVec;

use crate::backend::cpu::{CpuBackend, CpuOptions};
use crate::bind::{BoundPlan, bind, coord_name, describe};
use crate::comm::Carrier;
use crate::comm::control::{Control, Fault, Wish, positions_text};
use crate::comm::local::World;
use crate::comm::wire::Wire;
use crate::data::Batch;
use crate::error::RunError;
use crate::exec::{self, Backend, MemoryUse, Span};
use crate::launch::{Hosted, HostedRank};
use crate::nonfinite::Search;
use crate::pieces::{fill, for_each_piece};
use crate::trace::{Measured, Recorder};
use crate::weights::{Weights, halves, init_values};

/// The most ranks that run in one process.
pub const RANKS_MAX: u64 = 1024;

/// How a session runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOptions {
    /// Seed of initial weights and of dropout.
    pub seed: u64,
    /// Seed of the order in which streams go on. No result depends on it, or the plan lacks a wait.
    pub order_seed: u64,
    /// Whether results of ops are checked: all written, padding zero. On in debug builds.
    pub check: bool,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions { seed: 0, order_seed: 0, check: cfg!(debug_assertions) }
    }
}

/// Results of a plan, by name.
pub type Results = Vec<(Name, f32)>;

/// What came out of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Which step, from 1.
    pub step: u64,
    /// The learning rate used.
    pub lr: f64,
    /// Result `loss`, if the plan has it.
    pub loss: Option<f32>,
    /// Result `grad_norm`, if the plan has it.
    pub grad_norm: Option<f32>,
    /// The reason for which weights and states are as they were before the step, if they are.
    pub skipped: Option<Skip>,
    /// All results of the plan.
    pub results: Results,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// How long it took.
    pub seconds: f64,
    /// Bytes of the rank of this process that takes most of its device, where that was asked for.
    pub memory_bytes: Option<u64>,
    /// What the user should know, a line each.
    pub warnings: Vec<String>,
}

/// A reason for which a step updates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Skip {
    /// The loss or the norm of the gradients is not finite.
    Nonfinite,
    /// No token of the batch has a label that counts.
    NoLabels,
}

impl Skip {
    /// The reason that the result `applied` of a plan gives; `None` if the update was applied.
    fn of(results: &[(Name, f32)]) -> Option<Skip> {
        let applied = results.iter().find(|it| it.0 == "applied")?.1;
        match applied {
            1.0 => None,
            0.0 => Some(Skip::NoLabels),
            _ => Some(Skip::Nonfinite),
        }
    }
}

impl StepReport {
    /// Tokens of the global batch a second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// See the [module docs](self).
pub struct Session {
    plan: Arc<Plan>,
    options: SessionOptions,
    ranks: Vec<RankThread>,
    /// What the session ended with, as its calls return it.
    ended: OnceLock<RunError>,
    /// After the ranks, which are dropped first: connections end when nobody needs them.
    hosted: Hosted,
}

struct RankThread {
    jobs: Option<Sender<Job>>,
    handle: Option<JoinHandle<()>>,
}

type Job = Box<dyn FnOnce(&mut Rank) + Send>;

/// What a rank's thread works with.
pub(crate) struct Rank {
    pub(crate) plan: Arc<Plan>,
    pub(crate) bound: Arc<BoundPlan>,
    pub(crate) control: Arc<dyn Control>,
    pub(crate) backend: Box<dyn Backend>,
    /// Boxes of tensors that the plan has no use for, to be saved again.
    pub(crate) kept: Vec<Vec<(Chunk, Vec<u8>)>>,
    /// Whether it answers for the ranks of this process.
    first: bool,
    /// How many threads it may use to make values.
    threads: usize,
    /// Bytes of the persistent arena that a step changes before it is known whether it counts.
    keeps: Vec<Range<usize>>,
    /// The search that is under way.
    search: Option<Search>,
    /// Where it writes down what it runs, while that is traced.
    recorder: Option<Recorder>,
}

/// Makes what runs a rank's instructions, on the rank's own thread.
pub type MakeBackend = dyn Fn(&Arc<Plan>, &Arc<BoundPlan>, &HostedRank) -> Result<Box<dyn Backend>, RunError>
    + Send
    + Sync;

/// How long a rank may take to say where it was when a run stalled.
const POSITIONS_LIMIT: Duration = Duration::from_secs(5);

impl Session {
    /// Starts all ranks of a plan in this process. Parameters have their initial values, everything else is zero.
    pub fn new(plan: &Proved, options: &SessionOptions) -> Result<Session, RunError> {
        let ranks = check_ranks(plan)?;
        Session::start(plan, options, Hosted::threads(ranks))
    }

    /// As [`Session::new`], for the ranks that this process hosts.
    pub fn start(
        plan: &Proved,
        options: &SessionOptions,
        hosted: Hosted,
    ) -> Result<Session, RunError> {
        let make = match check_memory(plan, hosted.ranks.len() as u64) {
            Ok(()) => cpu_backends(plan, options, &hosted),
            Err(error) => return Err(hosted.fail(error)),
        };
        Session::with_backends(plan, options, hosted, make)
    }

    /// As [`Session::start`], with backends of the caller's.
    pub fn with_backends(
        plan: &Proved,
        options: &SessionOptions,
        hosted: Hosted,
        make: Arc<MakeBackend>,
    ) -> Result<Session, RunError> {
        let plan = Arc::new(Plan::clone(plan));
        let (ranks, ended) = (Vec::new(), OnceLock::new());
        let mut session = Session { plan, options: *options, ranks, ended, hosted };
        let ready = session.start_ranks(&make)?;
        session.collect(ready)?;
        session.initialize()?;
        Ok(session)
    }

    /// Ends all ranks, wherever they run, with something that is not an instruction's error; returns
    /// what they end with.
    pub fn fail(&self, error: RunError) -> RunError {
        let first = self.hosted.fail(error);
        self.ended().unwrap_or(first)
    }

    /// Whether rank 0, which reports, is in this process.
    pub fn is_first(&self) -> bool {
        self.hosted.is_first()
    }

    /// The ranks of this process, in order.
    pub(crate) fn ranks_here(&self) -> Vec<u64> {
        self.hosted.ranks.iter().map(|it| it.rank).collect()
    }

    /// Agrees with all ranks of the run on an action after this step, given the wish of this process; see
    /// [`Control::agree`].
    pub fn agree(&self, step: u64, wish: Option<Wish>) -> Result<Option<Wish>, RunError> {
        self.hosted.ranks[0].control.agree(step, wish)
    }

    /// What ends all ranks.
    pub(crate) fn fault(&self) -> Arc<Fault> {
        self.hosted.fault.clone()
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Replaces all parameters by those of files; see [`Weights::open`].
    pub fn load_weights(&self, weights: &Arc<Weights>) -> Result<(), RunError> {
        let weights = weights.clone();
        self.on_all(move |rank| {
            for param in &rank.plan.clone().params {
                rank.write_floats(param.buffer, |start, out| {
                    weights.values(param.buffer, start, out)
                })?;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Makes compute weights from master weights: after starting, loading or writing.
    pub fn prepare(&self) -> Result<(), RunError> {
        self.on_all(|rank| rank.run(PlanSection::Prepare))?;
        Ok(())
    }

    /// One training step on a global batch, with this learning rate; `step` counts from 1.
    pub fn step(&self, batch: &Batch, lr: f64, step: u64) -> Result<StepReport, RunError> {
        let began = Instant::now();
        self.start_step(lr)?;
        for micro_batch in 0..self.plan.micro_batches {
            self.micro_batch(batch, step, micro_batch)?;
        }
        let (results, warnings) = self.update_and_warn()?;
        let result = |name: &str| results.iter().find(|it| it.0 == name).map(|it| it.1);
        Ok(StepReport {
            step,
            lr,
            skipped: Skip::of(&results),
            loss: result("loss"),
            grad_norm: result("grad_norm"),
            tokens: batch.tokens.len() as u64,
            seconds: began.elapsed().as_secs_f64(),
            memory_bytes: None,
            results,
            warnings,
        })
    }

    /// Repeats a step that was skipped, call by call. Returns its report, and for each rank of this process that found
    /// one, the first instruction that made a number that is not finite.
    pub fn search_step(
        &self,
        batch: &Batch,
        lr: f64,
        step: u64,
    ) -> Result<(StepReport, Vec<String>), RunError> {
        self.on_all(|rank| {
            rank.search = Some(Search::default());
            Ok(())
        })?;
        let report = self.step(batch, lr, step)?;
        let found = self.on_all(|rank| Ok(rank.search.take().and_then(|it| it.found)))?;
        Ok((report, found.into_iter().flatten().collect()))
    }

    /// The first part of [`Session::step`]: writes `lr`, and keeps what changes before a step is known to count.
    pub fn start_step(&self, lr: f64) -> Result<(), RunError> {
        self.on_all(move |rank| {
            if !rank.keeps.is_empty() {
                rank.backend.keep(&rank.keeps)?;
            }
            rank.write_scalar("lr", lr)
        })?;
        Ok(())
    }

    /// The second part: runs one of the plan's micro-batches of a global batch. They run in order.
    pub fn micro_batch(&self, batch: &Batch, step: u64, index: u32) -> Result<(), RunError> {
        batch.check(&self.plan.run)?;
        let parts = [("tokens", &batch.tokens), ("labels", &batch.labels)];
        let mut writes: Vec<(Buffer, Vec<i32>)> = Vec::new();
        for (name, values) in parts {
            let Some(buffer) = self.plan.buffer(name) else { continue };
            let n = self.plan.buffers[buffer].ty.n_elements() as usize;
            let expected = n as u64 * u64::from(self.plan.micro_batches);
            if values.len() as u64 != expected {
                let (name, found) = (name.to_string(), values.len() as u64);
                return Err(RunError::Elements { name, expected, found });
            }
            let start = n * index as usize;
            writes.push((buffer, values[start..start + n].to_vec()));
        }
        let seed = dropout_seed(self.options.seed, step, index);
        self.on_all(move |rank| {
            for (buffer, values) in &writes {
                rank.write_ints(*buffer, |start, out| {
                    let start = start as usize;
                    out.copy_from_slice(&values[start..start + out.len()]);
                })?;
            }
            rank.write_scalar("seed", f64::from(seed))?;
            let section = rank.plan.micro_batch(index);
            rank.run(section)
        })?;
        Ok(())
    }

    /// The last part: runs `update` and returns the plan's results.
    pub fn update(&self) -> Result<Results, RunError> {
        Ok(self.update_and_warn()?.0)
    }

    /// As [`Session::update`], with what backends have to tell.
    fn update_and_warn(&self) -> Result<(Results, Vec<String>), RunError> {
        let done = self.on_all(|rank| {
            rank.run(PlanSection::Update)?;
            let warnings = rank.backend.warnings();
            if !rank.first {
                return Ok((Vec::new(), warnings));
            }
            let plan = rank.plan.clone();
            let result = |(name, buffer): &(Name, Buffer)| -> Result<(Name, f32), RunError> {
                let values = rank.floats(*buffer)?;
                Ok((name.clone(), values.first().copied().unwrap_or(f32::NAN)))
            };
            let results: Results = plan.results.iter().map(result).collect::<Result<_, _>>()?;
            Ok((results, warnings))
        })?;
        let (mut results, warnings): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        let results = results.swap_remove(0);
        if Skip::of(&results).is_some() {
            self.on_all(|rank| rank.undo())?;
        }
        Ok((results, warnings.concat()))
    }

    /// The global value of a buffer that outlives a section, reduced where it is partial. What is
    /// spread over ranks of other processes is an error.
    pub fn read(&self, name: &str) -> Result<Tensor<f32>, RunError> {
        let buffer = self.persistent(name)?;
        let op = self.plan.buffers[buffer].sharding.partial.map(|it| it.0);
        let mut data = self.gather(buffer, Rank::floats, |a: f32, b| match op {
            None | Some(ReduceOp::Sum | ReduceOp::Avg) => a + b,
            Some(ReduceOp::Max) => a.max(b),
            Some(ReduceOp::Min) => a.min(b),
        })?;
        let data_of = &self.plan.buffers[buffer];
        if op == Some(ReduceOp::Avg) {
            let n = self.plan.mesh.set_size(data_of.sharding.partial_axes()) as f32;
            data.iter_mut().for_each(|it| *it /= n);
        }
        let shape = data_of.ty.shape.iter().map(|&it| it as usize).collect();
        Ok(Tensor { shape, data })
    }

    /// As [`Session::read`], for integers, which stay exact.
    pub fn read_integers(&self, name: &str) -> Result<Vec<i32>, RunError> {
        let buffer = self.persistent(name)?;
        if self.plan.buffers[buffer].ty.dtype == DType::I32 {
            return self.gather(buffer, Rank::integers, |_, b| b);
        }
        let values = self.read(name)?.data;
        match values.iter().find(|it| it.fract() != 0.0) {
            Some(&value) => Err(RunError::NotInteger { buffer: name.to_string(), value }),
            None => Ok(values.iter().map(|&it| it as i32).collect()),
        }
    }

    /// Replaces the value of a buffer that outlives a section, from row-major global elements.
    pub fn write(&self, name: &str, values: &[f32]) -> Result<(), RunError> {
        let buffer = self.persistent(name)?;
        let data = &self.plan.buffers[buffer];
        let (expected, found) = (data.ty.n_elements(), values.len() as u64);
        if expected != found {
            return Err(RunError::Elements { name: name.to_string(), expected, found });
        }
        let values = values.to_vec();
        let integers = data.ty.dtype == DType::I32;
        self.on_all(move |rank| {
            let at = |start: u64, n: usize| &values[start as usize..start as usize + n];
            if integers {
                return rank.write_ints(buffer, |start, out| {
                    let from = at(start, out.len());
                    out.iter_mut().zip(from).for_each(|(out, &it)| *out = it as i32);
                });
            }
            rank.write_floats(buffer, |start, out| out.copy_from_slice(at(start, out.len())))
        })?;
        Ok(())
    }

    /// From now on, whether every rank keeps the time of each instruction; see [`Backend::keep_times`].
    pub fn keep_times(&self, keep: bool) -> Result<(), RunError> {
        self.on_all(move |rank| rank.backend.keep_times(keep))?;
        Ok(())
    }

    /// When each instruction of the section that ran last was at work, for each rank of this process.
    pub fn times(&self) -> Result<Vec<Vec<Span>>, RunError> {
        self.on_all(|rank| rank.backend.times())
    }

    /// From now on, ranks of this process write down when each instruction is at work, in seconds from
    /// `origin`; where each does so, by rank.
    pub fn record(&self, origin: Instant) -> Result<Vec<(u64, Recorder)>, RunError> {
        self.on_all(move |rank| {
            rank.backend.keep_times(true)?;
            let recorder = Recorder::new(origin);
            rank.recorder = Some(recorder.clone());
            Ok((rank.bound.rank, recorder))
        })
    }

    /// Ends what [`Session::record`] began.
    pub fn stop_recording(&self) -> Result<(), RunError> {
        self.on_all(|rank| {
            rank.recorder = None;
            rank.backend.keep_times(false)
        })?;
        Ok(())
    }

    /// What each rank of this process takes of its device's memory.
    pub fn memory(&self) -> Result<Vec<MemoryUse>, RunError> {
        self.on_all(|rank| rank.backend.memory())
    }

    fn persistent(&self, name: &str) -> Result<Buffer, RunError> {
        let unknown = || RunError::UnknownBuffer { name: name.to_string() };
        let buffer = self.plan.buffer(name).ok_or_else(unknown)?;
        match self.plan.buffers[buffer].role {
            Role::Param | Role::State | Role::Input | Role::Carried => Ok(buffer),
            Role::Temp => Err(RunError::NotPersistent { name: name.to_string() }),
        }
    }

    /// The global tensor, from what each rank holds; what several hold is combined in rank order.
    fn gather<T: Copy + Default + Send + 'static>(
        &self,
        buffer: Buffer,
        read: fn(&Rank, Buffer) -> Result<Vec<T>, RunError>,
        combine: impl Fn(T, T) -> T,
    ) -> Result<Vec<T>, RunError> {
        let (plan, data) = (&*self.plan, &self.plan.buffers[buffer]);
        let copies = data.sharding.replicated_axes(&plan.mesh);
        let whole = copies == plan.mesh.all();
        let here = self.hosted.ranks.len() as u64;
        if here < plan.mesh.n_ranks() && !whole {
            let (name, rank) = (data.name.clone(), self.hosted.ranks[0].rank);
            return Err(RunError::NotHere { name, rank });
        }
        let locals = self.on_all(move |rank| {
            let mesh = &rank.plan.mesh;
            // Of equal copies, the first.
            let first = match whole {
                true => rank.first,
                false => mesh.index_in(copies, &rank.bound.coord) == 0,
            };
            first.then(|| read(rank, buffer)).transpose()
        })?;
        let local_shape = plan.local_shape(buffer);
        let mut res: Vec<Option<T>> = vec![None; data.ty.n_elements() as usize];
        for (rank, local) in self.hosted.ranks.iter().zip(&locals) {
            let Some(local) = local else { continue };
            let coord = plan.mesh.coord_of(rank.rank);
            let runs = held(plan, buffer, &coord);
            for_each_copy(&data.ty.shape, &local_shape, &runs, |global, at, len| {
                let (global, at, len) = (global as usize, at as usize, len as usize);
                for (to, &value) in res[global..global + len].iter_mut().zip(&local[at..at + len]) {
                    *to = Some(to.map_or(value, |it| combine(it, value)));
                }
            });
        }
        Ok(res.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// Starts the threads; what they send when they are ready comes through the receiver.
    fn start_ranks(
        &mut self,
        make: &Arc<MakeBackend>,
    ) -> Result<Receiver<(u64, Option<()>)>, RunError> {
        let (done, ready) = channel();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / self.hosted.ranks.len()).max(1);
        for (i, hosted) in self.hosted.ranks.iter().enumerate() {
            let (sender, jobs) = channel();
            let (plan, hosted, make, done) =
                (self.plan.clone(), hosted.clone(), make.clone(), done.clone());
            let rank = hosted.rank;
            let body = move || {
                let make = move || make_rank(plan, &hosted, &*make, (i == 0, threads));
                rank_main(rank, make, &jobs, &done);
            };
            let handle = Builder::new().name(format!("rank {rank}")).spawn(body);
            let handle = handle.map_err(|it| {
                let why = it.to_string();
                self.hosted.fail(RunError::Thread { rank, why })
            })?;
            self.ranks.push(RankThread { jobs: Some(sender), handle: Some(handle) });
        }
        Ok(ready)
    }

    fn initialize(&self) -> Result<(), RunError> {
        let seed = self.options.seed;
        self.on_all(move |rank| {
            let plan = rank.plan.clone();
            for param in &plan.params {
                let name = &plan.buffers[param.buffer].name;
                rank.write_floats(param.buffer, |start, out| {
                    init_values(param.init, seed, name, start, out);
                })?;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Does `job` on every rank at once and returns what they return, in rank order.
    pub(crate) fn on_all<R: Send + 'static>(
        &self,
        job: impl Fn(&mut Rank) -> Result<R, RunError> + Send + Sync + 'static,
    ) -> Result<Vec<R>, RunError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        let job = Arc::new(job);
        let (done, results) = channel();
        for rank in &self.ranks {
            let (job, done) = (job.clone(), done.clone());
            let guarded: Job = Box::new(move |rank| {
                let result = guard(rank, |rank| job(rank));
                // The session waits for all ranks, so the receiver is there.
                let _ = done.send((rank.bound.rank, result));
            });
            let jobs = rank.jobs.as_ref().expect("ranks run as long as the session");
            if jobs.send(guarded).is_err() {
                self.hosted.fail(RunError::Stopped);
            }
        }
        drop(done);
        self.collect(results)
    }

    /// Waits for the answers of all ranks.
    fn collect<R>(&self, results: Receiver<(u64, Option<R>)>) -> Result<Vec<R>, RunError> {
        let mut all: Vec<(u64, Option<R>)> = results.iter().take(self.ranks.len()).collect();
        if let Some(error) = self.ended() {
            return Err(error);
        }
        all.sort_by_key(|it| it.0);
        let all: Vec<R> = all.into_iter().filter_map(|it| it.1).collect();
        assert_eq!(all.len(), self.ranks.len(), "a rank ended without saying why");
        Ok(all)
    }

    /// The failure that ended the session, with where the ranks were if that is what is unknown.
    fn ended(&self) -> Option<RunError> {
        let fault = self.hosted.fault.get()?;
        let error = self.ended.get_or_init(|| {
            let control = &self.hosted.ranks[0].control;
            for rank in &self.hosted.ranks {
                // Those that were at work have said so already.
                rank.control.report(BETWEEN.to_string());
            }
            if !fault.is_stall() || !self.is_first() {
                return fault;
            }
            let ranks = positions_text(&control.positions(POSITIONS_LIMIT));
            RunError::Positions { cause: Box::new(fault), ranks }
        });
        Some(error.clone())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.jobs = None;
        }
        for rank in &mut self.ranks {
            if let Some(handle) = rank.handle.take() {
                // A panic there has been reported as the session's error.
                let _ = handle.join();
            }
        }
    }
}

/// CPU backends that meet in this process, or across processes.
pub(crate) fn cpu_backends(
    plan: &Plan,
    options: &SessionOptions,
    hosted: &Hosted,
) -> Arc<MakeBackend> {
    let order = stream_key(&plan.name) ^ options.order_seed.rotate_left(32);
    let options = CpuOptions { order_seed: order, check: options.check };
    // A plan that is broken may have communicators that cannot be; it is refused before it is used.
    let world = OnceLock::new();
    let fault = hosted.fault.clone();
    Arc::new(move |plan, bound, rank| {
        let carrier: Box<dyn Carrier> = match &rank.pairs {
            None => Box::new(world.get_or_init(|| World::new(plan, &fault)).clone()),
            Some(pairs) => {
                Box::new(Wire::new(bound, pairs.connect()?, pairs.patience(), &pairs.fault())?)
            }
        };
        Ok(Box::new(CpuBackend::new(bound.clone(), carrier, options)))
    })
}

/// The life of a rank's thread.
fn rank_main(
    number: u64,
    make: impl FnOnce() -> Result<Rank, (Arc<dyn Control>, RunError)>,
    jobs: &Receiver<Job>,
    done: &Sender<(u64, Option<()>)>,
) {
    let mut rank = match make() {
        Ok(rank) => rank,
        Err((control, error)) => {
            if error != RunError::Stopped {
                control.fail(error);
            }
            let _ = done.send((number, None));
            return;
        }
    };
    let _ = done.send((number, Some(())));
    while let Ok(job) = jobs.recv() {
        job(&mut rank);
    }
    if !rank.backend.close() {
        STUCK.store(true, Ordering::Release);
        // Freeing what a device still works with would wait for it, and it waits for good.
        std::mem::forget(rank);
    }
}

static STUCK: AtomicBool = AtomicBool::new(false);

/// Whether a rank of this process has ended with a device that is stuck: the process can then only be
/// left by [`driver::leave`](crate::backend::cuda::driver::leave).
pub fn is_stuck() -> bool {
    STUCK.load(Ordering::Acquire)
}

/// Binds the plan and makes the backend.
fn make_rank(
    plan: Arc<Plan>,
    hosted: &HostedRank,
    make: &MakeBackend,
    (first, threads): (bool, usize),
) -> Result<Rank, (Arc<dyn Control>, RunError)> {
    let control = hosted.control.clone();
    let made = catch_unwind(AssertUnwindSafe(|| {
        let bound = Arc::new(bind(&plan, hosted.rank)?);
        let backend = make(&plan, &bound, hosted)?;
        Ok((bound, backend))
    }));
    match made.unwrap_or_else(|it| Err(panic_error(&*it))) {
        Ok((bound, backend)) => {
            let (kept, recorder, search) = (Vec::new(), None, None);
            let keeps = changed_early(&plan, &bound);
            Ok(Rank {
                plan,
                bound,
                control,
                backend,
                kept,
                first,
                threads,
                keeps,
                search,
                recorder,
            })
        }
        Err(error) => Err((control, error)),
    }
}

/// Parts of the persistent arena that hold histories and their scales. Parts that lie close together are one: all else
/// there is either unchanged by a step that is skipped, or made anew after it.
fn changed_early(plan: &Plan, bound: &BoundPlan) -> Vec<Range<usize>> {
    const CLOSE: usize = 4096;
    let range = |it: Buffer| {
        let it = &bound.buffers[it];
        it.offset..it.offset + it.bytes()
    };
    let mut parts: Vec<Range<usize>> = histories(plan).into_iter().map(range).collect();
    parts.sort_by_key(|it| it.start);
    let mut res: Vec<Range<usize>> = Vec::new();
    for part in parts {
        match res.last_mut().filter(|it| part.start < it.end + CLOSE) {
            Some(last) => last.end = last.end.max(part.end),
            None => res.push(part),
        }
    }
    res
}

/// Where a rank is that runs no instruction.
const BETWEEN: &str = "between sections";

/// Runs a job; an error or a panic ends all ranks.
fn guard<R>(rank: &mut Rank, job: impl FnOnce(&mut Rank) -> Result<R, RunError>) -> Option<R> {
    let result = catch_unwind(AssertUnwindSafe(|| job(rank)));
    match result.unwrap_or_else(|it| Err(panic_error(&*it))) {
        Ok(it) => return Some(it),
        Err(RunError::Stopped) => (),
        Err(error) => rank.control.fail(rank.blame(error)),
    }
    rank.control.report(match rank.backend.at() {
        Some(at) => format!("at {}", describe(&rank.plan, at)),
        None => BETWEEN.to_string(),
    });
    None
}

fn panic_error(payload: &(dyn std::any::Any + Send)) -> RunError {
    let text = payload.downcast_ref::<&str>().map(|it| it.to_string());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    RunError::Panic { message: text.unwrap_or_else(|| "no message".to_string()) }
}

impl Rank {
    /// Puts histories and scales back as they were before a step that was skipped, and makes anew what is made of
    /// them. Optimizers have left weights and their states alone.
    fn undo(&mut self) -> Result<(), RunError> {
        if self.keeps.is_empty() {
            return Ok(());
        }
        self.backend.restore()?;
        self.run(PlanSection::Prepare)
    }

    fn run(&mut self, section: PlanSection) -> Result<(), RunError> {
        if let Some(mut search) = self.search.take() {
            let result = self.search(section, &mut search);
            self.search = Some(search);
            return result;
        }
        let Some(recorder) = self.recorder.clone() else {
            return exec::run(&self.bound, section, &mut *self.backend);
        };
        let began = recorder.now();
        let result = exec::run(&self.bound, section, &mut *self.backend);
        let ended = recorder.now();
        // Of what failed, there may be times of a part, or none.
        let spans = match &result {
            Ok(()) => self.backend.times()?,
            Err(_) => self.backend.times().unwrap_or_default(),
        };
        recorder.push(Measured { section, began, ended, spans });
        result
    }

    /// The error, with this rank and its instruction.
    fn blame(&self, cause: RunError) -> RunError {
        RunError::Rank {
            rank: self.bound.rank,
            coord: coord_name(&self.plan.mesh, &self.bound.coord),
            at: self.position(),
            cause: Box::new(cause),
        }
    }

    /// Its instruction.
    fn position(&self) -> String {
        self.backend.at().map_or(BETWEEN.to_string(), |it| describe(&self.plan, it))
    }

    /// Sets a buffer from its global elements: `fetch` gives those from an index on.
    fn write_floats(
        &mut self,
        buffer: Buffer,
        fetch: impl Fn(u64, &mut [f32]) + Sync,
    ) -> Result<(), RunError> {
        let Rank { plan, bound, backend, threads, .. } = self;
        let (dtype, mut values) = (bound.buffers[buffer].dtype, Vec::new());
        let size = dtype.bytes() as usize;
        for_each_piece(plan, bound, buffer, |start, len, stretches| {
            fill(&mut values, len, stretches, *threads, &fetch);
            let offset = start * size;
            match dtype {
                DType::F32 => backend.write_at(buffer, offset, cast_slice(&values)),
                DType::Bf16 => {
                    let mut rounded = vec![bf16::ZERO; len];
                    rounded.convert_from_f32_slice(&values);
                    backend.write_at(buffer, offset, cast_slice(&rounded))
                }
                DType::I32 => {
                    let integers: Vec<i32> = values.iter().map(|&it| it as i32).collect();
                    backend.write_at(buffer, offset, cast_slice(&integers))
                }
                DType::E4M3 | DType::E5M2 => {
                    let format = dtype.fp8().expect("it is FP8");
                    let mut codes = vec![0; len];
                    format.encode_into(&values, &mut codes);
                    backend.write_at(buffer, offset, &codes)
                }
            }
        })
    }

    /// As [`Rank::write_floats`], for integers, which stay exact.
    fn write_ints(
        &mut self,
        buffer: Buffer,
        fetch: impl Fn(u64, &mut [i32]) + Sync,
    ) -> Result<(), RunError> {
        let Rank { plan, bound, backend, threads, .. } = self;
        let mut values = Vec::new();
        for_each_piece(plan, bound, buffer, |start, len, stretches| {
            fill(&mut values, len, stretches, *threads, &fetch);
            backend.write_at(buffer, start * size_of::<i32>(), cast_slice(&values))
        })
    }

    /// Sets a scalar input, if the plan has it.
    fn write_scalar(&mut self, name: &str, value: f64) -> Result<(), RunError> {
        match self.plan.buffer(name) {
            Some(buffer) if self.plan.buffers[buffer].role == Role::Input => {
                self.write_floats(buffer, |_, out| out.fill(value as f32))
            }
            _ => Ok(()),
        }
    }

    /// What this rank holds of a buffer, padding included.
    fn floats(&self, buffer: Buffer) -> Result<Vec<f32>, RunError> {
        let bound = &self.bound.buffers[buffer];
        let mut res = vec![0.0; bound.len];
        match bound.dtype {
            DType::F32 => self.backend.read(buffer, cast_slice_mut(&mut res))?,
            DType::Bf16 => {
                let mut raw = vec![bf16::ZERO; bound.len];
                self.backend.read(buffer, cast_slice_mut(&mut raw))?;
                raw.convert_to_f32_slice(&mut res);
            }
            DType::I32 => {
                let raw = self.integers(buffer)?;
                res.iter_mut().zip(raw).for_each(|(res, it)| *res = it as f32);
            }
            DType::E4M3 | DType::E5M2 => {
                let mut codes = vec![0; bound.len];
                self.backend.read(buffer, &mut codes)?;
                bound.dtype.fp8().expect("it is FP8").decode_into(&codes, &mut res);
            }
        }
        Ok(res)
    }

    /// As [`Rank::floats`], of an integer buffer.
    fn integers(&self, buffer: Buffer) -> Result<Vec<i32>, RunError> {
        let mut res = vec![0; self.bound.buffers[buffer].len];
        self.backend.read(buffer, cast_slice_mut(&mut res))?;
        Ok(res)
    }
}

/// Stretches that a coordinate holds, from the global tensor to its buffer.
pub(crate) fn held(plan: &Plan, buffer: Buffer, coord: &[u32]) -> SmallVec<[CopyRuns; 4]> {
    let data = &plan.buffers[buffer];
    let dims = data.sharding.dims.iter().zip(&data.ty.shape);
    let whole = DimLayout::whole();
    dims.map(|(layout, &size)| copy_runs(&whole, layout, size, &plan.mesh, coord, coord)).collect()
}

/// A seed for the random numbers of one micro-batch, small enough to be carried in f32.
fn dropout_seed(seed: u64, step: u64, micro_batch: u32) -> u32 {
    let [low, high] = halves(step);
    philox4x32_10([low, high, micro_batch, 0], halves(seed))[0] >> 8
}

/// How many ranks a plan has, if they can be threads.
pub(crate) fn check_ranks(plan: &Plan) -> Result<u64, RunError> {
    // A mesh of many axes may have more ranks than a u64 counts.
    let sizes = plan.mesh.axes.iter().map(|it| u64::from(it.size));
    let ranks = sizes.fold(1u64, u64::saturating_mul);
    if ranks > RANKS_MAX {
        let mesh = axes_text(plan.mesh.axes.iter().map(|it| (&it.name, it.size)), ", ");
        return Err(RunError::TooManyRanks { mesh, ranks, max: RANKS_MAX });
    }
    // Refused with a reason when it is bound.
    Ok(ranks.max(1))
}

/// Whether the arenas of so many ranks fit into this machine's memory.
fn check_memory(plan: &Plan, ranks: u64) -> Result<(), RunError> {
    let per_rank = plan.persistent_bytes.saturating_add(plan.step_bytes);
    let total = per_rank.saturating_mul(ranks);
    match checkpoint::memory("MemTotal") {
        Some(physical) if total > physical => {
            Err(RunError::OutOfMemory { ranks, per_rank, total, physical })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use cranelift_entity::PrimaryMap;
    use ir::Phase;
    use ir::TensorType;
    use ir::ops::CollectiveKind;
    use ir::placement::{Mesh, Sharding};
    use ir::plan::{BufferData, Instruction, Part, StreamKind};
    use ir::run::Run;
    use smallvec::smallvec;

    use super::*;
    use crate::comm::Occasion;

    /// One all-gather over eight ranks.
    fn gather() -> Session {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]);
        let mut plan = Plan {
            name: "gather".to_string(),
            phase: Phase::Planned,
            micro_batches: 1,
            comms: PrimaryMap::new(),
            streams: PrimaryMap::new(),
            events: 0,
            buffers: PrimaryMap::new(),
            sections: Default::default(),
            persistent_bytes: 64,
            model: None,
            step_bytes: 0,
            params: Vec::new(),
            results: Vec::new(),
            run: Run::default(),
            mesh,
        };
        let mut buffer = |sharding: &str, offset| {
            plan.buffers.push(BufferData {
                name: sharding.to_string(),
                ty: TensorType::new(DType::F32, &[8]),
                sharding: Sharding::parse(sharding, &plan.mesh).expect("a sharding"),
                role: Role::State,
                offset: Some(offset),
            })
        };
        let part = Part { src: buffer("[dp.tp]", 0), dst: buffer("[_]", 8), adds: false };
        let stream = plan.streams.push(StreamKind::Comm.into());
        let comm = plan.comms.push(plan.mesh.all());
        let kind = CollectiveKind::AllGather;
        let call = Instruction::Collective { kind, comm, parts: smallvec![part], stream };
        plan.sections[PlanSection::Step as usize].push(call);
        Session::new(&Proved::unproved(plan), &SessionOptions::default()).expect("starts")
    }

    /// A panic on one rank, while the others wait for it: all end, and it is the one that is named.
    #[test]
    fn a_panic_on_one_rank_ends_all() {
        for bad in 0..8 {
            let session = gather();
            let job = move |rank: &mut Rank| {
                assert!(rank.bound.rank != bad, "rank {bad} goes wrong");
                rank.run(PlanSection::Step)
            };
            let error = session.on_all(job).expect_err("one rank fails");
            let coord = format!("dp={}, tp={}", bad / 4, bad % 4);
            assert_eq!(
                error.to_string(),
                format!("rank {bad} ({coord}), between sections: panicked: rank {bad} goes wrong")
            );
            assert_eq!(session.prepare(), Err(error));
        }
    }

    /// A rank that leaves out a collective would pair it with the next one of the others.
    #[test]
    fn ranks_that_come_to_different_collectives_are_told() {
        let session = gather();
        let world = World::new(session.plan(), &session.hosted.fault);
        let job = move |rank: &mut Rank| {
            let index = usize::from(rank.bound.rank == 5);
            let at = crate::bind::At { section: PlanSection::Step, index };
            let (comm, group) = rank.bound.groups.iter().next().expect("a group");
            let occasion = Occasion::Instruction(at);
            world.clone().exchange(comm, group, occasion, Arc::default()).map(|_| ())
        };
        let error = session.on_all(job).expect_err("they differ");
        assert_eq!(error.code(), "PL0512", "{error}");
    }

    #[test]
    fn dropout_seeds_differ_and_are_carried_by_f32() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..4 {
            for step in 1..20 {
                for micro_batch in 0..4 {
                    let it = dropout_seed(seed, step, micro_batch);
                    assert!(it < 1 << 24);
                    seen.insert(it);
                }
            }
        }
        assert!(seen.len() >= 4 * 19 * 4 - 2, "{} of 304", seen.len());
    }
}
