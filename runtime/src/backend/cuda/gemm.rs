//! Matrix products by cuBLASLt.
//!
//! cuBLASLt is column-major, and a row-major matrix is a column-major one transposed. So
//! `out[m, n] = a b` is asked for as `out^T = b^T a^T`: its A is our `b`, its B our `a`, its rows our
//! columns.
//!
//! ```text
//! ours             in memory, column-major      operation
//! b [k, n]         n x k, leading dimension n   none
//! b^T [n, k]       k x n, leading dimension k   transpose
//! out, c [m, n]    n x m, leading dimension n
//! scales           A's are those of our `b`, B's those of our `a`
//! bias [n]         one value a row: cuBLASLt's own bias
//! gelu [m, n]      n x m, leading dimension n: cuBLASLt's auxiliary output
//! ```

mod tune;

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtContext, cublasLtEpilogue_t, cublasLtHandle_t,
    cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulDescOpaque_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulMatrixScale_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as PrefAttribute,
    cublasLtMatmulPreferenceOpaque_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutOpaque_t,
    cublasLtReductionScheme_t, cublasStatus_t, cudaDataType, cudaStream_t,
};
use ir::DType;
use kernels::cuda::{GEMM_WORKSPACE, GemmCall, Matrix, Pointer, ScaleOf};

use crate::backend::cuda::driver::{CudaStream, Device};
use crate::backend::cuda::handles::PerDevice;
use crate::backend::cuda::library::{dotted, library};
use crate::error::RunError;

pub use tune::tune;

library! {
    /// cuBLASLt.
    pub struct CublasLt = "libcublasLt.so.13" of "nvidia-cublas";
    fn cublasLtGetVersion() -> usize;
    fn cublasLtCreate(handle: *mut cublasLtHandle_t) -> cublasStatus_t;
    fn cublasLtDestroy(handle: cublasLtHandle_t) -> cublasStatus_t;
    fn cublasLtMatmulDescCreate(desc: *mut cublasLtMatmulDesc_t, compute: cublasComputeType_t, scale: cudaDataType) -> cublasStatus_t;
    fn cublasLtMatmulDescSetAttribute(desc: cublasLtMatmulDesc_t, attribute: DescAttribute, value: *const c_void, bytes: usize) -> cublasStatus_t;
    fn cublasLtMatmulDescDestroy(desc: cublasLtMatmulDesc_t) -> cublasStatus_t;
    fn cublasLtMatrixLayoutCreate(layout: *mut cublasLtMatrixLayout_t, dtype: cudaDataType, rows: u64, cols: u64, ld: i64) -> cublasStatus_t;
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t) -> cublasStatus_t;
    fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t) -> cublasStatus_t;
    fn cublasLtMatmulPreferenceSetAttribute(preference: cublasLtMatmulPreference_t, attribute: PrefAttribute, value: *const c_void, bytes: usize) -> cublasStatus_t;
    fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t) -> cublasStatus_t;
    fn cublasLtMatmulAlgoGetHeuristic(handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t, b: cublasLtMatrixLayout_t, c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t, preference: cublasLtMatmulPreference_t, wanted: i32, results: *mut cublasLtMatmulHeuristicResult_t, returned: *mut i32) -> cublasStatus_t;
    fn cublasLtMatmulAlgoCheck(handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t, b: cublasLtMatrixLayout_t, c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t, algorithm: *const cublasLtMatmulAlgo_t, result: *mut cublasLtMatmulHeuristicResult_t) -> cublasStatus_t;
    fn cublasLtMatmul(handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, alpha: *const c_void, a: *const c_void, a_layout: cublasLtMatrixLayout_t, b: *const c_void, b_layout: cublasLtMatrixLayout_t, beta: *const c_void, c: *const c_void, c_layout: cublasLtMatrixLayout_t, d: *mut c_void, d_layout: cublasLtMatrixLayout_t, algorithm: *const cublasLtMatmulAlgo_t, workspace: *mut c_void, workspace_bytes: usize, stream: cudaStream_t) -> cublasStatus_t;
}

