//! Streams go on in any order that records and waits allow, and in no other.

use ir::ops::{Add, CollectiveKind, Fill};
use ir::placement::ReduceOp;
use ir::plan::{Plan, Role, StreamKind};
use ir::{DType, TensorType};
use kernels::Proved;
use runtime::{Session, SessionOptions};

use crate::build::{PlanBuilder, bits, mesh, session_with_order};

/// `x = 1` and `y = x + x` on two streams, then `x = 5` again on the first, which must not come
/// before `y` has read the old one.
fn plan(first_wait: bool, second_wait: bool) -> Plan {
    let mut builder = PlanBuilder::new(mesh("2"));
    let other = builder.plan.streams.push(StreamKind::Compute.into());
    let first = builder.stream;
    let ty = TensorType::new(DType::F32, &[4]);
    let x = builder.buffer("x", Role::Temp, DType::F32, &[4], "[_]");
    let y = builder.buffer("y", Role::Carried, DType::F32, &[4], "[_]");
    let (made, read) = (builder.event(), builder.event());
    builder.compute(Fill::new(1.0, &ty), &[], &[x]);
    builder.record(made);
    builder.stream = other;
    if first_wait {
        builder.wait(made);
    }
    builder.compute(Add {}, &[x, x], &[y]);
    builder.record(read);
    builder.stream = first;
    if second_wait {
        builder.wait(read);
    }
    builder.compute(Fill::new(5.0, &ty), &[], &[x]);
    builder.plan
}

fn results(plan: &Plan) -> Vec<Vec<u32>> {
    let result = |order_seed| {
        let session = session_with_order(plan, order_seed);
        session.micro_batch(&Default::default(), 1, 0).expect("runs");
        bits(&session.read("y").expect("read").data)
    };
    (0..16).map(result).collect()
}

#[test]
fn with_its_waits_a_plan_has_one_result() {
    let expect = bits(&[2.0; 4]);
    assert!(results(&plan(true, true)).iter().all(|it| *it == expect));
}

#[test]
fn a_missing_wait_shows() {
    let expect = bits(&[2.0; 4]);
    for (first, second) in [(false, true), (true, false)] {
        let wrong = results(&plan(first, second)).iter().filter(|it| **it != expect).count();
        assert!(wrong > 0, "waits {first} {second}: all orders gave the right result");
    }
}

/// In a checked run, memory that nothing has written is NaN, and not what was there before.
#[test]
fn unwritten_memory_is_nan() {
    let mut builder = PlanBuilder::new(mesh("1"));
    let x = builder.buffer("x", Role::Temp, DType::Bf16, &[4], "[_]");
    let y = builder.buffer("y", Role::Carried, DType::F32, &[4], "[_]");
    builder.compute(Add {}, &[x, x], &[y]);
    let options = SessionOptions { check: true, ..SessionOptions::default() };
    let session = Session::new(&Proved::unproved(builder.plan), &options).expect("starts");
    session.micro_batch(&Default::default(), 1, 0).expect("runs");
    assert!(session.read("y").expect("read").data.iter().all(|it| it.is_nan()));
}

/// A later record of an event is another point: the wait is for the one issued before it.
#[test]
fn a_wait_is_for_the_latest_record() {
    let mut builder = PlanBuilder::new(mesh("1"));
    let other = builder.plan.streams.push(StreamKind::Compute.into());
    let first = builder.stream;
    let ty = TensorType::new(DType::F32, &[1]);
    let x = builder.buffer("x", Role::Temp, DType::F32, &[1], "[_]");
    let y = builder.buffer("y", Role::Carried, DType::F32, &[1], "[_]");
    let event = builder.event();
    builder.record(event);
    for value in [1.0, 2.0, 3.0] {
        builder.compute(Fill::new(value, &ty), &[], &[x]);
    }
    builder.record(event);
    builder.stream = other;
    builder.wait(event);
    builder.compute(Add {}, &[x], &[y]);
    builder.stream = first;
    let expect = bits(&[3.0]);
    assert!(results(&builder.plan).iter().all(|it| *it == expect));
}

/// Collectives of two communicators on two streams: ranks come to them in one order.
#[test]
fn streams_of_collectives_do_not_deadlock() {
    let mut builder = PlanBuilder::new(mesh("2x4"));
    let ty = TensorType::new(DType::F32, &[3]);
    let x = builder.buffer("x", Role::Temp, DType::F32, &[3], "[_] sum(dp, tp)");
    let done = builder.event();
    builder.compute(Fill::new(1.0, &ty), &[], &[x]);
    builder.record(done);
    for axis in ["dp", "tp"] {
        builder.stream = builder.plan.streams.push(StreamKind::Comm.into());
        let comm = builder.comm(&[axis]);
        builder.wait(done);
        let left = if axis == "dp" { "tp" } else { "dp" };
        for i in 0..5 {
            let sharding = format!("[_] sum({left})");
            let y =
                builder.buffer(&format!("{axis}{i}"), Role::Carried, DType::F32, &[3], &sharding);
            builder.collective(CollectiveKind::AllReduce(ReduceOp::Sum), comm, &[(x, y)]);
        }
    }
    for order_seed in 0..8 {
        let session = session_with_order(&builder.plan, order_seed);
        for step in 1..4 {
            session.start_step(0.0).expect("runs");
            session.micro_batch(&Default::default(), step, 0).expect("runs");
        }
        for name in ["dp4", "tp4"] {
            assert_eq!(session.read(name).expect("read").data, [8.0; 3]);
        }
    }
}
