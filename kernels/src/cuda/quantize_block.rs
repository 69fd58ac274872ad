//! Launch for `quantize_block`: one for all tensors of a batch.
//!
//! ```text
//! table   9 words for each tensor: x, rows and their scales, columns and theirs (0 where there are none),
//!         sizes of both, and how much of them is no padding
//!         1 word for each square of the matrix, unless there is one tensor only
//! ```

use ir::Op;

use crate::cuda::launch::{elements, grid, launch, null, program, rows, sized, typed};
use crate::cuda::quantize::{BLOCK, aligned, squares_of};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// Words of a tensor in the table.
const WORDS: usize = 9;

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let Op::QuantizeBlock(op) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    let defines = vec![
        typed("X", call.args[0].dtype),
        typed("CODE", op.to),
        aligned(calls),
        sized("ROWS", op.copies.rows().into()),
        sized("COLUMNS", op.copies.columns().into()),
        sized("SQUARE", op.square.into()),
    ];
    let function = Function { source: "quantize_block.cu", defines, entry: "quantize_blocks" };
    let mut table = Vec::new();
    let mut results = 0;
    for (i, call) in calls.iter().enumerate() {
        let mut copy = |there: bool| {
            let first = results;
            results += if there { 2 } else { 0 };
            [first, first + 1].map(|it| match there {
                true => Word::Pointer(Pointer::Result(it)),
                false => Word::Value(0),
            })
        };
        let (n_rows, n_columns) = rows(&call.args[0]);
        table.push(Word::Pointer(Pointer::Arg(i as u32)));
        table.extend(copy(op.copies.rows()));
        table.extend(copy(op.copies.columns()));
        let held = match op.uneven {
            true => [call.bounds[0].extent, call.bounds[1].extent],
            false => [n_rows, n_columns],
        };
        table.extend([n_rows, n_columns].into_iter().chain(held).map(Word::Value));
    }
    let full = calls.iter().enumerate().filter(|(_, it)| elements(&it.args[0]) > 0);
    let list: Vec<Word> = full.map(|(i, it)| squares_of(i, it)).collect();
    let n = list.iter().map(|it| it.n()).sum();
    let list_at = match calls {
        [_] => null(),
        _ => {
            table.extend(list);
            Arg::Pointer(Pointer::Table((WORDS * calls.len()) as u32))
        }
    };
    let rule = op.rule();
    let numbers =
        [Arg::F32(rule.format.max()), Arg::F32(rule.overflow), Arg::I32(rule.pow2.into())];
    let args = [vec![Arg::Pointer(Pointer::Table(0)), list_at], numbers.to_vec()].concat();
    Ok(Program { table, ..program([launch(function, grid(call, n)?, BLOCK, args)]) })
}
