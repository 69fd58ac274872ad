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

/// A model whose last block adds `ops`, which read `logits` and `labels` and make `s`, to the logits.
fn with_statistics(ops: &str) -> String {
    format!(
        r#"Model(
            name: "stats",
            batch: Global(4),
            sequence: 8,
            optimizer: Sgd(),
            init: Normal(std: 0.3),
            layers: [
                Embedding(name: "embed", vocab: 20, dim: 16),
                LmHead(name: "head"),
                Block(
                    name: "z",
                    inputs: ["logits"],
                    params: {{"w": (shape: [1, 20], placements: {{"tp": Shard(1)}})}},
                    ops: [
                        (op: "ce_max", inputs: ["logits"], outputs: ["m"]),
                        (op: "ce_stats", inputs: ["logits", "labels", "m"], outputs: ["sumexp", "target"]),
                        {ops}
                        (op: "matmul", inputs: ["s", "w"], outputs: ["zw"]),
                        (op: "add", inputs: ["logits", "zw"], outputs: ["y"]),
                    ],
                    outputs: ["y"],
                ),
                CrossEntropy(),
            ],
        )"#
    )
}

/// The message and the subject of the error that compiling `source` gives.
#[track_caller]
fn refused(source: &str, mesh: &str, set: &[(&str, &str)], expect: &str) -> (String, String) {
    let graph = logical(source, mesh, set).unwrap();
    let error = codegen::compile(graph, &codegen::Options::default()).unwrap_err();
    let passes::PassError::Failed { code, message, subject } = error.error else {
        panic!("it is the user's error: {}", error.error);
    };
    assert_eq!(code, expect);
    (message, subject.expect("a subject"))
}

// D12, pytorch#190746: statistics of a softmax that something else than its loss reads. Their gradient lacks that of
// the largest logit, so it would be off by 20 to 100 %.
#[test]
fn the_largest_logit_is_no_constant_outside_of_a_cross_entropy() {
    let split = |of: &str| {
        with_statistics(&format!(
            r#"(op: "split_dim(dim:1,inner:1)", inputs: ["{of}"], outputs: ["s"]),"#
        ))
    };
    for mesh in ["1", "1x4", "2x2"] {
        let (message, subject) = refused(&split("m"), mesh, &[], "PL0301");
        assert!(message.starts_with("`z.m`: `ce_max` has no gradient"), "{message}");
        assert_eq!(subject, "z.m");
        let (message, subject) = refused(&split("sumexp"), mesh, &[], "PL0301");
        assert_eq!(
            message,
            "`z.sumexp` depends on `z.m`, the largest logit, in whose gradient there is only a part of \
             the cross entropy: a `ce_loss` of `z.m` must be all that reads it"
        );
        assert_eq!(subject, "z.sumexp");
    }
    // `target` does not depend on it.
    let expect = train(&split("target"), "1", &[], 2);
    for mesh in ["1x4", "2x2"] {
        train(&split("target"), mesh, &[], 2).check_like(&expect);
    }
    // Nor does anything where the logits are constants.
    let frozen = [("frozen", r#"["embed.weight", "head.weight"]"#)];
    let expect = train(&split("m"), "1", &frozen, 2);
    train(&split("m"), "2x2", &frozen, 2).check_like(&expect);
}

/// The model above without statistics, in which `w` is read by `ops` only.
fn with_parameter(ops: &str) -> String {
    let all = with_statistics("");
    let (before, rest) = all.split_once("ops: [").unwrap();
    let (_, after) = rest.split_once("],\n                    outputs").unwrap();
    let add = r#"(op: "scale(factor:1)", inputs: ["logits"], outputs: ["y"]),"#;
    format!("{before}ops: [{ops}{add}],\n                    outputs{after}")
}

#[test]
fn a_trained_parameter_that_does_nothing_is_an_error() {
    let dead = r#"(op: "scale(factor:2)", inputs: ["w"], outputs: ["v"]),"#;
    for ops in ["", dead] {
        for mesh in ["1", "2x2"] {
            let (message, subject) = refused(&with_parameter(ops), mesh, &[], "PL0305");
            assert_eq!(
                message,
                "`z.w` is trained, and the loss does not depend on it; remove it, or freeze it \
                 (`frozen: [\"z.w\"]`)"
            );
            assert_eq!(subject, "z.w");
        }
        train(&with_parameter(ops), "2x2", &[("frozen", r#"["z.w"]"#)], 1);
    }
}
