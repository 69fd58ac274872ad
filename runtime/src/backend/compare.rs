//! Two backends side by side: every instruction runs on both and the results are compared.
//!
//! After each instruction the reference takes over what the tested backend made, so that one wrong
//! kernel is named once and does not spoil what follows. Slow: a debugging aid (`--compare cpu`).

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use ir::DType;
use ir::ops::Engine;
use ir::plan::{Buffer, Comm, Event, PlanSection, Stream};

use crate::backend::cuda::check::{CODES_TOLERANCE, FAST_TOLERANCE};
use crate::bind::{At, BoundPlan, CollectiveCall, ComputeCall, CopyCall};
use crate::error::RunError;
use crate::exec::{Backend, MemoryUse, Span};
use crate::memory::widened;

/// The largest relative error of an f32 result: sums of up to 2^17 terms of either sign in another
/// order differ by about 2^-24 * sqrt(2^17), and cancellation costs a decimal more.
pub const F32_TOLERANCE: f64 = 1e-4;
/// The same for bf16, which rounds each result to 2^-9: two results that round a close value to
/// different sides differ by twice that, and rounded operands of exponentials by some more.
pub const BF16_TOLERANCE: f64 = 1e-2;

/// By how much more real sums are off than those of random terms: gradients cancel.
const CANCELLATION: f64 = 10.0;

/// By how much codes may differ of numbers that differ by `off`, all relative: a difference moves a code to the next,
/// a `step` away, with the probability `off / step`, so that the mean square is `step * off`.
fn of_codes(step: f64, off: f64) -> f64 {
    (step * off).sqrt()
}

/// One result of one instruction on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// The instruction; none for the initial value of a parameter, which must be equal bit for bit.
    pub at: Option<At>,
    /// The rank.
    pub rank: u64,
    /// What was made.
    pub buffer: Buffer,
    /// `|tested - reference| / |reference|` over the rank's part; NaN where one of them has NaN.
    pub error: f64,
    /// The largest error that is no difference.
    pub tolerance: f64,
}

impl Comparison {
    /// Whether the two differ.
    pub fn differs(&self) -> bool {
        self.error.is_nan() || self.error > self.tolerance
    }
}

/// See the [module docs](self).
pub struct CompareBackend {
    plan: Arc<BoundPlan>,
    params: Vec<Buffer>,
    tested: Box<dyn Backend>,
    reference: Box<dyn Backend>,
    report: Sender<Comparison>,
    at: Option<At>,
}

impl CompareBackend {
    /// Runs on both and sends each comparison through `report`; `params` are compared as they are when
    /// `prepare` begins.
    pub fn new(
        plan: Arc<BoundPlan>,
        params: Vec<Buffer>,
        [tested, reference]: [Box<dyn Backend>; 2],
        report: Sender<Comparison>,
    ) -> CompareBackend {
        CompareBackend { plan, params, tested, reference, report, at: None }
    }

    /// Waits for one instruction on both, compares what it made, and levels the two.
    /// `wide` is what an f32 result may be off, `codes` what the numbers may be of which it makes codes, if not the bytes
    /// that both have read.
    fn compare(
        &mut self,
        at: At,
        wide: f64,
        codes: Option<f64>,
        results: impl Iterator<Item = Buffer>,
    ) -> Result<(), RunError> {
        self.tested.finish()?;
        self.reference.finish()?;
        for buffer in results {
            let tolerance = match self.plan.buffers[buffer].dtype {
                DType::F32 => wide,
                DType::Bf16 => BF16_TOLERANCE,
                DType::I32 => 0.0,
                DType::E4M3 => codes.map_or(0.0, |it| of_codes(0.125, it)),
                DType::E5M2 => codes.map_or(0.0, |it| of_codes(0.25, it)),
            };
            self.compare_buffer(Some(at), buffer, tolerance)?;
        }
        Ok(())
    }

    fn compare_buffer(
        &mut self,
        at: Option<At>,
        buffer: Buffer,
        tolerance: f64,
    ) -> Result<(), RunError> {
        let bound = &self.plan.buffers[buffer];
        let (mut tested, mut reference) = (vec![0; bound.bytes()], vec![0; bound.bytes()]);
        self.tested.read(buffer, &mut tested)?;
        self.reference.read(buffer, &mut reference)?;
        self.reference.write_at(buffer, 0, &tested)?;
        let comparison = Comparison {
            at,
            rank: self.plan.rank,
            buffer,
            error: relative_error(bound.dtype, &tested, &reference),
            tolerance,
        };
        // Nobody listens any more when the run is ending.
        let _ = self.report.send(comparison);
        Ok(())
    }
}

