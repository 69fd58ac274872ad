//! Norm weights under sequence parallelism, and the bias of a row-parallel projection.

use ir::Graph;
use runtime::Batch;

use crate::data_parallel::SMALL;
use crate::harness::*;

/// Axes over which some gradient of this value is a sum before it is reduced.
fn summed_over(graph: &Graph, value: &str) -> String {
    let grads = graph.values.values().filter(|it| it.name.starts_with(&format!("{value}.grad")));
    let axes = grads.filter_map(|it| Some(it.sharding.as_ref()?.partial_axes()));
    let axes = axes.fold(ir::placement::AxisSet::EMPTY, |all, it| all.union(it));
    graph.mesh.names(axes)
}

// C23, Megatron-LM#1446, TransformerEngine#435: with sequence parallelism, gradients of norm weights
// differed between tp ranks.
#[test]
fn norm_weight_gradients_are_sums_over_tp_under_sequence_parallelism() {
    let norms = ["norm.weight", "layers.0.input_layernorm.weight", "layers.1.input_layernorm.bias"];
    let expect = train(SMALL, "1", &[], 1);
    let two_steps = train(SMALL, "1", &[], 2);
    for (mesh, axes) in [("1x2", "tp"), ("1x4", "tp_kv, tp_rep"), ("2x2", "dp, tp")] {
        let graph = after("propagate-shardings", SMALL, mesh, &[]);
        for name in norms {
            assert_eq!(summed_over(&graph, &format!("{name}.full")), axes, "mesh {mesh}: {name}");
        }
        let found = train(SMALL, mesh, &[], 1);
        for name in norms {
            let what = format!("mesh {mesh}: {name}");
            check_tensor(found.gradient(name), expect.gradient(name), GRADIENT, &what);
        }
        // The second step shows that all ranks, and not only the first, have been given these.
        train(SMALL, mesh, &[], 2).check_like(&two_steps);
    }
    // Without it, every tp rank has the whole gradient.
    let whole = [("sequence_parallel", "false")];
    let graph = after("propagate-shardings", SMALL, "2x2", &whole);
    assert_eq!(summed_over(&graph, "norm.weight.full"), "dp");
    train(SMALL, "2x2", &whole, 1).check_like(&expect);
}

/// Logits of a row-parallel projection to 3.
const ROW: &str = r#"Model(
    name: "row",
    batch: Global(2),
    sequence: 4,
    init: Normal(std: 0.5),
    optimizer: Sgd(momentum: 0.9),
    layers: [
        Embedding(name: "embed", vocab: 3, dim: 8),
        Linear(name: "row", out_features: 3, parallel_mode: Row),
        CrossEntropy(),
    ],
)"#;

/// Labels 0, 1 and 2: two, one and five times.
fn batch() -> Batch {
    Batch { tokens: vec![0, 1, 2, 0, 1, 2, 1, 1], labels: vec![0, 2, 2, 1, 2, 0, 2, 2] }
}

// C28, torchtitan PR#4332: the bias was added once for each tp rank, or its gradient divided by tp.
#[test]
fn a_row_parallel_bias_is_added_once() {
    for mesh in ["1", "1x2", "1x4", "2x2", "2x4"] {
        for sp in ["false", "true"] {
            let what = format!("mesh {mesh}, sp {sp}");
            let session = start(&compile(ROW, mesh, &[("sequence_parallel", sp)]));
            session.write("row.weight", &[0.0; 24]).unwrap();
            session.write("row.bias", &[100.0, 200.0, 300.0]).unwrap();
            session.prepare().unwrap();
            let found = run(&what, &session, &[batch()]);
            // Softmax of [100, 200, 300] is [0, 0, 1] in f32, so losses are 200, 100 and 0.
            assert_eq!(found.losses[0], (2.0 * 200.0 + 100.0) / 8.0, "{what}");
            assert_eq!(found.gradient("row.bias"), [-2.0 / 8.0, -1.0 / 8.0, 3.0 / 8.0], "{what}");
        }
    }
}

// C28 with weights that are not zero.
#[test]
fn a_row_parallel_projection_with_bias_is_that_of_one_rank() {
    let train = |mesh: &str, sp: &str| {
        let session = start(&compile(ROW, mesh, &[("sequence_parallel", sp)]));
        session.write("row.bias", &[0.1, 0.2, 0.3]).unwrap();
        session.prepare().unwrap();
        run(&format!("mesh {mesh}, sp {sp}"), &session, &[batch()])
    };
    let expect = train("1", "false");
    for mesh in ["1x2", "1x4", "2x2", "2x4"] {
        for sp in ["false", "true"] {
            train(mesh, sp).check_like(&expect);
        }
    }
}
