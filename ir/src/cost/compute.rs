//! What an op takes on one rank.
//!
//! ```text
//! t = launch + flops * waves / (rate * sustained) + bytes / bandwidth
//! ```
//!
//! `bytes` are those of the operands and of the results, as the plan has them after fusion. What a GEMM moves is
//! added and not hidden behind its products: the first operands come before any product, the last results go after,
//! and both draw on one budget of power. `waves` is what is lost because tiles come in numbers that are no
//! multiples of the processors: `ceil(tiles / processors) * processors / tiles`. `rate` is such that a GEMM of 8192
//! alone on a cool card takes what was measured.

use cranelift_entity::EntityRef;
use smallvec::SmallVec;

use super::target::{Figure, Target};
use crate::ops::{Engine, Op, OpKind};
use crate::plan::{Buffer, Instruction, Plan, Stream};
use crate::types::{DType, TensorType};

/// The GEMM of which a target has the rates: its rows, columns and contracted size.
const MEASURED_GEMM: u64 = 8192;
/// The attention of which a target has the rate: tokens, query heads, key heads, features of a head.
const MEASURED_ATTENTION: [f64; 4] = [8192.0, 32.0, 8.0, 128.0];

/// Times of the ops of a plan.
pub(super) struct Ops<'a> {
    plan: &'a Plan,
    target: &'a Target,
    /// What each stream ran last: consecutive ops of some kinds are one launch.
    last: Vec<Option<OpKind>>,
}

impl<'a> Ops<'a> {
    pub fn new(plan: &'a Plan, target: &'a Target) -> Ops<'a> {
        Ops { plan, target, last: vec![None; plan.streams.len()] }
    }

    /// A section starts: no launch goes on from the one before.
    pub fn start_section(&mut self) {
        self.last.fill(None);
    }

    /// What is queued on a stream now is no op, so that none goes on in the launch before.
    pub fn end_launch(&mut self, stream: Stream) {
        self.last[stream.index()] = None;
    }

    /// Seconds of an op, a copy or a local collective, if calls of this and of [`Ops::end_launch`] come in the
    /// order of instructions.
    pub fn seconds(&mut self, instruction: &Instruction) -> f64 {
        match instruction {
            Instruction::Compute { op, args, results, stream } => {
                if self.is_view(op, args, results) {
                    return 0.0;
                }
                self.launch(*stream, op) + self.op(op, args, results)
            }
            Instruction::Copy { src, dst, .. } if self.same_memory(*src, *dst) => 0.0,
            Instruction::Copy { dst, .. } => self.target.launch.0 + self.copy(&[*dst]),
            Instruction::Collective { parts, .. } => {
                let written: SmallVec<[Buffer; 4]> = parts.iter().map(|it| it.dst).collect();
                self.target.launch.0 + self.copy(&written)
            }
            Instruction::Record { .. } | Instruction::Wait { .. } => 0.0,
        }
    }

    /// Share of its speed that an op loses while communication runs beside it.
    pub fn slowdown(&self) -> f64 {
        self.target.overlap.0
    }

    /// Ops that only rename the dims of what is there already.
    fn is_view(&self, op: &Op, args: &[Buffer], results: &[Buffer]) -> bool {
        op.is_view() && self.same_memory(args[0], results[0])
    }

    fn same_memory(&self, a: Buffer, b: Buffer) -> bool {
        let (x, y) = (&self.plan.buffers[a], &self.plan.buffers[b]);
        a == b || (x.role.arena() == y.role.arena() && x.offset.is_some() && x.offset == y.offset)
    }

    /// Seconds of launching, if this is not part of the launch before.
    fn launch(&mut self, stream: Stream, op: &Op) -> f64 {
        let kind = op.batches_with(op).then(|| op.kind());
        let last = std::mem::replace(&mut self.last[stream.index()], kind);
        match kind.is_some() && last == kind {
            true => 0.0,
            false => self.target.launch.0,
        }
    }

    fn op(&self, op: &Op, args: &[Buffer], results: &[Buffer]) -> f64 {
        let local = |it: &[Buffer]| -> SmallVec<[TensorType; 4]> {
            let ty = |&it| TensorType {
                dtype: self.plan.buffers[it].ty.dtype,
                shape: self.plan.local_shape(it),
            };
            it.iter().map(ty).collect()
        };
        op_seconds(op, &local(args), &local(results), self.target)
    }

    /// Seconds of writing these, from as many bytes elsewhere.
    fn copy(&self, written: &[Buffer]) -> f64 {
        2.0 * self.bytes(written) as f64 / self.target.bandwidth.0
    }

    fn bytes(&self, buffers: &[Buffer]) -> u64 {
        buffers.iter().map(|&it| self.plan.local_bytes(it)).sum()
    }
}

