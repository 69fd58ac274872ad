//! Fused weights are declared as segments, and each is cut on its own.

use crate::harness::*;

fn gate_up(rows: u64) -> String {
    format!(
        r#"Model(
            name: "gate_up",
            batch: Global(4),
            sequence: 4,
            init: Normal(std: 0.5),
            optimizer: Sgd(momentum: 0.9),
            layers: [
                Embedding(name: "embed", vocab: 12, dim: 4),
                Linear(
                    name: "mlp", fused: {{"gate_proj": {rows}, "up_proj": {rows}}}, parallel_mode: Column,
                ),
                Activation(kind: swiglu),
                Linear(name: "down", out_features: 4, parallel_mode: Row),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    )
}

// C12, torchtitan PR#4535: 2F rows divide over tp though F does not.
#[test]
fn a_gate_of_3_rows_on_tp_2_is_an_error() {
    assert_eq!(
        error(&gate_up(3), "1x2", &[]),
        "PL0203: `mlp`: dim 0 of segment `gate_proj` is 3, which `tp` of size 2 does not divide; \
         help: use a size that 2 divides, or a mesh whose `tp` divides 3"
    );
    let expect = train(&gate_up(4), "1", &[], 1);
    train(&gate_up(4), "1x2", &[], 1).check_like(&expect);
    train(&gate_up(4), "2x2", &[], 1).check_like(&expect);
    // On one rank, three rows are as good as any.
    train(&gate_up(3), "4", &[], 1).check_like(&train(&gate_up(3), "1", &[], 1));
}

/// Four segments: 6, 2, 10 and `v` rows. With `v` = 4, 22 in all, which no part * tp divides.
fn four(v: u64) -> String {
    format!(
        r#"Model(
            name: "four",
            batch: Global(4),
            sequence: 4,
            init: Normal(std: 0.5),
            optimizer: Sgd(momentum: 0.9),
            layers: [
                Embedding(name: "embed", vocab: 12, dim: 4),
                Linear(
                    name: "qkv", fused: {{"q": 6, "k": 2, "v": {v}, "gate": 10}}, parallel_mode: Column,
                ),
                Block(
                    name: "own",
                    inputs: ["q", "k", "v", "gate"],
                    params: {{
                        "wq": (shape: [4, 6], placements: {{"tp": Shard(1)}}),
                        "wk": (shape: [4, 2], placements: {{"tp": Shard(1)}}),
                        "wv": (shape: [4, {v}], placements: {{"tp": Shard(1)}}),
                        "wg": (shape: [4, 10], placements: {{"tp": Shard(1)}}),
                    }},
                    ops: [
                        (op: "activation(kind:gelu)", inputs: ["q"], outputs: ["aq"]),
                        (op: "activation(kind:silu)", inputs: ["gate"], outputs: ["ag"]),
                        (op: "matmul(transpose_b:true)", inputs: ["aq", "wq"], outputs: ["yq"]),
                        (op: "matmul(transpose_b:true)", inputs: ["k", "wk"], outputs: ["yk"]),
                        (op: "matmul(transpose_b:true)", inputs: ["v", "wv"], outputs: ["yv"]),
                        (op: "matmul(transpose_b:true)", inputs: ["ag", "wg"], outputs: ["yg"]),
                        (op: "add", inputs: ["yq", "yk", "yv", "yg"], outputs: ["y"]),
                    ],
                    outputs: ["y"],
                    placements: {{"y": Stream}},
                ),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    )
}

// C14, Megatron-LM PR#4841: rows appended to a packed weight were cut across its parts.
#[test]
fn segments_of_any_even_sizes_are_cut_each_on_its_own() {
    let expect = train(&four(4), "1", &[], 1);
    for mesh in ["1x2", "2x2"] {
        for sp in ["false", "true"] {
            train(&four(4), mesh, &[("sequence_parallel", sp)], 1).check_like(&expect);
        }
    }
    // 24 rows in all would divide, but `q` of 6 does not.
    assert_eq!(
        error(&four(6), "1x4", &[]),
        "PL0203: `qkv`: dim 0 of segment `q` is 6, which `tp` of size 4 does not divide; \
         help: use a size that 4 divides, or a mesh whose `tp` divides 6"
    );
    assert_eq!(
        error(&four(5), "1x2", &[]),
        "PL0203: `qkv`: dim 0 of segment `v` is 5, which `tp` of size 2 does not divide; \
         help: use a size that 2 divides, or a mesh whose `tp` divides 5"
    );
}
