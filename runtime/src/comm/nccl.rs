//! NCCL: the communicators of a plan on one GPU, and the calls that move data between GPUs.
//!
//! Communicators are non-blocking: every call returns, and whoever waits for one looks whether another
//! rank has failed. No call notices a peer that is silent, so waiting has an end of its own.
//! [`Comms::abort`] makes stuck streams go on.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cranelift_entity::PrimaryMap;
use cudarc::driver::sys::CUstream;
use ir::DType;
use ir::ops::CollectiveKind;
use ir::placement::ReduceOp;
use ir::plan::{Buffer, Comm, Instruction, Plan, Role};
use kernels::cuda::Pointer;
use kernels::cuda::transport::{Place, Transfer};

use crate::backend::cuda::driver::{CudaStream, DeviceMemory};
use crate::backend::cuda::library::{dotted, library};
use crate::bind::BoundPlan;
use crate::comm::control::{Control, lock};
use crate::error::RunError;

type NcclComm = *mut c_void;

library! {
    /// NCCL.
    pub struct Nccl = "libnccl.so.2" of "nvidia-nccl-cu13";
    fn ncclGetVersion(version: *mut i32) -> i32;
    fn ncclGetErrorString(result: i32) -> *const c_char;
    fn ncclGetLastError(comm: NcclComm) -> *const c_char;
    fn ncclGetUniqueId(id: *mut UniqueId) -> i32;
    fn ncclCommInitRankConfig(comm: *mut NcclComm, n: i32, id: UniqueId, rank: i32, config: *mut Config) -> i32;
    fn ncclCommSplit(comm: NcclComm, color: i32, key: i32, new: *mut NcclComm, config: *mut Config) -> i32;
    fn ncclCommFinalize(comm: NcclComm) -> i32;
    fn ncclCommDestroy(comm: NcclComm) -> i32;
    fn ncclCommAbort(comm: NcclComm) -> i32;
    fn ncclCommGetAsyncError(comm: NcclComm, error: *mut i32) -> i32;
    fn ncclAllReduce(from: *const c_void, to: *mut c_void, n: usize, dtype: i32, op: i32, comm: NcclComm, stream: CUstream) -> i32;
    fn ncclAllGather(from: *const c_void, to: *mut c_void, n: usize, dtype: i32, comm: NcclComm, stream: CUstream) -> i32;
    fn ncclReduceScatter(from: *const c_void, to: *mut c_void, n: usize, dtype: i32, op: i32, comm: NcclComm, stream: CUstream) -> i32;
    fn ncclBroadcast(from: *const c_void, to: *mut c_void, n: usize, dtype: i32, root: i32, comm: NcclComm, stream: CUstream) -> i32;
    fn ncclSend(from: *const c_void, n: usize, dtype: i32, peer: i32, comm: NcclComm, stream: CUstream) -> i32;
    fn ncclRecv(to: *mut c_void, n: usize, dtype: i32, peer: i32, comm: NcclComm, stream: CUstream) -> i32;
    fn ncclGroupStart() -> i32;
    fn ncclGroupEnd() -> i32;
    fn ncclMemAlloc(address: *mut *mut c_void, bytes: usize) -> i32;
    fn ncclMemFree(address: *mut c_void) -> i32;
}

/// `ncclCommWindowRegister`, which NCCL has from 2.27 on.
type WindowRegister = unsafe extern "C" fn(
    comm: NcclComm,
    address: *mut c_void,
    bytes: usize,
    window: *mut *mut c_void,
    flags: i32,
) -> i32;

const SUCCESS: i32 = 0;
const SYSTEM_ERROR: i32 = 2;
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;

/// `ncclUint8`: what is only moved is bytes.
const BYTES: i32 = 1;

/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: i32 = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u8; 128]);

/// `2.28.9`.
pub(crate) fn version(nccl: &Nccl) -> String {
    let mut version = 0;
    // SAFETY: the version is written by the call.
    unsafe { (nccl.ncclGetVersion)(&mut version) };
    dotted(version as usize)
}

/// `ncclConfig_t` of NCCL 2.28. Older libraries read the fields that they know.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const c_char,
    split_share: i32,
    traffic_class: i32,
    comm_name: *const c_char,
    collnet_enable: i32,
    cta_policy: i32,
    shrink_share: i32,
    nvls_ctas: i32,
    n_channels_per_net_peer: i32,
    nvlink_centric_sched: i32,
}

