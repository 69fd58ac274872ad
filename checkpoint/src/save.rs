//! Saving: what each coordinate writes, and the index of what all have written.
//!
//! Both are pure functions of a [`CheckpointLayout`] and three numbers, since the length of an item
//! follows from its type and sizes. So no rank has to hear from another: each knows where its items lie in
//! its file, and any can write the index.
//!
//! ```text
//! __0_0.distcp    hyper-parameters, numbers, what coordinate 0 writes of each tensor
//! __1_0.distcp    what coordinate 1 writes of each tensor; nothing, perhaps
//! ```
//!
//! A shard that is several boxes is several items. What several coordinates hold, one of them writes.

pub(crate) mod disk;
pub mod folder;
pub mod lock;
mod shard;
#[cfg(test)]
mod turns;

use ir::checkpoint::{CheckpointLayout, Optimizer, ParamGroup};
use ir::placement::{Chunk, LocalBox};
use ir::run::Decay;

use crate::archive::{object_item, tensor_item_len};
use crate::dtype::StoredType;
use crate::metadata::{
    Encoding, Item, Metadata, PathPart, StoredChunk, StoredObject, StoredTensor,
};
use crate::pickle::Value;

pub use folder::{Keep, Progress, StepFolder, run_id};
pub use lock::FolderLock;
pub use shard::ShardFile;

/// What is saved besides tensors, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Steps that are done.
    pub step: u64,
    /// The next sample of the data, over all ranks.
    pub sample: u64,
    /// The seed of data, dropout and initial weights.
    pub seed: u64,
    /// True if the loss and the gradients of the last step were finite. Otherwise the step was skipped.
    pub finite: bool,
}

/// A number that is saved as a tensor without dims.
#[derive(Debug, Clone, PartialEq)]
pub struct Scalar {
    /// Its keys, all of them stored once, each with its parts.
    pub keys: Vec<(String, Vec<String>)>,
    /// Its type.
    pub dtype: StoredType,
    /// Little-endian.
    pub bytes: Vec<u8>,
}

/// A Python value that is saved.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// Its key.
    pub key: String,
    /// The key's parts.
    pub path: Vec<PathPart>,
    /// The value.
    pub value: Value,
}

/// An item of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct FileItem {
    /// Its key; the first, if it has several.
    pub key: String,
    /// What is in it.
    pub content: Content,
    /// Its first byte.
    pub at: u64,
    /// How many.
    pub len: u64,
}

/// What is in an item.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// All of it.
    Object(Vec<u8>),
    /// A number.
    Scalar(Scalar),
    /// A part of a tensor.
    Shard {
        /// Index into [`CheckpointLayout::entries`].
        entry: usize,
        /// Which part, and where it is in the coordinate's buffer.
        local: LocalBox,
    },
}

/// `planc.schedule.*`: names and values, integers as such.
pub fn schedule_numbers(layout: &CheckpointLayout) -> [(&'static str, Number); 5] {
    let schedule = &layout.run.schedule;
    let (kind, until, min) = match schedule.decay {
        Decay::Constant => (0, 0, 0.0),
        Decay::Linear { until, min } => (1, until, min),
        Decay::Cosine { until, min } => (2, until, min),
    };
    [
        ("lr", Number::Float(schedule.lr)),
        ("warmup", Number::Int(schedule.warmup)),
        ("decay", Number::Int(kind)),
        ("until", Number::Int(until)),
        ("min", Number::Float(min)),
    ]
}

/// A number with its type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// int64.
    Int(u64),
    /// float64.
    Float(f64),
}

/// The numbers of a checkpoint.
pub fn scalars(layout: &CheckpointLayout, position: &Position) -> Vec<Scalar> {
    let mut res = Vec::new();
    let mut number = |path: &[&str], it: Number| {
        let (dtype, bytes) = match it {
            Number::Int(it) => (StoredType::I64, it.to_le_bytes()),
            Number::Float(it) => (StoredType::F64, it.to_le_bytes()),
        };
        res.push(Scalar { keys: vec![key(path)], dtype, bytes: bytes.to_vec() });
    };
    number(&["planc", "step"], Number::Int(position.step));
    number(&["planc", "sample"], Number::Int(position.sample));
    number(&["planc", "seed"], Number::Int(position.seed));
    number(&["planc", "finite"], Number::Int(position.finite.into()));
    for (name, it) in schedule_numbers(layout) {
        number(&["planc", "schedule", name], it);
    }
    res
}

