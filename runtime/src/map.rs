//! Files in memory, with where they are.

use std::path::{Path, PathBuf};

use crate::error::RunError;

/// A file, mapped to be read. Nobody may change it meanwhile: training data and weights are not written
/// while they are trained on.
#[derive(Debug)]
pub struct Mapped {
    /// Where it is.
    pub path: PathBuf,
    map: checkpoint::Mapped,
}

impl Mapped {
    /// Maps a file.
    pub fn open(path: &Path) -> Result<Mapped, RunError> {
        let map = checkpoint::Mapped::open(path).map_err(|it| RunError::read(path, &it))?;
        Ok(Mapped { path: path.to_path_buf(), map })
    }

    /// Its content.
    pub fn bytes(&self) -> &[u8] {
        self.map.bytes()
    }
}
