//! Passes over [`ir::Graph`] and [`ir::plan::Plan`], one file each, and the manager that verifies and
//! dumps between them.

mod pass;

pub mod autodiff;
pub mod batch_collectives;
pub mod choose_amax_groups;
pub mod cse;
pub mod dce;
pub mod fuse;
pub mod insert_collectives;
pub mod interleave_chunks;
pub mod localize;
pub mod plan_memory;
pub mod propagate_shardings;
pub mod quantize;
pub mod rematerialize;
pub mod round_cuts;
pub mod schedule_overlap;
pub mod update;
pub mod watch_amaxes;

use ir::Graph;

pub use autodiff::Autodiff;
pub use batch_collectives::BatchCollectives;
pub use choose_amax_groups::ChooseAmaxGroups;
pub use cse::Cse;
pub use dce::Dce;
pub use fuse::Fuse;
pub use insert_collectives::InsertCollectives;
pub use interleave_chunks::InterleaveChunks;
pub use localize::Localize;
pub use pass::{Dump, Ir, Pass, PassError, PassManager, Verification};
pub use plan_memory::PlanMemory;
pub use propagate_shardings::PropagateShardings;
pub use quantize::Quantize;
pub use rematerialize::Rematerialize;
pub use round_cuts::RoundCuts;
pub use schedule_overlap::ScheduleOverlap;
pub use update::Update;
pub use watch_amaxes::WatchAmaxes;

/// Passes over graphs, in the order of the pipeline.
pub const GRAPH_PASSES: &[&dyn Pass<Graph>] = &[
    &Autodiff,
    &RoundCuts,
    &Update,
    &Quantize,
    &PropagateShardings,
    &ChooseAmaxGroups,
    &WatchAmaxes,
    &InsertCollectives,
    &Cse,
    &Rematerialize,
    &Dce,
    &Fuse,
    &InterleaveChunks,
    &BatchCollectives,
    &Localize,
];
