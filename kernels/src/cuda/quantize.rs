//! Launch for `quantize`: one for all tensors of a batch, or for the pieces of one. Where columns are summed, it is of
//! one tensor, and squares leave sums of their rows, which are added up.
//!
//! ```text
//! table   6 words for each tensor: x, scale, rows, columns (0 where there are none), sizes of both
//!         1 word for each chunk of elements, as for the optimizers, or for each square of the matrix,
//!         unless there is one tensor only
//! ```

use ir::DType;

use crate::cuda::fill::zeros;
use crate::cuda::fused::Summed;
use crate::cuda::launch::{
    arg, blocks, elements, grid, launch, null, program, result, rows, size, sized, typed,
};
use crate::cuda::optimizer::chunks;
use crate::cuda::pieces::{dims, words};
use crate::cuda::sum_leading::Columns;
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// Rows and columns of a square; `SIDE` of `codes.cuh`.
pub(super) const SIDE: u64 = 128;
/// Threads of a block; `TILE_THREADS` of `codes.cuh`.
pub(super) const BLOCK: u32 = 256;
/// Elements of a vector of a square; `EACH` of `codes.cuh`.
const EACH: u64 = 8;
/// Words of a tensor in the table.
const WORDS: usize = 6;

/// Squares of a matrix.
pub(super) fn squares(n_rows: u64, n_columns: u64) -> u64 {
    n_rows.div_ceil(SIDE) * n_columns.div_ceil(SIDE)
}

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let op = Summed::of(call.op).ok_or_else(|| Unsupported::new(call, "it has none"))?;
    if let Some(sum) = op.sum.filter(|_| elements(&call.args[0]) == 0) {
        return Ok(program([zeros(sum, &call.results[sum])]));
    }
    let (mut res, columns) = match elements(&call.args[1]) {
        1 => tensors(calls, &op)?,
        _ => pieces(call, &op),
    };
    if let Some(sum) = op.sum {
        columns.sum(Pointer::Result(sum as u32), call.results[sum].dtype, &mut res);
    }
    Ok(res)
}

fn function(calls: &[OpCall<'_>], op: &Summed<'_>, entry: &'static str) -> Function {
    let defines = vec![
        typed("X", calls[0].args[0].dtype),
        typed("CODE", op.quantize.to),
        aligned(calls),
        sized("SUM", op.sum.is_some().into()),
    ];
    Function { source: "quantize.cu", defines, entry }
}

/// One scale each; and the sums of each row of squares, if that is asked for.
fn tensors(calls: &[OpCall<'_>], op: &Summed<'_>) -> Result<(Program, Columns), Unsupported> {
    let call = &calls[0];
    let (n_rows, columns) = rows(&call.args[0]);
    let at = Pointer::Workspace(0);
    let parts = Columns { at, dtype: DType::F32, rows: n_rows.div_ceil(SIDE), columns };
    let mut table: Vec<Word> =
        calls.iter().enumerate().flat_map(|(i, it)| matrix(i, it, op)).collect();
    let is_summed = op.sum.is_some();
    let in_squares = op.quantize.copies.columns() || is_summed;
    let list: Vec<Word> = match in_squares {
        true => calls.iter().enumerate().map(|(i, it)| squares_of(i, it)).collect(),
        false => chunks(calls).collect(),
    };
    let n: u64 = list.iter().map(|it| it.n()).sum();
    if n == 0 {
        return Ok((Program::default(), parts));
    }
    let alone = in_squares && calls.len() == 1;
    let list_at =
        if alone { null() } else { Arg::Pointer(Pointer::Table((WORDS * calls.len()) as u32)) };
    if !alone {
        table.extend(list);
    }
    let mut args = vec![Arg::Pointer(Pointer::Table(0)), list_at];
    let entry = match in_squares {
        true => {
            args.push(if is_summed { Arg::Pointer(at) } else { null() });
            "quantize_squares"
        }
        false => "quantize_rows",
    };
    let work = launch(function(calls, op, entry), grid(call, n)?, BLOCK, args);
    let workspace = if is_summed { parts.bytes() } else { 0 };
    Ok((Program { table, workspace, ..program([work]) }, parts))
}

/// The macro that says whether rows of all tensors are whole vectors.
pub(super) fn aligned(calls: &[OpCall<'_>]) -> String {
    let aligned = calls.iter().all(|it| rows(&it.args[0]).1.is_multiple_of(EACH));
    sized("ALIGNED", aligned.into())
}

/// Tensor `index` in the table.
fn matrix(index: usize, call: &OpCall<'_>, op: &Summed<'_>) -> [Word; WORDS] {
    let (first_arg, n_results) = (2 * index as u32, call.results.len() as u32);
    let first = index as u32 * n_results;
    let copy = |at: Option<usize>| match at {
        Some(at) => Word::Pointer(Pointer::Result(first + at as u32)),
        None => Word::Value(0),
    };
    let (n_rows, n_columns) = rows(&call.args[0]);
    [
        Word::Pointer(Pointer::Arg(first_arg)),
        Word::Pointer(Pointer::Arg(first_arg + 1)),
        copy(op.rows()),
        copy(op.columns()),
        Word::Value(n_rows),
        Word::Value(n_columns),
    ]
}

/// The (tensor, square) pairs of tensor `index`.
pub(super) fn squares_of(index: usize, call: &OpCall<'_>) -> Word {
    let (n_rows, n_columns) = rows(&call.args[0]);
    Word::Pieces { of: index as u32, n: squares(n_rows, n_columns) }
}

/// Several scales; columns are summed as they are.
fn pieces(call: &OpCall<'_>, op: &Summed<'_>) -> (Program, Columns) {
    let dims = dims(&call.args[0].shape, &call.args[1].shape, &op.quantize.pieces);
    let (n_rows, n_columns) = rows(&call.args[0]);
    let copy = |at: Option<usize>| at.map_or(null(), result);
    let args = vec![
        arg(0),
        arg(1),
        copy(op.rows()),
        copy(op.columns()),
        size(n_rows),
        size(n_columns),
        Arg::Pointer(Pointer::Table(0)),
        Arg::I32(dims.len() as i32),
    ];
    let grid = [blocks(n_rows * n_columns, BLOCK.into()), 1, 1];
    let function = function(std::slice::from_ref(call), op, "quantize_pieces");
    let work = launch(function, grid, BLOCK, args);
    let x = Columns {
        at: Pointer::Arg(0),
        dtype: call.args[0].dtype,
        rows: n_rows,
        columns: n_columns,
    };
    (Program { table: words(&dims).collect(), ..program([work]) }, x)
}
