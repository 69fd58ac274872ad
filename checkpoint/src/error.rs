//! `CheckpointError`: why a checkpoint cannot be read or written.
//!
//! Values, not text: the CLI turns them into reports and finds [`CheckpointError::code`] in its table.

use std::fmt;
use std::path::{Path, PathBuf};

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CheckpointError {
    /// A folder without anything that is a checkpoint, or no folder.
    #[error("`{}` is no checkpoint: {why}", path.display())]
    NoCheckpoint {
        /// What was opened.
        path: PathBuf,
        /// What it lacks.
        why: String,
    },
    /// The system refused.
    #[error("cannot {what} `{}`: {why}", path.display())]
    Io {
        /// `read`, `write`, ..
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        why: String,
    },
    /// The index cannot be read, or contradicts itself.
    #[error("`{}`, byte {at}: {why}", path.display())]
    Index {
        /// `.metadata`, or a file with a header.
        path: PathBuf,
        /// Byte of the file.
        at: u64,
        /// What is wrong there.
        why: String,
    },
    /// A pickle that would call something when Python loads it.
    #[error(
        "`{}`{}, byte {at}: names `{global}`, which no {what} needs; loading it in Python would call it",
        path.display(), of(key)
    )]
    Refused {
        /// The file.
        path: PathBuf,
        /// The key of the item, if it is not the index.
        key: Option<String>,
        /// Byte of the file.
        at: u64,
        /// `os.system`.
        global: String,
        /// `index`, `tensor`, `object`.
        what: &'static str,
    },
    /// An item that cannot be read, or is not what the index says.
    #[error("`{}`, `{key}` at byte {at}: {why}", path.display())]
    Item {
        /// The file.
        path: PathBuf,
        /// Whose item it is.
        key: String,
        /// Byte of the file.
        at: u64,
        /// What is wrong there.
        why: String,
    },
    /// Bytes that changed since they were written.
    #[error(
        "`{}`, `{key}` at byte {at}: the checksum of {len} bytes is {found:08x}, and was {expect:08x} when \
         they were written",
        path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Whose item it is.
        key: String,
        /// First byte of what was summed.
        at: u64,
        /// How many bytes.
        len: u64,
        /// CRC-32 of what is there.
        found: u32,
        /// CRC-32 that was stored.
        expect: u32,
    },
    /// A key that is not there.
    #[error(
        "`{}` has no {what} `{key}`{}",
        path.display(), near.as_ref().map_or(String::new(), |it| format!("; is it `{it}`?"))
    )]
    NoKey {
        /// The checkpoint.
        path: PathBuf,
        /// `tensor`, `object`.
        what: &'static str,
        /// What was asked for.
        key: String,
        /// The key most like it.
        near: Option<String>,
    },
    /// Boxes of a tensor that do not make up the tensor.
    #[error("`{}`, `{key}` {shape:?}: {why}", path.display())]
    Cover {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Its global sizes.
        shape: Vec<u64>,
        /// Which element is stored in no box, or in several.
        why: String,
    },
    /// A box that is not within the tensor.
    #[error("`{key}` is {shape:?}, and offsets {offsets:?} with sizes {sizes:?} are not within it")]
    Outside {
        /// The tensor.
        key: String,
        /// Its global sizes.
        shape: Vec<u64>,
        /// First element asked for.
        offsets: Vec<u64>,
        /// How many in each dim.
        sizes: Vec<u64>,
    },
    /// A folder of checkpoints that another run saves into.
    #[error("{0}; stop that process, or wait until it ends, or save into another folder")]
    Locked(Box<LockHolder>),
    /// A folder of checkpoints that this run saved into, and another has taken over.
    #[error(
        "this run no longer holds the lock of `{}`{}; it writes nothing more there",
        path.display(), to.as_ref().map_or(String::new(), |it| format!(": {it}"))
    )]
    LockLost {
        /// The folder.
        path: PathBuf,
        /// The run that has the lock, if any has.
        to: Option<Box<LockHolder>>,
    },
}

