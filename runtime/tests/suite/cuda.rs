//! What of the CUDA backend needs no GPU.

use std::ops::Range;
use std::sync::Arc;

use ir::ops::{AdamW, Add, SumSquares};
use ir::plan::{Buffer, Comm, Event, PlanSection, Role, Stream, StreamKind};
use ir::{DType, Op};
use runtime::RunError;
use runtime::backend::cuda::driver::{Device, initialize, n_devices};
use runtime::backend::cuda::program::batches;
use runtime::bind::{At, BoundPlan, CollectiveCall, ComputeCall, CopyCall, bind};
use runtime::exec::{self, Backend, MemoryUse, Span};

use crate::build::{PlanBuilder, mesh};

#[test]
fn without_a_driver_or_a_gpu_the_error_says_so() {
    match initialize() {
        Err(error) => {
            assert_eq!(error, RunError::NoDriver);
            assert_eq!(error.code(), "PL0540");
            assert_eq!(Device::open(0).map(|_| ()), Err(RunError::NoDriver));
            let message = error.to_string();
            assert!(
                message.contains("libcuda.so.1") && message.contains("--device cpu"),
                "{message}"
            );
        }
        Ok(()) => {
            let devices = n_devices().expect("there is a driver");
            let error = RunError::NoDevice { ordinal: devices, devices };
            assert_eq!(Device::open(devices).map(|_| ()), Err(error));
        }
    }
}

/// Indices of the instructions of each batch, and the name of its first result.
fn batched(builder: &PlanBuilder) -> Vec<(usize, Vec<usize>)> {
    let bound = bind(&builder.plan, 0).expect("a plan that can be bound");
    let section = &bound.sections[PlanSection::Step as usize];
    let indices = |it: &[Arc<ComputeCall>]| it.iter().map(|it| it.at.index).collect();
    batches(&bound, section).iter().map(|it| (it.0, indices(&it.1.calls))).collect()
}

struct Optimizer {
    builder: PlanBuilder,
    scalars: Vec<Buffer>,
}

impl Optimizer {
    fn new() -> Optimizer {
        let mut builder = PlanBuilder::new(mesh("1"));
        let mut scalar = |name: &str| builder.buffer(name, Role::Input, DType::F32, &[], "[]");
        let scalars = ["scale", "lr", "applied"].map(&mut scalar).to_vec();
        Optimizer { builder, scalars }
    }

    fn state(&mut self, name: &str) -> Buffer {
        self.builder.buffer(name, Role::State, DType::F32, &[6], "[_]")
    }

    /// An AdamW of a new parameter with this gradient; its parameter.
    fn adamw(&mut self, g: Buffer, weight_decay: f64) -> Buffer {
        let [p, m, v] = ["p", "m", "v"].map(|it| self.state(it));
        let t = self.builder.buffer("t", Role::State, DType::F32, &[], "[]");
        let op = AdamW {
            beta1: 0.9.into(),
            beta2: 0.95.into(),
            eps: 1e-8.into(),
            weight_decay: weight_decay.into(),
            compute: None,
            amax: Default::default(),
        };
        let args = [&[p, m, v, t, g][..], &self.scalars].concat();
        self.builder.compute(Op::from(op), &args, &[p, m, v, t]);
        p
    }
}

#[test]
fn an_optimizer_runs_over_many_tensors_at_once() {
    let mut it = Optimizer::new();
    let g = it.state("g");
    for decay in [0.1, 0.0, 0.1] {
        it.adamw(g, decay);
    }
    assert_eq!(batched(&it.builder), [(0, vec![0, 1, 2])]);
}

#[test]
fn tensors_with_other_scalars_are_another_batch() {
    let mut it = Optimizer::new();
    let g = it.state("g");
    it.adamw(g, 0.1);
    it.scalars[1] = it.builder.buffer("other lr", Role::Input, DType::F32, &[], "[]");
    it.adamw(g, 0.1);
    it.adamw(g, 0.1);
    assert_eq!(batched(&it.builder), [(0, vec![0]), (1, vec![1, 2])]);
}

/// The second one's gradient is what the first one wrote: it must run later.
#[test]
fn what_reads_a_result_is_another_batch() {
    let mut it = Optimizer::new();
    let g = it.state("g");
    let p = it.adamw(g, 0.1);
    it.adamw(p, 0.1);
    it.adamw(g, 0.1);
    assert_eq!(batched(&it.builder), [(0, vec![0]), (1, vec![1, 2])]);
}

