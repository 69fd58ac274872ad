//! Launch for `quantize`: one for all tensors of a batch, or for the pieces of one.
//!
//! ```text
//! table   6 words for each tensor: x, scale, rows, columns (0 where there are none), sizes of both
//!         1 word for each chunk of elements, as for the optimizers, or for each square of the matrix,
//!         unless there is one tensor only
//! ```

use ir::Op;
use ir::ops::Quantize;

use crate::cuda::launch::{
    arg, blocks, elements, grid, launch, null, program, result, rows, size, sized, typed,
};
use crate::cuda::optimizer::chunks;
use crate::cuda::pieces::{dims, words};
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
    let Op::Quantize(op) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    let function = |entry| Function {
        source: "quantize.cu",
        defines: vec![typed("X", call.args[0].dtype), typed("CODE", op.to), aligned(calls)],
        entry,
    };
    if elements(&call.args[1]) != 1 {
        return Ok(pieces(call, op, function("quantize_pieces")));
    }
    let mut table: Vec<Word> =
        calls.iter().enumerate().flat_map(|(i, it)| matrix(i, it, op)).collect();
    let list: Vec<Word> = match op.copies.columns() {
        true => calls.iter().enumerate().flat_map(|(i, it)| squares_of(i, it)).collect(),
        false => chunks(calls).collect(),
    };
    let n = list.len() as u64;
    if n == 0 {
        return Ok(Program::default());
    }
    let alone = op.copies.columns() && calls.len() == 1;
    let list_at =
        if alone { null() } else { Arg::Pointer(Pointer::Table((WORDS * calls.len()) as u32)) };
    if !alone {
        table.extend(list);
    }
    let entry = if op.copies.columns() { "quantize_squares" } else { "quantize_rows" };
    let args = vec![Arg::Pointer(Pointer::Table(0)), list_at];
    let work = launch(function(entry), grid(call, n)?, BLOCK, args);
    Ok(Program { table, ..program([work]) })
}

/// The macro that says whether rows of all tensors are whole vectors.
pub(super) fn aligned(calls: &[OpCall<'_>]) -> String {
    let aligned = calls.iter().all(|it| rows(&it.args[0]).1.is_multiple_of(EACH));
    sized("ALIGNED", aligned.into())
}

/// Tensor `index` in the table.
fn matrix(index: usize, call: &OpCall<'_>, op: &Quantize) -> [Word; WORDS] {
    let (first_arg, n_results) = (2 * index as u32, call.results.len() as u32);
    let first = index as u32 * n_results;
    let copy = |there: bool, at: u32| match there {
        true => Word::Pointer(Pointer::Result(at)),
        false => Word::Value(0),
    };
    let (n_rows, n_columns) = rows(&call.args[0]);
    [
        Word::Pointer(Pointer::Arg(first_arg)),
        Word::Pointer(Pointer::Arg(first_arg + 1)),
        copy(op.copies.rows(), first),
        copy(op.copies.columns(), first + n_results - 1),
        Word::Value(n_rows),
        Word::Value(n_columns),
    ]
}

/// The (tensor, square) pairs of tensor `index`.
pub(super) fn squares_of(index: usize, call: &OpCall<'_>) -> impl Iterator<Item = Word> + use<> {
    let (n_rows, n_columns) = rows(&call.args[0]);
    (0..squares(n_rows, n_columns)).map(move |it| Word::Value(index as u64 | it << 32))
}

/// Several scales.
fn pieces(call: &OpCall<'_>, op: &Quantize, function: Function) -> Program {
    let dims = dims(&call.args[0].shape, &call.args[1].shape, &op.pieces);
    let (n_rows, n_columns) = rows(&call.args[0]);
    let copy = |there: bool, at: usize| if there { result(at) } else { null() };
    let args = vec![
        arg(0),
        arg(1),
        copy(op.copies.rows(), 0),
        copy(op.copies.columns(), call.results.len() - 1),
        size(n_rows),
        size(n_columns),
        Arg::Pointer(Pointer::Table(0)),
        Arg::I32(dims.len() as i32),
    ];
    let grid = [blocks(n_rows * n_columns, BLOCK.into()), 1, 1];
    Program { table: words(&dims).collect(), ..program([launch(function, grid, BLOCK, args)]) }
}
