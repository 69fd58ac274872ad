//! Files that are written: as a whole, or a record at a time.
//!
//! ```text
//! OutputFile   .plan.x1Y2z3.tmp -> fsync -> renamed to `plan` -> fsync of the folder
//! AppendFile   each record in one write; what a failed write leaves is cut off
//! ```

use std::fs::{self, File};
use std::io::{self, BufWriter, IntoInnerError, Write};
use std::path::{Path, PathBuf};

use checkpoint::folder_of;
use tempfile::{Builder, TempPath};

/// A file that appears under its name once it is complete and on disk. Until [`OutputFile::finish`] its bytes are in a
/// temporary file of the same folder, which goes away if the output is dropped before. A device, a pipe or a descriptor
/// of the process ([`is_direct`]) is written directly.
#[derive(Debug)]
pub struct OutputFile(Kind);

#[derive(Debug)]
enum Kind {
    Direct(BufWriter<File>),
    Whole { part: BufWriter<File>, name: TempPath, target: PathBuf },
}

impl OutputFile {
    /// Begins a file.
    ///
    /// # Errors
    /// If nothing can be written there.
    pub fn create(path: &Path) -> io::Result<OutputFile> {
        if is_direct(path) {
            return Ok(OutputFile(Kind::Direct(BufWriter::new(File::create(path)?))));
        }
        // A link stays, and leads to the new file.
        let there = fs::metadata(path).ok();
        let target = if there.is_some() { path.canonicalize()? } else { path.to_path_buf() };
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
        let part = Builder::new()
            .prefix(&format!(".{name}."))
            .suffix(".tmp")
            // Opened here, since the library names the temporary file in its errors.
            .make_in(folder_of(&target), |it| {
                File::options().write(true).create_new(true).open(it)
            })?;
        if let Some(it) = there {
            part.as_file().set_permissions(it.permissions())?;
        }
        let (file, name) = part.into_parts();
        Ok(OutputFile(Kind::Whole { part: BufWriter::new(file), name, target }))
    }

    /// Puts the file under its name.
    ///
    /// # Errors
    /// If it cannot be written. What had the name before is then as it was.
    pub fn finish(self) -> io::Result<()> {
        match self.0 {
            Kind::Direct(mut out) => out.flush(),
            Kind::Whole { part, name, target } => {
                part.into_inner().map_err(IntoInnerError::into_error)?.sync_all()?;
                name.persist(&target).map_err(|it| it.error)?;
                File::open(folder_of(&target))?.sync_all()
            }
        }
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Direct(out) => out.write(bytes),
            Kind::Whole { part, .. } => part.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Kind::Direct(out) => out.flush(),
            Kind::Whole { part, .. } => part.flush(),
        }
    }
}

/// Returns true if bytes go where a path leads, as no other file can take its place: a device, a pipe, a link to
/// nothing, or a descriptor of this process (`/dev/stdout`), whatever that is.
pub fn is_direct(path: &Path) -> bool {
    let descriptors = ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc"];
    let by_name = descriptors.iter().any(|it| path.starts_with(it));
    by_name || fs::metadata(path).map_or_else(|_| path.is_symlink(), |it| !it.is_file())
}

/// A file that grows by whole records. A record that cannot be written leaves nothing, so that later ones can follow.
#[derive(Debug)]
pub struct AppendFile {
    file: File,
    /// Bytes up to the last whole record.
    len: u64,
}

impl AppendFile {
    /// Opens a file behind what is in it; `keep` says whether that stays.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn open(path: &Path, keep: bool) -> io::Result<AppendFile> {
        let file = File::options().create(true).append(true).open(path)?;
        let there = file.metadata()?;
        if !keep && there.is_file() {
            file.set_len(0)?;
        }
        let len = if keep { there.len() } else { 0 };
        Ok(AppendFile { file, len })
    }

    /// Takes a file that is open for appending, and empty.
    pub fn new(file: File) -> AppendFile {
        AppendFile { file, len: 0 }
    }

    /// Adds a record, and hands it to the system, so that a process that is killed leaves it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn push(&mut self, record: &[u8]) -> io::Result<()> {
        match self.file.write_all(record) {
            Ok(()) => self.len += record.len() as u64,
            Err(error) => {
                // A device or a pipe has no length, and keeps what it took.
                let _ = self.file.set_len(self.len);
                return Err(error);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn folder(test: &str) -> PathBuf {
        let res = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/output").join(test);
        _ = fs::remove_dir_all(&res);
        fs::create_dir_all(&res).expect("the target folder is writable");
        res
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let mut res: Vec<String> = entries
            .map(|it| it.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        res.sort();
        res
    }

    #[test]
    fn an_output_is_whole_or_as_it_was() {
        let folder = folder("whole");
        let path = folder.join("a");
        fs::write(&path, "before").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("a", folder.join("link")).unwrap();
        let mut output = OutputFile::create(&folder.join("link")).unwrap();
        output.write_all(b"after").unwrap();
        output.flush().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        drop(output);
        assert_eq!(names(&folder), ["a", "link"]);
        let mut output = OutputFile::create(&folder.join("link")).unwrap();
        output.write_all(b"after").unwrap();
        output.finish().unwrap();
        assert_eq!(names(&folder), ["a", "link"]);
        assert!(folder.join("link").is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), "after");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn devices_are_written_directly() {
        let mut output = OutputFile::create(Path::new("/dev/null")).unwrap();
        output.write_all(b"gone").unwrap();
        output.finish().unwrap();
        let mut output = OutputFile::create(Path::new("/dev/full")).unwrap();
        output.write_all(b"no room").unwrap();
        assert_eq!(output.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(!is_direct(Path::new("/dev/shm/planc-is-not-there")));
    }

    #[test]
    fn records_follow_what_is_there_or_replace_it() {
        let path = folder("records").join("a");
        fs::write(&path, "old\n").unwrap();
        let mut file = AppendFile::open(&path, true).unwrap();
        file.push(b"one\n").unwrap();
        file.push(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old\none\ntwo\n");
        AppendFile::open(&path, false).unwrap().push(b"new\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new\n");
        let mut full = AppendFile::open(Path::new("/dev/full"), true).unwrap();
        assert_eq!(full.push(b"x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
