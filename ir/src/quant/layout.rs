//! How GEMMs want the scales of blocks laid out. What is added to fill up is zero.
//!
//! ```text
//!                             compact              for a GEMM
//! FP8, 1 x 128                [M, K/128]           [K/128, M to 4], transposed
//! FP8, 128 x 128              [M/128, K/128]       [M/128, K/128 to 4]
//! MXFP8, 1 x 32; NVFP4        [M, K/32]            [M to 128, K/32 to 4], swizzled
//! MXFP8, 32 x 1               [M/32, K]            swizzled after it is transposed
//! ```
//!
//! The column copies of FP8 blocks and NVFP4 are row copies of the transposed matrix. Swizzled scales
//! cannot be cut or joined, so collectives move the compact ones. Source: NVIDIA's cuBLAS documentation,
//! "1D Block Scaling Factors Layout", and `common/swizzle/swizzle.cu` of TransformerEngine 2.20.

/// A matrix of `rows` x `cols` with its dimensions exchanged.
pub fn transposed<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..rows * cols).map(|it| x[it % rows * cols + it / rows]).collect()
}

/// Scales of 1 x 128 blocks for a GEMM of FP8, from the compact matrix of `rows` x `cols`.
pub fn row_blocks(scales: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    padded(&transposed(scales, rows, cols), [cols, rows], [1, 4])
}

/// Scales of 128 x 128 blocks for a GEMM of FP8, from the compact matrix of `rows` x `cols`.
pub fn square_blocks(scales: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    padded(scales, [rows, cols], [1, 4])
}

/// Codes of scales for a GEMM of MXFP8 or NVFP4, from the compact matrix of `rows` x `cols`: tiles of
/// 128 x 4 in row-major order, each in 512 neighbouring bytes.
pub fn swizzled(scales: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let padded = padded(scales, [rows, cols], TILE);
    let padded_cols = cols.next_multiple_of(TILE[1]);
    let mut res = vec![0; padded.len()];
    for (at, &scale) in padded.iter().enumerate() {
        res[place(at / padded_cols, at % padded_cols, padded_cols)] = scale;
    }
    res
}

/// The opposite of [`swizzled`]; `rows` and `cols` are those of the compact matrix.
pub fn unswizzled(scales: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let padded_cols = cols.next_multiple_of(TILE[1]);
    (0..rows * cols).map(|it| scales[place(it / cols, it % cols, padded_cols)]).collect()
}

const TILE: [usize; 2] = [128, 4];

/// Where the scale at a row and column of the padded matrix is stored. In a tile rows 0, 32, 64 and 96 are
/// neighbours, four columns each; then rows 1, 33, 65, 97.
fn place(row: usize, col: usize, padded_cols: usize) -> usize {
    let tile = row / TILE[0] * (padded_cols / TILE[1]) + col / TILE[1];
    let (row, col) = (row % TILE[0], col % TILE[1]);
    tile * TILE[0] * TILE[1] + row % 32 * 16 + row / 32 * 4 + col
}

/// Zeros appended to rows and columns, up to the next `multiple`.
fn padded<T: Copy + Default>(x: &[T], size: [usize; 2], multiple: [usize; 2]) -> Vec<T> {
    let [rows, cols] = [0, 1].map(|it: usize| size[it].next_multiple_of(multiple[it]));
    let mut res = vec![T::default(); rows * cols];
    for row in 0..size[0] {
        res[row * cols..][..size[1]].copy_from_slice(&x[row * size[1]..][..size[1]]);
    }
    res
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn unswizzling_restores_the_compact_scales(rows in 1..300usize, cols in 1..20usize) {
            let scales: Vec<u8> = (0..rows * cols).map(|it| (it % 251) as u8).collect();
            prop_assert_eq!(unswizzled(&swizzled(&scales, rows, cols), rows, cols), scales);
        }
    }
}
