//! Random numbers are those of one rank on every mesh.

use ir::Section;
use ir::graph::{Def, Store};
use ir::ops::OpKind;

use crate::harness::*;

const DROPOUT: &str = r#"Model(
    name: "dropout",
    batch: Global(4),
    sequence: 8,
    init: Normal(std: 0.3),
    optimizer: Sgd(momentum: 0.9),
    layers: [
        Embedding(name: "embed", vocab: 16, dim: 8, init: Ones),
        Dropout(name: "first", rate: 0.5),
        Repeat(n: 1, prefix: "layers", body: [
            TransformerLayer(
                attention: (heads: 4, kv_heads: 2, rope: (theta: 100)),
                mlp: (ffn: 12, activation: gelu),
                hidden_dropout: 0.25,
            ),
        ]),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

const MESHES: [&str; 6] = ["1", "2", "4", "2x2", "2x4", "2x2x2"];

// C57, pytorch#168058: weights started differently on another number of ranks.
#[test]
fn initial_weights_are_bit_equal_on_every_mesh() {
    let expect = train(DROPOUT, "1", &[], 0);
    for mesh in MESHES {
        for dim in ["0", "1"] {
            train(DROPOUT, mesh, &[("fsdp.dim", dim)], 0).check_same(&expect);
        }
    }
}

/// The result of the first dropout, kept in a state: zeros and twos, since the embedding is one.
fn mask(mesh: &str, sp: &str) -> Vec<f32> {
    let mut graph = logical(DROPOUT, mesh, &[("sequence_parallel", sp)]).unwrap();
    let is_dropout = |op: &ir::Op| op.kind() == OpKind::Dropout;
    let node = graph.order.iter().find(|&&it| is_dropout(&graph.nodes[it].op)).copied();
    let value = graph.nodes[node.expect("the model drops")].results[0];
    let ty = graph.ty(value).clone();
    let state = graph.add_leaf("mask".into(), ty, Def::State);
    graph.values[state].like = Some(value);
    let ndim = graph.ty(value).ndim();
    graph.values[state].sharding = Some(ir::placement::Sharding::replicated(ndim));
    graph.values[state].pinned = true;
    let name = "mask.kept";
    let mut builder = ir::Builder::new(&mut graph);
    builder.section = Section::Forward;
    let kept = builder.op(name, ir::ops::Reshard::default(), &[value]).unwrap();
    builder.pin(kept, ir::placement::Sharding::replicated(ndim));
    graph.stores.push(Store { state, value: kept, section: Section::Forward });
    let found = train_on(mesh, finish(graph), &[batch()]);
    found.tensor("mask").to_vec()
}

fn batch() -> runtime::Batch {
    let tokens = (0..32).map(|it| it % 16).collect();
    let labels = (0..32).map(|it| 5 * it % 16).collect();
    runtime::Batch { tokens, labels }
}

// C57: dropout differed by mesh.
#[test]
fn dropout_masks_are_bit_equal_on_every_mesh() {
    let expect = mask("1", "false");
    assert!(expect.iter().all(|&it| it == 0.0 || it == 2.0));
    let dropped = expect.iter().filter(|&&it| it == 0.0).count();
    // 256 coins: within four standard deviations of 8.
    assert!(dropped.abs_diff(128) < 32, "{dropped} of {}", expect.len());
    for mesh in MESHES {
        for sp in ["false", "true"] {
            assert_eq!(mask(mesh, sp), expect, "mesh {mesh}, sp {sp}");
        }
    }
}

// C57: and so a model with dropout trains alike, also where masks are computed again.
#[test]
fn a_model_with_dropout_trains_alike_on_every_mesh() {
    for micro_batches in ["1", "2"] {
        let expect = train(DROPOUT, "1", &[("micro_batches", micro_batches)], 3);
        for mesh in MESHES {
            for (sp, checkpoint) in [("false", "None"), ("true", "Full")] {
                // 4 sequences are not 2 micro-batches of 4 ranks.
                if micro_batches == "2" && ["4", "2x2x2"].contains(&mesh) {
                    continue;
                }
                let set = [
                    ("micro_batches", micro_batches),
                    ("sequence_parallel", sp),
                    ("checkpoint", checkpoint),
                ];
                train(DROPOUT, mesh, &set, 3).check_like(&expect);
            }
        }
    }
}

// C57: another seed, step or micro-batch is another mask.
#[test]
fn masks_change_from_step_to_step() {
    let plan = compile(DROPOUT, "1", &[("schedule.lr", "0.0")]);
    let found = train_on("lr 0", plan, &[batch(), batch()]);
    assert_ne!(found.losses[0], found.losses[1]);
}
