//! The CPU backend: arenas at the planned offsets, ops by `kernels`, collectives among threads or processes.
//!
//! It is built so that a wrong plan gives wrong numbers on a laptop. Memory is used at the planned
//! offsets, so overlapping lifetimes clobber each other. Work is queued per stream, and queues are
//! drained in a seeded order that only `record` and `wait` restrict, so a missing wait shows. The
//! order is the same on every rank, so that ranks meet in their collectives. With
//! [`CpuOptions::check`], what no op has written is NaN, and padding must stay zero.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::AnyBitPattern;
use cranelift_entity::SecondaryMap;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use ir::DType;
use ir::ops::{LocalCx, View, ViewMut};
use ir::placement::{ReduceOp, for_each_copy};
use ir::plan::{Arena, Buffer, Comm, Event, PlanSection, Role, Stream};
use ir::quant::Format;
use smallvec::SmallVec;

use crate::bind::{At, BoundBuffer, BoundPart, BoundPlan, CollectiveCall, ComputeCall, CopyCall};
use crate::comm::{Carrier, Occasion, Post};
use crate::error::RunError;
use crate::exec::{Backend, MemoryUse, Span};
use crate::memory::{Bytes, Scratch};

/// How a [`CpuBackend`] works.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Decides in which order streams go on; the same on all ranks.
    pub order_seed: u64,
    /// Whether results are checked: every element written, padding zero.
    pub check: bool,
}

/// See the [module docs](self).
#[derive(Debug)]
pub struct CpuBackend {
    plan: Arc<BoundPlan>,
    carrier: Box<dyn Carrier>,
    options: CpuOptions,
    memory: Memory,
    scratch: Scratch,
    /// Posts of earlier collectives; free once all readers are done.
    posts: Vec<Post>,
    queues: Queues,
    at: Option<At>,
    /// Bytes of the step's arena in which something is carried to `update`, in order.
    carried: Vec<(usize, usize)>,
    /// Parts of the persistent arena as they were, each with its first byte.
    kept: Vec<(usize, Vec<u8>)>,
    /// Of the section at work, or that ran last, while times are kept.
    times: Option<Times>,
}

/// When a section began, and what has been at work since.
#[derive(Debug)]
struct Times {
    began: Instant,
    spans: Vec<Span>,
}

/// The arenas, by [`Arena`].
#[derive(Debug)]
struct Memory {
    persistent: Bytes,
    step: Bytes,
}

/// Work by stream, and how far events have come.
#[derive(Debug, Default)]
struct Queues {
    streams: Vec<VecDeque<Work>>,
    /// Records issued of each event.
    issued: SecondaryMap<Event, u64>,
    /// Records reached of each event.
    reached: SecondaryMap<Event, u64>,
    random: u64,
}

#[derive(Debug)]
enum Work {
    Compute(Arc<ComputeCall>),
    Collective(Arc<CollectiveCall>),
    Copy(CopyCall),
    Record(Event),
    /// Goes on when the event has been reached this often.
    Wait(Event, u64),
}

/// Marks what an op has not written. A quiet NaN with a payload that no arithmetic makes.
const POISON: f32 = f32::from_bits(0x7fc0_dead);

/// The largest integer below which f32 has all of them.
const EXACT: u32 = 1 << f32::MANTISSA_DIGITS;

impl CpuBackend {
    /// A backend for one rank, with its arenas zeroed.
    pub fn new(plan: Arc<BoundPlan>, carrier: Box<dyn Carrier>, options: CpuOptions) -> CpuBackend {
        let [persistent, step] = plan.arenas.map(|it| Bytes::zeroed(it as usize));
        let carried = plan.buffers.values().filter(|it| it.role == Role::Carried);
        let mut carried: Vec<(usize, usize)> =
            carried.map(|it| (it.offset, it.offset + it.bytes())).collect();
        carried.sort();
        CpuBackend {
            memory: Memory { persistent, step },
            queues: Queues::new(plan.streams),
            plan,
            carrier,
            options,
            scratch: Scratch::default(),
            posts: Vec::new(),
            at: None,
            carried,
            kept: Vec::new(),
            times: None,
        }
    }

    /// Overwrites what `section` may not find: temporaries, and what earlier steps carried. All ones is
    /// NaN, as f32 and as bf16.
    fn forget(&mut self, section: PlanSection) {
        let Memory { step, .. } = &mut self.memory;
        let (mut from, all) = (0, step.all_mut());
        let keeps = self.plan.finds_carried(section);
        for &(start, end) in self.carried.iter().filter(|_| keeps) {
            all[from..start.max(from)].fill(0xff);
            from = end.max(from);
        }
        all[from..].fill(0xff);
    }