/// Calls a function of cuBLASLt; anything but success is an error that names it.
macro_rules! lt {
    ($lt:expr, $f:ident($($a:expr),* $(,)?)) => {
        // SAFETY: arguments are live for the call, and handles are those that cuBLASLt gave out.
        check(stringify!($f), unsafe { ($lt.$f)($($a),*) })
    };
}

fn check(call: &'static str, status: cublasStatus_t) -> Result<(), RunError> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(RunError::Cuda { call, status: format!("{other:?}") }),
    }
}

/// `13.1.0`.
pub(super) fn version(lt: &CublasLt) -> String {
    // SAFETY: it only returns a number.
    dotted(unsafe { (lt.cublasLtGetVersion)() })
}

/// Addresses of the operands are multiples of this; leading dimensions may be anything.
const ALIGNMENT: u32 = 256;

/// Bytes of an algorithm.
pub(super) const ALGORITHM: usize = size_of::<cublasLtMatmulAlgo_t>();

/// Everything about a [`GemmCall`] but addresses: what decides about its algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Problem {
    m: usize,
    n: usize,
    k: usize,
    /// Element type, and whether it is stored transposed.
    a: (DType, bool),
    b: (DType, bool),
    /// What has scales of their own in codes, and whether their sums are fast.
    scales: Option<([ScaleOf; 2], bool)>,
    out: DType,
    accumulate: bool,
    bias: bool,
    gelu: bool,
}

impl Problem {
    fn of(call: &GemmCall) -> Problem {
        let stored = |it: &Matrix| (it.dtype, it.transposed);
        Problem {
            m: call.m,
            n: call.n,
            k: call.k,
            a: stored(&call.a),
            b: stored(&call.b),
            scales: call.scales.map(|it| ([it.a.of, it.b.of], it.fast)),
            out: call.out_dtype,
            accumulate: call.c.is_some(),
            bias: call.bias.is_some(),
            gelu: call.gelu.is_some(),
        }
    }

    /// Whether cuBLASLt multiplies such types.
    fn check_types(&self) -> Result<(), RunError> {
        use DType::{Bf16, E4M3, E5M2, F32};
        match (self.a.0, self.b.0, self.out, self.scales.is_some()) {
            (Bf16, Bf16, Bf16 | F32, false) | (F32, F32, F32, false) => Ok(()),
            (E4M3, E4M3 | E5M2, Bf16 | F32, true) | (E5M2, E4M3, Bf16 | F32, true) => Ok(()),
            _ => Err(self.refused(
                "cuBLASLt multiplies bf16 by bf16, f32 by f32 into f32, or e4m3 by e4m3 or e5m2",
            )),
        }
    }

    fn refused(&self, why: &str) -> RunError {
        RunError::NoKernel { op: format!("matmul {self}"), why: why.to_string() }
    }
}

/// `bf16[8192, 4096] bf16[6144, 4096]^T -> f32 + c + bias, gelu`: operands as stored. Of codes it says how
/// they are scaled: `e4m3[8192, 4096] e4m3[6144, 4096]^T, scales tensor x tensor, fast -> bf16`.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operand =
            |(dtype, transposed): (DType, bool), rows: usize, cols: usize| match transposed {
                false => format!("{}[{rows}, {cols}]", dtype.name()),
                true => format!("{}[{cols}, {rows}]^T", dtype.name()),
            };
        let (a, b) = (operand(self.a, self.m, self.k), operand(self.b, self.k, self.n));
        write!(f, "{a} {b}")?;
        if let Some(([a, b], fast)) = self.scales {
            write!(f, ", scales {} x {}", scale_name(a), scale_name(b))?;
            f.write_str(if fast { ", fast" } else { "" })?;
        }
        write!(f, " -> {}", self.out.name())?;
        f.write_str(if self.accumulate { " + c" } else { "" })?;
        f.write_str(if self.bias { " + bias" } else { "" })?;
        f.write_str(if self.gelu { ", gelu" } else { "" })
    }
}

