//! Saving a session's state, and loading it on any mesh.
//!
//! What is saved, under which key and by whom is [`ir::checkpoint::CheckpointLayout`]; how it is on disk
//! is the crate `checkpoint`. Here bytes move between files and buffers (`boxes`): [`mod@save`] writes
//! those that a rank answers for, [`mod@load`] reads those that it holds, whatever mesh they were saved
//! on.

pub(crate) mod boxes;
pub mod load;
pub mod reshard;
pub mod save;

pub use load::{LoadOptions, LoadReport};
pub use reshard::{RankReads, Reshard, ReshardReport};
pub use save::{Busy, OnFailure, SaveOptions, SaveReport};
