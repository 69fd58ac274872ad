//! Boxes: parts of row-major tensors that are copied to parts of others, many in one launch.

use ir::placement::CopyRuns;
use smallvec::SmallVec;

use crate::cuda::launch::{BLOCK, blocks, launch};
use crate::cuda::{Arg, Function, Pointer, Program, Word};

/// Words of a box in a table; see `boxes.cu`.
pub(super) const BOX_WORDS: usize = 14;

/// Dimensions that the kernel knows.
const DIMS: usize = 4;

/// What is copied at a time, in bytes.
const UNITS: [u64; 5] = [16, 8, 4, 2, 1];

/// The most units of a box: the kernel counts them in 32 bits.
const UNITS_MAX: u64 = 1 << 31;

/// A box in elements: where it starts on both sides, and its dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CopyBox {
    /// First element in the source.
    pub from: u64,
    /// First element in the destination.
    pub to: u64,
    /// Size and strides in source and destination, outermost first. The last one's strides are 1.
    pub dims: SmallVec<[(u64, u64, u64); 4]>,
}

/// A box between two buffers, in bytes.
#[derive(Debug, Clone)]
struct ByteBox {
    from: (Pointer, u64),
    to: (Pointer, u64),
    /// As [`CopyBox::dims`], in bytes, but the sizes of all dims except the last, which count entries.
    dims: SmallVec<[(u64, u64, u64); 4]>,
}

/// Boxes that one program copies, in launches of boxes with a common unit.
#[derive(Debug, Default)]
pub(super) struct Boxes(Vec<ByteBox>);

/// The boxes that `runs` names, one entry per dimension, as few as can be.
///
/// Shapes are those of the buffers.
pub(super) fn copy_boxes(from: &[u64], to: &[u64], runs: &[CopyRuns]) -> Vec<CopyBox> {
    let mut res = vec![CopyBox { from: 0, to: 0, dims: SmallVec::new() }];
    for (dim, runs) in runs.iter().enumerate() {
        let stride = |shape: &[u64]| shape[dim + 1..].iter().product::<u64>();
        let (from, to) = (stride(from), stride(to));
        let runs = merged(runs);
        let next = res.iter().flat_map(|it| {
            runs.iter().map(move |&(s, d, len)| {
                let mut dims = it.dims.clone();
                dims.push((len, from, to));
                CopyBox { from: it.from + s * from, to: it.to + d * to, dims }
            })
        });
        res = next.collect();
    }
    res.iter_mut().for_each(CopyBox::flatten);
    res
}

/// Joins runs that continue on both sides.
fn merged(runs: &CopyRuns) -> CopyRuns {
    let mut res = CopyRuns::new();
    for &(s, d, len) in runs {
        match res.last_mut() {
            Some(last) if last.0 + last.2 == s && last.1 + last.2 == d => last.2 += len,
            _ => res.push((s, d, len)),
        }
    }
    res
}

impl CopyBox {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|it| it.0).product()
    }

    /// Whether it is one stretch on both sides.
    pub fn is_contiguous(&self) -> bool {
        self.dims.len() == 1
    }

    /// Joins dimensions that are one on both sides.
    fn flatten(&mut self) {
        let mut dims: SmallVec<[(u64, u64, u64); 4]> = SmallVec::new();
        for &(size, from, to) in self.dims.iter().filter(|it| it.0 != 1) {
            match dims.last_mut() {
                Some(last) if last.1 == size * from && last.2 == size * to => {
                    *last = (last.0 * size, from, to);
                }
                _ => dims.push((size, from, to)),
            }
        }
        if dims.last().is_none_or(|it| (it.1, it.2) != (1, 1)) {
            dims.push((1, 1, 1));
        }
        self.dims = dims;
    }
}

impl ByteBox {
    /// The largest unit that all its sizes are multiples of.
    fn unit(&self) -> u64 {
        let inner = self.dims.last().map_or(0, |it| it.0);
        let outer = self.dims.iter().rev().skip(1).fold(0, |bits, it| bits | it.1 | it.2);
        let bits = self.from.1 | self.to.1 | inner | outer;
        UNITS.into_iter().find(|it| bits.is_multiple_of(*it)).unwrap_or(1)
    }

    /// Bytes.
    fn bytes(&self) -> u64 {
        self.dims.iter().map(|it| it.0).product()
    }

    /// Parts that the kernel takes: of few dimensions, and not too large.
    fn parts(self, unit: u64, res: &mut Vec<ByteBox>) {
        if self.dims.len() <= DIMS && self.bytes() / unit < UNITS_MAX {
            return res.push(self);
        }
        let (size, from, to) = self.dims[0];
        let inner = self.dims.len() == 1;
        // The innermost is counted in bytes, and cut between units.
        let half = if inner { size / 2 / unit * unit } else { size / 2 };
        let cut = |start: u64, size: u64| {
            let mut part = self.clone();
            part.from.1 += start * from;
            part.to.1 += start * to;
            if size == 1 && !inner {
                part.dims.remove(0);
            } else {
                part.dims[0].0 = size;
            }
            part
        };
        cut(0, half).parts(unit, res);
        cut(half, size - half).parts(unit, res);
    }
}

impl Boxes {
    /// Adds a box of elements of `size` bytes, between places given in bytes.
    pub fn push(&mut self, from: (Pointer, u64), to: (Pointer, u64), it: &CopyBox, size: u64) {
        if it.elements() == 0 {
            return;
        }
        let last = it.dims.len() - 1;
        let dims = it.dims.iter().enumerate().map(|(i, &(n, from, to))| match i == last {
            true => (n * size, 1, 1),
            false => (n, from * size, to * size),
        });
        self.0.push(ByteBox {
            from: (from.0, from.1 + it.from * size),
            to: (to.0, to.1 + it.to * size),
            dims: dims.collect(),
        });
    }

