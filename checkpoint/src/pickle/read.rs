//! Reads pickles of protocols 2 to 5 into an arena, without running anything.
//!
//! The machine has a stack, a memo and one arena for each kind of composite value; an [`Item`] is a
//! plain value or an index into an arena. Every opcode adds a bounded number of items, so that memory
//! is linear in the input, and a value that is shared, or contains itself, costs nothing.

use super::Value;
use crate::dtype::StoredType;
use crate::error::{Broken, short};

/// What is being read, which decides the globals that may be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `.metadata`.
    Index,
    /// `data.pkl` of a tensor.
    Tensor,
    /// `data.pkl` of a Python object.
    Object,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Index => "index",
            Kind::Tensor => "tensor",
            Kind::Object => "object",
        }
    }
}

/// A global that may be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Global {
    /// `torch.distributed.checkpoint.metadata.Metadata`, and so on.
    Metadata,
    /// A tensor of the index.
    TensorStorageMetadata,
    /// Its dtype and more.
    TensorProperties,
    /// A box of a tensor.
    ChunkStorageMetadata,
    /// An object of the index.
    BytesStorageMetadata,
    /// What an item is of.
    MetadataIndex,
    /// Where an item is.
    StorageInfo,
    /// Who saved.
    StorageMeta,
    /// An enum by its number.
    MemFormat,
    /// `torch.Size`.
    Size,
    /// `torch.serialization._get_layout`.
    Layout,
    /// A path of `pathlib`.
    Path,
    /// `torch.float32`, and so on.
    Dtype(StoredType),
    /// `torch.FloatStorage`, and so on.
    Storage(StoredType),
    /// Bytes that a dtype beside them gives a meaning.
    UntypedStorage,
    /// `torch._utils._rebuild_tensor_v2`.
    RebuildV2,
    /// `torch._utils._rebuild_tensor_v3`.
    RebuildV3,
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `_codecs.encode`: `bytes` before protocol 3.
    Encode,
    /// `set`.
    Set,
    /// `frozenset`.
    FrozenSet,
    /// `complex`.
    Complex,
    /// `bytearray`.
    ByteArray,
}

const METADATA: &str = "torch.distributed.checkpoint.metadata";

impl Global {
    fn find(module: &str, name: &str, kind: Kind) -> Option<Global> {
        match kind {
            Kind::Index => Global::of_index(module, name),
            Kind::Tensor => Global::of_tensor(module, name),
            Kind::Object => Global::of_object(module, name),
        }
    }

    fn of_index(module: &str, name: &str) -> Option<Global> {
        let paths = ["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"];
        Some(match (module, name) {
            (METADATA, "Metadata") => Global::Metadata,
            (METADATA, "TensorStorageMetadata") => Global::TensorStorageMetadata,
            (METADATA, "TensorProperties") => Global::TensorProperties,
            (METADATA, "ChunkStorageMetadata") => Global::ChunkStorageMetadata,
            (METADATA, "BytesStorageMetadata") => Global::BytesStorageMetadata,
            (METADATA, "MetadataIndex") => Global::MetadataIndex,
            (METADATA, "StorageMeta") => Global::StorageMeta,
            (METADATA, "_MEM_FORMAT_ENCODING") => Global::MemFormat,
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo") => Global::StorageInfo,
            ("torch.serialization", "_get_layout") => Global::Layout,
            ("pathlib" | "pathlib._local", it) if paths.contains(&it) => Global::Path,
            ("torch", "Size") => Global::Size,
            ("torch", it) => Global::Dtype(StoredType::from_torch(it)?),
            _ => return None,
        })
    }