fn scale_name(of: ScaleOf) -> &'static str {
    match of {
        ScaleOf::Tensor => "tensor",
        ScaleOf::Row => "row",
        ScaleOf::Block => "block",
    }
}

fn scale_mode(of: ScaleOf) -> cublasLtMatmulMatrixScale_t {
    match of {
        ScaleOf::Tensor => cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        ScaleOf::Row => cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        ScaleOf::Block => cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
    }
}

fn cuda_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F32 => cudaDataType::CUDA_R_32F,
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
        DType::I32 => cudaDataType::CUDA_R_32I,
        DType::E4M3 => cudaDataType::CUDA_R_8F_E4M3,
        DType::E5M2 => cudaDataType::CUDA_R_8F_E5M2,
    }
}

/// Something that cuBLASLt made, freed with it.
#[derive(Debug)]
struct Owned<T> {
    raw: *mut T,
    free: unsafe extern "C" fn(*mut T) -> cublasStatus_t,
}

// SAFETY: it is memory of the host that belongs to no thread.
unsafe impl<T> Send for Owned<T> {}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: `raw` is what `free` belongs to, and nothing uses it any more.
        unsafe { (self.free)(self.raw) };
    }
}

/// The library's state on one device.
#[derive(Debug)]
struct Handle(Owned<cublasLtContext>);

// SAFETY: cuBLASLt may be called from several threads with one handle.
unsafe impl Sync for Handle {}

impl Handle {
    fn of(device: Device) -> Result<Arc<Handle>, RunError> {
        static HANDLES: PerDevice<Handle> = PerDevice::new();
        HANDLES.get(device, || {
            let lt = CublasLt::get()?;
            let mut raw = ptr::null_mut();
            lt!(lt, cublasLtCreate(&mut raw))?;
            Ok(Handle(Owned { raw, free: lt.cublasLtDestroy }))
        })
    }
}

/// An algorithm that cuBLASLt accepts for a problem.
#[derive(Debug, Clone, Copy)]
struct Algorithm {
    algorithm: cublasLtMatmulAlgo_t,
    /// Bytes.
    workspace: usize,
}

impl Algorithm {
    fn bytes(&self) -> Vec<u8> {
        self.algorithm.data.iter().flat_map(|it| it.to_le_bytes()).collect()
    }
}

/// A problem as cuBLASLt sees it.
#[derive(Debug)]
struct Descriptors {
    lt: &'static CublasLt,
    handle: Arc<Handle>,
    problem: Problem,
    operation: Owned<cublasLtMatmulDescOpaque_t>,
    /// cuBLASLt's A: our `b`.
    a: Owned<cublasLtMatrixLayoutOpaque_t>,
    /// cuBLASLt's B: our `a`.
    b: Owned<cublasLtMatrixLayoutOpaque_t>,
    /// The result and what is added to it.
    out: Owned<cublasLtMatrixLayoutOpaque_t>,
}

