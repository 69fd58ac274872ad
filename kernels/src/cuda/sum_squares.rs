//! Launches for `sum_squares`, and for what else is one number of each tensor: parts of all tensors of a
//! batch, then of the parts of each.
//!
//! ```text
//! table       5 words for each tensor: x, the result, elements, first part, parts
//!             1 word for each chunk, as for the optimizers
//! workspace   a number for each part
//! ```

use ir::Op;

use crate::cuda::launch::{elements, grid, launch, program, typed};
use crate::cuda::optimizer::{BLOCK, CHUNK, chunks};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// Words of a tensor in the table.
const WORDS: usize = 5;

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let Op::SumSquares(_) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    reduce(calls, "sum_squares.cu", ["sum_squares_parts", "sum_squares"], 8)
}

/// Launches of two kernels, for parts and for tensors. A part is a number of `width` bytes.
pub(super) fn reduce(
    calls: &[OpCall<'_>],
    source: &'static str,
    [of_parts, of_tensors]: [&'static str; 2],
    width: u64,
) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let mut table = Vec::new();
    let mut n_parts = 0;
    for (index, call) in calls.iter().enumerate() {
        let n = elements(&call.args[0]);
        let parts = n.div_ceil(CHUNK);
        let index = index as u32;
        table.extend([Pointer::Arg(index), Pointer::Result(index)].map(Word::Pointer));
        table.extend([n, n_parts, parts].map(Word::Value));
        n_parts += parts;
    }
    table.extend(chunks(calls));

    let function =
        |entry| Function { source, defines: vec![typed("X", call.args[0].dtype)], entry };
    let tensors = Arg::Pointer(Pointer::Table(0));
    let parts = Arg::Pointer(Pointer::Workspace(0));
    let chunks = Arg::Pointer(Pointer::Table((WORDS * calls.len()) as u32));
    let mut work = Vec::new();
    if n_parts > 0 {
        let args = vec![tensors, chunks, parts];
        work.push(launch(function(of_parts), grid(call, n_parts)?, BLOCK, args));
    }
    let grid = grid(call, calls.len() as u64)?;
    work.push(launch(function(of_tensors), grid, BLOCK, vec![tensors, parts]));
    // Never empty, so that the pointer to it is one.
    let workspace = (n_parts.max(1) * width).next_multiple_of(256);
    Ok(Program { workspace, table, ..program(work) })
}
