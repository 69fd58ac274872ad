//! What the benchmarks share. `cargo bench -p bench` runs them; `docs/performance.md` has results.

use std::path::Path;

use codegen::{Proved, Verification};
use ir::model::{MeshSpec, Model};

/// A model of `examples/`.
///
/// # Panics
/// If it is not there, or not a model.
pub fn example(name: &str) -> Model {
    example_with(name, &[])
}

/// As [`example`], with values set.
///
/// # Panics
/// If it is not there, or not a model.
pub fn example_with(name: &str, set: &[(&str, &str)]) -> Model {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(format!("{name}.ron"));
    let source = std::fs::read_to_string(&path).unwrap_or_else(|it| panic!("{path:?}: {it}"));
    ir::model::parse_with(&source, set).unwrap_or_else(|it| panic!("{path:?}: {it}"))
}

/// Elaborates and compiles a model as a release build of `planc` does, verification included.
///
/// # Panics
/// If the model does not fit the mesh.
pub fn compile(model: &Model, mesh: &str) -> Proved {
    let mesh = MeshSpec::parse(mesh).unwrap_or_else(|it| panic!("{it}"));
    let graph = ir::model::elaborate(model, &mesh).unwrap_or_else(|it| panic!("{it}"));
    let verification = Verification::EveryPhase;
    let compiled =
        codegen::compile(graph, &codegen::Options { verification, ..Default::default() });
    compiled.unwrap_or_else(|it| panic!("{it}")).plan
}
