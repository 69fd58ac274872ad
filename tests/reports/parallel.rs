//! Parameters that have one gradient: each is trained with it, once, on every mesh.

use ir::DType;
use ir::amax::scaled_gemms;

use crate::harness::*;

/// A Block between an embedding and a head, with `dim` features.
fn model(dim: u32, params: &str, ops: &str) -> String {
    format!(
        r#"Model(
            name: "shared",
            batch: Global(8),
            sequence: 6,
            init: Normal(std: 0.3),
            optimizer: AdamW(betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1),
            schedule: (lr: 1e-2),
            clip_norm: 0.5,
            layers: [
                Embedding(name: "embed", vocab: 16, dim: {dim}),
                Block(inputs: ["x"], params: {{ {params} }}, ops: [ {ops} ], outputs: ["y"]),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    )
}

/// `y = x + x A^T + x B^T`.
fn two_weights(dim: u32) -> String {
    model(
        dim,
        &format!(
            r#""a": (shape: [{dim}, {dim}]), "b": (shape: [{dim}, {dim}], init: Normal(std: 0.1))"#
        ),
        r#"(op: "matmul(transpose_b:true)", inputs: ["x", "a"], outputs: ["p"]),
           (op: "matmul(transpose_b:true)", inputs: ["x", "b"], outputs: ["q"]),
           (op: "add", inputs: ["x", "p", "q"], outputs: ["y"])"#,
    )
}

/// Three biases, added one by one to branches of one sum.
fn three_biases() -> String {
    model(
        12,
        r#""a.bias": (shape: [12]), "b.bias": (shape: [12], init: Ones), "c.bias": (shape: [12])"#,
        r#"(op: "bias_add", inputs: ["x", "a.bias"], outputs: ["p"]),
           (op: "activation(kind:gelu)", inputs: ["x"], outputs: ["g"]),
           (op: "bias_add", inputs: ["g", "b.bias"], outputs: ["q"]),
           (op: "bias_add", inputs: ["x", "c.bias"], outputs: ["r"]),
           (op: "add", inputs: ["p", "q", "r"], outputs: ["y"])"#,
    )
}

/// A bias that is the sum of two parameters, so that autodiff itself has one gradient for both.
fn sum_of_parameters() -> String {
    model(
        12,
        r#""a": (shape: [12]), "b": (shape: [12], init: Ones)"#,
        r#"(op: "add", inputs: ["a", "b"], outputs: ["bias"]),
           (op: "bias_add", inputs: ["x", "bias"], outputs: ["y"])"#,
    )
}

const MESHES: [&str; 7] =
    ["2", "8", "1x2", "2x2", "2x4", "2x2x2", "dp_replicate=2,dp_shard=2,tp=2"];

/// Trains on all meshes, with each of the options, and compares with the same options on one rank. Weights and
/// moments are compared too.
#[track_caller]
fn check(source: &str, set: &[(&str, &str)]) {
    for reduce in ["EveryMicroBatch", "LastMicroBatch"] {
        for micro_batches in ["1", "2"] {
            let mut set = set.to_vec();
            set.extend([("reduce_gradients", reduce), ("micro_batches", micro_batches)]);
            let expect = train(source, "1", &set, 3);
            for mesh in MESHES {
                // 8 sequences are not 2 micro-batches of 8 ranks.
                if (mesh, micro_batches) != ("8", "2") {
                    train(source, mesh, &set, 3).check_like(&expect);
                }
            }
        }
    }
}

#[test]
fn weights_with_one_gradient_train_alike_on_every_mesh() {
    check(&two_weights(12), &[]);
}

#[test]
fn biases_with_one_gradient_train_alike_on_every_mesh() {
    check(&three_biases(), &[]);
}

#[test]
fn parameters_that_are_added_to_each_other_train_alike_on_every_mesh() {
    check(&sum_of_parameters(), &[]);
}

/// Relative, of losses: activations have scales of their own on each data-parallel coordinate, so that FP8 data is
/// rounded differently; `LOSS_SCALES` of `tests/recipes.rs` has the derivation.
const LOSS_FP8: f64 = 5e-3;
/// Relative L2, of a gradient against that in bf16. E4M3 rounds by 2^-4 at most and E5M2 by 2^-3, evenly spread: 0.08 of
/// a product in the root mean square, and as much of a sum of products that do not cancel. Twice that has room for
/// some cancellation; a gradient that is missing, or counted twice, is off by 1.
const GRADIENT_FP8: f64 = 0.16;

/// Each of the two weights has three GEMMs on FP8 data (the weight gradient is one for both), and the whole gradient.
#[test]
fn weights_with_one_gradient_train_alike_in_fp8() {
    let source = two_weights(128);
    let base = [
        ("precision", "(compute: bf16)"),
        ("sequence", "128"),
        ("optimizer", "Sgd(momentum: 0.9)"),
    ];
    let train_with = |mesh: &str, recipe: &str, steps: u64| {
        train(&source, mesh, &[&base[..], &[("recipe", recipe)]].concat(), steps)
    };
    let bf16 = train_with("1", "Bf16", 1);
    for recipe in
        ["Float8CurrentScaling()", "DelayedScaling(amax_history_len: 4)", "Float8BlockScaling()"]
    {
        let expect = train_with("1", recipe, 3);
        for mesh in ["1", "2", "1x2", "2x2"] {
            let found = train_with(mesh, recipe, 1);
            let gemms = scaled_gemms(&found.plan);
            let of = |name: &str| {
                gemms.iter().filter(|it| it.operands.iter().any(|it| &*it.tensor == name)).count()
            };
            assert_eq!([of("a"), of("b")], [2, 2], "{recipe} on {mesh}: fprop and dgrad of each");
            assert!(gemms.len() >= 5, "{recipe} on {mesh}: and a wgrad");
            assert!(found.plan.buffers.values().any(|it| it.ty.dtype == DType::E4M3));
            for name in ["a", "b"] {
                let what = format!("{recipe} on {mesh}: gradient of {name}");
                check_tensor(found.gradient(name), bf16.gradient(name), GRADIENT_FP8, &what);
            }
            assert_eq!(found.gradient("a"), found.gradient("b"), "they have one gradient");
            let found = train_with(mesh, recipe, 3);
            for step in 0..3 {
                let what = format!("{recipe} on {mesh}: loss {step}");
                close(found.losses[step], expect.losses[step], LOSS_FP8, &what);
            }
        }
    }
}
