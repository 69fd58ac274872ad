//! FSDP and HSDP, gradient accumulation, and the norm of all gradients.

use crate::harness::*;

/// Two layers with norms, biases and grouped heads: something of everything that is reduced. Without
/// its rope, gradients of key biases would be rounding errors alone, since softmax does not see them.
pub const SMALL: &str = r#"Model(
    name: "small",
    batch: Global(16),
    sequence: 4,
    sequence_parallel: true,
    init: Normal(std: 0.3),
    optimizer: Sgd(momentum: 0.9),
    schedule: (lr: 0.1),
    layers: [
        Embedding(name: "embed", vocab: 13, dim: 16),
        Repeat(n: 2, prefix: "layers", body: [
            TransformerLayer(
                attention: (heads: 4, kv_heads: 2, rope: (theta: 100)),
                mlp: (ffn: 12, activation: swiglu),
            ),
        ]),
        RmsNorm(name: "norm"),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

/// Relative. The same numbers are summed over the same eight ranks, in one go or in two.
const HSDP: f64 = 1e-6;

// C17, pytorch#155903: FSDP and HSDP scaled gradients differently.
#[test]
fn hsdp_has_the_gradients_of_fsdp() {
    for compute in ["f32", "bf16"] {
        let set = [("precision.compute", compute)];
        let expect = train(SMALL, "8", &set, 1);
        let found = train(SMALL, "dp_replicate=2,dp_shard=4,tp=1", &set, 1);
        close(found.losses[0], expect.losses[0], HSDP, "loss");
        close(found.norms[0], expect.norms[0], HSDP, "gradient norm");
        for name in expect.params() {
            let what = format!("{compute}: {name}");
            check_tensor(found.gradient(&name), expect.gradient(&name), HSDP, &what);
        }
    }
    let data = |mesh: &str| train(SMALL, mesh, &[], 1);
    data("8").check_like(&data("1"));
}

/// Weights that are gathered again from a group of neighbours are the same bits, at any size of the group,
/// inside an axis or over several, with dimensions that it does not divide.
#[test]
fn gathering_again_from_a_group_changes_no_bit() {
    let field = "fsdp.reshard_after_forward";
    let hsdp = "dp_replicate=2,dp_shard=4,tp=1";
    let groups = [("8", "2"), ("8", "4"), ("4x2", "2"), ("2x4", "2"), (hsdp, "2"), ("6", "3")];
    for recipe in ["Bf16", "Float8CurrentScaling()"] {
        for (mesh, group) in groups {
            let batch = if mesh == "6" { "Global(12)" } else { "Global(16)" };
            let set = [("precision.compute", "bf16"), ("recipe", recipe), ("batch", batch)];
            let expect = train(SMALL, mesh, &set, 2);
            let set = [&set[..], &[(field, group)]].concat();
            train(SMALL, mesh, &set, 2).check_same(&expect);
        }
    }
}

/// What a backward pass gathers again crosses only the minor axes.
#[test]
fn a_group_gathers_again_over_its_own_axes() {
    let again = |group: &str| -> Vec<String> {
        let set = [("fsdp.reshard_after_forward", group)];
        let graph = after("rematerialize", SMALL, "8", &set);
        let nodes = graph.order.iter().map(|&it| &graph.nodes[it]);
        let gathers = nodes.filter_map(|it| match &it.op {
            ir::Op::Collective(op) if op.kind == ir::ops::CollectiveKind::AllGather => {
                let backward = it.section == ir::Section::Backward;
                backward.then(|| graph.mesh.names(op.axes))
            }
            _ => None,
        });
        gathers.collect()
    };
    let n = again("true").len();
    assert!(n > 5, "{n}");
    assert_eq!(again("true"), vec!["dp"; n]);
    assert_eq!(again("8"), vec!["dp"; n]);
    assert_eq!(again("4"), vec!["dp_in"; n]);
    assert_eq!(again("1"), [""; 0]);
    let message = error(SMALL, "8", &[("fsdp.reshard_after_forward", "3")]);
    assert!(message.contains("a divisor of the 8 coordinates of `dp`"), "{message}");
}

// C19, Megatron-LM#6660: with a group of one rank, gradients doubled every micro-batch.
#[test]
fn micro_batches_on_axes_of_size_1_are_one_large_batch() {
    let expect = train(SMALL, "1", &[], 1);
    let meshes = ["1", "1x1", "1x2", "2x1", "dp_replicate=2,dp_shard=1,tp=1", "1x2x1", "1x1x1"];
    for mesh in meshes {
        for micro_batches in ["1", "2", "8"] {
            for reduce in ["EveryMicroBatch", "LastMicroBatch"] {
                let set = [("micro_batches", micro_batches), ("reduce_gradients", reduce)];
                train(SMALL, mesh, &set, 1).check_like(&expect);
            }
        }
    }
}

// C22, VeOmni PR#862, torchtitan#596: the norm was counted once for each replica.
#[test]
fn the_gradient_norm_counts_every_element_once() {
    let one = train(SMALL, "1", &[], 1);
    let squares = one.params().into_iter().flat_map(|it| one.gradient(&it).to_vec());
    let norm = squares.map(|it| f64::from(it) * f64::from(it)).sum::<f64>().sqrt();
    let half = format!("{}", norm / 2.0);
    let clip = [("clip_norm", half.as_str())];
    let clipped = train(SMALL, "1", &clip, 1);
    for name in one.params() {
        let expect: Vec<f32> = one.gradient(&name).iter().map(|it| it / 2.0).collect();
        check_tensor(clipped.gradient(&name), &expect, GRADIENT, &name);
    }
    let two_steps = train(SMALL, "1", &clip, 2);
    for mesh in ["1", "8", "dp_replicate=2,dp_shard=4,tp=1", "2x4", "2x2x2", "1x4"] {
        let found = train(SMALL, mesh, &clip, 2);
        // Before clipping.
        close(found.norms[0], norm, HSDP, &found.what);
        found.check_like(&two_steps);
    }
}
