//! Grouped heads, and norms of single heads.

use crate::harness::*;

/// Eight query heads over two KV heads, each normalized.
const GROUPED: &str = r#"Model(
    name: "grouped",
    batch: Global(4),
    sequence: 8,
    init: Normal(std: 0.3),
    optimizer: Sgd(momentum: 0.9),
    schedule: (lr: 0.1),
    layers: [
        Embedding(name: "embed", vocab: 16, dim: 32),
        Residual(body: [
            MultiheadAttention(
                name: "attn", heads: 8, kv_heads: 2, head_dim: 4, bias: true,
                norm: RmsNorm(), qk_norm: RmsNorm(), rope: (theta: 100),
            ),
        ]),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

// C11, torchtitan#2574: two KV heads on four ranks were half a head each.
#[test]
fn two_kv_heads_on_four_ranks_are_replicated_in_pairs() {
    let expect = train(GROUPED, "1", &[], 1);
    for mesh in ["1x4", "2x4", "1x8", "1x2"] {
        for sp in ["false", "true"] {
            train(GROUPED, mesh, &[("sequence_parallel", sp)], 1).check_like(&expect);
        }
    }
    let graph = after("propagate-shardings", GROUPED, "1x4", &[]);
    let mesh = &graph.mesh;
    let sharding = |name: &str| {
        let found = graph.values.values().find(|it| it.name == name);
        found.unwrap_or_else(|| panic!("there is no `{name}`")).sharding.clone().unwrap()
    };
    for part in ["k_proj", "v_proj"] {
        let full = sharding(&format!("attn.{part}.weight.full"));
        let replicas = full.replicated_axes(mesh);
        assert_eq!(mesh.set_size(replicas), 2, "{part}: replica groups of 2");
        assert_eq!(mesh.names(full.sharded_axes()), "tp_kv");
        assert_eq!(full.local_shape(&[8, 32], mesh).as_slice(), [4, 32], "{part}: one head");
    }
    // Gradients of keys and values are sums over the replicas: each has the part of its queries.
    let is_grad = |op: &ir::Op| op.kind() == ir::ops::OpKind::AttentionGrad;
    let node = graph.order.iter().find(|&&it| is_grad(&graph.nodes[it].op)).unwrap();
    let axes = graph.nodes[*node].results.iter().map(|&it| graph.sharding(it).partial_axes());
    let axes: Vec<String> = axes.map(|it| mesh.names(it)).collect();
    assert_eq!(axes, ["", "tp_rep", "tp_rep"]);
}

// C24, Megatron-LM#7452 item 11: a replicated norm weight on head-sharded activations got a gradient
// per rank, reduced only if sequence parallelism was on.
#[test]
fn norm_weights_of_heads_are_summed_over_tp_without_sequence_parallelism() {
    let set = [("sequence_parallel", "false")];
    let expect = train(GROUPED, "1", &set, 1);
    let two_steps = train(GROUPED, "1", &set, 2);
    for mesh in ["1x2", "1x4", "2x2"] {
        let found = train(GROUPED, mesh, &set, 1);
        for name in ["attn.q_norm.weight", "attn.k_norm.weight"] {
            let (found, expect) = (found.gradient(name), expect.gradient(name));
            check_tensor(found, expect, GRADIENT, &format!("mesh {mesh}: {name}"));
        }
        // The second step shows that all ranks, and not only the first, have been given these.
        train(GROUPED, mesh, &set, 2).check_like(&two_steps);
    }
    let graph = after("propagate-shardings", GROUPED, "1x2", &set);
    for name in ["attn.q_norm.weight", "attn.k_norm.weight"] {
        let partial = graph.values.values().any(|it| {
            let partial = it.sharding.as_ref().map(|it| it.partial_axes());
            it.name.starts_with(&format!("{name}.full.grad"))
                && partial.is_some_and(|it| graph.mesh.names(it) == "tp")
        });
        assert!(partial, "{name} is a sum over tp:\n{}", ir::text::print_graph(&graph));
    }
}
