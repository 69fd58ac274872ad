//! What a step writes, runs and reports.

use ir::DType;
use ir::graph::Init;
use ir::ops::{Add, Cast, CollectiveKind, Matmul, Scale};
use ir::placement::ReduceOp;
use ir::plan::{Plan, PlanSection, Role};
use kernels::Proved;
use runtime::{Batch, Session, SessionOptions};

use crate::build::{PlanBuilder, bits, mesh, session};

const MESHES: [&str; 5] = ["1x1", "2x1", "4x1", "2x2", "2x4"];

/// C57: weights start with the same bits on every mesh and in every layout.
#[test]
fn initial_weights_do_not_depend_on_the_mesh() {
    let normal = Init::Normal { mean: 0.0, std: 0.02 };
    let start = |text: &str, sharding: &str, init: Init| {
        let mut builder = PlanBuilder::new(mesh(text));
        builder.param("w", &[13, 10], sharding, init);
        let options = SessionOptions { seed: 42, ..SessionOptions::default() };
        let session = Session::new(&Proved::unproved(builder.plan), &options).expect("starts");
        bits(&session.read("w").expect("read").data)
    };
    for init in [normal, Init::Uniform { low: -1.0, high: 1.0 }, Init::Ones, Init::Zeros] {
        let expect = start("1x1", "[_, _]", init);
        for text in MESHES {
            for sharding in ["[_, _]", "[dp, _]", "[_, tp]", "[tp.dp, _]", "[tp, dp]", "[x2.tp, _]"]
            {
                assert_eq!(start(text, sharding, init), expect, "{text} {sharding} {init:?}");
            }
        }
    }
}

/// Tokens, as floats, are added up over micro-batches; `update` reports the learning rate plus the
/// step, and the number that rank 0 has of the last sum.
fn plan(text: &str, micro_batches: u32) -> Plan {
    let mut builder = PlanBuilder::new(mesh(text));
    builder.plan.micro_batches = micro_batches;
    builder.plan.run.vocab = 1000;
    let rows = 8 / u64::from(micro_batches);
    let tokens = builder.buffer("tokens", Role::Input, DType::I32, &[rows, 3], "[dp, _]");
    let labels = builder.buffer("labels", Role::Input, DType::I32, &[rows, 3], "[_, tp]");
    let seen = builder.buffer("seen", Role::State, DType::I32, &[rows, 3], "[_, tp]");
    let x = builder.buffer("x", Role::Temp, DType::F32, &[rows, 3], "[dp, _]");
    let sum = builder.buffer("sum", Role::State, DType::F32, &[rows, 3], "[dp, _]");
    builder.compute(Cast { to: DType::F32 }, &[tokens], &[x]);
    builder.compute(Add {}, &[sum, x], &[sum]);
    builder.copy(labels, seen);
    builder.section = PlanSection::Update;
    let lr = builder.buffer("lr", Role::Input, DType::F32, &[], "[]");
    let loss = builder.buffer("the.loss", Role::State, DType::F32, &[], "[]");
    builder.compute(Add {}, &[lr, lr], &[loss]);
    builder.plan.results = vec![("loss".to_string(), loss), ("grad_norm".to_string(), lr)];
    builder.plan
}

#[test]
fn micro_batches_are_rows_of_the_global_batch() {
    let tokens: Vec<i32> = (0..24).collect();
    let labels: Vec<i32> = (100..124).collect();
    let batch = Batch { tokens, labels };
    for text in MESHES {
        for micro_batches in [1, 2, 4] {
            let session = session(&plan(text, micro_batches));
            for step in 1..4 {
                session.write("sum", &vec![0.0; 24 / micro_batches as usize]).expect("written");
                let report = session.step(&batch, 0.5, step).expect("runs");
                assert_eq!(report.loss, Some(1.0));
                assert_eq!(report.grad_norm, Some(0.5));
                assert_eq!((report.step, report.tokens), (step, 24));
            }
            let n = 24 / micro_batches as usize;
            let sum = |i: usize| (i..24).step_by(n).sum::<usize>() as f32;
            let expect: Vec<f32> = (0..n).map(sum).collect();
            assert_eq!(session.read("sum").expect("read").data, expect, "{text} {micro_batches}");
            let last: Vec<i32> = (124 - n as i32..124).collect();
            assert_eq!(session.read_integers("seen").expect("read"), last);
        }
    }
}

/// A row-parallel linear layer: local GEMMs, then a reduction, on every mesh the same as on one rank.
#[test]
fn a_sharded_matmul_equals_the_whole() {
    let run = |text: &str, dtype: DType| {
        let mut builder = PlanBuilder::new(mesh(text));
        let init = Init::Uniform { low: -1.0, high: 1.0 };
        let x = builder.param("x", &[6, 10], "[dp, tp]", init);
        let w = builder.param("w", &[7, 10], "[_, tp]", init);
        let xc = builder.buffer("x.c", Role::Temp, dtype, &[6, 10], "[dp, tp]");
        let wc = builder.buffer("w.c", Role::Temp, dtype, &[7, 10], "[_, tp]");
        let part = builder.buffer("part", Role::Temp, DType::F32, &[6, 7], "[dp, _] sum(tp)");
        let y = builder.buffer("y", Role::State, DType::F32, &[6, 7], "[dp, _]");
        let fprop = Matmul { transpose_b: true, out: Some(DType::F32), ..Matmul::default() };
        builder.compute(Cast { to: dtype }, &[x], &[xc]);
        builder.compute(Cast { to: dtype }, &[w], &[wc]);
        builder.compute(fprop, &[xc, wc], &[part]);
        let comm = builder.comm(&["tp"]);
        builder.collective(CollectiveKind::AllReduce(ReduceOp::Sum), comm, &[(part, y)]);
        let session = session(&builder.plan);
        session.micro_batch(&Batch::default(), 1, 0).expect("runs");
        session.read("y").expect("read")
    };
    for dtype in [DType::F32, DType::Bf16] {
        let expect = run("1x1", dtype);
        assert_eq!(expect.shape.as_slice(), [6, 7]);
        for text in MESHES {
            let found = run(text, dtype);
            for (found, expect) in found.data.iter().zip(&expect.data) {
                // Ten products of at most 1, summed in another order.
                assert!((found - expect).abs() < 10.0 * 4.0 * f32::EPSILON, "{found} {expect}");
            }
        }
    }
}

