//! The rows of a fused tensor: which are whose, and how they are read.
//!
//! See [`mapping`](crate::mapping) for how segments lie in a tensor.

use ir::placement::Chunk;
use smallvec::{SmallVec, smallvec};

use super::convert::convert;
use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::open::Checkpoint;

/// What is read at once.
const BAND: u64 = 16 << 20;

/// How parameters lie in a foreign tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fused {
    /// Rows of each parameter, in order.
    pub rows: Vec<u64>,
    /// In how many blocks they are; divides all of them.
    pub blocks: u64,
    /// The foreign tensor is stored with rows and columns exchanged.
    pub transpose: bool,
}

/// Rows that lie together on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first in the foreign tensor.
    pub foreign: u64,
    /// The first in the parameter.
    pub param: u64,
    /// How many.
    pub rows: u64,
}

impl Fused {
    /// The runs of a parameter.
    pub fn runs(&self, part: usize) -> impl Iterator<Item = Run> {
        let blocks = self.blocks;
        let rows = self.rows[part] / blocks;
        let block: u64 = self.rows.iter().map(|it| it / blocks).sum();
        let before: u64 = self.rows[..part].iter().map(|it| it / blocks).sum();
        let run = move |i| Run { foreign: i * block + before, param: i * rows, rows };
        // Alone, its rows lie as in the foreign tensor.
        let whole =
            (self.rows.len() == 1).then_some(Run { foreign: 0, param: 0, rows: self.rows[0] });
        let n = if whole.is_some() { 0 } else { blocks };
        whole.into_iter().chain((0..n).map(run))
    }

    fn total(&self) -> u64 {
        self.rows.iter().sum()
    }
}

/// Reads the rows of parameter `part` out of the tensor `key` into `out`, which is the parameter, as `to`.
///
/// # Errors
/// Returns the errors of [`Checkpoint::read`].
///
/// # Panics
/// If the tensor has not the shape that `fused` says.
pub fn read_param(
    source: &Checkpoint,
    key: &str,
    (fused, part): (&Fused, usize),
    to: StoredType,
    out: &mut [u8],
) -> Result<(), CheckpointError> {
    let mut reader = Reader::new(source, key, to);
    if reader.shape.is_empty() {
        return reader.read(Chunk::default(), |band| {
            out.copy_from_slice(band);
            Ok(())
        });
    }
    let unit = to.bytes() as usize;
    for run in fused.runs(part) {
        if fused.transpose {
            let columns = reader.shape[0];
            for (at, len) in bands(columns, run.rows * reader.unit()) {
                let chunk = boxed(&[at, run.foreign], &[len, run.rows]);
                reader.read(chunk, |band| {
                    scatter(band, [len, run.rows], unit, out, columns, [run.param, at]);
                    Ok(())
                })?;
            }
        } else {
            reader.rows(run.foreign, run.param, run.rows, out)?;
        }
    }
    Ok(())
}

/// Reads the tensors `keys`, which are parameters, as the foreign tensor in the type `to`, and gives `put` its bytes in
/// their order, some `BAND` at a time.
///
/// # Errors
/// Returns the errors of [`Checkpoint::read`] and of `put`.
///
/// # Panics
/// If a parameter has not the shape that `fused` says.
pub fn read_fused(
    source: &Checkpoint,
    keys: &[String],
    fused: &Fused,
    to: StoredType,
    put: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut readers: Vec<Reader<'_>> = keys.iter().map(|it| Reader::new(source, it, to)).collect();
    if readers[0].shape.is_empty() {
        return readers[0].read(Chunk::default(), put);
    }
    if !fused.transpose {
        let runs = (0..keys.len()).flat_map(|part| fused.runs(part).map(move |it| (part, it)));
        let mut runs: Vec<(usize, Run)> = runs.collect();
        runs.sort_by_key(|it| it.1.foreign);
        return runs.into_iter().try_for_each(|(part, run)| {
            readers[part].bands(run.param, run.rows, |_, band| put(band))
        });
    }
    let (unit, total, columns) = (to.bytes() as usize, fused.total(), readers[0].shape[1]);
    let mut out = Vec::new();
    for (at, len) in bands(columns, total * readers[0].unit()) {
        out.resize((len * total) as usize * unit, 0);
        for (part, reader) in readers.iter_mut().enumerate() {
            for run in fused.runs(part) {
                reader.read(boxed(&[run.param, at], &[run.rows, len]), |band| {
                    scatter(band, [run.rows, len], unit, &mut out, total, [0, run.foreign]);
                    Ok(())
                })?;
            }
        }
        put(&out)?;
    }
    Ok(())
}

/// Writes the transpose of `band`, rows by columns, into a matrix of `stride` columns, at `[row, column]`.
fn scatter(
    band: &[u8],
    [rows, columns]: [u64; 2],
    unit: usize,
    out: &mut [u8],
    stride: u64,
    [row, column]: [u64; 2],
) {
    let (rows, columns, stride) = (rows as usize, columns as usize, stride as usize);
    for c in 0..columns {
        let start = (row as usize + c) * stride + column as usize;
        let to = out[start * unit..(start + rows) * unit].chunks_exact_mut(unit);
        for (r, to) in to.enumerate() {
            to.copy_from_slice(&band[(r * columns + c) * unit..][..unit]);
        }
    }
}