impl Config {
    /// Non-blocking, and the user's NCCL settings for everything else; copy engines do what they can
    /// where memory is registered as windows.
    fn new(windows: bool) -> Config {
        // `NCCL_CONFIG_UNDEF_INT`.
        const UNSET: i32 = i32::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 22809,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            comm_name: ptr::null(),
            collnet_enable: UNSET,
            // `NCCL_CTA_POLICY_ZERO`.
            cta_policy: if windows { 2 } else { UNSET },
            shrink_share: UNSET,
            nvls_ctas: UNSET,
            n_channels_per_net_peer: UNSET,
            nvlink_centric_sched: UNSET,
        }
    }
}

/// How communicators are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommOptions {
    /// How long ranks may take to meet.
    pub timeout: Duration,
    /// Whether memory is registered as symmetric windows of the communicators that gather weights, so
    /// that copy engines do it and leave multiprocessors and power to the compute stream, beside which
    /// these gathers run.
    pub windows: bool,
}

impl CommOptions {
    /// Windows unless `PLANC_NCCL_WINDOWS` is 0 in the environment.
    pub fn from_env(timeout: Duration) -> CommOptions {
        let windows = std::env::var("PLANC_NCCL_WINDOWS").map_or(true, |it| it != "0");
        CommOptions { timeout, windows }
    }
}

/// How long a failure of a connection waits for its cause, which is a rank that failed.
const CAUSE_LIMIT: Duration = Duration::from_secs(5);

/// How long the last words of a communicator may take.
const FINALIZE_LIMIT: Duration = Duration::from_secs(10);

/// A communicator.
#[derive(Debug, Clone, Copy)]
struct Handle(NcclComm);

// SAFETY: NCCL's functions may be called from any thread, one at a time for each communicator, which
// `Comms::open` sees to.
unsafe impl Send for Handle {}
// SAFETY: as above; the pointer itself is never followed here.
unsafe impl Sync for Handle {}

/// The communicators of a plan, as one rank has them.
#[derive(Debug)]
pub struct Comms {
    /// `None` if no rank ever meets another.
    nccl: Option<&'static Nccl>,
    /// Those that were made, the one of all ranks first. None once they are aborted.
    open: Mutex<Vec<Handle>>,
    /// By communicator of the plan; `None` for groups of one and for those that no call uses.
    handles: PrimaryMap<Comm, Option<Handle>>,
    /// Of these, those whose memory is registered as windows.
    windowed: Vec<Handle>,
    options: CommOptions,
    control: Arc<dyn Control>,
}

impl Comms {
    /// Meets all ranks of the plan, each with its GPU current on its thread.
    pub fn new(
        plan: &Plan,
        bound: &BoundPlan,
        control: &Arc<dyn Control>,
        options: CommOptions,
    ) -> Result<Comms, RunError> {
        let used = plan.meeting_comms();
        let mut res = Comms {
            nccl: None,
            open: Mutex::new(Vec::new()),
            handles: plan.comms.values().map(|_| None).collect(),
            windowed: Vec::new(),
            options,
            control: control.clone(),
        };
        if used.is_empty() {
            return Ok(res);
        }
        let nccl = Nccl::get()?;
        res.nccl = Some(nccl);
        let world = res.meet(nccl)?;
        let mut unused = Some(world);
        for comm in used {
            let group = &bound.groups[comm];
            let is_world = (0..control.n_ranks()).eq(group.members.iter().copied());
            let windows = options.windows && gathers_weights(plan, comm);
            // A communicator takes memory, so that of all ranks serves the plan where it can.
            let handle = match unused.take_if(|_| is_world && !windows) {
                Some(world) => world,
                None => res.split(nccl, world, (group.id as i32, group.index as i32), windows)?,
            };
            res.handles[comm] = Some(handle);
            if windows {
                res.windowed.push(handle);
            }
        }
        Ok(res)
    }

    /// How many communicators there are.
    pub fn n_open(&self) -> usize {
        lock(&self.open).len()
    }

    /// Queues the calls of a collective, as one group. `address` says where pointers point.
    pub fn transfer(
        &self,
        comm: Comm,
        transfers: &[Transfer],
        address: &dyn Fn(Pointer) -> u64,
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        if transfers.is_empty() {
            return Ok(());
        }
        let (Some(nccl), Some(handle)) = (self.nccl, self.handles[comm]) else {
            return Err(RunError::bad_plan(comm.to_string(), "is of ranks that do not meet"));
        };
        let ended = {
            let open = lock(&self.open);
            if open.is_empty() {
                return Err(RunError::Stopped);
            }
            // SAFETY: groups are per thread, and this one is ended below.
            nccl.check("ncclGroupStart", unsafe { (nccl.ncclGroupStart)() }, handle)?;
            let queued =
                transfers.iter().try_for_each(|it| nccl.queue(it, address, handle, stream));
            // SAFETY: the group was started above.
            let ended = unsafe { (nccl.ncclGroupEnd)() };
            queued?;
            ended
        };
        nccl.check("ncclGroupEnd", ended, handle)?;
        self.settle(nccl, handle, "ncclGroupEnd")
    }

