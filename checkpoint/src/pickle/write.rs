//! Writes pickles: protocol 2, which every PyTorch reads, also where it reads nothing newer (the
//! `data.pkl` of an item).
//!
//! Strings and globals that come again are written once and then named by number ([`Writer::text`]),
//! which keeps an index of a million boxes small.

use rustc_hash::FxHashMap;

use super::Value;

/// Entries of a dict or list that one opcode adds, as Python batches them: the reader's stack stays
/// short.
pub const BATCH: usize = 1000;

/// Writes opcodes into a buffer, which its owner may empty at any time.
#[derive(Debug)]
pub struct Writer {
    /// What was written.
    pub out: Vec<u8>,
    texts: FxHashMap<String, u32>,
    globals: FxHashMap<(&'static str, &'static str), u32>,
}

impl Default for Writer {
    fn default() -> Writer {
        Writer { out: vec![0x80, 2], texts: FxHashMap::default(), globals: FxHashMap::default() }
    }
}

impl Writer {
    /// Opcodes and arguments as they are.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// A string, whole.
    pub fn text(&mut self, text: &str) {
        self.out.push(b'X');
        self.out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        self.out.extend_from_slice(text.as_bytes());
    }

    /// A string that comes often.
    pub fn shared_text(&mut self, text: &str) {
        if let Some(&index) = self.texts.get(text) {
            return self.memo_op(b'h', b'j', index);
        }
        self.text(text);
        let index = self.remember();
        self.texts.insert(text.to_string(), index);
    }

    /// A class or function.
    pub fn global(&mut self, module: &'static str, name: &'static str) {
        if let Some(&index) = self.globals.get(&(module, name)) {
            return self.memo_op(b'h', b'j', index);
        }
        self.out.push(b'c');
        for part in [module, name] {
            self.out.extend_from_slice(part.as_bytes());
            self.out.push(b'\n');
        }
        let index = self.remember();
        self.globals.insert((module, name), index);
    }

    /// Puts the value on top of the stack into the memo; its number there.
    fn remember(&mut self) -> u32 {
        let index = (self.texts.len() + self.globals.len()) as u32;
        self.memo_op(b'q', b'r', index);
        index
    }

    fn memo_op(&mut self, short: u8, long: u8, index: u32) {
        match u8::try_from(index) {
            Ok(it) => self.out.extend_from_slice(&[short, it]),
            Err(_) => {
                self.out.push(long);
                self.out.extend_from_slice(&index.to_le_bytes());
            }
        }
    }

    /// An integer.
    pub fn int(&mut self, it: i128) {
        if let Ok(it) = u8::try_from(it) {
            self.out.extend_from_slice(&[b'K', it]);
        } else if let Ok(it) = u16::try_from(it) {
            self.out.push(b'M');
            self.out.extend_from_slice(&it.to_le_bytes());
        } else if let Ok(it) = i32::try_from(it) {
            self.out.push(b'J');
            self.out.extend_from_slice(&it.to_le_bytes());
        } else {
            // Two's complement, as few bytes as keep the sign.
            let bits = 128 - if it < 0 { (!it).leading_zeros() } else { it.leading_zeros() };
            let len = bits as usize / 8 + 1;
            self.out.extend_from_slice(&[0x8a, len as u8]);
            self.out.extend_from_slice(&it.to_le_bytes()[..len.min(16)]);
        }
    }

    /// `None`.
    pub fn none(&mut self) {
        self.out.push(b'N');
    }

    /// `True` or `False`.
    pub fn bool(&mut self, it: bool) {
        self.out.push(if it { 0x88 } else { 0x89 });
    }

    /// A tuple of integers.
    pub fn ints(&mut self, ints: &[u64]) {
        if ints.len() > 3 {
            self.out.push(b'(');
        }
        for &it in ints {
            self.int(it.into());
        }
        self.close_tuple(ints.len());
    }

    /// Makes a tuple of the last `len` values; more than three have a mark below.
    fn close_tuple(&mut self, len: usize) {
        self.out.push([b')', 0x85, 0x86, 0x87].get(len).copied().unwrap_or(b't'));
    }

    /// Any value.
    ///
    /// # Panics
    /// For `Bytes` and `Call`, which nothing that is saved contains.
    pub fn value(&mut self, value: &Value) {
        match value {
            Value::None => self.none(),
            Value::Bool(it) => self.bool(*it),
            Value::Int(it) => self.int(*it),
            Value::Float(it) => {
                self.out.push(b'G');
                self.out.extend_from_slice(&it.to_be_bytes());
            }
            Value::Str(it) => self.text(it),
            Value::Tuple(items) => {
                if items.len() > 3 {
                    self.out.push(b'(');
                }
                for it in items {
                    self.value(it);
                }
                self.close_tuple(items.len());
            }
            Value::List(items) => {
                self.out.push(b']');
                for batch in items.chunks(BATCH) {
                    self.out.push(b'(');
                    for it in batch {
                        self.value(it);
                    }
                    self.out.push(b'e');
                }
            }
            Value::Dict(items) => {
                self.out.push(b'}');
                for batch in items.chunks(BATCH) {
                    self.out.push(b'(');
                    for (key, value) in batch {
                        self.value(key);
                        self.value(value);
                    }
                    self.out.push(b'u');
                }
            }
            Value::Bytes(_) | Value::Call { .. } => panic!("`{value}` is read, never written"),
        }
    }

    /// Ends the pickle.
    pub fn stop(&mut self) {
        self.out.push(b'.');
    }
}

/// A pickle of one value; see [`Writer::value`].
pub fn to_vec(value: &Value) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.value(value);
    writer.stop();
    writer.out
}
