//! What cannot be run is refused with a reason, and what fails ends all ranks with the first cause.

use ir::ops::{Cast, CollectiveKind, Fill, Matmul};
use ir::placement::{AxisSet, ReduceOp};
use ir::plan::{Instruction, Plan, PlanSection, Role};
use ir::{DType, TensorType};
use kernels::Proved;
use runtime::{Batch, RunError, Session, SessionOptions};

use crate::build::{PlanBuilder, mesh, session};

fn refused(plan: &Plan) -> RunError {
    match Session::new(&Proved::unproved(plan.clone()), &SessionOptions::default()) {
        Ok(_) => panic!("the plan was accepted"),
        Err(error) => error,
    }
}

#[track_caller]
fn check(plan: &Plan, code: &str, message: &str) {
    let error = refused(plan);
    assert_eq!((error.code(), error.to_string().as_str()), (code, message));
}

#[test]
fn a_million_ranks_are_refused() {
    let plan = PlanBuilder::new(mesh("1000x1000")).plan;
    check(
        &plan,
        "PL0502",
        "mesh (dp=1000, tp=1000) has 1000000 ranks, and this machine runs at most 1024 as threads; \
         compile for a smaller mesh to run it here",
    );
}

/// More ranks than 64 bits count.
#[test]
fn a_mesh_beyond_counting_is_refused() {
    let mut mesh = mesh("2x2x2");
    mesh.axes.iter_mut().for_each(|it| it.size = u32::MAX);
    assert_eq!(refused(&PlanBuilder::new(mesh).plan).code(), "PL0502");
}

#[test]
fn more_memory_than_there_is_is_refused() {
    let mut plan = PlanBuilder::new(mesh("4")).plan;
    plan.persistent_bytes = 1 << 50;
    let error = refused(&plan);
    assert_eq!(error.code(), "PL0503");
    let message = error.to_string();
    assert!(message.starts_with("4 ranks of 1.0 PiB each need 4.0 PiB"), "{message}");
}

#[track_caller]
fn check_broken(why: &str, edit: impl FnOnce(&mut PlanBuilder)) {
    let mut builder = PlanBuilder::new(mesh("2x2"));
    let ty = TensorType::new(DType::F32, &[4]);
    let x = builder.buffer("x", Role::Temp, DType::F32, &[4], "[dp]");
    let y = builder.buffer("y", Role::Temp, DType::F32, &[4], "[_]");
    let comm = builder.comm(&["dp"]);
    builder.compute(Fill::new(1.0, &ty), &[], &[x]);
    builder.collective(CollectiveKind::AllGather, comm, &[(x, y)]);
    edit(&mut builder);
    let error = refused(&builder.plan);
    assert_eq!(error.code(), "PL0504", "{error}");
    assert_eq!(error.to_string(), format!("the plan is broken: {why}; compile it again"));
}

#[test]
fn a_plan_that_contradicts_itself_is_refused() {
    let gather = "`step[1] `all_gather(tp)` making `y``";
    check_broken(&format!("{gather} gathers `x` to `y` from ranks that hold the same"), |it| {
        *it.plan.comms.values_mut().next().expect("a comm") = AxisSet(2);
    });
    let gather = "`step[1] `all_gather()` making `y``";
    check_broken(&format!("{gather} does not find all of `x` to `y` in its group"), |it| {
        *it.plan.comms.values_mut().next().expect("a comm") = AxisSet::EMPTY;
    });
    let reduce = "`step[1] `all_reduce(dp)` making `y``";
    check_broken(&format!("{reduce} reduces `x` to `y`, which is not partial so"), |it| {
        let section = &mut it.plan.sections[PlanSection::Step as usize];
        if let Some(Instruction::Collective { kind, .. }) = section.last_mut() {
            *kind = CollectiveKind::AllReduce(ReduceOp::Sum);
        }
    });
}