    /// Whether NCCL has found that something went wrong.
    pub fn poll(&self) -> Result<(), RunError> {
        let Some(nccl) = self.nccl else { return Ok(()) };
        for handle in self.handles.values().flatten() {
            match self.status(nccl, *handle)? {
                SUCCESS | IN_PROGRESS => (),
                status => return Err(self.cause(nccl, "a collective", status, *handle)),
            }
        }
        Ok(())
    }

    /// Ends all communicators, so that streams that wait for other ranks go on. From any thread; returns
    /// when no graph has calls of theirs any more.
    pub fn abort(&self) {
        let Some(nccl) = self.nccl else { return };
        let mut open = lock(&self.open);
        // Those that were split off before what they were split from.
        for handle in open.drain(..).rev() {
            // SAFETY: it is open, and nobody else gets it from now on. A failure leaves nothing to do.
            unsafe { (nccl.ncclCommAbort)(handle.0) };
        }
    }

    /// Device memory that NCCL can use best.
    pub fn allocate(&self, bytes: u64) -> Result<DeviceMemory, RunError> {
        let Some(nccl) = self.nccl else { return DeviceMemory::new(bytes) };
        let mut address = ptr::null_mut();
        // SAFETY: the address is written by the call.
        let status = unsafe { (nccl.ncclMemAlloc)(&mut address, bytes.max(256) as usize) };
        if status != SUCCESS || address.is_null() {
            // Some systems do not map memory so, and a lack of it has an error of its own there.
            return DeviceMemory::new(bytes);
        }
        let memory = DeviceMemory::adopt(address as u64, bytes, free);
        self.register(nccl, &memory)?;
        Ok(memory)
    }

    /// Registers memory as a symmetric window where wanted: all ranks, with the same size. An NCCL that
    /// does not know windows does without.
    fn register(&self, nccl: &Nccl, memory: &DeviceMemory) -> Result<(), RunError> {
        // SAFETY: this is its type in NVIDIA's header.
        let register = unsafe { nccl.file.function::<WindowRegister>(c"ncclCommWindowRegister") };
        let Ok(register) = register else { return Ok(()) };
        for &handle in &self.windowed {
            // Written when the registration is done, which may be after this returns.
            let window = Box::leak(Box::new(AtomicPtr::new(ptr::null_mut())));
            let (address, bytes) = (memory.address as *mut c_void, memory.bytes as usize);
            // SAFETY: the memory outlives the communicator, which owns the window.
            let status = unsafe { register(handle.0, address, bytes, window.as_ptr(), SYMMETRIC) };
            nccl.check("ncclCommWindowRegister", status, handle)?;
            self.settle(nccl, handle, "ncclCommWindowRegister")?;
        }
        Ok(())
    }

    /// Makes the communicator of all ranks.
    fn meet(&self, nccl: &'static Nccl) -> Result<Handle, RunError> {
        let id = match self.control.rank() {
            0 => {
                let mut id = UniqueId([0; 128]);
                // SAFETY: the id is written by the call.
                let status = unsafe { (nccl.ncclGetUniqueId)(&mut id) };
                nccl.check("ncclGetUniqueId", status, Handle(ptr::null_mut()))?;
                Some(id.0.to_vec())
            }
            _ => None,
        };
        let id = self.control.broadcast(id)?;
        let id = UniqueId(id.try_into().map_err(|_| RunError::Cuda {
            call: "ncclGetUniqueId",
            status: "rank 0 sent no id".to_string(),
        })?);
        let (n, rank) = (self.control.n_ranks() as i32, self.control.rank() as i32);
        let mut config = Config::new(false);
        let place = place();
        // SAFETY: the place is never freed; the config is copied by the call.
        let status =
            unsafe { (nccl.ncclCommInitRankConfig)(place.as_ptr(), n, id, rank, &mut config) };
        self.made(nccl, "ncclCommInitRankConfig", status, place, None)
    }