fn boxed(offsets: &[u64], sizes: &[u64]) -> Chunk {
    Chunk { offsets: SmallVec::from_slice(offsets), sizes: SmallVec::from_slice(sizes) }
}

/// Parts of `n` rows, of about [`BAND`] bytes each: first and how many.
fn bands(n: u64, row_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = (BAND / row_bytes.max(1)).max(1);
    (0..n.div_ceil(step)).map(move |i| (i * step, step.min(n - i * step)))
}

/// Reads boxes of a tensor, converted.
struct Reader<'a> {
    source: &'a Checkpoint,
    key: &'a str,
    shape: Vec<u64>,
    from: StoredType,
    to: StoredType,
    stored: Vec<u8>,
    converted: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn new(source: &'a Checkpoint, key: &'a str, to: StoredType) -> Reader<'a> {
        let tensor = source.tensor(key).expect("what is read was looked up");
        let (shape, from) = (tensor.shape.clone(), tensor.dtype);
        Reader { source, key, shape, from, to, stored: Vec::new(), converted: Vec::new() }
    }

    /// Bytes of an element on its way.
    fn unit(&self) -> u64 {
        self.from.bytes().max(self.to.bytes())
    }

    fn read(
        &mut self,
        chunk: Chunk,
        mut put: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let n: u64 = chunk.sizes.iter().product();
        self.stored.resize((n * self.from.bytes()) as usize, 0);
        self.source.read(self.key, &chunk, &mut self.stored)?;
        if self.from == self.to {
            return put(&self.stored);
        }
        self.converted.resize((n * self.to.bytes()) as usize, 0);
        convert(self.from, self.to, &self.stored, &mut self.converted);
        put(&self.converted)
    }

    /// Copies whole rows, from row `from` on to row `to` on of `out`.
    fn rows(&mut self, from: u64, to: u64, n: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let row = (self.shape[1..].iter().product::<u64>() * self.to.bytes()) as usize;
        self.bands(from, n, |at, band| {
            out[(to + at) as usize * row..][..band.len()].copy_from_slice(band);
            Ok(())
        })
    }

    /// Reads `n` whole rows from row `from` on, band by band, each with its first row counted from `from`.
    fn bands(
        &mut self,
        from: u64,
        n: u64,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let columns: u64 = self.shape[1..].iter().product();
        for (at, len) in bands(n, columns * self.unit()) {
            let mut chunk =
                Chunk { offsets: smallvec![0; self.shape.len()], sizes: self.shape[..].into() };
            (chunk.offsets[0], chunk.sizes[0]) = (from + at, len);
            self.read(chunk, |band| put(at, band))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of a foreign tensor, as rows of the parameters one after the other.
    fn canonical(fused: &Fused) -> Vec<u64> {
        let mut res = vec![u64::MAX; fused.total() as usize];
        let mut before = 0;
        for part in 0..fused.rows.len() {
            for run in fused.runs(part) {
                for i in 0..run.rows {
                    res[(run.foreign + i) as usize] = before + run.param + i;
                }
            }
            before += fused.rows[part];
        }
        res
    }

    #[track_caller]
    fn check(rows: &[u64], blocks: u64, expect: &[u64]) {
        let fused = Fused { rows: rows.to_vec(), blocks, transpose: false };
        assert_eq!(canonical(&fused), expect);
    }

    /// Two queries for each of two KV heads, of one feature; a gate and an up projection of four rows that
    /// two ranks saved.
    #[test]
    fn rows_lie_in_blocks() {
        check(&[4, 2, 2], 1, &[0, 1, 2, 3, 4, 5, 6, 7]);
        check(&[4, 2, 2], 2, &[0, 1, 4, 6, 2, 3, 5, 7]);
        check(&[4, 4], 2, &[0, 1, 4, 5, 2, 3, 6, 7]);
        check(&[3], 1, &[0, 1, 2]);
    }

    #[test]
    fn bands_cover_all_rows_once() {
        for (n, row_bytes) in [(0, 8), (1, 8), (1000, BAND / 7), (5, 4 * BAND), (3, 0)] {
            let mut next = 0;
            for (at, len) in bands(n, row_bytes) {
                assert_eq!(at, next);
                assert!(len > 0 && (len == 1 || len * row_bytes <= BAND));
                next += len;
            }
            assert_eq!(next, n);
        }
    }

    #[test]
    fn a_band_is_scattered_as_its_transpose() {
        // [[1, 2, 3], [4, 5, 6]] at row 1, column 1 of a matrix of 4 columns.
        let mut out = [0; 16];
        scatter(&[1, 2, 3, 4, 5, 6], [2, 3], 1, &mut out, 4, [1, 1]);
        assert_eq!(out, [0, 0, 0, 0, 0, 1, 4, 0, 0, 2, 5, 0, 0, 3, 6, 0]);
    }
}
