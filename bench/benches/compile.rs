//! Compile time of whole models: elaborate, all passes, and the verifier after each.

use bench::{compile, example};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ir::model::modules::Module;
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

/// Time is to grow as the number of layers does.
fn layers(c: &mut Criterion) {
    let mut group = c.benchmark_group("layers of llama-tiny on 2x4");
    group.sample_size(10);
    for n in [200, 400, 800] {
        let mut model = example("llama-tiny");
        for module in &mut model.layers {
            if let Module::Repeat(it) = module {
                it.n = n;
            }
        }
        group.throughput(Throughput::Elements(n.into()));
        group.bench_function(n.to_string(), |b| b.iter(|| compile(&model, "2x4")));
    }
    group.finish();
}

criterion_group!(benches, models, layers);
criterion_main!(benches);
