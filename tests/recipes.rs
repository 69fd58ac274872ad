//! Trains the golden Llama under each recipe.

use std::path::{Path, PathBuf};

use ir::plan::Plan;
use ir::quant::Recipe;
use runtime::weights::Weights;
use runtime::{Data, Session, SessionOptions};

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn golden(name: &str) -> PathBuf {
    repo().join("tests/golden/llama-f32").join(name)
}

fn compile(mesh: &str, recipe: &Recipe) -> Plan {
    let source = std::fs::read_to_string(repo().join("examples/llama-tiny.ron")).unwrap();
    let model = ir::model::parse_with(&source, &[("precision.compute", "bf16")]).unwrap();
    let mesh = ir::model::MeshSpec::parse(mesh).unwrap();
    let mut graph = ir::model::elaborate(&model, &mesh).unwrap();
    for scope in graph.scopes.values_mut() {
        if !scope.path.starts_with("lm_head") {
            scope.recipe = recipe.clone();
        }
    }
    let options = codegen::Options { dump_after: vec!["fuse".into()], ..Default::default() };
    let res = codegen::compile(graph, &options).unwrap_or_else(|it| panic!("{it}"));
    for dump in &res.dumps {
        std::fs::write(format!("/tmp/dump-{}.ir", dump.pass), &dump.text).unwrap();
    }
    res.plan
}

fn losses(plan: &Plan, steps: u64) -> Vec<f32> {
    let session = Session::new(plan, &SessionOptions::default()).unwrap();
    let weights = Weights::open(plan, &[golden("init.safetensors")]).unwrap();
    session.load_weights(&weights).unwrap();
    session.prepare().unwrap();
    let data = Data::open(&[golden("tokens.safetensors")], &plan.run, None).unwrap();
    (0..steps)
        .map(|step| {
            let batch = data.batch(step).unwrap();
            session.step(&batch, plan.run.schedule.at(step), step + 1).unwrap().loss.unwrap()
        })
        .collect()
}

#[test]
fn current() {
    for mesh in ["1", "2x2"] {
        let recipe = Recipe::Float8CurrentScaling(Default::default());
        println!("{mesh} {:?}", losses(&compile(mesh, &recipe), 5));
        let recipe = Recipe::DelayedScaling(Default::default());
        println!("{mesh} {:?}", losses(&compile(mesh, &recipe), 5));
        println!("{mesh} {:?}", losses(&compile(mesh, &Recipe::Bf16), 5));
    }
}
