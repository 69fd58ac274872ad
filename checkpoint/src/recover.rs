//! Boxes that PyTorch writes wrongly (pytorch/pytorch#168134), put right.
//!
//! `fully_shard` over a tensor-parallel `Shard(0)` cuts rows over tp first and each piece over dp: so
//! ranks hold them. The layout that it declares, `(_StridedShard(0, tp), Shard(0))`, is evaluated to
//! something else when pieces are uneven: the d-th parts of all pieces joined, then cut over tp. Items
//! have what ranks held, `.metadata` the boxes of what was declared. 17 rows on dp=4 x tp=2:
//!
//! ```text
//! rank           0      1       2      3        4      5        6        7
//! held         [0,3)  [9,11)  [3,6)  [11,13)  [6,9)  [13,15)  nothing  [15,17)
//! declared     [0,3)  [9,11)  [3,6)  [11,13)  [6,9)  [13,15)  [15,16)  [16,17)
//! ```
//!
//! PyTorch's own loader then leaves rows as they were, silently. Where the boxes of a tensor are those of
//! such a declaration, and its items have the sizes that would be held, the boxes become those.

use std::collections::BTreeMap;
use std::path::Path;

use crate::archive;
use crate::error::CheckpointError;
use crate::map::Mapped;
use crate::metadata::{Encoding, StoredTensor};
use crate::open::{Found, unzstd};

/// Ranks beyond which no mesh is tried.
const MAX_CHUNKS: usize = 4096;

/// Corrects the boxes of every tensor whose items differ from them in this way, and says so.
pub(crate) fn wrong_boxes(folder: &Path, found: &mut Found) {
    let files = &found.index.files;
    let mut maps: Vec<Option<Result<Mapped, CheckpointError>>> =
        files.iter().map(|_| None).collect();
    for (key, tensor) in &mut found.index.tensors {
        let Some(dim) = uneven_dim(tensor) else { continue };
        let mut sizes = Vec::with_capacity(tensor.chunks.len());
        for stored in &tensor.chunks {
            let item = stored.item;
            let map = maps[item.file as usize].get_or_insert_with(|| {
                let path = folder.join(&files[item.file as usize]);
                Mapped::open(&path).map_err(|it| CheckpointError::io("read", &path, &it))
            });
            let bytes = map.as_ref().ok().and_then(|it| {
                let start = usize::try_from(item.offset).ok()?;
                it.bytes().get(start..)?.get(..usize::try_from(item.len).ok()?)
            });
            let n: u64 = stored.chunk.sizes.iter().product();
            let decoded;
            let bytes = match (bytes, item.encoding) {
                (Some(it), Encoding::Plain) => Some(it),
                (Some(it), Encoding::Zstd) => {
                    // The item may be larger than its box says, by a row or a few.
                    decoded = unzstd(it, n.saturating_mul(tensor.dtype.bytes()).saturating_mul(2));
                    decoded.as_deref().ok()
                }
                _ => None,
            };
            // What cannot be read is reported when it is read.
            sizes.extend(bytes.and_then(|it| archive::read_tensor(it).ok()).map(|it| it.sizes));
        }
        if sizes.len() < tensor.chunks.len() {
            continue;
        }
        let held: Vec<u64> = sizes
            .iter()
            .map(|it| if it.contains(&0) { 0 } else { it.get(dim).copied().unwrap_or(0) })
            .collect();
        if tensor.chunks.iter().zip(&held).all(|(it, &held)| it.chunk.sizes[dim] == held) {
            continue;
        }
        let Some((dp, tp, boxes)) = boxes(tensor, dim, &held) else { continue };
        for (stored, (offset, size)) in tensor.chunks.iter_mut().zip(boxes) {
            stored.chunk.offsets[dim] = offset;
            stored.chunk.sizes[dim] = size;
        }
        found.warnings.push(format!(
            "`{key}` {:?}: the index gives boxes that its items do not have, as PyTorch writes them for \
             fully_shard over dp={dp} of Shard({dim}) over tp={tp} where these do not divide \
             (pytorch/pytorch#168134). The items say what each rank held, and are read so; PyTorch itself \
             loses elements when it loads this",
            tensor.shape
        ));
    }
}

/// The one dim that boxes cut, if they cut it unevenly.
fn uneven_dim(tensor: &StoredTensor) -> Option<usize> {
    let chunks = &tensor.chunks;
    if !(2..=MAX_CHUNKS).contains(&chunks.len()) {
        return None;
    }
    let is_cut = |dim: &usize| chunks.iter().any(|it| it.chunk.sizes[*dim] != tensor.shape[*dim]);
    let mut cut = (0..tensor.shape.len()).filter(is_cut);
    let (dim, None) = (cut.next()?, cut.next()) else { return None };
    let size = chunks[0].chunk.sizes[dim];
    chunks.iter().any(|it| it.chunk.sizes[dim] != size).then_some(dim)
}