    /// Makes the communicator of a group: all ranks call it, those of one group with one color.
    fn split(
        &self,
        nccl: &'static Nccl,
        world: Handle,
        (color, key): (i32, i32),
        windows: bool,
    ) -> Result<Handle, RunError> {
        let mut config = Config::new(windows);
        let place = place();
        // SAFETY: the parent is open and has nothing under way; the rest is as in `meet`.
        let status =
            unsafe { (nccl.ncclCommSplit)(world.0, color, key, place.as_ptr(), &mut config) };
        self.made(nccl, "ncclCommSplit", status, place, Some(world))
    }

    /// Waits until a communicator is there. Its progress shows on the one it is split from.
    fn made(
        &self,
        nccl: &'static Nccl,
        call: &'static str,
        status: i32,
        place: &AtomicPtr<c_void>,
        parent: Option<Handle>,
    ) -> Result<Handle, RunError> {
        let null = Handle(ptr::null_mut());
        nccl.check(call, status, parent.unwrap_or(null))?;
        if let Some(parent) = parent {
            self.settle(nccl, parent, call)?;
        }
        let handle = Handle(place.load(Ordering::Acquire));
        if handle.0.is_null() {
            let status = "it made no communicator".to_string();
            return Err(RunError::Cuda { call, status });
        }
        lock(&self.open).push(handle);
        self.settle(nccl, handle, call)?;
        Ok(handle)
    }

    /// Waits until a communicator has taken what it was told. A failure leaves aborting to who has the
    /// graphs that hold its calls, which have to go first.
    fn settle(&self, nccl: &Nccl, handle: Handle, call: &'static str) -> Result<(), RunError> {
        let until = Instant::now() + self.options.timeout;
        loop {
            match self.status(nccl, handle)? {
                SUCCESS => return Ok(()),
                IN_PROGRESS => (),
                status => return Err(self.cause(nccl, call, status, handle)),
            }
            if self.control.fault().is_some() {
                return Err(RunError::Stopped);
            }
            if Instant::now() >= until {
                let seconds = self.options.timeout.as_secs();
                let status = format!(
                    "another rank did not come within {seconds} s; see what the others say, or give \
                     more time with --timeout"
                );
                return Err(RunError::Cuda { call, status });
            }
            sleep(Duration::from_micros(100));
        }
    }

    /// `ncclCommGetAsyncError`.
    fn status(&self, nccl: &Nccl, handle: Handle) -> Result<i32, RunError> {
        let open = lock(&self.open);
        if open.is_empty() {
            return Err(RunError::Stopped);
        }
        let mut status = SUCCESS;
        // SAFETY: it is open while the lock is held.
        let called = unsafe { (nccl.ncclCommGetAsyncError)(handle.0, &mut status) };
        nccl.check("ncclCommGetAsyncError", called, handle)?;
        Ok(status)
    }

    /// The error of a status. A connection that breaks is mostly the end of another rank, which says
    /// more if it is heard.
    fn cause(&self, nccl: &Nccl, call: &'static str, status: i32, handle: Handle) -> RunError {
        if matches!(status, REMOTE_ERROR | SYSTEM_ERROR) {
            let until = Instant::now() + CAUSE_LIMIT;
            while Instant::now() < until {
                if self.control.fault().is_some() {
                    return RunError::Stopped;
                }
                sleep(Duration::from_millis(10));
            }
        }
        nccl.error(call, status, handle)
    }

    /// Lets a communicator end what it does, for some time.
    fn finalize(&self, nccl: &Nccl, handle: Handle) -> bool {
        // SAFETY: it is open, and nothing is queued on it any more.
        let mut status = unsafe { (nccl.ncclCommFinalize)(handle.0) };
        let until = Instant::now() + FINALIZE_LIMIT;
        while status == IN_PROGRESS && Instant::now() < until && self.control.fault().is_none() {
            sleep(Duration::from_micros(100));
            // SAFETY: it is open until it is destroyed.
            unsafe { (nccl.ncclCommGetAsyncError)(handle.0, &mut status) };
        }
        status == SUCCESS
    }
}

impl Drop for Comms {
    fn drop(&mut self) {
        if self.control.fault().is_some() {
            return self.abort();
        }
        let Some(nccl) = self.nccl else { return };
        let open = std::mem::take(&mut *lock(&self.open));
        for handle in open.into_iter().rev() {
            // SAFETY: nobody uses it any more. A failure leaves nothing to do.
            unsafe {
                match self.finalize(nccl, handle) {
                    true => (nccl.ncclCommDestroy)(handle.0),
                    false => (nccl.ncclCommAbort)(handle.0),
                }
            };
        }
    }
}

/// Where a communicator will be: written by a thread of NCCL's, which may outlive a failed wait.
fn place() -> &'static AtomicPtr<c_void> {
    Box::leak(Box::new(AtomicPtr::new(ptr::null_mut())))
}

