//! The CUDA backend: the plan on one GPU.
//!
//! Everything is decided when the plan is loaded: programs, addresses, functions. Running queues it on
//! the plan's streams. The second time a section runs, it is recorded as a CUDA graph, which then
//! replaces the queueing. [`CudaBackend::finish`] waits for the streams, for as long as they move.

#![allow(unsafe_code)]

pub mod attention;
pub mod cache;
pub mod check;
pub mod doctor;
pub mod driver;
pub mod gemm;
pub mod graph;
mod handles;
pub mod library;
pub mod module;
pub mod nvrtc;
pub mod program;
pub mod staging;
mod times;
pub mod watch;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ir::plan::{
    ALIGN, Arena, Buffer, BySection, Comm, Event, Instruction, Plan, PlanSection, Stream,
    StreamData, StreamKind,
};
use kernels::cuda::transport::Transfer;
use kernels::cuda::{Pointer, Program, Work};

use crate::backend::cuda::driver::{CudaEvent, CudaStream, Device, DeviceMemory};
use crate::backend::cuda::graph::Graph;
use crate::backend::cuda::program::{Loader, Place, Prepared, batches};
use crate::backend::cuda::staging::Staging;
use crate::backend::cuda::times::Times;
use crate::backend::cuda::watch::{Markers, Seen, Watch, passes_within};
use crate::bind::{
    At, BoundBuffer, BoundInstruction, BoundPlan, CollectiveCall, ComputeCall, CopyCall,
    coord_name, describe,
};
use crate::comm::control::Control;
use crate::comm::movement;
use crate::comm::nccl::Comms;
use crate::error::RunError;
use crate::exec::{self, Backend, MemoryUse, Span};

/// How long streams have to come to rest after communicators are aborted.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// What a rank takes of its GPU's memory beside the plan's: the context, modules, graphs and the
/// libraries' own memory. 543 MiB were measured for Llama-3-8B's layers on an H200 with driver 580 and
/// CUDA 13.0; declared with 5 % of room.
pub const CONTEXT_BYTES: u64 = 570 << 20;

/// What the first communicator takes besides, with NCCL 2.28 between two H200s: up to 945 MiB
/// were measured, kernels of FP8 and their graphs included.
pub const FIRST_COMMUNICATOR_BYTES: u64 = 950 << 20;

/// What each further one takes: 226 MiB were measured.
pub const COMMUNICATOR_BYTES: u64 = 235 << 20;

/// How a [`CudaBackend`] works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Without any progress for this long, a section has failed.
    pub timeout: Duration,
    /// Waits after each instruction, so that a fault is blamed on the one that made it; no graphs.
    pub synchronous: bool,
    /// Whether sections are recorded as graphs.
    pub graphs: bool,
}

impl CudaOptions {
    /// What the environment says: `PLANC_TIMEOUT_S` (600), `PLANC_CUDA_SYNC` (0).
    pub fn from_env() -> Result<CudaOptions, RunError> {
        let set = |name: &str| std::env::var(name).ok().filter(|it| !it.is_empty());
        let seconds = match set(TIMEOUT) {
            None => 600,
            Some(value) => value.parse().ok().filter(|&it| it > 0).ok_or_else(|| {
                let why = "is not a number of seconds".to_string();
                RunError::LaunchValue { name: TIMEOUT, value, why }
            })?,
        };
        let synchronous = set("PLANC_CUDA_SYNC").is_some_and(|it| it != "0");
        let timeout = Duration::from_secs(seconds);
        Ok(CudaOptions { timeout, synchronous, graphs: !synchronous })
    }
}

/// How many seconds without progress end a run.
const TIMEOUT: &str = "PLANC_TIMEOUT_S";

