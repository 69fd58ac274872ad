//! The CUDA driver: devices, memory, streams, events, each checked and freed.
//!
//! Streams do not wait for the default stream, so what runs there (`memset`, copies between devices)
//! is waited for at once.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{self as cu, CUdevice, CUdevice_attribute, CUevent, CUresult, CUstream};

use crate::error::RunError;

/// Calls a function of libcuda; anything but success is an error that names it.
macro_rules! cuda {
    ($f:ident($($a:expr),* $(,)?)) => {
        // SAFETY: arguments are live for the call, and handles are those that the driver gave out.
        $crate::backend::cuda::driver::check(stringify!($f), unsafe { cudarc::driver::sys::$f($($a),*) })
    };
}
pub(crate) use cuda;

/// Turns a status into an error that names the call.
pub(crate) fn check(call: &'static str, status: CUresult) -> Result<(), RunError> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(RunError::Cuda { call, status: format!("{other:?}") }),
    }
}

/// Initializes the driver. Fails where there is none, or where it shows no GPU to this process.
pub fn initialize() -> Result<(), RunError> {
    // SAFETY: it only tries to open libcuda.
    if !unsafe { cu::is_culib_present() } {
        return Err(RunError::NoDriver);
    }
    // SAFETY: it has no preconditions.
    match unsafe { cu::cuInit(0) } {
        CUresult::CUDA_ERROR_NO_DEVICE => Err(RunError::NoDevice { ordinal: 0, devices: 0 }),
        status => check("cuInit", status),
    }
}

/// How many GPUs there are.
pub fn n_devices() -> Result<u32, RunError> {
    initialize()?;
    let mut n = 0;
    cuda!(cuDeviceGetCount(&mut n))?;
    Ok(n as u32)
}

/// A GPU, whose primary context is current on the thread that opened it. NCCL, cuBLASLt and cuDNN use
/// that context.
#[derive(Debug, Clone, Copy)]
pub struct Device {
    /// Its number.
    pub ordinal: u32,
    handle: CUdevice,
}

impl Device {
    /// Opens a GPU for this thread. The context lives as long as the process.
    pub fn open(ordinal: u32) -> Result<Device, RunError> {
        let n = n_devices()?;
        if ordinal >= n {
            return Err(RunError::NoDevice { ordinal, devices: n });
        }
        let (mut handle, mut context) = (0, ptr::null_mut());
        cuda!(cuDeviceGet(&mut handle, ordinal as i32))?;
        cuda!(cuDevicePrimaryCtxRetain(&mut context, handle))?;
        cuda!(cuCtxSetCurrent(context))?;
        Ok(Device { ordinal, handle })
    }

    /// A property.
    pub fn attribute(self, attribute: CUdevice_attribute) -> Result<i32, RunError> {
        let mut value = 0;
        cuda!(cuDeviceGetAttribute(&mut value, attribute, self.handle))?;
        Ok(value)
    }

