//! Where the scales of pieces are, for kernels: `PieceDim` of `pieces.cuh`.

use crate::cuda::Word;

/// How the position of an element decides along one dimension: entry `element / stride % size` is in piece
/// number `/ part` of `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceDim {
    pub stride: u64,
    pub size: u64,
    pub part: u64,
    pub n: u64,
}

/// All dimensions of a tensor, of which `in_pieces` have as many pieces as the scale's dimensions have
/// entries.
pub(super) fn dims(shape: &[usize], scale: &[usize], in_pieces: &[usize]) -> Vec<PieceDim> {
    let dim = |dim: usize| {
        let piece = in_pieces.iter().position(|&it| it == dim);
        let size = shape[dim] as u64;
        let n = piece.map_or(1, |it| scale[it] as u64);
        let stride = shape[dim + 1..].iter().map(|&it| it as u64).product();
        PieceDim { stride, size, part: size / n, n }
    };
    (0..shape.len()).map(dim).collect()
}

/// Their words in a table.
pub(super) fn words(dims: &[PieceDim]) -> impl Iterator<Item = Word> {
    dims.iter().flat_map(|it| [it.stride, it.size, it.part, it.n].map(Word::Value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scale `[2, 4]` of `[4, 2, 8]` with pieces along dims 0 and 2.
    #[test]
    fn an_element_is_in_a_piece_along_each_dim() {
        let dims = dims(&[4, 2, 8], &[2, 4], &[0, 2]);
        let piece = |element: u64| {
            dims.iter().fold(0, |res, it| res * it.n + element / it.stride % it.size / it.part)
        };
        assert_eq!([0, 1, 2, 7, 8, 16, 32, 63].map(piece), [0, 0, 1, 3, 0, 0, 4, 7]);
    }
}