/// A run that saves into a folder of checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockHolder {
    /// The folder.
    pub path: PathBuf,
    /// The id of the run.
    pub run: String,
    /// The user that started it.
    pub user: String,
    /// The machine on which its rank 0 runs.
    pub host: String,
    /// The process of its rank 0.
    pub pid: u32,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LockHolder { path, run, user, host, pid } = self;
        write!(f, "`{}` is locked by run {run} of {user}, process {pid} on {host}", path.display())
    }
}

fn of(key: &Option<String>) -> String {
    key.as_ref().map_or(String::new(), |it| format!(", `{it}`"))
}

impl CheckpointError {
    /// A failure of the system at a path.
    pub fn io(what: &'static str, path: &Path, error: &std::io::Error) -> CheckpointError {
        CheckpointError::Io { what, path: path.to_path_buf(), why: error.to_string() }
    }

    /// Stable code, for `planc explain`.
    pub fn code(&self) -> &'static str {
        match self {
            CheckpointError::NoCheckpoint { .. } => "PL0701",
            CheckpointError::Io { .. } => "PL0702",
            CheckpointError::Index { .. } => "PL0703",
            CheckpointError::Refused { .. } => "PL0704",
            CheckpointError::Item { .. } => "PL0705",
            CheckpointError::Checksum { .. } => "PL0706",
            CheckpointError::NoKey { .. } => "PL0707",
            CheckpointError::Cover { .. } => "PL0708",
            CheckpointError::Outside { .. } => "PL0709",
            CheckpointError::Locked(_) => "PL0712",
            CheckpointError::LockLost { .. } => "PL0713",
        }
    }
}

/// The most characters of a name that a message quotes.
const QUOTED: usize = 100;
/// The most characters of a reason, which may quote a file in turn.
const REASON: usize = 1000;

/// What a message quotes of a file, cut to a length that people read.
pub(crate) fn short(text: &str) -> String {
    cut(text, QUOTED)
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_string(),
    }
}

/// What is wrong in some bytes, before it is known in which file they are.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Broken {
    /// They are not what they should be.
    #[error("byte {at}: {why}")]
    Malformed {
        /// Byte of what was read.
        at: u64,
        /// What is wrong there.
        why: String,
    },
    /// A pickle names a global that is not on the list.
    #[error("byte {at}: names `{global}`, which no {what} needs")]
    Refused {
        /// Byte of what was read.
        at: u64,
        /// `os.system`.
        global: String,
        /// `index`, `tensor`, `object`.
        what: &'static str,
    },
}

impl Broken {
    /// Something wrong at a byte.
    pub(crate) fn at(at: usize, why: impl Into<String>) -> Broken {
        Broken::Malformed { at: at as u64, why: cut(&why.into(), REASON) }
    }

    /// The same, where what was read starts `by` bytes into something else.
    pub(crate) fn moved(mut self, by: u64) -> Broken {
        match &mut self {
            Broken::Malformed { at, .. } | Broken::Refused { at, .. } => {
                *at = at.saturating_add(by)
            }
        }
        self
    }

    /// As the fault of an item that starts at byte `start` of a file.
    pub fn in_item(self, path: &Path, key: &str, start: u64) -> CheckpointError {
        let (path, key) = (path.to_path_buf(), key.to_string());
        match self.moved(start) {
            Broken::Malformed { at, why } => CheckpointError::Item { path, key, at, why },
            Broken::Refused { at, global, what } => {
                CheckpointError::Refused { path, key: Some(key), at, global, what }
            }
        }
    }

    /// As the fault of an index.
    pub fn in_index(self, path: &Path) -> CheckpointError {
        let path = path.to_path_buf();
        match self {
            Broken::Malformed { at, why } => CheckpointError::Index { path, at, why },
            Broken::Refused { at, global, what } => {
                CheckpointError::Refused { path, key: None, at, global, what }
            }
        }
    }
}
