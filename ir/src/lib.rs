//! All data and all meaning of planc; no I/O.
//!
//! A program is one training step. It starts as a [`Graph`] over global tensors and ends as a
//! [`plan::Plan`], the instruction list that every rank runs. [`Phase`] says how far it has come,
//! and the verifier holds it to what that phase promises.
//!
//! Reading order: [`placement`] (which rank holds what), [`types`], [`graph`], [`ops`], [`plan`].

pub mod amax;
pub mod build;
pub mod checkpoint;
pub mod cost;
pub mod digest;
pub mod graph;
mod limits;
pub mod meaning;
pub mod model;
pub mod ops;
pub mod placement;
pub mod plan;
pub mod quant;
pub mod random;
pub mod range;
pub mod run;
pub mod summary;
pub mod text;
pub mod types;
pub mod verify;

use serde::{Deserialize, Serialize};

pub use build::{BuildError, Builder};
pub use digest::Digest;
pub use graph::{Graph, Node, Section, Value};
pub use ops::Op;
pub use types::{DType, Shape, TensorType};

/// How far a program has come. Each phase keeps the promises of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Global shapes; shardings only where the user fixed them.
    Logical,
    /// Every value has one sharding, the operands of each op agree, data moves in `reshard` only.
    Sharded,
    /// Every movement is a collective over axes; nothing else mentions axes.
    Explicit,
    /// The program that one rank runs, the same for all: bounds are known as layouts.
    Local,
    /// A plan: instructions over buffers.
    Lowered,
    /// A plan with streams and events.
    Scheduled,
    /// A plan with memory offsets.
    Planned,
}