/// Prefix of the keys of digests. A digest says who saved a checkpoint; it is no state.
pub const DIGESTS: &str = "planc.digest.";

/// The key of the description of the data that the run read, which is no state either.
pub const DATA: &str = "planc.data";

/// The hyper-parameters of a checkpoint, as PyTorch 2.11's optimizers give them, the digests of the model and the
/// plan that save it, and the data that they are trained on.
pub fn objects(layout: &CheckpointLayout, position: &Position) -> Vec<Object> {
    let lr = layout.run.schedule.at(position.step);
    let mut res = Vec::new();
    for (i, group) in layout.groups.iter().enumerate() {
        for (name, value) in hyper_parameters(group, lr) {
            let key = format!("optim.param_groups.{i}.{name}");
            let path = ["optim", "param_groups"].map(|it| PathPart::Key(it.to_string()));
            let rest = [PathPart::Index(i as u64), PathPart::Key(name.to_string())];
            res.push(Object { key, path: path.into_iter().chain(rest).collect(), value });
        }
    }
    if let Some(it) = &layout.digests {
        for (name, digest) in [("model", it.model), ("plan", it.plan)] {
            let path = ["planc", "digest", name].map(|it| PathPart::Key(it.to_string()));
            let (key, value) = (format!("{DIGESTS}{name}"), Value::Str(digest.to_string()));
            res.push(Object { key, path: path.to_vec(), value });
        }
    }
    if let Some(it) = &layout.data {
        let path = ["planc", "data"].map(|it| PathPart::Key(it.to_string()));
        let (key, value) = (DATA.to_string(), Value::Str(it.clone()));
        res.push(Object { key, path: path.to_vec(), value });
    }
    res
}

/// The entries of a group of PyTorch's AdamW or Adam, or SGD.
pub fn hyper_parameters(group: &ParamGroup, lr: f64) -> Vec<(&'static str, Value)> {
    let no = Value::Bool(false);
    let params = group.params.iter().map(|it| Value::Str(it.clone())).collect();
    let mut res = vec![("lr", Value::Float(lr))];
    match group.optimizer {
        Optimizer::Adam { decoupled, betas, eps, weight_decay } => res.extend([
            ("betas", Value::Tuple(vec![Value::Float(betas.0), Value::Float(betas.1)])),
            ("eps", Value::Float(eps)),
            ("weight_decay", Value::Float(weight_decay)),
            ("amsgrad", no.clone()),
            ("maximize", no.clone()),
            ("foreach", Value::None),
            ("capturable", no.clone()),
            ("differentiable", no),
            ("fused", Value::None),
            ("decoupled_weight_decay", Value::Bool(decoupled)),
        ]),
        Optimizer::Sgd { momentum, weight_decay } => res.extend([
            ("momentum", Value::Float(momentum)),
            ("dampening", Value::Int(0)),
            ("weight_decay", Value::Float(weight_decay)),
            ("nesterov", no.clone()),
            ("maximize", no.clone()),
            ("foreach", Value::None),
            ("differentiable", no),
            ("fused", Value::None),
        ]),
    }
    res.push(("params", Value::List(params)));
    res
}

