//! Copies a box of a strided tensor into a box of a row-major one, in runs that are contiguous in both.

use std::ops::Range;

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

/// Calls `each` with the bytes that a box of `sizes` elements of `unit` bytes touches: the first, and that behind the
/// last. Gaps of up to `gap` bytes belong to what is around them.
pub fn spans<E>(
    view: &View,
    sizes: &[u64],
    unit: u64,
    gap: u64,
    each: &mut dyn FnMut(Range<u64>) -> Result<(), E>,
) -> Result<(), E> {
    if sizes.contains(&0) {
        return Ok(());
    }
    let last =
        |dims: Range<usize>| -> u64 { dims.map(|dim| (sizes[dim] - 1) * view.strides[dim]).sum() };
    // Up to the last dim with large gaps, each index is on its own.
    let far = |dim: &usize| sizes[*dim] > 1 && view.strides[*dim].saturating_mul(unit) > gap;
    let outer = (0..sizes.len()).rev().find(far).map_or(0, |dim| dim + 1);
    let len = (last(outer..sizes.len()) + 1) * unit;
    let n: u64 = sizes[..outer].iter().product();
    let mut before: Option<Range<u64>> = None;
    for index in 0..n {
        let (mut rest, mut at) = (index, view.start);
        for dim in (0..outer).rev() {
            at += rest % sizes[dim] * view.strides[dim];
            rest /= sizes[dim];
        }
        let span = at * unit..at * unit + len;
        match &mut before {
            Some(it) if it.end <= span.start && span.start - it.end <= gap => it.end = span.end,
            _ => {
                if let Some(it) = before.replace(span) {
                    each(it)?;
                }
            }
        }
    }
    before.map_or(Ok(()), each)
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

    #[track_caller]
    fn check_spans(shape: &[u64], offsets: &[u64], sizes: &[u64], expect: &[(u64, u64)]) {
        let view = View::row_major(shape).from(offsets.iter().copied());
        let mut found = Vec::new();
        let mut each = |it: Range<u64>| -> Result<(), ()> {
            found.push((it.start, it.end));
            Ok(())
        };
        spans(&view, sizes, 2, 100, &mut each).unwrap();
        assert_eq!(found, expect, "{sizes:?} of {shape:?}");
    }

    #[test]
    fn spans_have_what_a_box_touches() {
        check_spans(&[], &[], &[], &[(0, 2)]);
        check_spans(&[4, 5], &[1, 0], &[2, 5], &[(10, 30)]);
        // Columns of short rows with all between them, of long rows without.
        check_spans(&[4, 50], &[1, 3], &[2, 2], &[(106, 210)]);
        check_spans(&[4, 500], &[1, 3], &[2, 2], &[(1006, 1010), (2006, 2010)]);
        check_spans(&[2, 4, 500], &[0, 2, 0], &[2, 2, 500], &[(2000, 4000), (6000, 8000)]);
        check_spans(&[4, 500], &[1, 0], &[0, 500], &[]);
    }

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
