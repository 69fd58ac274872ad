//! Attention by cuDNN.
//!
//! cuDNN compiles a kernel for each shape, which takes a second; its plans are kept on disk, with the
//! kernel in them, for that version of cuDNN and that GPU. They can be made on a machine without a GPU.

pub(super) mod graph;
mod sdpa;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use ir::ops::Engine;
use ir::random::stream_key;
use kernels::cuda::attention::{LibraryScratch, library_scratch, library_takes};
use kernels::cuda::{AttentionCall, AttentionShape, Pointer, Work};
use serde::{Deserialize, Serialize};

use self::graph::{Address, Cudnn, Descriptor, Failure, Handle, Plan, Properties, Target, lock};
use self::sdpa::{Layout, number};
use crate::backend::cuda::cache::Cache;
use crate::backend::cuda::driver::{CudaStream, Device};
use crate::backend::cuda::program::Batch;
use crate::bind::{BoundInstruction, bind};
use crate::error::RunError;

/// Why cuDNN does not do an attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(pub String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuDNN does not take it: {}", self.0)
    }
}

/// An attention that is ready to run, on any buffers.
#[derive(Debug)]
pub struct Attention {
    call: AttentionCall,
    scratch: LibraryScratch,
    handle: Arc<Mutex<Handle>>,
    ready: Mutex<Ready>,
    /// Read by cuDNN whenever it runs: scale, minus infinity, one.
    values: Box<[f32; 3]>,
}

/// A plan, and a table of pointers for each set of buffers that it has run on.
#[derive(Debug)]
struct Ready {
    packs: BTreeMap<Vec<(i64, Address)>, Descriptor>,
    plan: Plan,
}

impl Attention {
    /// Prepares `call` for `device`, whose context is current; `None` where cuDNN does not do it.
    ///
    /// Fails where cuDNN or NVRTC is not found, or fails.
    pub fn new(device: Device, call: &AttentionCall) -> Result<Option<Attention>, RunError> {
        Attention::or_refusal(device, call).map(Result::ok)
    }

    /// [`Attention::new`], with the reason where cuDNN does not do it.
    pub fn or_refusal(
        device: Device,
        call: &AttentionCall,
    ) -> Result<Result<Attention, Refusal>, RunError> {
        if !library_takes(&call.shape) {
            return Ok(Err(Refusal("its type or sizes are not among those that are tried".into())));
        }
        let handle = Handle::of(device)?;
        let made = {
            let handle = lock(&handle);
            planned(&Cache::of_user(), &device.name()?, &handle, &call.shape)?
        };
        Ok(made.map(|plan| Attention {
            call: call.clone(),
            scratch: library_scratch(&call.shape),
            handle,
            ready: Mutex::new(Ready { packs: BTreeMap::new(), plan }),
            values: Box::new([call.shape.scale, f32::NEG_INFINITY, 1.0]),
        }))
    }

    /// Puts it on `stream`. `workspace` is the address and size of the whole program's. Neither
    /// allocates on the device nor waits.
    pub fn run(
        &self,
        addresses: &dyn Fn(Pointer) -> u64,
        workspace: (u64, u64),
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        assert!(
            self.call.scratch + self.scratch.end <= workspace.1,
            "attention has the workspace that its program asks for"
        );
        let base = workspace.0 + self.call.scratch;
        let shape = &self.call.shape;
        if shape.backward {
            // cuDNN's blocks add to it.
            let elements =
                shape.batch as u64 * shape.heads as u64 * shape.s as u64 * shape.d as u64;
            stream.fill(base + self.scratch.dq, 0, 4 * elements)?;
        }
        let pointers = self.pointers(addresses, base);
        let mut ready = lock(&self.ready);
        let Ready { packs, plan } = &mut *ready;
        if !packs.contains_key(&pointers) {
            let own = Address(base + self.scratch.own);
            let pack = plan.pack(&pointers, own).map_err(Failure::error)?;
            packs.insert(pointers.clone(), pack);
        }
        lock(&self.handle).execute(plan, &packs[&pointers], stream).map_err(Failure::error)
    }

    /// Where the graph's tensors are.
    fn pointers(&self, addresses: &dyn Fn(Pointer) -> u64, base: u64) -> Vec<(i64, Address)> {
        let AttentionCall { shape, args, results, .. } = &self.call;
        let [scale, minus_infinity, one] =
            self.values.each_ref().map(|it| std::ptr::from_ref(it) as u64);
        let operands = operand_numbers(shape.backward).into_iter().zip(args.iter().chain(results));
        let mut res: Vec<(i64, u64)> = operands.map(|(it, &at)| (it, addresses(at))).collect();
        res.push((number::SCALE, scale));
        if shape.causal {
            res.push((number::MINUS_INFINITY, minus_infinity));
        }
        if shape.backward {
            res.push((number::ONE, one));
            res.push((number::SUMS, base + self.scratch.sums));
            res.push((number::DQ_SUM, base + self.scratch.dq));
        }
        res.into_iter().map(|(it, at)| (it, Address(at))).collect()
    }
}

/// Numbers of a call's operands and results, in their order.
fn operand_numbers(backward: bool) -> Vec<i64> {
    use number::{DK, DO, DQ, DV, K, O, Q, STATISTIC, V};
    match backward {
        false => vec![Q, K, V, O, STATISTIC],
        true => vec![Q, K, V, O, STATISTIC, DO, DQ, DK, DV],
    }
}

/// What cuDNN writes of an H200, for [`plan_ahead`].
pub const H200: &str = include_str!("attention/h200.json");

