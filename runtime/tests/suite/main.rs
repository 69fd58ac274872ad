//! The runtime on plans built by hand.

mod build;
mod collectives;
mod cuda;
mod data;
mod faults;
mod processes;
mod sections;
mod strangers;
mod streams;
mod train;
mod weights;
