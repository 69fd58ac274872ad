//! [`Checkpoint`]: a checkpoint that is read, in whatever layout it is.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use ir::placement::Chunk;
use rustc_hash::{FxHashMap, FxHashSet};
use ruzstd::decoding::StreamingDecoder;
use smallvec::SmallVec;

use crate::archive::{self, Record, TensorItem};
use crate::copy::{View, copy, spans};
use crate::cover;
use crate::dtype::StoredType;
use crate::error::{Broken, CheckpointError, short};
use crate::map::{Mapped, folder_of};
use crate::memory::memory;
use crate::metadata::{Encoding, Item, Metadata, StoredChunk, StoredObject, StoredTensor};
use crate::pickle::Value;
use crate::save::folder::{checkpoints, step_name};
use crate::sums::{self, PIECE, Sum, crc32};
use crate::{dcp, safetensors};

/// A checkpoint on disk. Opening reads the index; data are mapped when they are needed.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    folder: PathBuf,
    tensors: BTreeMap<String, Entry>,
    objects: BTreeMap<String, StoredObject>,
    files: Vec<DataFile>,
    problems: Vec<String>,
    warnings: Vec<String>,
    save_id: Option<String>,
}

#[derive(Debug)]
struct Entry {
    tensor: StoredTensor,
    /// Whether its boxes make up the tensor, once somebody asked.
    cover: OnceLock<Result<(), cover::Fault>>,
}

/// A file with items, mapped once somebody reads it.
#[derive(Debug)]
pub(crate) struct DataFile {
    /// Its name, relative to the checkpoint.
    pub name: String,
    path: PathBuf,
    map: OnceLock<Result<Mapped, CheckpointError>>,
    sums: OnceLock<Result<Option<Sums>, CheckpointError>>,
    /// Pieces of items that were compared with their checksums: where the item starts, and which.
    checked: Mutex<FxHashSet<(u64, u64)>>,
}

/// The checksums beside a file, by the byte at which an item starts.
pub(crate) type Sums = FxHashMap<u64, Sum>;

/// What an opener finds: an index, and what is to be said about it.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Tensors, objects and files.
    pub index: Metadata,
    /// What the user should know, and that stops nothing.
    pub warnings: Vec<String>,
}

