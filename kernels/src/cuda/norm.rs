//! Launches for `rms_norm`, `layer_norm` and their gradients.
//!
//! A row is held by the threads of a warp or a block; rows too long for that, or not made of whole
//! vectors, are read several times.

use ir::ops::Amaxes;
use ir::ops::norm::Norm;
use ir::ops::norm_grad::NormGrad;
use ir::{DType, Op};

use crate::cuda::amax;
use crate::cuda::fill::zeros;
use crate::cuda::launch::{
    N_SMS, arg, blocks, elements, launch, need, null, program, result, rows, size, sized, typed,
};
use crate::cuda::sum_leading::Columns;
use crate::cuda::{Arg, Function, OpCall, Operand, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    match call.op {
        Op::RmsNorm(it) => norm(call, it),
        Op::LayerNorm(it) => norm(call, it),
        Op::RmsNormGrad(it) => grad(call, it),
        Op::LayerNormGrad(it) => grad(call, it),
        _ => Err(Unsupported::new(call, "it is not a norm")),
    }
}

/// The most vectors that a thread holds.
const MOST_VECTORS: u64 = 4;

/// Which norm.
#[derive(Debug, Clone, Copy)]
struct Kind {
    /// Subtracts the mean and adds a bias.
    layer: bool,
    /// Adds an operand to `x` first; its gradient adds one to `dx`.
    residual: bool,
}

/// How the threads of a row share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowShape {
    /// Threads of a row.
    threads: u64,
    /// Vectors that each of them holds; 0 if the row is not held.
    vectors: u64,
}

impl RowShape {
    /// Of rows of `columns` elements of `x`: a few vectors a thread, up to `most_threads`; then more
    /// vectors; and then more threads.
    fn new(x: &Operand, columns: u64, few: u64, most_threads: u64) -> RowShape {
        let vector = 16 / x.dtype.bytes();
        let n_vectors = columns / vector;
        let threads = |vectors: u64| n_vectors.div_ceil(vectors).next_power_of_two().max(32);
        let threads = threads(few).min(most_threads).max(threads(MOST_VECTORS)).min(1024);
        let vectors = n_vectors.div_ceil(threads);
        match columns.is_multiple_of(vector) && vectors <= MOST_VECTORS {
            true => RowShape { threads, vectors },
            false => RowShape {
                threads: columns.div_ceil(8).next_power_of_two().clamp(32, 512),
                vectors: 0,
            },
        }
    }

    /// Threads of a block, as `BLOCK` of `norm.cuh`.
    fn block(self) -> u64 {
        if self.threads == 32 { 128 } else { self.threads }
    }

    fn rows_each(self) -> u64 {
        self.block() / self.threads
    }

    /// Blocks of the gradient that a multiprocessor has registers for: a thread holds its part of a
    /// row, of the gradient and of the weight as they are stored, and sums in f32.
    fn resident(self, call: &OpCall<'_>, layer: bool) -> u64 {
        let length = 16 / call.args[1].dtype.bytes();
        let stored: u64 = call.args[..3].iter().map(|it| length * it.dtype.bytes() / 4).sum();
        let sums = length * if layer { 2 } else { 1 };
        let registers = 40 + self.vectors * (stored + sums);
        ((64 << 10) / registers / self.block()).clamp(1, 16)
    }

    fn defines(self, Kind { layer, residual }: Kind) -> [String; 4] {
        [
            sized("LAYER", u64::from(layer)),
            sized("RESIDUAL", u64::from(residual)),
            sized("ROW_THREADS", self.threads),
            sized("VECTORS", self.vectors),
        ]
    }
}

/// Rows and columns of a norm's operand; `None` if it is empty.
fn size_of(call: &OpCall<'_>, x: &Operand) -> Result<Option<(u64, u64)>, Unsupported> {
    let (n_rows, columns) = rows(x);
    if elements(x) == 0 {
        return Ok(None);
    }
    match columns <= 1 << 30 {
        true => Ok(Some((n_rows, columns))),
        false => Err(Unsupported::new(call, "a row has more than 2^30 features")),
    }
}

/// All results zero, where there is nothing to compute them from.
fn nothing(call: &OpCall<'_>) -> Program {
    let results = call.results.iter().enumerate().filter(|it| elements(it.1) > 0);
    program(results.map(|(i, out)| zeros(i, out)))
}

fn center(zero_centered: bool) -> Arg {
    Arg::F32(if zero_centered { 1.0 } else { 0.0 })
}

