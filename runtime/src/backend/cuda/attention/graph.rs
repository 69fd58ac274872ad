//! cuDNN's backend API: descriptors, graphs of operations, plans that execute them.
//!
//! A descriptor is made, given attributes, finalized. Descriptors refer to each other by address, so
//! whatever holds one keeps its parts: [`Graph`] and [`Plan`] own theirs.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cudnn::sys::{
    cudaStream_t, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t as Kind, cudnnBackendHeurMode_t,
    cudnnDataType_t, cudnnHandle_t, cudnnPointwiseMode_t, cudnnReduceTensorOp_t,
};

use crate::backend::cuda::driver::{CudaStream, Device};
use crate::backend::cuda::handles::PerDevice;
use crate::backend::cuda::library::{dotted, library};
use crate::backend::cuda::nvrtc::Compiler;
use crate::error::RunError;

/// `cudnnStatus_t`. Later versions add values, which a Rust enum must not have.
type Status = u32;

library! {
    /// cuDNN.
    pub struct Cudnn = "libcudnn.so.9" of "nvidia-cudnn-cu13";
    fn cudnnGetVersion() -> usize;
    fn cudnnGetErrorString(status: Status) -> *const c_char;
    fn cudnnGetLastErrorString(text: *mut c_char, bytes: usize) -> ();
    fn cudnnCreate(handle: *mut cudnnHandle_t) -> Status;
    fn cudnnDestroy(handle: cudnnHandle_t) -> Status;
    fn cudnnSetStream(handle: cudnnHandle_t, stream: cudaStream_t) -> Status;
    fn cudnnBackendCreateDescriptor(kind: Kind, descriptor: *mut cudnnBackendDescriptor_t) -> Status;
    fn cudnnBackendDestroyDescriptor(descriptor: cudnnBackendDescriptor_t) -> Status;
    fn cudnnBackendSetAttribute(descriptor: cudnnBackendDescriptor_t, name: Name, value_type: Type, n: i64, values: *const c_void) -> Status;
    fn cudnnBackendGetAttribute(descriptor: cudnnBackendDescriptor_t, name: Name, value_type: Type, room: i64, n: *mut i64, values: *mut c_void) -> Status;
    fn cudnnBackendFinalize(descriptor: cudnnBackendDescriptor_t) -> Status;
    fn cudnnBackendExecute(handle: cudnnHandle_t, plan: cudnnBackendDescriptor_t, pack: cudnnBackendDescriptor_t) -> Status;
}

/// cuDNN, with what it needs to make plans.
pub(super) fn cudnn() -> Result<&'static Cudnn, RunError> {
    // Without NVRTC it knows no kernel for attention. It opens it by name, and finds it once it is open.
    Compiler::get()?;
    Cudnn::get()
}

/// `9.19.0`.
pub(in crate::backend::cuda) fn version(cudnn: &Cudnn) -> String {
    // SAFETY: it only returns a number.
    dotted(unsafe { (cudnn.cudnnGetVersion)() })
}

/// Calls a function of cuDNN; anything but success is a [`Failure`] that names it and `about`.
macro_rules! dnn {
    ($cudnn:expr, $about:expr, $f:ident($($a:expr),* $(,)?)) => {
        // SAFETY: arguments are live for the call, and handles are those that cuDNN gave out.
        check($cudnn, stringify!($f), $about, unsafe { ($cudnn.$f)($($a),*) })
    };
}

/// A call of cuDNN's that did not succeed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Failure {
    call: &'static str,
    /// Whether it says that cuDNN does not do this, and not that something broke.
    pub(super) unsupported: bool,
    /// What it was about, what it returned, and said.
    pub(super) status: String,
}

impl Failure {
    pub(super) fn error(self) -> RunError {
        RunError::Cuda { call: self.call, status: self.status }
    }
}

fn check(cudnn: &Cudnn, call: &'static str, about: &str, status: Status) -> Result<(), Failure> {
    if status == 0 {
        return Ok(());
    }
    let mut text = [0u8; 2048];
    // SAFETY: it writes at most that many bytes, with a NUL at the end.
    unsafe { (cudnn.cudnnGetLastErrorString)(text.as_mut_ptr().cast(), text.len()) };
    let said = text.split(|&it| it == 0).next().unwrap_or_default();
    // SAFETY: it returns a constant text, also for a number that it does not know.
    let name = unsafe { CStr::from_ptr((cudnn.cudnnGetErrorString)(status)) };
    let status_text =
        format!("{about}: {} {}", name.to_string_lossy(), String::from_utf8_lossy(said).trim());
    // Codes come in thousands: 2 for parameters, 3 for what is not supported, 4 and 5 for failures.
    let unsupported = matches!(status / 1000, 2 | 3);
    Err(Failure { call, unsupported, status: status_text.trim_end().to_string() })
}

