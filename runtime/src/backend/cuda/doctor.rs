//! What a machine has for running plans on GPUs, and what is missing: the facts of `planc doctor`.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;

use cudarc::driver::sys::{CUdevice_P2PAttribute, CUdevice_attribute};

use crate::backend::cuda::attention::graph::{self, Cudnn};
use crate::backend::cuda::driver::{self, Device, cuda};
use crate::backend::cuda::gemm::{self, CublasLt};
use crate::backend::cuda::library::library;
use crate::backend::cuda::nvrtc::Compiler;
use crate::comm::nccl::{self, Nccl};
use crate::error::RunError;

/// The version of every library that this was developed with.
pub const TESTED: &str = "CUDA 13.0: cuBLASLt 13.1, cuDNN 9.19, NCCL 2.28, NVRTC 13.0";

/// What was found.
#[derive(Debug)]
pub struct Report {
    /// The newest CUDA that the driver runs, `13.0`, and the driver's own version if NVML tells it.
    pub driver: Result<Driver, RunError>,
    /// The GPUs, in CUDA's order, or why one of them cannot be asked.
    pub gpus: Result<Vec<Gpu>, RunError>,
    /// How each pair of GPUs is linked.
    pub links: Vec<Link>,
    /// The libraries that running on GPUs needs.
    pub libraries: Vec<Library>,
}

/// The driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// `580.159.03`, if NVML tells it.
    pub version: Option<String>,
    /// `13.0`.
    pub cuda: String,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its number.
    pub ordinal: u32,
    /// `NVIDIA H200`.
    pub name: String,
    /// `(9, 0)`.
    pub capability: (i32, i32),
    /// Bytes in all, and free.
    pub memory: (u64, u64),
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Active NVLinks, if NVML tells.
    pub nvlinks: Option<u32>,
}

/// How two GPUs reach each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The two.
    pub between: (u32, u32),
    /// Whether one can read the other's memory.
    pub direct: bool,
    /// NVLinks that both have, if NVML tells; 0 is PCIe.
    pub nvlinks: Option<u32>,
}

/// A library.
#[derive(Debug)]
pub struct Library {
    /// `cuDNN`.
    pub name: &'static str,
    /// `attention`.
    pub purpose: &'static str,
    /// Where it is and its version, or why it is missing.
    pub found: Result<(PathBuf, String), RunError>,
}

impl Report {
    /// Whether plans can run on a GPU of this machine.
    pub fn is_ready(&self) -> bool {
        self.driver.is_ok()
            && self.gpus.as_ref().is_ok_and(|it| !it.is_empty())
            && self.libraries.iter().all(|it| it.found.is_ok())
    }
}

/// Looks at this machine.
pub fn report() -> Report {
    let nvml = Nvml::start();
    let driver = driver_version(nvml.as_ref());
    let gpus = match &driver {
        Ok(_) => gpus(nvml.as_ref()),
        Err(_) => Ok(Vec::new()),
    };
    let links = links(gpus.as_deref().unwrap_or_default());
    Report { driver, links, gpus, libraries: libraries() }
}

fn driver_version(nvml: Option<&Nvml>) -> Result<Driver, RunError> {
    match driver::initialize() {
        // A driver that shows no GPU to this process is one that has a version.
        Ok(()) | Err(RunError::NoDevice { .. }) => (),
        Err(error) => return Err(error),
    }
    let mut version = 0;
    cuda!(cuDriverGetVersion(&mut version))?;
    let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
    Ok(Driver { version: nvml.and_then(Nvml::driver_version), cuda })
}

fn gpus(nvml: Option<&Nvml>) -> Result<Vec<Gpu>, RunError> {
    (0..driver::n_devices()?)
        .map(|ordinal| {
            let device = Device::open(ordinal)?;
            let (free, total) = device.memory()?;
            let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            Ok(Gpu {
                ordinal,
                name: device.name()?,
                capability: device.capability()?,
                memory: (total, free),
                multiprocessors: device.attribute(count)?,
                nvlinks: nvml.and_then(|it| it.nvlinks(ordinal)),
            })
        })
        .collect()
}

