//! What executes a plan's instructions.

pub mod cpu;
pub mod cuda;