/// What the bytes of an item hold.
pub(crate) enum Content<'a> {
    /// An archive, as it is in the file.
    Archive(&'a [u8]),
    /// An archive that was compressed.
    Decoded(Vec<u8>),
    /// Elements, row-major.
    Raw(&'a [u8]),
}

/// `step-2.c0ffee00` -> `step-2 of run c0ffee00`.
fn say(save: &str) -> String {
    match save.split_once('.') {
        Some((step, run)) => format!("{step} of run {run}"),
        None => save.to_string(),
    }
}

impl Checkpoint {
    /// Opens a checkpoint: its folder, a folder of which the file `latest` names one below, or a
    /// safetensors file.
    ///
    /// # Errors
    /// If there is none, or its index cannot be read. Data that is missing or damaged is found when it
    /// is read, or by [`crate::verify`].
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let kind = fs::metadata(path).map_err(|it| CheckpointError::io("read", path, &it))?;
        if !kind.is_dir() {
            let found = safetensors::open_file(path).map_err(|it| match other_file(path) {
                Some(why) => CheckpointError::NoCheckpoint { path: path.to_path_buf(), why },
                None => it,
            })?;
            return Checkpoint::of(path, &safetensors::file_folder(path), found);
        }
        let path = &latest(path)?;
        let found = match dcp::open(path)? {
            Some(it) => it,
            None => match safetensors::open(path)? {
                Some(it) => it,
                None => return Err(nothing(path)),
            },
        };
        Checkpoint::of(path, path, found)
    }

    fn of(path: &Path, folder: &Path, found: Found) -> Result<Checkpoint, CheckpointError> {
        let Found { index, warnings } = found;
        let entry = |tensor| Entry { tensor, cover: OnceLock::new() };
        let files = index.files.into_iter().map(|it| DataFile::new(folder, it));
        Ok(Checkpoint {
            path: path.to_path_buf(),
            folder: folder.to_path_buf(),
            tensors: index.tensors.into_iter().map(|(key, it)| (key, entry(it))).collect(),
            objects: index.objects,
            files: files.collect(),
            problems: index.problems,
            warnings,
            save_id: index.save_id,
        })
    }

    /// Where it is: the folder that was opened, or the one that `latest` names.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every tensor, by key.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &StoredTensor)> {
        self.tensors.iter().map(|(key, it)| (key.as_str(), &it.tensor))
    }

    /// The tensor of this key.
    pub fn tensor(&self, key: &str) -> Option<&StoredTensor> {
        self.tensors.get(key).map(|it| &it.tensor)
    }

    /// The key of every Python object.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        self.objects.keys().map(String::as_str)
    }

    /// Where the Python object of this key is.
    pub fn stored_object(&self, key: &str) -> Option<&StoredObject> {
        self.objects.get(key)
    }

    /// Names of the files with data, relative to the checkpoint; [`Item::file`] is an index.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &str> {
        self.files.iter().map(|it| it.name.as_str())
    }

    /// Whether a file is of the save that the index is of, as far as both say; see [`crate::sums`].
    ///
    /// # Errors
    /// If it is not, or the file beside it cannot be read.
    pub fn check_save(&self, file: &str) -> Result<(), CheckpointError> {
        let Some(expect) = &self.save_id else { return Ok(()) };
        let beside = self.folder.join(sums::file_name(file));
        let found =
            sums::save_of(&beside).map_err(|it| CheckpointError::io("read", &beside, &it))?;
        match found {
            Some(found) if found != *expect => {
                let (found, expect) = (say(&found), say(expect));
                let why =
                    format!("the file is of another save ({found}; the index is of {expect})");
                Err(CheckpointError::Index { path: self.folder.join(file), at: 0, why })
            }
            _ => Ok(()),
        }
    }

    /// The name of one of them.
    pub fn file_name(&self, file: u32) -> &str {
        &self.files[file as usize].name
    }

    /// What the index says that cannot be; [`crate::verify`] reports it with all else.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// What was read in another way than the index says, and why.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// A Python object.
    ///
    /// # Errors
    /// If there is none, or it names what no value of Python's own does: nothing is ever called.
    pub fn object(&self, key: &str) -> Result<Value, CheckpointError> {
        let Some(StoredObject { item, .. }) = self.objects.get(key) else {
            return Err(self.no_key("object", key, self.objects.keys()));
        };
        self.check_bytes(key, None, item, 0..item.len)?;
        // Objects are settings and counters; what compresses to them is not much larger.
        let content = self.content(key, item, MAX_OBJECT)?;
        let bytes = match &content {
            Content::Archive(it) | Content::Raw(it) => it,
            Content::Decoded(it) => it.as_slice(),
        };
        archive::read_object(bytes).map_err(|it| self.in_item(it, key, item))
    }

    /// The number that a tensor is; `None` if it is not one number of a type that counts and settings have.
    ///
    /// # Errors
    /// If there is no such tensor, or it cannot be read.
    pub fn number(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        let Some(tensor) = self.tensor(key) else {
            return Err(self.no_key("tensor", key, self.tensors.keys()));
        };
        let dtype = tensor.dtype;
        let is_known =
            matches!(dtype, StoredType::I64 | StoredType::I32 | StoredType::F64 | StoredType::F32);
        if !is_known || tensor.n_elements() != 1 {
            return Ok(None);
        }
        let mut bytes = vec![0; dtype.bytes() as usize];
        self.read(key, &whole(&tensor.shape), &mut bytes)?;
        Ok(Some(dtype.numbers(&bytes)[0]))
    }

    /// Reads a box of a tensor into `out`: row-major, in its stored type, little-endian.
    ///
    /// Only what overlaps is read, in runs that are contiguous, and compared with the checksums beside the file, piece
    /// by piece. Where those are of whole items, or in the items alone, the first who reads a part of one has it all
    /// compared. No byte is compared twice.
    ///
    /// # Errors
    /// If there is no such tensor, its boxes do not make it up, or an item in the box is not what the
    /// index says, or not what was written. `out` may be written in part then.
    ///
    /// # Panics
    /// If `out` has not the length of the box.
    pub fn read(&self, key: &str, chunk: &Chunk, out: &mut [u8]) -> Result<(), CheckpointError> {
        let entry = self.tensors.get(key);
        let Some(Entry { tensor, .. }) = entry else {
            return Err(self.no_key("tensor", key, self.tensors.keys()));
        };
        if !is_within(chunk, &tensor.shape) {
            return Err(CheckpointError::Outside {
                key: key.to_string(),
                shape: tensor.shape.clone(),
                offsets: chunk.offsets.to_vec(),
                sizes: chunk.sizes.to_vec(),
            });
        }
        let n: u64 = chunk.sizes.iter().product();
        assert_eq!(out.len() as u64, n * tensor.dtype.bytes(), "`{key}`: {chunk:?} is read whole");
        self.check_cover(key)?;
        for stored in &tensor.chunks {
            if let Some(common) = overlap(&stored.chunk, chunk) {
                self.copy(key, tensor, &stored.chunk, &stored.item, &common, (chunk, out))?;
            }
        }
        Ok(())
    }

    /// Has the system fetch the items that a box covers whole; their bytes.
    pub fn will_need(&self, key: &str, chunk: &Chunk) -> u64 {
        let Some(tensor) = self.tensor(key) else { return 0 };
        // What cannot be read is reported when it is.
        let fetch = |it: &StoredChunk| self.fetched(key, &it.item).map_or(0, |it| it.len() as u64);
        self.whole_items(tensor, chunk).map(fetch).sum()
    }

    /// Checks the items that a box covers whole, in the order of their bytes, which is that in which the system reads ahead.
    /// Whoever reads an archive needs its end first, and would wait for it.
    pub fn check_whole_items(&self, key: &str, chunk: &Chunk) -> Result<(), CheckpointError> {
        let Some(tensor) = self.tensor(key) else { return Ok(()) };
        let check =
            |it: &StoredChunk| self.check_bytes(key, Some(&it.chunk), &it.item, 0..it.item.len);
        self.whole_items(tensor, chunk).try_for_each(check)
    }

    /// Whether every item of a tensor is there and is what the index says, so that the tensor is as large.
    pub fn check_items(&self, key: &str) -> Result<(), CheckpointError> {
        self.check_cover(key)?;
        let Some(tensor) = self.tensor(key) else { return Ok(()) };
        for StoredChunk { chunk, item } in &tensor.chunks {
            let n: u64 = chunk.sizes.iter().product();
            match &self.content(key, item, n * tensor.dtype.bytes())? {
                Content::Raw(_) => Ok(()),
                Content::Archive(it) => self.opened(item, it, tensor, chunk).map(drop),
                Content::Decoded(it) => self.opened(item, it, tensor, chunk).map(drop),
            }
            .map_err(|it| self.in_item(it, key, item))?;
        }
        Ok(())
    }

    fn whole_items<'a>(
        &self,
        tensor: &'a StoredTensor,
        chunk: &'a Chunk,
    ) -> impl Iterator<Item = &'a StoredChunk> {
        tensor.chunks.iter().filter(|it| overlap(&it.chunk, chunk).as_ref() == Some(&it.chunk))
    }

    /// Compares a part of an item with the checksums beside its file, if there are any: the pieces that it is in.
    ///
    /// # Errors
    /// If bytes changed since they were written, or the file beside is of something else.
    pub(crate) fn check_bytes(
        &self,
        key: &str,
        stored: Option<&Chunk>,
        item: &Item,
        range: Range<u64>,
    ) -> Result<(), CheckpointError> {
        let file = &self.files[item.file as usize];
        let Some(sums) = file.sums()? else { return Ok(()) };
        let sum = self.sum_of(key, stored, item, sums)?;
        let bytes = self.bytes(key, item)?;
        let piece_of = |at: u64| if sum.n_pieces() > 1 { at / PIECE } else { 0 };
        for piece in piece_of(range.start)..=piece_of(range.end.max(1) - 1) {
            if file.is_checked((item.offset, piece)) {
                continue;
            }
            let (range, expect) = sum.piece(piece);
            let found = crc32(&bytes[range.start as usize..range.end as usize]);
            if found != expect {
                return Err(CheckpointError::Checksum {
                    path: file.path.clone(),
                    key: key.to_string(),
                    at: item.offset + range.start,
                    len: range.end - range.start,
                    found,
                    expect,
                });
            }
            file.set_checked((item.offset, piece));
        }
        Ok(())
    }

    /// The checksums of an item, which must be of this item.
    fn sum_of<'a>(
        &self,
        key: &str,
        stored: Option<&Chunk>,
        item: &Item,
        sums: &'a Sums,
    ) -> Result<&'a Sum, CheckpointError> {
        let fail = |why: String| self.in_item(Broken::at(0, why), key, item);
        let Some(sum) = sums.get(&item.offset) else {
            return Err(fail("the file of checksums has none of this item".into()));
        };
        let is_it = sum.key == key && sum.offsets.as_deref() == stored.map(|it| &it.offsets[..]);
        // Two keys may share an item, and one is in the file.
        let is_of_another = || match (&sum.offsets, self.tensor(&sum.key)) {
            (Some(offsets), Some(tensor)) => tensor
                .chunks
                .iter()
                .any(|it| it.item == *item && it.chunk.offsets[..] == offsets[..]),
            (None, _) => self.objects.get(&sum.key).is_some_and(|it| it.item == *item),
            (Some(_), None) => false,
        };
        if sum.len == item.len && (is_it || is_of_another()) {
            return Ok(sum);
        }
        let of = sum.offsets.as_ref().map_or(String::new(), |it| format!(" {it:?}"));
        Err(fail(format!(
            "the file of checksums has `{}`{of} of {} bytes here: it is of another save or another file",
            short(&sum.key),
            sum.len
        )))
    }

    /// Compares a record with the checksum in its item, once, unless there are checksums beside the file.
    fn check_record(
        &self,
        key: &str,
        item: &Item,
        record: &Record<'_>,
    ) -> Result<(), CheckpointError> {
        let file = &self.files[item.file as usize];
        if file.sums()?.is_none() && !file.is_checked((item.offset, 0)) {
            self.check_sum(key, item, record)?;
            file.set_checked((item.offset, 0));
        }
        Ok(())
    }

    /// Whether a record of an item has the checksum that is stored with it.
    pub(crate) fn check_sum(
        &self,
        key: &str,
        item: &Item,
        record: &Record<'_>,
    ) -> Result<(), CheckpointError> {
        let found = crc32(record.bytes);
        if found == record.crc32 {
            return Ok(());
        }
        Err(CheckpointError::Checksum {
            path: self.file_path(item.file).to_path_buf(),
            key: key.to_string(),
            // Of what is compressed, only the whole has a place.
            at: item.offset + if item.encoding == Encoding::Plain { record.at } else { 0 },
            len: record.bytes.len() as u64,
            found,
            expect: record.crc32,
        })
    }

    /// A whole tensor; see [`Checkpoint::read`].
    pub fn read_all(&self, key: &str) -> Result<Vec<u8>, CheckpointError> {
        let Some(tensor) = self.tensor(key) else {
            return Err(self.no_key("tensor", key, self.tensors.keys()));
        };
        // Before memory is taken for what may be nowhere.
        self.check_items(key)?;
        let mut out = vec![0; tensor.bytes() as usize];
        self.read(key, &whole(&tensor.shape), &mut out)?;
        Ok(out)
    }

    /// Whether the boxes of a tensor make it up: whoever reads it hears the same.
    ///
    /// # Errors
    /// If some element is in no box, or in several.
    pub fn check_cover(&self, key: &str) -> Result<(), CheckpointError> {
        let Some(Entry { tensor, cover }) = self.tensors.get(key) else { return Ok(()) };
        let boxes = || tensor.chunks.iter().map(|it| &it.chunk);
        cover.get_or_init(|| cover::check(&tensor.shape, boxes())).clone().map_err(|it| {
            CheckpointError::Cover {
                path: self.path.clone(),
                key: key.to_string(),
                shape: tensor.shape.clone(),
                why: it.to_string(),
            }
        })
    }

    /// Copies what is in `common` from the item of the box `stored` to the box `wanted`.
    fn copy(
        &self,
        key: &str,
        tensor: &StoredTensor,
        stored: &Chunk,
        item: &Item,
        common: &Chunk,
        (wanted, out): (&Chunk, &mut [u8]),
    ) -> Result<(), CheckpointError> {
        let unit = tensor.dtype.bytes();
        let n: u64 = stored.sizes.iter().product();
        // What the archive says of itself is at both of its ends.
        for end in [0..1, item.len.saturating_sub(1)..item.len] {
            self.check_bytes(key, Some(stored), item, end)?;
        }
        let content = self.content(key, item, n * unit)?;
        let fail = |it: Broken| self.in_item(it, key, item);
        let opened = match &content {
            Content::Raw(_) => None,
            Content::Archive(it) => Some(self.opened(item, it, tensor, stored).map_err(fail)?),
            Content::Decoded(it) => Some(self.opened(item, it, tensor, stored).map_err(fail)?),
        };
        let (view, data, at, big_endian) = match (&content, opened) {
            (_, Some(TensorItem { strides, start, big_endian, record, .. })) => {
                self.check_record(key, item, &record)?;
                (View { start, strides }, record.bytes, record.at, big_endian)
            }
            (Content::Raw(it), None) => (View::row_major(&stored.sizes), *it, 0, false),
            (_, None) => unreachable!("archives were opened"),
        };
        let inside = |of: &Chunk| -> SmallVec<[u64; 4]> {
            common.offsets.iter().zip(&of.offsets).map(|(at, start)| at - start).collect()
        };
        let from = view.from(inside(stored));
        if item.encoding == Encoding::Plain {
            let mut check = |it: Range<u64>| {
                self.check_bytes(key, Some(stored), item, at + it.start..at + it.end)
            };
            spans(&from, &common.sizes, unit, PIECE, &mut check)?;
        }
        let to = View::row_major(&wanted.sizes).from(inside(wanted));
        let swap = if big_endian { tensor.dtype.word() as usize } else { 1 };
        copy(&common.sizes, unit as usize, swap, (&from, data), (&to, out));
        Ok(())
    }

    /// The bytes of an item, whose elements are `n_bytes`.
    pub(crate) fn content(
        &self,
        key: &str,
        item: &Item,
        n_bytes: u64,
    ) -> Result<Content<'_>, CheckpointError> {
        let bytes = self.fetched(key, item)?;
        match item.encoding {
            Encoding::Plain => Ok(Content::Archive(bytes)),
            Encoding::Zstd => unzstd(bytes, n_bytes)
                .map(Content::Decoded)
                .map_err(|it| self.in_item(it, key, item)),
            Encoding::Raw if bytes.len() as u64 == n_bytes => Ok(Content::Raw(bytes)),
            Encoding::Raw => {
                let why = format!("{} bytes, and its shape needs {n_bytes}", bytes.len());
                Err(self.in_item(Broken::at(0, why), key, item))
            }
        }
    }

    /// The bytes of a file that are an item.
    fn bytes(&self, key: &str, item: &Item) -> Result<&[u8], CheckpointError> {
        let file = &self.files[item.file as usize];
        let map = file.map()?;
        let bytes = map.bytes();
        let range = usize::try_from(item.offset)
            .ok()
            .and_then(|start| Some(start..start.checked_add(usize::try_from(item.len).ok()?)?));
        range.and_then(|it| bytes.get(it)).ok_or_else(|| {
            let why = format!(
                "the item is {} bytes long, and the file ends at byte {}: it is cut off",
                item.len,
                bytes.len()
            );
            self.in_item(Broken::at(0, why), key, item)
        })
    }

    /// As [`Checkpoint::bytes`]; if there are many, the system begins to read them.
    fn fetched(&self, key: &str, item: &Item) -> Result<&[u8], CheckpointError> {
        let res = self.bytes(key, item)?;
        if item.len > 1 << 20 {
            let start = item.offset as usize;
            self.map_file(item.file)?.will_need(start..start + res.len());
        }
        Ok(res)
    }

    /// The checksums beside a file; `None` if nobody made any.
    pub(crate) fn sums(&self, file: u32) -> Result<Option<&Sums>, CheckpointError> {
        self.files[file as usize].sums()
    }

    /// The tensor in the archive of an item, which must be what the index says, and must not stand for more bytes than
    /// its file has: strides of zero repeat elements.
    pub(crate) fn opened<'a>(
        &self,
        item: &Item,
        archive: &'a [u8],
        tensor: &StoredTensor,
        stored: &Chunk,
    ) -> Result<TensorItem<'a>, Broken> {
        let found = archive::read_tensor(archive)?;
        agrees(&found, tensor, stored)?;
        let n_bytes = stored.sizes.iter().product::<u64>() * tensor.dtype.bytes();
        let file = self.map_file(item.file).map_or(0, |it| it.bytes().len());
        let most = file.max(archive.len()) as u64;
        match n_bytes <= most {
            true => Ok(found),
            false => Err(Broken::at(
                0,
                format!(
                    "{}{:?} are {n_bytes} bytes, and the file has {most}: the item repeats elements",
                    tensor.dtype,
                    &stored.sizes[..]
                ),
            )),
        }
    }

    /// Whether a file that is there ends before an item does.
    pub(crate) fn is_cut_off(&self, item: &Item) -> bool {
        let end = item.offset.checked_add(item.len);
        let is_within = |it: &Mapped| end.is_some_and(|end| end <= it.bytes().len() as u64);
        self.map_file(item.file).is_ok_and(|it| !is_within(it))
    }

    /// The folder that names of files are relative to.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a file.
    pub(crate) fn file_path(&self, file: u32) -> &Path {
        &self.files[file as usize].path
    }

    /// A file, mapped.
    pub(crate) fn map_file(&self, file: u32) -> Result<&Mapped, CheckpointError> {
        self.files[file as usize].map()
    }

    pub(crate) fn in_item(&self, it: Broken, key: &str, item: &Item) -> CheckpointError {
        it.in_item(&self.files[item.file as usize].path, key, item.offset)
    }

    fn no_key<'a>(
        &self,
        what: &'static str,
        key: &str,
        keys: impl Iterator<Item = &'a String>,
    ) -> CheckpointError {
        // The key that begins and ends most like this one, if that is most of it.
        let like = |it: &str| {
            let same = |it: &(char, char)| it.0 == it.1;
            let start = it.chars().zip(key.chars()).take_while(same).count();
            let end = it.chars().rev().zip(key.chars().rev()).take_while(same).count();
            (start + end).min(key.len())
        };
        let near = keys.max_by_key(|it| like(it)).filter(|it| like(it) * 3 > key.len() * 2);
        CheckpointError::NoKey {
            path: self.path.clone(),
            what,
            key: key.to_string(),
            near: near.cloned(),
        }
    }
}