    fn of_tensor(module: &str, name: &str) -> Option<Global> {
        Some(match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildV2,
            ("torch._utils", "_rebuild_tensor_v3") => Global::RebuildV3,
            ("torch.storage", "UntypedStorage") => Global::UntypedStorage,
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch", "Size") => Global::Size,
            ("torch", it) => match StoredType::from_torch(it) {
                Some(it) => Global::Dtype(it),
                None => Global::Storage(StoredType::from_storage(it)?),
            },
            _ => return None,
        })
    }

    fn of_object(module: &str, name: &str) -> Option<Global> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("_codecs", "encode") => Global::Encode,
            ("__builtin__" | "builtins", "set") => Global::Set,
            ("__builtin__" | "builtins", "frozenset") => Global::FrozenSet,
            ("__builtin__" | "builtins", "complex") => Global::Complex,
            ("__builtin__" | "builtins", "bytearray") => Global::ByteArray,
            ("torch", "Size") => Global::Size,
            ("torch", it) => Global::Dtype(StoredType::from_torch(it)?),
            _ => return None,
        })
    }

    /// As Python prints it.
    fn name(self) -> String {
        match self {
            Global::Dtype(it) => format!("torch.{it}"),
            Global::Set | Global::FrozenSet | Global::Complex | Global::ByteArray => {
                format!("builtins.{self:?}").to_lowercase()
            }
            other => format!("{other:?}"),
        }
    }
}

/// A value on the stack; composite ones are indices into [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Item {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A larger one.
    Long(u32),
    /// A number.
    Float(f64),
    /// A string.
    Str(u32),
    /// Bytes.
    Bytes(u32),
    /// A tuple.
    Tuple(u32),
    /// A list.
    List(u32),
    /// A dict.
    Dict(u32),
    /// A global.
    Global(Global),
    /// An instance, or a call that is not made.
    Object(u32),
    /// What another record holds; the item says which.
    Persistent(u32),
}

/// The entries of a dict.
#[derive(Debug, Clone)]
enum Entries {
    /// Those that were added at once: start and length in `entries`. The state of an instance is so.
    Once(u32, u32),
    /// Those that were added in several batches.
    More(Vec<(Item, Item)>),
}

/// An instance or a call: what of, its arguments, and the state that `BUILD` gave it.
#[derive(Debug, Clone, Copy)]
pub struct Object {
    /// Class or function.
    pub global: Global,
    /// Arguments: a tuple.
    pub args: Item,
    /// Its state, or `None`.
    pub state: Item,
}

/// A pickle that was read.
#[derive(Debug, Default)]
pub struct Pickle<'a> {
    strs: Vec<&'a str>,
    bytes: Vec<&'a [u8]>,
    longs: Vec<i128>,
    /// Start and length in `kids`.
    tuples: Vec<(u32, u32)>,
    kids: Vec<Item>,
    lists: Vec<Vec<Item>>,
    dicts: Vec<Entries>,
    entries: Vec<(Item, Item)>,
    objects: Vec<Object>,
    persistents: Vec<Item>,
    root: Option<Item>,
    /// Bytes of the input, to which the size of [`Value`]s is bounded.
    len: usize,
}

/// Reads the pickle at the start of `input`; bytes behind its end are ignored.
pub fn read(input: &[u8], kind: Kind) -> Result<Pickle<'_>, Broken> {
    // Indices into arenas have 32 bits, and no opcode makes more than its bytes.
    if input.len() >= u32::MAX as usize {
        return Err(Broken::at(0, "a pickle of 4 GiB or more"));
    }
    let pickle = Pickle { len: input.len(), ..Pickle::default() };
    let mut machine = Machine {
        input,
        at: 0,
        kind,
        pickle,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
    };
    while !machine.step()? {}
    Ok(machine.pickle)
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    kind: Kind,
    pickle: Pickle<'a>,
    stack: Vec<Item>,
    /// Lengths of the stack at its marks.
    marks: Vec<usize>,
    memo: Vec<Option<Item>>,
}