/// The library's state on one device, for one thread at a time.
#[derive(Debug)]
pub(super) struct Handle {
    cudnn: &'static Cudnn,
    raw: cudnnHandle_t,
}

// SAFETY: a handle may be used from any thread that has the context, one at a time.
unsafe impl Send for Handle {}

impl Handle {
    pub(super) fn of(device: Device) -> Result<Arc<Mutex<Handle>>, RunError> {
        static HANDLES: PerDevice<Mutex<Handle>> = PerDevice::new();
        HANDLES.get(device, || {
            let cudnn = cudnn()?;
            let mut raw = ptr::null_mut();
            dnn!(cudnn, "a handle", cudnnCreate(&mut raw)).map_err(Failure::error)?;
            Ok(Mutex::new(Handle { cudnn, raw }))
        })
    }

    /// Puts `plan`, with the pointers of `pack`, on `stream`.
    pub(super) fn execute(
        &self,
        plan: &Plan,
        pack: &Descriptor,
        stream: &CudaStream,
    ) -> Result<(), Failure> {
        dnn!(self.cudnn, "a stream", cudnnSetStream(self.raw, stream.0.cast()))?;
        dnn!(self.cudnn, "a plan", cudnnBackendExecute(self.raw, plan.plan.raw, pack.raw))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        unsafe { (self.cudnn.cudnnDestroy)(self.raw) };
    }
}

/// Locks what no panic leaves half done.
pub(super) fn lock<T>(it: &Mutex<T>) -> MutexGuard<'_, T> {
    it.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A C type that attributes have.
pub(super) trait Value: Copy {
    const TYPE: Type;
}

/// An address, on the device or, for a tensor by value, on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub(super) struct Address(pub(super) u64);

macro_rules! values {
    ($($t:ty: $name:ident,)*) => { $(impl Value for $t { const TYPE: Type = Type::$name; })* };
}

values! {
    i64: CUDNN_TYPE_INT64,
    bool: CUDNN_TYPE_BOOLEAN,
    u8: CUDNN_TYPE_CHAR,
    Address: CUDNN_TYPE_VOID_PTR,
    cudnnHandle_t: CUDNN_TYPE_HANDLE,
    cudnnBackendDescriptor_t: CUDNN_TYPE_BACKEND_DESCRIPTOR,
    cudnnDataType_t: CUDNN_TYPE_DATA_TYPE,
    cudnnPointwiseMode_t: CUDNN_TYPE_POINTWISE_MODE,
    cudnnReduceTensorOp_t: CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    cudnnBackendHeurMode_t: CUDNN_TYPE_HEUR_MODE,
}

/// One object of cuDNN's.
#[derive(Debug)]
pub(super) struct Descriptor {
    cudnn: &'static Cudnn,
    raw: cudnnBackendDescriptor_t,
}