    /// Adds the launches to a program.
    pub fn finish(self, program: &mut Program) {
        for unit in UNITS {
            let mut parts = Vec::new();
            for it in self.0.iter().filter(|it| it.unit() == unit) {
                it.clone().parts(unit, &mut parts);
            }
            if !parts.is_empty() {
                add_launch(&parts, unit, program);
            }
        }
    }
}

/// What copies boxes, for each unit.
pub fn functions() -> [Function; 5] {
    UNITS.map(function)
}

fn function(unit: u64) -> Function {
    let vector = match unit {
        16 => "V=uint4",
        8 => "V=uint2",
        4 => "V=u32",
        2 => "V=u16",
        _ => "V=u8",
    };
    Function { source: "boxes.cu", defines: vec![vector.to_string()], entry: "copy_boxes" }
}

fn add_launch(parts: &[ByteBox], unit: u64, program: &mut Program) {
    let start = program.table.len() as u32;
    let mut units = 0;
    for part in parts {
        program.table.extend(words(part, unit, units));
        units += part.bytes() / unit;
    }
    let args = vec![
        Arg::Pointer(Pointer::Table(start)),
        Arg::I32(parts.len() as i32),
        Arg::I64(units as i64),
    ];
    program.work.push(launch(function(unit), [blocks(units, BLOCK.into()), 1, 1], BLOCK, args));
}

/// See `Box` in `boxes.cu`.
fn words(it: &ByteBox, unit: u64, first: u64) -> [Word; BOX_WORDS] {
    let missing = DIMS - it.dims.len();
    // Missing dimensions are outermost, of one entry.
    let dim = |i: usize| match i.checked_sub(missing) {
        Some(i) => it.dims[i],
        None => (1, 0, 0),
    };
    let value = Word::Value;
    [
        Word::Pointer(it.from.0),
        Word::Pointer(it.to.0),
        value(it.from.1 / unit),
        value(it.to.1 / unit),
        value(first),
        value(dim(1).0),
        value(dim(2).0),
        value(dim(3).0 / unit),
        value(dim(0).1 / unit),
        value(dim(1).1 / unit),
        value(dim(2).1 / unit),
        value(dim(0).2 / unit),
        value(dim(1).2 / unit),
        value(dim(2).2 / unit),
    ]
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn dimensions_that_are_one_on_both_sides_are_joined() {
        // Rows 2 .. 4 of [6, 5, 3], whole otherwise, to rows 0 .. 2 of [2, 5, 3].
        let runs = [smallvec![(2, 0, 2)], smallvec![(0, 0, 5)], smallvec![(0, 0, 3)]];
        let boxes = copy_boxes(&[6, 5, 3], &[2, 5, 3], &runs);
        assert_eq!(boxes, [CopyBox { from: 30, to: 0, dims: smallvec![(30, 1, 1)] }]);
        assert!(boxes[0].is_contiguous());
        // One column: the last dimension has one entry.
        let runs = [smallvec![(0, 0, 4)], smallvec![(2, 0, 1)]];
        let boxes = copy_boxes(&[4, 3], &[4, 1], &runs);
        assert_eq!(boxes, [CopyBox { from: 2, to: 0, dims: smallvec![(4, 3, 1), (1, 1, 1)] }]);
    }

    #[test]
    fn runs_that_continue_are_joined() {
        let runs = [smallvec![(0, 0, 2), (2, 2, 2), (6, 4, 2)]];
        let boxes = copy_boxes(&[8], &[6], &runs);
        let expect = [(0, 0, 4), (6, 4, 2)].map(|(from, to, n)| CopyBox {
            from,
            to,
            dims: smallvec![(n, 1, 1)],
        });
        assert_eq!(boxes, expect);
    }

    #[test]
    fn the_unit_divides_all_that_is_counted_in_it() {
        let unit = |from: u64, inner: u64, stride: u64| {
            let place = |at| (Pointer::Arg(0), at);
            let dims = smallvec![(3, stride, 64), (inner, 1, 1)];
            ByteBox { from: place(from), to: place(0), dims }.unit()
        };
        assert_eq!(unit(32, 16, 48), 16);
        assert_eq!(unit(8, 16, 48), 8);
        assert_eq!(unit(32, 4, 48), 4);
        assert_eq!(unit(32, 16, 6), 2);
        assert_eq!(unit(32, 16, 7), 1);
    }

    /// Of 6 dimensions, or of more units than 32 bits count.
    #[test]
    fn large_boxes_are_cut() {
        let place = (Pointer::Arg(0), 0);
        let cut = |dims| {
            let mut parts = Vec::new();
            ByteBox { from: place, to: place, dims }.parts(2, &mut parts);
            parts
        };
        let six = cut(smallvec![
            (2, 1000, 1),
            (3, 300, 2),
            (2, 100, 3),
            (2, 30, 4),
            (2, 10, 5),
            (4, 1, 1)
        ]);
        assert_eq!(six.len(), 6);
        assert!(six.iter().all(|it| it.bytes() == 32 && it.dims.len() == 4));
        assert_eq!(six[5].from.1, 1000 + 2 * 300);
        let long = cut(smallvec![(10 << 30, 1, 1)]);
        assert_eq!(long.iter().map(ByteBox::bytes).sum::<u64>(), 10 << 30);
        assert!(long.iter().all(|it| it.bytes() / 2 < UNITS_MAX && it.from.1 == it.to.1));
        for (a, b) in long.iter().zip(&long[1..]) {
            assert_eq!(a.from.1 + a.bytes(), b.from.1);
        }
    }
}
