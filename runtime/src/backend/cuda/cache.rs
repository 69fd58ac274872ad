//! Files that make the next start faster: cubins, tuned GEMMs, attention plans.
//!
//! All of them can be made again. So a file that cannot be read counts as absent, and one that cannot
//! be written is left out. A file appears whole or not at all, also to other processes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder of such files, or none where the user has no home.
#[derive(Debug, Clone)]
pub struct Cache(Option<PathBuf>);

impl Cache {
    /// The user's: `$XDG_CACHE_HOME/planc`, or `~/.cache/planc`.
    pub fn of_user() -> Cache {
        // A relative path is to be ignored, says the XDG specification.
        let set =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
        let folder = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|it| it.join(".cache")));
        Cache(folder.map(|it| it.join("planc")))
    }

    /// A folder, made when something is written.
    pub fn at(folder: &Path) -> Cache {
        Cache(Some(folder.to_path_buf()))
    }

    /// What was written as `name` last, which may be in a folder: `cubin/a`.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.as_ref()?.join(name)).ok()
    }

    /// Keeps `bytes` as `name`.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let Some(folder) = &self.0 else { return };
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let unique = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let partial = folder.join(format!("{name}.{}-{unique}", std::process::id()));
        let inner = partial.parent().expect("a file is in a folder");
        let written = std::fs::create_dir_all(inner)
            .and_then(|()| std::fs::write(&partial, bytes))
            .and_then(|()| std::fs::rename(&partial, folder.join(name)));
        if written.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A cache in a folder of its own, which goes with it.
    pub(crate) struct Temporary(pub(crate) Cache, pub(crate) PathBuf);

    impl Temporary {
        pub(crate) fn new(test: &str) -> Temporary {
            let folder =
                std::env::temp_dir().join(format!("planc-cache-{test}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&folder);
            Temporary(Cache::at(&folder), folder)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.1);
        }
    }

    #[test]
    fn the_last_write_is_read_and_nothing_else_is_left() {
        let it = Temporary::new("last");
        assert_eq!(it.0.read("a.json"), None);
        it.0.write("a.json", b"one");
        it.0.write("a.json", b"two");
        assert_eq!(it.0.read("a.json"), Some(b"two".to_vec()));
        assert_eq!(std::fs::read_dir(&it.1).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        let it = Temporary::new("file");
        it.0.write("folder", b"a file");
        let inside = Cache::at(&it.1.join("folder"));
        inside.write("a", b"one");
        assert_eq!(inside.read("a"), None);
        Cache(None).write("a", b"one");
        assert_eq!(Cache(None).read("a"), None);
    }
}