/// Buffers of other names may share memory, once the one is not read any more.
#[test]
fn what_shares_memory_with_a_result_is_another_batch() {
    let mut it = Optimizer::new();
    let g = it.state("g");
    let p = it.adamw(g, 0.1);
    let other = it.state("other");
    it.builder.plan.buffers[other].offset = it.builder.plan.buffers[p].offset;
    it.adamw(other, 0.1);
    assert_eq!(batched(&it.builder), [(0, vec![0]), (1, vec![1])]);
}

#[test]
fn only_what_lies_on_the_same_stream_ends_a_batch() {
    let mut it = Optimizer::new();
    let (g, sum) = (it.state("g"), it.builder.buffer("sum", Role::State, DType::F32, &[], "[]"));
    let h = it.state("h");
    let (compute, event) = (it.builder.stream, it.builder.event());
    let other = it.builder.plan.streams.push(StreamKind::Comm.into());
    it.adamw(g, 0.1);
    it.builder.stream = other;
    it.builder.compute(SumSquares {}, &[h], &[sum]);
    it.builder.stream = compute;
    it.adamw(g, 0.1);
    it.builder.record(event);
    it.adamw(g, 0.1);
    assert_eq!(batched(&it.builder), [(0, vec![0, 2]), (1, vec![1]), (4, vec![4])]);
}

/// A backend that notes what it is asked for.
#[derive(Default)]
struct Noting {
    calls: Vec<&'static str>,
    can_replay: bool,
}

impl Noting {
    fn note(&mut self, call: &'static str) -> Result<(), RunError> {
        self.calls.push(call);
        Ok(())
    }
}

impl Backend for Noting {
    fn replay(&mut self, _: PlanSection) -> Result<bool, RunError> {
        self.note("replay").map(|()| self.can_replay)
    }
    fn begin(&mut self, _: PlanSection) -> Result<(), RunError> {
        self.note("begin")
    }
    fn compute(&mut self, _: &Arc<ComputeCall>, _: Stream) -> Result<(), RunError> {
        self.note("compute")
    }
    fn collective(&mut self, _: &Arc<CollectiveCall>, _: Stream) -> Result<(), RunError> {
        self.note("collective")
    }
    fn copy(&mut self, _: CopyCall, _: Stream) -> Result<(), RunError> {
        self.note("copy")
    }
    fn record(&mut self, _: Event, _: Stream) -> Result<(), RunError> {
        self.note("record")
    }
    fn wait(&mut self, _: Event, _: Stream) -> Result<(), RunError> {
        self.note("wait")
    }
    fn finish(&mut self) -> Result<(), RunError> {
        self.note("finish")
    }
    fn write_at(&mut self, _: Buffer, _: usize, _: &[u8]) -> Result<(), RunError> {
        self.note("write_at")
    }
    fn keep(&mut self, _: &[Range<usize>]) -> Result<(), RunError> {
        Ok(())
    }
    fn restore(&mut self) -> Result<(), RunError> {
        Ok(())
    }
    fn read_at(&self, _: Buffer, _: usize, _: &mut [u8]) -> Result<(), RunError> {
        Ok(())
    }
    fn broadcast(&mut self, _: Buffer, _: Comm, _: usize) -> Result<(), RunError> {
        self.note("broadcast")
    }
    fn at(&self) -> Option<At> {
        None
    }
    fn keep_times(&mut self, _: bool) -> Result<(), RunError> {
        Ok(())
    }
    fn times(&mut self) -> Result<Vec<Span>, RunError> {
        Ok(Vec::new())
    }
    fn memory(&self) -> Result<MemoryUse, RunError> {
        Ok(MemoryUse::default())
    }
}

fn addition() -> BoundPlan {
    let mut builder = PlanBuilder::new(mesh("1"));
    let a = builder.buffer("a", Role::State, DType::F32, &[2], "[_]");
    let b = builder.buffer("b", Role::State, DType::F32, &[2], "[_]");
    builder.compute(Add {}, &[a, a], &[b]);
    builder.copy(b, a);
    bind(&builder.plan, 0).expect("a plan that can be bound")
}

#[test]
fn a_section_that_is_replayed_is_not_queued_again() {
    let plan = addition();
    let mut backend = Noting::default();
    exec::run(&plan, PlanSection::Step, &mut backend).expect("nothing fails");
    assert_eq!(backend.calls, ["replay", "begin", "compute", "copy", "finish"]);
    let mut backend = Noting { can_replay: true, ..Noting::default() };
    exec::run(&plan, PlanSection::Step, &mut backend).expect("nothing fails");
    assert_eq!(backend.calls, ["replay", "finish"]);
}
