//! Sizes that do not divide: uneven shards train, and what cannot be cut is an error.

use ir::plan::Plan;

use crate::harness::*;

/// An MLP of 10 hidden rows, each of 4 columns.
const MLP: &str = r#"Model(
    name: "mlp",
    batch: Global(8),
    sequence: 4,
    init: Normal(std: 0.5),
    optimizer: AdamW(weight_decay: 0.1),
    schedule: (lr: 1e-2),
    layers: [
        Embedding(name: "embed", vocab: 12, dim: 4),
        Linear(name: "up", out_features: 10, parallel_mode: Column),
        Activation(kind: gelu),
        Linear(name: "down", out_features: 4, parallel_mode: Row),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

/// Rows of a buffer that each rank holds, in rank order.
fn rows(plan: &Plan, name: &str) -> Vec<u64> {
    let data = &plan.buffers[plan.buffer(name).unwrap()];
    let mesh = &plan.mesh;
    mesh.coords().map(|it| data.sharding.extents(&data.ty.shape, mesh, &it)[0]).collect()
}

// C07, torchtitan PR#4593: 5 rows of one tp coordinate over two of dp were taken for 4 or 6.
#[test]
fn a_tp_local_dim_of_5_over_dp_2_trains_like_one_rank() {
    let expect = train(MLP, "1", &[], 3);
    for mesh in ["2x2", "2x2x2", "4x2"] {
        let found = train(MLP, mesh, &[], 3);
        found.check_like(&expect);
        for name in ["up.weight", "up.weight.exp_avg", "up.weight.exp_avg_sq"] {
            let data = &found.plan.buffers[found.plan.buffer(name).unwrap()];
            assert_eq!(data.ty.shape.as_slice(), [10, 4], "{mesh}: {name}");
        }
    }
    let plan = compile(MLP, "2x2", &[]);
    for name in ["up.weight", "up.weight.exp_avg", "up.weight.exp_avg_sq"] {
        assert_eq!(rows(&plan, name), [3, 3, 2, 2], "{name}");
    }
}

// C07, the other half: frozen parameters lost their flag.
#[test]
fn a_frozen_parameter_stays_frozen_on_every_mesh() {
    let frozen = [("frozen", r#"["up.weight"]"#)];
    let initial = train(MLP, "1", &frozen, 0);
    let expect = train(MLP, "1", &frozen, 3);
    for mesh in ["1", "2x2", "4x2"] {
        let found = train(MLP, mesh, &frozen, 3);
        found.check_like(&expect);
        assert_eq!(found.tensor("up.weight"), initial.tensor("up.weight"));
        assert!(!found.tensors.contains_key("up.weight.exp_avg"));
        assert_ne!(found.tensor("down.weight"), initial.tensor("down.weight"));
    }
}

// C08, pytorch#176076: rows of the last rank of a tied, unevenly cut weight did not train.
#[test]
fn every_row_of_a_tied_uneven_vocabulary_trains() {
    let source = r#"Model(
        name: "tied",
        batch: Global(8),
        sequence: 4,
        init: Normal(std: 0.5),
        optimizer: Sgd(),
        schedule: (lr: 1.0),
        tied: [("head.weight", "embed.weight")],
        layers: [
            Embedding(name: "embed", vocab: 10, dim: 4),
            Residual(body: [Linear(name: "up", out_features: 4), Activation(kind: silu)]),
            LmHead(name: "head"),
            CrossEntropy(),
        ],
    )"#;
    let initial = train(source, "1", &[], 0);
    let expect = train(source, "1", &[], 1);
    for mesh in ["4", "8", "2x2", "2x4"] {
        let found = train(source, mesh, &[], 1);
        found.check_like(&expect);
        // Softmax gives every row of the head a gradient.
        for i in 0..10 {
            let row = |it: &'_ Outcome| row(it.tensor("embed.weight"), i, 4).to_vec();
            assert_ne!(row(&found), row(&initial), "mesh {mesh}: row {i} has not changed");
        }
    }
    assert_eq!(rows(&compile(source, "4", &[]), "embed.weight"), [3, 3, 3, 1]);
}

/// Six heads of four features each, 24 in all.
const HEADS: &str = r#"Model(
    name: "heads",
    batch: Global(4),
    sequence: 4,
    init: Normal(std: 0.5),
    optimizer: Sgd(momentum: 0.9),
    layers: [
        Embedding(name: "embed", vocab: 12, dim: 24),
        MultiheadAttention(name: "attn", heads: 6, rope: (theta: 100)),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

// C09, pytorch#143372: splitting heads of an unevenly cut dimension failed while running.
#[test]
fn heads_that_do_not_divide_are_a_compile_error() {
    assert_eq!(
        error(HEADS, "1x4", &[]),
        "PL0203: `attn`: the number of query heads is 6, which `tp` of size 4 does not divide; \
         help: use a `tp` that divides the 6 heads"
    );
    let expect = train(HEADS, "1", &[], 1);
    for mesh in ["1x2", "1x3", "2x3"] {
        // 4 sequences over 2 or 1 coordinates of dp.
        train(HEADS, mesh, &[], 1).check_like(&expect);
    }
}

/// A block whose own parameter is cut over tp in dim 0.
fn cut_param(rows: u64) -> String {
    format!(
        r#"Model(
            name: "cut",
            batch: Global(4),
            sequence: 4,
            init: Normal(std: 0.5),
            optimizer: Sgd(momentum: 0.9),
            layers: [
                Embedding(name: "embed", vocab: 12, dim: 4),
                Block(
                    name: "own",
                    inputs: ["x"],
                    params: {{
                        "up": (shape: [{rows}, 4], placements: {{"tp": Shard(0)}}),
                        "down": (shape: [4, {rows}], placements: {{"tp": Shard(1)}}),
                    }},
                    ops: [
                        (op: "matmul(transpose_b:true)", inputs: ["x", "up"], outputs: ["h"]),
                        (op: "activation(kind:gelu)", inputs: ["h"], outputs: ["a"]),
                        (op: "matmul(transpose_b:true)", inputs: ["a", "down"], outputs: ["y"]),
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

// C09, for parameters of a block: 6 rows over 4 ranks are 2, 2, 2 and none.
#[test]
fn parameters_of_a_block_may_be_cut_unevenly() {
    for rows in [5, 6, 8] {
        let expect = train(&cut_param(rows), "1", &[], 1);
        for mesh in ["1x4", "2x2", "2x4"] {
            train(&cut_param(rows), mesh, &[], 1).check_like(&expect);
        }
    }
    assert_eq!(rows(&compile(&cut_param(6), "1x4", &[]), "own.up"), [2, 2, 2, 0]);
}

/// An `ffn` of 33 features, and all sizes of layers that no axis divides but heads.
fn ffn(more: &str) -> String {
    format!(
        r#"Model(
            name: "ffn",
            batch: Global(8),
            sequence: 8,
            init: Normal(std: 0.3),
            optimizer: AdamW(betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1),
            schedule: (lr: 1e-2),
            layers: [
                Embedding(name: "e", vocab: 50, dim: 24),
                TransformerLayer(
                    name: "l", norm: RmsNorm(), attention: (heads: 4, kv_heads: 2, rope: (), qkv_bias: false),
                    mlp: (ffn: 33, {more}),
                ),
                RmsNorm(name: "n"),
                LmHead(name: "h"),
                CrossEntropy(),
            ],
        )"#
    )
}

#[test]
fn an_ffn_that_tp_does_not_divide_trains_like_one_rank() {
    for activation in ["activation: swiglu", "activation: gelu_tanh", "activation: srelu"] {
        let source = ffn(activation);
        let expect = train(&source, "1", &[], 3);
        for mesh in ["1x2", "2x2", "1x4", "2x2x2"] {
            for set in [
                &[][..],
                &[("sequence_parallel", "true"), ("checkpoint", "Full")],
                &[("micro_batches", "2"), ("reduce_gradients", "LastMicroBatch")],
            ] {
                train(&source, mesh, set, 3).check_like(&expect);
            }
        }
    }
    assert_eq!(
        rows(&compile(&ffn("activation: swiglu"), "1x4", &[]), "l.mlp.up_proj.weight"),
        [9, 9, 9, 6]
    );
}

/// A norm weight in a placement of its own, in PyTorch's words.
fn norm(kind: &str, placements: &str) -> String {
    format!(
        r#"Model(
            name: "norm",
            meshes: {{1: ["dp"], 2: ["dp", "tp"], 3: ["dp_replicate", "dp", "tp"]}},
            batch: Global(8),
            sequence: 12,
            init: Normal(std: 0.5),
            optimizer: AdamW(betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1),
            schedule: (lr: 1e-2),
            parameters: {{"n.weight": (placements: {{ {placements} }})}},
            layers: [
                Embedding(name: "e", vocab: 7, dim: 7),
                {kind}(name: "n"),
                LmHead(name: "h"),
                CrossEntropy(),
            ],
        )"#
    )
}

#[test]
fn a_norm_weight_that_is_cut_unevenly_trains_like_one_rank() {
    for kind in ["RmsNorm", "LayerNorm"] {
        for placements in [
            r#""tp": Shard(0)"#,
            r#""dp": Shard(0)"#,
            r#""dp": Shard(0), "tp": Shard(0)"#,
            r#""dp": StridedShard(0, 2), "tp": Shard(0)"#,
            r#""dp": StridedShard(0, 3)"#,
        ] {
            let source = norm(kind, placements);
            let expect = train(&source, "1", &[], 2);
            for mesh in ["8", "1x2", "2x2", "4x2", "1x8", "2x2x2"] {
                train(&source, mesh, &[], 2).check_like(&expect);
            }
        }
    }
    let plan = compile(&norm("RmsNorm", r#""dp": StridedShard(0, 2), "tp": Shard(0)"#), "2x2", &[]);
    assert_eq!(rows(&plan, "n.weight"), [2, 2, 2, 1]);
}

// C09, "insert redistribute": 24 features over 4 ranks are 6 each, one and a half heads of 4. What
// cannot stay cut is gathered, by a collective that the plan shows, and the numbers are right. The
// same where 6 heads are cut 2, 2, 2, 0 and flattened.
#[test]
fn a_split_across_heads_is_gathered_in_sight() {
    let source = r#"Model(
        name: "split",
        batch: Global(4),
        sequence: 4,
        init: Normal(std: 0.5),
        optimizer: Sgd(momentum: 0.9),
        layers: [
            Embedding(name: "embed", vocab: 12, dim: 8),
            Linear(name: "up", out_features: 24, parallel_mode: Column),
            Block(
                name: "own",
                inputs: ["x"],
                params: {"norm": (shape: [4], init: Ones)},
                ops: [
                    (op: "split_dim(dim:2,inner:4)", inputs: ["x"], outputs: ["heads"]),
                    (op: "rms_norm(eps:1e-5)", inputs: ["heads", "norm"], outputs: ["n", "rstd"]),
                    (op: "merge_dims(dim:2)", inputs: ["n"], outputs: ["y"]),
                ],
                outputs: ["y"],
            ),
            Linear(name: "down", out_features: 8, parallel_mode: Row),
            LmHead(name: "head"),
            CrossEntropy(),
        ],
    )"#;
    let uneven = source.replace(
        r#"outputs: ["y"],
            ),"#,
        r#"outputs: ["y"],
                placements: {"n": At({"dp": Shard(0), "tp": Shard(2)})},
            ),"#,
    );
    assert_ne!(source, uneven);
    let expect = train(source, "1", &[], 1);
    for source in [source, &uneven] {
        for mesh in ["1x4", "2x2", "2x4"] {
            train(source, mesh, &[], 1).check_like(&expect);
        }
    }
    let gathers = |mesh: &str| {
        let graph = after("insert-collectives", source, mesh, &[]);
        let text = ir::text::print_graph(&graph);
        let forward = text.lines().take_while(|it| !it.contains("backward:"));
        forward.filter(|it| it.contains("all_gather(tp) %up")).count()
    };
    assert_eq!(gathers("1x4"), 1);
    assert_eq!(gathers("1x2"), 0, "3 heads each need no gather");
}

// C10, jax#26946: what does not divide was replicated, silently.
#[test]
fn a_vocabulary_of_17_is_cut_over_8_ranks() {
    let source = r#"Model(
        name: "vocab",
        batch: Global(8),
        sequence: 8,
        init: Normal(std: 0.5),
        optimizer: Sgd(momentum: 0.9),
        layers: [
            Embedding(name: "embed", vocab: 17, dim: 16),
            LmHead(name: "head"),
            CrossEntropy(),
        ],
    )"#;
    let expect = train(source, "1", &[], 1);
    for mesh in ["8", "1x8"] {
        let found = train(source, mesh, &[("sequence_parallel", "true")], 1);
        found.check_like(&expect);
        let plan = &found.plan;
        for name in ["embed.weight", "embed.weight.momentum_buffer", "head.weight"] {
            assert_eq!(rows(plan, name), [3, 3, 3, 3, 3, 2, 0, 0], "mesh {mesh}: {name}");
            let local = plan.local_shape(plan.buffer(name).unwrap());
            assert_eq!(local.as_slice(), [3, 16], "mesh {mesh}: {name}");
        }
    }
}

/// Rows of a weight that each rank holds in the compiled plan, and that it trains like one rank.
#[track_caller]
fn check_rows(vocab: u64, mesh: &str, placements: &str, expect: &[&[u64]]) {
    let source = format!(
        r#"Model(
            name: "rows",
            batch: Global(24),
            sequence: 2,
            init: Normal(std: 0.5),
            optimizer: AdamW(eps: 1e-3),
            schedule: (lr: 1e-2),
            layers: [
                Embedding(name: "embed", vocab: {vocab}, dim: 4, weight: ({placements})),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    );
    let found = train(&source, mesh, &[], 2);
    found.check_like(&train(&source, "1", &[], 2));
    let plan = &found.plan;
    for name in ["embed.weight", "embed.weight.exp_avg", "embed.weight.exp_avg_sq"] {
        let data = &plan.buffers[plan.buffer(name).unwrap()];
        let layout = &data.sharding.dims[0];
        let runs = plan.mesh.coords().map(|it| layout.runs(vocab, &plan.mesh, &it));
        let rows = runs.map(|it| it.iter().flat_map(|&(start, n)| start..start + n).collect());
        assert_eq!(rows.collect::<Vec<Vec<u64>>>(), expect, "{vocab} rows on {mesh}: {name}");
        let most = expect.iter().map(|it| it.len() as u64).max();
        let local = plan.local_shape(plan.buffer(name).unwrap());
        assert_eq!(Some(local[0]), most, "{vocab} rows on {mesh}: {name}");
    }
}

// C01, C03, C04 and C05 once more, in compiled plans that train; `ir/tests/placement/reports.rs` has
// them for the algebra.
#[test]
fn uneven_layouts_of_the_reports_train_like_one_rank() {
    let strided = r#"placements: {"dp": StridedShard(0, 2)}"#;
    check_rows(5, "2", strided, &[&[0, 1, 3], &[2, 4]]);
    check_rows(6, "2x2", "", &[&[0, 1], &[3, 4], &[2], &[5]]);
    check_rows(5, "2x2", "", &[&[0, 1], &[3], &[2], &[4]]);
    check_rows(7, "2x4", "", &[&[0], &[2], &[4], &[6], &[1], &[3], &[5], &[]]);
    check_rows(2, "8", "", &[&[0], &[1], &[], &[], &[], &[], &[], &[]]);
    check_rows(3, "4x2", "", &[&[0], &[2], &[1], &[], &[], &[], &[], &[]]);
    check_rows(1, "2x4", "", &[&[0], &[], &[], &[], &[], &[], &[], &[]]);
    check_rows(7, "3", "", &[&[0, 1, 2], &[3, 4, 5], &[6]]);
}