/// Sizes of dp and tp, and start and size of each box.
type Boxes = (u64, u64, Vec<(u64, u64)>);

/// The boxes that were held, if one mesh explains both what is declared and the sizes that are held.
fn boxes(tensor: &StoredTensor, dim: usize, held: &[u64]) -> Option<Boxes> {
    let n = tensor.shape[dim];
    let n_chunks = tensor.chunks.len() as u64;
    // All ranks without a row have one box together, so there may be more ranks than boxes.
    let most = 4 * n_chunks + 16;
    let declared: Vec<(u64, u64)> =
        tensor.chunks.iter().map(|it| (it.chunk.offsets[dim], it.chunk.sizes[dim])).collect();
    let first = declared.iter().find(|it| it.0 == 0)?.1;
    let mut res: Option<Boxes> = None;
    for dp in 2..=most / 2 {
        for tp in 2..=most / dp {
            if dp * tp < n_chunks || declared_size(n, dp, tp, 0) != first {
                continue;
            }
            let Some(boxes) = explained(n, dp, tp, &declared, held) else { continue };
            match &res {
                // Two meshes that differ in what they say decide nothing.
                Some(known) if known.2 != boxes => return None,
                Some(_) => {}
                None => res = Some((dp, tp, boxes)),
            }
        }
    }
    res
}

/// The `index`-th of `count` parts of `size` elements as `torch.chunk` cuts them: start and size.
fn part(size: u64, count: u64, index: u64) -> (u64, u64) {
    let each = size.div_ceil(count);
    let start = (index * each).min(size);
    (start, each.min(size - start))
}

/// What each tp piece gives to dp index `d`: start and size.
fn parts(n: u64, dp: u64, tp: u64, d: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..tp).map(move |t| {
        let (piece, len) = part(n, tp, t);
        let (start, size) = part(len, dp, d);
        (piece + start, size)
    })
}

/// Rows that ranks of dp index `d` are declared to have, the first of them.
fn declared_size(n: u64, dp: u64, tp: u64, d: u64) -> u64 {
    let joined: u64 = parts(n, dp, tp, d).map(|it| it.1).sum();
    joined.div_ceil(tp)
}

/// Boxes that are held on this mesh, if it declares `declared` and holds sizes `held`.
fn explained(
    n: u64,
    dp: u64,
    tp: u64,
    declared: &[(u64, u64)],
    held: &[u64],
) -> Option<Vec<(u64, u64)>> {
    // By declared start: the declared size, and what the ranks with that box held.
    let mut ranks: BTreeMap<u64, (u64, Vec<(u64, u64)>)> = BTreeMap::new();
    for d in 0..dp {
        let parts: Vec<(u64, u64)> = parts(n, dp, tp, d).collect();
        let joined: u64 = parts.iter().map(|it| it.1).sum();
        for (t, &here) in (0..tp).zip(&parts) {
            let (mut skip, size) = part(joined, tp, t);
            let start = parts.iter().find_map(|&(start, len)| {
                let found = (skip < len).then_some(start + skip);
                skip = skip.saturating_sub(len);
                found
            });
            let start = if size == 0 { n } else { start? };
            let known = ranks.entry(start).or_insert_with(|| (size, Vec::new()));
            if known.0 != size {
                return None;
            }
            known.1.push(here);
        }
    }
    if ranks.len() != declared.len() {
        return None;
    }
    let mut total = 0;
    let mut res = Vec::with_capacity(declared.len());
    for (&(start, size), &held) in declared.iter().zip(held) {
        let (_, all) = ranks.get(&start).filter(|it| it.0 == size)?;
        let mut fitting = all.iter().filter(|it| it.1 == held);
        let found = *fitting.next()?;
        if held > 0 && fitting.next().is_some() {
            return None;
        }
        res.push(if held == 0 { (n, 0) } else { found });
        total += held;
    }
    // Ranks that shared a box had one item: what the others held was never written.
    (total == n).then_some(res)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 9 rows on dp=4 x tp=2: the label says rank 6 has row 8 and rank 7 nothing; they hold the opposite.
    #[test]
    fn nine_rows_are_found() {
        let declared = [(0, 2), (5, 1), (2, 2), (6, 1), (4, 1), (7, 1), (8, 1), (9, 0)];
        let held = [2, 1, 2, 1, 1, 1, 0, 1];
        let boxes = explained(9, 4, 2, &declared, &held).unwrap();
        assert_eq!(boxes, [(0, 2), (5, 1), (2, 2), (6, 1), (4, 1), (7, 1), (9, 0), (8, 1)]);
        assert_eq!(explained(9, 2, 4, &declared, &held), None);
        assert_eq!(explained(9, 4, 2, &declared, &[2, 1, 2, 1, 1, 1, 1, 0]), None);
    }
}