impl Descriptors {
    fn new(device: Device, problem: Problem) -> Result<Descriptors, RunError> {
        problem.check_types()?;
        let lt = CublasLt::get()?;
        let handle = Handle::of(device)?;
        let Problem { m, n, k, a, b, out, .. } = problem;
        let (first, second) = (layout(lt, b, k, n)?, layout(lt, a, m, k)?);
        let out = layout(lt, (out, false), m, n)?;
        let operation = operation(lt)?;
        let res = Descriptors { lt, handle, problem, operation, a: first, b: second, out };
        res.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &transpose(b.1))?;
        res.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &transpose(a.1))?;
        res.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue(&problem))?;
        if let Some(([of_a, of_b], fast)) = problem.scales {
            res.set(DescAttribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(fast))?;
            res.set(DescAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &scale_mode(of_b))?;
            res.set(DescAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &scale_mode(of_a))?;
            res.set_scales([u64::from(ALIGNMENT); 2])?;
        }
        // The heuristic looks at the alignment of addresses, which are known only when it runs.
        if problem.bias {
            res.set_bias(u64::from(ALIGNMENT))?;
        }
        if problem.gelu {
            // Its element type is the result's, as long as no other is set.
            res.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(n as i64))?;
            res.set_gelu(u64::from(ALIGNMENT))?;
        }
        Ok(res)
    }

    fn set<T>(&self, attribute: DescAttribute, value: &T) -> Result<(), RunError> {
        let value = ptr::from_ref(value).cast();
        lt!(
            self.lt,
            cublasLtMatmulDescSetAttribute(self.operation.raw, attribute, value, size_of::<T>())
        )
    }

    /// Scales of our `a` and `b`.
    fn set_scales(&self, [a, b]: [u64; 2]) -> Result<(), RunError> {
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b)?;
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a)
    }

    fn set_bias(&self, address: u64) -> Result<(), RunError> {
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address)
    }

    fn set_gelu(&self, address: u64) -> Result<(), RunError> {
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &address)
    }

    /// What the heuristic proposes, at most `n`, its best guess first; not empty.
    fn candidates(&self, n: usize) -> Result<Vec<Algorithm>, RunError> {
        let preference = preference(self.lt, &self.problem)?;
        // SAFETY: plain data, for which zeros are valid: `state` is then success.
        let nothing: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let (mut results, mut returned) = (vec![nothing; n], 0);
        let asked = lt!(
            self.lt,
            cublasLtMatmulAlgoGetHeuristic(
                self.handle.0.raw,
                self.operation.raw,
                self.a.raw,
                self.b.raw,
                self.out.raw,
                self.out.raw,
                preference.raw,
                n as i32,
                results.as_mut_ptr(),
                &mut returned,
            )
        );
        results.truncate(returned.max(0) as usize);
        results.retain(|it| it.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        match asked {
            Err(RunError::Cuda { status, .. }) => {
                Err(self.problem.refused(&format!("cuBLASLt has no algorithm for it ({status})")))
            }
            Err(other) => Err(other),
            Ok(()) if results.is_empty() => {
                Err(self.problem.refused("cuBLASLt has no algorithm for it"))
            }
            Ok(()) => Ok(results.iter().map(algorithm).collect()),
        }
    }

    /// An algorithm from its bytes, if cuBLASLt takes it for this problem on this device.
    fn checked(&self, bytes: &[u8]) -> Result<Algorithm, RunError> {
        let call = "cublasLtMatmulAlgoCheck";
        let refused = |why: String| RunError::Cuda {
            call,
            status: format!(
                "{why}, for the algorithm that rank 0 chose for {}; all ranks need the same GPUs and \
                 the same cuBLASLt",
                self.problem
            ),
        };
        let Some(data) = algorithm_from(bytes) else {
            return Err(refused(format!("{} bytes instead of {ALGORITHM}", bytes.len())));
        };
        // SAFETY: plain data, for which zeros are valid.
        let mut result: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let checked = lt!(
            self.lt,
            cublasLtMatmulAlgoCheck(
                self.handle.0.raw,
                self.operation.raw,
                self.a.raw,
                self.b.raw,
                self.out.raw,
                self.out.raw,
                &data,
                &mut result,
            )
        );
        match checked {
            Err(RunError::Cuda { status, .. }) => Err(refused(status)),
            Err(other) => Err(other),
            Ok(()) if result.workspaceSize as u64 > GEMM_WORKSPACE => {
                Err(refused(format!("{} bytes of workspace", result.workspaceSize)))
            }
            Ok(()) => Ok(Algorithm { algorithm: data, workspace: result.workspaceSize }),
        }
    }

    /// Puts the product on `stream`. The workspace has what the algorithm needs.
    fn run(
        &self,
        algorithm: &Algorithm,
        at: &Addresses,
        workspace: (u64, u64),
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        assert!(
            workspace.1 >= algorithm.workspace as u64,
            "a GEMM has the workspace that the plan gives to every GEMM"
        );
        if let Some(scales) = at.scales {
            self.set_scales(scales)?;
        }
        if let Some(bias) = at.bias {
            self.set_bias(bias)?;
        }
        if let Some(gelu) = at.gelu {
            self.set_gelu(gelu)?;
        }
        let one = 1.0f32;
        let beta = if at.c.is_some() { 1.0f32 } else { 0.0 };
        lt!(
            self.lt,
            cublasLtMatmul(
                self.handle.0.raw,
                self.operation.raw,
                ptr::from_ref(&one).cast(),
                at.b as *const c_void,
                self.a.raw,
                at.a as *const c_void,
                self.b.raw,
                ptr::from_ref(&beta).cast(),
                at.c.unwrap_or(at.out) as *const c_void,
                self.out.raw,
                at.out as *mut c_void,
                self.out.raw,
                &algorithm.algorithm,
                workspace.0 as *mut c_void,
                workspace.1.min(GEMM_WORKSPACE) as usize,
                stream.0.cast(),
            )
        )
    }
}

