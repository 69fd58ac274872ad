//! Copies a box of a strided tensor into a box of a row-major one, in runs that are contiguous in both.

use smallvec::SmallVec;

/// A box within a tensor in memory; all counts are elements.
#[derive(Debug, Clone)]
pub struct View {
    /// Its first element.
    pub start: u64,
    /// Elements from one index to the next, in each dim.
    pub strides: SmallVec<[u64; 4]>,
}

impl View {
    /// A tensor that is stored row-major, whole.
    pub fn row_major(sizes: &[u64]) -> View {
        let mut strides = SmallVec::from_elem(1, sizes.len());
        for dim in (1..sizes.len()).rev() {
            strides[dim - 1] = strides[dim] * sizes[dim].max(1);
        }
        View { start: 0, strides }
    }

    /// The part that starts at these indices.
    pub fn from(&self, offsets: impl IntoIterator<Item = u64>) -> View {
        let start = offsets.into_iter().zip(&self.strides).map(|(at, stride)| at * stride);
        View { start: self.start + start.sum::<u64>(), strides: self.strides.clone() }
    }
}

/// Copies `sizes` elements of `unit` bytes; words of `swap` bytes are turned around (1: none are).
///
/// # Panics
/// If an element of either view is not within its bytes.
pub fn copy(
    sizes: &[u64],
    unit: usize,
    swap: usize,
    (from, source): (&View, &[u8]),
    (to, target): (&View, &mut [u8]),
) {
    if sizes.contains(&0) {
        return;
    }
    // Dims from `outer` on are one run in both.
    let mut run = 1;
    let mut outer = sizes.len();
    while outer > 0 {
        let dim = outer - 1;
        let follows = |it: &View| sizes[dim] == 1 || it.strides[dim] == run;
        if !(follows(from) && follows(to)) {
            break;
        }
        run *= sizes[dim];
        outer = dim;
    }
    let len = run as usize * unit;
    let mut index: SmallVec<[u64; 4]> = SmallVec::from_elem(0, outer);
    let (mut source_at, mut target_at) = (from.start, to.start);
    loop {
        let run = &mut target[target_at as usize * unit..][..len];
        run.copy_from_slice(&source[source_at as usize * unit..][..len]);
        if swap > 1 {
            run.chunks_exact_mut(swap).for_each(<[u8]>::reverse);
        }
        // The next index, as an odometer counts.
        let mut dim = outer;
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            index[dim] += 1;
            source_at += from.strides[dim];
            target_at += to.strides[dim];
            if index[dim] < sizes[dim] {
                break;
            }
            source_at -= from.strides[dim] * sizes[dim];
            target_at -= to.strides[dim] * sizes[dim];
            index[dim] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transposed_box_is_read_row_major() {
        // Elements of f[i, j] = 10 i + j, i < 3, j < 2, stored column by column.
        let source: Vec<u8> =
            [0u16, 10, 20, 1, 11, 21].iter().flat_map(|it| it.to_be_bytes()).collect();
        let from = View { start: 0, strides: SmallVec::from_slice(&[1, 3]) };
        let to = View::row_major(&[4, 3]).from([1, 1]);
        let mut target = vec![0xff; 24];
        copy(&[2, 2], 2, 2, (&from.from([1, 0]), &source), (&to, &mut target));
        let found: Vec<u16> =
            target.chunks(2).map(|it| u16::from_le_bytes([it[0], it[1]])).collect();
        let none = u16::MAX;
        assert_eq!(
            found,
            [[none, none, none], [none, 10, 11], [none, 20, 21], [none, none, none]].concat()
        );
    }
}
