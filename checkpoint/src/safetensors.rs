//! Folders of safetensors files: what `HuggingFaceStorageWriter` writes, sharded or consolidated, and
//! model folders of the Hugging Face hub.
//!
//! ```text
//! u64 length of the header | JSON {"name": {dtype, shape, data_offsets}, "__metadata__": {..}} | data
//! ```
//!
//! Shards say where they are in `__metadata__.DCP_SHARDING_INFO`, itself JSON in a string. Nobody says how
//! large the tensor is: it ends where its last shard does.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use ir::placement::Chunk;
use ir::types::TensorType;
use rustc_hash::FxHashSet;
use safetensors::tensor::TensorInfo;
use safetensors::{SafeTensorError, SafeTensors};
use serde::Deserialize;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use smallvec::SmallVec;

use crate::dtype::StoredType;
use crate::error::{Broken, CheckpointError, short};
use crate::map::Mapped;
use crate::metadata::{Encoding, Item, Metadata, StoredChunk, StoredTensor};
use crate::open::Found;

/// The header of a file.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    /// Its tensors by name.
    pub tensors: BTreeMap<String, Slice>,
}

/// A tensor in a file.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    /// Its element type.
    pub dtype: StoredType,
    /// Its first element in the global tensor.
    pub offsets: SmallVec<[u64; 4]>,
    /// Its sizes.
    pub sizes: SmallVec<[u64; 4]>,
    /// First byte in the file.
    pub start: u64,
    /// How many bytes.
    pub len: u64,
}

#[derive(Deserialize)]
struct Place {
    saved_offsets: Vec<u64>,
}

impl Header {
    /// Reads the header of a file.
    pub(crate) fn open(path: &Path) -> Result<Header, CheckpointError> {
        let map = Mapped::open(path).map_err(|it| CheckpointError::io("read", path, &it))?;
        Header::read(map.bytes()).map_err(|it| it.in_index(path))
    }

    fn read(bytes: &[u8]) -> Result<Header, Broken> {
        let (len, header) = parse(bytes)?;
        let fail = |why: String| Broken::at(8, why);
        let places = header.metadata().as_ref().and_then(|it| it.get("DCP_SHARDING_INFO"));
        let places: BTreeMap<String, Place> = match places {
            Some(it) => serde_json::from_str(it)
                .map_err(|it| fail(format!("DCP_SHARDING_INFO in its header: {it}")))?,
            None => BTreeMap::new(),
        };
        let slice = |(name, it): (String, &TensorInfo)| {
            let fail = |why: String| fail(format!("`{}` in its header: {why}", short(&name)));
            let dtype = StoredType::from_safetensors(&it.dtype.to_string())
                .ok_or_else(|| fail(format!("dtype {} is not one of PyTorch's", it.dtype)))?;
            let sizes: SmallVec<[u64; 4]> = it.shape.iter().map(|&it| it as u64).collect();
            if !TensorType::fits(&sizes) || sizes.len() > 64 {
                return Err(fail("its shape is beyond 2^46 elements or 64 dims".into()));
            }
            let offsets = match places.get(&name) {
                Some(it) => SmallVec::from_slice(&it.saved_offsets),
                None => SmallVec::from_elem(0, sizes.len()),
            };
            if offsets.len() != sizes.len() {
                return Err(fail("its saved_offsets have not its number of dims".into()));
            }
            let (start, end) = it.data_offsets;
            let (start, len) = ((8 + len + start) as u64, (end - start) as u64);
            Ok((name, Slice { dtype, offsets, sizes, start, len }))
        };
        Ok(Header {
            tensors: header.tensors().into_iter().map(slice).collect::<Result<_, Broken>>()?,
        })
    }
}

/// Reads a header: its length, and what is in it. Ranges are checked by the library: they follow each other without
/// gaps up to the end of the file, and each has the bytes of its tensor.
pub(crate) fn parse(file: &[u8]) -> Result<(usize, safetensors::tensor::Metadata), Broken> {
    let res = SafeTensors::read_metadata(file).map_err(|it| refused(file, &it))?;
    match repeated_name(file) {
        Some(name) => {
            Err(Broken::at(8, format!("two tensors in its header are called `{}`", short(&name))))
        }
        None => Ok(res),
    }
}

/// The reason for which the library refuses a file, in words.
fn refused(file: &[u8], error: &SafeTensorError) -> Broken {
    let header = |why: String| Broken::at(8, why);
    match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            Broken::at(file.len(), "the file is cut off: it has no whole header")
        }
        SafeTensorError::InvalidOffset(name) => header(format!(
            "`{}` in its header: its bytes do not begin where those of the tensor before it end",
            short(name)
        )),
        SafeTensorError::MetadataIncompleteBuffer => Broken::at(
            file.len(),
            "the tensors in its header end at another byte than the file: it is cut off, or bytes follow",
        ),
        SafeTensorError::InvalidHeader(it) => header(format!("its header: {it}")),
        SafeTensorError::InvalidHeaderDeserialization(it) => header(format!("its header: {it}")),
        SafeTensorError::TensorInvalidInfo => {
            header("its header: the bytes of a tensor are not those of its shape and dtype".into())
        }
        it => header(format!("its header: {it}")),
    }
}

