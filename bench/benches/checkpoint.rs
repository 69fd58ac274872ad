//! Planning of a checkpoint of some 900 tensors on 1024 ranks: what each rank does, and the one index.

use bench::{compile, example};
use checkpoint::save::{Position, file_items, metadata};
use criterion::{Criterion, criterion_group, criterion_main};
use ir::checkpoint::CheckpointLayout;
use ir::model::schema::Batch;

fn planning(c: &mut Criterion) {
    let mut model = example("llama3-8b");
    model.batch = Batch::Global(128);
    let plan = compile(&model, "128x8");
    let position = Position { step: 1, sample: 0, seed: 0 };
    let layout = CheckpointLayout::of(&plan).expect("it can be saved");
    let (tensors, ranks) = (layout.entries.len(), layout.mesh.n_ranks());
    let mut group = c.benchmark_group(format!("checkpoint of {tensors} tensors on {ranks} ranks"));
    group.sample_size(10);
    group.bench_function("layout", |b| b.iter(|| CheckpointLayout::of(&plan)));
    for rank in [0, ranks - 1] {
        let coord = layout.mesh.coord_of(rank);
        group.bench_function(format!("items of rank {rank}"), |b| {
            b.iter(|| file_items(&layout, &position, &coord));
        });
    }
    let index = || {
        let mut bytes = Vec::new();
        metadata(&layout, &position).write(&mut bytes).expect("memory takes all");
        bytes
    };
    println!("the index has {} bytes", index().len());
    group.bench_function("index", |b| b.iter(index));
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);
