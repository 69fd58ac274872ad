//! Whether boxes make up a tensor: every element in exactly one of them.
//!
//! The number of boxes that hold an element, as a function of its index, is a sum of indicator
//! functions. The mixed difference of an indicator is +1 or -1 at the corners of its box and 0 elsewhere,
//! and a function that is 0 far away is the sum of its mixed difference, so two sums are equal if and
//! only if their corners cancel:
//!
//! ```text
//! [0,2) x [0,3)  =  +1 at (0,0), -1 at (0,3), -1 at (2,0), +1 at (2,3)
//! ```
//!
//! That takes one sort, whatever the boxes are. The first corner that is left over, in row-major order, is
//! the first element that is held too rarely or too often.

use ir::placement::Chunk;

/// Why boxes do not make up a tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The first element that is not in exactly one box.
    #[error("element {index:?} is in {}", boxes(*times))]
    Element {
        /// Its index.
        index: Vec<u64>,
        /// In how many boxes it is.
        times: i64,
    },
    /// More corners than any sharding makes.
    #[error("{boxes} boxes that cut {dims} dims are more than any sharding makes")]
    TooManyCuts {
        /// Boxes.
        boxes: usize,
        /// Dims that some box does not hold whole.
        dims: usize,
    },
}

fn boxes(times: i64) -> String {
    match times {
        0 => "no box".to_string(),
        it => format!("{it} boxes"),
    }
}

/// Corners that any number of boxes may have, and how many more each box may have.
const CORNERS: usize = 1 << 20;
const CORNERS_OF_BOX: usize = 1 << 4;

/// Checks that boxes within a tensor of this shape hold every element once; empty boxes hold nothing.
/// The shape has at most 2^46 elements, where a size of 0 counts as 1.
pub fn check<'a>(shape: &[u64], boxes: impl Iterator<Item = &'a Chunk>) -> Result<(), Fault> {
    if shape.contains(&0) {
        return Ok(());
    }
    let boxes: Vec<&Chunk> = boxes.filter(|it| !it.sizes.contains(&0)).collect();
    // Dims that no box cuts have the same factor in every term.
    let cut: Vec<usize> = (0..shape.len())
        .filter(|&dim| boxes.iter().any(|it| it.sizes[dim] != shape[dim]))
        .collect();
    let n_corners = (boxes.len() + 1).checked_shl(cut.len() as u32).unwrap_or(usize::MAX);
    // With 10 dims at most, positions in the grid fit 64 bits.
    if cut.len() > 10 || n_corners > CORNERS + CORNERS_OF_BOX * boxes.len() {
        return Err(Fault::TooManyCuts { boxes: boxes.len(), dims: cut.len() });
    }
    let mut corners = Vec::with_capacity(n_corners);
    for it in &boxes {
        put_corners(shape, &cut, |dim| (it.offsets[dim], it.sizes[dim]), 1, &mut corners);
    }
    put_corners(shape, &cut, |dim| (0, shape[dim]), -1, &mut corners);
    corners.sort_unstable();
    let left = corners.chunk_by(|a, b| a.0 == b.0).find_map(|it| {
        let sum: i64 = it.iter().map(|it| it.1).sum();
        (sum != 0).then_some((it[0].0, sum))
    });
    let Some((at, excess)) = left else { return Ok(()) };
    let mut index = vec![0; shape.len()];
    let mut rest = at;
    for &dim in cut.iter().rev() {
        index[dim] = rest % (shape[dim] + 1);
        rest /= shape[dim] + 1;
    }
    Err(Fault::Element { index, times: excess + 1 })
}

