//! The weights of a checkpoint as a Hugging Face model: safetensors files and their index.
//!
//! ```text
//! model-00001-of-00002.safetensors    or model.safetensors, if one is enough
//! model-00002-of-00002.safetensors
//! model.safetensors.index.json        which tensor is where; written last
//! config.json                         if one was given
//! ```
//!
//! Tied weights are stored once, under the name that Hugging Face stores.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::convert::{Effect, effect};
use super::error::{Mismatch, TransferError};
use super::fused::{Fused, read_fused};
use super::params::Param;
use super::write::{Entry, SafetensorsFile, sort};
use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::mapping::{Blocks, Mapping};
use crate::metadata::{Item, PathPart, StoredTensor};
use crate::open::Checkpoint;
use crate::save::folder::{sync_folder, sync_folder_of, write_synced};

/// What stands before the name of a parameter where the dict of the model is one of several.
const MODEL: &str = "model.";

const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// The folder in which files are until all are there, or how its name ends.
const UNFINISHED: &str = ".tmp";

/// How weights go out.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// What becomes of keys.
    pub mapping: &'a Mapping,
    /// The type in which floats are stored; by default as they are.
    pub dtype: Option<StoredType>,
    /// The most bytes of a file; a larger tensor has a file of its own.
    pub max_shard: u64,
}

/// Weights that are about to be written.
#[derive(Debug)]
pub struct Export<'a> {
    source: &'a Checkpoint,
    /// By the order in which they are put into files.
    tensors: Vec<Tensor>,
    /// Parameters and their shapes, other names included.
    params: BTreeMap<String, Vec<u64>>,
    /// Names that are left out, each with the one under which its tensor is stored.
    pub dropped: Vec<(String, String)>,
    /// Tensors that are neither weights nor state of the optimizer or of planc.
    pub left_out: Vec<String>,
    /// Whether the head is tied to the embedding, as a config says.
    pub tied: bool,
    max_shard: u64,
}

#[derive(Debug)]
struct Tensor {
    entry: Entry,
    /// Its parameters, by their keys in the checkpoint.
    keys: Vec<String>,
    fused: Fused,
}

/// What was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Tensors.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files.
    pub files: u64,
}

/// Finds out under which keys the parameters of a checkpoint are stored.
///
/// # Errors
/// If there are no parameters, or some fit no rule.
pub fn plan<'a>(
    source: &'a Checkpoint,
    options: &Options<'_>,
) -> Result<Export<'a>, TransferError> {
    let mapping = options.mapping;
    let prefix = if is_nested(source) { MODEL } else { "" };
    let mut stored: BTreeMap<&str, &StoredTensor> = BTreeMap::new();
    let mut left_out = Vec::new();
    for (key, it) in source.tensors() {
        match key.strip_prefix(prefix) {
            Some(name) if prefix == MODEL || it.path.len() < 2 && !is_state(key) => {
                stored.insert(name, it);
            }
            _ if is_state(key) => (),
            _ => left_out.push(key.to_string()),
        }
    }
    if stored.is_empty() {
        let (path, what) = (source.path().to_path_buf(), "tensor");
        let near = source.tensors().next().map(|it| it.0.to_string());
        return Err(CheckpointError::NoKey { path, what, key: "model.*".into(), near }.into());
    }
    let owners = owners(&stored, mapping);
    let has = |name: &str| owners.get(name) == Some(&name);
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut mismatch = Mismatch::default();
    for name in stored.keys().filter(|it| has(it)) {
        let back = mapping.backward(name, &has);
        if tensors.contains_key(&back.key) {
            continue;
        }
        let parts: Vec<&StoredTensor> = back.params.iter().map(|it| stored[it.as_str()]).collect();
        let Blocks::Count(blocks) = back.blocks else {
            let why = "is in blocks of which a checkpoint does not say how many";
            mismatch.shapes.push(format!("`{}` {why}", back.key));
            continue;
        };
        let rows: Vec<u64> =
            parts.iter().map(|it| it.shape.first().copied().unwrap_or(1)).collect();
        let shape = match fused_shape(&parts, &rows, back.transpose, blocks) {
            Ok(it) => it,
            Err(why) => {
                mismatch.shapes.push(format!("`{}` {why}", back.key));
                continue;
            }
        };
        let from = parts[0].dtype;
        let dtype = match options.dtype {
            Some(to) if effect(from, to).is_some() => to,
            _ => from,
        };
        if let Some(it) = parts.iter().find(|it| !converts(it.dtype, dtype)) {
            mismatch.dtypes.push(format!("`{}` has parts of {from} and {}", back.key, it.dtype));
            continue;
        }
        let fused = Fused { rows, blocks, transpose: back.transpose };
        let keys = back.params.iter().map(|it| format!("{prefix}{it}")).collect();
        let entry = Entry { key: back.key.clone(), dtype, shape };
        tensors.insert(back.key, Tensor { entry, keys, fused });
    }
    mismatch.check()?;
    let mut tensors: Vec<Tensor> = tensors.into_values().collect();
    tensors.sort_by_cached_key(|it| natural(&it.entry.key));
    let dropped: Vec<(String, String)> = owners
        .iter()
        .filter(|(name, owner)| name != owner)
        .map(|(name, owner)| (name.to_string(), owner.to_string()))
        .collect();
    let tied = dropped.iter().any(|it| mapping.is_alias(&it.0));
    let params = stored.iter().map(|(name, it)| (name.to_string(), it.shape.clone())).collect();
    let max_shard = options.max_shard;
    Ok(Export { source, tensors, params, dropped, left_out, tied, max_shard })
}

