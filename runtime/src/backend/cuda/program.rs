//! Programs on their buffers: addresses in place, functions loaded, ready to be queued again and again.
//!
//! ```text
//! instructions -> Batch -> kernels::cuda::lower -> Program -> Loader (modules, libraries) -> Prepared
//! ```

use std::collections::{BTreeSet, HashMap};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use ir::ops::Trains;
use ir::plan::{Arena, Buffer, Stream};
use kernels::cuda::{
    Arg, AttentionCall, Function, GemmCall, Launch, OpCall, Operand, Pointer, Program, Word, Work,
    batchable, lower,
};
use smallvec::SmallVec;

use crate::backend::cuda::attention::Attention;
use crate::backend::cuda::driver::{CudaStream, Device, cuda};
use crate::backend::cuda::gemm::{self, ALGORITHM, Gemm};
use crate::backend::cuda::module::{Kernel, Modules};
use crate::bind::{BoundInstruction, BoundPlan, ComputeCall};
use crate::comm::control::Control;
use crate::error::RunError;

/// Compute instructions that run as one program, at the place of the first.
#[derive(Debug)]
pub struct Batch {
    /// Where they are queued.
    pub stream: Stream,
    /// The instructions, in order; one at least.
    pub calls: Vec<Arc<ComputeCall>>,
}

/// Operands and results of a call, as kernels see them.
type Operands = [SmallVec<[Operand; 4]>; 2];

impl Batch {
    /// Its program.
    pub fn lower(&self, plan: &BoundPlan) -> Result<Program, RunError> {
        let operands: Vec<Operands> = self.calls.iter().map(|it| operands(plan, it)).collect();
        let calls: Vec<OpCall<'_>> =
            self.calls.iter().zip(&operands).map(|(call, it)| op_call(call, it)).collect();
        lower(&calls).map_err(|it| RunError::NoKernel { op: it.op, why: it.why })
    }

    /// Operands of all calls.
    pub fn args(&self) -> impl Iterator<Item = Buffer> + '_ {
        self.calls.iter().flat_map(|it| it.args.iter().copied())
    }

    /// Results of all calls.
    pub fn results(&self) -> impl Iterator<Item = Buffer> + '_ {
        self.calls.iter().flat_map(|it| it.results.iter().copied())
    }

    /// Whether `call` may run at the same time as these.
    fn takes(&self, plan: &BoundPlan, call: &ComputeCall) -> bool {
        let first = &self.calls[0];
        // Others batch whole tensors, or not at all.
        let n = call.op.trains().map_or(0, |_| Trains::SCALARS);
        let shared = |it: &ComputeCall| it.args[it.args.len().saturating_sub(n)..].to_vec();
        if call.op.kind() != first.op.kind() || shared(first) != shared(call) {
            return false;
        }
        let [ours, theirs] = [operands(plan, first), operands(plan, call)];
        if !batchable(&op_call(first, &ours), &op_call(call, &theirs)) {
            return false;
        }
        let written = |it: &ComputeCall| ranges(plan, &it.results);
        let read = |it: &ComputeCall| ranges(plan, &it.args);
        self.calls.iter().all(|it| {
            !overlap(&written(it), &written(call))
                && !overlap(&written(it), &read(call))
                && !overlap(&read(it), &written(call))
        })
    }
}

fn operands(plan: &BoundPlan, call: &ComputeCall) -> Operands {
    let operand = |&it: &Buffer| {
        let buffer = &plan.buffers[it];
        Operand { dtype: buffer.dtype, shape: buffer.shape.clone() }
    };
    [call.args.iter().map(operand).collect(), call.results.iter().map(operand).collect()]
}

fn op_call<'a>(call: &'a ComputeCall, [args, results]: &'a Operands) -> OpCall<'a> {
    OpCall { op: &call.op, args, results, bounds: &call.bounds }
}

type Ranges = SmallVec<[(Arena, Range<usize>); 8]>;

fn ranges(plan: &BoundPlan, buffers: &[Buffer]) -> Ranges {
    let range = |&it: &Buffer| {
        let buffer = &plan.buffers[it];
        (buffer.arena, buffer.offset..buffer.offset + buffer.bytes())
    };
    buffers.iter().map(range).collect()
}

fn overlap(a: &Ranges, b: &Ranges) -> bool {
    let meets = |(arena, a): &(Arena, Range<usize>)| {
        b.iter().any(|(other, b)| arena == other && a.start < b.end && b.start < a.end)
    };
    a.iter().any(meets)
}

/// The batches of a section, each with the index of its first instruction. What lies between the calls
/// of a batch is on other streams.
pub fn batches(plan: &BoundPlan, section: &[BoundInstruction]) -> Vec<(usize, Batch)> {
    let mut res: Vec<(usize, Batch)> = Vec::new();
    // By stream: the batch that its last instruction is of.
    let mut open: Vec<Option<usize>> = vec![None; plan.streams];
    for (index, instruction) in section.iter().enumerate() {
        let stream = instruction.stream();
        let last = &mut open[stream.as_u32() as usize];
        let BoundInstruction::Compute(call, _) = instruction else {
            *last = None;
            continue;
        };
        match *last {
            Some(batch) if res[batch].1.takes(plan, call) => res[batch].1.calls.push(call.clone()),
            _ => {
                *last = Some(res.len());
                res.push((index, Batch { stream, calls: vec![call.clone()] }));
            }
        }
    }
    res
}

