//! Shared by test files: models of `examples/`, running graphs on global tensors and ops on the ranks of a mesh, and
//! reading of files that may hold anything.

pub mod eval;
pub mod fuzz;
pub mod spmd;

use std::path::Path;

/// The text of a model of `examples/`.
///
/// # Panics
/// If there is none of that name.
pub fn example(name: &str) -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(format!("{name}.ron"));
    std::fs::read_to_string(&path).unwrap_or_else(|it| panic!("{}: {it}", path.display()))
}