/// The most bytes that a compressed object may be.
pub(crate) const MAX_OBJECT: u64 = 64 << 20;

/// What an archive of `torch.save` takes besides its data, generously.
const ARCHIVE: u64 = 1 << 16;

/// Undoes zstd; `n_bytes` are the elements of the item. What would take more than half of the memory that
/// is free is refused: a few bytes can stand for any number.
pub(crate) fn unzstd(bytes: &[u8], n_bytes: u64) -> Result<Vec<u8>, Broken> {
    let fail = |why: &dyn std::fmt::Display| Broken::at(0, format!("zstd: {why}"));
    let decoder = StreamingDecoder::new(bytes).map_err(|it| fail(&it))?;
    let mut res = Vec::new();
    let most = n_bytes.saturating_add(ARCHIVE);
    let room = memory("MemAvailable").map_or(u64::MAX, |it| it / 2);
    let limit = most.min(room);
    decoder.take(limit.saturating_add(1)).read_to_end(&mut res).map_err(|it| fail(&it))?;
    match res.len() as u64 <= limit {
        true => Ok(res),
        false if limit == most => Err(fail(&"more bytes than the item can have")),
        false => Err(fail(&format!("more than {room} bytes, half of the memory that is free"))),
    }
}

/// Whether the tensor in an item has the type and the sizes of a box.
fn agrees(item: &TensorItem<'_>, tensor: &StoredTensor, stored: &Chunk) -> Result<(), Broken> {
    let is_empty = |it: &[u64]| it.contains(&0);
    let same_sizes = item.sizes == stored.sizes
        // PyTorch forgets the other sizes of some empty shards.
        || is_empty(&item.sizes) && is_empty(&stored.sizes);
    match same_sizes && item.dtype == tensor.dtype {
        true => Ok(()),
        false => Err(Broken::at(
            0,
            format!(
                "the item is {}{:?}, and the index says {}{:?}",
                item.dtype,
                &item.sizes[..],
                tensor.dtype,
                &stored.sizes[..]
            ),
        )),
    }
}

