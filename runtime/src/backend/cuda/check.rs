//! Checks what a GPU computes against the references of the ops: `planc doctor --check`.
//!
//! Every op runs on memory full of ones, which are no numbers, so that what a kernel does not write, or
//! reads without being given it, shows. So does what it writes beside its results: operands and the
//! bytes between tensors must stay as they are. Ops that may work in place run a second time so.

mod cases;

use std::fmt;
use std::time::Duration;

use half::bf16;
use ir::DType;
use ir::TensorType;
use ir::ops::{Engine, Fused, Op, Tensor, Types, bounds_of_whole, local_shape, run_reference};
use ir::quant::Format;
use kernels::cuda::{OpCall, Operand, Program, Work, lower};

use crate::backend::cuda::check::cases::{Call, Case, cases};
use crate::backend::cuda::driver::{CudaStream, Device, DeviceMemory};
use crate::backend::cuda::program::{Loader, Place};
use crate::backend::cuda::watch::passes_within;
use crate::error::RunError;
use crate::memory::widened;

/// Largest relative error of an f32 result, in the norm of the whole tensor. Sums of up to 2^20 terms
/// in a tree of f32 have an error of 20 * 2^-24 = 1.2e-6; approximate exponentials of the hardware have
/// 2 units in the last place and an argument rounded to 2^-24 of up to 30, 2e-6; some room for both.
pub const F32_TOLERANCE: f64 = 1e-5;

/// Largest relative error of a bf16 result. Rounding it has an error of 2^-9 = 2e-3 at most; kernels
/// that keep an intermediate in bf16 (probabilities of attention, a rounded sum in a norm) add a few such,
/// independent of each other: five in all are 1e-2.
pub const BF16_TOLERANCE: f64 = 1e-2;

/// Largest relative error of an f32 product of FP8 codes: tensor cores keep some 14 bits of a sum, for which
/// 1.3e-4 was measured with k = 640, and fewer if sums are fast, 4e-4. Errors of terms add up like a random
/// walk, so k = 2000 has less than twice as much.
pub const CODES_TOLERANCE: f64 = 2.5e-4;

/// The same for fast sums.
pub const FAST_TOLERANCE: f64 = 8e-4;

/// How long one program may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Tensors start at multiples of this, with a gap of as much in front of each.
const ALIGN: u64 = 256;

/// What is in memory before.
const POISON: u8 = 0xff;

/// What came out of one case.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckLine {
    /// The op, with attributes.
    pub op: String,
    /// Types of the operands, and what is special about the case.
    pub operands: String,
    /// How floats are stored: the operands' that are not f32 anyway.
    pub dtype: DType,
    /// The largest relative error of a result, or what is wrong.
    pub outcome: Result<f64, String>,
}

/// What came out of all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// How many cases were run.
    pub n_checked: usize,
    /// How many of them went wrong.
    pub n_failed: usize,
}

/// Runs all cases on `device`, which is current, and tells each one's outcome. An error ends it: the
/// device cannot be used any more.
pub fn check_ops(device: Device, report: &mut dyn FnMut(&CheckLine)) -> Result<Summary, RunError> {
    let runs = runs();
    let workspace = runs.iter().filter_map(|it| it.program.as_ref().ok()).map(|it| it.workspace);
    let mut bench = Bench {
        loader: Loader::new(device)?,
        stream: CudaStream::new()?,
        workspace: DeviceMemory::new(workspace.max().unwrap_or(0) + ALIGN)?,
    };
    // In parallel. What does not load is found again below, at its case.
    let programs = runs.iter().filter_map(|it| it.program.as_ref().ok());
    let _ = bench.loader.load(programs.flat_map(|it| &it.work));
    let mut summary = Summary::default();
    for run in &runs {
        let outcome = match &run.program {
            Ok(program) => bench.check(run, program),
            Err(why) => Ok(Err(why.clone())),
        };
        let (op, operands) = (run.case.calls[0].op.to_text(), run.to_string());
        let line = |outcome| CheckLine { op, operands, dtype: run.case.dtype, outcome };
        summary.n_checked += 1;
        match outcome {
            Ok(outcome) => {
                summary.n_failed += usize::from(outcome.is_err());
                report(&line(outcome));
            }
            Err(error) => {
                report(&line(Err(error.to_string())));
                return Err(error);
            }
        }
    }
    Ok(summary)
}