/// Seconds that one rank takes for an op, without its launch. Types have the shapes that the rank holds.
pub fn op_seconds(op: &Op, inputs: &[TensorType], results: &[TensorType], target: &Target) -> f64 {
    let busy = match op.engine() {
        Engine::Memory => 0.0,
        Engine::Gemm => {
            let rate = match inputs[0].dtype {
                DType::Bf16 => (&target.gemm.bf16, 2),
                _ => (&target.gemm.f32, 4),
            };
            gemm_seconds(&results[0].shape, flops(op, inputs, results), rate, target)
        }
        Engine::Fp8Gemm { scales, fast } => {
            // Where there is no such GEMM, FP8 data would be multiplied in bf16.
            let rate = target.gemm.fp8(scales, fast).map_or((&target.gemm.bf16, 2), |it| (it, 1));
            gemm_seconds(&results[0].shape, flops(op, inputs, results), rate, target)
        }
        Engine::Attention => {
            flops(op, inputs, results) as f64 / (attention_rate(target) * target.sustained.0)
        }
    };
    busy + op.bytes(inputs, results) as f64 / target.bandwidth.0
}

fn flops(op: &Op, inputs: &[TensorType], results: &[TensorType]) -> u64 {
    let inputs: SmallVec<[&[u64]; 6]> = inputs.iter().map(|it| &it.shape[..]).collect();
    let results: SmallVec<[&[u64]; 3]> = results.iter().map(|it| &it.shape[..]).collect();
    op.flops(&inputs, &results)
}

/// Returns the seconds for this many operations and bytes at the rates of large bf16 GEMMs and of copies. Unlike
/// [`op_seconds`] it does not round to tiles, so it compares layouts of one op by their share of the work.
pub fn work_seconds(flops: u64, bytes: u64, target: &Target) -> f64 {
    let rate = target.gemm.bf16.0 * target.sustained.0;
    flops as f64 / rate + bytes as f64 / target.bandwidth.0
}

/// Seconds of the products of a GEMM with this result and so many FLOPs, whose operands have so many bytes an element.
fn gemm_seconds(
    result: &[u64],
    flops: u64,
    (measured, bytes): (&Figure, u64),
    target: &Target,
) -> f64 {
    let size = MEASURED_GEMM;
    let known = 2.0 * (size as f64).powi(3);
    // Two operands, and a result in bf16 or in the type of f32 operands.
    let moved = (size * size) as f64 * (2 * bytes + bytes.max(2)) as f64;
    let busy = known / measured.0 - moved / target.bandwidth.0 - target.launch.0;
    // A profile whose GEMM is bound by memory has no rate of its own.
    let busy = busy.max(0.1 * known / measured.0);
    let rate = known * waves(&[size, size], target) / busy;
    flops as f64 * waves(result, target) / (rate * target.sustained.0)
}

/// What a GEMM takes because of its last wave of tiles, as a factor; the better of both ways to lay a tile.
fn waves(result: &[u64], target: &Target) -> f64 {
    let (rows, columns) = (target.tile.0 as f64, target.tile.1 as f64);
    let n = result.last().map_or(1.0, |&it| it as f64);
    let m = result[..result.len().saturating_sub(1)].iter().product::<u64>() as f64;
    let slots = |rows: f64, columns: f64| {
        let tiles = (m / rows).ceil() * (n / columns).ceil();
        (tiles / target.processors.0).ceil() * target.processors.0 * rows * columns
    };
    let elements = (m * n).max(1.0);
    slots(rows, columns).min(slots(columns, rows)) / elements
}

/// FLOP/s of the products of attention alone on a cool card.
fn attention_rate(target: &Target) -> f64 {
    let [tokens, heads, kv_heads, features] = MEASURED_ATTENTION;
    let flops = 4.0 * heads * features * tokens * (tokens + 1.0) / 2.0;
    let moved = tokens * (2.0 * features * (2.0 * heads + 2.0 * kv_heads) + 4.0 * heads);
    let seconds = flops / target.attention.0;
    let busy = seconds - moved / target.bandwidth.0 - target.launch.0;
    flops / busy.max(0.1 * seconds)
}
