//! Runs a plan on all its coordinates, in one thread and in whatever order streams allow.
//!
//! This is the ground truth: it has real bytes at the planned offsets and knows nothing of verification.
//! At each turn one stream of one coordinate does one thing; which, a [`Schedule`] says, so that streams
//! may be far apart, differently at each coordinate. A collective takes its operands when it is reached,
//! and makes its results when all members have reached it, later. Memory that nothing has written since
//! its arena was forgotten may not be read.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use half::bf16;
use ir::DType;
use ir::ops::{LocalCx, View, ViewMut};
use ir::placement::{ReduceOp, for_each_copy};
use ir::plan::{Arena, Buffer, Event, Plan, PlanSection, Role};
use ir::quant::Format;
use ir::random::{Stream as Random, stream_key};
use runtime::bind::{
    self, BoundBuffer, BoundInstruction, BoundPart, BoundPlan, CollectiveCall, ComputeCall,
};

/// Steps that are trained: the second sees what the first one left.
const STEPS: u64 = 2;

/// Which stream goes on.
#[derive(Debug, Clone, Copy)]
pub enum Schedule {
    /// As issued.
    Issue,
    /// The lowest stream that can: computing goes as far ahead as it may.
    ComputeFirst,
    /// The highest that can: communication goes as far ahead as it may.
    CommFirst,
    /// By chance, with long runs of one stream, and differently at each coordinate.
    Random(u64),
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A hash of all parameters, states and results of all coordinates.
    Done(u64),
    /// Nobody can go on.
    Hangs,
    /// Ranks of a group meet in different collectives.
    Diverges,
    /// Bytes are read that nobody wrote.
    Unwritten,
    /// It cannot be bound, or an op cannot work on what it gets.
    Fails,
}

/// Runs a plan for a few steps.
pub fn run(plan: &Plan, schedule: Schedule) -> Outcome {
    // A mutant may name what is not there, or give an op operands of other types than it takes: that may panic.
    let result = catch_unwind(AssertUnwindSafe(|| {
        let ranks = 0..plan.mesh.n_ranks();
        let bound: Result<Vec<BoundPlan>, _> = ranks.map(|it| bind::bind(plan, it)).collect();
        Machine::new(plan, bound.map_err(|_| Outcome::Fails)?, schedule).train()
    }));
    match result {
        Ok(Ok(hash)) => Outcome::Done(hash),
        Ok(Err(outcome)) => outcome,
        Err(_) => Outcome::Fails,
    }
}

type Turn<T = ()> = Result<T, Outcome>;

/// What one member gives to a collective.
type Post = Rc<Vec<Vec<u8>>>;

/// What each member has given, and to which instruction.
type Meeting = Vec<Option<(usize, Post)>>;

struct Machine<'a> {
    plan: &'a Plan,
    ranks: Vec<Rank>,
    /// By communicator and group: what members have given.
    meetings: BTreeMap<(u32, usize), Meeting>,
    schedule: Schedule,
    random: u64,
    /// The coordinate that goes on, and for how many turns.
    favourite: (usize, usize),
}

struct Rank {
    bound: Rc<BoundPlan>,
    arenas: [Memory; 2],
    streams: Vec<Queue>,
    recorded: Vec<bool>,
    /// The stream that goes on, and for how many turns.
    favourite: (usize, usize),
}

struct Memory {
    bytes: Vec<u8>,
    written: Vec<bool>,
}

#[derive(Default)]
struct Queue {
    /// Indices of instructions.
    work: VecDeque<usize>,
    state: Doing,
}

#[derive(Default, Clone)]
enum Doing {
    #[default]
    Nothing,
    /// It has given, and others have not.
    Waiting,
    /// All have given.
    Met(Vec<Post>),
}