impl DataFile {
    fn new(folder: &Path, name: String) -> DataFile {
        let path = folder.join(&name);
        let (map, sums, checked) = (OnceLock::new(), OnceLock::new(), Mutex::default());
        DataFile { name, path, map, sums, checked }
    }

    /// Its content.
    pub(crate) fn map(&self) -> Result<&Mapped, CheckpointError> {
        let open =
            || Mapped::open(&self.path).map_err(|it| CheckpointError::io("read", &self.path, &it));
        self.map.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The checksums beside it; `None` if nobody made any.
    fn sums(&self) -> Result<Option<&Sums>, CheckpointError> {
        let read = || {
            let mut path = self.path.clone().into_os_string();
            path.push(sums::file_name(""));
            let path = PathBuf::from(path);
            if path.symlink_metadata().is_err_and(|it| it.kind() == ErrorKind::NotFound) {
                return Ok(None);
            }
            let map = Mapped::open(&path).map_err(|it| CheckpointError::io("read", &path, &it))?;
            let sums = sums::read(map.bytes()).map_err(|it| it.in_index(&path))?;
            Ok(Some(sums.into_iter().map(|it| (it.at, it)).collect()))
        };
        self.sums.get_or_init(read).as_ref().map(Option::as_ref).map_err(Clone::clone)
    }

    fn is_checked(&self, piece: (u64, u64)) -> bool {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner).contains(&piece)
    }

