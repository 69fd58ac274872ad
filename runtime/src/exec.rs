//! The executor: one loop over bound instructions, for every backend.

use std::ops::Range;
use std::sync::Arc;

use ir::plan::{Buffer, Comm, Event, PlanSection, Stream};

use crate::bind::{At, BoundInstruction, BoundPlan, CollectiveCall, ComputeCall, CopyCall};
use crate::error::RunError;

/// What runs instructions: a CPU, a GPU. Calls queue work; [`Backend::finish`] waits for it.
pub trait Backend {
    /// Begins a section. Nothing is queued.
    fn begin(&mut self, section: PlanSection) -> Result<(), RunError>;
    /// Queues an op.
    fn compute(&mut self, call: &Arc<ComputeCall>, stream: Stream) -> Result<(), RunError>;
    /// Queues a collective.
    fn collective(&mut self, call: &Arc<CollectiveCall>, stream: Stream) -> Result<(), RunError>;
    /// Queues a copy.
    fn copy(&mut self, call: CopyCall, stream: Stream) -> Result<(), RunError>;
    /// Marks the point that `stream` has been given work up to.
    fn record(&mut self, event: Event, stream: Stream) -> Result<(), RunError>;
    /// Holds `stream` until the latest point marked as `event`.
    fn wait(&mut self, event: Event, stream: Stream) -> Result<(), RunError>;
    /// Returns when all that is queued is done.
    fn finish(&mut self) -> Result<(), RunError>;
    /// Replaces the content of a buffer from byte `offset` on, padding included. Nothing is queued.
    fn write_at(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), RunError>;
    /// The content of a buffer, padding included. Nothing is queued.
    fn read(&self, buffer: Buffer, bytes: &mut [u8]) -> Result<(), RunError> {
        self.read_at(buffer, 0, bytes)
    }
    /// The content of a buffer from byte `offset` on. Nothing is queued.
    fn read_at(&self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), RunError>;
    /// Keeps a copy of these bytes of the persistent arena, instead of what it kept before. Nothing is queued.
    fn keep(&mut self, parts: &[Range<usize>]) -> Result<(), RunError>;
    /// Puts back what [`Backend::keep`] kept. Nothing is queued.
    fn restore(&mut self) -> Result<(), RunError>;
    /// Replaces the content of a buffer with that of member `root` of this rank's group of `comm`; all
    /// members call it, for the same buffers in the same order. Nothing is queued.
    fn broadcast(&mut self, buffer: Buffer, comm: Comm, root: usize) -> Result<(), RunError>;
    /// The instruction at work, or that failed.
    fn at(&self) -> Option<At>;
    /// From now on, whether the time of each instruction is kept. Keeping it takes time itself.
    fn keep_times(&mut self, keep: bool) -> Result<(), RunError>;
    /// When each instruction of the section that ran last was at work, waits included.
    fn times(&mut self) -> Result<Vec<Span>, RunError>;
    /// What memory the rank takes.
    fn memory(&self) -> Result<MemoryUse, RunError>;
    /// Begins a section and queues all of it at once; false if it has to be queued call by call.
    fn replay(&mut self, _section: PlanSection) -> Result<bool, RunError> {
        Ok(false)
    }
    /// Brings it to rest, before it is dropped. False if its device waits for something that will never
    /// come: then nothing of it can be freed, and the process can only be left.
    fn close(&mut self) -> bool {
        true
    }
    /// What a user should know, a line each; told once.
    fn warnings(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// When one instruction was at work on its stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Which; none for a wait.
    pub at: Option<At>,
    /// Where.
    pub stream: Stream,
    /// Milliseconds from the start of the section.
    pub start: f64,
    /// Milliseconds from the start of the section.
    pub end: f64,
}

/// Bytes that one rank takes on its device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Both arenas, as planned.
    pub arenas: u64,
    /// Scratch of kernels and libraries, as planned.
    pub workspace: u64,
    /// Everything else that the process has there, measured: the context, modules, libraries' own
    /// buffers.
    pub other: u64,
    /// What `other` is declared never to exceed.
    pub other_declared: u64,
}

impl MemoryUse {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.arenas + self.workspace + self.other
    }
}

/// Runs a section and waits until it is done.
pub fn run(
    plan: &BoundPlan,
    section: PlanSection,
    backend: &mut dyn Backend,
) -> Result<(), RunError> {
    if !backend.replay(section)? {
        backend.begin(section)?;
        issue(&plan.sections[section as usize], backend)?;
    }
    backend.finish()
}

/// Queues instructions of a section.
pub fn issue(instructions: &[BoundInstruction], backend: &mut dyn Backend) -> Result<(), RunError> {
    for instruction in instructions {
        match instruction {
            BoundInstruction::Compute(call, stream) => backend.compute(call, *stream)?,
            BoundInstruction::Collective(call, stream) => backend.collective(call, *stream)?,
            BoundInstruction::Copy(call, stream) => backend.copy(*call, *stream)?,
            BoundInstruction::Record(event, stream) => backend.record(*event, *stream)?,
            BoundInstruction::Wait(event, stream) => backend.wait(*event, *stream)?,
        }
    }
    Ok(())
}
