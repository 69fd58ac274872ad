//! Launches for `amax`: of many tensors together, or of the pieces of one; and what other ops need to take it on
//! the way.

use ir::Op;
use ir::ops::Amaxes;

use crate::cuda::fill::zeros;
use crate::cuda::launch::{arg, elements, grid, launch, program, result, typed};
use crate::cuda::optimizer::BLOCK;
use crate::cuda::pieces::{dims, words};
use crate::cuda::sum_squares::reduce;
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Work};

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let Op::Amax(op) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    let n = elements(&call.results[0]);
    if n == 1 {
        return reduce(calls, "amax.cu", ["amax_parts", "amax"], 4);
    }
    let in_pieces: Vec<usize> = op.pieces.iter().map(|it| it.0).collect();
    let dims = dims(&call.args[0].shape, &call.results[0].shape, &in_pieces);
    let defines = vec![typed("X", call.args[0].dtype)];
    let function = Function { source: "amax.cu", defines, entry: "amax_pieces" };
    let table = Arg::Pointer(Pointer::Table(0));
    let args = vec![arg(0), result(0), table, Arg::I32(dims.len() as i32)];
    let work = launch(function, grid(call, n)?, BLOCK, args);
    Ok(Program { table: words(&dims).collect(), ..program([work]) })
}

/// Where the amax of each of the op's own results goes; what is not asked for has no place.
pub(super) fn places(
    call: &OpCall<'_>,
    amaxes: &Amaxes,
) -> Result<Vec<Option<usize>>, Unsupported> {
    let n_own = amaxes.own(call.results).len();
    if call.results[n_own..].iter().any(|it| elements(it) != 1) {
        return Err(Unsupported::new(call, "it takes one amax of a result"));
    }
    let place = |of: usize| amaxes.of.iter().position(|&it| it == of).map(|it| n_own + it);
    Ok((0..n_own).map(place).collect())
}

/// Zeroes what a kernel raises to an amax.
pub(super) fn zeroed(call: &OpCall<'_>, amaxes: &Amaxes) -> impl Iterator<Item = Work> {
    let n_own = amaxes.own(call.results).len();
    (n_own..call.results.len()).map(|it| zeros(it, &call.results[it]))
}