/// Operands `x w [b] [r]` and the scale of `y` if that is codes, results `y [mean] rstd [sum]`, and the amax of `y`.
fn norm<const LAYER: bool>(call: &OpCall<'_>, op: &Norm<LAYER>) -> Result<Program, Unsupported> {
    let x = &call.args[0];
    let Some((n_rows, columns)) = size_of(call, x)? else { return Ok(nothing(call)) };
    let kind @ Kind { layer, residual } = Kind { layer: LAYER, residual: op.residual };
    let plain = Norm::<LAYER>::PLAIN;
    let shape = RowShape::new(x, columns, 4, 1024);
    let bias = if layer { call.args[2].dtype } else { x.dtype };
    let mut defines = vec![typed("X", x.dtype), typed("W", call.args[1].dtype), typed("B", bias)];
    defines.extend(shape.defines(kind));
    defines.push(typed("Y", call.results[0].dtype));
    let (amax, mut work) = first_amax(call, &op.amax, &mut defines)?;
    let function = Function { source: "norm.cu", defines, entry: "normalize" };
    let args = vec![
        result(0),
        if layer { result(1) } else { null() },
        result(plain - 1),
        if residual { result(plain) } else { null() },
        amax,
        op.codes.scale_of(0).map_or(null(), |_| arg(call.args.len() - 1)),
        arg(0),
        arg(1),
        if layer { arg(2) } else { null() },
        if residual { arg(plain) } else { null() },
        size(n_rows),
        Arg::I32(columns as i32),
        Arg::F32(op.eps.0 as f32),
        center(op.zero_centered),
    ];
    let grid = [blocks(n_rows, shape.rows_each()), 1, 1];
    work.push(launch(function, grid, shape.block() as u32, args));
    Ok(program(work))
}

/// Operands `dy x w [mean] rstd [dres]`, results `dx dw [db]`, and the amax of `dx`.
fn grad<const LAYER: bool>(
    call: &OpCall<'_>,
    op: &NormGrad<LAYER>,
) -> Result<Program, Unsupported> {
    let x = &call.args[1];
    let Some((n_rows, columns)) = size_of(call, x)? else { return Ok(nothing(call)) };
    let kind @ Kind { layer, residual } = Kind { layer: LAYER, residual: op.residual };
    let plain = NormGrad::<LAYER>::PLAIN;
    (3..plain).try_for_each(|statistic| need(call, statistic, DType::F32))?;
    let shape = RowShape::new(x, columns, 2, 256);
    let mut defines =
        vec![typed("X", x.dtype), typed("DY", call.args[0].dtype), typed("W", call.args[2].dtype)];
    defines.extend(shape.defines(kind));
    let resident = shape.resident(call, layer);
    defines.push(sized("RESIDENT", resident));
    let (amax, mut work) = first_amax(call, &op.amax, &mut defines)?;
    let function = Function { source: "norm_grad.cu", defines, entry: "normalize_grad" };

    // As many blocks as run at once: each leaves a row of sums that is to be added up.
    let n_blocks = n_rows.div_ceil(shape.rows_each()).min(N_SMS * resident);
    let n_parts = n_blocks * shape.rows_each();
    let bytes = (n_parts * columns * 4).next_multiple_of(256);
    let (dw, db) = (Pointer::Workspace(0), Pointer::Workspace(bytes));
    let args = vec![
        result(0),
        Arg::Pointer(dw),
        if layer { Arg::Pointer(db) } else { null() },
        amax,
        arg(0),
        arg(1),
        arg(2),
        if layer { arg(3) } else { null() },
        arg(plain - 1),
        if residual { arg(plain) } else { null() },
        size(n_rows),
        Arg::I32(columns as i32),
        center(op.zero_centered),
    ];
    let grid = [n_blocks as u32, 1, 1];
    work.push(launch(function, grid, shape.block() as u32, args));
    let mut res = program(work);
    res.workspace = if layer { 2 * bytes } else { bytes };
    let parts = |at: Pointer| Columns { at, dtype: DType::F32, rows: n_parts, columns };
    parts(dw).sum(Pointer::Result(1), call.results[1].dtype, &mut res);
    if layer {
        parts(db).sum(Pointer::Result(2), call.results[2].dtype, &mut res);
    }
    Ok(res)
}

/// Where the amax of the first result goes, what zeroes it, and the macro that asks for it.
fn first_amax(
    call: &OpCall<'_>,
    amaxes: &Amaxes,
    defines: &mut Vec<String>,
) -> Result<(Arg, Vec<Work>), Unsupported> {
    let places = amax::places(call, amaxes)?;
    if places[1..].iter().any(Option::is_some) {
        return Err(Unsupported::new(call, "it takes the amax of its first result"));
    }
    defines.push(sized("AMAX", u64::from(places[0].is_some())));
    Ok((places[0].map_or(null(), result), amax::zeroed(call, amaxes).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(dtype: DType, columns: u64, (few, most_threads): (u64, u64), expected: (u64, u64)) {
        let x = Operand { dtype, shape: [4, columns as usize].into_iter().collect() };
        let shape = RowShape::new(&x, columns, few, most_threads);
        assert_eq!((shape.threads, shape.vectors), expected);
    }

    const NORM: (u64, u64) = (4, 1024);
    const GRAD: (u64, u64) = (2, 256);

    #[test]
    fn rows_of_whole_vectors_are_held() {
        check(DType::Bf16, 4096, NORM, (128, 4));
        check(DType::Bf16, 4096, GRAD, (256, 2));
        check(DType::Bf16, 8192, GRAD, (256, 4));
        check(DType::Bf16, 5120, NORM, (256, 3));
        check(DType::Bf16, 16384, GRAD, (512, 4));
        check(DType::F32, 16384, GRAD, (1024, 4));
        check(DType::Bf16, 8, NORM, (32, 1));
    }

    #[test]
    fn other_rows_are_read_again() {
        check(DType::Bf16, 5, NORM, (32, 0));
        check(DType::Bf16, 4097, NORM, (512, 0));
        check(DType::Bf16, 65536, NORM, (512, 0));
    }
}
