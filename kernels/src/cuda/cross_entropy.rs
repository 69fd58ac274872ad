//! Launches for the cross entropy, and for its parts: `ce_max`, `ce_stats`, `ce_loss` and gradients.
//!
//! ```text
//! workspace   of the whole cross entropy: `m`, `sumexp`, `target`, an f32 a token each
//! ```

use ir::ops::CrossEntropy;
use ir::{DType, Op};

use crate::cuda::launch::{
    BLOCK, arg, double, elements, grid, launch, need, program, result, rows, size, typed,
};
use crate::cuda::{Arg, Function, Launch, OpCall, Operand, Pointer, Program, Unsupported, Work};

/// Threads of the one block of `ce_loss`; `THREADS` of `ce_loss.cu`.
const LOSS_BLOCK: u32 = 1024;
/// Bytes of a row from which on a block has the most threads.
const LONG_ROW: u64 = 16 << 10;
/// Bytes of a row from which on one block is enough for a multiprocessor, in the whole cross entropy.
const LONGEST_ROW: u64 = 128 << 10;
/// Bytes of a row that wait in shared memory for its gradient. All architectures have that much. The
/// rest of a row of 256 KiB, on all multiprocessors, is 21 MiB, less than the second-level cache has.
const KEPT: u64 = 96 << 10;
/// Bytes of a vector.
const VECTOR: u64 = 16;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let work = match call.op {
        Op::CrossEntropy(it) => return whole(call, it),
        Op::CeMax(_) => by_row(call, "ce_max", [])?,
        Op::CeStats(it) => {
            check(call, 1, &[2])?;
            let eps = it.label_smoothing.0;
            let weights = [double(1.0 - eps), double(spread(call, eps))];
            by_row(call, "ce_stats", [size(call.bounds[0].start), weights[0], weights[1]])?
        }
        Op::CeStatsGrad(it) => {
            check(call, 1, &[2, 3, 4])?;
            let eps = it.label_smoothing.0;
            let weights = [1.0 - eps, spread(call, eps)].map(|it| Arg::F32(it as f32));
            by_row(call, "ce_stats_grad", [size(call.bounds[0].start), weights[0], weights[1]])?
        }
        Op::CeLoss(it) => {
            check(call, 3, &[0, 1, 2])?;
            let args = [size(elements(&call.args[3])), Arg::I64(it.ignore_index)];
            launch(loss("ce_loss"), [1, 1, 1], LOSS_BLOCK, operands(call, args))
        }
        Op::CeLossGrad(it) => {
            check(call, 1, &[0, 2])?;
            let n = elements(&call.args[1]);
            let args = operands(call, [size(n), Arg::I64(it.ignore_index)]);
            let grid = grid(call, n.div_ceil(u64::from(BLOCK)))?;
            launch(loss("ce_loss_grad"), grid, BLOCK, args)
        }
        _ => return Err(Unsupported::new(call, "it has none")),
    };
    Ok(program([work]))
}

/// Labels at one operand, one f32 a token at others.
fn check(call: &OpCall<'_>, labels: usize, f32s: &[usize]) -> Result<(), Unsupported> {
    need(call, labels, DType::I32)?;
    f32s.iter().try_for_each(|&index| need(call, index, DType::F32))
}

/// Loss and gradient.
fn whole(call: &OpCall<'_>, op: &CrossEntropy) -> Result<Program, Unsupported> {
    need(call, 1, DType::I32)?;
    let logits = &call.args[0];
    let (n_rows, n) = (n_rows(logits), rows(logits).1);
    let row = n * logits.dtype.bytes();
    let part = (n_rows * DType::F32.bytes()).next_multiple_of(256);
    let stats = [0, part, 2 * part].map(|it| Arg::Pointer(Pointer::Workspace(it)));
    let ignore = Arg::I64(op.ignore_index);

    let mut work = Vec::new();
    if n_rows > 0 {
        let kept = row.min(KEPT) / VECTOR;
        let eps = op.label_smoothing.0;
        let spread = if eps == 0.0 { 0.0 } else { eps / n as f64 };
        let mut args = vec![arg(0), arg(1), result(2)];
        args.extend(stats);
        args.extend([Arg::I32(columns(call, n)?), Arg::I32(kept as i32), ignore]);
        args.extend([double(1.0 - eps), double(spread)]);
        let block = if row >= LONGEST_ROW { 1024 } else { threads(row) };
        let (function, grid) = (by_token(logits, "cross_entropy"), grid(call, n_rows)?);
        let shared = (kept * VECTOR) as u32;
        work.push(Work::Launch(Launch { function, grid, block, shared, args }));
    }
    let mut args = stats.to_vec();
    args.extend([arg(1), result(0), result(1), size(n_rows), ignore]);
    work.push(launch(loss("ce_loss"), [1, 1, 1], LOSS_BLOCK, args));
    // Never empty, so that pointers to it are some.
    Ok(Program { workspace: (3 * part).max(256), ..program(work) })
}

/// What of the label is spread over each of all columns, held here or not.
fn spread(call: &OpCall<'_>, eps: f64) -> f64 {
    if eps == 0.0 { 0.0 } else { eps / call.bounds[0].size as f64 }
}

/// A block for each row of logits, the first operand. `ce_max` does not ask where a shard starts.
fn by_row(
    call: &OpCall<'_>,
    entry: &'static str,
    rest: impl IntoIterator<Item = Arg>,
) -> Result<Work, Unsupported> {
    let logits = &call.args[0];
    let (_, n) = rows(logits);
    let extents = [columns(call, n)?, columns(call, call.bounds[0].extent)?];
    let block = threads(n * logits.dtype.bytes());
    let args = operands(call, extents.map(Arg::I32).into_iter().chain(rest));
    Ok(launch(by_token(logits, entry), grid(call, n_rows(logits))?, block, args))
}

/// A number of columns, with room for the last step of a block.
fn columns(call: &OpCall<'_>, n: u64) -> Result<i32, Unsupported> {
    match i32::try_from(n).ok().filter(|&it| it <= i32::MAX - (1 << 16)) {
        Some(n) => Ok(n),
        None => Err(Unsupported::new(call, format!("{n} columns are too many for its kernel"))),
    }
}

/// Threads of a block for a row of so many bytes.
fn threads(row: u64) -> u32 {
    if row >= LONG_ROW { 512 } else { 128 }
}

/// Tokens; also where there are no columns.
fn n_rows(logits: &Operand) -> u64 {
    logits.shape[..logits.shape.len() - 1].iter().map(|&it| it as u64).product()
}

fn by_token(logits: &Operand, entry: &'static str) -> Function {
    Function { source: "cross_entropy.cu", defines: vec![typed("X", logits.dtype)], entry }
}

fn loss(entry: &'static str) -> Function {
    Function { source: "ce_loss.cu", defines: Vec::new(), entry }
}

/// All operands, all results, then the rest.
fn operands(call: &OpCall<'_>, rest: impl IntoIterator<Item = Arg>) -> Vec<Arg> {
    let pointers = (0..call.args.len()).map(arg).chain((0..call.results.len()).map(result));
    pointers.chain(rest).collect()
}
