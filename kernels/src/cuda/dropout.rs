//! Launch for `dropout`.

use ir::{DType, Op};

use crate::cuda::launch::{
    BLOCK, arg, elements, grid, launch, need, program, result, size, sized, typed, vector_length,
};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// Neighbouring elements of a local tensor, from dim to dim, with the global index of each.
pub(super) struct Rows {
    /// Global index of the first element.
    pub first: u64,
    /// Elements of a row: their global indices are neighbours too.
    pub n: u64,
    /// Size, and stride of the global index, of the dims that rows are counted by, outermost first.
    pub dims: Vec<[u64; 2]>,
}

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::Dropout(it) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    need(call, 1, DType::I32)?;
    let x = &call.args[0];
    let rows = rows(call);
    let vector = vector_length(&[x]);
    let n_rows = elements(x) / rows.n;
    let width = if n_rows == 1 || rows.n.is_multiple_of(vector) { vector } else { 1 };
    let tiles = rows.n.div_ceil(u64::from(BLOCK) * width);
    let function = Function {
        source: "dropout.cu",
        defines: vec![typed("X", x.dtype), sized("WIDTH", width)],
        entry: "dropout",
    };
    // As the reference has them.
    let threshold = (it.rate.0 * 2f64.powi(32)) as u64;
    let scale = if it.rate.0 < 1.0 { 1.0 / (1.0 - it.rate.0) } else { 0.0 };
    let args = vec![
        arg(0),
        arg(1),
        result(0),
        Arg::Pointer(Pointer::Table(0)),
        Arg::I32(rows.dims.len() as i32),
        size(rows.n),
        size(tiles),
        size(rows.first),
        size(it.key),
        size(threshold),
        Arg::F32(scale as f32),
    ];
    let work = launch(function, grid(call, n_rows * tiles)?, BLOCK, args);
    // Never empty, so that the pointer to it is one.
    let one = [[1, 0]];
    let dims = if rows.dims.is_empty() { &one[..] } else { &rows.dims };
    let table = dims.iter().flatten().map(|&it| Word::Value(it)).collect();
    Ok(Program { table, ..program([work]) })
}

/// Dims are joined, from the last on, as long as global indices go on where local ones do.
pub(super) fn rows(call: &OpCall<'_>) -> Rows {
    let (mut first, mut stride) = (0, 1);
    let mut dims: Vec<[u64; 2]> = vec![[1, 1]];
    for (bound, &size) in call.bounds.iter().zip(&call.args[0].shape).rev() {
        let size = size as u64;
        first += bound.start * stride;
        let inner = dims.last_mut().expect("it starts with one");
        match inner[0] * inner[1] == stride {
            true => inner[0] *= size,
            false => dims.push([size, stride]),
        }
        stride *= bound.size;
    }
    let [n, _] = dims.remove(0);
    dims.reverse();
    Rows { first, n, dims }
}

#[cfg(test)]
mod tests {
    use ir::ops::{Dropout, LocalBound};

    use super::*;
    use crate::cuda::Operand;

    /// Global indices of all elements of a shard, in the order in which they lie there.
    #[track_caller]
    fn check(shape: &[usize], bounds: &[[u64; 2]], n_dims: usize, expect: &[u64]) {
        let x = Operand { dtype: DType::F32, shape: shape.into() };
        let bound = |(&[start, size], &extent): (&[u64; 2], &usize)| LocalBound {
            start,
            extent: extent as u64,
            size,
        };
        let bounds: Vec<LocalBound> = bounds.iter().zip(shape).map(bound).collect();
        let op = Op::from(Dropout { rate: 0.5.into(), key: 1 });
        let rows = rows(&OpCall { op: &op, args: &[x], results: &[], bounds: &bounds });
        assert_eq!(rows.dims.len(), n_dims);
        let n_rows: u64 = rows.dims.iter().map(|it| it[0]).product();
        let mut found = Vec::new();
        for row in 0..n_rows {
            let (mut index, mut rest) = (rows.first, row);
            for [size, stride] in rows.dims.iter().rev() {
                index += rest % size * stride;
                rest /= size;
            }
            found.extend((0..rows.n).map(|it| index + it));
        }
        assert_eq!(found, expect);
    }

    #[test]
    fn rows_are_as_long_as_indices_are_neighbours() {
        check(&[], &[], 0, &[0]);
        check(&[2, 3], &[[0, 2], [0, 3]], 0, &[0, 1, 2, 3, 4, 5]);
        check(&[2, 3], &[[4, 6], [0, 3]], 0, &[12, 13, 14, 15, 16, 17]);
        check(&[2, 2], &[[0, 2], [1, 3]], 1, &[1, 2, 4, 5]);
        check(&[2, 1, 2], &[[0, 2], [1, 3], [0, 2]], 1, &[2, 3, 8, 9]);
        check(&[2, 2, 1], &[[0, 2], [1, 4], [1, 2]], 2, &[3, 5, 11, 13]);
    }
}