/// See the [module docs](self). For the thread that made it, which closes it before it is dropped:
/// freeing memory waits for the device, and what waits for another rank may wait for good.
pub struct CudaBackend {
    // In this order they are dropped: graphs before the communicators that they use, and memory last.
    sections: BySection<Section>,
    /// Keeps the modules that programs launch functions of.
    _loader: Loader,
    comms: Arc<Comms>,
    markers: Markers,
    /// Reading uses it too, and changes nothing that one could see.
    staging: RefCell<Staging>,
    events: Vec<CudaEvent>,
    /// For forking and joining the streams of a graph.
    joints: Vec<CudaEvent>,
    streams: Vec<CudaStream>,
    _tables: DeviceMemory,
    memory: Memory,
    bound: Arc<BoundPlan>,
    device: Device,
    control: Arc<dyn Control>,
    options: CudaOptions,
    /// What is marked, by section and instruction, for reports of failures.
    names: BTreeMap<(PlanSection, usize), String>,
    warnings: Vec<String>,
    /// Parts of the persistent arena as they were.
    kept: Option<Kept>,
    /// While times are kept.
    times: Option<Times>,
    /// Streams or communicators did not end: nothing here may be freed any more.
    stuck: bool,
    /// The section that was begun last.
    running: PlanSection,
    at: Option<At>,
}

/// A copy of parts of the persistent arena, one behind the other.
#[derive(Debug)]
struct Kept {
    parts: Vec<Range<usize>>,
    memory: DeviceMemory,
}

/// What is ready of a section.
#[derive(Debug, Default)]
struct Section {
    graph: Recording,
    /// By instruction: what runs there. Nothing for calls that a batch before them runs.
    programs: Vec<Option<Prepared>>,
    /// By instruction: what follows the program of a collective.
    movements: Vec<Option<Movement>>,
}

/// The part of a collective that leaves the rank, after its program has packed.
#[derive(Debug)]
struct Movement {
    transfers: Vec<Transfer>,
    place: Place,
    /// Unpacks.
    after: Prepared,
}

/// How far a section is on its way to a graph.
#[derive(Debug, Default)]
enum Recording {
    /// It has not run: libraries may still have to set things up, which cannot be recorded.
    #[default]
    Fresh,
    /// It ran once.
    Ran,
    /// It is recorded.
    Graph(Graph),
    /// It cannot be.
    Impossible,
}

/// One allocation: the arenas, then each stream's scratch.
#[derive(Debug)]
struct Memory {
    _block: DeviceMemory,
    /// Addresses of the arenas, by [`Arena`].
    arenas: [u64; 2],
    /// Address and size, by stream.
    workspaces: Vec<(u64, u64)>,
}

impl CudaBackend {
    /// The program of one rank, ready to run on `device`, which is current on this thread; with zeros in
    /// what survives a section.
    pub fn new(
        plan: &Plan,
        bound: Arc<BoundPlan>,
        device: Device,
        comms: Comms,
        control: Arc<dyn Control>,
        options: CudaOptions,
    ) -> Result<CudaBackend, RunError> {
        check_alignment(&bound)?;
        let lowered = lower(plan, &bound)?;
        let mut loader = Loader::new(device)?;
        loader.tune(lowered.iter().flat_map(Lowered::work), &*control)?;
        loader.load(lowered.iter().flat_map(Lowered::work))?;
        let memory = Memory::new(&bound, &workspaces(plan, &lowered), &comms)?;
        let words = lowered.iter().flat_map(Lowered::programs).map(table_words);
        let tables = DeviceMemory::new(8 * words.sum::<u64>())?;
        let sections = prepare(&bound, &lowered, &mut loader, &memory, &tables)?;
        let streams = streams(plan)?;
        let events = |n: usize| (0..n).map(|_| CudaEvent::new()).collect::<Result<Vec<_>, _>>();
        Ok(CudaBackend {
            sections,
            _loader: loader,
            comms: Arc::new(comms),
            markers: Markers::new(&streams)?,
            staging: RefCell::new(Staging::new()?),
            events: events(bound.events)?,
            joints: events(streams.len())?,
            streams,
            _tables: tables,
            memory,
            device,
            control,
            options,
            names: names(plan),
            warnings: Vec::new(),
            kept: None,
            times: None,
            stuck: false,
            running: PlanSection::Prepare,
            at: None,
            bound,
        })
    }

