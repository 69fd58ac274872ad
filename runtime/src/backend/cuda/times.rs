//! When each instruction of a section was at work, by events around it.

use ir::plan::Stream;

use crate::backend::cuda::driver::{CudaEvent, CudaStream};
use crate::bind::At;
use crate::error::RunError;
use crate::exec::Span;

/// The events of one section.
#[derive(Debug)]
pub struct Times {
    began: CudaEvent,
    spans: Vec<(Option<At>, Stream, [CudaEvent; 2])>,
}

/// A timed event at what `stream` has been given so far.
pub fn mark(stream: &CudaStream) -> Result<CudaEvent, RunError> {
    let event = CudaEvent::timed()?;
    event.record(stream)?;
    Ok(event)
}

impl Times {
    /// Begins at what `stream` has been given so far.
    pub fn new(stream: &CudaStream) -> Result<Times, RunError> {
        Ok(Times { began: mark(stream)?, spans: Vec::new() })
    }

    /// Adds an instruction, or a wait.
    pub fn push(&mut self, at: Option<At>, stream: Stream, events: [CudaEvent; 2]) {
        self.spans.push((at, stream, events));
    }

    /// All of them; every stream is at rest.
    pub fn spans(&self) -> Result<Vec<Span>, RunError> {
        self.spans
            .iter()
            .map(|(at, stream, [start, end])| {
                Ok(Span {
                    at: *at,
                    stream: *stream,
                    start: self.began.milliseconds_to(start)?.into(),
                    end: self.began.milliseconds_to(end)?.into(),
                })
            })
            .collect()
    }
}
