//! [`Metadata`], the index of a checkpoint: which tensors and objects there are, and where their bytes
//! are. `.metadata` is its pickle.
//!
//! PyTorch keeps boxes and places apart and joins them by `(key, offsets)`; here a box has its place.
//! Reading it back in PyTorch gives (attributes with defaults left out):
//!
//! ```text
//! Metadata
//!   state_dict_metadata  {"model.w": TensorStorageMetadata(properties, size, chunks), "step": Bytes..}
//!   planner_data         {"model.w": ("model", "w"), "step": ("step",)}
//!   storage_data         {MetadataIndex("model.w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 1577)}
//!   storage_meta         StorageMeta(save_id)
//!   version              "1.0.0"
//! ```

mod read;
mod write;

use std::collections::BTreeMap;
use std::fmt;

use ir::placement::Chunk;

use crate::dtype::StoredType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    /// Names of files, relative to the checkpoint; [`Item::file`] is an index.
    pub files: Vec<String>,
    /// Tensors by key.
    pub tensors: BTreeMap<String, StoredTensor>,
    /// Python objects by key.
    pub objects: BTreeMap<String, StoredObject>,
    /// A name for this save, unlike that of all others.
    pub save_id: Option<String>,
    /// What the index says that cannot be: boxes without a place, places without a box. Reading fills
    /// this, writing ignores it.
    pub problems: Vec<String>,
}

/// A tensor, and the boxes in which it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTensor {
    /// How an element is encoded.
    pub dtype: StoredType,
    /// Global sizes.
    pub shape: Vec<u64>,
    /// Its boxes, in the order of the ranks that saved them. Empty boxes have places too.
    pub chunks: Vec<StoredChunk>,
    /// Where it is in the nested dict that was saved; empty if that is not known.
    pub path: Vec<PathPart>,
}

/// A box of a tensor, and where it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredChunk {
    /// The box, in indices of the global tensor; unlike in a sharding, sizes may be 0.
    pub chunk: Chunk,
    /// Its bytes.
    pub item: Item,
}

/// A Python object, and where it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredObject {
    /// Its bytes.
    pub item: Item,
    /// Where it is in the nested dict that was saved; empty if that is not known.
    pub path: Vec<PathPart>,
}

/// Bytes of a file that are one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Item {
    /// Index into [`Metadata::files`].
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// What was done with the bytes of the item.
    pub encoding: Encoding,
}

/// What stands in the bytes of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// The archive of `torch.save`.
    Plain,
    /// That, compressed as one zstd stream (`stream.zstd/1`).
    Zstd,
    /// The elements alone, row-major, as in a safetensors file. No `.metadata` says this; it is found.
    Raw,
}

/// A step on the way to a value in nested dicts and lists.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathPart {
    /// A key of a dict.
    Key(String),
    /// A position in a list.
    Index(u64),
}

impl fmt::Display for PathPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathPart::Key(it) => f.write_str(it),
            PathPart::Index(it) => write!(f, "{it}"),
        }
    }
}

impl StoredTensor {
    /// Number of elements.
    pub fn n_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> u64 {
        self.n_elements() * self.dtype.bytes()
    }
}

#[cfg(test)]
mod tests;
