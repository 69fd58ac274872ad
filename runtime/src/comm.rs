//! How ranks meet.
//!
//! `local` is for ranks on CPU threads of this process: what a collective means is decided in
//! [`bind`](crate::bind), by global indices, and it only carries data. `nccl` is for GPUs: what it
//! carries is decided in [`kernels::cuda::transport`], by shardings. `control` is for everything else.

pub mod control;
pub mod local;
pub mod nccl;

use ir::plan::Plan;
use kernels::cuda::transport::{self, Movement, Part};

use crate::bind::{CollectiveCall, describe};
use crate::error::RunError;

/// What the rank at `coord` does for a collective on a GPU.
pub fn movement(plan: &Plan, coord: &[u32], call: &CollectiveCall) -> Result<Movement, RunError> {
    let parts: Vec<Part<'_>> = call
        .parts
        .iter()
        .map(|it| {
            let (src, dst) = (&plan.buffers[it.src], &plan.buffers[it.dst]);
            Part { ty: &src.ty, from: &src.sharding, to: &dst.sharding, adds: it.adds }
        })
        .collect();
    let moved = transport::movement(call.kind, plan.comms[call.comm], &parts, &plan.mesh, coord);
    moved.map_err(|why| RunError::bad_plan(describe(plan, call.at), why))
}
