//! Files in memory.

// Mapping a file is unsafe wherever it is done; this is the one place.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::RunError;

/// A file, mapped to be read.
#[derive(Debug)]
pub struct Mapped {
    /// Where it is.
    pub path: PathBuf,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl Mapped {
    /// Maps a file.
    pub fn open(path: &Path) -> Result<Mapped, RunError> {
        let fail = |it: std::io::Error| RunError::read(path, &it);
        let file = File::open(path).map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if metadata.is_dir() {
            return Err(fail(std::io::ErrorKind::IsADirectory.into()));
        }
        let map = match metadata.len() {
            0 => None,
            // SAFETY: the map is read-only and read as plain bytes, for which any content is valid.
            // Nobody may change the file while it is used: training data and weights are not written
            // while they are trained on, and a truncation ends the process with SIGBUS.
            _ => Some(unsafe { Mmap::map(&file) }.map_err(fail)?),
        };
        Ok(Mapped { path: path.to_path_buf(), map })
    }

    /// Its content.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}
