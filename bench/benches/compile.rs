//! Compile time of whole models: elaborate, all passes, and the verifier after each.

use bench::{compile, example};
use criterion::{Criterion, criterion_group, criterion_main};
use ir::quant::{Float8CurrentScaling, Recipe};

fn models(c: &mut Criterion) {
    let mut group = c.benchmark_group("compile");
    group.sample_size(20);
    let cases = [
        ("llama-tiny", "2x4"),
        ("llama3-8b", "2x4"),
        ("llama3-70b", "8x8"),
        ("llama3-405b", "2048x8"),
    ];
    for (name, mesh) in cases {
        let model = example(name);
        group.bench_function(format!("{name} on {mesh}"), |b| b.iter(|| compile(&model, mesh)));
    }
    let mut model = example("llama3-405b");
    model.recipe = Recipe::Float8CurrentScaling(Float8CurrentScaling::default());
    group.bench_function("llama3-405b in FP8 on 2048x8", |b| b.iter(|| compile(&model, "2048x8")));
    group.finish();
}

criterion_group!(benches, models);
criterion_main!(benches);
