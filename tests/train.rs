//! Trains the golden Llama of `tests/golden/llama-f32` on every mesh and compares each step with PyTorch.
//!
//! The reference is PyTorch in float64 (which JAX equals to 1e-12). Loss alone does not show a wrong
//! scale of all gradients, since Adam is invariant to it, so gradient norms and gradients are compared too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kernels::Proved;
use runtime::weights::Weights;
use runtime::{Data, Session, SessionOptions};
use safetensors::SafeTensors;

/// Relative. f32 has 6e-8 of rounding an operation; a loss is a mean over 256 tokens of sums over 256
/// logits behind about 30 chained reductions of up to 160 terms, and 20 updates. PyTorch's own f32 run
/// stays within 1e-6 of its float64 run; ten times that allows for another order of sums.
const LOSS: f64 = 1e-5;
/// Relative. A norm over 119 k squares of gradients, each of the precision above, but with cancellation
/// in backward sums: PyTorch's f32 run is within 1e-5.
const GRAD_NORM: f64 = 1e-4;
/// Relative L2 of each tensor's gradient in step 0.
const GRADIENT: f64 = 1e-4;
/// Absolute, of weights of about 0.02 to 1 after 20 steps of 1e-3: a tenth of one step.
const WEIGHTS: f64 = 1e-4;
/// Absolute. bf16 keeps 8 bits; activations and weights are rounded at other places than PyTorch
/// rounds them (fused ops round once), and PyTorch's own bf16 run is within 6e-4 of float64.
const LOSS_BF16: f64 = 3e-3;

const STEPS: u64 = 20;
/// AdamW's first beta: after one step the first moment is `(1 - BETA1)` times the gradient.
const BETA1: f64 = 0.9;

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn golden(name: &str) -> PathBuf {
    repo().join("tests/golden/llama-f32").join(name)
}

fn compile(mesh: &str, set: &[(&str, &str)]) -> Proved {
    let source = std::fs::read_to_string(repo().join("examples/llama-tiny.ron")).unwrap();
    let model = ir::model::parse_with(&source, set).unwrap();
    let mesh = ir::model::MeshSpec::parse(mesh).unwrap();
    let graph = ir::model::elaborate(&model, &mesh).unwrap();
    codegen::compile(graph, &codegen::Options::default()).unwrap().plan
}

/// All tensors of a safetensors file of f64.
fn tensors(name: &str) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(golden(name)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |data: &[u8]| {
        data.chunks_exact(8).map(|it| f64::from_le_bytes(it.try_into().unwrap())).collect()
    };
    file.tensors().iter().map(|(name, it)| (name.clone(), values(it.data()))).collect()
}

