//! [`verify`]: whether a checkpoint is whole. Reads every byte of it.
//!
//! * Every element of every tensor is in exactly one box ([`crate::cover`]).
//! * Every item is where the index says, and is what it says: type and sizes.
//! * Every file is of the save that the index is of, as far as it says ([`crate::sums`]).
//! * Every byte is as it was written, as far as there are checksums: of whole items where planc saved
//!   ([`crate::sums`]), else those of the archives' records. Files of safetensors have none.
//!
//! All problems are found, not only the first.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;

use crate::archive::{self, Archive};
use crate::error::{Broken, CheckpointError};
use crate::metadata::{Encoding, Item, StoredChunk, StoredTensor};
use crate::open::{Checkpoint, Content, Sums};

/// What [`verify`] found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// What is wrong; nothing, if the checkpoint is whole.
    pub problems: Vec<Problem>,
    /// What is worth knowing, and no problem of this checkpoint when planc reads it.
    pub warnings: Vec<String>,
    /// Items, where one that two keys share counts once.
    pub n_items: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes without a checksum of any kind.
    pub unsummed_bytes: u64,
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Its code, for `planc explain`.
    pub code: &'static str,
    /// The file, relative to the checkpoint.
    pub file: Option<String>,
    /// The tensor or object.
    pub key: Option<String>,
    /// Byte of the file.
    pub at: Option<u64>,
    /// The whole of it, in words.
    pub message: String,
}

/// What one item is of; a shared one is of several.
struct Owner<'a> {
    key: &'a str,
    /// None for an object.
    of: Option<(&'a StoredTensor, &'a StoredChunk)>,
}

/// Checks all of a checkpoint, on as many threads as there are processors.
pub fn verify(checkpoint: &Checkpoint) -> Report {
    let mut res = Report { warnings: checkpoint.warnings().to_vec(), ..Report::default() };
    for why in checkpoint.problems() {
        let message = why.clone();
        res.problems.push(Problem { code: "PL0703", file: None, key: None, at: None, message });
    }
    for (key, _) in checkpoint.tensors() {
        if let Err(it) = checkpoint.check_cover(key) {
            res.problems.push(Problem::of(checkpoint, it, ""));
        }
    }
    let items = items(checkpoint);
    let files: BTreeSet<u32> = items.iter().map(|it| it.0.file).collect();
    let mut side = FxHashMap::default();
    let mut missing = BTreeSet::new();
    for &file in &files {
        let name = checkpoint.file_name(file);
        match checkpoint.map_file(file) {
            Ok(_) => {
                if let Err(it) = checkpoint.check_save(name) {
                    res.problems.push(Problem::of(checkpoint, it, name));
                }
                match checkpoint.sums(file) {
                    Ok(sums) => side.extend(sums.map(|it| (file, it))),
                    Err(it) => res.problems.push(Problem::of(checkpoint, it, name)),
                }
            }
            Err(it) => {
                missing.insert(file);
                res.problems.push(missing_file(checkpoint, it, file, name, &items));
            }
        }
    }
    overlaps(checkpoint, &items, &mut res.problems);
    res.n_items = items.len() as u64;
    res.bytes = items.iter().map(|it| it.0.len).sum();
    let is_summed = |it: &Item| it.encoding != Encoding::Raw || side.contains_key(&it.file);
    res.unsummed_bytes = items.iter().filter(|it| !is_summed(&it.0)).map(|it| it.0.len).sum();

    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, Problem)>> = Mutex::new(Vec::new());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((item, owners)) = items.get(at) else { break };
            if missing.contains(&item.file) {
                continue;
            }
            let sums = side.get(&item.file).copied();
            if let Err(it) = check_item(checkpoint, item, owners, sums) {
                let problem = Problem::of(checkpoint, it, checkpoint.file_name(item.file));
                found.lock().unwrap_or_else(|it| it.into_inner()).push((at, problem));
            }
        }
    };
    std::thread::scope(|scope| {
        let n = std::thread::available_parallelism().map_or(1, |it| it.get());
        for _ in 1..n.min(items.len()) {
            scope.spawn(work);
        }
        work();
    });
    let mut found = found.into_inner().unwrap_or_else(|it| it.into_inner());
    found.sort_by_key(|it| it.0);
    // What a file is too short for is one problem, with the first such item.
    let mut cut: FxHashMap<u32, (usize, u64)> = FxHashMap::default();
    for (at, problem) in found {
        let item = &items[at].0;
        if checkpoint.is_cut_off(item) {
            if let Some((_, more)) = cut.get_mut(&item.file) {
                *more += 1;
                continue;
            }
            cut.insert(item.file, (res.problems.len(), 0));
        }
        res.problems.push(problem);
    }
    for (at, more) in cut.into_values().filter(|it| it.1 > 0) {
        res.problems[at].message.push_str(&format!("; and {more} more items"));
    }
    res
}

