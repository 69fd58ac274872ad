//! Folders with `.metadata`, or with an index for each rank (`save(.., use_collectives=False)`).

use std::collections::btree_map::Entry;
use std::fs;
use std::path::Path;

use rustc_hash::FxHashSet;

use crate::error::CheckpointError;
use crate::map::Mapped;
use crate::metadata::{Encoding, Item, Metadata, StoredTensor};
use crate::open::Found;
use crate::{recover, safetensors};

/// Opens a folder that has an index; `None` if it has none.
pub(crate) fn open(folder: &Path) -> Result<Option<Found>, CheckpointError> {
    let one = folder.join(".metadata");
    let indices = match one.exists() {
        true => vec![one],
        false => indices_of_ranks(folder)?.into_iter().map(|it| folder.join(it)).collect(),
    };
    let mut indices = indices.iter();
    let Some(first) = indices.next() else { return Ok(None) };
    let mut found = Found { index: read(first)?, warnings: Vec::new() };
    for path in indices {
        merge(&mut found.index, read(path)?);
    }
    find_safetensors(folder, &mut found.index)?;
    recover::wrong_boxes(folder, &mut found);
    Ok(Some(found))
}

fn read(path: &Path) -> Result<Metadata, CheckpointError> {
    let map = Mapped::open(path).map_err(|it| CheckpointError::io("read", path, &it))?;
    Metadata::read(map.bytes()).map_err(|it| it.in_index(path))
}

/// `__0.metadata`, `__1.metadata`, .., in the order of ranks.
fn indices_of_ranks(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let fail = |it: std::io::Error| CheckpointError::io("read", folder, &it);
    let mut res = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        let Ok(name) = entry.map_err(fail)?.file_name().into_string() else { continue };
        let number = name.strip_prefix("__").and_then(|it| it.strip_suffix(".metadata"));
        res.extend(number.and_then(|it| it.parse::<u32>().ok()).map(|it| (it, name)));
    }
    res.sort();
    Ok(res.into_iter().map(|it| it.1).collect())
}

/// Adds the index of another rank: its boxes of tensors, and what only it has. Replicated values are in
/// the index of every rank; the first counts.
fn merge(index: &mut Metadata, other: Metadata) {
    let first_file = index.files.len() as u32;
    index.files.extend(other.files);
    index.problems.extend(other.problems);
    let moved = |it: &mut Item| it.file += first_file;
    for (key, mut tensor) in other.tensors {
        tensor.chunks.iter_mut().for_each(|it| moved(&mut it.item));
        match index.tensors.entry(key) {
            Entry::Vacant(it) => _ = it.insert(tensor),
            Entry::Occupied(mut known) => {
                if (known.get().dtype, &known.get().shape) != (tensor.dtype, &tensor.shape) {
                    index.problems.push(format!("`{}` is not the same on every rank", known.key()));
                    continue;
                }
                let known: &mut StoredTensor = known.get_mut();
                let boxes: FxHashSet<_> = known.chunks.iter().map(|it| it.chunk.clone()).collect();
                let new = tensor.chunks.into_iter().filter(|it| !boxes.contains(&it.chunk));
                known.chunks.extend(new);
            }
        }
    }
    for (key, mut object) in other.objects {
        moved(&mut object.item);
        index.objects.entry(key).or_insert(object);
    }
}

/// Finds the items of files that are safetensors (`serialization_format=SAFETENSORS`): their index says
/// byte 0 for every item, and the length of the elements alone.
fn find_safetensors(folder: &Path, index: &mut Metadata) -> Result<(), CheckpointError> {
    let files = index.files.clone();
    let mut headers: Vec<Option<safetensors::Header>> = vec![None; files.len()];
    for (key, tensor) in &mut index.tensors {
        for stored in &mut tensor.chunks {
            let n: u64 = stored.chunk.sizes.iter().product();
            let Item { file, offset, len, encoding } = stored.item;
            // An archive is longer than what it holds.
            if encoding != Encoding::Plain || offset != 0 || len != n * tensor.dtype.bytes() {
                continue;
            }
            let header = &mut headers[file as usize];
            let path = folder.join(&files[file as usize]);
            let known = match header {
                Some(it) => it,
                None => header.insert(safetensors::Header::open(&path)?),
            };
            let here = known.tensors.get(key).filter(|it| {
                (it.dtype, &it.sizes, &it.offsets)
                    == (tensor.dtype, &stored.chunk.sizes, &stored.chunk.offsets)
            });
            match here {
                Some(it) => {
                    let (offset, len) = (it.start, it.len);
                    stored.item = Item { file, offset, len, encoding: Encoding::Raw };
                }
                None => index
                    .problems
                    .push(format!("`{}` has no `{key}` like the index says", files[file as usize])),
            }
        }
    }
    Ok(())
}