impl<'a> Machine<'a> {
    fn fail<T>(&self, why: impl Into<String>) -> Result<T, Broken> {
        Err(Broken::at(self.at, why))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Broken> {
        let Some(res) = self.input.get(self.at..).and_then(|it| it.get(..len)) else {
            return self.fail("the pickle ends early");
        };
        self.at += len;
        Ok(res)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let mut res = [0; N];
        res.copy_from_slice(self.take(N)?);
        Ok(res)
    }

    fn byte(&mut self) -> Result<usize, Broken> {
        Ok(self.array::<1>()?[0].into())
    }

    fn len4(&mut self) -> Result<usize, Broken> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn len8(&mut self) -> Result<usize, Broken> {
        // What does not fit is longer than the input.
        Ok(usize::try_from(u64::from_le_bytes(self.array()?)).unwrap_or(usize::MAX))
    }

    fn utf8(&self, bytes: &'a [u8]) -> Result<&'a str, Broken> {
        std::str::from_utf8(bytes).or_else(|_| self.fail("a string that is not UTF-8"))
    }

    fn line(&mut self) -> Result<&'a str, Broken> {
        let rest = &self.input[self.at..];
        let Some(len) = rest.iter().position(|&it| it == b'\n') else {
            return self.fail("the pickle ends early");
        };
        self.at += len + 1;
        self.utf8(&rest[..len])
    }

    fn push(&mut self, item: Item) {
        self.stack.push(item);
    }

    fn push_str(&mut self, len: usize) -> Result<(), Broken> {
        let bytes = self.take(len)?;
        let text = self.utf8(bytes)?;
        self.push(Item::Str(self.pickle.strs.len() as u32));
        self.pickle.strs.push(text);
        Ok(())
    }

    fn push_bytes(&mut self, len: usize) -> Result<(), Broken> {
        let bytes = self.take(len)?;
        let item = self.pickle.new_bytes(bytes);
        self.push(item);
        Ok(())
    }

    fn push_long(&mut self, len: usize) -> Result<(), Broken> {
        if len > 16 {
            return self.fail("an integer of more than 128 bits");
        }
        let bytes = self.take(len)?;
        let negative = bytes.last().is_some_and(|it| it & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..len].copy_from_slice(bytes);
        let value = i128::from_le_bytes(wide);
        let item = match i64::try_from(value) {
            Ok(it) => Item::Int(it),
            Err(_) => {
                self.pickle.longs.push(value);
                Item::Long(self.pickle.longs.len() as u32 - 1)
            }
        };
        self.push(item);
        Ok(())
    }

    fn pop(&mut self) -> Result<Item, Broken> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => Ok(self.stack.pop().unwrap_or(Item::None)),
            false => self.fail("an opcode takes more values than there are"),
        }
    }

    fn top(&self) -> Result<Item, Broken> {
        match self.stack.last() {
            Some(&it) => Ok(it),
            None => self.fail("an opcode takes more values than there are"),
        }
    }

    /// Where the values since the last mark start; the mark is gone.
    fn unmark(&mut self) -> Result<usize, Broken> {
        match self.marks.pop() {
            Some(it) => Ok(it),
            None => self.fail("an opcode needs a mark and there is none"),
        }
    }

    fn put(&mut self, index: usize) -> Result<(), Broken> {
        let item = self.top()?;
        // Numbers are given in order, so none exceeds the bytes that came before.
        if index > self.at {
            return self.fail("a memo number beyond all that came before");
        }
        if self.memo.len() <= index {
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(item);
        Ok(())
    }

    fn get(&mut self, index: usize) -> Result<(), Broken> {
        match self.memo.get(index) {
            Some(&Some(it)) => {
                self.push(it);
                Ok(())
            }
            _ => self.fail(format!("memo entry {index} was never made")),
        }
    }

    fn global(&mut self, start: usize, module: &str, name: &str) -> Result<(), Broken> {
        match Global::find(module, name, self.kind) {
            Some(it) => {
                self.push(Item::Global(it));
                Ok(())
            }
            None => Err(Broken::Refused {
                at: start as u64,
                global: short(&format!("{module}.{name}")),
                what: self.kind.name(),
            }),
        }
    }

    fn tuple_from(&mut self, start: usize) {
        let item = self.pickle.new_tuple(&self.stack[start..]);
        self.stack.truncate(start);
        self.push(item);
    }

    fn tuple(&mut self, len: usize) -> Result<(), Broken> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() < floor + len {
            return self.fail("an opcode takes more values than there are");
        }
        self.tuple_from(self.stack.len() - len);
        Ok(())
    }

    fn append(&mut self, start: usize) -> Result<(), Broken> {
        let Some(&Item::List(list)) = self.stack[..start].last() else {
            return self.fail("values are appended to what is no list");
        };
        self.pickle.lists[list as usize].extend_from_slice(&self.stack[start..]);
        self.stack.truncate(start);
        Ok(())
    }

    fn set_items(&mut self, start: usize) -> Result<(), Broken> {
        let Some(&Item::Dict(dict)) = self.stack[..start].last() else {
            return self.fail("entries are added to what is no dict");
        };
        let entries = &self.stack[start..];
        if !entries.len().is_multiple_of(2) {
            return self.fail("a dict with a key and no value");
        }
        let pairs = entries.chunks(2).map(|it| (it[0], it[1]));
        let all = &mut self.pickle.entries;
        let known = &mut self.pickle.dicts[dict as usize];
        match known {
            Entries::Once(_, 0) => {
                *known = Entries::Once(all.len() as u32, pairs.len() as u32);
                all.extend(pairs);
            }
            Entries::Once(first, len) => {
                let before = &all[*first as usize..][..*len as usize];
                *known = Entries::More(before.iter().copied().chain(pairs).collect());
            }
            Entries::More(it) => it.extend(pairs),
        }
        self.stack.truncate(start);
        Ok(())
    }

    /// The values above the current mark, or above one value for opcodes without a mark.
    fn last(&self, n: usize) -> Result<usize, Broken> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() >= floor + n {
            true => Ok(self.stack.len() - n),
            false => self.fail("an opcode takes more values than there are"),
        }
    }

    fn reduce(&mut self) -> Result<(), Broken> {
        let args = self.pop()?;
        let Item::Global(global) = self.pop()? else {
            return self.fail("a call of what is no function");
        };
        let Some(items) = self.pickle.tuple(args) else {
            return self.fail("a call whose arguments are no tuple");
        };
        let item = match (global, items) {
            // These stand for their one argument.
            (Global::Size, [it @ Item::Tuple(_)]) => *it,
            (Global::Layout | Global::MemFormat, [it]) => *it,
            (Global::Path, _) => args,
            (Global::OrderedDict, []) => self.pickle.new_dict(),
            (Global::Encode, [Item::Str(_), _])
            | (
                Global::RebuildV2
                | Global::RebuildV3
                | Global::Set
                | Global::FrozenSet
                | Global::Complex
                | Global::ByteArray,
                _,
            ) => self.pickle.new_object(global, args),
            (other, _) => return self.fail(format!("a call of {} like no other", other.name())),
        };
        self.push(item);
        Ok(())
    }

    fn new_object(&mut self) -> Result<(), Broken> {
        let args = self.pop()?;
        let item = match (self.pop()?, self.pickle.tuple(args)) {
            (Item::Global(Global::OrderedDict), Some([])) => self.pickle.new_dict(),
            (Item::Global(it), Some(_)) => self.pickle.new_object(it, args),
            _ => return self.fail("an instance of what is no class"),
        };
        self.push(item);
        Ok(())
    }

    fn build(&mut self) -> Result<(), Broken> {
        let state = self.pop()?;
        match self.top()? {
            Item::Object(it) => {
                self.pickle.objects[it as usize].state = state;
                Ok(())
            }
            _ => self.fail("state for what is no instance"),
        }
    }

    /// One opcode; whether it was the last.
    fn step(&mut self) -> Result<bool, Broken> {
        let start = self.at;
        let op = self.array::<1>()?[0];
        match op {
            0x80 => {
                let protocol = self.byte()?;
                if !(2..=5).contains(&protocol) {
                    return self.fail(format!("pickle protocol {protocol}, only 2 to 5 are read"));
                }
            }
            // A frame only says that what follows may be read at once.
            0x95 => _ = self.len8()?,
            b'.' => {
                self.pickle.root = Some(self.pop()?);
                return Ok(true);
            }
            b'N' => self.push(Item::None),
            0x88 => self.push(Item::Bool(true)),
            0x89 => self.push(Item::Bool(false)),
            b'K' => {
                let it = self.byte()? as i64;
                self.push(Item::Int(it));
            }
            b'M' => {
                let it = u16::from_le_bytes(self.array()?);
                self.push(Item::Int(it.into()));
            }
            b'J' => {
                let it = i32::from_le_bytes(self.array()?);
                self.push(Item::Int(it.into()));
            }
            0x8a => {
                let len = self.byte()?;
                self.push_long(len)?;
            }
            0x8b => {
                let len = self.len4()?;
                self.push_long(len)?;
            }
            b'G' => {
                let it = f64::from_be_bytes(self.array()?);
                self.push(Item::Float(it));
            }
            0x8c | b'U' => {
                let len = self.byte()?;
                self.push_str(len)?;
            }
            b'X' | b'T' => {
                let len = self.len4()?;
                self.push_str(len)?;
            }
            0x8d => {
                let len = self.len8()?;
                self.push_str(len)?;
            }
            b'C' => {
                let len = self.byte()?;
                self.push_bytes(len)?;
            }
            b'B' => {
                let len = self.len4()?;
                self.push_bytes(len)?;
            }
            0x8e | 0x96 => {
                let len = self.len8()?;
                self.push_bytes(len)?;
            }
            b'(' => self.marks.push(self.stack.len()),
            b')' => self.tuple(0)?,
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let start = self.unmark()?;
                self.tuple_from(start);
            }
            b']' => {
                let item = self.pickle.new_list(Vec::new());
                self.push(item);
            }
            b'a' => {
                let start = self.last(1)?;
                self.append(start)?;
            }
            b'e' => {
                let start = self.unmark()?;
                self.append(start)?;
            }
            b'}' => {
                let item = self.pickle.new_dict();
                self.push(item);
            }
            b's' => {
                let start = self.last(2)?;
                self.set_items(start)?;
            }
            b'u' => {
                let start = self.unmark()?;
                self.set_items(start)?;
            }
            b'0' => _ = self.pop()?,
            b'1' => {
                let start = self.unmark()?;
                self.stack.truncate(start);
            }
            b'2' => {
                let it = self.top()?;
                self.push(it);
            }
            0x94 => self.put(self.memo.len())?,
            b'q' => {
                let index = self.byte()?;
                self.put(index)?;
            }
            b'r' => {
                let index = self.len4()?;
                self.put(index)?;
            }
            b'h' => {
                let index = self.byte()?;
                self.get(index)?;
            }
            b'j' => {
                let index = self.len4()?;
                self.get(index)?;
            }
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.global(start, module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Item::Str(module), Item::Str(name)) = (module, name) else {
                    return self.fail("a global whose name is no string");
                };
                let strs = &self.pickle.strs;
                let (module, name) = (strs[module as usize], strs[name as usize]);
                self.global(start, module, name)?;
            }
            b'R' => self.reduce()?,
            0x81 => self.new_object()?,
            b'b' => self.build()?,
            b'Q' => {
                let id = self.pop()?;
                self.pickle.persistents.push(id);
                self.push(Item::Persistent(self.pickle.persistents.len() as u32 - 1));
            }
            other => {
                self.at = start;
                return self.fail(format!("opcode {other:#04x} is none that checkpoints use"));
            }
        }
        Ok(false)
    }
}