/// A case, in one of the ways in which it can run.
struct Run {
    case: Case,
    in_place: bool,
    /// Our kernels where a library would be taken.
    own: bool,
    program: Result<Program, String>,
}

fn runs() -> Vec<Run> {
    let mut res = Vec::new();
    for case in cases() {
        let program = program(&case);
        let attends = |it: &Program| it.work.iter().any(|it| matches!(it, Work::Attention(_)));
        if let Some(program) = program.as_ref().ok().filter(|it| attends(it)) {
            let program = Ok(without_libraries(program));
            res.push(Run { case: case.clone(), in_place: false, own: true, program });
        }
        if !case.calls[0].op.in_place().is_empty() {
            let (case, program) = (case.clone(), program.clone());
            res.push(Run { case, in_place: true, own: false, program });
        }
        res.push(Run { case, in_place: false, own: false, program });
    }
    res
}

/// The program with attention by our kernels.
fn without_libraries(program: &Program) -> Program {
    let own = |work: &Work| match work {
        Work::Attention(it) => it.fallback.clone(),
        other => vec![other.clone()],
    };
    Program { work: program.work.iter().flat_map(own).collect(), ..program.clone() }
}

/// The programs of all cases, for compiling their functions where there is no GPU.
pub fn programs() -> Vec<(String, Result<Program, String>)> {
    let name = |it: &Run| format!("{} of {it}", it.case.calls[0].op.to_text());
    runs().into_iter().map(|it| (name(&it), it.program)).collect()
}

/// `bf16[37, 4096], bf16[4096]; in place`.
impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls = &self.case.calls;
        let types: Vec<String> = calls[0].types().map(|it| it.to_string()).collect();
        f.write_str(&types.join(", "))?;
        if calls.len() > 1 {
            write!(f, "; batch of {}", calls.len())?;
        }
        f.write_str(if calls[0].bounds.is_some() { "; one shard" } else { "" })?;
        f.write_str(if self.in_place { "; in place" } else { "" })?;
        f.write_str(if self.own { "; own kernels" } else { "" })
    }
}

fn program(case: &Case) -> Result<Program, String> {
    let operands: Vec<[Vec<Operand>; 2]> = case
        .calls
        .iter()
        .map(|it| [it.types().map(operand).collect(), it.results().iter().map(operand).collect()])
        .collect();
    let bounds: Vec<_> = case.calls.iter().map(Call::all_bounds).collect();
    let calls: Vec<OpCall<'_>> = case
        .calls
        .iter()
        .zip(operands.iter().zip(&bounds))
        .map(|(call, ([args, results], bounds))| OpCall { op: &call.op, args, results, bounds })
        .collect();
    lower(&calls).map_err(|it| it.to_string())
}

fn operand(ty: &TensorType) -> Operand {
    Operand { dtype: ty.dtype, shape: local_shape(&ty.shape) }
}

impl Call {
    fn results(&self) -> Types {
        let types: Vec<&TensorType> = self.types().collect();
        self.op.infer(&types).expect("cases are well-typed")
    }

    fn all_bounds(&self) -> Vec<ir::ops::LocalBound> {
        let types: Vec<&TensorType> = self.types().collect();
        let whole = || bounds_of_whole(&self.op, &types, &self.results());
        self.bounds.clone().unwrap_or_else(whole)
    }
}

struct Bench {
    loader: Loader,
    stream: CudaStream,
    /// Scratch of any program, and a gap behind it.
    workspace: DeviceMemory,
}

/// A tensor in the memory of a case.
#[derive(Debug, Clone)]
struct Slot {
    offset: u64,
    ty: TensorType,
}

impl Slot {
    fn range(&self) -> std::ops::Range<usize> {
        self.offset as usize..(self.offset + self.ty.bytes()) as usize
    }
}