/// `|a - b| / |b|` in f64; 0 for two that are equal, also if they are zero.
fn relative_error(dtype: DType, a: &[u8], b: &[u8]) -> f64 {
    if a == b {
        return 0.0;
    }
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in widened(dtype, a).into_iter().zip(widened(dtype, b)) {
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    // Zeros of different signs are equal.
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

impl Backend for CompareBackend {
    fn begin(&mut self, section: PlanSection) -> Result<(), RunError> {
        if section == PlanSection::Prepare {
            for param in self.params.clone() {
                self.compare_buffer(None, param, 0.0)?;
            }
        }
        self.tested.begin(section)?;
        self.reference.begin(section)
    }

    fn compute(&mut self, call: &Arc<ComputeCall>, stream: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        self.tested.compute(call, stream)?;
        self.reference.compute(call, stream)?;
        let makes_codes = call.op.makes_codes();
        // Tensor cores sum products of codes in fewer bits.
        let wide = match call.op.engine() {
            Engine::Fp8Gemm { fast: true, .. } => CANCELLATION * FAST_TOLERANCE,
            Engine::Fp8Gemm { fast: false, .. } => CANCELLATION * CODES_TOLERANCE,
            // An amax, of what may be the norm of a sum that a kernel rounds first.
            _ if makes_codes => BF16_TOLERANCE,
            _ => F32_TOLERANCE,
        };
        let codes = makes_codes.then_some(BF16_TOLERANCE);
        self.compare(call.at, wide, codes, call.results.iter().copied())
    }

    fn collective(&mut self, call: &Arc<CollectiveCall>, stream: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        self.tested.collective(call, stream)?;
        self.reference.collective(call, stream)?;
        self.compare(call.at, F32_TOLERANCE, None, call.parts.iter().map(|it| it.dst))
    }

    fn copy(&mut self, call: CopyCall, stream: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        self.tested.copy(call, stream)?;
        self.reference.copy(call, stream)?;
        self.compare(call.at, F32_TOLERANCE, None, std::iter::once(call.dst))
    }

    fn record(&mut self, event: Event, stream: Stream) -> Result<(), RunError> {
        self.tested.record(event, stream)?;
        self.reference.record(event, stream)
    }

    fn wait(&mut self, event: Event, stream: Stream) -> Result<(), RunError> {
        self.tested.wait(event, stream)?;
        self.reference.wait(event, stream)
    }

    fn finish(&mut self) -> Result<(), RunError> {
        self.tested.finish()?;
        self.reference.finish()?;
        self.at = None;
        Ok(())
    }

    fn write_at(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        self.tested.write_at(buffer, offset, bytes)?;
        self.reference.write_at(buffer, offset, bytes)
    }

    fn read_at(&self, buffer: Buffer, offset: usize, bytes: &mut [u8]) -> Result<(), RunError> {
        self.tested.read_at(buffer, offset, bytes)
    }

    fn keep(&mut self, parts: &[Range<usize>]) -> Result<(), RunError> {
        self.tested.keep(parts)?;
        self.reference.keep(parts)
    }

    fn restore(&mut self) -> Result<(), RunError> {
        self.tested.restore()?;
        self.reference.restore()
    }

    fn broadcast(&mut self, buffer: Buffer, comm: Comm, root: usize) -> Result<(), RunError> {
        self.tested.broadcast(buffer, comm, root)?;
        self.reference.broadcast(buffer, comm, root)
    }

    fn at(&self) -> Option<At> {
        self.at
    }

    fn close(&mut self) -> bool {
        // Both, whatever the first says.
        let closed = [self.tested.close(), self.reference.close()];
        closed.into_iter().all(|it| it)
    }

    fn warnings(&mut self) -> Vec<String> {
        self.tested.warnings()
    }

    fn keep_times(&mut self, keep: bool) -> Result<(), RunError> {
        self.tested.keep_times(keep)
    }

    fn times(&mut self) -> Result<Vec<Span>, RunError> {
        self.tested.times()
    }

    fn memory(&self) -> Result<MemoryUse, RunError> {
        self.tested.memory()
    }
}
