//! Boxes of a buffer, moved in slabs: some rows at a time, so that little memory is needed besides.
//!
//! A box and the buffer that it lies in are both row-major. Where the box is as wide as the buffer, a slab
//! is one stretch of it; elsewhere (padding, strided shards) it is read with what lies between.

use ir::placement::{Chunk, LocalBox};

use crate::bind::BoundBuffer;
use crate::error::RunError;
use crate::exec::Backend;

use ir::plan::Buffer;

/// Bytes of a buffer that are moved at once, unless one row has more.
const SLAB: usize = 8 << 20;

/// Some rows of a box.
struct Slab {
    /// Which part of the global tensor.
    chunk: Chunk,
    /// The elements of the buffer from its first to its last.
    span: std::ops::Range<usize>,
    /// Its elements in `span`: where, and how many, in order.
    stretches: Vec<(usize, usize)>,
}

/// The slabs of a box of a buffer of `shape`, of about `limit` elements each.
fn slabs(local: &LocalBox, shape: &[usize], limit: usize) -> Vec<Slab> {
    let sizes: Vec<usize> = local.chunk.sizes.iter().map(|&it| it as usize).collect();
    let at: Vec<usize> = local.at.iter().map(|&it| it as usize).collect();
    let Some(&rows) = sizes.first() else {
        return vec![Slab { chunk: local.chunk.clone(), span: 0..1, stretches: vec![(0, 1)] }];
    };
    let row: usize = shape[1..].iter().product();
    let step = (limit / row.max(1)).clamp(1, rows.max(1));
    let mut res = Vec::new();
    for first in (0..rows).step_by(step) {
        let n = step.min(rows - first);
        let mut chunk = local.chunk.clone();
        chunk.offsets[0] += first as u64;
        chunk.sizes[0] = n as u64;
        let mut stretches = Vec::new();
        let (sizes, at) = ([&[n], &sizes[1..]].concat(), [&[at[0] + first], &at[1..]].concat());
        collect_stretches(shape, &at, &sizes, 0, &mut stretches);
        let (Some(&start), Some(&end)) = (stretches.first(), stretches.last()) else { continue };
        let span = start.0..end.0 + end.1;
        stretches.iter_mut().for_each(|it| it.0 -= span.start);
        res.push(Slab { chunk, span, stretches });
    }
    res
}

fn collect_stretches(
    shape: &[usize],
    at: &[usize],
    sizes: &[usize],
    base: usize,
    out: &mut Vec<(usize, usize)>,
) {
    let inner: usize = shape[1..].iter().product();
    if sizes[1..] == shape[1..] {
        let n = sizes[0] * inner;
        if n > 0 {
            out.push((base + at[0] * inner, n));
        }
        return;
    }
    for i in 0..sizes[0] {
        collect_stretches(&shape[1..], &at[1..], &sizes[1..], base + (at[0] + i) * inner, out);
    }
}

/// Calls `sink` with the elements of a box, in order.
pub fn read_box<E: From<RunError>>(
    backend: &dyn Backend,
    (buffer, bound): (Buffer, &BoundBuffer),
    local: &LocalBox,
    staging: &mut Vec<u8>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let size = bound.dtype.bytes() as usize;
    for slab in slabs(local, &bound.shape, SLAB / size) {
        staging.resize(slab.span.len() * size, 0);
        backend.read_at(buffer, slab.span.start * size, staging)?;
        for (start, n) in slab.stretches {
            sink(&staging[start * size..(start + n) * size])?;
        }
    }
    Ok(())
}

/// Gives the elements of a part of the global tensor, row-major.
pub type Fetch<'a> = dyn FnMut(&Chunk, &mut [u8]) -> Result<(), RunError> + 'a;

/// Sets the elements of a box: `fetch` gives those of a part of the global tensor.
pub fn write_box(
    backend: &mut dyn Backend,
    (buffer, bound): (Buffer, &BoundBuffer),
    local: &LocalBox,
    staging: &mut Staging,
    fetch: &mut Fetch<'_>,
) -> Result<(), RunError> {
    let size = bound.dtype.bytes() as usize;
    for slab in slabs(local, &bound.shape, SLAB / size) {
        let n: u64 = slab.chunk.sizes.iter().product();
        staging.fetched.resize(n as usize * size, 0);
        fetch(&slab.chunk, &mut staging.fetched)?;
        if let [_] = slab.stretches[..] {
            backend.write_at(buffer, slab.span.start * size, &staging.fetched)?;
            continue;
        }
        // What lies between stays as it is.
        staging.span.resize(slab.span.len() * size, 0);
        backend.read_at(buffer, slab.span.start * size, &mut staging.span)?;
        let mut from = &staging.fetched[..];
        for (start, n) in slab.stretches {
            let (these, rest) = from.split_at(n * size);
            staging.span[start * size..(start + n) * size].copy_from_slice(these);
            from = rest;
        }
        backend.write_at(buffer, slab.span.start * size, &staging.span)?;
    }
    Ok(())
}

/// Memory that [`write_box`] works in, kept between calls.
#[derive(Debug, Default)]
pub struct Staging {
    fetched: Vec<u8>,
    span: Vec<u8>,
}

impl Staging {
    /// Bytes that it has taken.
    pub fn bytes(&self) -> u64 {
        (self.fetched.capacity() + self.span.capacity()) as u64
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    /// Rows 1 and 2, columns 1 .. 3 of a buffer of 4 x 5: two stretches for each slab of two rows.
    #[test]
    fn a_narrow_box_is_stretches_of_a_span() {
        let chunk = Chunk { offsets: smallvec![10, 20], sizes: smallvec![3, 2] };
        let local = LocalBox { chunk, at: smallvec![1, 1] };
        let slabs = slabs(&local, &[4, 5], 10);
        let found: Vec<_> =
            slabs.iter().map(|it| (it.chunk.offsets[0], it.span.clone(), &it.stretches)).collect();
        assert_eq!(found, [(10, 6..13, &vec![(0, 2), (5, 2)]), (12, 16..18, &vec![(0, 2)])]);
    }

    #[test]
    fn a_wide_box_is_one_stretch() {
        let chunk = Chunk { offsets: smallvec![8, 0], sizes: smallvec![3, 5] };
        let local = LocalBox { chunk, at: smallvec![1, 0] };
        let all = slabs(&local, &[4, 5], 100);
        assert_eq!(
            (all.len(), all[0].span.clone(), &all[0].stretches[..]),
            (1, 5..20, &[(0, 15)][..])
        );
        let scalar = slabs(&LocalBox::default(), &[], 100);
        assert_eq!((scalar.len(), scalar[0].span.clone()), (1, 0..1));
    }
}