/// Where everything of a case is.
struct Layout {
    args: Vec<Slot>,
    results: Vec<Slot>,
    table: u64,
    bytes: u64,
}

impl Layout {
    fn new(case: &Case, program: &Program, in_place: bool) -> Layout {
        // The first bytes are a gap, too.
        let mut end = ALIGN;
        let mut take = |bytes: u64| {
            let start = end;
            end = (start + bytes).next_multiple_of(ALIGN) + ALIGN;
            start
        };
        let (mut args, mut results) = (Vec::new(), Vec::new());
        for call in &case.calls {
            let first = args.len();
            args.extend(call.types().map(|ty| Slot { offset: take(ty.bytes()), ty: ty.clone() }));
            for (result, ty) in call.results().into_iter().enumerate() {
                let pair = call.op.in_place().iter().find(|it| in_place && it.0 == result);
                let shared = pair.map(|it| &args[first + it.1]);
                let offset = match shared.filter(|it: &&Slot| it.ty.bytes() == ty.bytes()) {
                    Some(operand) => operand.offset,
                    None => take(ty.bytes()),
                };
                results.push(Slot { offset, ty });
            }
        }
        let table = take(8 * program.table_words());
        Layout { args, results, table, bytes: end }
    }
}

impl Bench {
    /// The largest error of a result, or what is wrong. An error is one of the device.
    fn check(&mut self, run: &Run, program: &Program) -> Result<Result<f64, String>, RunError> {
        let case = &run.case;
        if let Err(error) = self.loader.load(program.work.iter()) {
            return Ok(Err(error.to_string()));
        }
        let layout = Layout::new(case, program, run.in_place);
        let memory = DeviceMemory::new(layout.bytes)?;
        let place = Place {
            args: layout.args.iter().map(|it| memory.address + it.offset).collect(),
            results: layout.results.iter().map(|it| memory.address + it.offset).collect(),
            workspace: (self.workspace.address, program.workspace),
            table: memory.address + layout.table,
        };
        let before = content(case, &layout, &place.table(program));
        memory.write(0, &before)?;
        self.workspace.fill_part(0, program.workspace + ALIGN, POISON)?;
        match self.loader.prepare(program, place).and_then(|it| it.run(&self.stream)) {
            Ok(()) => wait(&self.stream)?,
            Err(error) => return Ok(Err(error.to_string())),
        }
        let mut after = vec![0; layout.bytes as usize];
        memory.read(0, &mut after)?;
        let mut gap = [0; ALIGN as usize];
        self.workspace.read(program.workspace, &mut gap)?;
        if gap != [POISON; ALIGN as usize] {
            return Ok(Err("it writes beyond its workspace".to_string()));
        }
        if let Err(why) = untouched(&layout, &before, &after) {
            return Ok(Err(why));
        }
        Ok(compare(case, &layout, &before, &after))
    }
}

/// Waits, but not for good.
fn wait(stream: &CudaStream) -> Result<(), RunError> {
    if !passes_within(LIMIT, || !stream.is_at_work()) {
        let status = format!("a kernel does not end within {} s", LIMIT.as_secs());
        return Err(RunError::Cuda { call: "cuStreamQuery", status });
    }
    stream.is_done().map(|_| ())
}

/// What memory holds before: operands and the table between poison.
fn content(case: &Case, layout: &Layout, table: &[u64]) -> Vec<u8> {
    let mut res = vec![POISON; layout.bytes as usize];
    let operands = case.calls.iter().flat_map(Call::operands);
    for (slot, tensor) in layout.args.iter().zip(operands) {
        res[slot.range()].copy_from_slice(&encode(slot.ty.dtype, &tensor.data));
    }
    let words: &[u8] = bytemuck::cast_slice(table);
    let start = layout.table as usize;
    res[start..start + words.len()].copy_from_slice(words);
    res
}