/// Whether weights are in a dict `model` beside others, and `model.` is no part of their names: as the paths of
/// keys say, or the other keys where a file has no paths.
fn is_nested(source: &Checkpoint) -> bool {
    let in_model = |it: &StoredTensor| {
        it.path.len() > 1 && matches!(&it.path[0], PathPart::Key(it) if it == "model")
    };
    if source.tensors().any(|(_, it)| !it.path.is_empty()) {
        return source.tensors().any(|(_, it)| in_model(it));
    }
    let is_other = |key: &str| !key.starts_with(MODEL) && !is_state(key);
    source.tensors().any(|it| is_state(it.0)) && !source.tensors().any(|it| is_other(it.0))
}

/// Whether a key is of the optimizer's state or of planc's.
fn is_state(key: &str) -> bool {
    key.starts_with("optim.") || key.starts_with("planc.")
}

fn converts(from: StoredType, to: StoredType) -> bool {
    matches!(effect(from, to), Some(Effect::None | Effect::Exact | Effect::Rounds))
}

/// The name under which the tensor of each name is stored: its own, unless it shares the bytes of another.
/// Of several names, those that the mapping knows as aliases go first.
fn owners<'a>(
    stored: &BTreeMap<&'a str, &StoredTensor>,
    mapping: &Mapping,
) -> BTreeMap<&'a str, &'a str> {
    let mut by_bytes: BTreeMap<Vec<(u32, u64)>, Vec<&str>> = BTreeMap::new();
    let mut res = BTreeMap::new();
    for (&name, tensor) in stored {
        res.insert(name, name);
        if tensor.n_elements() > 0 {
            let place = |it: &Item| (it.file, it.offset);
            let places = tensor.chunks.iter().map(|it| place(&it.item)).collect();
            by_bytes.entry(places).or_default().push(name);
        }
    }
    for names in by_bytes.values() {
        let owner = names.iter().find(|it| !mapping.is_alias(it)).unwrap_or(&names[0]);
        for name in names {
            res.insert(name, owner);
        }
    }
    res
}

/// The shape of a tensor that is made of these.
fn fused_shape(
    parts: &[&StoredTensor],
    rows: &[u64],
    transpose: bool,
    blocks: u64,
) -> Result<Vec<u64>, String> {
    let columns = |it: &StoredTensor| it.shape.get(1..).unwrap_or_default().to_vec();
    if parts.iter().any(|it| columns(it) != columns(parts[0])) {
        let shapes: Vec<String> = parts.iter().map(|it| format!("{:?}", it.shape)).collect();
        return Err(format!("would be made of {}, which have other columns", shapes.join(" and ")));
    }
    if rows.iter().any(|it| !it.is_multiple_of(blocks)) {
        return Err(format!("is in {blocks} blocks, which rows {rows:?} are not"));
    }
    let mut shape = parts[0].shape.clone();
    if let Some(it) = shape.first_mut() {
        *it = rows.iter().sum();
    }
    if !transpose {
        return Ok(shape);
    }
    shape.reverse();
    if shape.len() == 2 {
        Ok(shape)
    } else {
        Err(format!("is {shape:?}, and only matrices are transposed"))
    }
}

/// Text in which numbers are in the order of their values.
fn natural(key: &str) -> Vec<(String, u64)> {
    let part = |it: &str| match it.parse() {
        Ok(number) => (String::new(), number),
        Err(_) => (it.to_string(), 0),
    };
    key.split('.').map(part).collect()
}