    /// `NVIDIA H200`.
    pub fn name(self) -> Result<String, RunError> {
        let mut bytes = [0u8; 256];
        cuda!(cuDeviceGetName(bytes.as_mut_ptr().cast(), bytes.len() as i32, self.handle))?;
        let text = bytes.split(|&it| it == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// `(major, minor)`: `(9, 0)` for Hopper.
    pub fn capability(self) -> Result<(i32, i32), RunError> {
        use CUdevice_attribute::*;
        Ok((
            self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }

    /// What NVRTC calls its architecture: `sm_90a`. Features of one generation (`a`) exist from Hopper
    /// on.
    pub fn arch(self) -> Result<String, RunError> {
        let (major, minor) = self.capability()?;
        Ok(format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }))
    }

    /// Free and total bytes of the current device.
    pub fn memory(self) -> Result<(u64, u64), RunError> {
        let (mut free, mut total) = (0, 0);
        cuda!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything on it.
    pub fn synchronize(self) -> Result<(), RunError> {
        cuda!(cuCtxSynchronize())
    }
}

/// A queue of work. Not tied to the default stream.
#[derive(Debug)]
pub struct CudaStream(pub(crate) CUstream);

// SAFETY: a stream may be used from any thread that has its context.
unsafe impl Send for CudaStream {}

impl CudaStream {
    /// A new one.
    pub fn new() -> Result<CudaStream, RunError> {
        let mut stream = ptr::null_mut();
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        cuda!(cuStreamCreate(&mut stream, flags))?;
        Ok(CudaStream(stream))
    }

    /// One whose work goes first where both could run.
    pub fn urgent() -> Result<CudaStream, RunError> {
        let (mut least, mut greatest, mut stream) = (0, 0, ptr::null_mut());
        cuda!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        cuda!(cuStreamCreateWithPriority(&mut stream, flags, greatest))?;
        Ok(CudaStream(stream))
    }

    /// Waits for its work.
    pub fn synchronize(&self) -> Result<(), RunError> {
        cuda!(cuStreamSynchronize(self.0))
    }

    /// Whether its work is done.
    pub fn is_done(&self) -> Result<bool, RunError> {
        // SAFETY: the stream is alive.
        match unsafe { cu::cuStreamQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuStreamQuery", status).map(|()| true),
        }
    }

    /// Whether it has work. A stream with a fault has none that will go on.
    pub fn is_at_work(&self) -> bool {
        matches!(self.is_done(), Ok(false))
    }

    /// Holds it until `event`.
    pub fn wait(&self, event: &CudaEvent) -> Result<(), RunError> {
        cuda!(cuStreamWaitEvent(self.0, event.0, 0))
    }

    /// Queues a copy within the device; none of no bytes, or onto itself.
    pub fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<(), RunError> {
        if bytes == 0 || from == to {
            return Ok(());
        }
        cuda!(cuMemcpyDtoDAsync_v2(to, from, bytes as usize, self.0))
    }

    /// Queues setting bytes.
    pub fn fill(&self, to: u64, value: u8, bytes: u64) -> Result<(), RunError> {
        if bytes == 0 {
            return Ok(());
        }
        cuda!(cuMemsetD8Async(to, value, bytes as usize, self.0))
    }

    /// Queues writing a word, which the host may see as soon as the stream is there.
    pub fn write_word(&self, to: u64, value: u32) -> Result<(), RunError> {
        let flags = cu::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        cuda!(cuStreamWriteValue32_v2(self.0, to, value, flags))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more. A failure means that the context is gone.
        unsafe { cu::cuStreamDestroy_v2(self.0) };
    }
}

/// A point on a stream.
#[derive(Debug)]
pub struct CudaEvent(pub(crate) CUevent);

// SAFETY: an event may be used from any thread that has its context.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    /// For order only.
    pub fn new() -> Result<CudaEvent, RunError> {
        CudaEvent::with(cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// With a time.
    pub fn timed() -> Result<CudaEvent, RunError> {
        CudaEvent::with(0)
    }

    fn with(flags: u32) -> Result<CudaEvent, RunError> {
        let mut event = ptr::null_mut();
        cuda!(cuEventCreate(&mut event, flags))?;
        Ok(CudaEvent(event))
    }

    /// Marks what `stream` has been given so far.
    pub fn record(&self, stream: &CudaStream) -> Result<(), RunError> {
        cuda!(cuEventRecord(self.0, stream.0))
    }

    /// Whether it has been reached.
    pub fn is_done(&self) -> Result<bool, RunError> {
        // SAFETY: the event is alive.
        match unsafe { cu::cuEventQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until it is reached.
    pub fn synchronize(&self) -> Result<(), RunError> {
        cuda!(cuEventSynchronize(self.0))
    }

    /// Milliseconds from this event to a later one; both timed and reached.
    pub fn milliseconds_to(&self, later: &CudaEvent) -> Result<f32, RunError> {
        let mut ms = 0.0;
        cuda!(cuEventElapsedTime_v2(&mut ms, self.0, later.0))?;
        Ok(ms)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more. A failure means that the context is gone.
        unsafe { cu::cuEventDestroy_v2(self.0) };
    }
}

/// Device memory.
#[derive(Debug)]
pub struct DeviceMemory {
    /// Its address, a multiple of 256.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    free: fn(u64),
}

impl DeviceMemory {
    /// `bytes` of any content.
    pub fn new(bytes: u64) -> Result<DeviceMemory, RunError> {
        let mut address = 0;
        // SAFETY: the address is written by the call.
        match unsafe { cu::cuMemAlloc_v2(&mut address, bytes.max(256) as usize) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(RunError::OutOfDeviceMemory { needed: bytes })
            }
            status => {
                check("cuMemAlloc", status).map(|()| DeviceMemory::adopt(address, bytes, free))
            }
        }
    }

    /// Takes over memory that another library allocated, with what frees it.
    pub fn adopt(address: u64, bytes: u64, free: fn(u64)) -> DeviceMemory {
        DeviceMemory { address, bytes, free }
    }

    /// Sets all bytes, and waits.
    pub fn fill(&self, value: u8) -> Result<(), RunError> {
        self.fill_part(0, self.bytes, value)
    }

    /// Sets `bytes` bytes from `offset` on, and waits.
    pub fn fill_part(&self, offset: u64, bytes: u64, value: u8) -> Result<(), RunError> {
        assert!(offset + bytes <= self.bytes, "bytes within the allocation");
        if bytes > 0 {
            cuda!(cuMemsetD8_v2(self.address + offset, value, bytes as usize))?;
        }
        cuda!(cuCtxSynchronize())
    }

    /// Copies from the host to byte `offset`, and waits.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), RunError> {
        assert!(offset + bytes.len() as u64 <= self.bytes, "a write within the allocation");
        if bytes.is_empty() {
            return Ok(());
        }
        cuda!(cuMemcpyHtoD_v2(self.address + offset, bytes.as_ptr().cast::<c_void>(), bytes.len()))
    }

    /// Copies from byte `offset` to the host, and waits.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), RunError> {
        assert!(offset + bytes.len() as u64 <= self.bytes, "a read within the allocation");
        if bytes.is_empty() {
            return Ok(());
        }
        cuda!(cuMemcpyDtoH_v2(
            bytes.as_mut_ptr().cast::<c_void>(),
            self.address + offset,
            bytes.len()
        ))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        (self.free)(self.address);
    }
}

/// Frees what `cuMemAlloc` gave.
fn free(address: u64) {
    // SAFETY: the memory's owner calls this once, when nothing uses it any more. A failure means that
    // the context is gone.
    unsafe { cu::cuMemFree_v2(address) };
}

/// Memory of the host that the device reads and writes without a detour, zeroed.
#[derive(Debug)]
pub struct HostMemory {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is plain memory, owned by this value.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// `bytes` zeros.
    pub fn new(bytes: usize) -> Result<HostMemory, RunError> {
        let mut start = ptr::null_mut();
        let bytes = bytes.max(1);
        cuda!(cuMemHostAlloc(&mut start, bytes, 0))?;
        let start = start.cast::<u8>();
        // SAFETY: the call above made `bytes` bytes there.
        unsafe { start.write_bytes(0, bytes) };
        Ok(HostMemory { start, bytes })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its content. No copy to it may be in flight.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: these bytes are ours and initialized; the caller has waited for the device.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its content. No copy from or to it may be in flight.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has a reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Word `index`, which the device may be writing.
    pub fn word(&self, index: usize) -> u32 {
        assert!((index + 1) * 4 <= self.bytes, "a word within the allocation");
        // SAFETY: it is within the allocation and aligned, and a volatile read sees either value.
        unsafe { self.start.cast::<u32>().add(index).read_volatile() }
    }

    /// Sets word `index`, which the device is not writing.
    pub fn set_word(&mut self, index: usize, value: u32) {
        assert!((index + 1) * 4 <= self.bytes, "a word within the allocation");
        // SAFETY: it is within the allocation and aligned.
        unsafe { self.start.cast::<u32>().add(index).write_volatile(value) };
    }

    /// Its address for the device.
    pub fn device_address(&self) -> Result<u64, RunError> {
        let mut address = 0;
        cuda!(cuMemHostGetDevicePointer_v2(&mut address, self.start.cast(), 0))?;
        Ok(address)
    }

    /// Queues a copy of its first bytes to the device.
    pub fn upload(&self, to: u64, bytes: usize, stream: &CudaStream) -> Result<(), RunError> {
        assert!(bytes <= self.bytes, "a copy within the allocation");
        cuda!(cuMemcpyHtoDAsync_v2(to, self.start.cast(), bytes, stream.0))
    }

    /// Queues a copy from the device to its first bytes.
    pub fn download(
        &mut self,
        from: u64,
        bytes: usize,
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        assert!(bytes <= self.bytes, "a copy within the allocation");
        cuda!(cuMemcpyDtoHAsync_v2(self.start.cast(), from, bytes, stream.0))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more. A failure means that the context is gone.
        unsafe { cu::cuMemFreeHost(self.start.cast()) };
    }
}

/// Ends the process at once, without the handlers of libraries, which would wait for a device that is
/// stuck.
pub fn leave(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: i32) -> !;
    }
    // SAFETY: it takes any number and does not return.
    unsafe { _exit(code) }
}
