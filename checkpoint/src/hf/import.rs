//! Weights under foreign names as a checkpoint: its keys are `model.<param>`, and it has nothing else.

use std::collections::BTreeSet;
use std::path::Path;

use ir::model::NamePattern;
use rustc_hash::FxHashMap;

use super::convert::{Effect, effect};
use super::error::{Mismatch, TransferError};
use super::fused::{Fused, read_param};
use super::params::Param;
use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::full::Writer;
use crate::mapping::{Blocks, Forward, Mapping};
use crate::metadata::PathPart;
use crate::open::Checkpoint;
use crate::rename::Renames;
use crate::safetensors::Index;
use crate::sums::crc32;

/// How weights come in.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// What becomes of keys.
    pub mapping: &'a Mapping,
    /// Only keys that start with this are read, without it.
    pub prefix: &'a str,
    /// Other names for keys, before they are looked up in the mapping.
    pub renames: &'a Renames,
    /// Ranks of the tensor-parallel group that saved the weights.
    pub saved_tp: Option<u64>,
    /// Values may be rounded to the model's type.
    pub cast: bool,
    /// Parameters that need not be there.
    pub allow_missing: &'a [NamePattern],
    /// Keys that may be there for nothing.
    pub allow_unexpected: &'a [NamePattern],
}

/// Weights that fit a model, ready to be written.
#[derive(Debug)]
pub struct Import<'a> {
    source: &'a Checkpoint,
    params: Vec<(Param, Vec<Origin>)>,
    /// Keys that have no counterpart.
    pub ignored: Vec<String>,
    /// Parameters that are not there, as allowed.
    pub missing: Vec<String>,
}

/// Where a parameter is.
#[derive(Debug)]
struct Origin {
    key: String,
    fused: Fused,
    part: usize,
}

/// What was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Tensors.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The keys that the index of a Hugging Face model names, if the folder has one: other files may be there
/// with the same weights under other names.
///
/// # Errors
/// If the index cannot be read, or names what no file has.
pub fn indexed(
    folder: &Path,
    source: &Checkpoint,
) -> Result<Option<BTreeSet<String>>, TransferError> {
    let Some(Index { path, weight_map }) = Index::open(folder)? else { return Ok(None) };
    let keys: Vec<String> =
        weight_map.keys().filter(|it| source.tensor(it).is_none()).cloned().collect();
    if !keys.is_empty() {
        return Err(TransferError::Incomplete { path, keys });
    }
    Ok(Some(weight_map.into_keys().collect()))
}

/// Finds each parameter in `source`, or only among `keys`.
///
/// # Errors
/// One that lists all that does not fit.
pub fn plan<'a>(
    source: &'a Checkpoint,
    keys: Option<&BTreeSet<String>>,
    params: Vec<Param>,
    options: &Options<'_>,
) -> Result<Import<'a>, TransferError> {
    let mut found: Vec<Vec<Origin>> = params.iter().map(|_| Vec::new()).collect();
    let mut mismatch = Mismatch::default();
    let mut ignored = Vec::new();
    let by_name = by_name(&params);
    let has = |name: &str| by_name.contains_key(name);
    for (key, tensor) in source.tensors() {
        let Some(name) = key.strip_prefix(options.prefix) else { continue };
        if keys.is_some_and(|it| !it.contains(key)) {
            continue;
        }
        let empty = tensor.n_elements() == 0;
        let name = options.renames.apply(name);
        let (names, transpose, blocks) = match options.mapping.forward(&name, empty, &has) {
            Forward::Params { params, transpose, blocks } => (params, transpose, blocks),
            Forward::Ignored => {
                ignored.push(key.to_string());
                continue;
            }
            Forward::Unknown => {
                match options.allow_unexpected.iter().any(|it| it.matches(key)) {
                    true => ignored.push(key.to_string()),
                    false => mismatch.unexpected.push(key.to_string()),
                }
                continue;
            }
        };
        let indices: Vec<usize> = names.iter().map(|it| by_name[it.as_str()]).collect();
        let targets: Vec<&Param> = indices.iter().map(|&it| &params[it]).collect();
        let blocks = match n_blocks(blocks, &targets, options.saved_tp) {
            Ok(it) => it,
            Err(None) => return Err(TransferError::SavedTp { key: key.to_string() }),
            Err(Some(why)) => {
                mismatch.shapes.push(format!("`{key}` {why}"));
                continue;
            }
        };
        let rows = targets.iter().map(|it| it.shape.first().copied().unwrap_or(1));
        let fused = Fused { rows: rows.collect(), blocks, transpose };
        if let Err(why) = check_shape(&tensor.shape, &targets, &fused) {
            mismatch.shapes.push(format!("`{key}` {why}"));
        }
        for it in &targets {
            if let Some(why) = check_type(tensor.dtype, it.dtype, options.cast) {
                mismatch.dtypes.push(format!("`{key}` {why}"));
                break;
            }
        }
        for (part, index) in indices.into_iter().enumerate() {
            let (key, fused) = (key.to_string(), fused.clone());
            found[index].push(Origin { key, fused, part });
        }
    }
    let mut missing = Vec::new();
    let mut res = Vec::new();
    drop(by_name);
    for (param, origins) in params.into_iter().zip(found) {
        match (origins.is_empty(), options.allow_missing.iter().any(|it| it.matches(&param.name))) {
            (false, _) => res.push((param, origins)),
            (true, true) => missing.push(param.name),
            (true, false) => mismatch.missing.push(param.name),
        }
    }
    mismatch.check()?;
    Ok(Import { source, params: res, ignored, missing })
}