/// Frees what `ncclMemAlloc` gave.
fn free(address: u64) {
    if let Ok(nccl) = Nccl::get() {
        // SAFETY: the memory's owner calls this once, when nothing uses it any more. A failure means
        // that the context is gone.
        unsafe { (nccl.ncclMemFree)(address as *mut c_void) };
    }
}

/// Whether all that moves on a communicator is gathered from what survives a step.
fn gathers_weights(plan: &Plan, comm: Comm) -> bool {
    plan.sections.iter().flatten().all(|it| match it {
        Instruction::Collective { kind, comm: on, parts, .. } if *on == comm => {
            let kept = |it: Buffer| matches!(plan.buffers[it].role, Role::Param | Role::State);
            *kind == CollectiveKind::AllGather && parts.iter().all(|it| kept(it.src))
        }
        _ => true,
    })
}

impl Nccl {
    fn check(&self, call: &'static str, status: i32, handle: Handle) -> Result<(), RunError> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(self.error(call, status, handle)),
        }
    }

    /// `ncclGroupEnd failed: unhandled system error (socket closed)`.
    fn error(&self, call: &'static str, status: i32, handle: Handle) -> RunError {
        // SAFETY: both return text that lives as long as the library, or null.
        let (what, last) = unsafe {
            (text((self.ncclGetErrorString)(status)), text((self.ncclGetLastError)(handle.0)))
        };
        let status = if last.is_empty() { what } else { format!("{what} ({last})") };
        RunError::Cuda { call, status }
    }

    /// Queues one call of a group.
    fn queue(
        &self,
        transfer: &Transfer,
        address: &dyn Fn(Pointer) -> u64,
        Handle(comm): Handle,
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        let at = |place: Place| (address(place.0) + place.1) as *mut c_void;
        let s = stream.0;
        // SAFETY: the memory is that of the plan's buffers and of the stream's workspace, which
        // `transport::movement` stays within; communicator and stream are alive.
        let (call, status) = unsafe {
            match *transfer {
                Transfer::AllReduce { from, to, elements, dtype, op } => {
                    let (n, dtype, op) = (elements as usize, number(dtype), op_number(op));
                    let status = (self.ncclAllReduce)(at(from), at(to), n, dtype, op, comm, s);
                    ("ncclAllReduce", status)
                }
                Transfer::AllGather { from, to, bytes } => {
                    let n = bytes as usize;
                    let status = (self.ncclAllGather)(at(from), at(to), n, BYTES, comm, s);
                    ("ncclAllGather", status)
                }
                Transfer::ReduceScatter { from, to, elements, dtype, op } => {
                    let (n, dtype, op) = (elements as usize, number(dtype), op_number(op));
                    let status = (self.ncclReduceScatter)(at(from), at(to), n, dtype, op, comm, s);
                    ("ncclReduceScatter", status)
                }
                Transfer::Broadcast { place, root, bytes } => {
                    let (n, root) = (bytes as usize, root as i32);
                    let it = at(place);
                    ("ncclBroadcast", (self.ncclBroadcast)(it, it, n, BYTES, root, comm, s))
                }
                Transfer::Send { from, peer, bytes } => {
                    let (n, peer) = (bytes as usize, peer as i32);
                    ("ncclSend", (self.ncclSend)(at(from), n, BYTES, peer, comm, s))
                }
                Transfer::Receive { to, peer, bytes } => {
                    let (n, peer) = (bytes as usize, peer as i32);
                    ("ncclRecv", (self.ncclRecv)(at(to), n, BYTES, peer, comm, s))
                }
            }
        };
        self.check(call, status, Handle(comm))
    }
}

/// Text of NVIDIA's.
///
/// # Safety
/// `it` is null, or ends in NUL and lives for the call.
unsafe fn text(it: *const c_char) -> String {
    if it.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for it.
    unsafe { CStr::from_ptr(it) }.to_string_lossy().trim().to_string()
}

/// `ncclDataType_t`.
fn number(dtype: DType) -> i32 {
    match dtype {
        DType::I32 => 2,
        DType::F32 => 7,
        DType::Bf16 => 9,
        DType::E4M3 | DType::E5M2 => BYTES,
    }
}

/// `ncclRedOp_t`.
fn op_number(op: ReduceOp) -> i32 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVIDIA's header has it: an older or newer struct would be misread.
    #[test]
    fn the_config_is_laid_out_as_in_c() {
        assert_eq!((size_of::<Config>(), align_of::<Config>()), (80, 8));
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, comm_name), 48);
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}
