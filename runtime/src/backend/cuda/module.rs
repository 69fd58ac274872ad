//! Cubins, from the disk cache or from NVRTC, and the functions in them.
//!
//! A cubin's file is named after all that decides about its content and ends in a checksum, so that a
//! file that was cut off counts as missing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::CString;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{ptr, thread};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule, cuModuleUnload};
use kernels::cuda::{Function, HEADERS, SOURCES};

use crate::backend::cuda::cache::Cache;
use crate::backend::cuda::driver::{Device, cuda};
use crate::backend::cuda::nvrtc::{Compiler, Source};
use crate::error::RunError;

/// Dynamic shared memory that a function has without asking: 48 KiB, less what it declares itself.
const SHARED_DEFAULT: u32 = 32 << 10;

/// A cubin, or why there is none.
type Built = Result<Arc<Vec<u8>>, RunError>;

/// The modules that one device has loaded.
#[derive(Debug)]
pub struct Modules {
    arch: String,
    loaded: BTreeMap<Function, Module>,
}

#[derive(Debug)]
struct Module {
    handle: CUmodule,
    function: CUfunction,
    /// How much dynamic shared memory it may have.
    shared: u32,
}

/// A function on the device. Good for as long as its [`Modules`].
#[derive(Debug, Clone, Copy)]
pub struct Kernel(pub(crate) CUfunction);

// SAFETY: modules and functions may be used from any thread that has their context.
unsafe impl Send for Module {}

// SAFETY: as above.
unsafe impl Send for Kernel {}

impl Modules {
    /// None loaded.
    pub fn new(device: Device) -> Result<Modules, RunError> {
        Ok(Modules { arch: device.arch()?, loaded: BTreeMap::new() })
    }

    /// Compiles and loads functions, those not yet there.
    pub fn load(&mut self, functions: &BTreeSet<Function>) -> Result<(), RunError> {
        let missing: Vec<&Function> =
            functions.iter().filter(|it| !self.loaded.contains_key(it)).collect();
        let cubins = cubins(&missing, &self.arch)?;
        for (&function, cubin) in missing.iter().zip(&cubins) {
            self.loaded.insert(function.clone(), Module::load(function, cubin)?);
        }
        Ok(())
    }

    /// A loaded function, which may then use `shared` bytes of dynamic shared memory.
    ///
    /// # Panics
    /// If it was not loaded.
    pub fn kernel(&mut self, function: &Function, shared: u32) -> Result<Kernel, RunError> {
        let module = self.loaded.get_mut(function).expect("functions are loaded before use");
        if shared > module.shared {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            cuda!(cuFuncSetAttribute(module.function, attribute, shared as i32))?;
            module.shared = shared;
        }
        Ok(Kernel(module.function))
    }
}

impl Module {
    fn load(function: &Function, cubin: &[u8]) -> Result<Module, RunError> {
        let (mut handle, mut entry) = (ptr::null_mut(), ptr::null_mut());
        cuda!(cuModuleLoadData(&mut handle, cubin.as_ptr().cast()))?;
        let mut module = Module { handle, function: entry, shared: SHARED_DEFAULT };
        let name = CString::new(function.entry).expect("entries have no NUL");
        cuda!(cuModuleGetFunction(&mut entry, handle, name.as_ptr()))?;
        module.function = entry;
        Ok(module)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: nothing launches it any more. A failure means that the context is gone.
        unsafe { cuModuleUnload(self.handle) };
    }
}

/// Cubins of functions, in their order; those not in the cache are compiled in parallel.
pub fn cubins(functions: &[&Function], arch: &str) -> Result<Vec<Arc<Vec<u8>>>, RunError> {
    let n_threads = thread::available_parallelism().map_or(1, usize::from).min(functions.len());
    let next = Mutex::new(functions.iter());
    let build = || {
        // The lock is held for as long as it takes to step the iterator, and not longer.
        let step = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(function) = step() {
            // An error is kept with the cubins, and comes out below.
            let _ = cubin(function, arch);
        }
    };
    thread::scope(|scope| {
        for _ in 1..n_threads {
            scope.spawn(build);
        }
        build();
    });
    functions.iter().map(|it| cubin(it, arch)).collect()
}