    fn stream(&self, stream: Stream) -> &CudaStream {
        &self.streams[stream.as_u32() as usize]
    }

    fn address(&self, buffer: Buffer) -> u64 {
        self.memory.address(&self.bound.buffers[buffer])
    }

    /// Copies each part that is kept; `way` orders its addresses in the arena and in the copy, source first.
    fn copy_kept(&self, way: impl Fn(u64, u64) -> (u64, u64)) -> Result<(), RunError> {
        let Some(Kept { parts, memory }) = &self.kept else { return Ok(()) };
        let mut copy = memory.address;
        for part in parts {
            let arena = self.memory.arenas[Arena::Persistent as usize] + part.start as u64;
            let (from, to) = way(arena, copy);
            self.streams[0].copy(from, to, part.len() as u64)?;
            copy += part.len() as u64;
        }
        self.streams[0].synchronize()
    }

    /// Marks where an instruction starts, while times are kept.
    fn start_span(&self, stream: Stream) -> Result<Option<CudaEvent>, RunError> {
        self.times.as_ref().map(|_| times::mark(self.stream(stream))).transpose()
    }

    /// Marks where it ends.
    fn end_span(
        &mut self,
        start: Option<CudaEvent>,
        at: Option<At>,
        stream: Stream,
    ) -> Result<(), RunError> {
        let Some(start) = start else { return Ok(()) };
        let end = times::mark(self.stream(stream))?;
        if let Some(times) = &mut self.times {
            times.push(at, stream, [start, end]);
        }
        Ok(())
    }

    /// After each instruction: waits for it, if it is wanted so.
    fn issued(&mut self) -> Result<(), RunError> {
        if self.options.synchronous { self.rest() } else { Ok(()) }
    }

    /// Waits until all streams are at rest.
    fn rest(&mut self) -> Result<(), RunError> {
        let mut watch = Watch::new();
        loop {
            let busy = self.busy()?;
            if busy.is_empty() {
                return Ok(());
            }
            if self.control.fault().is_some() {
                self.at = self.reached(&busy);
                self.abort();
                return Err(RunError::Stopped);
            }
            if let Err(error) = self.comms.poll() {
                self.at = self.reached(&busy);
                self.abort();
                return Err(error);
            }
            let still = watch.still_for(self.seen(&busy));
            if still >= self.options.timeout {
                let streams = self.progress(&busy);
                self.at = self.reached(&busy);
                self.abort();
                let (seconds, section) = (still.as_secs(), self.running);
                return Err(RunError::Stuck { seconds, section, streams });
            }
            watch.pause();
        }
    }

