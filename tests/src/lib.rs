//! What several test files need: running graphs on global tensors, ops on the ranks of a mesh, and
//! reading of files that may hold anything.

pub mod eval;
pub mod fuzz;
pub mod spmd;
