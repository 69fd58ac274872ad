//! The executor: one loop over bound instructions, for every backend.

use std::sync::Arc;

use ir::plan::{Buffer, Event, PlanSection, Stream};

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
    fn read(&self, buffer: Buffer, bytes: &mut [u8]) -> Result<(), RunError>;
    /// The instruction at work, or that failed.
    fn at(&self) -> Option<At>;
}

/// Runs a section and waits until it is done.
pub fn run(
    plan: &BoundPlan,
    section: PlanSection,
    backend: &mut dyn Backend,
) -> Result<(), RunError> {
    backend.begin(section)?;
    for instruction in &plan.sections[section as usize] {
        match instruction {
            BoundInstruction::Compute(call, stream) => backend.compute(call, *stream)?,
            BoundInstruction::Collective(call, stream) => backend.collective(call, *stream)?,
            BoundInstruction::Copy(call, stream) => backend.copy(*call, *stream)?,
            BoundInstruction::Record(event, stream) => backend.record(*event, *stream)?,
            BoundInstruction::Wait(event, stream) => backend.wait(*event, *stream)?,
        }
    }
    backend.finish()
}