    fn set_checked(&self, piece: (u64, u64)) {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner).insert(piece);
    }
}

/// Whether a number can be a count of steps or samples: beyond 2^53, a float is none.
pub fn is_count(number: f64) -> bool {
    (0.0..=(1u64 << 53) as f64).contains(&number)
}

/// A box that is a whole tensor.
pub(crate) fn whole(shape: &[u64]) -> Chunk {
    Chunk { offsets: SmallVec::from_elem(0, shape.len()), sizes: shape.into() }
}

/// What two boxes have in common, if anything.
pub fn overlap(a: &Chunk, b: &Chunk) -> Option<Chunk> {
    let mut res = Chunk::default();
    for dim in 0..a.offsets.len() {
        let start = a.offsets[dim].max(b.offsets[dim]);
        let end = (a.offsets[dim] + a.sizes[dim]).min(b.offsets[dim] + b.sizes[dim]);
        if start >= end {
            return None;
        }
        res.offsets.push(start);
        res.sizes.push(end - start);
    }
    Some(res)
}

/// Whether a box is within a tensor.
pub(crate) fn is_within(chunk: &Chunk, shape: &[u64]) -> bool {
    let mut dims = chunk.offsets.iter().zip(&chunk.sizes).zip(shape);
    chunk.offsets.len() == shape.len()
        && chunk.sizes.len() == shape.len()
        && dims.all(|((&offset, &size), &of)| offset.checked_add(size).is_some_and(|it| it <= of))
}

