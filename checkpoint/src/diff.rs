//! [`diff`]: what two checkpoints do not have in common, however each of them is cut.

use ir::placement::Chunk;

use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::metadata::StoredTensor;
use crate::open::{Checkpoint, whole};
use crate::save::{DATA, DIGESTS};

/// What differs; nothing, if the checkpoints say the same.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Diff {
    /// Keys of the first only.
    pub only_first: Vec<String>,
    /// Keys of the second only.
    pub only_second: Vec<String>,
    /// What has the same key and differs, by key.
    pub changed: Vec<(String, Change)>,
    /// Keys of which both have the same.
    pub n_same: u64,
}

/// How two values of one key differ.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// One is a tensor and one an object.
    Kind,
    /// Tensors of other sizes.
    Shape(Vec<u64>, Vec<u64>),
    /// Tensors of other types or values.
    Values {
        /// Both types.
        dtypes: (StoredType, StoredType),
        /// How many elements differ; for different types, in value.
        n_differ: u64,
        /// How many there are.
        n_elements: u64,
        /// The largest difference of two numbers; 0 where none differ as numbers, infinite where only
        /// one is finite, and NaN where only one is a number.
        largest: f64,
        /// The first element that differs.
        first: Option<Vec<u64>>,
    },
    /// Objects, as Python prints them.
    Object(String, String),
}

impl Diff {
    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.only_first.is_empty() && self.only_second.is_empty() && self.changed.is_empty()
    }
}

/// Bytes of a tensor that are read at a time.
const BLOCK: u64 = 16 << 20;

/// Compares what `wanted` keys stand for.
///
/// # Errors
/// If something that both have cannot be read.
pub fn diff(
    first: &Checkpoint,
    second: &Checkpoint,
    wanted: impl Fn(&str) -> bool,
) -> Result<Diff, CheckpointError> {
    let mut res = Diff::default();
    for key in keys(first).filter(|it| wanted(it)) {
        let change = match (first.tensor(key), second.tensor(key)) {
            (Some(a), Some(b)) if a.shape != b.shape => {
                Some(Change::Shape(a.shape.clone(), b.shape.clone()))
            }
            (Some(a), Some(b)) => values(key, (first, a), (second, b))?,
            (None, None) if second.stored_object(key).is_some() => {
                let (a, b) = (first.object(key)?, second.object(key)?);
                (a != b).then(|| Change::Object(a.to_string(), b.to_string()))
            }
            (None, None) => {
                res.only_first.push(key.to_string());
                continue;
            }
            (Some(_), None) if second.stored_object(key).is_none() => {
                res.only_first.push(key.to_string());
                continue;
            }
            (Some(_), None) | (None, Some(_)) => Some(Change::Kind),
        };
        match change {
            Some(it) => res.changed.push((key.to_string(), it)),
            None => res.n_same += 1,
        }
    }
    let is_new = |it: &&str| first.tensor(it).is_none() && first.stored_object(it).is_none();
    let new = keys(second).filter(|it| wanted(it)).filter(is_new);
    res.only_second = new.map(str::to_string).collect();
    res.changed.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(res)
}

fn keys(it: &Checkpoint) -> impl Iterator<Item = &str> {
    let objects = it.objects().filter(|it| !it.starts_with(DIGESTS) && *it != DATA);
    it.tensors().map(|it| it.0).chain(objects)
}

/// How two tensors of one shape differ in type and values.
fn values(
    key: &str,
    first: (&Checkpoint, &StoredTensor),
    second: (&Checkpoint, &StoredTensor),
) -> Result<Option<Change>, CheckpointError> {
    let shape = &first.1.shape;
    let dtypes = (first.1.dtype, second.1.dtype);
    let mut counts = Counts::default();
    let mut buffers = (Vec::new(), Vec::new());
    for block in blocks(shape, dtypes.0.bytes().max(dtypes.1.bytes())) {
        let n: u64 = block.sizes.iter().product();
        for ((checkpoint, tensor), out) in [(first, &mut buffers.0), (second, &mut buffers.1)] {
            out.resize((n * tensor.dtype.bytes()) as usize, 0);
            checkpoint.read(key, &block, out)?;
        }
        if dtypes.0 == dtypes.1 && buffers.0 == buffers.1 {
            continue;
        }
        let before = counts.n_differ;
        let at = counts.compare(dtypes, &buffers.0, &buffers.1);
        if let (0, Some(at)) = (before, at) {
            counts.first = Some(index_in(&block, at));
        }
    }
    let Counts { n_differ, largest, first: at } = counts;
    let n_elements = first.1.n_elements();
    let same = n_differ == 0 && dtypes.0 == dtypes.1;
    Ok((!same).then_some(Change::Values { dtypes, n_differ, n_elements, largest, first: at }))
}

