//! Pickle -> index.

use ir::placement::Chunk;
use ir::types::TensorType;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::dtype::StoredType;
use crate::error::Broken;
use crate::pickle::read::{self, Global, Item as Py, Kind, Object, Pickle};

use super::{Encoding, Item, Metadata, PathPart, StoredChunk, StoredObject, StoredTensor};

type Offsets = SmallVec<[u64; 4]>;

impl Metadata {
    /// Reads `.metadata`, of any version of PyTorch from 2.1 on.
    ///
    /// # Errors
    /// If it is no pickle of an index, or names anything that an index does not need. A box that is
    /// stored nowhere is no error here; see [`Metadata::problems`].
    pub fn read(bytes: &[u8]) -> Result<Metadata, Broken> {
        let pickle = read::read(bytes, Kind::Index)?;
        Reader::new(&pickle, bytes.len()).and_then(Reader::read).map_err(|why| Broken::at(0, why))
    }
}

/// How many problems are kept: all have the same cause.
const MAX_PROBLEMS: usize = 100;

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
    res: Metadata,
    root: Object,
    /// Tensors and objects in the order of the index.
    values: Vec<(String, Draft)>,
    by_key: FxHashMap<&'a str, u32>,
    /// Of each string, the value that it is the key of, and the file that it names, once known.
    key_of_str: Vec<Option<u32>>,
    file_of_str: Vec<Option<u32>>,
    file_ids: FxHashMap<&'a str, u32>,
    /// Boxes that may still be made: an index names each once, so there are fewer than its bytes.
    budget: usize,
}

enum Draft {
    Tensor {
        dtype: StoredType,
        shape: Vec<u64>,
        chunks: Vec<(Chunk, Option<Item>)>,
        by_offsets: Option<FxHashMap<Offsets, usize>>,
    },
    Object(Option<Item>),
}

