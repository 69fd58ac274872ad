//! One training step of the tiny Llama on CPU ranks.

use bench::{compile, example};
use criterion::{Criterion, criterion_group, criterion_main};
use runtime::{Data, Session, SessionOptions};

fn steps(c: &mut Criterion) {
    let model = example("llama-tiny");
    let mut group = c.benchmark_group("step of llama-tiny");
    group.sample_size(20);
    for mesh in ["1", "2x2", "2x4"] {
        let plan = compile(&model, mesh);
        let data = Data::synthetic(&plan.run, 0);
        let session = Session::new(&plan, &SessionOptions::default()).expect("the plan fits here");
        session.prepare().expect("weights are there");
        let mut step = 0;
        group.bench_function(mesh, |b| {
            b.iter(|| {
                let batch = data.batch(step).expect("synthetic data has no end");
                step += 1;
                session.step(&batch, 1e-3, step).expect("the step runs")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
