//! The runtime on plans built by hand.

mod build;
mod collectives;
mod data;
mod faults;
mod processes;
mod sections;
mod streams;
mod train;
mod weights;