// SAFETY: a descriptor is memory of the host that belongs to no thread.
unsafe impl Send for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        unsafe { (self.cudnn.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

impl Descriptor {
    fn new(cudnn: &'static Cudnn, kind: Kind) -> Result<Descriptor, Failure> {
        let mut raw = ptr::null_mut();
        dnn!(cudnn, &format!("{kind:?}"), cudnnBackendCreateDescriptor(kind, &mut raw))?;
        Ok(Descriptor { cudnn, raw })
    }

    fn set<V: Value>(self, name: Name, values: &[V]) -> Result<Descriptor, Failure> {
        let (n, values) = (values.len() as i64, values.as_ptr().cast());
        let about = format!("{name:?}");
        dnn!(self.cudnn, &about, cudnnBackendSetAttribute(self.raw, name, V::TYPE, n, values))?;
        Ok(self)
    }

    fn part(self, name: Name, part: &Descriptor) -> Result<Descriptor, Failure> {
        self.set(name, &[part.raw])
    }

    fn finalize(self, about: &str) -> Result<Descriptor, Failure> {
        dnn!(self.cudnn, about, cudnnBackendFinalize(self.raw))?;
        Ok(self)
    }

    /// An attribute that is text.
    fn text(&self, name: Name) -> Result<String, Failure> {
        let n = self.get::<u8>(name, &mut [])?;
        let mut bytes = vec![0u8; n];
        let n = self.get(name, &mut bytes)?;
        bytes.truncate(n);
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.trim_end_matches('\0').to_string())
    }

    /// Reads an attribute into `values`; how many there are.
    fn get<V: Value>(&self, name: Name, values: &mut [V]) -> Result<usize, Failure> {
        let (room, mut n) = (values.len() as i64, 0);
        let at = if values.is_empty() { ptr::null_mut() } else { values.as_mut_ptr().cast() };
        dnn!(
            self.cudnn,
            &format!("{name:?}"),
            cudnnBackendGetAttribute(self.raw, name, V::TYPE, room, &mut n, at)
        )?;
        Ok(n.max(0) as usize)
    }
}

/// Type, sizes and strides of a tensor, in elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Shape {
    pub(super) dtype: cudnnDataType_t,
    pub(super) dims: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Shape {
    /// Row-major.
    pub(super) fn packed(dtype: cudnnDataType_t, dims: [i64; 4]) -> Shape {
        let [_, b, c, d] = dims;
        Shape { dtype, dims, strides: [b * c * d, c * d, d, 1] }
    }

    /// The same memory, as a matrix the other way round.
    pub(super) fn transposed(self) -> Shape {
        let ([a, b, c, d], [w, x, y, z]) = (self.dims, self.strides);
        Shape { dims: [a, b, d, c], strides: [w, x, z, y], ..self }
    }

    pub(super) fn of(self, dtype: cudnnDataType_t) -> Shape {
        Shape { dtype, ..self }
    }
}

/// A tensor of a [`Graph`]: its number, by which a variant pack gives its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tensor(pub(super) i64);

/// Where an operation's result goes.
pub(super) enum Output {
    /// Nowhere: a tensor between operations, which need not exist in memory.
    Virtual(Shape),
    /// To a tensor in memory.
    Real(Tensor),
}

impl From<Shape> for Output {
    fn from(it: Shape) -> Output {
        Output::Virtual(it)
    }
}

impl From<Tensor> for Output {
    fn from(it: Tensor) -> Output {
        Output::Real(it)
    }
}

/// Operations on tensors, all math in f32. Each returns its result.
#[derive(Debug)]
pub(super) struct Graph {
    cudnn: &'static Cudnn,
    operations: Vec<Descriptor>,
    parts: Vec<Descriptor>,
    tensors: BTreeMap<i64, Descriptor>,
}

/// Numbers of virtual tensors start here, above those of real ones.
const VIRTUAL: i64 = 100;

impl Graph {
    pub(super) fn new(cudnn: &'static Cudnn) -> Graph {
        Graph { cudnn, operations: Vec::new(), parts: Vec::new(), tensors: BTreeMap::new() }
    }

    /// A tensor in device memory, with its number in variant packs.
    pub(super) fn real(&mut self, number: i64, shape: Shape) -> Result<Tensor, Failure> {
        self.tensor(number, shape, false, false)
    }

    /// One f32 in host memory, read whenever a plan is executed.
    pub(super) fn value(&mut self, number: i64) -> Result<Tensor, Failure> {
        let shape = Shape::packed(cudnnDataType_t::CUDNN_DATA_FLOAT, [1; 4]);
        self.tensor(number, shape, false, true)
    }