    fn run_compute(&mut self, call: &ComputeCall) -> Result<(), RunError> {
        let CpuBackend { plan, memory, scratch, options, .. } = self;
        let mut widened: SmallVec<[Option<Vec<f32>>; 4]> = SmallVec::new();
        for &arg in &call.args {
            widened.push(load(memory, &plan.buffers[arg], scratch)?);
        }
        let mut outs: SmallVec<[Vec<f32>; 4]> = SmallVec::new();
        for &result in &call.results {
            let mut out = scratch.take(plan.buffers[result].len);
            if options.check {
                out.fill(POISON);
            }
            outs.push(out);
        }
        {
            let args = call.args.iter().zip(&widened);
            let inputs: SmallVec<[View<'_, f32>; 4]> = args
                .map(|(&arg, wide)| {
                    let buffer = &plan.buffers[arg];
                    let data = wide.as_deref().unwrap_or_else(|| memory.slice(buffer));
                    View { shape: &buffer.shape, data }
                })
                .collect();
            let results = call.results.iter().zip(&mut outs);
            let mut views: SmallVec<[ViewMut<'_, f32>; 4]> = results
                .map(|(&result, data)| ViewMut { shape: &plan.buffers[result].shape, data })
                .collect();
            kernels::run_f32(&call.op, &inputs, &mut views, &LocalCx { bounds: &call.bounds });
        }
        for (&result, out) in call.results.iter().zip(&outs) {
            let buffer = &plan.buffers[result];
            if options.check {
                check_written(buffer, out)?;
                check_padding(buffer, out)?;
            }
            store(memory, buffer, out)?;
        }
        widened.into_iter().flatten().chain(outs).for_each(|it| scratch.give(it));
        Ok(())
    }

    fn run_collective(&mut self, call: &CollectiveCall) -> Result<(), RunError> {
        let post = self.post(call);
        let group = &self.plan.groups[call.comm];
        let alone = call.kind.is_local() || group.members.len() == 1;
        let posts = match alone {
            true => None,
            false => {
                let occasion = Occasion::Instruction(call.at);
                Some(self.carrier.exchange(call.comm, group, occasion, post.clone())?)
            }
        };
        for (i, part) in call.parts.iter().enumerate() {
            let source = |member: usize| posts.as_ref().map_or(&post[i], |it| &it[member][i]);
            match part.reduce {
                None => self.move_part(part, source),
                Some(op) => self.reduce_part(part, op, source)?,
            }
        }
        self.posts.push(post);
        Ok(())
    }

    /// A copy of what this rank gives, in memory of an earlier post if one is free.
    fn post(&mut self, call: &CollectiveCall) -> Post {
        let free = self.posts.iter_mut().position(|it| Arc::get_mut(it).is_some());
        let mut post = free.map(|it| self.posts.swap_remove(it)).unwrap_or_default();
        let bytes = Arc::get_mut(&mut post).expect("nobody else has it");
        bytes.resize_with(call.parts.len(), Bytes::default);
        for (bytes, part) in bytes.iter_mut().zip(&call.parts) {
            bytes.assign(self.memory.bytes(&self.plan.buffers[part.src]));
        }
        post
    }

    /// Moves elements as they are, so integers stay exact.
    fn move_part<'a>(&mut self, part: &BoundPart, source: impl Fn(usize) -> &'a Bytes) {
        let (src, dst) = (&self.plan.buffers[part.src], &self.plan.buffers[part.dst]);
        let size = dst.dtype.bytes() as usize;
        let (src_shape, dst_shape) = (wide(&src.shape), wide(&dst.shape));
        let out = self.memory.bytes_mut(dst);
        out.fill(0);
        for peer in part.terms.iter().flatten() {
            let data = source(peer.member).all();
            for_each_copy(&src_shape, &dst_shape, &peer.runs, |from, to, len| {
                let (from, to, len) =
                    (from as usize * size, to as usize * size, len as usize * size);
                out[to..to + len].copy_from_slice(&data[from..from + len]);
            });
        }
    }

    /// Reduces in f32, in coordinate order, and rounds once.
    fn reduce_part<'a>(
        &mut self,
        part: &BoundPart,
        op: ReduceOp,
        source: impl Fn(usize) -> &'a Bytes,
    ) -> Result<(), RunError> {
        let (src, dst) = (&self.plan.buffers[part.src], &self.plan.buffers[part.dst]);
        let (src_shape, dst_shape) = (wide(&src.shape), wide(&dst.shape));
        let mut acc = self.scratch.take(dst.len);
        acc.fill(0.0);
        for (n, term) in part.terms.iter().enumerate() {
            for peer in term {
                let bytes = source(peer.member);
                for_each_copy(&src_shape, &dst_shape, &peer.runs, |from, to, len| {
                    let (from, to, len) = (from as usize, to as usize, len as usize);
                    let acc = &mut acc[to..to + len];
                    match src.dtype {
                        DType::F32 => {
                            let values: &[f32] = bytes.slice(from * 4, len);
                            reduce(op, n == 0, acc, values.iter().copied());
                        }
                        DType::Bf16 => {
                            let values: &[bf16] = bytes.slice(from * 2, len);
                            reduce(op, n == 0, acc, values.iter().map(|it| it.to_f32()));
                        }
                        DType::I32 | DType::E4M3 | DType::E5M2 => {
                            unreachable!("bind reduces real numbers only")
                        }
                    }
                });
            }
        }
        if op == ReduceOp::Avg {
            let n = part.terms.len() as f32;
            acc.iter_mut().for_each(|it| *it /= n);
        }
        if part.adds {
            let wide = load(&self.memory, dst, &mut self.scratch)?;
            let held = wide.as_deref().unwrap_or_else(|| self.memory.slice(dst));
            acc.iter_mut().zip(held).for_each(|(acc, held)| *acc += held);
            wide.into_iter().for_each(|it| self.scratch.give(it));
        }
        store(&mut self.memory, dst, &acc)?;
        self.scratch.give(acc);
        Ok(())
    }

