//! NVRTC: our kernels' sources become cubins for one architecture. Needs no GPU.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use kernels::cuda::Function;

use crate::backend::cuda::library::{Opened, library};
use crate::error::RunError;

library! {
    /// NVIDIA's run-time compiler.
    pub struct Nvrtc = "libnvrtc.so.13" of "nvidia-cuda-nvrtc";
    fn nvrtcVersion(major: *mut i32, minor: *mut i32) -> nvrtcResult;
    fn nvrtcCreateProgram(
        program: *mut nvrtcProgram,
        source: *const c_char,
        name: *const c_char,
        n_headers: i32,
        headers: *const *const c_char,
        header_names: *const *const c_char,
    ) -> nvrtcResult;
    fn nvrtcCompileProgram(
        program: nvrtcProgram,
        n_options: i32,
        options: *const *const c_char,
    ) -> nvrtcResult;
    fn nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    fn nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char) -> nvrtcResult;
    fn nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    fn nvrtcGetCUBIN(program: nvrtcProgram, cubin: *mut c_char) -> nvrtcResult;
    fn nvrtcDestroyProgram(program: *mut nvrtcProgram) -> nvrtcResult;
}

/// NVRTC with the library of built-ins that belongs to it.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: &'static Nvrtc,
    /// NVRTC opens them by name when it first compiles; these are the ones it then finds.
    _builtins: Vec<Opened>,
    /// `(13, 0)`.
    pub version: (i32, i32),
}

/// What is compiled, and how.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Which function of it is wanted, and the macros.
    pub function: &'a Function,
    /// The text.
    pub text: &'a str,
    /// What it may include: names and texts.
    pub headers: &'a [(&'a str, &'a str)],
    /// `sm_90a`.
    pub arch: &'a str,
}

impl Compiler {
    /// The compiler, opened once for the whole process.
    pub fn get() -> Result<&'static Compiler, RunError> {
        static OPENED: OnceLock<Result<Compiler, RunError>> = OnceLock::new();
        OPENED.get_or_init(Compiler::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Compiler, RunError> {
        let nvrtc = Nvrtc::get()?;
        let builtins = nvrtc.file.neighbours("libnvrtc-builtins.so.13.");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two integers.
        check("nvrtcVersion", unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) })?;
        Ok(Compiler { nvrtc, _builtins: builtins, version: (major, minor) })
    }

    /// Where it was found.
    pub fn path(&self) -> &std::path::Path {
        &self.nvrtc.file.path
    }

    /// A cubin. Threads may compile at the same time.
    pub fn compile(&self, source: &Source<'_>) -> Result<Vec<u8>, RunError> {
        let mut program = Program { nvrtc: self.nvrtc, handle: ptr::null_mut() };
        let text = c_string(source.text);
        let name = c_string(source.function.source);
        let headers: Vec<CString> = source.headers.iter().map(|it| c_string(it.1)).collect();
        let names: Vec<CString> = source.headers.iter().map(|it| c_string(it.0)).collect();
        let (headers, names) = (pointers(&headers), pointers(&names));
        // SAFETY: the strings end in NUL and live for the call, the lists are as long as it says.
        check("nvrtcCreateProgram", unsafe {
            (self.nvrtc.nvrtcCreateProgram)(
                &mut program.handle,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                headers.as_ptr(),
                names.as_ptr(),
            )
        })?;
        let options = options(source);
        let options = pointers(&options);
        // SAFETY: as above; the program was just created.
        let status = unsafe {
            (self.nvrtc.nvrtcCompileProgram)(program.handle, options.len() as i32, options.as_ptr())
        };
        match status {
            nvrtcResult::NVRTC_SUCCESS => program.cubin(),
            other => Err(RunError::Compile {
                function: describe(source.function),
                arch: source.arch.to_string(),
                log: format!("{other:?}\n{}", program.log()?),
            }),
        }
    }
}

/// What `source` is compiled with; without the headers' paths, since they are given as text.
fn options(source: &Source<'_>) -> Vec<CString> {
    let mut res = vec![format!("--gpu-architecture={}", source.arch), "-default-device".into()];
    res.extend(source.function.defines.iter().map(|it| format!("-D{it}")));
    res.iter().map(|it| c_string(it)).collect()
}

/// `` norm.cu: rms_norm (D=4096, T=bf16) ``.
pub fn describe(function: &Function) -> String {
    let Function { source, entry, defines } = function;
    format!("{source}: {entry} ({})", defines.join(", "))
}

/// Sources and macros are ours and have no NUL.
fn c_string(text: &str) -> CString {
    CString::new(text).expect("a text without NUL")
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|it| it.as_ptr()).collect()
}

fn check(call: &'static str, status: nvrtcResult) -> Result<(), RunError> {
    match status {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(RunError::Cuda { call, status: format!("{other:?}") }),
    }
}

struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: nvrtcProgram,
}

impl Program<'_> {
    fn log(&self) -> Result<String, RunError> {
        let mut bytes = 0;
        // SAFETY: the program was created, and the buffer is as large as the first call says.
        check("nvrtcGetProgramLogSize", unsafe {
            (self.nvrtc.nvrtcGetProgramLogSize)(self.handle, &mut bytes)
        })?;
        let mut log = vec![0u8; bytes];
        // SAFETY: as above.
        check("nvrtcGetProgramLog", unsafe {
            (self.nvrtc.nvrtcGetProgramLog)(self.handle, log.as_mut_ptr().cast())
        })?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_string())
    }

    fn cubin(&self) -> Result<Vec<u8>, RunError> {
        let mut bytes = 0;
        // SAFETY: the program was compiled, and the buffer is as large as the first call says.
        check("nvrtcGetCUBINSize", unsafe {
            (self.nvrtc.nvrtcGetCUBINSize)(self.handle, &mut bytes)
        })?;
        let mut cubin = vec![0u8; bytes];
        // SAFETY: as above.
        check("nvrtcGetCUBIN", unsafe {
            (self.nvrtc.nvrtcGetCUBIN)(self.handle, cubin.as_mut_ptr().cast())
        })?;
        Ok(cubin)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: it was created, and is not used any more.
            unsafe { (self.nvrtc.nvrtcDestroyProgram)(&mut self.handle) };
        }
    }
}
