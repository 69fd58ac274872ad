//! CUDA graphs: a section's work, recorded once and launched as one.

use std::ptr;

use cudarc::driver::sys::{
    CUgraphExec, CUgraphInstantiate_flags, CUstreamCaptureMode, cuGraphDestroy, cuGraphExecDestroy,
};

use crate::backend::cuda::driver::{CudaStream, cuda};
use crate::error::RunError;

/// Recorded work, ready to be launched.
#[derive(Debug)]
pub struct Graph(CUgraphExec);

// SAFETY: a graph may be launched from any thread that has its context, by one at a time.
unsafe impl Send for Graph {}

/// Begins to record what is queued on `origin`, and on streams that wait for it; nothing runs. Calls of
/// other threads do not matter.
pub fn begin(origin: &CudaStream) -> Result<(), RunError> {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    cuda!(cuStreamBeginCapture_v2(origin.0, mode))
}

/// Ends recording; `origin` has waited for all other streams. Also to be called where something went
/// wrong: it makes the streams ordinary ones again.
pub fn end(origin: &CudaStream) -> Result<Graph, RunError> {
    let mut template = ptr::null_mut();
    let ended = cuda!(cuStreamEndCapture(origin.0, &mut template));
    let made = ended.and_then(|()| {
        let mut graph = ptr::null_mut();
        // What is urgent stays urgent: launched into one stream, all would have its priority.
        let flags =
            CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0.into();
        cuda!(cuGraphInstantiateWithFlags(&mut graph, template, flags)).map(|()| Graph(graph))
    });
    if !template.is_null() {
        // At once: while a template lives, communicators that it uses cannot be destroyed.
        // SAFETY: it was made above, and the executable graph does not need it.
        unsafe { cuGraphDestroy(template) };
    }
    made
}

impl Graph {
    /// Queues all of it on `stream`.
    pub fn launch(&self, stream: &CudaStream) -> Result<(), RunError> {
        cuda!(cuGraphLaunch(self.0, stream.0))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it is not running: whoever launched it has waited. A failure means that the context
        // is gone.
        unsafe { cuGraphExecDestroy(self.0) };
    }
}