    /// Does one piece of work of a stream.
    fn run_work(&mut self, at: At, stream: Stream, work: &Work) -> Result<(), RunError> {
        self.at = Some(at);
        let start = self.times.as_ref().map(|it| it.began.elapsed());
        match work {
            Work::Compute(call) => self.run_compute(call)?,
            Work::Collective(call) => self.run_collective(call)?,
            Work::Copy(call) => self.run_copy(*call),
            Work::Record(_) | Work::Wait(..) => (),
        }
        if let (Some(times), Some(start)) = (&mut self.times, start) {
            let ms = |it: Duration| it.as_secs_f64() * 1e3;
            let (start, end) = (ms(start), ms(times.began.elapsed()));
            times.spans.push(Span { at: Some(at), stream, start, end });
        }
        Ok(())
    }

    fn run_copy(&mut self, call: CopyCall) {
        let (src, dst) = (&self.plan.buffers[call.src], &self.plan.buffers[call.dst]);
        let (from, to) = (src.offset..src.offset + src.bytes(), dst.offset);
        let Memory { persistent, step } = &mut self.memory;
        match (src.arena, dst.arena) {
            (Arena::Persistent, Arena::Persistent) => persistent.all_mut().copy_within(from, to),
            (Arena::Step, Arena::Step) => step.all_mut().copy_within(from, to),
            (Arena::Persistent, Arena::Step) => {
                step.all_mut()[to..to + from.len()].copy_from_slice(&persistent.all()[from]);
            }
            (Arena::Step, Arena::Persistent) => {
                persistent.all_mut()[to..to + from.len()].copy_from_slice(&step.all()[from]);
            }
        }
    }
}

impl Backend for CpuBackend {
    fn begin(&mut self, section: PlanSection) -> Result<(), RunError> {
        let seed = self.options.order_seed.wrapping_add(section as u64);
        self.queues = Queues { random: seed, ..Queues::new(self.plan.streams) };
        if let Some(times) = &mut self.times {
            *times = Times { began: Instant::now(), spans: Vec::new() };
        }
        if self.options.check {
            self.forget(section);
        }
        Ok(())
    }

    fn compute(&mut self, call: &Arc<ComputeCall>, stream: Stream) -> Result<(), RunError> {
        self.queues.push(stream, Work::Compute(call.clone()));
        Ok(())
    }

    fn collective(&mut self, call: &Arc<CollectiveCall>, stream: Stream) -> Result<(), RunError> {
        self.queues.push(stream, Work::Collective(call.clone()));
        Ok(())
    }

