//! Parameters that have one gradient: each is trained with it, once, on every mesh.

use crate::harness::*;

/// A Block between an embedding and a head, with 12 features.
fn model(params: &str, ops: &str) -> String {
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
                Embedding(name: "embed", vocab: 16, dim: 12),
                Block(inputs: ["x"], params: {{ {params} }}, ops: [ {ops} ], outputs: ["y"]),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    )
}

/// `y = x + x A^T + x B^T`.
fn two_weights() -> String {
    model(
        r#""a": (shape: [12, 12]), "b": (shape: [12, 12], init: Normal(std: 0.1))"#,
        r#"(op: "matmul(transpose_b:true)", inputs: ["x", "a"], outputs: ["p"]),
           (op: "matmul(transpose_b:true)", inputs: ["x", "b"], outputs: ["q"]),
           (op: "add", inputs: ["x", "p", "q"], outputs: ["y"])"#,
    )
}

/// Three biases, added one by one to branches of one sum.
fn three_biases() -> String {
    model(
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
    check(&two_weights(), &[]);
}

#[test]
fn biases_with_one_gradient_train_alike_on_every_mesh() {
    check(&three_biases(), &[]);
}

#[test]
fn parameters_that_are_added_to_each_other_train_alike_on_every_mesh() {
    check(&sum_of_parameters(), &[]);
}