/// Everything but results must be as before.
fn untouched(layout: &Layout, before: &[u8], after: &[u8]) -> Result<(), String> {
    let mut changed: Vec<bool> = before.iter().zip(after).map(|(a, b)| a != b).collect();
    for slot in &layout.results {
        changed[slot.range()].fill(false);
    }
    let Some(byte) = changed.iter().position(|&it| it) else { return Ok(()) };
    if let Some(operand) = layout.args.iter().position(|it| it.range().contains(&byte)) {
        return Err(format!("it writes to operand {operand}"));
    }
    let behind = layout.results.iter().position(|it| {
        let end = it.range().end;
        (end..end + 2 * ALIGN as usize).contains(&byte)
    });
    match behind {
        Some(result) => Err(format!("it writes beyond result {result}")),
        None => Err(format!("it writes to byte {byte}, outside of its operands")),
    }
}

/// The largest error of a result.
fn compare(case: &Case, layout: &Layout, before: &[u8], after: &[u8]) -> Result<f64, String> {
    let (mut args, mut results) = (layout.args.iter(), layout.results.iter());
    let mut worst = 0.0;
    for call in &case.calls {
        let operands: Vec<Tensor<f64>> = args
            .by_ref()
            .take(call.types().count())
            .map(|it| decode(&it.ty, &before[it.range()]))
            .collect();
        let shapes: Vec<_> = call.results().iter().map(|it| local_shape(&it.shape)).collect();
        let slots: Vec<&Slot> = results.by_ref().take(shapes.len()).collect();
        let exact: Vec<bool> = (0..slots.len()).map(|it| is_exact(&call.op, it)).collect();
        same_bits(call, &operands, &slots, &exact, after)?;
        if exact.iter().all(|it| *it) {
            continue;
        }
        let expected = run_reference(&call.op, &operands, &shapes, &call.all_bounds());
        same_amaxes(&call.op, &slots, after)?;
        for (i, (expected, slot)) in expected.iter().zip(slots).enumerate() {
            if exact[i] {
                continue;
            }
            let found = decode(&slot.ty, &after[slot.range()]);
            let error = relative_error(&found.data, &expected.data);
            let tolerance = tolerance(call, slot.ty.dtype);
            if slot.ty.dtype.is_fp8() {
                within(i, slot.ty.dtype, &found.data, &expected.data, tolerance)?;
                continue;
            }
            if error.is_nan() || error > tolerance {
                return Err(differs(i, &found.data, &expected.data, error, tolerance));
            }
            worst = f64::max(worst, error);
        }
    }
    Ok(worst)
}

/// Amaxes that an op takes on the way are of its results as they are stored, but for those that are codes.
fn same_amaxes(op: &Op, slots: &[&Slot], after: &[u8]) -> Result<(), String> {
    for (amax, of) in amaxes_of(op, slots.len()) {
        if slots[of].ty.dtype.is_fp8() {
            continue;
        }
        let [found, all] = [amax, of].map(|it| decode(&slots[it].ty, &after[slots[it].range()]));
        let expected = all.data.iter().fold(0.0, |res, it| f64::max(res, it.abs()));
        if found.data != [expected] {
            let found = &found.data;
            return Err(format!("the amax of result {of} is {found:?}, not {expected:e}"));
        }
    }
    Ok(())
}

/// Results that are amaxes, and those that they are of.
fn amaxes_of(op: &Op, n_results: usize) -> Vec<(usize, usize)> {
    match op {
        Op::Fused(Fused { body }) => {
            let amaxes = body.numbered().filter(|it| matches!(it.1.op, Op::Amax(_)));
            amaxes
                .filter_map(|(first, step)| {
                    Some((body.result_of(first)?, body.result_of(step.inputs[0])?))
                })
                .collect()
        }
        op => op.amaxes().map_or(Vec::new(), |it| {
            let first = n_results - it.of.len();
            it.of.iter().enumerate().map(|(i, &of)| (first + i, of)).collect()
        }),
    }
}

