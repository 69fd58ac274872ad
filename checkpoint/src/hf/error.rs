//! [`TransferError`]: why weights do not come in, or do not go out.

use std::path::PathBuf;

use crate::error::CheckpointError;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TransferError {
    /// What is read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Keys, shapes or types that do not fit: all of them.
    #[error("{0}")]
    Mismatch(Box<Mismatch>),
    /// A fused tensor whose rows lie as the ranks that saved it had them.
    #[error(
        "`{key}` has its rows in the order of the tensor-parallel ranks that saved it, and nothing in the \
         file says how many there were; say so with `--saved-tp N` (1 without tensor parallelism)"
    )]
    SavedTp {
        /// The tensor.
        key: String,
    },
    /// Two tensors that are one parameter of the model, and differ.
    #[error(
        "`{first}` and `{second}` are the one parameter `{param}` of the model, and differ; remove the \
         tie from the model, or the wrong tensor from the checkpoint"
    )]
    Differ {
        /// The parameter.
        param: String,
        /// A tensor.
        first: String,
        /// Another.
        second: String,
    },
    /// An index that names what its files do not have.
    #[error("`{}` names {}, which its files do not have: some files are missing", path.display(), list(keys))]
    Incomplete {
        /// The index.
        path: PathBuf,
        /// The tensors.
        keys: Vec<String>,
    },
    /// Something that cannot be written into the format that was asked for.
    #[error("`{key}` is {found}, which {format} cannot hold")]
    NotStorable {
        /// The key.
        key: String,
        /// What it is.
        found: String,
        /// The format.
        format: &'static str,
    },
    /// Output that would go on top of what is there.
    #[error("`{}` has files already; name a new folder", path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
}

/// What does not fit between a checkpoint and a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Parameters that no tensor is.
    pub missing: Vec<String>,
    /// Tensors that are no parameter.
    pub unexpected: Vec<String>,
    /// `` `a` is [2, 3] and must be [3, 2] ``.
    pub shapes: Vec<String>,
    /// `` `a` is int64 and must be float32 ``.
    pub dtypes: Vec<String>,
}

impl TransferError {
    /// Stable code, for `planc explain`.
    pub fn code(&self) -> &'static str {
        match self {
            TransferError::Checkpoint(it) => it.code(),
            TransferError::Mismatch(_) => "PL0784",
            TransferError::SavedTp { .. } => "PL0786",
            TransferError::Differ { .. } => "PL0787",
            TransferError::Incomplete { .. } => "PL0788",
            TransferError::NotStorable { .. } => "PL0789",
            TransferError::Occupied { .. } => "PL0790",
        }
    }
}

impl Mismatch {
    /// Whether all fits.
    pub fn is_empty(&self) -> bool {
        self.n() == 0
    }

    fn n(&self) -> usize {
        self.missing.len() + self.unexpected.len() + self.shapes.len() + self.dtypes.len()
    }

    /// Nothing, or all that does not fit, as one error.
    pub(crate) fn check(self) -> Result<(), TransferError> {
        if self.is_empty() { Ok(()) } else { Err(TransferError::Mismatch(Box::new(self))) }
    }
}

/// A line for all, and one for each.
impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds = [
            ("missing", &self.missing),
            ("unexpected", &self.unexpected),
            ("of another shape", &self.shapes),
            ("of another type", &self.dtypes),
        ];
        let kinds = || kinds.iter().filter(|it| !it.1.is_empty());
        let counts: Vec<String> = kinds().map(|it| format!("{} {}", it.1.len(), it.0)).collect();
        write!(f, "checkpoint and model do not fit: {}", counts.join(", "))?;
        for line in &self.missing {
            write!(f, "\nmissing: `{line}`")?;
        }
        for line in &self.unexpected {
            write!(f, "\nunexpected: `{line}`")?;
        }
        self.shapes.iter().chain(&self.dtypes).try_for_each(|it| write!(f, "\n{it}"))
    }
}

fn list(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|it| format!("`{it}`")).collect();
    names.join(", ")
}