/// What cuDNN writes of a GPU that is here, for [`plan_ahead`] on a machine that has none.
pub fn properties(device: Device) -> Result<String, RunError> {
    let handle = Handle::of(device)?;
    let handle = lock(&handle);
    Properties::json_of(&handle).map_err(Failure::error)
}

/// An attention of a plan: its plan's bytes of scratch, or why cuDNN has none.
pub type Planned = (AttentionShape, Result<u64, Refusal>);

/// Lets cuDNN plan the attentions of `plan` for a GPU that need not be here, and keeps that for when it is.
///
/// `properties` is what cuDNN writes of that GPU: JSON with 23 keys. cuDNN opens libcuda for it; where
/// there is none, it plans nothing.
pub fn plan_ahead(plan: &ir::plan::Plan, properties: &str) -> Result<Vec<Planned>, RunError> {
    let cache = Cache::of_user();
    let planned = |it| Ok((it, plan_ahead_into(&cache, properties, &it)?));
    attentions(plan)?.into_iter().map(planned).collect()
}

/// The attentions of a plan that a library may do, each once. All ranks have the same.
pub fn attentions(plan: &ir::plan::Plan) -> Result<Vec<AttentionShape>, RunError> {
    let bound = bind(plan, 0)?;
    let mut res: Vec<AttentionShape> = Vec::new();
    for instruction in bound.sections.iter().flatten() {
        let BoundInstruction::Compute(call, stream) = instruction else { continue };
        if call.op.engine() != Engine::Attention {
            continue;
        }
        let batch = Batch { stream: *stream, calls: vec![call.clone()] };
        for work in batch.lower(&bound)?.work {
            if let Work::Attention(AttentionCall { shape, .. }) = work
                && !res.contains(&shape)
            {
                res.push(shape);
            }
        }
    }
    Ok(res)
}

fn plan_ahead_into(
    cache: &Cache,
    properties: &str,
    shape: &AttentionShape,
) -> Result<Result<u64, Refusal>, RunError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Gpu {
        device_name: String,
    }
    let gpu: Gpu = serde_json::from_str(properties)
        .map_err(|it| RunError::bad_plan("properties of a GPU", format!("cannot be read: {it}")))?;
    let cudnn = graph::cudnn()?;
    let properties = Properties::parse(cudnn, properties).map_err(Failure::error)?;
    let made = make(cudnn, Target::Properties(&properties), shape);
    refused(made.and_then(|plan| {
        Saved::new(cudnn, &gpu.device_name, shape, plan.json()?).write(cache);
        Ok(plan.workspace)
    }))
}

/// The plan of `shape`, from disk if it is there.
fn planned(
    cache: &Cache,
    gpu: &str,
    handle: &Handle,
    shape: &AttentionShape,
) -> Result<Result<Plan, Refusal>, RunError> {
    let cudnn = graph::cudnn()?;
    if let Some(saved) = Saved::read(cache, &key(cudnn, gpu, shape))
        && let Ok(plan) = Plan::from_json(handle, &saved.plan)
        && plan.workspace <= room(shape)
    {
        return Ok(Ok(plan));
    }
    let made = make(cudnn, Target::Device(handle), shape);
    if let Ok(plan) = &made
        && let Ok(json) = plan.json()
    {
        Saved::new(cudnn, gpu, shape, json).write(cache);
    }
    refused(made)
}

fn make(
    cudnn: &'static Cudnn,
    target: Target<'_>,
    shape: &AttentionShape,
) -> Result<Plan, Failure> {
    let layout = Layout::separate(shape);
    let graph = match shape.backward {
        false => sdpa::forward(cudnn, &layout)?,
        true => sdpa::backward(cudnn, &layout)?,
    };
    Plan::new(graph, target, room(shape))
}

/// Bytes of scratch that a plan may ask for.
fn room(shape: &AttentionShape) -> u64 {
    let scratch = library_scratch(shape);
    scratch.end - scratch.own
}

fn refused<T>(made: Result<T, Failure>) -> Result<Result<T, Refusal>, RunError> {
    match made {
        Ok(it) => Ok(Ok(it)),
        Err(it) if it.unsupported => Ok(Err(Refusal(it.status))),
        Err(it) => Err(it.error()),
    }
}

/// All that decides about a plan.
fn key(cudnn: &Cudnn, gpu: &str, shape: &AttentionShape) -> String {
    key_text(&graph::version(cudnn), gpu, shape)
}

fn key_text(version: &str, gpu: &str, shape: &AttentionShape) -> String {
    // The first number changes with the graphs and their tensors' numbers.
    format!("1, cuDNN {version}, {gpu}, {shape}")
}

/// A plan on disk.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Saved {
    key: String,
    plan: String,
}

impl Saved {
    fn new(cudnn: &Cudnn, gpu: &str, shape: &AttentionShape, plan: String) -> Saved {
        Saved { key: key(cudnn, gpu, shape), plan }
    }

    /// FNV-1a of the key; the file has the key itself, so that two with one hash are told apart.
    fn file(key: &str) -> String {
        format!("attention-{:016x}.json", stream_key(key))
    }

    fn read(cache: &Cache, key: &str) -> Option<Saved> {
        let saved: Saved = serde_json::from_slice(&cache.read(&Saved::file(key))?).ok()?;
        (saved.key == key).then_some(saved)
    }

    fn write(&self, cache: &Cache) {
        if let Ok(text) = serde_json::to_vec(self) {
            cache.write(&Saved::file(&self.key), &text);
        }
    }
}
