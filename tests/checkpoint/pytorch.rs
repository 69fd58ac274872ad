//! Checkpoints of PyTorch, of FSDP2 and FSDP2 x TP, go on in planc.

use std::path::{Path, PathBuf};

use runtime::TrainOptions;
use safetensors::SafeTensors;

use crate::harness::*;

/// The model that `shared/golden/dcp` was made with; its optimizer has one group.
const MODEL: &str = r#"Model(
    name: "torch",
    batch: Global(4),
    sequence: 4,
    optimizer: AdamW(betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1),
    decay: ["*"],
    schedule: (lr: 1e-2),
    layers: [
        Embedding(name: "tok_embeddings", vocab: 24, dim: 8),
        Linear(name: "w1", out_features: 12, parallel_mode: Column),
        Activation(kind: gelu),
        Linear(name: "w2", out_features: 8, parallel_mode: Row, bias: false),
        RmsNorm(name: "norm"),
        LmHead(name: "output"),
        CrossEntropy(),
    ],
)"#;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/dcp").join(case)
}

/// Every tensor is what PyTorch says it saved, and the next step follows the optimizer's.
#[track_caller]
fn check(case: &str) {
    let full = std::fs::read(golden(case).join("full.safetensors")).unwrap();
    let full = SafeTensors::deserialize(&full).unwrap();
    let number =
        |key: &str| f32::from_le_bytes(full.tensor(key).unwrap().data().try_into().unwrap());
    let done = number("optim.state.norm.weight.step") as u64;
    assert!(done > 0, "{case}");
    for mesh in ["1", "4", "2x2"] {
        let plan = compile(MODEL, mesh, &[]);
        let loaded = train_to(&plan, done, Some(&golden(case).join("dcp")));
        // The plan has done all its steps, and PyTorch does not say which data it read.
        assert_eq!(loaded.warnings.len(), 2, "{case}, mesh {mesh}: {:?}", loaded.warnings);
        let read = |name: &str| -> Vec<u8> {
            let data = loaded.session.read(name).unwrap().data;
            data.iter().flat_map(|it| it.to_le_bytes()).collect()
        };
        for param in &plan.params {
            let name = &plan.buffers[param.buffer].name;
            let what = format!("{case}, mesh {mesh}: {name}");
            assert_eq!(read(name), full.tensor(&format!("model.{name}")).unwrap().data(), "{what}");
            for state in ["exp_avg", "exp_avg_sq"] {
                let key = format!("optim.state.{name}.{state}");
                let expect = full.tensor(&key).unwrap();
                assert_eq!(read(&format!("{name}.{state}")), expect.data(), "{what}.{state}");
            }
        }
        let next = train_to(&plan, done + 2, Some(&golden(case).join("dcp")));
        assert!(next.losses.keys().copied().eq([done + 1, done + 2]), "{case}, mesh {mesh}");
    }
}

#[test]
fn fsdp_and_tensor_parallel() {
    check("tp2_dp2_adamw");
}

/// `flatten_optimizer_state_dict=True` names groups by parameter.
#[test]
fn a_flattened_optimizer() {
    check("flat_optim_w2");
}

/// A hyper-parameter of PyTorch's that is not the plan's is a warning.
#[test]
fn other_numbers_are_a_warning() {
    for case in ["tp2_dp2_adamw", "flat_optim_w2"] {
        let plan = compile(MODEL, "1", &[("optimizer.weight_decay", "0.2")]);
        let options = TrainOptions {
            steps: Some(9),
            load: loading(&golden(case).join("dcp")),
            ..TrainOptions::default()
        };
        let warnings = train(&plan, &options).warnings;
        assert_eq!(warnings.len(), 2, "{case}: {warnings:?}");
        let text = "weight_decay was 0.1 and is 0.2 for `tok_embeddings.weight` and 5 more";
        assert!(warnings[0].starts_with(text), "{case}: {warnings:?}");
        assert!(warnings[1].contains("does not say which data"), "{case}: {warnings:?}");
    }
}