fn links(gpus: &[Gpu]) -> Vec<Link> {
    let mut res = Vec::new();
    for (i, a) in gpus.iter().enumerate() {
        for b in &gpus[i + 1..] {
            let mut direct = 0;
            let access = CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
            let (from, to) = (a.ordinal as i32, b.ordinal as i32);
            // A failure means that the driver knows no way between the two.
            let known = cuda!(cuDeviceGetP2PAttribute(&mut direct, access, from, to)).is_ok();
            res.push(Link {
                between: (a.ordinal, b.ordinal),
                direct: known && direct != 0,
                nvlinks: a.nvlinks.zip(b.nvlinks).map(|it| it.0.min(it.1)),
            });
        }
    }
    res
}

/// What each library's own part of the backend finds.
fn libraries() -> Vec<Library> {
    let nvrtc = Compiler::get().map(|it| {
        let (major, minor) = it.version;
        (it.path().to_path_buf(), format!("{major}.{minor}"))
    });
    let cublas = CublasLt::get().map(|it| (it.file.path.clone(), gemm::version(it)));
    let cudnn = Cudnn::get().map(|it| (it.file.path.clone(), graph::version(it)));
    let nccl = Nccl::get().map(|it| (it.file.path.clone(), nccl::version(it)));
    vec![
        Library { name: "NVRTC", purpose: "compiles our kernels", found: nvrtc },
        Library { name: "cuBLASLt", purpose: "matrix products", found: cublas },
        Library { name: "cuDNN", purpose: "attention", found: cudnn },
        Library { name: "NCCL", purpose: "collectives", found: nccl },
    ]
}

library! {
    /// NVIDIA's management library, which comes with the driver.
    pub struct Functions = "libnvidia-ml.so.1" of "nvidia-ml-py";
    fn nvmlInit_v2() -> i32;
    fn nvmlSystemGetDriverVersion(text: *mut c_char, length: u32) -> i32;
    fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, device: *mut *mut c_void) -> i32;
    fn nvmlDeviceGetNvLinkState(device: *mut c_void, link: u32, active: *mut u32) -> i32;
}

/// NVML, where it is there. Nothing depends on it but what a report says.
struct Nvml(&'static Functions);

/// More NVLinks than any GPU has.
const NVLINKS_MAX: u32 = 32;

impl Nvml {
    fn start() -> Option<Nvml> {
        let functions = Functions::get().ok()?;
        // SAFETY: it may be called any number of times.
        (unsafe { (functions.nvmlInit_v2)() } == 0).then_some(Nvml(functions))
    }

    fn driver_version(&self) -> Option<String> {
        let mut text = [0u8; 96];
        let (at, length) = (text.as_mut_ptr().cast(), text.len() as u32);
        // SAFETY: it writes at most `length` bytes, a terminated string.
        let status = unsafe { (self.0.nvmlSystemGetDriverVersion)(at, length) };
        let text = CStr::from_bytes_until_nul(&text).ok()?;
        (status == 0).then(|| text.to_string_lossy().into_owned())
    }

    fn nvlinks(&self, ordinal: u32) -> Option<u32> {
        let mut bus = [0u8; 32];
        let (at, length) = (bus.as_mut_ptr().cast::<c_char>(), bus.len() as i32);
        cuda!(cuDeviceGetPCIBusId(at, length, ordinal as i32)).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: `bus` is a terminated string that CUDA wrote; the handle is written by the call.
        let status =
            unsafe { (self.0.nvmlDeviceGetHandleByPciBusId_v2)(bus.as_ptr().cast(), &mut device) };
        if status != 0 {
            return None;
        }
        let active = |link: u32| {
            let mut active = 0;
            // SAFETY: the handle is valid; a link that the GPU does not have is an error code.
            let status = unsafe { (self.0.nvmlDeviceGetNvLinkState)(device, link, &mut active) };
            status == 0 && active == 1
        };
        Some((0..NVLINKS_MAX).filter(|&it| active(it)).count() as u32)
    }
}