    fn tensor(
        &mut self,
        number: i64,
        shape: Shape,
        is_virtual: bool,
        by_value: bool,
    ) -> Result<Tensor, Failure> {
        let it = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[shape.dtype])?
            .set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &shape.dims)?
            .set(Name::CUDNN_ATTR_TENSOR_STRIDES, &shape.strides)?
            .set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[number])?
            .set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[16i64])?
            .set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[is_virtual])?
            .set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[by_value])?
            .finalize("a tensor")?;
        self.tensors.insert(number, it);
        Ok(Tensor(number))
    }

    fn output(&mut self, out: impl Into<Output>) -> Result<Tensor, Failure> {
        match out.into() {
            Output::Real(it) => Ok(it),
            Output::Virtual(shape) => {
                let number = VIRTUAL + self.tensors.len() as i64;
                self.tensor(number, shape, true, false)
            }
        }
    }

    pub(super) fn matmul(
        &mut self,
        a: Tensor,
        b: Tensor,
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        let out = self.output(out)?;
        let how = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[cudnnDataType_t::CUDNN_DATA_FLOAT])?
            .finalize("a matmul")?;
        let it = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .part(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &self.tensors[&a.0])?
            .part(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &self.tensors[&b.0])?
            .part(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &self.tensors[&out.0])?
            .part(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &how)?
            .finalize("a matmul operation")?;
        self.parts.push(how);
        self.operations.push(it);
        Ok(out)
    }

    pub(super) fn unary(
        &mut self,
        mode: cudnnPointwiseMode_t,
        x: Tensor,
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        self.pointwise(mode, None, &[x], out)
    }

    pub(super) fn binary(
        &mut self,
        mode: cudnnPointwiseMode_t,
        x: Tensor,
        y: Tensor,
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        self.pointwise(mode, None, &[x, y], out)
    }

    /// The position of each element along a dim; `like` gives the sizes.
    pub(super) fn index(
        &mut self,
        dim: i64,
        like: Tensor,
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        self.pointwise(cudnnPointwiseMode_t::CUDNN_POINTWISE_GEN_INDEX, Some(dim), &[like], out)
    }

    /// `yes` where `condition`, else `no`.
    pub(super) fn select(
        &mut self,
        condition: Tensor,
        yes: Tensor,
        no: Tensor,
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        let mode = cudnnPointwiseMode_t::CUDNN_POINTWISE_BINARY_SELECT;
        self.pointwise(mode, None, &[yes, no, condition], out)
    }

    /// Up to three operands: X, B, and the predicate T.
    fn pointwise(
        &mut self,
        mode: cudnnPointwiseMode_t,
        dim: Option<i64>,
        operands: &[Tensor],
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        let out = self.output(out)?;
        let precision = match mode {
            cudnnPointwiseMode_t::CUDNN_POINTWISE_CMP_GE => cudnnDataType_t::CUDNN_DATA_BOOLEAN,
            _ => cudnnDataType_t::CUDNN_DATA_FLOAT,
        };
        let mut how = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_POINTWISE_MODE, &[mode])?
            .set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(dim) = dim {
            how = how.set(Name::CUDNN_ATTR_POINTWISE_AXIS, &[dim])?;
        }
        let how = how.finalize("a pointwise")?;
        let mut it =
            Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
                .part(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &how)?
                .part(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &self.tensors[&out.0])?;
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (name, operand) in names.into_iter().zip(operands) {
            it = it.part(name, &self.tensors[&operand.0])?;
        }
        let it = it.finalize("a pointwise operation")?;
        self.parts.push(how);
        self.operations.push(it);
        Ok(out)
    }

    /// Over the dims in which `out` has size 1, or fewer heads.
    pub(super) fn reduce(
        &mut self,
        operator: cudnnReduceTensorOp_t,
        x: Tensor,
        out: impl Into<Output>,
    ) -> Result<Tensor, Failure> {
        let out = self.output(out)?;
        let how = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?
            .set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[cudnnDataType_t::CUDNN_DATA_FLOAT])?
            .finalize("a reduction")?;
        let it = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .part(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &self.tensors[&x.0])?
            .part(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &self.tensors[&out.0])?
            .part(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &how)?
            .finalize("a reduction operation")?;
        self.parts.push(how);
        self.operations.push(it);
        Ok(out)
    }

    /// The same elements by other strides: cuDNN's way to transpose.
    pub(super) fn reshape(&mut self, x: Tensor, out: impl Into<Output>) -> Result<Tensor, Failure> {
        let out = self.output(out)?;
        let it = Descriptor::new(self.cudnn, Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .part(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &self.tensors[&x.0])?
            .part(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &self.tensors[&out.0])?
            .finalize("a reshape operation")?;
        self.operations.push(it);
        Ok(out)
    }
}

/// What a plan is made for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Target<'a> {
    /// A GPU of this machine.
    Device(&'a Handle),
    /// A GPU that need not be here.
    Properties(&'a Properties),
}

/// What cuDNN must know of a GPU to plan for it.
#[derive(Debug)]
pub(super) struct Properties(Descriptor);

impl Properties {
    /// From JSON with all 23 keys that cuDNN writes.
    pub(super) fn parse(cudnn: &'static Cudnn, json: &str) -> Result<Properties, Failure> {
        let it = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, json.as_bytes())?
            .finalize("properties of a GPU")?;
        Ok(Properties(it))
    }

    /// What cuDNN writes of a GPU that is here.
    pub(super) fn json_of(handle: &Handle) -> Result<String, Failure> {
        Descriptor::new(handle.cudnn, Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_DEVICEPROP_HANDLE, &[handle.raw])?
            .finalize("properties of a GPU")?
            .text(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION)
    }
}

/// How a graph is executed. Fields are dropped in this order.
#[derive(Debug)]
pub(super) struct Plan {
    plan: Descriptor,
    /// Bytes of scratch.
    pub(super) workspace: u64,
    _parts: Vec<Descriptor>,
    _graph: Option<Graph>,
}