impl<'a> Pickle<'a> {
    fn new_bytes(&mut self, it: &'a [u8]) -> Item {
        self.bytes.push(it);
        Item::Bytes(self.bytes.len() as u32 - 1)
    }

    fn new_tuple(&mut self, items: &[Item]) -> Item {
        self.tuples.push((self.kids.len() as u32, items.len() as u32));
        self.kids.extend_from_slice(items);
        Item::Tuple(self.tuples.len() as u32 - 1)
    }

    fn new_list(&mut self, items: Vec<Item>) -> Item {
        self.lists.push(items);
        Item::List(self.lists.len() as u32 - 1)
    }

    fn new_dict(&mut self) -> Item {
        self.dicts.push(Entries::Once(0, 0));
        Item::Dict(self.dicts.len() as u32 - 1)
    }

    fn new_object(&mut self, global: Global, args: Item) -> Item {
        self.objects.push(Object { global, args, state: Item::None });
        Item::Object(self.objects.len() as u32 - 1)
    }

    /// The value that was pickled.
    pub fn root(&self) -> Item {
        self.root.unwrap_or(Item::None)
    }

    /// The text of a string.
    pub fn str(&self, item: Item) -> Option<&'a str> {
        match item {
            Item::Str(it) => Some(self.strs[it as usize]),
            _ => None,
        }
    }

    /// How many strings there are; an [`Item::Str`] is below.
    pub fn n_strs(&self) -> usize {
        self.strs.len()
    }

    /// The elements of a tuple.
    pub fn tuple(&self, item: Item) -> Option<&[Item]> {
        match item {
            Item::Tuple(it) => {
                let (start, len) = self.tuples[it as usize];
                Some(&self.kids[start as usize..][..len as usize])
            }
            _ => None,
        }
    }

    /// The elements of a list or tuple.
    pub fn list(&self, item: Item) -> Option<&[Item]> {
        match item {
            Item::List(it) => Some(&self.lists[it as usize]),
            other => self.tuple(other),
        }
    }

    /// The entries of a dict.
    pub fn dict(&self, item: Item) -> Option<&[(Item, Item)]> {
        match item {
            Item::Dict(it) => Some(match &self.dicts[it as usize] {
                Entries::Once(start, len) => &self.entries[*start as usize..][..*len as usize],
                Entries::More(it) => it,
            }),
            _ => None,
        }
    }

    /// An instance or call.
    pub fn object(&self, item: Item) -> Option<Object> {
        match item {
            Item::Object(it) => Some(self.objects[it as usize]),
            _ => None,
        }
    }

    /// What a persistent id says.
    pub fn persistent(&self, item: Item) -> Option<Item> {
        match item {
            Item::Persistent(it) => Some(self.persistents[it as usize]),
            _ => None,
        }
    }

    /// An entry of the state of an instance.
    pub fn attribute(&self, object: Object, name: &str) -> Option<Item> {
        let entries = self.dict(object.state)?;
        entries.iter().find(|it| self.str(it.0) == Some(name)).map(|it| it.1)
    }

    /// Sizes or offsets: a tuple of integers, none negative.
    pub fn sizes<T: FromIterator<u64>>(&self, item: Item) -> Option<T> {
        let unsigned = |it: &Item| match it {
            Item::Int(it) => u64::try_from(*it).ok(),
            _ => None,
        };
        self.tuple(item)?.iter().map(unsigned).collect()
    }

    /// The pickled value, whole.
    ///
    /// # Errors
    /// If copying what is shared makes it much larger than the pickle, or it contains itself.
    pub fn value(&self) -> Result<Value, Broken> {
        let mut budget = self.len.saturating_mul(16).saturating_add(4096);
        self.to_value(self.root(), 0, &mut budget)
    }

    fn to_value(&self, item: Item, depth: u32, budget: &mut usize) -> Result<Value, Broken> {
        let text = match item {
            Item::Str(it) => self.strs[it as usize].len(),
            Item::Bytes(it) => self.bytes[it as usize].len(),
            _ => 0,
        };
        if depth > 100 || *budget < text + 1 {
            return Err(Broken::at(0, "a value that is nested too deeply, or repeated too often"));
        }
        *budget -= text + 1;
        let mut all = |items: &[Item]| -> Result<Vec<Value>, Broken> {
            items.iter().map(|&it| self.to_value(it, depth + 1, budget)).collect()
        };
        Ok(match item {
            Item::None => Value::None,
            Item::Bool(it) => Value::Bool(it),
            Item::Int(it) => Value::Int(it.into()),
            Item::Long(it) => Value::Int(self.longs[it as usize]),
            Item::Float(it) => Value::Float(it),
            Item::Str(it) => Value::Str(self.strs[it as usize].to_string()),
            Item::Bytes(it) => Value::Bytes(self.bytes[it as usize].to_vec()),
            Item::Tuple(_) => Value::Tuple(all(self.tuple(item).unwrap_or_default())?),
            Item::List(it) => Value::List(all(&self.lists[it as usize])?),
            Item::Dict(_) => {
                let mut res = Vec::new();
                for &(key, value) in self.dict(item).unwrap_or_default() {
                    let mut entry = all(&[key, value])?.into_iter();
                    res.extend(entry.next().zip(entry.next()));
                }
                Value::Dict(res)
            }
            Item::Global(it) => Value::Call { name: it.name(), args: Vec::new() },
            Item::Object(it) => {
                let Object { global, args, .. } = self.objects[it as usize];
                let args = all(self.tuple(args).unwrap_or_default())?;
                match (global, args.as_slice()) {
                    (Global::Encode, [Value::Str(text), _]) => Value::Bytes(latin1(text)?),
                    _ => Value::Call { name: global.name(), args },
                }
            }
            Item::Persistent(_) => return Err(Broken::at(0, "a tensor inside of an object")),
        })
    }
}

/// `bytes` as protocol 2 has them: as text in which each character is a byte.
fn latin1(text: &str) -> Result<Vec<u8>, Broken> {
    let bytes = text.chars().map(|it| u8::try_from(u32::from(it)));
    bytes.collect::<Result<_, _>>().map_err(|_| Broken::at(0, "bytes as text beyond latin-1"))
}