/// Where a program's pointers point.
#[derive(Debug, Clone)]
pub struct Place {
    /// Addresses of operands, through all calls.
    pub args: Vec<u64>,
    /// Addresses of results, through all calls.
    pub results: Vec<u64>,
    /// Address and size of the stream's scratch.
    pub workspace: (u64, u64),
    /// Address of the table.
    pub table: u64,
}

impl Place {
    /// What a pointer points to.
    pub fn address(&self, pointer: Pointer) -> u64 {
        match pointer {
            Pointer::Arg(it) => self.args[it as usize],
            Pointer::Result(it) => self.results[it as usize],
            Pointer::Workspace(offset) => self.workspace.0 + offset,
            Pointer::Table(word) => self.table + 8 * u64::from(word),
        }
    }

    /// The content of a program's table.
    pub fn table(&self, program: &Program) -> Vec<u64> {
        let mut res = Vec::new();
        for word in &program.table {
            match *word {
                Word::Pointer(it) => res.push(self.address(it)),
                Word::Value(it) => res.push(it),
                Word::Pieces { of, n } => {
                    res.extend((0..n).map(|it| u64::from(of) | it << 32));
                }
            }
        }
        res
    }
}

/// How long choosing algorithms may take. Some tenths of a second a shape, of which a model has twenty.
const TUNING: Duration = Duration::from_secs(30);

/// Adds GEMMs that are not yet there.
fn add_gemms(work: &Work, calls: &mut Vec<GemmCall>) {
    match work {
        Work::Gemm(call) if !calls.contains(call) => calls.push(call.clone()),
        Work::Attention(call) => call.fallback.iter().for_each(|it| add_gemms(it, calls)),
        Work::Gemm(_) | Work::Launch(_) | Work::Fill { .. } | Work::Copy { .. } => (),
    }
}

/// What programs of one device share: modules, handles of libraries.
#[derive(Debug)]
pub struct Loader {
    device: Device,
    modules: Modules,
    /// What [`Loader::tune`] chose.
    algorithms: HashMap<GemmCall, Vec<u8>>,
    gemms: HashMap<GemmCall, Arc<Gemm>>,
    /// `None` where no library takes it.
    attentions: Vec<(AttentionCall, Option<Arc<Attention>>)>,
}

impl Loader {
    /// Nothing loaded.
    pub fn new(device: Device) -> Result<Loader, RunError> {
        let modules = Modules::new(device)?;
        let (algorithms, gemms) = (HashMap::new(), HashMap::new());
        Ok(Loader { device, modules, algorithms, gemms, attentions: Vec::new() })
    }

