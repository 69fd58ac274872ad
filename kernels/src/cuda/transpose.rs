//! Launches for `transpose`.

use ir::Op;

use crate::cuda::copy::unit;
use crate::cuda::elementwise::copy;
use crate::cuda::launch::{
    BLOCK, arg, blocks, bytes, elements, grid, index, index_arg, launch, program, result, size,
};
use crate::cuda::quantize::{self, squares};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// Rows and columns of a tile of `transpose_tiles`.
const SIDE: u64 = 64;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::Transpose(op) = call.op else {
        return Err(Unsupported::new(call, "it does not reorder dimensions"));
    };
    let dims = merged(&dims(&call.args[0].shape, &op.perm));
    match dims.as_slice() {
        [] | [_] => Ok(copy(call)),
        [.., last] if last.from == 1 => Ok(rows(call, &dims)),
        // A matrix: its rows are the columns of the result.
        [columns, rows] if call.results[0].dtype.bytes() == 1 => {
            matrix_of_bytes(call, rows.size, columns.size)
        }
        _ => Ok(tiles(call, dims)),
    }
}

/// A dimension of the result: its size, and how far apart its entries are in the operand and in the
/// result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dim {
    size: u64,
    from: u64,
    to: u64,
}

/// Dimensions of the result, outermost first; those of size 1 matter to nobody.
fn dims(shape: &[usize], perm: &[usize]) -> Vec<Dim> {
    let distance = |sizes: &mut dyn Iterator<Item = usize>| sizes.map(|it| it as u64).product();
    let dim = |(i, &of): (usize, &usize)| Dim {
        size: shape[of] as u64,
        from: distance(&mut shape[of + 1..].iter().copied()),
        to: distance(&mut perm[i + 1..].iter().map(|&it| shape[it])),
    };
    perm.iter().enumerate().map(dim).filter(|it| it.size != 1).collect()
}

/// The same with neighbours that are neighbours in the operand too made one.
fn merged(dims: &[Dim]) -> Vec<Dim> {
    let mut res: Vec<Dim> = Vec::new();
    for &dim in dims {
        match res.last_mut() {
            Some(outer) if outer.from == dim.from * dim.size => {
                *outer = Dim { size: outer.size * dim.size, ..dim };
            }
            _ => res.push(dim),
        }
    }
    res
}

fn table<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Vec<Word> {
    dims.into_iter().flat_map(|it| [it.size, it.from, it.to].map(Word::Value)).collect()
}

/// The last dimension stays the last.
fn rows(call: &OpCall<'_>, dims: &[Dim]) -> Program {
    let width = call.results[0].dtype.bytes();
    let last = dims[dims.len() - 1];
    let (unit, name) = unit(&[last.size * width]);
    // In units; the entries of the last dimension become whole units next to each other.
    let count = |elements: u64| elements * width / unit;
    let inner = Dim { size: count(last.size), from: 1, to: 1 };
    let outer = dims[..dims.len() - 1].iter().rev();
    let outer = outer.map(|it| Dim { size: it.size, from: count(it.from), to: count(it.to) });
    let dims: Vec<Dim> = std::iter::once(inner).chain(outer).collect();
    let n = bytes(&call.results[0]) / unit;
    let table_at = Arg::Pointer(Pointer::Table(0));
    let args = vec![result(0), arg(0), table_at, Arg::I32(dims.len() as i32), index_arg(n, n)];
    let defines = vec![name, index(n), element(width)];
    let function = Function { source: "transpose.cu", defines, entry: "permute_rows" };
    let mut res = program([launch(function, [blocks(n, u64::from(BLOCK)), 1, 1], BLOCK, args)]);
    res.table = table(&dims);
    res
}

/// The last dimension of the operand is another than that of the result.
fn tiles(call: &OpCall<'_>, mut dims: Vec<Dim>) -> Program {
    let columns = dims.remove(dims.len() - 1);
    let position = dims.iter().position(|it| it.from == 1);
    let rows = dims.remove(position.expect("the operand has a last dim of more than one entry"));
    let n_others: u64 = dims.iter().map(|it| it.size).product();
    let n_tiles = rows.size.div_ceil(SIDE) * columns.size.div_ceil(SIDE) * n_others;
    let n = elements(&call.results[0]);
    let width = call.results[0].dtype.bytes();
    let (_, name) = unit(&[width]);
    let defines = vec![name, index(n), element(width)];
    let function = Function { source: "transpose.cu", defines, entry: "transpose_tiles" };
    let table_at = Arg::Pointer(Pointer::Table(0));
    let n_dims = Arg::I32(dims.len() as i32 + 2);
    let args = vec![result(0), arg(0), table_at, n_dims, size(n_tiles)];
    let mut res = program([launch(function, [blocks(n_tiles, 1), 1, 1], BLOCK, args)]);
    res.table = table([rows, columns].iter().chain(&dims));
    res
}

/// The transpose of a matrix of bytes.
fn matrix_of_bytes(call: &OpCall<'_>, n_rows: u64, n_columns: u64) -> Result<Program, Unsupported> {
    let defines = vec!["V=u8".to_string(), "INDEX=u64".to_string(), element(1)];
    let function = Function { source: "transpose.cu", defines, entry: "transpose_bytes" };
    let args = vec![result(0), arg(0), size(n_rows), size(n_columns)];
    let grid = grid(call, squares(n_rows, n_columns))?;
    Ok(program([launch(function, grid, quantize::BLOCK, args)]))
}

fn element(width: u64) -> String {
    let name = match width {
        1 => "E=u8",
        2 => "E=u16",
        _ => "E=u32",
    };
    name.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(shape: &[usize], perm: &[usize], expected: &[(u64, u64, u64)]) {
        let expected: Vec<Dim> =
            expected.iter().map(|&(size, from, to)| Dim { size, from, to }).collect();
        assert_eq!(merged(&dims(shape, perm)), expected);
    }

    #[test]
    fn neighbours_that_stay_neighbours_are_one_dim() {
        check(&[2, 3, 4, 5], &[0, 3, 1, 2], &[(2, 60, 60), (5, 1, 12), (12, 5, 1)]);
        check(&[2, 3, 4], &[0, 1, 2], &[(24, 1, 1)]);
        check(&[6, 5], &[1, 0], &[(5, 1, 6), (6, 5, 1)]);
        check(&[2, 3, 4], &[1, 0, 2], &[(3, 4, 8), (2, 12, 4), (4, 1, 1)]);
    }

    #[test]
    fn dims_of_one_entry_are_left_out() {
        check(&[1, 3, 1, 4], &[3, 0, 2, 1], &[(4, 1, 3), (3, 4, 1)]);
        check(&[3, 1, 4], &[1, 0, 2], &[(12, 1, 1)]);
        check(&[1, 1], &[1, 0], &[]);
    }
}