/// Engine configurations that are tried.
const CONFIGURATIONS: usize = 8;

impl Plan {
    /// The first configuration that the heuristic proposes and that becomes a plan of at most
    /// `workspace_max` bytes of scratch.
    pub(super) fn new(
        graph: Graph,
        target: Target<'_>,
        workspace_max: u64,
    ) -> Result<Plan, Failure> {
        let cudnn = graph.cudnn;
        let operations: Vec<cudnnBackendDescriptor_t> =
            graph.operations.iter().map(|it| it.raw).collect();
        let mut whole = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        if let Target::Device(handle) = target {
            whole = whole.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle.raw])?;
        }
        let whole = whole.finalize("a graph")?;
        let (heuristic, mut parts) = configurations(cudnn, &whole, target)?;
        let mut refusals = vec![format!(
            "{} configurations of cuDNN {} (`{}`)",
            parts.len(),
            version(cudnn),
            cudnn.file.path.display()
        )];
        let mut found = None;
        for configuration in &parts {
            match plan(cudnn, configuration, target) {
                Err(failure) if failure.unsupported => refusals.push(failure.status),
                Err(failure) => return Err(failure),
                Ok((_, bytes)) if bytes > workspace_max => refusals.push(format!(
                    "{bytes} bytes of workspace, of which there are {workspace_max}"
                )),
                Ok(plan) => {
                    found = Some(plan);
                    break;
                }
            }
        }
        let Some((plan, workspace)) = found else {
            let status = refusals.join("; ");
            return Err(Failure { call: "cudnnBackendFinalize", unsupported: true, status });
        };
        parts.extend([heuristic, whole]);
        Ok(Plan { plan, workspace, _parts: parts, _graph: Some(graph) })
    }

    /// From what [`Plan::json`] gave.
    pub(super) fn from_json(handle: &Handle, json: &str) -> Result<Plan, Failure> {
        let plan = Descriptor::new(handle.cudnn, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[handle.raw])?
            .set(Name::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, json.as_bytes())?
            .finalize("a plan from JSON")?;
        let workspace = workspace(&plan)?;
        Ok(Plan { plan, workspace, _parts: Vec::new(), _graph: None })
    }

    /// The plan with its compiled kernel, for this version of cuDNN.
    pub(super) fn json(&self) -> Result<String, Failure> {
        self.plan.text(Name::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// A table of the addresses that it is executed on, by the tensors' numbers.
    pub(super) fn pack(
        &self,
        pointers: &[(i64, Address)],
        workspace: Address,
    ) -> Result<Descriptor, Failure> {
        let (numbers, addresses): (Vec<i64>, Vec<Address>) = pointers.iter().copied().unzip();
        Descriptor::new(self.plan.cudnn, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &numbers)?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace])?
            .finalize("a variant pack")
    }
}

/// The heuristic's answer, which the configurations are parts of.
fn configurations(
    cudnn: &'static Cudnn,
    graph: &Descriptor,
    target: Target<'_>,
) -> Result<(Descriptor, Vec<Descriptor>), Failure> {
    let mut heuristic = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .part(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?
        .set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A])?;
    if let Target::Properties(properties) = target {
        heuristic = heuristic.part(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &properties.0)?;
    }
    let heuristic = heuristic.finalize("a heuristic")?;
    let mut res = Vec::new();
    for _ in 0..CONFIGURATIONS {
        res.push(Descriptor::new(cudnn, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?);
    }
    let mut raw: Vec<cudnnBackendDescriptor_t> = res.iter().map(|it| it.raw).collect();
    let n = heuristic.get(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, &mut raw)?;
    res.truncate(n);
    Ok((heuristic, res))
}

/// A plan and its bytes of scratch.
fn plan(
    cudnn: &'static Cudnn,
    configuration: &Descriptor,
    target: Target<'_>,
) -> Result<(Descriptor, u64), Failure> {
    let plan = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .part(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)?;
    let plan = match target {
        Target::Device(it) => plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[it.raw])?,
        Target::Properties(it) => plan.part(Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &it.0)?,
    };
    let plan = plan.finalize("a plan")?;
    let workspace = workspace(&plan)?;
    Ok((plan, workspace))
}

fn workspace(plan: &Descriptor) -> Result<u64, Failure> {
    let mut bytes = [0i64];
    plan.get(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, &mut bytes)?;
    Ok(bytes[0].max(0) as u64)
}