    fn copy(&mut self, call: CopyCall, stream: Stream) -> Result<(), RunError> {
        self.queues.push(stream, Work::Copy(call));
        Ok(())
    }

    fn record(&mut self, event: Event, stream: Stream) -> Result<(), RunError> {
        self.queues.issued[event] += 1;
        self.queues.push(stream, Work::Record(event));
        Ok(())
    }

    fn wait(&mut self, event: Event, stream: Stream) -> Result<(), RunError> {
        let issued = self.queues.issued[event];
        self.queues.push(stream, Work::Wait(event, issued));
        Ok(())
    }

    fn finish(&mut self) -> Result<(), RunError> {
        while let Some((stream, work)) = self.queues.next() {
            let at = match &work {
                Work::Compute(call) => call.at,
                Work::Collective(call) => call.at,
                Work::Copy(call) => call.at,
                Work::Record(event) => {
                    self.queues.reached[*event] += 1;
                    continue;
                }
                Work::Wait(..) => continue,
            };
            self.run_work(at, stream, &work)?;
        }
        self.at = None;
        Ok(())
    }

    fn write_at(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        let all = self.memory.bytes_mut(&self.plan.buffers[buffer]);
        all[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read_at(&self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), RunError> {
        let all = self.memory.bytes(&self.plan.buffers[buffer]);
        bytes.copy_from_slice(&all[offset..offset + bytes.len()]);
        Ok(())
    }

    fn keep(&mut self, parts: &[Range<usize>]) -> Result<(), RunError> {
        let all = self.memory.persistent.all();
        self.kept = parts.iter().map(|it| (it.start, all[it.clone()].to_vec())).collect();
        Ok(())
    }

    fn restore(&mut self) -> Result<(), RunError> {
        let all = self.memory.persistent.all_mut();
        for (start, bytes) in &self.kept {
            all[*start..start + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn broadcast(&mut self, buffer: Buffer, comm: Comm, root: usize) -> Result<(), RunError> {
        let (bound, group) = (&self.plan.buffers[buffer], &self.plan.groups[comm]);
        let mut post = Bytes::default();
        if group.index == root {
            post.assign(self.memory.bytes(bound));
        }
        let occasion = Occasion::Broadcast { buffer, root };
        let posts = self.carrier.exchange(comm, group, occasion, Arc::new(vec![post]))?;
        self.memory.bytes_mut(bound).copy_from_slice(posts[root][0].all());
        Ok(())
    }

    fn at(&self) -> Option<At> {
        self.at
    }

    fn keep_times(&mut self, keep: bool) -> Result<(), RunError> {
        self.times = keep.then(|| Times { began: Instant::now(), spans: Vec::new() });
        Ok(())
    }

    fn times(&mut self) -> Result<Vec<Span>, RunError> {
        Ok(self.times.as_ref().map_or(Vec::new(), |it| it.spans.clone()))
    }

    fn memory(&self) -> Result<MemoryUse, RunError> {
        let arenas = self.plan.arenas.iter().sum();
        Ok(MemoryUse { arenas, ..MemoryUse::default() })
    }
}

impl Queues {
    fn new(streams: usize) -> Queues {
        Queues { streams: (0..streams).map(|_| VecDeque::new()).collect(), ..Queues::default() }
    }

    fn push(&mut self, stream: Stream, work: Work) {
        self.streams[stream.as_u32() as usize].push_back(work);
    }

    /// The next work of some stream that may go on, which one by chance.
    fn next(&mut self) -> Option<(Stream, Work)> {
        let ready = |it: &VecDeque<Work>| match it.front() {
            Some(&Work::Wait(event, issued)) => self.reached[event] >= issued,
            Some(_) => true,
            None => false,
        };
        let streams = self.streams.iter().enumerate().filter(|it| ready(it.1));
        let streams: SmallVec<[usize; 8]> = streams.map(|it| it.0).collect();
        if streams.is_empty() {
            // A wait follows its record in issue order, so some stream can always go on.
            assert!(self.streams.iter().all(VecDeque::is_empty), "streams wait for each other");
            return None;
        }
        let chosen = split_mix(&mut self.random) as usize % streams.len();
        let stream = streams[chosen];
        let work = self.streams[stream].pop_front()?;
        Some((Stream::from_u32(stream as u32), work))
    }
}

impl Memory {
    fn arena(&self, arena: Arena) -> &Bytes {
        match arena {
            Arena::Persistent => &self.persistent,
            Arena::Step => &self.step,
        }
    }

    fn arena_mut(&mut self, arena: Arena) -> &mut Bytes {
        match arena {
            Arena::Persistent => &mut self.persistent,
            Arena::Step => &mut self.step,
        }
    }

    fn bytes(&self, it: &BoundBuffer) -> &[u8] {
        &self.arena(it.arena).all()[it.offset..it.offset + it.bytes()]
    }

    fn bytes_mut(&mut self, it: &BoundBuffer) -> &mut [u8] {
        &mut self.arena_mut(it.arena).all_mut()[it.offset..it.offset + it.bytes()]
    }

    fn slice<T: AnyBitPattern>(&self, it: &BoundBuffer) -> &[T] {
        self.arena(it.arena).slice(it.offset, it.len)
    }
}

/// A buffer's elements as f32; `None` where that is what they are.
fn load(
    memory: &Memory,
    buffer: &BoundBuffer,
    scratch: &mut Scratch,
) -> Result<Option<Vec<f32>>, RunError> {
    if buffer.dtype == DType::F32 {
        return Ok(None);
    }
    let mut res = scratch.take(buffer.len);
    match buffer.dtype {
        DType::F32 => unreachable!("returned above"),
        DType::Bf16 => memory.slice::<bf16>(buffer).convert_to_f32_slice(&mut res),
        DType::I32 => {
            for (to, &value) in res.iter_mut().zip(memory.slice::<i32>(buffer)) {
                if value.unsigned_abs() > EXACT {
                    let (buffer, value) = (buffer.name.clone(), i64::from(value));
                    return Err(RunError::NotExact { buffer, value });
                }
                *to = value as f32;
            }
        }
        DType::E4M3 => Format::E4M3.decode_into(memory.slice(buffer), &mut res),
        DType::E5M2 => Format::E5M2.decode_into(memory.slice(buffer), &mut res),
    }
    Ok(Some(res))
}

/// Rounds to the buffer's dtype, to nearest even; FP8 saturates.
fn store(memory: &mut Memory, buffer: &BoundBuffer, values: &[f32]) -> Result<(), RunError> {
    let arena = memory.arena_mut(buffer.arena);
    match buffer.dtype {
        DType::F32 => arena.slice_mut(buffer.offset, buffer.len).copy_from_slice(values),
        DType::Bf16 => {
            arena.slice_mut::<bf16>(buffer.offset, buffer.len).convert_from_f32_slice(values);
        }
        DType::I32 => {
            let out = arena.slice_mut::<i32>(buffer.offset, buffer.len);
            for (to, &value) in out.iter_mut().zip(values) {
                if value.fract() != 0.0 || value.abs() > EXACT as f32 || value.is_nan() {
                    return Err(RunError::NotInteger { buffer: buffer.name.clone(), value });
                }
                *to = value as i32;
            }
        }
        DType::E4M3 => {
            Format::E4M3.encode_into(values, arena.slice_mut(buffer.offset, buffer.len));
        }
        DType::E5M2 => {
            Format::E5M2.encode_into(values, arena.slice_mut(buffer.offset, buffer.len));
        }
    }
    Ok(())
}

fn check_written(buffer: &BoundBuffer, out: &[f32]) -> Result<(), RunError> {
    match out.iter().position(|it| it.to_bits() == POISON.to_bits()) {
        Some(element) => Err(RunError::Unwritten { buffer: buffer.name.clone(), element }),
        None => Ok(()),
    }
}

/// NaN passes: an infinity next to zero padding makes one, and it shows in the loss anyway.
fn check_padding(buffer: &BoundBuffer, out: &[f32]) -> Result<(), RunError> {
    if buffer.extents == buffer.shape {
        return Ok(());
    }
    for (element, &value) in out.iter().enumerate() {
        let mut rest = element;
        let dims = buffer.shape.iter().zip(&buffer.extents).rev();
        let is_padding = dims.fold(false, |padding, (&size, &extent)| {
            let at = rest % size;
            rest /= size;
            padding || at >= extent
        });
        if is_padding && value != 0.0 && !value.is_nan() {
            return Err(RunError::Padding { buffer: buffer.name.clone(), element, value });
        }
    }
    Ok(())
}

/// `acc = op(acc, values)`; the first term only sets it. Max and min keep NaN.
fn reduce(op: ReduceOp, first: bool, acc: &mut [f32], values: impl Iterator<Item = f32>) {
    for (acc, value) in acc.iter_mut().zip(values) {
        let takes = match op {
            ReduceOp::Sum | ReduceOp::Avg => {
                *acc = if first { value } else { *acc + value };
                continue;
            }
            ReduceOp::Max => value > *acc,
            ReduceOp::Min => value < *acc,
        };
        if first || takes || value.is_nan() {
            *acc = value;
        }
    }
}

fn wide(shape: &[usize]) -> SmallVec<[u64; 4]> {
    shape.iter().map(|&it| it as u64).collect()
}

/// The next number of SplitMix64.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn buffer(shape: &[usize], extents: &[usize]) -> BoundBuffer {
        BoundBuffer {
            name: "x".to_string(),
            dtype: DType::F32,
            shape: shape.into(),
            extents: extents.into(),
            len: shape.iter().product(),
            role: Role::Temp,
            arena: Arena::Step,
            offset: 0,
        }
    }

    #[test]
    fn an_element_that_is_not_written_is_found() {
        let x = buffer(&[3], &[3]);
        assert_eq!(check_written(&x, &[0.0, f32::NAN, 1.0]), Ok(()));
        let error = RunError::Unwritten { buffer: "x".to_string(), element: 1 };
        assert_eq!(check_written(&x, &[0.0, POISON, 1.0]), Err(error));
    }

    #[test]
    fn padding_is_what_lies_beyond_the_extent_of_any_dim() {
        let x = buffer(&[2, 3], &[1, 2]);
        assert_eq!(check_padding(&x, &[1.0, 2.0, 0.0, 0.0, f32::NAN, 0.0]), Ok(()));
        for element in [2, 3, 4, 5] {
            let mut values = [1.0, 2.0, 0.0, 0.0, 0.0, 0.0];
            values[element] = -1.0;
            let error = RunError::Padding { buffer: "x".to_string(), element, value: -1.0 };
            assert_eq!(check_padding(&x, &values), Err(error));
        }
        // A rank that holds nothing.
        let empty = buffer(&[2, 3], &[0, 3]);
        assert_eq!(check_padding(&empty, &[0.0; 6]), Ok(()));
        assert!(check_padding(&empty, &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]).is_err());
    }

    #[test]
    fn integers_are_carried_only_where_f32_has_them() {
        let ids = BoundBuffer { dtype: DType::I32, ..buffer(&[2], &[2]) };
        let mut memory = Memory { persistent: Bytes::default(), step: Bytes::zeroed(8) };
        let mut scratch = Scratch::default();
        let mut carried = |values: [f32; 2]| {
            store(&mut memory, &ids, &values)?;
            load(&memory, &ids, &mut scratch)
        };
        let exact = 2f32.powi(24);
        assert_eq!(carried([exact, -exact]), Ok(Some(vec![exact, -exact])));
        for value in [0.5, f32::INFINITY, exact + 2.0] {
            let error = RunError::NotInteger { buffer: "x".to_string(), value };
            assert_eq!(carried([value, 0.0]), Err(error));
        }
        memory.bytes_mut(&ids)[..4].copy_from_slice(&16_777_217i32.to_le_bytes());
        let error = RunError::NotExact { buffer: "x".to_string(), value: 16_777_217 };
        assert_eq!(load(&memory, &ids, &mut scratch), Err(error));
    }

    /// The order is a choice among streams, and the same for the same seed.
    #[test]
    fn the_order_of_streams_is_seeded() {
        let order = |seed: u64| -> Vec<u32> {
            let mut queues = Queues { random: seed, ..Queues::new(2) };
            for i in 0..8 {
                let stream = Stream::from_u32(i % 2);
                queues.push(stream, Work::Record(Event::from_u32(i)));
            }
            let next = || queues.next();
            std::iter::from_fn(next)
                .map(|(_, work)| match work {
                    Work::Record(event) => event.as_u32(),
                    _ => unreachable!("only records were queued"),
                })
                .collect()
        };
        assert_eq!(order(1), order(1));
        let orders: std::collections::BTreeSet<Vec<u32>> = (0..20).map(order).collect();
        assert!(orders.len() > 10, "{orders:?}");
        for order in orders {
            for stream in [0, 1] {
                let of_stream: Vec<u32> =
                    order.iter().copied().filter(|it| it % 2 == stream).collect();
                let expect: SmallVec<[u32; 4]> =
                    smallvec![stream, stream + 2, stream + 4, stream + 6];
                assert_eq!(of_stream, expect.as_slice());
            }
        }
    }
}
