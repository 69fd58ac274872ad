//! Blocks of a user's own: every op says how its gradient goes, or the model does not compile.

use crate::harness::*;

/// A block of a projection and `op`, which makes `y` of its result `h`.
fn source(op: &str) -> String {
    format!(
        r#"Model(
            name: "own",
            batch: Global(4),
            sequence: 4,
            init: Normal(std: 0.5),
            optimizer: Sgd(momentum: 0.9),
            layers: [
                Embedding(name: "embed", vocab: 12, dim: 4),
                Block(
                    name: "own",
                    inputs: ["x"],
                    params: {{"up.weight": (shape: [8, 4], placements: {{"tp": Shard(0)}})}},
                    ops: [
                        (op: "matmul(transpose_b:true)", inputs: ["x", "up.weight"], outputs: ["h"]),
                        {op}
                    ],
                    outputs: ["y"],
                ),
                Linear(name: "down", out_features: 4, parallel_mode: Row),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    )
}

const WITHOUT: &str = r#"(op: "activation_grad(kind:gelu)", inputs: ["h", "h"], outputs: ["y"]),"#;
const WITH: &str = r#"
    (op: "activation(kind:srelu)", inputs: ["h"], outputs: ["a"]),
    (op: "mul", inputs: ["a", "h"], outputs: ["y"]),"#;

// C31, torchtitan#1805, pytorch#172932: an op outside the typed world lost its backward placement.
#[test]
fn an_op_without_a_gradient_is_a_compile_error() {
    for mesh in ["1", "2x2"] {
        let graph = logical(&source(WITHOUT), mesh, &[]).unwrap();
        let error = codegen::compile(graph, &codegen::Options::default()).unwrap_err();
        let passes::PassError::Failed { code, message, subject } = error.error else {
            panic!("it is the user's error: {}", error.error);
        };
        assert_eq!(code, "PL0301");
        assert_eq!(
            message,
            "`own.y`: `activation_grad(kind:gelu)` has no gradient, and a trained parameter needs \
             one through it"
        );
        assert_eq!(subject.as_deref(), Some("own.y"));
    }
}

// C31: nothing trained stands behind it, so none is needed.
#[test]
fn an_op_without_a_gradient_is_fine_where_none_is_needed() {
    let frozen = [("frozen", r#"["embed.weight", "own.up.weight"]"#)];
    let expect = train(&source(WITHOUT), "1", &frozen, 1);
    train(&source(WITHOUT), "2x2", &frozen, 1).check_like(&expect);
}

// C31: with gradients, they are those of one rank.
#[test]
fn a_block_with_gradients_trains_like_one_rank() {
    let expect = train(&source(WITH), "1", &[], 1);
    for mesh in ["4", "1x2", "1x4", "2x2", "2x2x2"] {
        train(&source(WITH), mesh, &[], 1).check_like(&expect);
    }
}