/// Codes are between those of a number that is smaller by `tolerance` of it and of the root mean square, and of one
/// that is as much larger.
fn within(
    result: usize,
    dtype: DType,
    found: &[f64],
    expected: &[f64],
    tolerance: f64,
) -> Result<(), String> {
    let squares: f64 = expected.iter().map(|it| it * it).sum();
    let size = (squares / expected.len().max(1) as f64).sqrt();
    let codes = |sign: f64| {
        let moved = |it: &f64| it + sign * tolerance * (it.abs() + size);
        widened(dtype, &encode(dtype, &expected.iter().map(moved).collect::<Vec<f64>>()))
    };
    let (low, high) = (codes(-1.0), codes(1.0));
    let outside = |&it: &usize| !(low[it]..=high[it]).contains(&found[it]);
    match (0..found.len()).find(outside) {
        None => Ok(()),
        Some(at) => Err(format!(
            "element {at} of {} of result {result} is {:e}, not {:e} as a code",
            found.len(),
            found[at],
            expected[at]
        )),
    }
}

/// Returns true if a result is that of the reference in f32, bit for bit: a sum is one in another order.
fn is_exact(op: &Op, result: usize) -> bool {
    if let Op::Fused(Fused { body }) = op
        && let Some((step, _)) = body.maker(body.results()[result])
        && step.inputs.iter().any(|&it| body.maker(it).is_some())
    {
        return false;
    }
    op.maker(result).0.is_exact()
}

/// Results that are `exact` must be those of the reference in f32, as they are stored.
fn same_bits(
    call: &Call,
    operands: &[Tensor<f64>],
    slots: &[&Slot],
    exact: &[bool],
    after: &[u8],
) -> Result<(), String> {
    if !exact.contains(&true) {
        return Ok(());
    }
    let narrow = |it: &Tensor<f64>| Tensor {
        shape: it.shape.clone(),
        data: it.data.iter().map(|&it| it as f32).collect(),
    };
    let operands: Vec<Tensor<f32>> = operands.iter().map(narrow).collect();
    let shapes: Vec<_> = slots.iter().map(|it| local_shape(&it.ty.shape)).collect();
    let expected = run_reference(&call.op, &operands, &shapes, &call.all_bounds());
    for (i, (expected, slot)) in expected.iter().zip(slots).enumerate() {
        if !exact[i] {
            continue;
        }
        let wide: Vec<f64> = expected.data.iter().map(|&it| it.into()).collect();
        let dtype = slot.ty.dtype;
        let (expected, found) = (encode(dtype, &wide), &after[slot.range()]);
        let width = dtype.bytes() as usize;
        let number = |bytes: &[u8]| widened(dtype, bytes)[0];
        // A float that is no number has many forms; a code has the one that conversions give.
        let same = |a: &[u8], b: &[u8]| {
            a == b || dtype.is_float() && number(a).is_nan() && number(b).is_nan()
        };
        let mut pairs = expected.chunks_exact(width).zip(found.chunks_exact(width));
        let Some(at) = pairs.position(|(a, b)| !same(a, b)) else { continue };
        let [wanted, got] = [&expected, found].map(|it| widened(dtype, it)[at]);
        let n = wide.len();
        return Err(format!("element {at} of {n} of result {i} is {got:e}, not {wanted:e}"));
    }
    Ok(())
}

fn differs(result: usize, found: &[f64], expected: &[f64], error: f64, tolerance: f64) -> String {
    let scale = expected.iter().fold(0.0, |res, it| f64::max(res, it.abs()));
    let off = |it: usize| (found[it] - expected[it]).abs();
    let at = (0..found.len())
        .find(|&it| found[it].is_nan() && !expected[it].is_nan())
        .or_else(|| (0..found.len()).find(|&it| off(it) > tolerance * scale))
        .unwrap_or(0);
    format!(
        "result {result} has a relative error of {error:.1e} (allowed is {tolerance:.0e}); element {at} \
         of {} is {:e}, not {:e}",
        found.len(),
        found[at],
        expected[at]
    )
}

