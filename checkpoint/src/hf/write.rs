//! Writing a safetensors file, tensor by tensor.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::error::TransferError;
use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::save::folder::sync_folder_of;

/// A tensor that a file will have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its key.
    pub key: String,
    /// Its type.
    pub dtype: StoredType,
    /// Its sizes.
    pub shape: Vec<u64>,
}

impl Entry {
    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }
}

/// A safetensors file that is being written: its header is there, and the data of its entries come in
/// their order. It has its name once it is whole.
#[derive(Debug)]
pub struct SafetensorsFile {
    out: BufWriter<File>,
    part: Part,
    path: PathBuf,
    left: u64,
}

/// A file that is removed unless it got its name.
#[derive(Debug)]
struct Part(Option<PathBuf>);

impl Drop for Part {
    fn drop(&mut self) {
        // If even that fails, its name says what it is.
        let _ = self.0.take().map(fs::remove_file);
    }
}

/// Brings entries into the order in which safetensors stores them: those of wider types first, so that
/// each is aligned, then by key.
pub fn sort(entries: &mut [Entry]) {
    entries.sort_by(|a, b| b.dtype.bytes().cmp(&a.dtype.bytes()).then_with(|| a.key.cmp(&b.key)));
}

impl SafetensorsFile {
    /// Starts a file with these entries and this text.
    ///
    /// # Errors
    /// If the system refuses, or safetensors has no name for a type.
    pub fn create(
        path: &Path,
        entries: &[Entry],
        metadata: &BTreeMap<String, String>,
    ) -> Result<SafetensorsFile, TransferError> {
        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert("__metadata__".into(), json!(metadata));
        }
        let mut at = 0;
        for it in entries {
            let Some(dtype) = it.dtype.safetensors() else {
                let (key, found) = (it.key.clone(), it.dtype.to_string());
                return Err(TransferError::NotStorable { key, found, format: "safetensors" });
            };
            let end = at + it.bytes();
            let value = json!({ "dtype": dtype, "shape": it.shape, "data_offsets": [at, end] });
            header.insert(it.key.clone(), value);
            at = end;
        }
        let mut header = Value::Object(header).to_string();
        // Data start at a multiple of 8 bytes.
        let padded = header.len().next_multiple_of(8);
        header.extend(std::iter::repeat_n(' ', padded - header.len()));
        let mut part = path.as_os_str().to_owned();
        part.push(".tmp");
        let part = PathBuf::from(part);
        let fail = |it: std::io::Error| CheckpointError::io("write", path, &it);
        let file = File::create(&part).map_err(fail)?;
        let (mut out, part) = (BufWriter::with_capacity(1 << 20, file), Part(Some(part)));
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(fail)?;
        out.write_all(header.as_bytes()).map_err(fail)?;
        Ok(SafetensorsFile { out, part, path: path.to_path_buf(), left: at })
    }

    /// The next bytes of data.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.left =
            self.left.checked_sub(bytes.len() as u64).expect("no more than the header says");
        self.out.write_all(bytes).map_err(|it| CheckpointError::io("write", &self.path, &it))
    }

    /// Puts the file on disk and gives it its name.
    ///
    /// # Panics
    /// If data are missing.
    pub fn finish(self) -> Result<(), CheckpointError> {
        let SafetensorsFile { out, mut part, path, left } = self;
        assert_eq!(left, 0, "`{}` has all that its header says", path.display());
        let fail = |it: std::io::Error| CheckpointError::io("write", &path, &it);
        let file = out.into_inner().map_err(|it| fail(it.into_error()))?;
        file.sync_all().map_err(fail)?;
        if let Some(it) = &part.0 {
            fs::rename(it, &path).map_err(fail)?;
        }
        part.0 = None;
        sync_folder_of(&path)
    }
}