impl<'a> Reader<'a> {
    fn new(pickle: &'a Pickle<'a>, len: usize) -> Result<Reader<'a>, String> {
        let root = pickle.object(pickle.root()).filter(|it| it.global == Global::Metadata);
        Ok(Reader {
            pickle,
            res: Metadata::default(),
            root: root.ok_or("this is a pickle, and no index of a checkpoint")?,
            values: Vec::new(),
            by_key: FxHashMap::default(),
            key_of_str: vec![None; pickle.n_strs()],
            file_of_str: vec![None; pickle.n_strs()],
            file_ids: FxHashMap::default(),
            budget: len,
        })
    }

    fn read(mut self) -> Result<Metadata, String> {
        let values = self.dict("state_dict_metadata")?.ok_or("it has no state_dict_metadata")?;
        for &(key, value) in values {
            self.value(key, value)?;
        }
        let places = self.dict("storage_data")?.ok_or("it has no storage_data")?;
        for &(index, place) in places {
            self.place(index, place)?;
        }
        let paths = self.dict("planner_data")?.unwrap_or_default();
        let mut path_of: Vec<Vec<PathPart>> = vec![Vec::new(); self.values.len()];
        for &(key, path) in paths {
            self.path(key, path, &mut path_of)?;
        }
        let meta = self.pickle.attribute(self.root, "storage_meta");
        let meta = meta.and_then(|it| self.pickle.object(it));
        let save_id = meta.and_then(|it| self.pickle.attribute(it, "save_id"));
        self.res.save_id = save_id.and_then(|it| self.pickle.str(it)).map(str::to_string);
        self.finish(path_of);
        Ok(self.res)
    }

    /// An attribute of the root that is a dict or `None`.
    fn dict(&self, name: &str) -> Result<Option<&'a [(Py, Py)]>, String> {
        match self.pickle.attribute(self.root, name) {
            None | Some(Py::None) => Ok(None),
            Some(it) => match self.pickle.dict(it) {
                Some(it) => Ok(Some(it)),
                None => Err(format!("{name} is no dict")),
            },
        }
    }

    fn value(&mut self, key: Py, value: Py) -> Result<(), String> {
        let key = self.pickle.str(key).ok_or("a key of state_dict_metadata is no string")?;
        let object = self.pickle.object(value);
        let draft = match object.map(|it| (it, it.global)) {
            Some((it, Global::TensorStorageMetadata)) => {
                self.tensor(it).map_err(|why| format!("`{key}`: {why}"))?
            }
            Some((_, Global::BytesStorageMetadata)) => Draft::Object(None),
            _ => return Err(format!("`{key}` is neither a tensor nor an object")),
        };
        if self.by_key.insert(key, self.values.len() as u32).is_some() {
            return Err(format!("`{key}` comes twice"));
        }
        self.spend(key.len())?;
        self.values.push((key.to_string(), draft));
        Ok(())
    }

    /// Takes from the budget, without which strings and lists that are shared many times would make
    /// the index much larger than its file.
    fn spend(&mut self, n: usize) -> Result<(), String> {
        match self.budget.checked_sub(n) {
            Some(it) => self.budget = it,
            None => return Err("it repeats itself beyond what it can mean".into()),
        }
        Ok(())
    }

    fn tensor(&mut self, tensor: Object) -> Result<Draft, String> {
        let pickle = self.pickle;
        let properties = pickle.attribute(tensor, "properties").and_then(|it| pickle.object(it));
        let properties = properties.and_then(|it| pickle.tuple(it.state));
        let dtype = match properties {
            // PyTorch 2.15 has strides behind the five.
            Some(
                [Py::Global(Global::Dtype(dtype)), layout, _, _, _]
                | [Py::Global(Global::Dtype(dtype)), layout, _, _, _, _],
            ) => {
                if pickle.str(*layout) != Some("torch.strided") {
                    return Err("it is sparse or quantized, which is not read".into());
                }
                *dtype
            }
            _ => return Err("its properties are not five or six values".into()),
        };
        let shape: Option<Vec<u64>> =
            pickle.attribute(tensor, "size").and_then(|it| pickle.sizes(it));
        let shape = shape.ok_or("its size is no torch.Size")?;
        // Products of sizes then fit everywhere, with room for the bytes of an element.
        if !TensorType::fits(&shape) || shape.len() > 64 {
            return Err(format!("its size {shape:?} is beyond 2^46 elements or 64 dims"));
        }
        let list = pickle.attribute(tensor, "chunks").and_then(|it| pickle.list(it));
        let list = list.ok_or("it has no chunks")?;
        self.spend(list.len().saturating_add(shape.len()))?;
        let mut chunks = Vec::with_capacity(list.len());
        for &it in list {
            let chunk = pickle.object(it).and_then(|it| {
                let offsets: Offsets = pickle.sizes(pickle.attribute(it, "offsets")?)?;
                let sizes: Offsets = pickle.sizes(pickle.attribute(it, "sizes")?)?;
                Some(Chunk { offsets, sizes })
            });
            let chunk = chunk.ok_or("a chunk without offsets and sizes")?;
            if !is_within(&chunk, &shape) {
                let Chunk { offsets, sizes } = &chunk;
                return Err(format!("a chunk at {offsets:?} of {sizes:?} is not within {shape:?}"));
            }
            if shape.len() > 4 {
                self.spend(2 * shape.len())?;
            }
            chunks.push((chunk, None));
        }
        Ok(Draft::Tensor { dtype, shape, chunks, by_offsets: None })
    }

    fn place(&mut self, index: Py, place: Py) -> Result<(), String> {
        let pickle = self.pickle;
        let index = pickle.object(index).filter(|it| it.global == Global::MetadataIndex);
        let index = index.ok_or("a key of storage_data is no MetadataIndex")?;
        let key = pickle.attribute(index, "fqn").ok_or("a MetadataIndex without a fqn")?;
        let offset = match pickle.attribute(index, "offset") {
            None | Some(Py::None) => None,
            Some(it) => Some(pickle.sizes::<Offsets>(it).ok_or("an offset that is no torch.Size")?),
        };
        let hint = match pickle.attribute(index, "index") {
            Some(Py::Int(it)) => usize::try_from(it).ok(),
            _ => None,
        };
        let item = self.item(place)?;
        let Some(value) = self.value_of(key)? else {
            let key = pickle.str(key).unwrap_or_default();
            self.problem(|| format!("storage_data has `{key}`, which state_dict_metadata has not"));
            return Ok(());
        };
        let (key, draft) = &mut self.values[value as usize];
        let found = match (draft, &offset) {
            (Draft::Object(it), None) => Some(it),
            (Draft::Tensor { chunks, by_offsets, .. }, Some(offset)) => {
                let is_it = |it: &usize| chunks.get(*it).is_some_and(|it| it.0.offsets == *offset);
                let at = hint.filter(is_it).or_else(|| {
                    let map = by_offsets.get_or_insert_with(|| {
                        let all = chunks.iter().enumerate();
                        all.map(|(i, it)| (it.0.offsets.clone(), i)).collect()
                    });
                    map.get(offset).copied()
                });
                at.map(|it| &mut chunks[it].1)
            }
            _ => None,
        };
        match found {
            Some(it) => *it = Some(item),
            None => {
                let why = format!(
                    "storage_data has a place for `{key}` at {offset:?}, where no chunk is"
                );
                self.problem(|| why);
            }
        }
        Ok(())
    }

    fn problem(&mut self, text: impl FnOnce() -> String) {
        if self.res.problems.len() < MAX_PROBLEMS {
            self.res.problems.push(text());
        }
    }

    /// The value of which a string is the key.
    fn value_of(&mut self, key: Py) -> Result<Option<u32>, String> {
        let Py::Str(id) = key else { return Err("a key that is no string".into()) };
        let slot = &mut self.key_of_str[id as usize];
        if slot.is_none() {
            *slot = self.pickle.str(key).and_then(|it| self.by_key.get(it)).copied();
        }
        Ok(*slot)
    }

    fn item(&mut self, place: Py) -> Result<Item, String> {
        let pickle = self.pickle;
        let place = pickle.object(place).filter(|it| it.global == Global::StorageInfo);
        let place = place.ok_or("a value of storage_data is no _StorageInfo")?;
        let unsigned = |name: &str| match pickle.attribute(place, name) {
            Some(Py::Int(it)) => u64::try_from(it).ok(),
            _ => None,
        };
        let (Some(offset), Some(len)) = (unsigned("offset"), unsigned("length")) else {
            return Err("a _StorageInfo without offset and length".into());
        };
        let encoding = match pickle.attribute(place, "transform_descriptors") {
            None | Some(Py::None) => Encoding::Plain,
            Some(it) => {
                let names = pickle.list(it).ok_or("transform_descriptors are no list")?;
                match names.iter().map(|&it| pickle.str(it)).collect::<Vec<_>>()[..] {
                    [] => Encoding::Plain,
                    [Some("stream.zstd/1")] => Encoding::Zstd,
                    [Some(other)] => {
                        return Err(format!(
                            "items are transformed by `{other}`, which is unknown"
                        ));
                    }
                    _ => return Err("items are transformed more than once".into()),
                }
            }
        };
        let path = pickle.attribute(place, "relative_path");
        let file = match path {
            Some(Py::Str(id)) => self.file(id, path.and_then(|it| pickle.str(it)).unwrap_or("")),
            _ => Err("a _StorageInfo without a relative_path".into()),
        }?;
        Ok(Item { file, offset, len, encoding })
    }

    /// The number of a file that a string names.
    fn file(&mut self, id: u32, name: &'a str) -> Result<u32, String> {
        if let Some(it) = self.file_of_str[id as usize] {
            return Ok(it);
        }
        let plain = name.split('/').all(|it| !matches!(it, "" | "." | ".."));
        if !plain || name.contains(['\\', '\0']) {
            return Err(format!("items are in `{name}`, which is not below the checkpoint"));
        }
        let next = self.res.files.len() as u32;
        let file = *self.file_ids.entry(name).or_insert(next);
        if file == next {
            self.spend(name.len())?;
            self.res.files.push(name.to_string());
        }
        self.file_of_str[id as usize] = Some(file);
        Ok(file)
    }

    fn path(&mut self, key: Py, path: Py, path_of: &mut [Vec<PathPart>]) -> Result<(), String> {
        let pickle = self.pickle;
        let Some(value) = self.value_of(key)? else { return Ok(()) };
        let key = pickle.str(key).unwrap_or_default();
        let fail = || format!("planner_data of `{key}` is no path that leads there");
        let parts = pickle.tuple(path).ok_or_else(fail)?;
        // A key is its path, joined with dots; so paths are no longer than keys.
        let mut rest = key;
        let mut res = Vec::new();
        for (i, &part) in parts.iter().enumerate() {
            let part = match part {
                Py::Int(it) => PathPart::Index(u64::try_from(it).map_err(|_| fail())?),
                it => PathPart::Key(pickle.str(it).ok_or_else(fail)?.to_string()),
            };
            if i > 0 {
                rest = rest.strip_prefix('.').ok_or_else(fail)?;
            }
            rest = match &part {
                PathPart::Key(it) => rest.strip_prefix(it.as_str()),
                PathPart::Index(it) => rest.strip_prefix(&it.to_string()),
            }
            .ok_or_else(fail)?;
            res.push(part);
        }
        if !rest.is_empty() {
            return Err(fail());
        }
        path_of[value as usize] = res;
        Ok(())
    }

    fn finish(&mut self, paths: Vec<Vec<PathPart>>) {
        for ((key, draft), path) in std::mem::take(&mut self.values).into_iter().zip(paths) {
            match draft {
                Draft::Object(None) => {
                    self.problem(|| format!("`{key}` is stored nowhere: storage_data lacks it"));
                }
                Draft::Object(Some(item)) => {
                    self.res.objects.insert(key, StoredObject { item, path });
                }
                Draft::Tensor { dtype, shape, chunks, .. } => {
                    let mut placed = Vec::with_capacity(chunks.len());
                    for (chunk, item) in chunks {
                        match item {
                            Some(item) => placed.push(StoredChunk { chunk, item }),
                            None => self.problem(|| {
                                let Chunk { offsets, sizes } = &chunk;
                                format!(
                                    "the chunk of `{key}` at {offsets:?} of {sizes:?} is stored \
                                     nowhere: storage_data lacks it"
                                )
                            }),
                        }
                    }
                    let tensor = StoredTensor { dtype, shape, chunks: placed, path };
                    self.res.tensors.insert(key, tensor);
                }
            }
        }
    }
}

/// Whether a box is within a tensor; an empty one may start at its end.
fn is_within(chunk: &Chunk, shape: &[u64]) -> bool {
    let dims = || chunk.offsets.iter().zip(&chunk.sizes).zip(shape);
    chunk.offsets.len() == shape.len()
        && chunk.sizes.len() == shape.len()
        && dims().all(|((&offset, &size), &of)| offset.checked_add(size).is_some_and(|it| it <= of))
}
