//! The operations that change a folder of checkpoints.
//!
//! Each passes [`gate`] first, where tests let another job go on, or end the process.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::map::folder_of;

#[cfg(not(test))]
#[inline]
pub(crate) fn gate() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use super::turns::gate;

pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    gate()?;
    fs::rename(from, to)
}

/// Swaps two folders in one step, which not every file system can.
pub(crate) fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    gate()?;
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

pub(crate) fn link(from: &Path, to: &Path) -> io::Result<()> {
    gate()?;
    fs::hard_link(from, to)
}

/// Makes a file that is not there.
pub(crate) fn create_new(path: &Path) -> io::Result<File> {
    gate()?;
    File::options().read(true).write(true).create_new(true).open(path)
}

/// Writes the content of a file, and puts it on disk.
pub(crate) fn fill(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    gate()?;
    file.write_all(bytes)?;
    sync(file)
}

/// Puts a file, or the names in a folder, on disk.
pub(crate) fn sync(file: &File) -> io::Result<()> {
    gate()?;
    // A test ends jobs and not machines, and would spend its time here.
    if cfg!(test) { Ok(()) } else { file.sync_all() }
}

/// Makes a folder with those around it, and puts their names on disk.
pub(crate) fn create_folder(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let around = folder_of(path);
    create_folder(around)?;
    gate()?;
    match fs::create_dir(path) {
        Err(it) if it.kind() == ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        it => it?,
    }
    match File::open(around) {
        // Who may write there need not be allowed to read it.
        Err(it) if it.kind() == ErrorKind::PermissionDenied => Ok(()),
        it => sync(&it?),
    }
}

/// Removes a file, a link, or a folder with all that is in it, if it is there.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match remove_all(path) {
        Err(it) if it.kind() == ErrorKind::NotFound => Ok(()),
        it => it,
    }
}

fn remove_all(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        gate()?;
        return fs::remove_file(path);
    }
    for entry in fs::read_dir(path)? {
        remove(&entry?.path())?;
    }
    gate()?;
    fs::remove_dir(path)
}