/// Every item with what it is of, in the order of files and bytes.
fn items(checkpoint: &Checkpoint) -> Vec<(Item, Vec<Owner<'_>>)> {
    let mut all: Vec<(Item, Owner<'_>)> = Vec::new();
    for (key, tensor) in checkpoint.tensors() {
        let owner = |it| Owner { key, of: Some((tensor, it)) };
        all.extend(tensor.chunks.iter().map(|it| (it.item, owner(it))));
    }
    for key in checkpoint.objects() {
        all.extend(checkpoint.stored_object(key).map(|it| (it.item, Owner { key, of: None })));
    }
    all.sort_by_key(|(it, _)| (it.file, it.offset, it.len, it.encoding == Encoding::Zstd));
    let mut res: Vec<(Item, Vec<Owner<'_>>)> = Vec::new();
    for (item, owner) in all {
        match res.last_mut() {
            Some((known, owners)) if *known == item => owners.push(owner),
            _ => res.push((item, vec![owner])),
        }
    }
    res
}

fn missing_file(
    checkpoint: &Checkpoint,
    error: CheckpointError,
    file: u32,
    name: &str,
    items: &[(Item, Vec<Owner<'_>>)],
) -> Problem {
    let mut res = Problem::of(checkpoint, error, name);
    let of_file = || items.iter().filter(|it| it.0.file == file);
    if let Some((item, owners)) = of_file().next() {
        res.key = owners.first().map(|it| it.key.to_string());
        res.at = Some(item.offset);
        let others = match of_file().count() - 1 {
            0 => String::new(),
            n => format!(" and {n} more items"),
        };
        let key = res.key.as_deref().unwrap_or_default();
        res.message = format!("{}; it holds `{key}` at byte {}{others}", res.message, item.offset);
    }
    res
}

/// Items that share some bytes and not all.
fn overlaps(
    checkpoint: &Checkpoint,
    items: &[(Item, Vec<Owner<'_>>)],
    problems: &mut Vec<Problem>,
) {
    for pair in items.windows(2) {
        let [(a, owners), (b, others)] = pair else { continue };
        let end = a.offset.saturating_add(a.len);
        if a.file == b.file && b.offset < end && b.len > 0 {
            let (key, other) = (owners[0].key, others[0].key);
            let why = format!("the item ends at byte {end}, within that of `{other}`");
            let error = checkpoint.in_item(Broken::at(0, why), key, a);
            problems.push(Problem::of(checkpoint, error, checkpoint.file_name(a.file)));
        }
    }
}

/// Checks the bytes of one item.
fn check_item(
    checkpoint: &Checkpoint,
    item: &Item,
    owners: &[Owner<'_>],
    sums: Option<&Sums>,
) -> Result<(), CheckpointError> {
    let Some(Owner { key, of }) = owners.first() else { return Ok(()) };
    if let Some(sums) = sums {
        let stored = of.map(|it| &it.1.chunk);
        checkpoint.check_bytes(key, stored, item, 0..item.len)?;
        if sums.get(&item.offset).is_some_and(|it| !it.is_consistent()) {
            let why = "the checksums of its pieces are not those of the whole";
            return Err(checkpoint.in_item(Broken::at(0, why), key, item));
        }
    }
    let n_bytes = |(tensor, stored): (&StoredTensor, &StoredChunk)| {
        stored.chunk.sizes.iter().product::<u64>() * tensor.dtype.bytes()
    };
    let content = checkpoint.content(key, item, of.map_or(crate::open::MAX_OBJECT, n_bytes))?;
    let archive = match &content {
        // Elements alone: the header was checked when it was read.
        Content::Raw(_) => return Ok(()),
        Content::Archive(it) => it,
        Content::Decoded(it) => it.as_slice(),
    };
    let fail = |it: Broken| checkpoint.in_item(it, key, item);
    if sums.is_none() {
        for (_, record) in Archive::open(archive).map_err(fail)?.records() {
            checkpoint.check_sum(key, item, &record)?;
        }
    }
    if of.is_none() {
        archive::read_object(archive).map_err(fail)?;
    }
    for owner in owners {
        let fail = |it: Broken| checkpoint.in_item(it, owner.key, item);
        match (of, owner.of) {
            (Some(_), Some((tensor, stored))) => {
                checkpoint.opened(item, archive, tensor, &stored.chunk).map_err(fail)?;
            }
            (None, None) => {}
            _ => {
                let why = "one item cannot be a tensor and an object";
                return Err(fail(Broken::at(0, why)));
            }
        }
    }
    Ok(())
}

impl Problem {
    /// An error, in the file of this name.
    fn of(checkpoint: &Checkpoint, error: CheckpointError, file: &str) -> Problem {
        let (key, at) = match &error {
            CheckpointError::Item { key, at, .. } | CheckpointError::Checksum { key, at, .. } => {
                (Some(key.clone()), Some(*at))
            }
            CheckpointError::Refused { key, at, .. } => (key.clone(), Some(*at)),
            CheckpointError::Index { at, .. } => (None, Some(*at)),
            CheckpointError::Cover { key, .. } => (Some(key.clone()), None),
            CheckpointError::NoCheckpoint { .. }
            | CheckpointError::Io { .. }
            | CheckpointError::NoKey { .. }
            | CheckpointError::Outside { .. }
            | CheckpointError::Locked(_)
            | CheckpointError::LockLost { .. } => (None, None),
        };
        let folder = format!("{}/", checkpoint.folder().display());
        Problem {
            code: error.code(),
            file: (!file.is_empty()).then(|| file.to_string()),
            key,
            at,
            message: error.to_string().replace(&folder, ""),
        }
    }
}

/// Names of data files in the folder that the index does not name: what is left of another save.
pub fn unnamed_files(checkpoint: &Checkpoint) -> Vec<String> {
    let known: BTreeSet<&str> = checkpoint.files().collect();
    let mut res: Vec<String> = fs::read_dir(checkpoint.folder())
        .into_iter()
        .flatten()
        .filter_map(|it| it.ok()?.file_name().into_string().ok())
        .filter(|it| it.ends_with(".distcp") && !known.contains(it.as_str()))
        .collect();
    res.sort();
    res
}