/// The file of the coordinate `coord`, item by item.
pub fn file_items(layout: &CheckpointLayout, position: &Position, coord: &[u32]) -> Vec<FileItem> {
    let first = coord.iter().all(|&it| it == 0);
    let mut res = if first { head_items(layout, position) } else { Vec::new() };
    let mut at = res.last().map_or(0, |it| it.at + it.len);
    for (index, entry) in layout.entries.iter().enumerate() {
        if !entry.sharding.owns(coord, &layout.mesh, entry.salt) {
            continue;
        }
        for local in entry.sharding.local_boxes(&entry.ty.shape, &layout.mesh, coord) {
            let len = tensor_item_len(entry.ty.dtype.into(), &local.chunk.sizes);
            let content = Content::Shard { entry: index, local };
            res.push(FileItem { key: entry.key.clone(), content, at, len });
            at += len;
        }
    }
    res
}

/// What only coordinate 0 writes.
fn head_items(layout: &CheckpointLayout, position: &Position) -> Vec<FileItem> {
    let objects = objects(layout, position).into_iter().map(|it| {
        let item = object_item(&it.value);
        (it.key, item.len() as u64, Content::Object(item))
    });
    let scalars = scalars(layout, position)
        .into_iter()
        .map(|it| (it.keys[0].0.clone(), tensor_item_len(it.dtype, &[]), Content::Scalar(it)));
    let mut at = 0;
    let items = objects.chain(scalars).map(|(key, len, content)| {
        at += len;
        FileItem { key, content, at: at - len, len }
    });
    items.collect()
}

/// The index of what all coordinates write, each as [`file_items`] says.
pub fn metadata(layout: &CheckpointLayout, position: &Position) -> Metadata {
    let mesh = &layout.mesh;
    let files = (0..mesh.n_ranks()).map(folder::file_name).collect();
    let mut res = Metadata { files, ..Metadata::default() };
    let item = |file, offset, len| Item { file, offset, len, encoding: Encoding::Plain };
    // Where the next item of each file goes.
    let mut ends = vec![0; res.files.len()];
    let mut objects = objects(layout, position).into_iter();
    for FileItem { content, at, len, .. } in head_items(layout, position) {
        ends[0] = at + len;
        let stored = item(0, at, len);
        match content {
            Content::Object(_) => {
                let object = objects.next().expect("one item each");
                res.objects.insert(object.key, StoredObject { item: stored, path: object.path });
            }
            Content::Scalar(scalar) => {
                for (key, path) in scalar.keys {
                    let chunks = vec![StoredChunk { chunk: Chunk::default(), item: stored }];
                    let (dtype, shape, path) = (scalar.dtype, Vec::new(), keys(&path));
                    res.tensors.insert(key, StoredTensor { dtype, shape, chunks, path });
                }
            }
            Content::Shard { .. } => unreachable!("no tensor is in the head"),
        }
    }
    for entry in &layout.entries {
        let dtype = StoredType::from(entry.ty.dtype);
        let mut chunks = Vec::new();
        // Shards are of one size, but for some.
        let mut last: Option<(Chunk, u64)> = None;
        for coord in entry.writers(mesh) {
            let writer = mesh.rank_of(&coord);
            let end = &mut ends[writer as usize];
            for chunk in entry.sharding.chunks(&entry.ty.shape, mesh, &coord) {
                let len = match &last {
                    Some((it, len)) if it.sizes == chunk.sizes => *len,
                    _ => tensor_item_len(dtype, &chunk.sizes),
                };
                last = Some((chunk.clone(), len));
                chunks.push(StoredChunk { chunk, item: item(writer as u32, *end, len) });
                *end += len;
            }
        }
        let shape = entry.ty.shape.to_vec();
        let tensor = |path: &[String]| StoredTensor {
            dtype,
            shape: shape.clone(),
            chunks: chunks.clone(),
            path: keys(path),
        };
        for (key, path) in &entry.aliases {
            res.tensors.insert(key.clone(), tensor(path));
        }
        let path = keys(&entry.path);
        res.tensors.insert(entry.key.clone(), StoredTensor { dtype, shape, chunks, path });
    }
    res
}

fn key(path: &[&str]) -> (String, Vec<String>) {
    (path.join("."), path.iter().map(|it| it.to_string()).collect())
}

fn keys(path: &[String]) -> Vec<PathPart> {
    path.iter().map(|it| PathPart::Key(it.clone())).collect()
}