fn curve(file: &str, path: &[&str]) -> Vec<f64> {
    let text = std::fs::read_to_string(golden(file)).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    for key in path {
        json = json[key].take();
    }
    json.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

/// A session with the golden run's initial weights.
fn start(plan: &Proved) -> (Session, Data) {
    let session = Session::new(plan, &SessionOptions::default()).unwrap();
    let weights = Weights::open(plan, &[golden("init.safetensors")]).unwrap();
    session.load_weights(&weights).unwrap();
    session.prepare().unwrap();
    let data = Data::open(&[golden("tokens.safetensors")], &plan.run, None).unwrap();
    (session, data)
}

#[track_caller]
fn check_f32(mesh: &str, set: &[(&str, &str)]) {
    let what = format!("mesh {mesh}, {set:?}");
    let plan = compile(mesh, set);
    let (session, data) = start(&plan);
    let losses = curve("losses.json", &["torch_f64", "loss"]);
    let norms = curve("losses.json", &["torch_f64", "grad_norm"]);
    for step in 0..STEPS {
        let batch = data.batch(step).unwrap();
        let report = session.step(&batch, plan.run.schedule.at(step), step + 1).unwrap();
        let (loss, norm) = (losses[step as usize], norms[step as usize]);
        let off = (f64::from(report.loss.unwrap()) - loss).abs() / loss;
        assert!(off <= LOSS, "{what}: loss of step {step} is off by {off:e}, relative");
        let off = (f64::from(report.grad_norm.unwrap()) - norm).abs() / norm;
        assert!(
            off <= GRAD_NORM,
            "{what}: gradient norm of step {step} is off by {off:e}, relative"
        );
        if step == 0 {
            check_gradients(&session, &what);
        }
    }
    for (name, expect) in tensors("final_f64.safetensors") {
        let weights = session.read(&name).unwrap().data;
        assert_eq!(weights.len(), expect.len(), "{what}: {name}");
        let off = weights.iter().zip(&expect).map(|(&a, &b)| (f64::from(a) - b).abs());
        let off = off.fold(0.0, f64::max);
        assert!(off <= WEIGHTS, "{what}: final {name} is off by {off:e}");
    }
}

#[track_caller]
fn check_gradients(session: &Session, what: &str) {
    for (name, expect) in tensors("grads_step0_f64.safetensors") {
        let moment = session.read(&format!("{name}.exp_avg")).unwrap().data;
        let square = |it: f64| it * it;
        let gradient = moment.iter().map(|&it| f64::from(it) / (1.0 - BETA1));
        let off: f64 = gradient.zip(&expect).map(|(a, &b)| square(a - b)).sum();
        let norm: f64 = expect.iter().map(|&it| square(it)).sum();
        let off = (off / norm).sqrt();
        assert!(off <= GRADIENT, "{what}: gradient of {name} is off by {off:e}, relative L2");
    }
}

#[track_caller]
fn check_bf16(mesh: &str, set: &[(&str, &str)]) {
    let bf16 = [("precision.compute", "bf16"), ("precision.reduce", "bf16")];
    let set: Vec<(&str, &str)> = bf16.iter().chain(set).copied().collect();
    let plan = compile(mesh, &set);
    let (session, data) = start(&plan);
    for (step, &loss) in curve("losses_bf16.json", &["loss"]).iter().enumerate() {
        let step = step as u64;
        let batch = data.batch(step).unwrap();
        let report = session.step(&batch, plan.run.schedule.at(step), step + 1).unwrap();
        let off = (f64::from(report.loss.unwrap()) - loss).abs();
        assert!(
            off <= LOSS_BF16,
            "mesh {mesh}, {set:?}: bf16 loss of step {step} is off by {off:e}"
        );
    }
}

const WHOLE: (&str, &str) = ("sequence_parallel", "false");
const TWO: (&str, &str) = ("micro_batches", "2");
const FULL: (&str, &str) = ("checkpoint", "Full");

/// Every combination of the options that a mesh has.
#[track_caller]
fn check_all(mesh: &str, tensor_parallel: bool, two_micro_batches: bool) {
    for whole in [false, true] {
        if whole && !tensor_parallel {
            continue;
        }
        for two in [false, true] {
            if two && !two_micro_batches {
                continue;
            }
            for full in [false, true] {
                let options = [(whole, WHOLE), (two, TWO), (full, FULL)];
                let set: Vec<_> = options.iter().filter(|it| it.0).map(|it| it.1).collect();
                check_f32(mesh, &set);
                check_bf16(mesh, &set);
            }
        }
    }
}

#[test]
fn mesh_1() {
    check_all("1", false, true);
}

#[test]
fn mesh_2() {
    check_all("2", false, true);
}

#[test]
fn mesh_4() {
    check_all("4", false, true);
}

#[test]
fn mesh_8() {
    check_all("8", false, false);
}

#[test]
fn mesh_2x2() {
    check_all("2x2", true, true);
}

/// tp 4 over 2 KV heads: each KV head is on two ranks.
#[test]
fn mesh_2x4() {
    check_all("2x4", true, true);
}

#[test]
fn mesh_4x2() {
    check_all("4x2", true, true);
}

/// HSDP x TP.
#[test]
fn mesh_2x2x2() {
    check_all("2x2x2", true, true);
}

/// Gradients that are reduced after the last micro-batch only.
#[test]
fn reduction_after_the_last_micro_batch() {
    let last = ("reduce_gradients", "LastMicroBatch");
    for mesh in ["1", "4", "2x2", "2x4", "2x2x2"] {
        check_f32(mesh, &[TWO, last]);
        check_f32(mesh, &[TWO, last, WHOLE, FULL]);
    }
}

/// The first, the last and two micro-batches between them, with weights that stay for all of them, that are gathered
/// again, and of which pieces stay.
#[test]
fn first_and_last_micro_batches() {
    let four = ("micro_batches", "4");
    for reduce in ["EveryMicroBatch", "LastMicroBatch"] {
        for reshard in ["false", "true"] {
            let set = [("reduce_gradients", reduce), ("fsdp.reshard_after_forward", reshard)];
            for mesh in ["1", "2", "2x2"] {
                check_f32(mesh, &[&set[..], &[four]].concat());
            }
            check_f32("2x2", &[&set[..], &[four, FULL, ("fsdp.reshard_root", "true")]].concat());
            check_f32("2x2x2", &[&set[..], &[TWO]].concat());
            check_bf16("2x2", &[&set[..], &[four]].concat());
        }
        let pieces = [("reduce_gradients", reduce), ("fsdp.reshard_after_forward", "2")];
        check_f32("4", &[&pieces[..], &[TWO]].concat());
    }
}

/// A loss in pieces of 10, 11 and 11 tokens.
#[test]
fn loss_in_chunks() {
    let chunks = ("layers[3].chunks", "3");
    for mesh in ["1", "4", "2x2", "2x4", "2x2x2"] {
        check_f32(mesh, &[chunks]);
        check_f32(mesh, &[chunks, TWO, FULL]);
    }
    check_bf16("2x4", &[chunks]);
}