/// One cubin. Ranks that are threads of this process share it, and only one of them compiles it.
fn cubin(function: &Function, arch: &str) -> Built {
    type Slot = Arc<OnceLock<Built>>;
    static BUILT: OnceLock<Mutex<HashMap<(Function, String), Slot>>> = OnceLock::new();
    let slot = {
        let built = BUILT.get_or_init(Mutex::default);
        let mut built = built.lock().unwrap_or_else(PoisonError::into_inner);
        built.entry((function.clone(), arch.to_string())).or_default().clone()
    };
    slot.get_or_init(|| build(function, arch).map(Arc::new)).clone()
}

fn build(function: &Function, arch: &str) -> Result<Vec<u8>, RunError> {
    let text = SOURCES.iter().find(|it| it.0 == function.source).map(|it| it.1);
    let text = text.expect("programs name listed sources");
    let source = Source { function, text, headers: HEADERS, arch };
    let compiler = Compiler::get()?;
    let (cache, file) = (Cache::of_user(), file_name(&source, compiler.version));
    if let Some(cubin) = read(&cache, &file) {
        return Ok(cubin);
    }
    let cubin = compiler.compile(&source)?;
    write(&cache, &file, &cubin);
    Ok(cubin)
}

/// `cubin/0123...ef.cubin`.
fn file_name(source: &Source<'_>, version: (i32, i32)) -> String {
    let mut hash = Hash::new();
    for (name, text) in source.headers {
        hash.add(name);
        hash.add(text);
    }
    hash.add(source.text);
    // The entry is not part of the content, and still decides what is looked up in it.
    hash.add(source.function.entry);
    source.function.defines.iter().for_each(|it| hash.add(it));
    hash.add(source.arch);
    hash.add(&format!("{version:?}"));
    format!("cubin/{:032x}.cubin", hash.0)
}

fn read(cache: &Cache, file: &str) -> Option<Vec<u8>> {
    let mut bytes = cache.read(file)?;
    let end = bytes.len().checked_sub(size_of::<u128>())?;
    (bytes[end..] == Hash::of(&bytes[..end]).to_le_bytes()).then(|| {
        bytes.truncate(end);
        bytes
    })
}

fn write(cache: &Cache, file: &str, cubin: &[u8]) {
    let mut bytes = cubin.to_vec();
    bytes.extend(Hash::of(cubin).to_le_bytes());
    cache.write(file, &bytes);
}

/// FNV-1a of 128 bits: the same in every build, unlike the standard library's hashes.
struct Hash(u128);

impl Hash {
    fn new() -> Hash {
        Hash(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// A text and its length, so that texts cannot run into each other.
    fn add(&mut self, text: &str) {
        self.bytes(text.as_bytes());
        self.bytes(&(text.len() as u64).to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        const PRIME: u128 = (1 << 88) + 0x13b;
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }

    fn of(bytes: &[u8]) -> u128 {
        let mut hash = Hash::new();
        hash.bytes(bytes);
        hash.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::backend::cuda::cache::tests::Temporary;

    /// Known answers of the FNV reference code (`test_fnv.c`, `fnv1a_128`).
    #[test]
    fn hashes_are_fnv1a_of_128_bits() {
        assert_eq!(Hash::of(b""), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(Hash::of(b"a"), 0xd228cb696f1a8caf78912b704e4a8964);
        assert_eq!(Hash::of(b"foobar"), 0x343e1662793c64bf6f0d3597ba446f18);
    }

    #[test]
    fn a_cubin_that_was_cut_off_is_not_read() {
        let Temporary(cache, folder) = &Temporary::new("cubin");
        let file = "deep/a.cubin";
        write(cache, file, b"some cubin");
        assert_eq!(read(cache, file), Some(b"some cubin".to_vec()));
        let bytes = cache.read(file).expect("it was written");
        for len in 0..bytes.len() {
            cache.write(file, &bytes[..len]);
            assert_eq!(read(cache, file), None, "of {len} bytes");
        }
        assert_eq!(fs::read_dir(folder.join("deep")).expect("a folder").count(), 1);
    }
}