/// Rank 3 reads an integer that f32 has not; the others are in, or come to, an all-reduce.
#[test]
fn an_error_on_one_rank_ends_all() {
    let mut builder = PlanBuilder::new(mesh("2x4"));
    let ids = builder.buffer("tokens", Role::Input, DType::I32, &[8], "[dp.tp]");
    let x = builder.buffer("x", Role::Temp, DType::F32, &[8], "[dp.tp]");
    let y = builder.buffer("y", Role::Temp, DType::F32, &[8], "[_]");
    builder.plan.run.vocab = 1 << 30;
    builder.compute(Cast { to: DType::F32 }, &[ids], &[x]);
    let comm = builder.comm(&["dp", "tp"]);
    builder.collective(CollectiveKind::AllGather, comm, &[(x, y)]);
    let session = session(&builder.plan);
    let mut tokens = vec![1; 8];
    let good = Batch { tokens: tokens.clone(), labels: vec![] };
    session.micro_batch(&good, 1, 0).expect("runs");
    tokens[3] = (1 << 24) + 1;
    let bad = Batch { tokens, labels: vec![] };
    let message = "rank 3 (dp=0, tp=3), step[0] `cast(to:f32)` making `x`: `tokens` holds 16777217, \
                   beyond the integers up to 2^24 that f32 carries exactly";
    let error = session.micro_batch(&bad, 2, 0).expect_err("rank 3 fails");
    assert_eq!(error.to_string().replace(['(', ')'], ""), message.replace(['(', ')'], ""));
    assert_eq!(error.code(), "PL0508");
    // The session is over, and says why.
    assert_eq!(session.micro_batch(&good, 3, 0), Err(error.clone()));
    assert_eq!(session.read("tokens").map(|_| ()), Err(error));
}

/// An op that panics: operands that do not fit, which the compiler would have refused.
#[test]
fn a_panic_names_its_instruction() {
    let mut builder = PlanBuilder::new(mesh("2"));
    let a = builder.buffer("a", Role::State, DType::F32, &[2, 3], "[_, _]");
    let b = builder.buffer("b", Role::State, DType::F32, &[2, 2], "[_, _]");
    let c = builder.buffer("c", Role::Temp, DType::F32, &[2, 2], "[_, _]");
    builder.compute(Matmul::default(), &[a, b], &[c]);
    let session = session(&builder.plan);
    let error = session.micro_batch(&Default::default(), 1, 0).expect_err("it panics");
    assert_eq!((error.code(), error.is_bug()), ("PL0505", true));
    let message = error.to_string();
    assert!(message.contains("step[0] `matmul") && message.contains("making `c`"), "{message}");
    assert!(message.contains("panicked: second operand of Gemm"), "{message}");
}

/// A rank that holds less than its buffer must keep the rest zero.
#[test]
fn padding_that_is_not_zero_is_caught() {
    let mut builder = PlanBuilder::new(mesh("2"));
    let ty = TensorType::new(DType::F32, &[2]);
    let x = builder.buffer("x", Role::Temp, DType::F32, &[3], "[dp]");
    builder.compute(Fill::new(1.0, &ty), &[], &[x]);
    let session = session(&builder.plan);
    let error = session.micro_batch(&Default::default(), 1, 0).expect_err("it is caught");
    let at = "step[0] `fill(value:1.0,dtype:f32,shape:[2])` making `x`";
    assert_eq!(
        error.to_string(),
        format!("rank 1 (dp=1), {at}: element 1 of `x` is padding, and was given 1 instead of 0")
    );
}

#[test]
fn names_and_sizes_are_checked() {
    let mut builder = PlanBuilder::new(mesh("2"));
    builder.buffer("w", Role::State, DType::F32, &[3], "[dp]");
    builder.buffer("t", Role::Temp, DType::F32, &[3], "[dp]");
    builder.buffer("tokens", Role::Input, DType::I32, &[2, 4], "[dp, _]");
    builder.plan.run.vocab = 10;
    let session = session(&builder.plan);
    let code = |it: Result<(), RunError>| it.expect_err("refused").code();
    assert_eq!(code(session.read("x").map(|_| ())), "PL0513");
    assert_eq!(code(session.read("t").map(|_| ())), "PL0514");
    assert_eq!(code(session.write("w", &[1.0])), "PL0515");
    let batch = Batch { tokens: vec![1; 7], labels: vec![] };
    assert_eq!(code(session.micro_batch(&batch, 1, 0)), "PL0515");
    let batch = Batch { tokens: vec![10; 8], labels: vec![] };
    assert_eq!(code(session.micro_batch(&batch, 1, 0)), "PL0526");
    // The user's mistakes end nothing.
    session.write("w", &[1.0, 2.0, 3.0]).expect("written");
    assert_eq!(session.read("w").expect("read").data, [1.0, 2.0, 3.0]);
}
