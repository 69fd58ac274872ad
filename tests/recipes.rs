//! Training under recipes, on the repository's own text as bytes.

use std::path::{Path, PathBuf};

use ir::plan::Plan;
use runtime::{Data, Session, SessionOptions};

const STEPS: u64 = 100;
/// Steps whose mean is the loss at the end.
const LAST: usize = 20;
/// By how much FP8 may end apart from bf16, relative.
const APART: f64 = 0.02;

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn compile(mesh: &str, recipe: &str) -> Plan {
    let source = std::fs::read_to_string(repo().join("examples/llama-tiny.ron")).unwrap();
    let set = [("precision.compute", "bf16"), ("recipe", recipe)];
    let model = ir::model::parse_with(&source, &set).unwrap();
    let mesh = ir::model::MeshSpec::parse(mesh).unwrap();
    let graph = ir::model::elaborate(&model, &mesh).unwrap();
    codegen::compile(graph, &codegen::Options::default()).unwrap().plan
}

/// Losses of all steps, which are numbers, as are the norms of the gradients.
#[track_caller]
fn losses(mesh: &str, recipe: &str) -> Vec<f64> {
    let plan = compile(mesh, recipe);
    let session = Session::new(&plan, &SessionOptions::default()).unwrap();
    session.prepare().unwrap();
    let text = ["docs/model.md", "docs/ir.md", "docs/placement.md"].map(|it| repo().join(it));
    let data = Data::open(&text, &plan.run, None).unwrap();
    let step = |step| {
        let report = session.step(&data.batch(step).unwrap(), 3e-3, step + 1).unwrap();
        let (loss, norm) = (report.loss.unwrap(), report.grad_norm.unwrap());
        let what = format!("{recipe} on {mesh}, step {step}");
        assert!(loss.is_finite() && norm.is_finite(), "{what}: loss {loss}, norm {norm}");
        f64::from(loss)
    };
    (0..STEPS).map(step).collect()
}

#[test]
fn fp8_learns_on_fsdp_and_tp_as_bf16_does() {
    let [bf16, fp8] = ["Bf16", "Float8CurrentScaling()"].map(|it| losses("2x2", it));
    let end = |it: &[f64]| it[it.len() - LAST..].iter().sum::<f64>() / LAST as f64;
    let (at_first, bf16, fp8) = (bf16[0], end(&bf16), end(&fp8));
    println!("{at_first} {bf16} {fp8}");
    assert!(bf16 < 0.6 * at_first, "bf16 went from {at_first} to {bf16}");
    assert!((fp8 / bf16 - 1.0).abs() <= APART, "FP8 ends at {fp8}, bf16 at {bf16}");
}