/// Adds the corners of a box, as positions in a row-major grid of one more than the shape in each dim.
fn put_corners(
    shape: &[u64],
    cut: &[usize],
    bounds: impl Fn(usize) -> (u64, u64),
    sign: i64,
    corners: &mut Vec<(u64, i64)>,
) {
    let start = corners.len();
    corners.push((0, sign));
    for &dim in cut {
        let (offset, size) = bounds(dim);
        let steps = shape[dim] + 1;
        for i in start..corners.len() {
            let (at, sign) = corners[i];
            corners[i] = (at * steps + offset, sign);
            corners.push((at * steps + (offset + size), -sign));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(dims: &[(u64, u64)]) -> Chunk {
        let (offsets, sizes) = dims.iter().copied().unzip();
        let offsets: Vec<u64> = offsets;
        let sizes: Vec<u64> = sizes;
        Chunk { offsets: offsets.into(), sizes: sizes.into() }
    }

    #[track_caller]
    fn check_fault(shape: &[u64], boxes: &[&[(u64, u64)]], expect: Option<(&[u64], i64)>) {
        let boxes: Vec<Chunk> = boxes.iter().map(|it| chunk(it)).collect();
        let expect = expect.map(|(index, times)| Fault::Element { index: index.to_vec(), times });
        assert_eq!(check(shape, boxes.iter()).err(), expect);
    }

    #[test]
    fn every_element_is_in_one_box() {
        check_fault(&[], &[&[]], None);
        check_fault(&[], &[], Some((&[], 0)));
        check_fault(&[], &[&[], &[]], Some((&[], 2)));
        check_fault(&[3], &[], Some((&[0], 0)));
        check_fault(&[0, 4], &[], None);
        check_fault(&[6, 2], &[&[(0, 3), (0, 2)], &[(3, 3), (0, 2)], &[(6, 0), (0, 2)]], None);
        check_fault(&[6, 2], &[&[(0, 3), (0, 2)], &[(4, 2), (0, 2)]], Some((&[3, 0], 0)));
        check_fault(&[6, 2], &[&[(0, 3), (0, 2)], &[(2, 4), (0, 2)]], Some((&[2, 0], 2)));
        check_fault(&[6, 2], &[&[(0, 6), (0, 2)], &[(2, 1), (1, 1)]], Some((&[2, 1], 2)));
        // A hole as large as what is held twice.
        check_fault(&[4], &[&[(0, 2)], &[(1, 2)]], Some((&[1], 2)));
        // Five boxes that no straight cut takes apart.
        let pinwheel: &[&[(u64, u64)]] = &[
            &[(0, 1), (0, 2)],
            &[(0, 2), (2, 1)],
            &[(1, 2), (0, 1)],
            &[(2, 1), (1, 2)],
            &[(1, 1), (1, 1)],
        ];
        check_fault(&[3, 3], pinwheel, None);
        check_fault(&[3, 3], &pinwheel[..4], Some((&[1, 1], 0)));
    }

    proptest::proptest! {
        /// Against a count of every element.
        #[test]
        fn faults_are_those_of_counting(
            shape in proptest::collection::vec(1u64..5, 0..4),
            seeds in proptest::collection::vec(proptest::collection::vec((0u64..5, 0u64..5), 3), 0..5),
        ) {
            let boxes: Vec<Chunk> = seeds
                .iter()
                .map(|seed| {
                    let dims = shape.iter().zip(seed).map(|(&size, &(a, b))| {
                        let offset = a.min(size);
                        (offset, b.min(size - offset))
                    });
                    chunk(&dims.collect::<Vec<_>>())
                })
                .collect();
            let n: u64 = shape.iter().product();
            let fault = (0..n).find_map(|at| {
                let mut rest = at;
                let mut index = vec![0; shape.len()];
                for dim in (0..shape.len()).rev() {
                    index[dim] = rest % shape[dim];
                    rest /= shape[dim];
                }
                let times = boxes
                    .iter()
                    .filter(|it| {
                        let dims = index.iter().zip(it.offsets.iter().zip(&it.sizes));
                        dims.clone().all(|(&i, (&offset, &size))| i >= offset && i < offset + size)
                    })
                    .count() as i64;
                (times != 1).then_some(Fault::Element { index, times })
            });
            proptest::prop_assert_eq!(check(&shape, boxes.iter()).err(), fault);
        }
    }
}
