//! Files in memory.

// Mapping a file is unsafe wherever it is done; this is the one place.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::{Advice, Mmap};

/// A file, mapped to be read.
#[derive(Debug)]
pub struct Mapped {
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

/// The folder that a path is in: `.` for a name alone.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a regular file: opening a pipe waits for its writer, and a device may have no end.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let kind = std::fs::metadata(path)?;
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !kind.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    File::open(path)
}

impl Mapped {
    /// Maps a regular file.
    pub fn open(path: &Path) -> io::Result<Mapped> {
        let file = open_regular(path)?;
        let metadata = file.metadata()?;
        let map = match metadata.len() {
            0 => None,
            // SAFETY: the map is read-only and read as plain bytes, for which any content is valid.
            // Nobody may change the file while it is used: no checkpoint is written in place, nor what a run
            // reads, and a truncation ends the process with SIGBUS.
            _ => Some(unsafe { Mmap::map(&file) }?),
        };
        Ok(Mapped { map })
    }

    /// Its content.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Says that all of these bytes will be read, so that the system fetches them in large pieces.
    pub fn will_need(&self, bytes: Range<usize>) {
        if let Some(map) = &self.map {
            // Only advice: what it cannot follow changes nothing.
            let _ = map.advise_range(Advice::WillNeed, bytes.start, bytes.len());
        }
    }
}
