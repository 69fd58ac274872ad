//! Activation checkpointing computes the forward pass again, on the same groups.

use std::collections::BTreeMap;

use crate::data_parallel::SMALL;
use crate::harness::*;

/// Meshes with two tp replicas: two data-parallel ones, and two of each KV head.
const MESHES: [&str; 5] = ["1", "1x4", "2x2", "2x4", "2x2x2"];

// C64, Megatron-LM#7452 row 4: recomputation gathered over another group than the forward pass.
#[test]
fn training_with_recomputation_is_bit_equal() {
    let selective = [r#"Selective(["attention"])"#, r#"Recompute(["glu", "layer_norm"])"#];
    for mesh in MESHES {
        for sp in ["false", "true"] {
            let train = |checkpoint: &str| {
                let set = [("checkpoint", checkpoint), ("sequence_parallel", sp)];
                train(SMALL, mesh, &set, 2)
            };
            let expect = train("None");
            train("Full").check_same(&expect);
            selective.iter().for_each(|it| train(it).check_same(&expect));
        }
    }
}

// C64: every clone is the op of the forward pass, attributes and axes included, with results laid
// out alike.
#[test]
fn clones_have_the_groups_of_the_forward_pass() {
    for mesh in MESHES {
        let graph = after("rematerialize", SMALL, mesh, &[("checkpoint", "Full")]);
        let made: BTreeMap<&str, _> = graph
            .values
            .iter()
            .filter_map(|(value, data)| Some((data.name.as_str(), (graph.producer(value)?, data))))
            .collect();
        let (mut clones, mut moved) = (0, 0);
        for (name, (node, data)) in &made {
            let Some(original) = name.strip_suffix(".again") else { continue };
            let (source, original) = made[original];
            assert_eq!(graph.nodes[*node].op, graph.nodes[source].op, "mesh {mesh}: {name}");
            assert_eq!(data.sharding, original.sharding, "mesh {mesh}: {name}");
            clones += 1;
            moved += usize::from(matches!(graph.nodes[*node].op, ir::Op::Collective(_)));
        }
        assert!(clones > 10, "mesh {mesh}: {clones}");
        assert!(moved > 0 || mesh == "1", "mesh {mesh} recomputes no collective");
    }
}
