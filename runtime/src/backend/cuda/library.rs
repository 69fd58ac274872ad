//! Finding NVIDIA's libraries: by absolute path and version, so that what runs is what is reported.
//!
//! Looked for in this order: `LD_LIBRARY_PATH`, the active Python's wheels
//! (`site-packages/nvidia/*/lib`), the CUDA toolkit (`CUDA_HOME`, `/usr/local/cuda`), the loader's own
//! paths. `cargo build` needs none of them.

use std::error::Error;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::RunError;

/// An opened library, kept open for as long as the process runs.
#[derive(Debug)]
pub struct Opened {
    /// Its file.
    pub path: PathBuf,
    library: Library,
}

/// Folders to look in, found once.
pub fn folders() -> &'static [PathBuf] {
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        let mut res: Vec<PathBuf> = Vec::new();
        if let Some(paths) = std::env::var_os("LD_LIBRARY_PATH") {
            res.extend(std::env::split_paths(&paths).filter(|it| !it.as_os_str().is_empty()));
        }
        res.extend(wheel_folders());
        let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
        for toolkit in home.into_iter().chain([PathBuf::from("/usr/local/cuda")]) {
            res.push(toolkit.join("lib64"));
        }
        res.extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(PathBuf::from));
        res
    })
}

/// `lib` folders of NVIDIA's wheels in the active Python.
fn wheel_folders() -> Vec<PathBuf> {
    let script = "import site, sys; print('\\n'.join(site.getsitepackages() + [site.getusersitepackages()] + sys.path))";
    let Ok(output) = Command::new("python3").args(["-c", script]).output() else {
        return Vec::new();
    };
    let mut res = Vec::new();
    for site in String::from_utf8_lossy(&output.stdout).lines().filter(|it| !it.is_empty()) {
        let Ok(wheels) = std::fs::read_dir(Path::new(site).join("nvidia")) else { continue };
        let mut found: Vec<PathBuf> = wheels
            .flatten()
            .map(|it| it.path().join("lib"))
            .filter(|it| it.is_dir() && !res.contains(it))
            .collect();
        found.sort();
        res.extend(found);
    }
    res
}

/// The file of an opened library, as the kernel has it.
fn mapped(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut files = maps.lines().filter_map(|it| it.split_whitespace().nth(5));
    files.find(|it| it.rsplit('/').next().is_some_and(|it| it.starts_with(name))).map(PathBuf::from)
}

/// What the loader says: the error itself only names its call.
fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |it| it.to_string())
}

/// `13.1.0`, of a number as cuBLASLt, cuDNN and NCCL give their version: 130100.
pub(crate) fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl Opened {
    /// Opens the first `name` found. `package` is the wheel that has it.
    pub fn find(name: &'static str, package: &'static str) -> Result<Opened, RunError> {
        let missing = |why: Option<String>| RunError::LibraryMissing {
            library: name,
            package,
            looked: folders().to_vec(),
            why,
        };
        let mut why = None;
        for folder in folders() {
            let path = folder.join(name);
            if !path.exists() {
                continue;
            }
            // SAFETY: loading runs the library's initializers; these are NVIDIA's, made to be loaded so.
            match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => return Ok(Opened { path, library }),
                Err(error) => why = why.or(Some(reason(&error))),
            }
        }
        // SAFETY: as above. The loader knows folders of its own, of the driver's for one.
        match unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => Ok(Opened { path: mapped(name).unwrap_or(name.into()), library }),
            Err(_) => Err(missing(why)),
        }
    }

    /// Opens every file next to this library whose name starts so, in the order of their names: what
    /// the library itself would look for by name only, and could find elsewhere.
    pub fn neighbours(&self, prefix: &str) -> Vec<Opened> {
        let folder = self.path.parent().and_then(|it| std::fs::read_dir(it).ok());
        let files = folder.into_iter().flatten().flatten().map(|it| it.path());
        let named = |it: &PathBuf| {
            it.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        };
        let mut files: Vec<PathBuf> = files.filter(named).collect();
        files.sort();
        // SAFETY: as in `find`.
        let open = |path: PathBuf| unsafe {
            let library = Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL).ok()?;
            Some(Opened { path, library })
        };
        files.into_iter().filter_map(open).collect()
    }

    /// A function by its C name.
    ///
    /// # Safety
    /// `F` must be the type of that function.
    pub unsafe fn function<F: Copy>(&self, name: &'static CStr) -> Result<F, RunError> {
        // SAFETY: the caller vouches for the type.
        let found = unsafe { self.library.get::<F>(name.to_bytes_with_nul()) };
        found.map(|it| *it).map_err(|error| RunError::LibraryFunction {
            path: self.path.clone(),
            function: name.to_string_lossy().into_owned(),
            why: reason(&error),
        })
    }
}

/// Declares a struct with the functions of a library, found when it is opened.
///
/// ```ignore
/// library! {
///     /// NCCL.
///     pub struct Nccl = "libnccl.so.2" of "nvidia-nccl-cu13";
///     fn ncclGetVersion(version: *mut i32) -> i32;
/// }
/// let nccl = Nccl::open()?;
/// unsafe { (nccl.ncclGetVersion)(&mut version) };
/// ```
macro_rules! library {
    ($(#[$doc:meta])* $vis:vis struct $Lib:ident = $name:literal of $package:literal;
     $(fn $f:ident($($a:ident: $t:ty),* $(,)?) -> $r:ty;)*) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        #[derive(Debug)]
        $vis struct $Lib {
            /// Where it was found.
            pub file: $crate::backend::cuda::library::Opened,
            $(pub(crate) $f: unsafe extern "C" fn($($a: $t),*) -> $r,)*
        }
        impl $Lib {
            /// Finds the library and its functions.
            pub fn open() -> Result<$Lib, $crate::error::RunError> {
                let file = $crate::backend::cuda::library::Opened::find($name, $package)?;
                $(
                    // SAFETY: the declaration is that of NVIDIA's header.
                    #[allow(non_snake_case)]
                    let $f = unsafe {
                        let name = concat!(stringify!($f), "\0");
                        let name = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).expect("ends in NUL");
                        file.function(name)?
                    };
                )*
                Ok($Lib { file, $($f,)* })
            }
            /// The library, opened once for the whole process.
            pub fn get() -> Result<&'static $Lib, $crate::error::RunError> {
                static OPENED: std::sync::OnceLock<Result<$Lib, $crate::error::RunError>> =
                    std::sync::OnceLock::new();
                OPENED.get_or_init($Lib::open).as_ref().map_err(Clone::clone)
            }
        }
    };
}
pub(crate) use library;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_loaders() {
        // SAFETY: a file that is not there runs nothing.
        let error = unsafe { Library::open(Some("/nowhere/libnccl.so.2"), RTLD_NOW) };
        let why = reason(&error.expect_err("there is no such file"));
        assert!(why.contains("/nowhere/libnccl.so.2"), "{why}");
    }
}
