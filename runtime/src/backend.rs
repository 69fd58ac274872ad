//! What executes a plan's instructions.

pub mod compare;
pub mod cpu;
pub mod cuda;
