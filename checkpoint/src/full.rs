//! Whole tensors into and out of a checkpoint: writing one without a plan, and the whole state as one
//! safetensors file.
//!
//! In the file, tensors have the keys of the checkpoint. What is no tensor is text in `__metadata__`, as
//! Python writes it; so are the paths of keys in nested dicts, and names that share one tensor:
//!
//! ```text
//! model.w                                     a tensor
//! __metadata__.object:optim.param_groups.0.betas    "(0.9, 0.999)"
//! __metadata__.alias:model.lm_head.weight     "model.embed.weight"
//! __metadata__.paths                          {"optim.state.w.step": ["optim", "state", "w", "step"], ..}
//! ```

mod literal;

use std::collections::BTreeMap;
use std::path::Path;

use ir::placement::LocalBox;

use crate::archive::{object_item, tensor_item_len};
use crate::diff::blocks;
use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::hf::TransferError;
use crate::hf::write::{Entry, SafetensorsFile, sort};
use crate::map::Mapped;
use crate::metadata::{
    Encoding, Item, Metadata, PathPart, StoredChunk, StoredObject, StoredTensor,
};
use crate::open::{Checkpoint, is_count, whole};
use crate::pickle::Value;
use crate::safetensors;
use crate::save::folder::{StepFolder, file_name, run_id};
use crate::save::{Content, FileItem, FolderLock, ShardFile};

/// A checkpoint that one process writes, tensor by tensor, each whole.
#[derive(Debug)]
pub struct Writer {
    lock: FolderLock,
    folder: Unfinished,
    file: ShardFile,
    metadata: Metadata,
    at: u64,
}

/// What data is given to, piece by piece: row-major and little-endian.
pub type Put<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