impl Export<'_> {
    /// Compares names and shapes with those of a model, such as the one that a config describes.
    ///
    /// # Errors
    /// One that lists all that does not fit.
    pub fn check(&self, params: &[Param]) -> Result<(), TransferError> {
        let mut mismatch = Mismatch::default();
        let mut known = BTreeSet::new();
        for param in params {
            for name in std::iter::once(&param.name).chain(&param.aliases) {
                known.insert(name);
                match self.params.get(name) {
                    Some(shape) if *shape != param.shape => {
                        let wanted = &param.shape;
                        mismatch
                            .shapes
                            .push(format!("`{name}` is {shape:?} and must be {wanted:?}"));
                    }
                    Some(_) => (),
                    // Another name need not be stored.
                    None if *name != param.name => (),
                    None => mismatch.missing.push(name.clone()),
                }
            }
        }
        let unknown = self.params.keys().filter(|it| !known.contains(it));
        mismatch.unexpected = unknown.cloned().collect();
        mismatch.check()
    }

    /// Writes the files into `folder`, which has none yet, and has all or none of them then: the index comes first
    /// where it is there already. `config` is written with what the weights say
    /// of tie and type.
    ///
    /// # Errors
    /// Those of reading and writing.
    pub fn write(
        &self,
        folder: &Path,
        config: Option<&Map<String, Value>>,
    ) -> Result<Written, TransferError> {
        let is_new = !folder.exists();
        if !is_new {
            let names = fs::read_dir(folder);
            let names = names.map_err(|it| CheckpointError::io("read", folder, &it))?;
            if names.flatten().any(|it| it.file_name() != UNFINISHED) {
                return Err(TransferError::Occupied { path: folder.to_path_buf() });
            }
        }
        // A folder that is there may be a file system of its own, which nothing can be renamed into.
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let part = match is_new {
            true => folder.with_file_name(format!(".{name}{UNFINISHED}")),
            false => folder.join(UNFINISHED),
        };
        let rename = |from: &Path, to: &Path| {
            fs::rename(from, to).map_err(|it| CheckpointError::io("rename", from, &it))
        };
        let written = self.write_files(&part, config).and_then(|(written, names)| {
            if is_new {
                rename(&part, folder)?;
                sync_folder_of(folder)?;
                return Ok(written);
            }
            names.iter().try_for_each(|it| rename(&part.join(it), &folder.join(it)))?;
            sync_folder(folder)?;
            fs::remove_dir(&part).map_err(|it| CheckpointError::io("remove", &part, &it))?;
            Ok(written)
        });
        // What is left if even that fails has a name that says what it is.
        written.inspect_err(|_| _ = fs::remove_dir_all(&part))
    }

    /// Writes the files; what there are and their names, the index first.
    fn write_files(
        &self,
        folder: &Path,
        config: Option<&Map<String, Value>>,
    ) -> Result<(Written, Vec<String>), TransferError> {
        if folder.is_dir() {
            fs::remove_dir_all(folder).map_err(|it| CheckpointError::io("remove", folder, &it))?;
        }
        fs::create_dir_all(folder).map_err(|it| CheckpointError::io("create", folder, &it))?;
        let mut names = vec![INDEX.to_string()];
        let shards = self.shards();
        let mut weight_map = BTreeMap::new();
        let mut res = Written { files: shards.len() as u64, ..Written::default() };
        for (i, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => "model.safetensors".to_string(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            self.write_shard(&folder.join(&name), shard)?;
            for it in *shard {
                weight_map.insert(&it.entry.key, name.clone());
                res.tensors += 1;
                res.bytes += it.entry.bytes();
            }
            names.push(name);
        }
        if let Some(config) = config {
            let mut config = config.clone();
            config.insert("tie_word_embeddings".into(), json!(self.tied));
            config.remove("dtype");
            config.insert("torch_dtype".into(), json!(self.tensors[0].entry.dtype.torch()));
            write_json(&folder.join(CONFIG), &Value::Object(config))?;
            names.push(CONFIG.to_string());
        }
        let index = json!({ "metadata": { "total_size": res.bytes }, "weight_map": weight_map });
        write_json(&folder.join(INDEX), &index)?;
        Ok((res, names))
    }

    /// Consecutive tensors that fit into a file.
    fn shards(&self) -> Vec<&[Tensor]> {
        let mut res = Vec::new();
        let (mut start, mut size) = (0, 0);
        for (i, it) in self.tensors.iter().enumerate() {
            let bytes = it.entry.bytes();
            if i > start && size + bytes > self.max_shard {
                res.push(&self.tensors[start..i]);
                (start, size) = (i, 0);
            }
            size += bytes;
        }
        res.push(&self.tensors[start..]);
        res
    }

    fn write_shard(&self, path: &Path, tensors: &[Tensor]) -> Result<(), TransferError> {
        let mut entries: Vec<Entry> = tensors.iter().map(|it| it.entry.clone()).collect();
        sort(&mut entries);
        let by_key: BTreeMap<&str, &Tensor> =
            tensors.iter().map(|it| (it.entry.key.as_str(), it)).collect();
        // `transformers` reads nothing without it.
        let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        let mut file = SafetensorsFile::create(path, &entries, &metadata)?;
        for entry in &entries {
            let tensor = by_key[entry.key.as_str()];
            // Before a file is written of what may be nowhere.
            tensor.keys.iter().try_for_each(|it| self.source.check_items(it))?;
            let mut put = |band: &[u8]| file.write(band);
            read_fused(self.source, &tensor.keys, &tensor.fused, entry.dtype, &mut put)?;
        }
        Ok(file.finish()?)
    }
}

fn write_json(path: &Path, value: &Value) -> Result<(), CheckpointError> {
    write_synced(path, format!("{value:#}\n").as_bytes())
}
