//! How ranks meet.
//!
//! `local` is for CPU ranks that are threads of this process, `wire` for those that are processes: what a collective
//! means is decided in [`bind`](crate::bind), by global indices, and they only carry data. `nccl` is for GPUs: what it
//! carries is decided in [`kernels::cuda::transport`], by shardings. `control` is for everything else.

pub mod control;
pub mod local;
pub mod nccl;
pub mod wire;

use std::fmt;
use std::sync::Arc;

use ir::plan::{Buffer, Comm, Plan};
use kernels::cuda::transport::{self, Movement, Part};

use crate::bind::{At, CollectiveCall, Group, describe};
use crate::error::RunError;
use crate::memory::Bytes;

/// The bytes that one CPU rank shows to its group: the sources of a collective's parts.
pub type Post = Arc<Vec<Bytes>>;

/// The posts of a whole group, in coordinate order.
pub type Posts = Arc<[Post]>;

/// The reason for which ranks meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// A collective of the plan.
    Instruction(At),
    /// A buffer that one of them has read.
    Broadcast {
        /// The buffer.
        buffer: Buffer,
        /// The member of the group that gives it; the others give an empty part.
        root: usize,
    },
}

/// One CPU rank's way to the data of the others.
pub trait Carrier: fmt::Debug {
    /// Gives `post` and waits for the posts of all other members of this rank's group of `comm`. All members
    /// call it for the same occasions in the same order.
    fn exchange(
        &mut self,
        comm: Comm,
        group: &Group,
        occasion: Occasion,
        post: Post,
    ) -> Result<Posts, RunError>;
}

impl fmt::Display for Occasion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Occasion::Instruction(at) => write!(f, "{}[{}]", at.section.name(), at.index),
            Occasion::Broadcast { buffer, .. } => write!(f, "the broadcast of {buffer}"),
        }
    }
}

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