    /// Chooses the algorithms of all GEMMs: rank 0 by measuring, the others what it chose, so that
    /// replicas compute the same. Before memory is taken, which measuring needs.
    pub fn tune<'a>(
        &mut self,
        work: impl Iterator<Item = &'a Work>,
        control: &dyn Control,
    ) -> Result<(), RunError> {
        let mut calls: Vec<GemmCall> = Vec::new();
        work.for_each(|it| add_gemms(it, &mut calls));
        let chosen = match control.rank() {
            0 => Some(gemm::tune(self.device, &calls, TUNING)?.concat()),
            _ => None,
        };
        let chosen = control.broadcast_after(chosen, TUNING)?;
        if chosen.len() != calls.len() * ALGORITHM {
            let why = "is not that of rank 0: it has other matrix products";
            return Err(RunError::bad_plan("program", why));
        }
        let algorithms = chosen.chunks_exact(ALGORITHM).map(<[u8]>::to_vec);
        self.algorithms.extend(calls.into_iter().zip(algorithms));
        Ok(())
    }

    /// Makes ready what the work of programs needs. All at once, since functions compile in parallel.
    pub fn load<'a>(&mut self, work: impl Iterator<Item = &'a Work>) -> Result<(), RunError> {
        let mut functions = BTreeSet::new();
        for work in work {
            self.load_one(work, &mut functions)?;
        }
        self.modules.load(&functions)
    }

    fn load_one(
        &mut self,
        work: &Work,
        functions: &mut BTreeSet<Function>,
    ) -> Result<(), RunError> {
        match work {
            Work::Launch(launch) => {
                functions.insert(launch.function.clone());
            }
            Work::Gemm(call) => {
                if !self.gemms.contains_key(call) {
                    let algorithm = self.algorithms.get(call).map(Vec::as_slice);
                    let gemm = Gemm::new(self.device, call, algorithm)?;
                    self.gemms.insert(call.clone(), Arc::new(gemm));
                }
            }
            Work::Attention(call) => {
                if !self.attentions.iter().any(|it| it.0 == *call) {
                    let attention = Attention::new(self.device, call)?;
                    self.attentions.push((call.clone(), attention.map(Arc::new)));
                }
                if self.attention(call).is_none() {
                    call.fallback.iter().try_for_each(|it| self.load_one(it, functions))?;
                }
            }
            Work::Fill { .. } | Work::Copy { .. } => (),
        }
        Ok(())
    }

    fn attention(&self, call: &AttentionCall) -> Option<Arc<Attention>> {
        let found = self.attentions.iter().find(|it| it.0 == *call);
        found.expect("attention is loaded before use").1.clone()
    }

    /// A program whose work was loaded, on its buffers.
    pub fn prepare(&mut self, program: &Program, place: Place) -> Result<Prepared, RunError> {
        let mut tasks = Vec::new();
        for work in &program.work {
            self.prepare_one(work, &place, &mut tasks)?;
        }
        Ok(Prepared { tasks, place })
    }

    fn prepare_one(
        &mut self,
        work: &Work,
        place: &Place,
        tasks: &mut Vec<Task>,
    ) -> Result<(), RunError> {
        match work {
            Work::Launch(launch) => {
                let kernel = self.modules.kernel(&launch.function, launch.shared)?;
                tasks.push(Task::Launch(PreparedLaunch::new(launch, kernel, place)));
            }
            Work::Gemm(call) => {
                let found = self.gemms.get(call).expect("GEMMs are loaded before use");
                tasks.push(Task::Gemm(found.clone()));
            }
            Work::Attention(call) => match self.attention(call) {
                Some(it) => tasks.push(Task::Attention(it)),
                None => {
                    for work in &call.fallback {
                        self.prepare_one(work, place, tasks)?;
                    }
                }
            },
            Work::Fill { to, bytes, value } => {
                let (to, bytes, value) = (place.address(*to), *bytes, *value);
                tasks.push(Task::Fill { to, bytes, value });
            }
            Work::Copy { from, to, bytes } => {
                let (from, to, bytes) = (place.address(*from), place.address(*to), *bytes);
                tasks.push(Task::Copy { from, to, bytes });
            }
        }
        Ok(())
    }
}

/// See the [module docs](self). Good for as long as its [`Loader`] and its buffers.
#[derive(Debug)]
pub struct Prepared {
    tasks: Vec<Task>,
    place: Place,
}

#[derive(Debug)]
enum Task {
    Launch(PreparedLaunch),
    Gemm(Arc<Gemm>),
    Attention(Arc<Attention>),
    Fill { to: u64, bytes: u64, value: u8 },
    Copy { from: u64, to: u64, bytes: u64 },
}

impl Prepared {
    /// Queues it.
    pub fn run(&self, stream: &CudaStream) -> Result<(), RunError> {
        let addresses = |it: Pointer| self.place.address(it);
        for task in &self.tasks {
            match task {
                Task::Launch(launch) => launch.run(stream)?,
                Task::Gemm(gemm) => gemm.run(&addresses, self.place.workspace, stream)?,
                Task::Attention(it) => it.run(&addresses, self.place.workspace, stream)?,
                Task::Fill { to, bytes, value } => stream.fill(*to, *value, *bytes)?,
                Task::Copy { from, to, bytes } => stream.copy(*from, *to, *bytes)?,
            }
        }
        Ok(())
    }
}

/// A launch with its arguments where the driver reads them.
#[derive(Debug)]
struct PreparedLaunch {
    kernel: Kernel,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    /// One word an argument; only its first bytes count. The driver knows from the kernel how many.
    args: Vec<u64>,
}

impl PreparedLaunch {
    fn new(launch: &Launch, kernel: Kernel, place: &Place) -> PreparedLaunch {
        let word = |it: &Arg| match *it {
            Arg::Pointer(it) => place.address(it),
            Arg::I32(it) => u64::from(it as u32),
            Arg::U32(it) => u64::from(it),
            Arg::I64(it) => it as u64,
            Arg::F32(it) => u64::from(it.to_bits()),
        };
        let Launch { grid, block, shared, .. } = *launch;
        PreparedLaunch { kernel, grid, block, shared, args: launch.args.iter().map(word).collect() }
    }

    fn run(&self, stream: &CudaStream) -> Result<(), RunError> {
        if self.grid.contains(&0) {
            // The driver refuses what has nothing to do.
            return Ok(());
        }
        let pointer = |it: &u64| ptr::from_ref(it).cast_mut().cast::<c_void>();
        let mut args: SmallVec<[*mut c_void; 24]> = self.args.iter().map(pointer).collect();
        let [x, y, z] = self.grid;
        cuda!(cuLaunchKernel(
            self.kernel.0,
            x,
            y,
            z,
            self.block,
            1,
            1,
            self.shared,
            stream.0,
            args.as_mut_ptr(),
            ptr::null_mut(),
        ))
    }
}