/// Boxes in row-major order of some [`BLOCK`] bytes, which make up a tensor.
pub(crate) fn blocks(shape: &[u64], unit: u64) -> impl Iterator<Item = Chunk> {
    // The dim in which blocks are cut: what is inside of one of its indices fits a block.
    let mut inside = unit;
    let mut dim = shape.len();
    while dim > 0 && inside.saturating_mul(shape[dim - 1]) <= BLOCK {
        inside *= shape[dim - 1];
        dim -= 1;
    }
    let all = whole(shape);
    let (outer, step, n_steps) = match dim.checked_sub(1) {
        None => (1, 0, 1),
        Some(cut) => {
            let step = (BLOCK / inside.max(1)).max(1);
            (shape[..cut].iter().product(), step, shape[cut].div_ceil(step))
        }
    };
    let shape = shape.to_vec();
    (0..outer * n_steps).map(move |it| {
        let mut chunk = all.clone();
        let Some(cut) = dim.checked_sub(1) else { return chunk };
        let start = it % n_steps * step;
        chunk.offsets[cut] = start;
        chunk.sizes[cut] = step.min(shape[cut] - start);
        let mut rest = it / n_steps;
        for dim in (0..cut).rev() {
            chunk.offsets[dim] = rest % shape[dim];
            chunk.sizes[dim] = 1;
            rest /= shape[dim];
        }
        chunk
    })
}

/// The index in the tensor of the `at`-th element of a box.
fn index_in(block: &Chunk, at: u64) -> Vec<u64> {
    let mut res = block.offsets.to_vec();
    let mut rest = at;
    for dim in (0..res.len()).rev() {
        res[dim] += rest % block.sizes[dim];
        rest /= block.sizes[dim];
    }
    res
}

#[derive(Default)]
struct Counts {
    n_differ: u64,
    largest: f64,
    first: Option<Vec<u64>>,
}

impl Counts {
    /// Compares elements; the first that differs.
    fn compare(&mut self, dtypes: (StoredType, StoredType), a: &[u8], b: &[u8]) -> Option<u64> {
        let mut first = None;
        let units = (dtypes.0.bytes() as usize, dtypes.1.bytes() as usize);
        for (i, (a, b)) in a.chunks(units.0).zip(b.chunks(units.1)).enumerate() {
            if dtypes.0 == dtypes.1 && a == b {
                continue;
            }
            let (x, y) = (dtypes.0.numbers(a), dtypes.1.numbers(b));
            let same = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
            if dtypes.0 != dtypes.1 && same(x[0], y[0]) && same(x[1], y[1]) {
                continue;
            }
            self.n_differ += 1;
            first.get_or_insert(i as u64);
            for (x, y) in x.into_iter().zip(y) {
                let difference = if x == y { 0.0 } else { (x - y).abs() };
                // A NaN stays the largest, whatever it is compared with.
                if self.largest < difference || difference.is_nan() {
                    self.largest = difference;
                }
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_make_up_the_tensor() {
        for (shape, n) in [
            (&[][..], 1),
            (&[0, 3], 1),
            (&[5], 1),
            (&[3 << 20, 2], 2),
            (&[2, 5 << 20], 4),
            (&[2, 3, 4 << 20], 6),
        ] {
            let all: Vec<Chunk> = blocks(shape, 4).collect();
            assert_eq!(all.len(), n, "{shape:?}");
            assert_eq!(crate::cover::check(shape, all.iter()), Ok(()), "{shape:?}");
            assert!(all.iter().all(|it| it.sizes.iter().product::<u64>() * 4 <= BLOCK));
        }
    }
}