impl<'a> Machine<'a> {
    fn new(plan: &'a Plan, bound: Vec<BoundPlan>, schedule: Schedule) -> Machine<'a> {
        let ranks = bound.into_iter().map(|bound| {
            let memory = |it: u64| Memory {
                bytes: vec![0xff; it as usize],
                written: vec![false; it as usize],
            };
            let arenas = bound.arenas.map(memory);
            let bound = Rc::new(bound);
            Rank { bound, arenas, streams: Vec::new(), recorded: Vec::new(), favourite: (0, 0) }
        });
        let random = match schedule {
            Schedule::Random(seed) => seed,
            Schedule::Issue | Schedule::ComputeFirst | Schedule::CommFirst => 0,
        };
        let (ranks, meetings) = (ranks.collect(), BTreeMap::new());
        Machine { plan, ranks, meetings, schedule, random, favourite: (0, 0) }
    }

    fn train(mut self) -> Turn<u64> {
        let mut hasher = DefaultHasher::new();
        self.fill(|_, data| match data.role {
            Role::Param => {
                let random = Random { seed: 3, key: stream_key(&data.name) };
                Some(Box::new(move |at| random.uniform(at) as f32 - 0.5))
            }
            Role::State => Some(Box::new(|_| 0.0)),
            Role::Input | Role::Carried | Role::Temp => None,
        });
        self.section(PlanSection::Prepare)?;
        for step in 1..=STEPS {
            for micro_batch in 0..self.plan.micro_batches {
                let vocab = self.plan.run.vocab.max(1);
                self.fill(|_, data| {
                    if data.role != Role::Input {
                        return None;
                    }
                    let key = stream_key(&data.name) ^ (step * 64 + u64::from(micro_batch));
                    let random = Random { seed: 5, key };
                    match data.name.as_str() {
                        "lr" => Some(Box::new(|_| 0.05)),
                        "step" => Some(Box::new(move |_| step as f32)),
                        _ if data.ty.dtype.is_float() => Some(Box::new(move |_| key as u16 as f32)),
                        _ => Some(Box::new(move |at| {
                            (random.uniform(at) * vocab as f64).floor() as f32
                        })),
                    }
                });
                self.section(self.plan.micro_batch(micro_batch))?;
            }
            self.section(PlanSection::Update)?;
            for (name, buffer) in &self.plan.results {
                for rank in &self.ranks {
                    (name, rank.read(&rank.bound.buffers[*buffer])?).hash(&mut hasher);
                }
            }
        }
        let mut kept: Vec<_> = self.plan.buffers.iter().collect();
        kept.retain(|it| matches!(it.1.role, Role::Param | Role::State));
        kept.sort_by_key(|it| &it.1.name);
        for rank in &self.ranks {
            for (buffer, data) in &kept {
                (&data.name, rank.read(&rank.bound.buffers[*buffer])?).hash(&mut hasher);
            }
        }
        Ok(hasher.finish())
    }

    /// Writes buffers from outside: `values` gives a function of the global index, or leaves one alone.
    fn fill(
        &mut self,
        values: impl Fn(Buffer, &ir::plan::BufferData) -> Option<Box<dyn Fn(u64) -> f32>>,
    ) {
        for (buffer, data) in &self.plan.buffers {
            let Some(value) = values(buffer, data) else { continue };
            for rank in &mut self.ranks {
                let bound = rank.bound.clone();
                let to = &bound.buffers[buffer];
                let mut local = vec![0.0; to.len];
                let boxes =
                    data.sharding.local_boxes(&data.ty.shape, &self.plan.mesh, &bound.coord);
                for it in boxes {
                    let sizes: Vec<usize> = it.chunk.sizes.iter().map(|&it| it as usize).collect();
                    for n in 0..sizes.iter().product() {
                        let (mut rest, mut global, mut at) = (n, 0, 0);
                        let mut strides = (1, 1);
                        for dim in (0..sizes.len()).rev() {
                            let index = rest % sizes[dim];
                            rest /= sizes[dim];
                            global += (it.chunk.offsets[dim] + index as u64) * strides.0;
                            at += (it.at[dim] as usize + index) * strides.1;
                            strides.0 *= data.ty.shape[dim];
                            strides.1 *= to.shape[dim];
                        }
                        local[at] = value(global);
                    }
                }
                rank.write(to, &encode(to.dtype, &local));
            }
        }
    }

    fn section(&mut self, section: PlanSection) -> Turn {
        let instructions = self.plan.section(section);
        for rank in &mut self.ranks {
            rank.forget(self.plan, section);
            rank.recorded = vec![false; rank.bound.events];
            rank.streams = (0..rank.bound.streams).map(|_| Queue::default()).collect();
            for (index, instruction) in instructions.iter().enumerate() {
                rank.streams[instruction.stream().as_u32() as usize].work.push_back(index);
            }
        }
        while let Some((rank, stream)) = self.pick(section) {
            self.turn(section, rank, stream)?;
        }
        match self.ranks.iter().all(|it| it.streams.iter().all(|it| it.work.is_empty())) {
            true => Ok(()),
            false => Err(Outcome::Hangs),
        }
    }

    /// Streams of a coordinate that can go on.
    fn ready(&self, section: PlanSection, rank: usize) -> Vec<usize> {
        let rank = &self.ranks[rank];
        let mut res = Vec::new();
        for (stream, queue) in rank.streams.iter().enumerate() {
            let Some(&index) = queue.work.front() else { continue };
            let ready = match (&queue.state, &rank.bound.sections[section as usize][index]) {
                (Doing::Waiting, _) => false,
                (Doing::Met(_), _) => true,
                (Doing::Nothing, BoundInstruction::Wait(event, _)) => {
                    rank.recorded[event_index(*event)]
                }
                // It may be in the same meeting on another stream.
                (Doing::Nothing, BoundInstruction::Collective(call, _)) => {
                    let group = &rank.bound.groups[call.comm];
                    let posts = self.meetings.get(&(call.comm.as_u32(), group.id));
                    posts.is_none_or(|it| it[group.index].is_none())
                }
                (Doing::Nothing, _) => true,
            };
            if ready {
                res.push(stream);
            }
        }
        res
    }

    fn pick(&mut self, section: PlanSection) -> Option<(usize, usize)> {
        let n = self.ranks.len();
        let start = match self.schedule {
            Schedule::Random(_) => {
                if self.favourite.1 == 0 {
                    self.favourite = (self.below(n), 1 + self.below(60));
                }
                self.favourite.1 -= 1;
                self.favourite.0
            }
            Schedule::Issue | Schedule::ComputeFirst | Schedule::CommFirst => 0,
        };
        let (rank, ready) = (0..n).map(|it| (start + it) % n).find_map(|it| {
            let ready = self.ready(section, it);
            (!ready.is_empty()).then_some((it, ready))
        })?;
        let front = |it: &usize| self.ranks[rank].streams[*it].work[0];
        let stream = match self.schedule {
            Schedule::Issue => ready.iter().copied().min_by_key(|it| front(it))?,
            Schedule::ComputeFirst => ready[0],
            Schedule::CommFirst => ready[ready.len() - 1],
            Schedule::Random(_) => {
                if self.ranks[rank].favourite.1 == 0 {
                    let (favourite, turns) = (self.below(8), 1 + self.below(24));
                    self.ranks[rank].favourite = (favourite, turns);
                }
                self.ranks[rank].favourite.1 -= 1;
                ready[self.ranks[rank].favourite.0 % ready.len()]
            }
        };
        Some((rank, stream))
    }

    /// A number below `n`, by SplitMix64.
    fn below(&mut self, n: usize) -> usize {
        super::split_mix(&mut self.random) as usize % n
    }

    /// One stream of one coordinate does one thing.
    fn turn(&mut self, section: PlanSection, number: usize, stream: usize) -> Turn {
        let rank = &mut self.ranks[number];
        let bound = rank.bound.clone();
        let queue = &mut rank.streams[stream];
        let index = queue.work[0];
        let state = std::mem::take(&mut queue.state);
        match &bound.sections[section as usize][index] {
            BoundInstruction::Compute(call, _) => rank.compute(call)?,
            BoundInstruction::Copy(call, _) => {
                let bytes = rank.read(&bound.buffers[call.src])?;
                rank.write(&bound.buffers[call.dst], &bytes);
            }
            BoundInstruction::Record(event, _) => rank.recorded[event_index(*event)] = true,
            BoundInstruction::Wait(..) => (),
            BoundInstruction::Collective(call, _) => {
                let group = &bound.groups[call.comm];
                match state {
                    Doing::Met(posts) => rank.collective(call, |it| &posts[it])?,
                    Doing::Nothing | Doing::Waiting => {
                        let post = rank.post(call)?;
                        if call.kind.is_local() || group.members.len() == 1 {
                            rank.collective(call, |_| &post)?;
                        } else {
                            rank.streams[stream].state = Doing::Waiting;
                            let place = (call.comm.as_u32(), group.id);
                            return self.meet(place, group.members.len(), (number, index), post);
                        }
                    }
                }
            }
        }
        self.ranks[number].streams[stream].work.pop_front();
        Ok(())
    }

    /// A coordinate gives `post`; the last one lets all go on.
    fn meet(
        &mut self,
        place: (u32, usize),
        size: usize,
        (number, index): (usize, usize),
        post: Post,
    ) -> Turn {
        let posts = self.meetings.entry(place).or_insert_with(|| vec![None; size]);
        let comm = ir::plan::Comm::from_u32(place.0);
        posts[self.ranks[number].bound.groups[comm].index] = Some((index, post));
        let Some(all) = posts.iter().cloned().collect::<Option<Vec<_>>>() else { return Ok(()) };
        self.meetings.remove(&place);
        if all.iter().any(|it| it.0 != index) {
            return Err(Outcome::Diverges);
        }
        let met: Vec<Post> = all.into_iter().map(|it| it.1).collect();
        let members = self.ranks[number].bound.groups[comm].members.clone();
        for member in members {
            let streams = &mut self.ranks[member as usize].streams;
            let waiting = streams.iter_mut().filter(|it| it.work.front() == Some(&index));
            waiting.for_each(|it| it.state = Doing::Met(met.clone()));
        }
        Ok(())
    }
}

impl Rank {
    /// What `section` may not find is not there: temporaries, and what earlier steps carried.
    fn forget(&mut self, plan: &Plan, section: PlanSection) {
        let memory = &mut self.arenas[Arena::Step as usize];
        let mut kept = vec![false; memory.bytes.len()];
        if self.bound.finds_carried(section) {
            let carried = plan.buffers.iter().filter(|it| it.1.role == Role::Carried);
            for (buffer, _) in carried {
                let it = &self.bound.buffers[buffer];
                kept[it.offset..it.offset + it.bytes()].fill(true);
            }
        }
        for (at, _) in kept.iter().enumerate().filter(|it| !it.1) {
            memory.bytes[at] = 0xff;
            memory.written[at] = false;
        }
    }

