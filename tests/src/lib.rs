//! What several test files need: running graphs on global tensors, and ops on the ranks of a mesh.

pub mod eval;
pub mod spmd;
