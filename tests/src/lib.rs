//! Shared by test files: models of `examples/`, running graphs on global tensors and ops on the ranks of a mesh, the
//! state of a session, and reading of files that may hold anything.

pub mod eval;
pub mod fuzz;
pub mod spmd;

use std::collections::BTreeMap;
use std::path::Path;

use ir::plan::Role;
use runtime::Session;

/// The text of a model of `examples/`.
///
/// # Panics
/// If there is none of that name.
pub fn example(name: &str) -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(format!("{name}.ron"));
    std::fs::read_to_string(&path).unwrap_or_else(|it| panic!("{}: {it}", path.display()))
}

/// Everything of a session that outlives a step, gathered: bits of f32 by name.
///
/// # Panics
/// If a rank cannot be read.
pub fn state(session: &Session) -> BTreeMap<String, Vec<u32>> {
    let kept = session.plan().buffers.values();
    let kept = kept.filter(|it| matches!(it.role, Role::Param | Role::State));
    let bits = |name: &str| {
        let values = session.read(name).unwrap_or_else(|it| panic!("{name}: {it}"));
        values.data.iter().map(|it| it.to_bits()).collect::<Vec<u32>>()
    };
    kept.map(|it| (it.name.clone(), bits(&it.name))).collect()
}
