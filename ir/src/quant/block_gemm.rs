//! The GEMM of operands with a scale for each 128 elements of `K`, as Hopper computes it.
//!
//! Tensor cores sum 128 products, then the sum is scaled and added in f32: scales differ from block to
//! block and cannot wait for the end. Source: `tests/pytorch/references/blockwise_fp8_gemm_reference.py`
//! of TransformerEngine 2.20, which agrees with cuBLAS.

use crate::quant::blocks::{Blocks, FP8_BLOCK};

/// A matrix whose columns are contracted, in blocks of 1 x 128 or 128 x 128.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Decoded codes, row-major.
    pub numbers: &'a [f32],
    /// Inverse scales, compact.
    pub scale_inv: &'a [f32],
    /// Sizes of the matrix and of its blocks.
    pub blocks: Blocks,
}

/// Columns of a block.
const DEPTH: usize = FP8_BLOCK as usize;

/// `a bᵀ`, of `[m, k]` and `[n, k]`; at most one has square blocks. The sum over a block of `K`, which
/// hardware adds in an order of its own, is taken in f64 and rounded to f32.
pub fn block_gemm(a: &Operand, b: &Operand) -> Vec<f32> {
    let (m, n, k) = (a.blocks.rows, b.blocks.rows, a.blocks.cols);
    assert_eq!(b.blocks.cols, k, "both operands are contracted over their columns");
    assert!([a, b].iter().all(|it| it.blocks.block[1] == DEPTH), "blocks hold {DEPTH} columns");
    let mut res = vec![0.0f32; m * n];
    for (at, y) in res.iter_mut().enumerate() {
        let (i, j) = (at / n, at % n);
        for block in 0..k.div_ceil(DEPTH) {
            let (x, x_scale) = a.block(i, block);
            let (w, w_scale) = b.block(j, block);
            // Exact for two operands of E4M3.
            let sum: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let sum = sum as f32;
            // The operand with square blocks comes last.
            *y = match a.blocks.block[0] {
                1 => (sum * x_scale).mul_add(w_scale, *y),
                _ => (sum * w_scale).mul_add(x_scale, *y),
            };
        }
    }
    res
}

impl Operand<'_> {
    /// The elements of a row that are in a block of columns, and their inverse scale.
    fn block(&self, row: usize, block: usize) -> (&[f32], f32) {
        let Blocks { cols, block: [height, _], .. } = self.blocks;
        let row_of = &self.numbers[row * cols..][..cols];
        let numbers = &row_of[block * DEPTH..cols.min((block + 1) * DEPTH)];
        (numbers, self.scale_inv[row / height * self.blocks.grid()[1] + block])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits are those of exact rationals rounded after each operation.
    #[test]
    fn the_operand_with_square_blocks_is_scaled_last() {
        #[track_caller]
        fn check(heights: [usize; 2], bits: u32) {
            let blocks = heights.map(|it| Blocks { rows: 1, cols: 128, block: [it, 128] });
            let (mut seven, one) = ([0.0; 128], [1.0; 128]);
            seven[5] = 7.0;
            let a = Operand { numbers: &seven, scale_inv: &[0.1], blocks: blocks[0] };
            let b = Operand { numbers: &one, scale_inv: &[0.3], blocks: blocks[1] };
            assert_eq!(block_gemm(&a, &b)[0].to_bits(), bits, "{heights:?}");
        }
        check([1, 1], 0x3e57_0a3e);
        check([1, 128], 0x3e57_0a3e);
        check([128, 1], 0x3e57_0a3f);
    }
}