/// A folder that is removed unless it was given its name.
#[derive(Debug)]
struct Unfinished(StepFolder);

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Writer {
    /// Starts the checkpoint of a step in `root`.
    ///
    /// # Errors
    /// If another run saves into the folder, or the system refuses.
    pub fn create(root: &Path, step: u64) -> Result<Writer, CheckpointError> {
        let lock = FolderLock::acquire(root, &run_id(), &mut |_| ())?;
        let folder = StepFolder::new(root, step, lock.run());
        folder.create()?;
        let folder = Unfinished(folder);
        let file = ShardFile::create(&folder.0, 0)?;
        let save_id = Some(folder.0.save_id());
        let metadata = Metadata { files: vec![file_name(0)], save_id, ..Metadata::default() };
        Ok(Writer { lock, folder, file, metadata, at: 0 })
    }

    /// Adds a tensor, whose keys all name the same bytes.
    ///
    /// # Errors
    /// Those of `data` and of writing.
    ///
    /// # Panics
    /// If `data` gives not as many bytes as the tensor has, or there is no key.
    pub fn tensor<E: From<CheckpointError>>(
        &mut self,
        keys: &[(String, Vec<PathPart>)],
        dtype: StoredType,
        shape: &[u64],
        data: impl FnOnce(&mut Put<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let chunk = whole(shape);
        let local = LocalBox { at: chunk.offsets.clone(), chunk: chunk.clone() };
        let content = Content::Shard { entry: 0, local };
        let item = self.write(&keys[0].0, content, dtype, tensor_item_len(dtype, shape), data)?;
        for (key, path) in keys {
            let chunks = vec![StoredChunk { chunk: chunk.clone(), item }];
            let (shape, path) = (shape.to_vec(), path.clone());
            self.metadata.tensors.insert(key.clone(), StoredTensor { dtype, shape, chunks, path });
        }
        Ok(())
    }

    /// Adds a Python object.
    ///
    /// # Errors
    /// Those of writing.
    pub fn object(
        &mut self,
        key: &str,
        path: Vec<PathPart>,
        value: &Value,
    ) -> Result<(), CheckpointError> {
        let bytes = object_item(value);
        let (len, content) = (bytes.len() as u64, Content::Object(bytes));
        let nothing = |_: &mut Put<'_>| Ok::<_, CheckpointError>(());
        let item = self.write(key, content, StoredType::U8, len, nothing)?;
        self.metadata.objects.insert(key.to_string(), StoredObject { item, path });
        Ok(())
    }

    fn write<E: From<CheckpointError>>(
        &mut self,
        key: &str,
        content: Content,
        dtype: StoredType,
        len: u64,
        data: impl FnOnce(&mut Put<'_>) -> Result<(), E>,
    ) -> Result<Item, E> {
        let item = FileItem { key: key.to_string(), content, at: self.at, len };
        self.file.write(&item, dtype, data)?;
        self.at += len;
        Ok(Item { file: 0, offset: item.at, len, encoding: Encoding::Plain })
    }

    /// Puts it on disk and makes it the latest.
    ///
    /// # Errors
    /// If the system refuses; nothing has changed then.
    pub fn finish(self) -> Result<(), CheckpointError> {
        let Writer { lock, folder, file, metadata, .. } = self;
        file.finish()?;
        let mut index = Vec::new();
        metadata.write(&mut index).expect("memory takes what is written");
        folder.0.commit(&lock, &index, None, &[])?;
        Ok(())
    }
}

/// What was moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Tensors, each counted once.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Python objects.
    pub objects: u64,
    /// The step that was done.
    pub step: u64,
}

const OBJECT: &str = "object:";
const ALIAS: &str = "alias:";
const PATHS: &str = "paths";
/// The number of steps that a checkpoint is of.
const STEP: &str = "planc.step";

/// Writes all of a checkpoint into one safetensors file.
///
/// # Errors
/// Those of reading and writing, and [`TransferError::NotStorable`].
pub fn export(source: &Checkpoint, path: &Path) -> Result<Moved, TransferError> {
    let mut metadata = BTreeMap::new();
    let mut paths: BTreeMap<&str, Vec<serde_json::Value>> = BTreeMap::new();
    let path_of = |path: &[PathPart]| path.iter().map(path_part).collect();
    let mut owners: BTreeMap<Vec<(u32, u64)>, &str> = BTreeMap::new();
    let mut entries = Vec::new();
    let mut res = Moved { step: step(source)?, ..Moved::default() };
    for (key, tensor) in source.tensors() {
        paths.insert(key, path_of(&tensor.path));
        let places = tensor.chunks.iter().map(|it| (it.item.file, it.item.offset)).collect();
        if tensor.n_elements() > 0
            && let Some(owner) = owners.get(&places)
        {
            metadata.insert(format!("{ALIAS}{key}"), owner.to_string());
            continue;
        }
        owners.insert(places, key);
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        res.tensors += 1;
        res.bytes += tensor.bytes();
        entries.push(Entry { key: key.to_string(), dtype, shape });
    }
    for key in source.objects() {
        let value = source.object(key)?;
        let Some(text) = literal::print(&value) else {
            let (key, format) = (key.to_string(), "the text of a safetensors file");
            return Err(TransferError::NotStorable { key, found: value.to_string(), format });
        };
        metadata.insert(format!("{OBJECT}{key}"), text);
        if let Some(it) = source.stored_object(key) {
            paths.insert(key, path_of(&it.path));
        }
        res.objects += 1;
    }
    metadata.insert(PATHS.into(), serde_json::json!(paths).to_string());
    metadata.insert("format".into(), "pt".into());
    sort(&mut entries);
    let mut file = SafetensorsFile::create(path, &entries, &metadata)?;
    for it in &entries {
        bands(source, &it.key, |band| file.write(band))?;
    }
    file.finish()?;
    Ok(res)
}

/// Writes what [`export`] wrote, or any safetensors file, as a checkpoint of its step in `root`.
///
/// # Errors
/// Those of reading and writing.
pub fn import(path: &Path, root: &Path) -> Result<Moved, TransferError> {
    let source = Checkpoint::open(path)?;
    let metadata = text(path)?;
    let paths: BTreeMap<String, Vec<serde_json::Value>> = match metadata.get(PATHS) {
        Some(it) => serde_json::from_str(it).map_err(|it| malformed(path, PATHS, &it))?,
        None => BTreeMap::new(),
    };
    let path_of = |key: &str| -> Vec<PathPart> {
        let known = paths.get(key).and_then(|it| it.iter().map(part_of_path).collect());
        known.unwrap_or_else(|| usual_path(key))
    };
    let mut aliases: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (alias, key) in &metadata {
        if let Some(alias) = alias.strip_prefix(ALIAS) {
            if source.tensor(key).is_none() {
                return Err(malformed(path, alias, &format!("there is no `{key}`")));
            }
            aliases.entry(key).or_default().push(alias);
        }
    }
    let mut res = Moved { step: step(&source)?, ..Moved::default() };
    let mut out = Writer::create(root, res.step)?;
    for (key, tensor) in source.tensors() {
        let names = std::iter::once(key).chain(aliases.get(key).into_iter().flatten().copied());
        let keys: Vec<_> = names.map(|it| (it.to_string(), path_of(it))).collect();
        out.tensor(&keys, tensor.dtype, &tensor.shape, |put| bands(&source, key, put))?;
        res.tensors += 1;
        res.bytes += tensor.bytes();
    }
    for (key, text) in &metadata {
        let Some(key) = key.strip_prefix(OBJECT) else { continue };
        let value = literal::parse(text).map_err(|it| malformed(path, key, &it))?;
        out.object(key, path_of(key), &value)?;
        res.objects += 1;
    }
    out.finish()?;
    Ok(res)
}

/// Reads a tensor piece by piece.
fn bands(
    source: &Checkpoint,
    key: &str,
    mut put: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let tensor = source.tensor(key).expect("what is read was looked up");
    let unit = tensor.dtype.bytes();
    let mut data = Vec::new();
    for block in blocks(&tensor.shape, unit) {
        data.resize((block.sizes.iter().product::<u64>() * unit) as usize, 0);
        source.read(key, &block, &mut data)?;
        put(&data)?;
    }
    Ok(())
}

/// The step that a checkpoint is of; 0 if it does not say.
///
/// # Errors
/// If the step, the next sample or the seed is not what loading takes: one number, and a count for the first two.
pub fn step(source: &Checkpoint) -> Result<u64, CheckpointError> {
    number(source, "planc.seed", |_| true)?;
    number(source, "planc.sample", is_count)?;
    Ok(number(source, STEP, is_count)?.unwrap_or(0.0) as u64)
}

/// A tensor of one number.
fn number(
    source: &Checkpoint,
    key: &str,
    fits: impl Fn(f64) -> bool,
) -> Result<Option<f64>, CheckpointError> {
    let Some(tensor) = source.tensor(key) else { return Ok(None) };
    let (dtype, shape) = (tensor.dtype, &tensor.shape);
    let fail = |found: String| {
        let (path, key) = (source.path().to_path_buf(), key.to_string());
        let item = tensor.chunks.first().map_or(0, |it| it.item.offset);
        let why = format!("it must be one number, 0 to 2^53 for steps and samples, and is {found}");
        CheckpointError::Item { path, key, at: item, why }
    };
    match source.number(key)? {
        Some(found) if fits(found) => Ok(Some(found)),
        Some(found) => Err(fail(found.to_string())),
        None => Err(fail(format!("{dtype}{shape:?}"))),
    }
}

fn path_part(it: &PathPart) -> serde_json::Value {
    match it {
        PathPart::Key(it) => it.as_str().into(),
        PathPart::Index(it) => (*it).into(),
    }
}

fn part_of_path(it: &serde_json::Value) -> Option<PathPart> {
    let key = it.as_str().map(|it| PathPart::Key(it.to_string()));
    key.or_else(|| it.as_u64().map(PathPart::Index))
}

/// Where a key is in the nested dict of PyTorch's `get_state_dict`.
fn usual_path(key: &str) -> Vec<PathPart> {
    let name = |it: &str| PathPart::Key(it.to_string());
    if let Some(rest) = key.strip_prefix("model.") {
        return vec![name("model"), name(rest)];
    }
    if let Some((param, field)) =
        key.strip_prefix("optim.state.").and_then(|it| it.rsplit_once('.'))
    {
        return vec![name("optim"), name("state"), name(param), name(field)];
    }
    if let Some(rest) = key.strip_prefix("planc.") {
        return std::iter::once("planc").chain(rest.split('.')).map(name).collect();
    }
    vec![name(key)]
}

/// The text in a safetensors file.
fn text(path: &Path) -> Result<BTreeMap<String, String>, CheckpointError> {
    let map = Mapped::open(path).map_err(|it| CheckpointError::io("read", path, &it))?;
    let (_, header) = safetensors::parse(map.bytes()).map_err(|it| it.in_index(path))?;
    Ok(header.metadata().iter().flatten().map(|it| (it.0.clone(), it.1.clone())).collect())
}

fn malformed(path: &Path, what: &str, why: &dyn std::fmt::Display) -> TransferError {
    let why = format!("`{what}` of `__metadata__`: {why}");
    CheckpointError::Index { path: path.to_path_buf(), at: 8, why }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As PyTorch 2.11's `get_state_dict` nests them.
    #[test]
    fn keys_have_the_paths_of_a_state_dict() {
        let check = |key: &str, expect: &[&str]| {
            let found: Vec<String> = usual_path(key).iter().map(PathPart::to_string).collect();
            assert_eq!(found, expect, "{key}");
        };
        check("model.a.b.weight", &["model", "a.b.weight"]);
        check("optim.state.a.b.weight.exp_avg", &["optim", "state", "a.b.weight", "exp_avg"]);
        check("planc.schedule.lr", &["planc", "schedule", "lr"]);
        check("other.key", &["other.key"]);
    }
}
