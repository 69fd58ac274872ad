//! Runs plans: binds a plan to mesh coordinates, executes it, feeds it data and weights.
//!
//! Reading order: [`bind`] (a plan becomes the program of one rank), [`exec`] (the loop over it),
//! [`backend`] (what runs an instruction), [`comm`] (how ranks meet), [`launch`] (which ranks run in
//! this process), [`session`] (those ranks at work), [`mod@checkpoint`] (their state on disk),
//! [`mod@train`] (the training loop), [`signals`] (what ends it early), [`trace`] and [`tensorboard`] (what it leaves for others to look at), [`output`] (how
//! files come to be there as a whole).

pub mod backend;
pub mod bench;
pub mod bind;
pub mod checkpoint;
pub mod comm;
pub mod data;
pub mod error;
pub mod exec;
pub mod launch;
mod map;
pub mod memory;
mod nonfinite;
pub mod output;
mod pieces;
pub mod place;
pub mod session;
pub mod signals;
pub mod tensorboard;
pub mod trace;
pub mod train;
pub mod weights;

pub use bench::{BenchOptions, BenchReport, bench};
pub use checkpoint::{Busy, LoadOptions, LoadReport, OnFailure, Reshard, SaveOptions, SaveReport};
pub use data::{Batch, Data, DataRecord, TokenWidth};
pub use error::RunError;
pub use launch::{Launch, LaunchFlags};
pub use place::{Device, Place};
pub use session::{RANKS_MAX, Session, SessionOptions, Skip, StepReport};
pub use signals::Signals;
pub use trace::TraceOptions;
pub use train::{Event, OnNonfinite, StepLine, Stop, TrainOptions, train};
