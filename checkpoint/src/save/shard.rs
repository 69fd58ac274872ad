//! The file of one rank: items one behind the other, with a checksum of each beside it.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::{Advice, fadvise};

use super::disk;
use super::folder::{StepFolder, file_name, write_synced};
use super::{Content, FileItem};
use crate::archive::tensor_item;
use crate::dtype::StoredType;
use crate::error::CheckpointError;
use crate::sums::{self, Sum, Summing};

/// What is gathered before it is written; larger pieces go straight to the file.
const BUFFER: usize = 1 << 20;

/// How much is gathered in the system's memory before the disk begins.
const PUSH: u64 = 16 << 20;

/// The file of one rank: items one behind the other, with a checksum of each beside it.
#[derive(Debug)]
pub struct ShardFile {
    file: File,
    path: PathBuf,
    /// What comes behind what is in the file already.
    buffer: Vec<u8>,
    /// How much that is.
    written: u64,
    /// How much of it is on its way to disk.
    pushed: u64,
    sums: Vec<Sum>,
    save: String,
}

impl ShardFile {
    /// Starts the file of a rank.
    pub fn create(folder: &StepFolder, rank: u64) -> Result<ShardFile, CheckpointError> {
        let path = folder.temporary().join(file_name(rank));
        let file = disk::gate().and_then(|()| File::create(&path));
        let file = file.map_err(|it| CheckpointError::io("write", &path, &it))?;
        let (buffer, save) = (Vec::with_capacity(BUFFER), folder.save_id());
        Ok(ShardFile { file, path, buffer, written: 0, pushed: 0, sums: Vec::new(), save })
    }

    /// Adds the next item. `data` gives its elements to what it is called with, piece by piece: those of
    /// a part of a tensor, row-major and little-endian.
    ///
    /// # Panics
    /// If the item is not the next, or not as long as its plan says.
    pub fn write<E: From<CheckpointError>>(
        &mut self,
        item: &FileItem,
        dtype: StoredType,
        data: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>) -> Result<(), E>,
    ) -> Result<(), E> {
        assert_eq!(self.end(), item.at, "`{}` is not the next item", item.key);
        let (crc32, pieces) = match &item.content {
            Content::Object(bytes) => {
                self.append(bytes)?;
                let mut sums = Summing::new(0);
                sums.update(bytes);
                sums.finish(&[])
            }
            Content::Scalar(it) => {
                self.tensor(it.dtype, &[], |write| write(&it.bytes).map_err(E::from))?
            }
            Content::Shard { local, .. } => self.tensor(dtype, &local.chunk.sizes, data)?,
        };
        assert_eq!(self.end(), item.at + item.len, "`{}` has another length", item.key);
        let offsets = match &item.content {
            Content::Object(_) => None,
            Content::Scalar(_) => Some(Vec::new()),
            Content::Shard { local, .. } => Some(local.chunk.offsets.to_vec()),
        };
        let (key, at, len) = (item.key.clone(), item.at, item.len);
        self.sums.push(Sum { key, offsets, at, len, crc32, pieces });
        Ok(())
    }

    /// Adds a tensor; the checksums of its item and of the pieces of it.
    fn tensor<E: From<CheckpointError>>(
        &mut self,
        dtype: StoredType,
        sizes: &[u64],
        data: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>) -> Result<(), E>,
    ) -> Result<(u32, Vec<u32>), E> {
        // The header has the checksum of what follows it, so that it is written last.
        let (head, _) = tensor_item(dtype, sizes, 0);
        let start = self.end();
        self.append(&head)?;
        let mut sums = Summing::new(head.len() as u64);
        data(&mut |bytes| {
            sums.update(bytes);
            self.append(bytes)
        })?;
        let (head, tail) = tensor_item(dtype, sizes, sums.crc32());
        sums.update(&tail);
        self.append(&tail)?;
        self.replace(start, &head)?;
        Ok(sums.finish(&head))
    }

    /// Puts it on disk: first all items, then their checksums, which say that it is there.
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        self.flush()?;
        disk::sync(&self.file).map_err(|it| CheckpointError::io("write", &self.path, &it))?;
        let mut text = Vec::new();
        sums::write_head(&self.save, &mut text).expect("memory takes what is written");
        sums::write(&self.sums, &mut text).expect("memory takes what is written");
        let name = self.path.file_name().expect("it has a name").to_string_lossy();
        write_synced(&self.path.with_file_name(sums::file_name(&name)), &text)
    }

    /// Where the next byte goes.
    fn end(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        if self.buffer.len() + bytes.len() > BUFFER {
            self.flush()?;
        }
        if bytes.len() < BUFFER {
            self.buffer.extend_from_slice(bytes);
            return Ok(());
        }
        self.write_at(self.written, bytes)?;
        self.written += bytes.len() as u64;
        self.push();
        Ok(())
    }

    /// Replaces bytes that were appended together.
    fn replace(&mut self, at: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        if at < self.written {
            return self.write_at(at, bytes);
        }
        let at = (at - self.written) as usize;
        self.buffer[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CheckpointError> {
        self.write_at(self.written, &self.buffer)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        self.push();
        Ok(())
    }

    /// Has the system begin to write what it holds, so that the disk works while more is made.
    fn push(&mut self) {
        if let Some(len) = NonZeroU64::new(self.written - self.pushed).filter(|it| it.get() >= PUSH)
        {
            // On Linux it starts to write what is dirty. It is advice: whether it is taken shows in time only.
            let _ = fadvise(&self.file, self.pushed, Some(len), Advice::DontNeed);
            self.pushed = self.written;
        }
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        let written = disk::gate().and_then(|()| self.file.write_all_at(bytes, at));
        written.map_err(|it| CheckpointError::io("write", &self.path, &it))
    }
}