/// bf16 keeps 8 bits; halfway goes to the even one.
#[test]
fn stores_round_to_nearest_even() {
    let mut builder = PlanBuilder::new(mesh("1"));
    let wide = builder.buffer("wide", Role::State, DType::F32, &[6], "[_]");
    let narrow = builder.buffer("narrow", Role::State, DType::Bf16, &[6], "[_]");
    builder.compute(Cast { to: DType::Bf16 }, &[wide], &[narrow]);
    let session = session(&builder.plan);
    let values = [1.0, 257.0, 259.0, -257.5, f32::NAN, 1e39_f64 as f32];
    session.write("wide", &values).expect("written");
    session.micro_batch(&Batch::default(), 1, 0).expect("runs");
    let found = session.read("narrow").expect("read").data;
    assert_eq!(found[..4], [1.0, 256.0, 260.0, -258.0]);
    assert!(found[4].is_nan() && found[5] == f32::INFINITY);
    // Writing from outside rounds alike.
    session.write("narrow", &values).expect("written");
    assert_eq!(session.read("narrow").expect("read").data[..4], [1.0, 256.0, 260.0, -258.0]);
}

/// A partial buffer is read as the value that it stands for.
#[test]
fn reading_reduces_partial_values() {
    let mut builder = PlanBuilder::new(mesh("2x4"));
    let mut names = Vec::new();
    for sharding in ["[_] sum(tp)", "[dp] avg(tp)", "[_] max(dp, tp)"] {
        let src = builder.buffer(sharding, Role::Carried, DType::F32, &[2], sharding);
        let given = builder.by_rank(&format!("{sharding} in"), src);
        builder.copy(given, src);
        names.push(sharding);
    }
    let session = session(&builder.plan);
    let ranks = |n: usize| (0..8 * n).map(|i| (i / n) as f32).collect::<Vec<f32>>();
    session.write("[_] sum(tp) in", &ranks(2)).expect("written");
    session.write("[dp] avg(tp) in", &ranks(1)).expect("written");
    session.write("[_] max(dp, tp) in", &ranks(2)).expect("written");
    session.micro_batch(&Batch::default(), 1, 0).expect("runs");
    let read = |name: &str| session.read(name).expect("read").data;
    assert_eq!(read("[_] sum(tp)"), [6.0, 6.0]);
    assert_eq!(read("[dp] avg(tp)"), [1.5, 5.5]);
    assert_eq!(read("[_] max(dp, tp)"), [7.0, 7.0]);
}

/// What `prepare` has made is there in every step: compute weights, say.
#[test]
fn prepared_values_outlive_steps() {
    let mut builder = PlanBuilder::new(mesh("2"));
    let w = builder.param("w", &[5], "[dp]", Init::Normal { mean: 0.0, std: 1.0 });
    let ready = builder.buffer("w.compute", Role::State, DType::Bf16, &[5], "[dp]");
    let read = builder.buffer("read", Role::State, DType::Bf16, &[5], "[dp]");
    builder.section = PlanSection::Prepare;
    builder.compute(Cast { to: DType::Bf16 }, &[w], &[ready]);
    builder.section = PlanSection::Step;
    builder.copy(ready, read);
    let session = session(&builder.plan);
    session.prepare().expect("runs");
    let expect = session.read("w.compute").expect("read").data;
    assert!(expect.iter().all(|&it| it != 0.0));
    for step in 1..3 {
        session.step(&Batch::default(), 0.1, step).expect("runs");
        assert_eq!(session.read("read").expect("read").data, expect);
    }
}

/// What a step carries is there in the update and after it, and nothing else is.
#[test]
fn carried_values_last_until_the_step_is_over() {
    let mut builder = PlanBuilder::new(mesh("2"));
    let x = builder.param("x", &[6], "[dp]", Init::Ones);
    let early = builder.buffer("early", Role::Temp, DType::F32, &[6], "[dp]");
    let carried = builder.buffer("carried", Role::Carried, DType::F32, &[6], "[dp]");
    let late = builder.buffer("late", Role::Temp, DType::F32, &[6], "[dp]");
    let seen = ["early", "carried", "late"]
        .map(|it| builder.buffer(&format!("{it}.seen"), Role::State, DType::F32, &[6], "[dp]"));
    let before = builder.buffer("before", Role::State, DType::F32, &[6], "[dp]");
    builder.copy(carried, before);
    for buffer in [early, carried, late] {
        builder.compute(Scale { factor: 2.0.into() }, &[x], &[buffer]);
    }
    builder.section = PlanSection::Update;
    for (from, to) in [early, carried, late].into_iter().zip(seen) {
        builder.copy(from, to);
    }
    let session = session(&builder.plan);
    for step in 1..3 {
        session.step(&Batch::default(), 0.1, step).expect("runs");
        let read = |name: &str| session.read(name).expect("read").data;
        assert_eq!(read("carried"), [2.0; 6]);
        assert_eq!(read("carried.seen"), [2.0; 6]);
        for gone in ["before", "early.seen", "late.seen"] {
            assert!(read(gone).iter().all(|it| it.is_nan()), "{gone}");
        }
    }
}