/// By how much a result may differ.
fn tolerance(call: &Call, dtype: DType) -> f64 {
    let rounds = call.op.rounds_inside();
    let wide = match call.op.engine() {
        Engine::Fp8Gemm { fast: true, .. } => FAST_TOLERANCE,
        Engine::Fp8Gemm { fast: false, .. } => CODES_TOLERANCE,
        Engine::Memory | Engine::Gemm | Engine::Attention => F32_TOLERANCE,
    };
    match dtype {
        DType::Bf16 => BF16_TOLERANCE,
        DType::F32 | DType::E4M3 | DType::E5M2
            if rounds && call.types().any(|it| it.dtype == DType::Bf16) =>
        {
            BF16_TOLERANCE
        }
        DType::F32 => wide,
        // Codes of what is computed on the way.
        DType::E4M3 | DType::E5M2 if call.op.makes_codes() => wide,
        // Codes of the same bytes are equal bit for bit.
        DType::I32 | DType::E4M3 | DType::E5M2 => 0.0,
    }
}

/// The norm of the difference over that of what is expected; the norm itself where zeros are expected.
fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    let square = |it: f64| it * it;
    let off: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let size: f64 = expected.iter().map(|&it| square(it)).sum();
    (if size > 0.0 { off / size } else { off }).sqrt()
}

/// Rounded to nearest even.
fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|&it| (it as f32).to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|&it| bf16::from_f64(it).to_le_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|&it| (it as i32).to_le_bytes()).collect(),
        DType::E4M3 => values.iter().map(|&it| Format::E4M3.encode(it as f32)).collect(),
        DType::E5M2 => values.iter().map(|&it| Format::E5M2.encode(it as f32)).collect(),
    }
}

fn decode(ty: &TensorType, bytes: &[u8]) -> Tensor<f64> {
    Tensor { shape: local_shape(&ty.shape), data: widened(ty.dtype, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_well_typed_and_have_finite_results() {
        for case in cases() {
            let name = case.calls[0].op.to_text();
            for call in &case.calls {
                let types: Vec<&TensorType> = call.types().collect();
                let made = call.op.infer(&types).unwrap_or_else(|it| panic!("{name}: {it}"));
                let bounds = bounds_of_whole(&call.op, &types, &made).len();
                assert_eq!(call.all_bounds().len(), bounds, "{name}");
                // Large ones take long, and are made as small ones are.
                if types.iter().all(|it| it.n_elements() < 10_000) {
                    for (ty, tensor) in types.iter().zip(call.operands()) {
                        assert_eq!(ty.n_elements() as usize, tensor.data.len(), "{name}");
                        let finite = tensor.data.iter().all(|it| it.is_finite());
                        assert!(finite || !call.is_random(), "{name}");
                    }
                }
            }
        }
    }

    #[test]
    fn errors_are_relative_to_the_whole_tensor() {
        assert_eq!(relative_error(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
        assert_eq!(relative_error(&[0.5, 0.0], &[0.0, 0.0]), 0.5);
        assert!(relative_error(&[f64::NAN, 4.0], &[3.0, 4.0]).is_nan());
    }

    #[test]
    fn what_is_stored_is_read_again() {
        let values = [1.0, -2.5, 3e8, 0.0];
        for dtype in [DType::F32, DType::Bf16] {
            let ty = TensorType::new(dtype, &[4]);
            let read = decode(&ty, &encode(dtype, &values)).data;
            assert!(relative_error(&read, &values) < BF16_TOLERANCE / 5.0);
            assert_eq!(read[..2], values[..2]);
        }
        let ty = TensorType::new(DType::I32, &[3]);
        assert_eq!(decode(&ty, &encode(DType::I32, &[7.0, -1.0, 16777217.0])).data[2], 16777217.0);
    }

    /// A kernel that writes beyond its result, or to its operand, is told.
    #[test]
    fn stray_writes_are_seen() {
        let case = cases().swap_remove(0);
        let layout = Layout::new(&case, &Program::default(), false);
        let before = content(&case, &layout, &[]);
        let stray = |byte: usize| {
            let mut after = before.clone();
            after[byte] ^= 1;
            untouched(&layout, &before, &after)
        };
        let (arg, result) = (layout.args[0].range(), layout.results[0].range());
        assert_eq!(stray(result.start), Ok(()));
        assert_eq!(stray(arg.end - 1), Err("it writes to operand 0".to_string()));
        assert_eq!(stray(result.end), Err("it writes beyond result 0".to_string()));
        assert!(stray(0).is_err());
        assert!(stray(before.len() - 1).is_err());
    }
}