/// Sums in f32, of f32 operands without rounding them to TF32.
fn operation(lt: &'static CublasLt) -> Result<Owned<cublasLtMatmulDescOpaque_t>, RunError> {
    let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
    let mut raw = ptr::null_mut();
    lt!(lt, cublasLtMatmulDescCreate(&mut raw, compute, scale))?;
    Ok(Owned { raw, free: lt.cublasLtMatmulDescDestroy })
}

/// What is done with the sum on the way out.
fn epilogue(problem: &Problem) -> cublasLtEpilogue_t {
    match (problem.gelu, problem.bias) {
        (false, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        (false, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
        (true, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
        (true, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
    }
}

/// `CUBLAS_OP_N` or `CUBLAS_OP_T`.
fn transpose(transposed: bool) -> i32 {
    i32::from(transposed)
}

/// The memory of our `[rows, cols]`, stored transposed or not.
fn layout(
    lt: &'static CublasLt,
    (dtype, transposed): (DType, bool),
    rows: usize,
    cols: usize,
) -> Result<Owned<cublasLtMatrixLayoutOpaque_t>, RunError> {
    let (outer, inner) = if transposed { (cols, rows) } else { (rows, cols) };
    let mut raw = ptr::null_mut();
    let (dtype, ld) = (cuda_type(dtype), inner as i64);
    lt!(lt, cublasLtMatrixLayoutCreate(&mut raw, dtype, inner as u64, outer as u64, ld))?;
    Ok(Owned { raw, free: lt.cublasLtMatrixLayoutDestroy })
}

/// What an algorithm may need.
fn preference(
    lt: &'static CublasLt,
    problem: &Problem,
) -> Result<Owned<cublasLtMatmulPreferenceOpaque_t>, RunError> {
    use PrefAttribute::*;
    let mut raw = ptr::null_mut();
    lt!(lt, cublasLtMatmulPreferenceCreate(&mut raw))?;
    let res = Owned { raw, free: lt.cublasLtMatmulPreferenceDestroy };
    let set = |attribute: PrefAttribute, value: *const c_void, bytes: usize| {
        lt!(lt, cublasLtMatmulPreferenceSetAttribute(raw, attribute, value, bytes))
    };
    let workspace = GEMM_WORKSPACE;
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ptr::from_ref(&workspace).cast(), 8)?;
    for operand in [
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ] {
        set(operand, ptr::from_ref(&ALIGNMENT).cast(), 4)?;
    }
    // Parts of a sum that is split over k are added in f32, and the total is rounded once.
    if problem.out != DType::F32 {
        let scheme = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ptr::from_ref(&scheme).cast(), 4)?;
    }
    Ok(res)
}

fn algorithm(result: &cublasLtMatmulHeuristicResult_t) -> Algorithm {
    Algorithm { algorithm: result.algo, workspace: result.workspaceSize }
}

fn algorithm_from(bytes: &[u8]) -> Option<cublasLtMatmulAlgo_t> {
    let (words, rest) = bytes.as_chunks::<8>();
    let data = words.try_into().ok().filter(|_| rest.is_empty())?;
    let data: [[u8; 8]; ALGORITHM / 8] = data;
    Some(cublasLtMatmulAlgo_t { data: data.map(u64::from_le_bytes) })
}

/// Where the operands of one run are.
#[derive(Debug, Clone, Copy)]
struct Addresses {
    a: u64,
    b: u64,
    /// Those of `a`, those of `b`.
    scales: Option<[u64; 2]>,
    c: Option<u64>,
    bias: Option<u64>,
    gelu: Option<u64>,
    out: u64,
}

/// A product that is ready to run.
#[derive(Debug)]
pub struct Gemm {
    call: GemmCall,
    /// A run puts the addresses of scales, of the bias and of the activated sum there.
    descriptors: Mutex<Descriptors>,
    algorithm: Algorithm,
}

impl Gemm {
    /// Prepares `call` for `device`, whose context is current. `algorithm` is what [`tune`] chose for
    /// it, on this rank or another; without one the heuristic's first runs.
    ///
    /// Fails where cuBLASLt has no algorithm for it, or does not take the one given.
    pub fn new(
        device: Device,
        call: &GemmCall,
        algorithm: Option<&[u8]>,
    ) -> Result<Gemm, RunError> {
        let descriptors = Descriptors::new(device, Problem::of(call))?;
        let algorithm = match algorithm {
            Some(bytes) => descriptors.checked(bytes)?,
            None => descriptors.candidates(1)?[0],
        };
        Ok(Gemm { call: call.clone(), descriptors: Mutex::new(descriptors), algorithm })
    }

    /// Puts it on `stream`. `workspace` is an address, a multiple of 256, and [`GEMM_WORKSPACE`] bytes.
    /// Neither allocates nor waits.
    pub fn run(
        &self,
        addresses: &dyn Fn(Pointer) -> u64,
        workspace: (u64, u64),
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        let at = Addresses {
            a: addresses(self.call.a.at),
            b: addresses(self.call.b.at),
            scales: self.call.scales.map(|it| [it.a.at, it.b.at].map(addresses)),
            c: self.call.c.map(addresses),
            bias: self.call.bias.map(addresses),
            gelu: self.call.gelu.map(addresses),
            out: addresses(self.call.out),
        };
        let descriptors = self.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        descriptors.run(&self.algorithm, &at, workspace, stream)
    }
}

#[cfg(test)]
mod tests {
    use kernels::cuda::{Scale, Scales};

    use super::*;

    fn call() -> GemmCall {
        GemmCall {
            m: 8192,
            n: 6144,
            k: 4096,
            a: Matrix { at: Pointer::Arg(0), dtype: DType::Bf16, transposed: false },
            b: Matrix { at: Pointer::Arg(1), dtype: DType::Bf16, transposed: true },
            scales: None,
            c: Some(Pointer::Arg(2)),
            bias: None,
            gelu: None,
            out: Pointer::Result(0),
            out_dtype: DType::F32,
        }
    }

    #[test]
    fn a_problem_is_written_as_its_operands_are_stored() {
        let text = "bf16[8192, 4096] bf16[6144, 4096]^T -> f32 + c";
        assert_eq!(Problem::of(&call()).to_string(), text);
        let mut mlp = call();
        (mlp.c, mlp.bias, mlp.gelu) = (None, Some(Pointer::Arg(2)), Some(Pointer::Result(1)));
        mlp.out_dtype = DType::Bf16;
        let text = "bf16[8192, 4096] bf16[6144, 4096]^T -> bf16 + bias, gelu";
        assert_eq!(Problem::of(&mlp).to_string(), text);
    }

    /// Its key in the cache: of two that differ in any way.
    #[test]
    fn a_problem_of_codes_names_their_scales() {
        let mut it = call();
        (it.a.dtype, it.b.dtype, it.c) = (DType::E5M2, DType::E4M3, None);
        let scale = |of| Scale { at: Pointer::Arg(2), of };
        let (a, b) = (scale(ScaleOf::Row), scale(ScaleOf::Block));
        it.scales = Some(Scales { a, b, fast: false });
        let text = "e5m2[8192, 4096] e4m3[6144, 4096]^T, scales row x block -> f32";
        assert_eq!(Problem::of(&it).to_string(), text);
        let tensor = scale(ScaleOf::Tensor);
        it.scales = Some(Scales { a: tensor, b: tensor, fast: true });
        let text = "e5m2[8192, 4096] e4m3[6144, 4096]^T, scales tensor x tensor, fast -> f32";
        assert_eq!(Problem::of(&it).to_string(), text);
        assert_eq!(Problem::of(&it).check_types().ok(), Some(()));
        it.scales = None;
        assert!(Problem::of(&it).check_types().is_err(), "codes have scales");
        it.b.dtype = DType::E5M2;
        it.scales = Some(Scales { a: tensor, b: tensor, fast: true });
        assert!(Problem::of(&it).check_types().is_err(), "one is e4m3");
    }

    /// As in cublasLt.h: SCALAR_32F, VEC128_32F, BLK128x128_32F.
    #[test]
    fn each_kind_of_scale_has_a_mode() {
        let modes = [ScaleOf::Tensor, ScaleOf::Row, ScaleOf::Block].map(|it| scale_mode(it) as u32);
        assert_eq!(modes, [0, 4, 5]);
    }

    #[test]
    fn addresses_do_not_make_another_problem() {
        let mut other = call();
        other.a.at = Pointer::Arg(7);
        other.c = Some(Pointer::Result(0));
        assert_eq!(Problem::of(&other), Problem::of(&call()));
        other.c = None;
        assert_ne!(Problem::of(&other), Problem::of(&call()));
    }

    #[test]
    fn each_way_out_has_an_epilogue_of_its_own() {
        let mut it = call();
        let mut found = Vec::new();
        for (bias, gelu) in [(false, false), (true, false), (false, true), (true, true)] {
            it.bias = bias.then_some(Pointer::Arg(2));
            it.gelu = gelu.then_some(Pointer::Result(1));
            found.push(epilogue(&Problem::of(&it)) as u32);
        }
        // As in cublasLt.h: DEFAULT, BIAS, GELU_AUX, GELU_AUX_BIAS.
        assert_eq!(found, [1, 4, 32 | 128, 32 | 128 | 4]);
    }

    #[test]
    fn an_f32_product_is_not_rounded_to_bf16() {
        let mut it = call();
        (it.a.dtype, it.b.dtype, it.out_dtype) = (DType::F32, DType::F32, DType::Bf16);
        let error = Problem::of(&it).check_types().unwrap_err();
        assert_eq!(error.code(), "PL0546");
        assert!(error.to_string().contains("f32[8192, 4096]"), "{error}");
    }

    #[test]
    fn an_algorithm_is_64_bytes() {
        let bytes: Vec<u8> = (0..64).collect();
        let algorithm = algorithm_from(&bytes).expect("64 bytes");
        assert_eq!(Algorithm { algorithm, workspace: 0 }.bytes(), bytes);
        assert!(algorithm_from(&bytes[..63]).is_none());
        assert!(algorithm_from(&[]).is_none());
        assert!(algorithm_from(&[0; 72]).is_none());
    }
}