    fn read(&self, it: &BoundBuffer) -> Turn<Vec<u8>> {
        let memory = &self.arenas[it.arena as usize];
        let range = it.offset..it.offset + it.bytes();
        match memory.written[range.clone()].iter().all(|it| *it) {
            true => Ok(memory.bytes[range].to_vec()),
            false => Err(Outcome::Unwritten),
        }
    }

    fn write(&mut self, it: &BoundBuffer, bytes: &[u8]) {
        let memory = &mut self.arenas[it.arena as usize];
        let range = it.offset..it.offset + bytes.len();
        memory.bytes[range.clone()].copy_from_slice(bytes);
        memory.written[range].fill(true);
    }

    fn compute(&mut self, call: &ComputeCall) -> Turn {
        let bound = self.bound.clone();
        let load = |it: &Buffer| -> Turn<Vec<f32>> {
            let buffer = &bound.buffers[*it];
            Ok(decode(buffer.dtype, &self.read(buffer)?))
        };
        let args = call.args.iter().map(load).collect::<Turn<Vec<_>>>()?;
        let mut outs: Vec<Vec<f32>> =
            call.results.iter().map(|&it| vec![f32::NAN; bound.buffers[it].len]).collect();
        let inputs: Vec<View<'_, f32>> = call
            .args
            .iter()
            .zip(&args)
            .map(|(&it, data)| View { shape: &bound.buffers[it].shape, data })
            .collect();
        let results = call.results.iter().zip(&mut outs);
        let mut results: Vec<ViewMut<'_, f32>> =
            results.map(|(&it, data)| ViewMut { shape: &bound.buffers[it].shape, data }).collect();
        kernels::run_f32(&call.op, &inputs, &mut results, &LocalCx { bounds: &call.bounds });
        for (&it, out) in call.results.iter().zip(&outs) {
            let buffer = &bound.buffers[it];
            self.write(buffer, &encode(buffer.dtype, out));
        }
        Ok(())
    }