/// Which parameter a name stands for.
fn by_name(params: &[Param]) -> FxHashMap<&str, usize> {
    let names = params.iter().enumerate().flat_map(|(i, it)| {
        let names = std::iter::once(&it.name).chain(&it.aliases);
        names.map(move |it| (it.as_str(), i))
    });
    names.collect()
}

/// In how many blocks the rows of parameters are; an error without text if only the user knows.
fn n_blocks(
    blocks: Blocks,
    params: &[&Param],
    saved_tp: Option<u64>,
) -> Result<u64, Option<String>> {
    let blocks = match blocks {
        Blocks::Count(it) => it,
        Blocks::SavedTp => saved_tp.ok_or(None)?,
        Blocks::KvHeads => {
            let rows = params.iter().filter_map(|it| it.shape.first()).min().copied().unwrap_or(0);
            let head_dim = params.iter().find_map(|it| it.head_dim).filter(|&it| it > 0);
            let Some(head_dim) = head_dim else {
                let names = &params[0].name;
                let why =
                    format!("is by groups of heads, and `{names}` is in no attention of the model");
                return Err(Some(why));
            };
            rows / head_dim
        }
    };
    let uneven = params.iter().find(|it| {
        let rows = it.shape.first().copied().unwrap_or(1);
        blocks == 0 || !rows.is_multiple_of(blocks)
    });
    match uneven {
        None => Ok(blocks),
        Some(it) => {
            let why = format!(
                "is in {blocks} blocks, which the rows of `{}` {:?} are not",
                it.name, it.shape
            );
            Err(Some(why))
        }
    }
}

/// Whether a tensor has the shape of these parameters together.
fn check_shape(found: &[u64], params: &[&Param], fused: &Fused) -> Result<(), String> {
    let columns = params[0].shape.get(1..).unwrap_or_default();
    let mut expect = params[0].shape.clone();
    if let Some(rows) = expect.first_mut() {
        *rows = fused.rows.iter().sum();
    }
    if fused.transpose {
        expect.reverse();
    }
    let alike = params.iter().all(|it| it.shape.get(1..).unwrap_or_default() == columns);
    let known = !fused.transpose || expect.len() == 2;
    if alike && known && found == expect {
        return Ok(());
    }
    let names: Vec<String> =
        params.iter().map(|it| format!("`{}` {:?}", it.name, it.shape)).collect();
    let transposed = if fused.transpose { ", transposed" } else { "" };
    match names.as_slice() {
        [name] if !fused.transpose && *name == format!("`{}` {expect:?}", params[0].name) => {
            Err(format!("is {found:?} and must be {expect:?}"))
        }
        _ => {
            Err(format!("is {found:?} and must be {expect:?}: {}{transposed}", names.join(" and ")))
        }
    }
}

/// What is wrong with the type of a tensor; widening loses nothing and is not wrong.
fn check_type(found: StoredType, wanted: StoredType, cast: bool) -> Option<String> {
    match effect(found, wanted) {
        Some(Effect::None | Effect::Exact) => None,
        Some(Effect::Rounds) if cast => None,
        Some(Effect::Rounds) => {
            Some(format!("is {found} and must be {wanted} (`--cast` rounds it)"))
        }
        None => Some(format!("is {found} and must be {wanted}")),
    }
}

impl Import<'_> {
    /// How many tensors there are, and their bytes.
    pub fn size(&self) -> Written {
        let bytes = |it: &Param| it.shape.iter().product::<u64>() * it.dtype.bytes();
        let params = || self.params.iter().map(|it| &it.0);
        Written { tensors: params().count() as u64, bytes: params().map(bytes).sum() }
    }

    /// Writes the checkpoint `root/step-0`, and makes it the latest. One tensor at a time is in memory.
    ///
    /// # Errors
    /// Those of reading and writing, and [`TransferError::Differ`].
    pub fn write(&self, root: &Path) -> Result<Written, TransferError> {
        let mut out = Writer::create(root, 0)?;
        let mut data = Vec::new();
        for (param, origins) in &self.params {
            let names = std::iter::once(&param.name).chain(&param.aliases);
            let keys = names.map(|it| {
                let path = ["model", it].map(|it| PathPart::Key(it.to_string())).to_vec();
                (format!("model.{it}"), path)
            });
            let keys: Vec<_> = keys.collect();
            let n: u64 = param.shape.iter().product();
            data.resize((n * param.dtype.bytes()) as usize, 0);
            self.read(param, &origins[0], &mut data)?;
            out.tensor(&keys, param.dtype, &param.shape, |write| write(&data))?;
            // Two whole tensors are not held to be compared.
            let first = crc32(&data);
            for other in &origins[1..] {
                self.read(param, other, &mut data)?;
                if crc32(&data) != first {
                    return Err(TransferError::Differ {
                        param: param.name.clone(),
                        first: origins[0].key.clone(),
                        second: other.key.clone(),
                    });
                }
            }
        }
        out.finish()?;
        Ok(self.size())
    }

    fn read(&self, param: &Param, from: &Origin, out: &mut [u8]) -> Result<(), CheckpointError> {
        read_param(self.source, &from.key, (&from.fused, from.part), param.dtype, out)
    }
}