/// The folder that `latest` names, or the folder itself.
fn latest(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let file = folder.join("latest");
    if folder.join(".metadata").exists() || !file.is_file() {
        return Ok(folder.to_path_buf());
    }
    let mut text = Vec::new();
    let opened = fs::File::open(&file).map(|it| it.take(MAX_LATEST));
    opened
        .and_then(|mut it| it.read_to_end(&mut text))
        .map_err(|it| CheckpointError::io("read", &file, &it))?;
    let text = String::from_utf8_lossy(&text);
    let name = text.trim();
    let res = folder.join(name);
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) || !res.is_dir()
    {
        let name = short(name);
        let newest = checkpoints(folder)?.last().map_or(String::new(), |&it| {
            format!("; the newest checkpoint that is there is `{}`", step_name(it))
        });
        let why = format!("its file `latest` names `{name}`, and there is no such folder{newest}");
        return Err(CheckpointError::NoCheckpoint { path: folder.to_path_buf(), why });
    }
    Ok(res)
}

/// The most bytes of `latest` that are read: no name is longer.
const MAX_LATEST: u64 = 4096;

/// What a file is that somebody may take for a checkpoint, and what to do with it.
fn other_file(path: &Path) -> Option<String> {
    fs::metadata(path).is_ok_and(|it| it.is_file()).then_some(())?;
    let extension = path.extension().and_then(|it| it.to_str()).unwrap_or_default();
    let folder = folder_of(path);
    let text = match extension {
        _ if path.file_name().is_some_and(|it| it == "latest") => format!(
            "it is the file that names the newest checkpoint of a folder; name the folder, `{}`",
            folder.display()
        ),
        "distcp" | "sums" => {
            format!("it is a part of a checkpoint; name the folder, `{}`", folder.display())
        }
        _ if path.file_name().is_some_and(|it| it == ".metadata") => {
            format!("it is the index of a checkpoint; name the folder, `{}`", folder.display())
        }
        "plan" => "it is a plan; checkpoints are what `planc run --save DIR` writes".to_string(),
        "ron" => "it is a model; checkpoints are what `planc run --save DIR` writes".to_string(),
        _ => {
            let map = Mapped::open(path).ok()?;
            // A zip archive, or the pickle of PyTorch before 1.6.
            let is_zip = map.bytes().starts_with(b"PK\x03\x04");
            let is_pickle = map.bytes().starts_with(b"\x80\x02\x8a\x0a");
            if !is_zip && !is_pickle {
                return None;
            }
            "it is one file of `torch.save`; in Python, load it with `torch.load(.., weights_only=True)` and \
             save the dict with `torch.distributed.checkpoint.save` or `safetensors.torch.save_file`"
                .to_string()
        }
    };
    Some(text)
}

/// Why there is no checkpoint in a folder.
fn nothing(folder: &Path) -> CheckpointError {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|it| it.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    let below = names.iter().find(|it| folder.join(it).join(".metadata").exists());
    let why = if let Some(it) = below {
        format!(
            "it has no `latest`; name one of its folders, as in `{}`",
            folder.join(it).display()
        )
    } else if let Some(it) = names.iter().find(|it| it.ends_with(".distcp")) {
        format!(
            "it has `{it}` and no `.metadata`, which is written last: the save was not finished"
        )
    } else {
        "it has neither `.metadata` nor `*.safetensors`".to_string()
    };
    CheckpointError::NoCheckpoint { path: folder.to_path_buf(), why }
}