    fn post(&self, call: &CollectiveCall) -> Turn<Post> {
        let parts = call.parts.iter().map(|it| self.read(&self.bound.buffers[it.src]));
        Ok(Rc::new(parts.collect::<Turn<_>>()?))
    }

    fn collective<'p>(&mut self, call: &CollectiveCall, posts: impl Fn(usize) -> &'p Post) -> Turn {
        for (i, part) in call.parts.iter().enumerate() {
            self.part(part, |member| &posts(member)[i])?;
        }
        Ok(())
    }

    /// In f32 and in coordinate order, where it reduces; else elements move as they are.
    fn part<'p>(&mut self, part: &BoundPart, source: impl Fn(usize) -> &'p Vec<u8>) -> Turn {
        let bound = self.bound.clone();
        let (src, dst) = (&bound.buffers[part.src], &bound.buffers[part.dst]);
        let wide = |it: &[usize]| it.iter().map(|&it| it as u64).collect::<Vec<u64>>();
        let (from, to) = (wide(&src.shape), wide(&dst.shape));
        let size = dst.dtype.bytes() as usize;
        if let Some(op) = part.reduce {
            let mut sum = vec![0.0_f32; dst.len];
            for (n, term) in part.terms.iter().enumerate() {
                for peer in term {
                    let values = decode(src.dtype, source(peer.member));
                    for_each_copy(&from, &to, &peer.runs, |from, to, len| {
                        for i in 0..len as usize {
                            let (old, new) = (&mut sum[to as usize + i], values[from as usize + i]);
                            *old = if n == 0 { new } else { reduced(op, *old, new) };
                        }
                    });
                }
            }
            if op == ReduceOp::Avg {
                sum.iter_mut().for_each(|it| *it /= part.terms.len() as f32);
            }
            if part.adds {
                let held = decode(dst.dtype, &self.read(dst)?);
                sum.iter_mut().zip(held).for_each(|(sum, held)| *sum += held);
            }
            self.write(dst, &encode(dst.dtype, &sum));
            return Ok(());
        }
        let mut out = vec![0; dst.bytes()];
        for peer in part.terms.iter().flatten() {
            let bytes = source(peer.member);
            for_each_copy(&from, &to, &peer.runs, |from, to, len| {
                let (from, to, len) =
                    (from as usize * size, to as usize * size, len as usize * size);
                out[to..to + len].copy_from_slice(&bytes[from..from + len]);
            });
        }
        self.write(dst, &out);
        Ok(())
    }
}

