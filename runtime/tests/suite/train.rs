//! The loop: the schedule reaches the plan, metrics reach the file.

use std::path::PathBuf;

use ir::DType;
use ir::ops::Add;
use ir::plan::{PlanSection, Role};
use ir::run::{Decay, Schedule};
use kernels::Proved;
use runtime::{Event, TrainOptions, train};

use crate::build::{PlanBuilder, file, mesh};

/// Reports the learning rate as its loss.
fn plan() -> Proved {
    let mut builder = PlanBuilder::new(mesh("2x2"));
    builder.plan.run.schedule =
        Schedule { lr: 0.1, warmup: 2, decay: Decay::Linear { until: 4, min: 0.0 } };
    builder.plan.run.steps = 5;
    builder.plan.run.vocab = 300;
    (builder.plan.run.global_batch, builder.plan.run.sequence) = (4, 6);
    builder.buffer("tokens", Role::Input, DType::I32, &[4, 6], "[dp, _]");
    builder.buffer("labels", Role::Input, DType::I32, &[4, 6], "[dp, _]");
    let lr = builder.buffer("lr", Role::Input, DType::F32, &[], "[]");
    let loss = builder.buffer("loss.value", Role::State, DType::F32, &[], "[]");
    builder.section = PlanSection::Update;
    builder.compute(Add {}, &[lr], &[loss]);
    builder.plan.results = vec![("loss".to_string(), loss)];
    Proved::unproved(builder.plan)
}

#[test]
fn the_schedule_reaches_the_plan_and_the_metrics() {
    let metrics = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("metrics.jsonl");
    let options = TrainOptions { metrics: Some(metrics.clone()), ..TrainOptions::default() };
    let mut seen = Vec::new();
    let see = |it: Event<'_>| {
        if let Event::Step(it) = it {
            seen.push((it.step, it.loss));
        }
    };
    train(&plan(), &options, see).expect("trains");
    let expect = [(1, 0.05), (2, 0.1), (3, 0.1), (4, 0.05), (5, 0.0)];
    let lines = std::fs::read_to_string(metrics).expect("written");
    assert_eq!((seen.len(), lines.lines().count()), (5, 5));
    for ((seen, expect), line) in seen.iter().zip(expect).zip(lines.lines()) {
        assert_eq!(*seen, (expect.0, Some(expect.1 as f32)));
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(line["step"], expect.0);
        assert_eq!(line["lr"], expect.1);
        assert_eq!(line["loss"], f64::from(expect.1 as f32));
        assert_eq!(line["tokens"], 24);
        assert!(line["grad_norm"].is_null());
        assert!(line["tokens_per_s"].as_f64().expect("a number") > 0.0);
    }
}

#[test]
fn options_replace_what_the_plan_says() {
    let text = file("train.txt", &[b'x'; 25]);
    let options = TrainOptions { steps: Some(2), data: vec![text], ..TrainOptions::default() };
    let mut steps = 0;
    train(&plan(), &options, |_| steps += 1).expect("trains");
    assert_eq!(steps, 2);
    let short = file("short.txt", &[b'x'; 24]);
    let options = TrainOptions { data: vec![short], ..TrainOptions::default() };
    assert_eq!(
        train(&plan(), &options, |_| ()).map(|_| ()).expect_err("too short").code(),
        "PL0522"
    );
}

#[test]
fn an_input_that_nothing_fills_is_refused() {
    let mut builder = PlanBuilder::new(mesh("1"));
    builder.buffer("pixels", Role::Input, DType::F32, &[4], "[_]");
    let result = train(&Proved::unproved(builder.plan), &TrainOptions::default(), |_| ());
    assert_eq!(result.map(|_| ()).expect_err("refused").code(), "PL0516");
}

#[test]
fn steps_are_logged_now_and_then() {
    let options = TrainOptions { log_every: 10, ..TrainOptions::default() };
    let logged: Vec<u64> = (1..=25).filter(|&it| options.logs(it, 25)).collect();
    assert_eq!(logged, [1, 10, 20, 25]);
    assert!(TrainOptions::default().logs(7, 25));
}
