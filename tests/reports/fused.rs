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
fn a_gate_of_3_rows_on_tp_2_is_cut_unevenly_like_its_up_projection() {
    for rows in [3, 4] {
        let expect = train(&gate_up(rows), "1", &[], 1);
        for mesh in ["4", "1x2", "2x2", "1x8"] {
            train(&gate_up(rows), mesh, &[], 1).check_like(&expect);
        }
    }
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
fn segments_of_any_sizes_are_cut_each_on_its_own() {
    for v in [4, 5, 6] {
        let expect = train(&four(v), "1", &[], 1);
        for mesh in ["1x2", "2x2", "1x4"] {
            for sp in ["false", "true"] {
                train(&four(v), mesh, &[("sequence_parallel", sp)], 1).check_like(&expect);
            }
        }
    }
}
