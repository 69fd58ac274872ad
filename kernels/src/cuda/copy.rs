//! Launches for parts of tensors along one dimension: `concat`, `pad_dim`, `slice_dim`.
//!
//! Such a tensor is rows of bytes: one for each entry of the dimensions before, holding those from
//! the dimension on. What is moved at a time is the widest unit that divides all that matters.

use ir::Op;

use crate::cuda::elementwise::copy;
use crate::cuda::launch::{
    BLOCK, arg, blocks, elements, index, index_arg, launch, program, result,
};
use crate::cuda::{Function, OpCall, Operand, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let dim = match call.op {
        Op::Concat(it) => it.dim,
        Op::PadDim(it) => it.dim,
        Op::SliceDim(it) => it.dim,
        _ => return Err(Unsupported::new(call, "it does not take parts of rows")),
    };
    let (n_rows, out) = row(&call.results[0], dim);
    let (_, from) = row(&call.args[0], dim);
    if out == from {
        return Ok(copy(call));
    }
    // Bytes of one entry of the dimension.
    let entry = out / call.results[0].shape[dim] as u64;
    Ok(program(match call.op {
        Op::Concat(_) => concat(call, dim),
        Op::PadDim(it) => vec![pad(n_rows, from, it.start * entry, out)],
        Op::SliceDim(it) => {
            let part =
                Part { row: out, to: 0, to_pitch: out, from: it.start * entry, from_pitch: from };
            vec![part.copy(0, n_rows)]
        }
        _ => unreachable!("matched above"),
    }))
}

/// Number of rows, and bytes of one.
fn row(operand: &Operand, dim: usize) -> (u64, u64) {
    let row: u64 = operand.shape[dim..].iter().map(|&it| it as u64).product();
    let n_rows = operand.shape[..dim].iter().map(|&it| it as u64).product();
    (n_rows, row * operand.dtype.bytes())
}

fn concat(call: &OpCall<'_>, dim: usize) -> Vec<Work> {
    let (n_rows, to_pitch) = row(&call.results[0], dim);
    let mut to = 0;
    let mut res = Vec::new();
    for (i, operand) in call.args.iter().enumerate() {
        let (_, row) = row(operand, dim);
        if elements(operand) > 0 {
            res.push(Part { row, to, to_pitch, from: 0, from_pitch: row }.copy(i, n_rows));
        }
        to += row;
    }
    res
}

/// What is copied of each row; in bytes.
struct Part {
    row: u64,
    to: u64,
    to_pitch: u64,
    from: u64,
    from_pitch: u64,
}

impl Part {
    /// From operand `operand` to the result.
    fn copy(&self, operand: usize, n_rows: u64) -> Work {
        let Part { row, to, to_pitch, from, from_pitch } = *self;
        let (unit, name) = unit(&[row, to, to_pitch, from, from_pitch]);
        let (n, largest) = (n_rows * row / unit, n_rows * to_pitch.max(from_pitch) / unit);
        let count = |bytes: u64| index_arg(largest, bytes / unit);
        let mut args = vec![result(0), arg(operand)];
        args.extend([row, to, to_pitch, from, from_pitch].map(count));
        args.push(index_arg(largest, n));
        let defines = vec![name, index(largest)];
        let function = Function { source: "copy.cu", defines, entry: "copy_rows" };
        launch(function, [blocks(n, u64::from(BLOCK)), 1, 1], BLOCK, args)
    }
}

fn pad(n_rows: u64, row: u64, to: u64, to_pitch: u64) -> Work {
    let (unit, name) = unit(&[row, to, to_pitch]);
    let n = n_rows * to_pitch / unit;
    let mut args = vec![result(0), arg(0)];
    args.extend([row, to, to_pitch].map(|bytes| index_arg(n, bytes / unit)));
    args.push(index_arg(n, n));
    let defines = vec![name, index(n)];
    let function = Function { source: "copy.cu", defines, entry: "pad_rows" };
    launch(function, [blocks(n, u64::from(BLOCK)), 1, 1], BLOCK, args)
}

/// The widest unit that divides these numbers of bytes, and the macro that names its type.
pub(super) fn unit(bytes: &[u64]) -> (u64, String) {
    let units = [(16, "uint4"), (8, "uint2"), (4, "u32"), (2, "u16")];
    let divides = |unit: u64| bytes.iter().all(|it| it.is_multiple_of(unit));
    let (unit, name) = units.into_iter().find(|it| divides(it.0)).unwrap_or((1, "u8"));
    (unit, format!("V={name}"))
}