/// A name that two tensors of a safetensors file have, if any. The library keeps the last of them.
pub fn repeated_name(file: &[u8]) -> Option<String> {
    struct Names;
    impl<'de> Visitor<'de> for Names {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a header")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<String>, A::Error> {
            let (mut seen, mut res) = (FxHashSet::default(), None);
            while let Some(name) = map.next_key::<String>()? {
                map.next_value::<IgnoredAny>()?;
                if let Some(it) = seen.replace(name) {
                    res = Some(it);
                }
            }
            Ok(res)
        }
    }
    let len = u64::from_le_bytes(*file.first_chunk()?);
    let header = file.get(8..usize::try_from(len).ok()?.checked_add(8)?)?;
    serde_json::Deserializer::from_slice(header).deserialize_map(Names).ok()?
}

/// The folder of a file.
pub(crate) fn file_folder(path: &Path) -> PathBuf {
    path.parent().map_or_else(PathBuf::new, Path::to_path_buf)
}

/// Opens one file.
pub(crate) fn open_file(path: &Path) -> Result<Found, CheckpointError> {
    let name = path.file_name().map(|it| it.to_string_lossy().into_owned()).unwrap_or_default();
    open_files(&file_folder(path), vec![name])
}

/// The index of a Hugging Face model.
#[derive(Deserialize)]
pub(crate) struct Index {
    /// Where it is.
    #[serde(skip)]
    pub path: PathBuf,
    /// Which file each key is in.
    pub weight_map: BTreeMap<String, String>,
}

impl Index {
    /// The index in a folder; `None` if it has none.
    pub fn open(folder: &Path) -> Result<Option<Index>, CheckpointError> {
        let path = folder.join("model.safetensors.index.json");
        if !path.is_file() {
            return Ok(None);
        }
        let map = Mapped::open(&path).map_err(|it| CheckpointError::io("read", &path, &it))?;
        let index: Index = serde_json::from_slice(map.bytes())
            .map_err(|it| Broken::at(0, it.to_string()).in_index(&path))?;
        Ok(Some(Index { path, ..index }))
    }
}

/// Opens a folder of safetensors files; `None` if it has none.
pub(crate) fn open(folder: &Path) -> Result<Option<Found>, CheckpointError> {
    if let Some(Index { path, weight_map }) = Index::open(folder)? {
        let files: BTreeSet<&String> = weight_map.values().collect();
        if let Some(it) =
            files.iter().find(|it| it.starts_with('.') || it.contains(['/', '\\', '\0']))
        {
            let why = format!("weights are in `{it}`, which is not in this folder");
            return Err(Broken::at(0, why).in_index(&path));
        }
        let mut found = open_files(folder, files.into_iter().cloned().collect())?;
        for (key, file) in weight_map {
            let stored = found.index.tensors.get(&key);
            let files = &found.index.files;
            let is_there = stored
                .is_some_and(|it| it.chunks.iter().any(|it| files[it.item.file as usize] == file));
            if !is_there {
                let text = format!("`{file}` has no `{key}`, which the folder's index says it has");
                found.index.problems.push(text);
            }
        }
        return Ok(Some(found));
    }
    let mut files = Vec::new();
    let fail = |it: std::io::Error| CheckpointError::io("read", folder, &it);
    for entry in fs::read_dir(folder).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name().into_string().unwrap_or_default();
        if name.ends_with(".safetensors") && !name.starts_with('.') {
            files.push(name);
        }
    }
    files.sort();
    match files.is_empty() {
        true => Ok(None),
        false => open_files(folder, files).map(Some),
    }
}

fn open_files(folder: &Path, files: Vec<String>) -> Result<Found, CheckpointError> {
    let mut index = Metadata::default();
    for (file, name) in files.iter().enumerate() {
        let header = Header::open(&folder.join(name))?;
        for (key, slice) in header.tensors {
            let Slice { dtype, offsets, sizes, start, len } = slice;
            let ends = offsets.iter().zip(&sizes).map(|(at, size)| at.checked_add(*size));
            let shape = ends.collect::<Option<Vec<u64>>>().filter(|it| TensorType::fits(it));
            let Some(shape) = shape else {
                let why = format!("`{key}` in its header ends beyond 2^46 elements");
                return Err(Broken::at(8, why).in_index(&folder.join(name)));
            };
            let item = Item { file: file as u32, offset: start, len, encoding: Encoding::Raw };
            let chunk = StoredChunk { chunk: Chunk { offsets, sizes }, item };
            let new = || StoredTensor {
                dtype,
                shape: shape.clone(),
                chunks: Vec::new(),
                path: Vec::new(),
            };
            let tensor = index.tensors.entry(key.clone()).or_insert_with(new);
            if tensor.dtype != dtype || tensor.shape.len() != shape.len() {
                index.problems.push(format!("`{key}` in `{name}` is not like in other files"));
                continue;
            }
            let ends = tensor.shape.iter_mut().zip(shape);
            ends.for_each(|(known, end)| *known = end.max(*known));
            tensor.chunks.push(chunk);
        }
    }
    for (key, tensor) in &index.tensors {
        if !TensorType::fits(&tensor.shape) {
            let why = format!("`{key}` ends beyond 2^46 elements");
            return Err(Broken::at(0, why).in_index(folder));
        }
    }
    index.files = files;
    Ok(Found { index, warnings: Vec::new() })
}