    /// Which streams have work.
    fn busy(&self) -> Result<Vec<usize>, RunError> {
        let mut res = Vec::new();
        for (number, stream) in self.streams.iter().enumerate() {
            match stream.is_done() {
                Ok(true) => (),
                Ok(false) => res.push(number),
                Err(RunError::Cuda { status, .. }) if !self.options.synchronous => {
                    let all: Vec<usize> = (0..self.streams.len()).collect();
                    let (section, streams) = (self.running, self.progress(&all));
                    return Err(RunError::DeviceFault { status, section, streams });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(res)
    }

    /// What changes while anything moves.
    fn seen(&self, busy: &[usize]) -> Seen {
        let word =
            |it: usize| busy.contains(&it).then(|| self.markers.reached(it).map_or(0, |it| it + 1));
        (0..self.streams.len()).map(word).collect()
    }

    /// What a stream that is at work has come to, if that is known.
    fn reached(&self, busy: &[usize]) -> Option<At> {
        let index = busy.iter().find_map(|&it| self.markers.reached(it))?;
        Some(At { section: self.running, index })
    }

    /// ``stream 1 at step[12] `all_gather(dp)` making `w` ``, for some streams.
    fn progress(&self, streams: &[usize]) -> Vec<String> {
        let marked = |it: usize| self.names.get(&(self.running, self.markers.reached(it)?));
        let name = |&it: &usize| match marked(it) {
            Some(name) => format!("stream {it} at or after {name}"),
            None => format!("stream {it} before its first collective"),
        };
        streams.iter().map(name).collect()
    }

    /// Ends collectives that wait for other ranks, and waits for the streams, for some time. Nothing runs
    /// on them any more afterwards; or they are stuck for good.
    fn abort(&mut self) {
        if self.stuck {
            return;
        }
        let comms = self.comms.clone();
        let aborting = thread::spawn(move || comms.abort());
        // NCCL stops its kernels at once. Streams that copy engines gather on were seen not to end.
        let streams = &self.streams;
        if !passes_within(ABORT_TIMEOUT, || !streams.iter().any(CudaStream::is_at_work)) {
            self.stuck = true;
            return;
        }
        // It returns when no graph has its calls any more.
        self.sections.iter_mut().for_each(|it| it.graph = Recording::Impossible);
        self.stuck = !passes_within(ABORT_TIMEOUT, || aborting.is_finished());
    }

    /// Records a section that has run, or says why it stays as it is.
    fn record_graph(&mut self, section: PlanSection) {
        let mut made = self.try_graph(section);
        if made.is_err() && self.markers.are_on() {
            self.markers.turn_off();
            made = self.try_graph(section);
        }
        self.at = None;
        self.sections[section as usize].graph = match made {
            Ok(graph) => Recording::Graph(graph),
            Err(why) => {
                let name = section.name();
                self.warnings.push(format!(
                    "{name} cannot be recorded as a CUDA graph and is queued call by call: {why}"
                ));
                Recording::Impossible
            }
        };
    }

    fn try_graph(&mut self, section: PlanSection) -> Result<Graph, RunError> {
        let bound = self.bound.clone();
        graph::begin(&self.streams[0])?;
        let forked = self.fork();
        let issued = forked.and_then(|()| exec::issue(&bound.sections[section as usize], self));
        let joined = issued.and_then(|()| self.join());
        let made = graph::end(&self.streams[0]);
        joined.and(made)
    }

    /// Makes all streams wait for the first.
    fn fork(&self) -> Result<(), RunError> {
        let [first, others @ ..] = &self.streams[..] else { return Ok(()) };
        self.joints[0].record(first)?;
        others.iter().try_for_each(|it| it.wait(&self.joints[0]))
    }

    /// Makes the first stream wait for all others.
    fn join(&self) -> Result<(), RunError> {
        let [first, others @ ..] = &self.streams[..] else { return Ok(()) };
        for (stream, joint) in others.iter().zip(&self.joints[1..]) {
            joint.record(stream)?;
            first.wait(joint)?;
        }
        Ok(())
    }
}

impl Backend for CudaBackend {
    fn replay(&mut self, section: PlanSection) -> Result<bool, RunError> {
        if !self.options.graphs || self.options.synchronous || self.times.is_some() {
            return Ok(false);
        }
        if let Recording::Ran = self.sections[section as usize].graph {
            self.record_graph(section);
        }
        let Recording::Graph(graph) = &self.sections[section as usize].graph else {
            return Ok(false);
        };
        self.running = section;
        self.markers.clear(self.streams.len());
        graph.launch(&self.streams[0])?;
        Ok(true)
    }

    fn begin(&mut self, section: PlanSection) -> Result<(), RunError> {
        self.running = section;
        self.markers.clear(self.streams.len());
        if self.times.is_some() {
            self.keep_times(true)?;
        }
        Ok(())
    }

    fn compute(&mut self, call: &Arc<ComputeCall>, stream: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        let span = self.start_span(stream)?;
        if let Some(program) = &self.sections[call.at.section as usize].programs[call.at.index] {
            program.run(self.stream(stream))?;
        }
        self.end_span(span, Some(call.at), stream)?;
        self.issued()
    }

    fn collective(&mut self, call: &Arc<CollectiveCall>, stream: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        let number = stream.as_u32() as usize;
        self.markers.mark(call.at.index, number, &self.streams[number])?;
        let span = self.start_span(stream)?;
        let section = &self.sections[call.at.section as usize];
        if let Some(program) = &section.programs[call.at.index] {
            program.run(self.stream(stream))?;
        }
        if let Some(it) = &section.movements[call.at.index] {
            let address = |pointer| it.place.address(pointer);
            self.comms.transfer(call.comm, &it.transfers, &address, self.stream(stream))?;
            it.after.run(self.stream(stream))?;
        }
        self.end_span(span, Some(call.at), stream)?;
        self.issued()
    }

    fn copy(&mut self, call: CopyCall, stream: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        let bytes = self.bound.buffers[call.dst].bytes() as u64;
        let span = self.start_span(stream)?;
        self.stream(stream).copy(self.address(call.src), self.address(call.dst), bytes)?;
        self.end_span(span, Some(call.at), stream)?;
        self.issued()
    }

    fn record(&mut self, event: Event, stream: Stream) -> Result<(), RunError> {
        self.events[event.as_u32() as usize].record(self.stream(stream))
    }

    fn wait(&mut self, event: Event, stream: Stream) -> Result<(), RunError> {
        let span = self.start_span(stream)?;
        self.stream(stream).wait(&self.events[event.as_u32() as usize])?;
        self.end_span(span, None, stream)
    }

    fn finish(&mut self) -> Result<(), RunError> {
        // From here on, what fails may be any instruction.
        self.at = None;
        self.rest()?;
        let recording = &mut self.sections[self.running as usize].graph;
        if let Recording::Fresh = recording {
            *recording = Recording::Ran;
        }
        Ok(())
    }

    fn write_at(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        assert!(offset + bytes.len() <= self.bound.buffers[buffer].bytes(), "within the buffer");
        self.staging.borrow_mut().write(self.address(buffer) + offset as u64, bytes)
    }

    fn read_at(&self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), RunError> {
        assert!(offset + bytes.len() <= self.bound.buffers[buffer].bytes(), "within the buffer");
        self.staging.borrow_mut().read(self.address(buffer) + offset as u64, bytes)
    }

    fn keep(&mut self, parts: &[Range<usize>]) -> Result<(), RunError> {
        if self.kept.as_ref().is_none_or(|it| it.parts != parts) {
            let bytes = parts.iter().map(|it| it.len() as u64).sum();
            let memory = DeviceMemory::new(bytes)?;
            self.kept = Some(Kept { parts: parts.to_vec(), memory });
        }
        self.copy_kept(|arena, copy| (arena, copy))
    }

    fn restore(&mut self) -> Result<(), RunError> {
        self.copy_kept(|arena, copy| (copy, arena))
    }

    fn broadcast(&mut self, buffer: Buffer, comm: Comm, root: usize) -> Result<(), RunError> {
        let (bytes, address) = (self.bound.buffers[buffer].bytes() as u64, self.address(buffer));
        let transfer =
            Transfer::Broadcast { place: (Pointer::Result(0), 0), root: root as u64, bytes };
        self.comms.transfer(comm, &[transfer], &|_| address, &self.streams[0])?;
        self.rest()
    }

    fn at(&self) -> Option<At> {
        self.at
    }

    fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    fn close(&mut self) -> bool {
        if self.streams.iter().any(CudaStream::is_at_work) {
            self.abort();
        }
        !self.stuck
    }

    fn keep_times(&mut self, keep: bool) -> Result<(), RunError> {
        self.times = if keep { Some(Times::new(&self.streams[0])?) } else { None };
        Ok(())
    }

    fn times(&mut self) -> Result<Vec<Span>, RunError> {
        self.times.as_ref().map_or(Ok(Vec::new()), Times::spans)
    }

    fn memory(&self) -> Result<MemoryUse, RunError> {
        let arenas = self.bound.arenas.iter().sum();
        let workspace = self.memory.workspaces.iter().map(|it| it.1).sum();
        let (free, total) = self.device.memory()?;
        let other = (total - free).saturating_sub(arenas + workspace);
        let communicators = self.comms.n_open() as u64;
        let other_declared = CONTEXT_BYTES
            + communicators.min(1) * FIRST_COMMUNICATOR_BYTES
            + communicators.saturating_sub(1) * COMMUNICATOR_BYTES;
        Ok(MemoryUse { arenas, workspace, other, other_declared })
    }
}

impl Memory {
    fn new(plan: &BoundPlan, workspaces: &[u64], comms: &Comms) -> Result<Memory, RunError> {
        let aligned = |it: u64| it.next_multiple_of(ALIGN);
        let mut bytes = 0;
        let mut take = |size: u64| {
            let start = bytes;
            bytes += aligned(size);
            start
        };
        let arenas = plan.arenas.map(&mut take);
        let offsets: Vec<u64> = workspaces.iter().map(|&it| take(it)).collect();
        // What communicators can register.
        let block = comms.allocate(bytes)?;
        let base = block.address;
        block.fill_part(arenas[Arena::Persistent as usize], plan.arenas[0], 0)?;
        let regions = offsets.iter().zip(workspaces);
        Ok(Memory {
            arenas: arenas.map(|it| base + it),
            workspaces: regions.map(|(offset, &bytes)| (base + offset, bytes)).collect(),
            _block: block,
        })
    }

    fn address(&self, buffer: &BoundBuffer) -> u64 {
        self.arenas[buffer.arena as usize] + buffer.offset as u64
    }
}

/// Kernels read several elements at once.
fn check_alignment(plan: &BoundPlan) -> Result<(), RunError> {
    let aligned = |it: &BoundBuffer| (it.offset as u64).is_multiple_of(ALIGN);
    match plan.buffers.values().find(|it| !aligned(it)) {
        Some(it) => {
            let why = format!("starts at byte {}, and GPUs need multiples of {ALIGN}", it.offset);
            Err(RunError::bad_plan(&it.name, why))
        }
        None => Ok(()),
    }
}

/// What an instruction, or a batch of them, runs.
struct Lowered {
    at: At,
    stream: Stream,
    args: Vec<Buffer>,
    results: Vec<Buffer>,
    program: Program,
    /// Of a collective: what follows, and the program after that.
    transfers: Vec<Transfer>,
    after: Option<Program>,
}

impl Lowered {
    fn programs(&self) -> impl Iterator<Item = &Program> {
        std::iter::once(&self.program).chain(&self.after)
    }

    fn work(&self) -> impl Iterator<Item = &Work> {
        self.programs().flat_map(|it| &it.work)
    }
}

fn lower(plan: &Plan, bound: &BoundPlan) -> Result<Vec<Lowered>, RunError> {
    let mut res = Vec::new();
    for section in PlanSection::ALL {
        let instructions = &bound.sections[section as usize];
        for (index, batch) in batches(bound, instructions) {
            let at = At { section, index };
            let program = batch.lower(bound).map_err(|it| blame(plan, bound, at, it))?;
            let (args, results) = (batch.args().collect(), batch.results().collect());
            let (stream, transfers) = (batch.stream, Vec::new());
            res.push(Lowered { at, stream, args, results, program, transfers, after: None });
        }
        for instruction in instructions {
            if let BoundInstruction::Collective(call, stream) = instruction {
                res.push(lower_collective(plan, bound, call, *stream)?);
            }
        }
    }
    Ok(res)
}

fn lower_collective(
    plan: &Plan,
    bound: &BoundPlan,
    call: &CollectiveCall,
    stream: Stream,
) -> Result<Lowered, RunError> {
    let moved = movement(plan, &bound.coord, call)?;
    Ok(Lowered {
        at: call.at,
        stream,
        args: call.parts.iter().map(|it| it.src).collect(),
        results: call.parts.iter().map(|it| it.dst).collect(),
        program: moved.before,
        after: (!moved.transfers.is_empty()).then_some(moved.after),
        transfers: moved.transfers,
    })
}

/// The error of an instruction, while the plan is loaded.
fn blame(plan: &Plan, bound: &BoundPlan, at: At, cause: RunError) -> RunError {
    let coord = coord_name(&plan.mesh, &bound.coord);
    RunError::Rank { rank: bound.rank, coord, at: describe(plan, at), cause: Box::new(cause) }
}

/// Scratch of each stream: what the plan says, or what the largest of its programs needs, for a plan by
/// hand.
fn workspaces(plan: &Plan, lowered: &[Lowered]) -> Vec<u64> {
    let needed = |stream: Stream| {
        let of = lowered.iter().filter(|it| it.stream == stream);
        of.map(|it| it.program.workspace).max().unwrap_or(0)
    };
    plan.streams.iter().map(|(stream, it)| needed(stream).max(it.workspace)).collect()
}

/// Words of a table with what is left free behind it, so that the next one is aligned.
fn table_words(program: &Program) -> u64 {
    program.table_words().next_multiple_of(ALIGN / 8)
}

/// All programs at their addresses, and their tables in device memory.
fn prepare(
    plan: &BoundPlan,
    lowered: &[Lowered],
    loader: &mut Loader,
    memory: &Memory,
    tables: &DeviceMemory,
) -> Result<BySection<Section>, RunError> {
    let mut sections: BySection<Section> = Default::default();
    for (section, instructions) in sections.iter_mut().zip(&plan.sections) {
        section.programs.resize_with(instructions.len(), || None);
        section.movements.resize_with(instructions.len(), || None);
    }
    let mut words: Vec<u64> = Vec::new();
    for it in lowered {
        let address = |it: &Buffer| memory.address(&plan.buffers[*it]);
        let mut place = |program: &Program| {
            let place = Place {
                args: it.args.iter().map(address).collect(),
                results: it.results.iter().map(address).collect(),
                workspace: memory.workspaces[it.stream.as_u32() as usize],
                table: tables.address + 8 * words.len() as u64,
            };
            let end = words.len() + table_words(program) as usize;
            words.extend(place.table(program));
            words.resize(end, 0);
            place
        };
        let section = &mut sections[it.at.section as usize];
        let prepared = loader.prepare(&it.program, place(&it.program))?;
        section.programs[it.at.index] = Some(prepared);
        if let Some(after) = &it.after {
            let place = place(after);
            let (transfers, after) = (it.transfers.clone(), loader.prepare(after, place.clone())?);
            section.movements[it.at.index] = Some(Movement { transfers, place, after });
        }
    }
    tables.write(0, bytemuck::cast_slice(&words))?;
    Ok(sections)
}

fn streams(plan: &Plan) -> Result<Vec<CudaStream>, RunError> {
    let stream = |it: &StreamData| match it.kind {
        StreamKind::Compute => CudaStream::new(),
        // Others wait for what it brings.
        StreamKind::Comm => CudaStream::urgent(),
    };
    plan.streams.values().map(stream).collect()
}

fn names(plan: &Plan) -> BTreeMap<(PlanSection, usize), String> {
    let mut res = BTreeMap::new();
    for section in PlanSection::ALL {
        for (index, instruction) in plan.section(section).iter().enumerate() {
            if let Instruction::Collective { .. } = instruction {
                res.insert((section, index), describe(plan, At { section, index }));
            }
        }
    }
    res
}