fn reduced(op: ReduceOp, a: f32, b: f32) -> f32 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Max if b > a || b.is_nan() => b,
        ReduceOp::Min if b < a || b.is_nan() => b,
        ReduceOp::Max | ReduceOp::Min => a,
    }
}

fn event_index(event: Event) -> usize {
    event.as_u32() as usize
}

/// Bytes as numbers.
fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let words = || bytes.as_chunks::<4>().0.iter().copied();
    match dtype {
        DType::F32 => words().map(f32::from_ne_bytes).collect(),
        DType::I32 => words().map(|it| i32::from_ne_bytes(it) as f32).collect(),
        DType::Bf16 => {
            bytes.as_chunks().0.iter().map(|it| bf16::from_ne_bytes(*it).to_f32()).collect()
        }
        DType::E4M3 => bytes.iter().map(|&it| Format::E4M3.decode(it)).collect(),
        DType::E5M2 => bytes.iter().map(|&it| Format::E5M2.decode(it)).collect(),
    }
}

/// Numbers as bytes, rounded to nearest even.
fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|it| it.to_ne_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|it| (*it as i32).to_ne_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|it| bf16::from_f32(*it).to_ne_bytes()).collect(),
        DType::E4M3 => codes(Format::E4M3, values),
        DType::E5M2 => codes(Format::E5M2, values),
    }
}

fn codes(format: Format, values: &[f32]) -> Vec<u8> {
    let mut res = vec![0; values.len()];
    format.encode_into(values, &mut res);
    res
}
