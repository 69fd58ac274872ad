//! A matrix cut into blocks that have a scale each.
//!
//! ```text
//! recipe       row copy, along K    column copy, along M    both at once
//! FP8 block    1 x 128              128 x 1                 128 x 128
//! MXFP8        1 x 32               32 x 1                  32 x 32
//! NVFP4        1 x 16               16 x 1                  16 x 16
//! ```
//!
//! Scales are row-major over the grid of blocks, which is the compact layout of TransformerEngine. Blocks
//! at the end may be smaller. Hardware wants the column copies of FP8 blocks and NVFP4 transposed: then
//! [transpose](super::layout::transposed) the matrix and use row blocks, which gives the same numbers.

use crate::quant::scale::amax;
use crate::quant::{Format, scale};

/// Numbers along a side of an FP8 block.
pub const FP8_BLOCK: u64 = 128;

/// A row-major matrix of `rows` x `cols` and the size of its blocks, neither of which is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Rows and columns of a block.
    pub block: [usize; 2],
}

impl Blocks {
    /// Rows and columns of blocks.
    pub fn grid(&self) -> [usize; 2] {
        [self.rows.div_ceil(self.block[0]), self.cols.div_ceil(self.block[1])]
    }

    /// The largest magnitude in each block, without NaN: a maximum over the ranks among which a block is
    /// spread is that of the whole block.
    pub fn amax(&self, x: &[f32]) -> Vec<f32> {
        let [n_rows, n_cols] = self.grid();
        let mut res = vec![0.0f32; n_rows * n_cols];
        self.runs(x.len(), |run, block| res[block] = res[block].max(amax(&x[run])));
        res
    }

    /// Each element times the factor of its block.
    pub fn scaled(&self, x: &[f32], factors: &[f32]) -> Vec<f32> {
        let mut res = x.to_vec();
        self.runs(x.len(), |run, block| res[run].iter_mut().for_each(|it| *it *= factors[block]));
        res
    }

    /// Codes of `x` with a scale for each block.
    pub fn quantize(&self, x: &[f32], scales: &[f32], format: Format) -> Vec<u8> {
        scale::quantize(&self.scaled(x, scales), 1.0, format)
    }

    /// What [`quantize`](Blocks::quantize) keeps, from the inverse scale of each block.
    pub fn dequantize(&self, codes: &[u8], scale_inv: &[f32], format: Format) -> Vec<f32> {
        self.scaled(&scale::dequantize(codes, 1.0, format), scale_inv)
    }

    /// The same scales for `finer` blocks, each of which must lie in one of these: GEMMs of MXFP8 and NVFP4
    /// know row blocks only, also of weights with square blocks.
    pub fn refined<T: Copy>(&self, scales: &[T], finer: [usize; 2]) -> Vec<T> {
        assert!(
            self.block.iter().zip(finer).all(|(block, finer)| block.is_multiple_of(finer)),
            "blocks of {finer:?} do not lie within blocks of {:?}",
            self.block
        );
        let [n_rows, n_cols] = Blocks { block: finer, ..*self }.grid();
        let per_row = self.grid()[1];
        let at = |i: usize, j: usize| {
            (i * finer[0] / self.block[0]) * per_row + j * finer[1] / self.block[1]
        };
        (0..n_rows * n_cols).map(|it| scales[at(it / n_cols, it % n_cols)]).collect()
    }

    /// The elements that are neighbours in memory and in one block, and that block.
    fn runs(&self, len: usize, mut visit: impl FnMut(std::ops::Range<usize>, usize)) {
        assert_eq!(len, self.rows * self.cols, "a matrix of {} x {}", self.rows, self.cols);
        let per_row = self.grid()[1];
        for row in 0..self.rows {
            for (j, start) in (0..self.cols).step_by(self.block[1]).enumerate() {
                let end = self.cols.min(start + self.block[1]);
                let run = row * self.cols + start..row * self.cols + end;
                visit(run, row / self.block[0] * per_row + j);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_at_the_end_are_smaller() {
        let blocks = Blocks { rows: 3, cols: 5, block: [2, 2] };
        let x: Vec<f32> = (0..15).map(|it| -(it as f32)).collect();
        assert_eq!(blocks.amax(&x), [6.0, 8.0, 9.0, 11.0, 13.0, 14.0]);
        let ones = blocks.scaled(&[1.0; 15], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(ones[..5], [1.0, 1.0, 2.0, 2.0, 3.0]);
        assert_eq!(ones[10..], [4.0, 4.0, 5.0, 5.0, 6.0]);
        assert_eq!(blocks.refined(&[1, 2, 3, 4, 5, 6], [1, 2]), [1, 2, 3, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn an_empty_shard_has_no_blocks() {
        let blocks = Blocks { rows: 0, cols: 256, block: [1, 128] };
        assert_eq!(blocks.amax(&[]), [0.0; 0]);
        assert_eq!(Blocks { rows: 4, cols: 0, block: [1, 128] }.scaled(&[], &[]), [0.0; 0]);
    }
}
