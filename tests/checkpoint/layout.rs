//! What is saved, and who writes it.

use std::collections::BTreeMap;

use checkpoint::Metadata;
use checkpoint::save::{Content, Position, file_items, metadata};
use ir::checkpoint::{CheckpointLayout, Kind};
use ir::plan::Plan;

use crate::harness::*;

const POSITION: Position = Position { step: 3, sample: 24, seed: 7, finite: true };

/// Keys of the entries that are not of the model or the optimizer.
fn states(plan: &Plan) -> Vec<String> {
    let layout = CheckpointLayout::of(plan).unwrap();
    let states = layout.entries.into_iter().filter(|it| matches!(it.kind, Kind::State { .. }));
    states.map(|it| it.key).collect()
}

/// Every element of every tensor is in one box, and every rank knows of itself what the index says.
#[track_caller]
fn check_index(plan: &Plan) -> Metadata {
    let layout = CheckpointLayout::of(plan).unwrap();
    let index = metadata(&layout, &POSITION);
    for (key, stored) in &index.tensors {
        let volume = |it: &checkpoint::StoredChunk| it.chunk.sizes.iter().product::<u64>();
        let n: u64 = stored.chunks.iter().map(volume).sum();
        assert_eq!(n, stored.n_elements(), "{key}");
        assert!(stored.chunks.iter().all(|it| volume(it) > 0), "{key} has an empty box");
        for (i, a) in stored.chunks.iter().enumerate() {
            for b in &stored.chunks[..i] {
                let apart = (0..stored.shape.len()).any(|dim| {
                    let (a, b) = (&a.chunk, &b.chunk);
                    a.offsets[dim] + a.sizes[dim] <= b.offsets[dim]
                        || b.offsets[dim] + b.sizes[dim] <= a.offsets[dim]
                });
                assert!(apart, "{key}: boxes overlap");
            }
        }
    }
    let mut places = BTreeMap::new();
    for (key, stored) in &index.tensors {
        places.extend(stored.chunks.iter().map(|it| {
            let item = &it.item;
            ((item.file, item.offset), (key, it.chunk.offsets.to_vec(), item.len))
        }));
    }
    let mut found = 0;
    for rank in 0..layout.mesh.n_ranks() {
        let mut end = 0;
        for item in file_items(&layout, &POSITION, &layout.mesh.coord_of(rank)) {
            assert_eq!(item.at, end, "rank {rank}: items lie one behind the other");
            end = item.at + item.len;
            if let Content::Shard { local, .. } = &item.content {
                let (_, offsets, len) = &places[&(rank as u32, item.at)];
                assert_eq!((&local.chunk.offsets.to_vec(), item.len), (offsets, *len));
                found += 1;
            }
        }
    }
    // Scalars are places without a shard: one of all steps, and those of planc.
    let scalars = places.values().filter(|it| it.1.is_empty()).count();
    let shards_without_dims = layout.entries.iter().filter(|it| it.ty.shape.is_empty()).count();
    assert_eq!(found, places.len() - scalars + shards_without_dims);
    index
}

// C04, pytorch#161368: empty shards have no box, and none hides one that is not empty.
#[test]
fn uneven_shards_are_covered_once() {
    let model = |n: &str| {
        format!(
            "Model(name: \"m\", batch: Global(8), sequence: 2, optimizer: Sgd(), layers: [\
             Embedding(name: \"e\", vocab: {n}, dim: 3), LmHead(name: \"h\"), CrossEntropy()])"
        )
    };
    for mesh in ["1", "2", "8", "4x2", "2x4", "2x2x2", "dp_replicate=4,dp_shard=2"] {
        for n in ["1", "2", "3", "7", "9", "17"] {
            check_index(&compile(&model(n), mesh, &[]));
        }
    }
}

/// 5 blocks of 128 rows over 2 and over 3 ranks.
#[test]
fn boxes_of_weights_in_blocks_end_between_blocks() {
    for (mesh, expect) in [("2", [384, 256].as_slice()), ("3", [256, 256, 128].as_slice())] {
        let index = check_index(&compile(WIDE, mesh, &ROUNDED));
        let mut n = 0;
        let of_weight = |it: &(&String, &checkpoint::StoredTensor)| {
            it.0.contains("mlp.gate_proj.weight") && it.1.shape.len() == 2
        };
        for (key, stored) in index.tensors.iter().filter(of_weight) {
            let mut chunks: Vec<_> = stored.chunks.iter().map(|it| &it.chunk).collect();
            chunks.sort_by_key(|it| it.offsets[0]);
            let rows: Vec<u64> = chunks.iter().map(|it| it.sizes[0]).collect();
            let block = if key.ends_with("scale_inv") { 128 } else { 1 };
            assert_eq!(rows, expect.iter().map(|it| it / block).collect::<Vec<u64>>(), "{key}");
            n += 1;
        }
        // The master, its two moments, codes and scales.
        assert_eq!(n, 5, "mesh {mesh}");
    }
}

#[test]
fn every_rank_knows_its_part_of_the_index() {
    for mesh in ["1", "4", "2x4", "2x2x2"] {
        check_index(&compile(SMALL, mesh, &[]));
    }
    check_index(&compile(SMALL, "2x2", &[("fsdp", "(dim: 1)"), ("micro_batches", "2")]));
}

// C51, Megatron-LM#1873: what a rank of 4096 writes follows from the plan. Nothing is gathered: the index
// that one rank makes names the items that the others have planned on their own.
#[test]
fn thousands_of_ranks_need_not_talk() {
    let plan = compile(SMALL, "dp_replicate=64,dp_shard=16,tp=4", &[("batch", "Global(1024)")]);
    let index = check_index(&plan);
    assert_eq!(index.files.len(), 4096);
    let items = index.tensors.values().flat_map(|it| &it.chunks).count();
    let shards = 16 * 4;
    assert!(items <= index.tensors.len() * shards, "replicas write once: {items}");
}

/// With eight replicas, no rank writes more than its share and the largest shard.
#[test]
fn replicas_share_the_writing() {
    let plan = compile(SMALL, "dp_replicate=8,dp_shard=1", &[]);
    let layout = CheckpointLayout::of(&plan).unwrap();
    let written = |rank: u64| -> u64 {
        let items = file_items(&layout, &POSITION, &layout.mesh.coord_of(rank));
        let shard = |it: &checkpoint::save::FileItem| matches!(it.content, Content::Shard { .. });
        items.iter().filter(|it| shard(it)).map(|it| it.len).sum()
    };
    let written: Vec<u64> = (0..8).map(written).collect();
    let largest = 250 * 16 * 4;
    let (least, most) = (written.iter().min().unwrap(), written.iter().max().unwrap());
    assert!(most - least <= largest + 4096, "{written:?}");
}

#[test]
fn sums_that_end_at_zero_and_roundings_are_not_saved() {
    let none: [&str; 0] = [];
    assert_eq!(states(&compile(SMALL, "2x2", &[("micro_batches", "2")])), none);
    assert_eq!(states(&compile(SMALL, "2x2", &[("precision.compute", "bf16")])), none);
}

#[test]
fn codes_scales_and_histories_are_saved() {
    let set = [("precision.compute", "bf16"), ("recipe", "DelayedScaling()")];
    let mut found = states(&compile(SMALL, "1", &set));
    found.retain(|it| it.contains("layers.0.self_attn.q_proj.weight"));
    let expect = ["amax", "amax_history", "compute", "scale", "scale_inv"];
    found.sort();
    let expect = expect.map(|it| format!("planc.state.layers.0.self_attn.q_proj.weight.{it}"));
    assert_eq!(found, expect);
}
