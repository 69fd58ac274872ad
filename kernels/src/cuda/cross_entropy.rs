//! Launches for the parts of the cross entropy: `ce_max`, `ce_stats`, `ce_loss` and gradients.

use ir::{DType, Op};

use crate::cuda::launch::{
    BLOCK, arg, double, elements, grid, launch, need, program, result, rows, size, typed,
};
use crate::cuda::{Arg, Function, OpCall, Program, Unsupported, Work};

/// Threads of the one block of `ce_loss`; `THREADS` of `ce_loss.cu`.
const LOSS_BLOCK: u32 = 1024;
/// Bytes of a row from which on a block has the most threads.
const LONG_ROW: u64 = 16 << 10;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let work = match call.op {
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
    let n_rows = logits.shape[..logits.shape.len() - 1].iter().map(|&it| it as u64).product();
    let int = |it: u64| i32::try_from(it).ok().filter(|&it| it <= i32::MAX - (1 << 16));
    let (Some(columns), Some(extent)) = (int(n), int(call.bounds[0].extent)) else {
        return Err(Unsupported::new(call, format!("{n} columns are too many for its kernel")));
    };
    let block = if n * logits.dtype.bytes() >= LONG_ROW { 512 } else { 128 };
    let function =
        Function { source: "cross_entropy.cu", defines: vec![typed("X", logits.dtype)], entry };
    let sizes = [Arg::I32(columns), Arg::I32(extent)];
    let args = operands(call, sizes.into_iter().chain(rest));
    Ok(launch(function, grid(call, n_rows)?, block, args))
}

fn loss(entry: &'static str) -> Function {
    Function { source: "ce_loss.cu", defines: Vec::new(), entry }
}

/// All operands, all results, then the rest.
fn operands(call: &OpCall<'_>, rest: impl IntoIterator<Item = Arg>) -> Vec<Arg> {
    let pointers = (0..call.args.len()).map(arg).chain((0..call.results.len()).map(result));
    pointers.chain(rest).collect()
}
