//! Binding: a plan and one mesh coordinate make the program of one rank.
//!
//! The only place where a coordinate is applied. Local shapes, bounds, group members and what a
//! collective copies from whom are computed here, once, from the shardings in the plan; executing
//! looks nothing up. All that does not depend on a coordinate was proved before, so that executing may index freely.

use std::sync::Arc;

use cranelift_entity::PrimaryMap;
use ir::ops::{BoundAt, CollectiveKind, LocalBound};
use ir::placement::{AxisSet, Coord, CopyRuns, Mesh, ReduceOp, copy_runs};
use ir::plan::{
    Arena, Buffer, BufferData, BySection, Comm, Event, Instruction, Part, Plan, PlanSection, Role,
    Stream,
};
use ir::{DType, Op, TensorType};
use smallvec::SmallVec;

use crate::error::RunError;

/// The program of one rank.
#[derive(Debug)]
pub struct BoundPlan {
    /// Which rank.
    pub rank: u64,
    /// Its place in the mesh.
    pub coord: Coord,
    /// What each buffer is on this rank.
    pub buffers: PrimaryMap<Buffer, BoundBuffer>,
    /// This rank's group of each communicator.
    pub groups: PrimaryMap<Comm, Group>,
    /// Instructions, by [`PlanSection`].
    pub sections: BySection<Vec<BoundInstruction>>,
    /// Number of streams.
    pub streams: usize,
    /// Number of events.
    pub events: usize,
    /// Bytes of the persistent and the step arena.
    pub arenas: [u64; 2],
}

impl BoundPlan {
    /// See [`PlanSection::finds_carried`].
    pub fn finds_carried(&self, section: PlanSection) -> bool {
        section.finds_carried(|it| !self.sections[it as usize].is_empty())
    }
}

/// A buffer on one rank.
#[derive(Debug)]
pub struct BoundBuffer {
    /// The name of the value it holds.
    pub name: String,
    /// How elements are stored.
    pub dtype: DType,
    /// Sizes of the buffer, the same on all ranks.
    pub shape: SmallVec<[usize; 4]>,
    /// Sizes of what this rank holds; the rest is padding, and zero.
    pub extents: SmallVec<[usize; 4]>,
    /// Elements, padding included.
    pub len: usize,
    /// What it is for.
    pub role: Role,
    /// Where it lives.
    pub arena: Arena,
    /// Byte offset there, a multiple of the element size.
    pub offset: usize,
}

impl BoundBuffer {
    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.bytes() as usize
    }
}

/// The ranks of one communicator that this rank meets, in coordinate order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The ranks.
    pub members: Vec<u64>,
    /// Which of them this rank is.
    pub index: usize,
    /// Which of the communicator's groups this is.
    pub id: usize,
}

/// An instruction's place in the plan, for matching and for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The section.
    pub section: PlanSection,
    /// The index in it.
    pub index: usize,
}

/// One instruction of one rank. Calls are shared, so that a backend may queue them.
#[derive(Debug, Clone)]
pub enum BoundInstruction {
    /// Runs an op.
    Compute(Arc<ComputeCall>, Stream),
    /// Moves data among ranks.
    Collective(Arc<CollectiveCall>, Stream),
    /// Copies a buffer.
    Copy(CopyCall, Stream),
    /// Marks a point of a stream.
    Record(Event, Stream),
    /// Holds a stream until the latest point that was marked.
    Wait(Event, Stream),
}

impl BoundInstruction {
    /// The stream it is queued on.
    pub fn stream(&self) -> Stream {
        match self {
            BoundInstruction::Compute(_, stream)
            | BoundInstruction::Collective(_, stream)
            | BoundInstruction::Copy(_, stream)
            | BoundInstruction::Record(_, stream)
            | BoundInstruction::Wait(_, stream) => *stream,
        }
    }
}

/// An op on local data.
#[derive(Debug)]
pub struct ComputeCall {
    /// Which instruction it is.
    pub at: At,
    /// The op.
    pub op: Op,
    /// Operands.
    pub args: SmallVec<[Buffer; 4]>,
    /// Results.
    pub results: SmallVec<[Buffer; 4]>,
    /// One for each of the op's bounds.
    pub bounds: SmallVec<[LocalBound; 2]>,
}

/// Data to move among the ranks of a group.
#[derive(Debug)]
pub struct CollectiveCall {
    /// Which instruction it is.
    pub at: At,
    /// How it moves.
    pub kind: CollectiveKind,
    /// Among whom.
    pub comm: Comm,
    /// What.
    pub parts: Vec<BoundPart>,
}

/// One tensor of a collective: the destination is the reduction of the terms.
#[derive(Debug)]
pub struct BoundPart {
    /// What this rank gives.
    pub src: Buffer,
    /// The buffer that receives the data.
    pub dst: Buffer,
    /// True if it is added to the content of `dst`.
    pub adds: bool,
    /// The reduction, if there is one.
    pub reduce: Option<ReduceOp>,
    /// One without a reduction, else one for each coordinate that is reduced over, in order. None
    /// means that the destination is all zero.
    pub terms: Vec<Term>,
}

/// What makes up the whole destination once.
pub type Term = Vec<PeerCopy>;

/// What comes from one member of the group.
#[derive(Debug)]
pub struct PeerCopy {
    /// Index in [`Group::members`].
    pub member: usize,
    /// Local stretches of each dimension, in its source and this rank's destination.
    pub runs: SmallVec<[CopyRuns; 2]>,
}

/// A buffer to copy to another of the same type and local shape.
#[derive(Debug, Clone, Copy)]
pub struct CopyCall {
    /// Which instruction it is.
    pub at: At,
    /// From.
    pub src: Buffer,
    /// To.
    pub dst: Buffer,
}

/// `dp=1, tp=3`, in axes of the user's mesh.
pub fn coord_name(mesh: &Mesh, coord: &[u32]) -> String {
    let mut res: Vec<(&str, u64)> = Vec::new();
    for (axis, &at) in mesh.axes.iter().zip(coord) {
        match res.last_mut().filter(|it| it.0 == axis.user_name()) {
            Some(whole) => whole.1 = whole.1 * u64::from(axis.size) + u64::from(at),
            None => res.push((axis.user_name(), at.into())),
        }
    }
    res.iter().map(|(name, at)| format!("{name}={at}")).collect::<Vec<String>>().join(", ")
}

/// `` step[12] `matmul(transpose_b:true)` making `h` ``.
pub fn describe(plan: &Plan, at: At) -> String {
    let instruction = &plan.section(at.section)[at.index];
    let what = match instruction {
        Instruction::Compute { op, .. } => op.to_text(),
        Instruction::Collective { kind, comm, .. } => {
            format!("{}({})", kind.name(), plan.mesh.names(plan.comms[*comm]))
        }
        Instruction::Copy { .. } => "copy".to_string(),
        Instruction::Record { .. } => "record".to_string(),
        Instruction::Wait { .. } => "wait".to_string(),
    };
    let made: Vec<&str> =
        instruction.writes().iter().map(|&it| plan.buffers[it].name.as_str()).collect();
    format!("{}[{}] `{what}` making `{}`", at.section.name(), at.index, made.join("`, `"))
}

/// The program of one rank of a plan that is [proved](kernels::Proved).
pub fn bind(plan: &Plan, rank: u64) -> Result<BoundPlan, RunError> {
    let coord = plan.mesh.coord_of(rank);
    let mut buffers = PrimaryMap::with_capacity(plan.buffers.len());
    for buffer in plan.buffers.keys() {
        buffers.push(bind_buffer(plan, buffer, &coord));
    }
    let mut groups = PrimaryMap::with_capacity(plan.comms.len());
    for &axes in plan.comms.values() {
        groups.push(group(&plan.mesh, axes, &coord));
    }
    let mut sections: BySection<Vec<BoundInstruction>> = Default::default();
    for section in PlanSection::ALL {
        let instructions = plan.section(section).iter().enumerate();
        let bound = instructions
            .map(|(index, it)| bind_instruction(plan, &coord, At { section, index }, it));
        sections[section as usize] = bound.collect::<Result<_, _>>()?;
    }
    Ok(BoundPlan {
        rank,
        coord,
        buffers,
        groups,
        sections,
        streams: plan.streams.len(),
        events: plan.events as usize,
        arenas: [plan.persistent_bytes, plan.step_bytes],
    })
}

fn bind_buffer(plan: &Plan, buffer: Buffer, coord: &[u32]) -> BoundBuffer {
    let data = &plan.buffers[buffer];
    let sizes = |shape: &[u64]| shape.iter().map(|&it| it as usize).collect();
    let shape: SmallVec<[usize; 4]> = sizes(&plan.local_shape(buffer));
    BoundBuffer {
        name: data.name.clone(),
        dtype: data.ty.dtype,
        len: shape.iter().product(),
        shape,
        extents: sizes(&data.sharding.extents(&data.ty.shape, &plan.mesh, coord)),
        role: data.role,
        arena: data.role.arena(),
        offset: data.offset.expect("a plan that is proved has memory") as usize,
    }
}

fn group(mesh: &Mesh, axes: AxisSet, coord: &[u32]) -> Group {
    Group {
        members: mesh.group_of(axes, coord).map(|it| mesh.rank_of(&it)).collect(),
        index: mesh.index_in(axes, coord) as usize,
        id: mesh.index_in(mesh.all().minus(axes), coord) as usize,
    }
}

fn bind_instruction(
    plan: &Plan,
    coord: &[u32],
    at: At,
    instruction: &Instruction,
) -> Result<BoundInstruction, RunError> {
    Ok(match instruction {
        Instruction::Compute { op, args, results, stream } => {
            let bound = |it: &BoundAt| {
                let (buffer, dim) = match *it {
                    BoundAt::Input(i, dim) => (args.get(i), dim),
                    BoundAt::Result(i, dim) => (results.get(i), dim),
                };
                bind_bound(plan, coord, at, buffer.copied(), dim)
            };
            let types: SmallVec<[&TensorType; 4]> =
                args.iter().map(|&it| &plan.buffers[it].ty).collect();
            let call = ComputeCall {
                at,
                op: op.clone(),
                args: args.clone(),
                results: results.clone(),
                bounds: op.bounds(&types).iter().map(bound).collect::<Result<_, _>>()?,
            };
            BoundInstruction::Compute(Arc::new(call), *stream)
        }
        Instruction::Collective { kind, comm, parts, stream } => {
            let bound = parts.iter().map(|&part| {
                bind_part(plan, coord, *kind, plan.comms[*comm], part)
                    .map_err(|why| RunError::bad_plan(describe(plan, at), why))
            });
            let parts = bound.collect::<Result<_, _>>()?;
            let call = CollectiveCall { at, kind: *kind, comm: *comm, parts };
            BoundInstruction::Collective(Arc::new(call), *stream)
        }
        Instruction::Copy { src, dst, stream } => {
            BoundInstruction::Copy(CopyCall { at, src: *src, dst: *dst }, *stream)
        }
        Instruction::Record { event, stream } => BoundInstruction::Record(*event, *stream),
        Instruction::Wait { event, stream } => BoundInstruction::Wait(*event, *stream),
    })
}

/// Which rows of a dimension this rank holds.
fn bind_bound(
    plan: &Plan,
    coord: &[u32],
    at: At,
    buffer: Option<Buffer>,
    dim: usize,
) -> Result<LocalBound, RunError> {
    let data = buffer.map(|it| &plan.buffers[it]).filter(|it| dim < it.ty.ndim());
    let Some(BufferData { name, ty, sharding, .. }) = data else {
        return Err(RunError::bad_plan(describe(plan, at), "lacks an operand that bounds it"));
    };
    let (layout, size) = (&sharding.dims[dim], ty.shape[dim]);
    if !layout.is_contiguous() {
        let why = format!("needs contiguous shards of dim {dim} of `{name}`");
        return Err(RunError::bad_plan(describe(plan, at), why));
    }
    Ok(LocalBound {
        start: layout.start(size, &plan.mesh, coord),
        extent: layout.extent(size, &plan.mesh, coord),
        size,
    })
}

/// Like [`ir::placement::apply_step`]: this rank gets what its new layout says from the ranks that
/// differ from it over the axes, and reduces over those that are no longer partial.
fn bind_part(
    plan: &Plan,
    coord: &[u32],
    kind: CollectiveKind,
    axes: AxisSet,
    part: Part,
) -> Result<BoundPart, String> {
    let (src, dst) = (&plan.buffers[part.src], &plan.buffers[part.dst]);
    let names = format!("`{}` to `{}`", src.name, dst.name);
    if src.ty != dst.ty {
        return Err(format!("moves {names}, which are {} and {}", src.ty, dst.ty));
    }
    let (from, to) = (&src.sharding, &dst.sharding);
    let reduced = from.partial_axes().minus(to.partial_axes());
    let reduce = match kind.reduces() {
        Some(op) => {
            if reduced.is_empty() || from.partial.map(|it| it.0) != Some(op) {
                return Err(format!("reduces {names}, which is not partial so"));
            }
            if !src.ty.dtype.is_float() {
                return Err(format!("reduces {names}, which are integers"));
            }
            Some(op)
        }
        None => {
            if !reduced.is_empty() {
                return Err(format!("moves {names} and does not reduce it"));
            }
            None
        }
    };
    if !reduced.is_subset(axes) {
        return Err(format!("reduces {names} beyond its communicator"));
    }
    if kind == CollectiveKind::ToPartial(ReduceOp::Sum) && plan.mesh.index_in(axes, coord) != 0 {
        return Ok(BoundPart {
            src: part.src,
            dst: part.dst,
            adds: part.adds,
            reduce,
            terms: Vec::new(),
        });
    }
    let moved = if kind.is_local() { AxisSet::EMPTY } else { axes.minus(reduced) };
    // Ranks that differ over a moved axis hold different elements, so that none comes twice.
    let copies = moved.minus(from.sharded_axes());
    if plan.mesh.set_size(copies) > 1 {
        return Err(format!("gathers {names} from ranks that hold the same"));
    }
    let terms: Vec<Term> = plan
        .mesh
        .group_of(reduced, coord)
        .map(|it| bind_term(plan, (axes, moved), part, &it, coord))
        .collect::<Option<_>>()
        .ok_or_else(|| format!("does not find all of {names} in its group"))?;
    Ok(BoundPart { src: part.src, dst: part.dst, adds: part.adds, reduce, terms })
}

/// What `dst` wants, from those that differ from `src` over `moved`; `None` if that is not all.
fn bind_term(
    plan: &Plan,
    (axes, moved): (AxisSet, AxisSet),
    part: Part,
    src: &[u32],
    dst: &[u32],
) -> Option<Term> {
    let mesh = &plan.mesh;
    let (from, to) = (&plan.buffers[part.src], &plan.buffers[part.dst]);
    let shape = &from.ty.shape;
    let mut found = 0;
    let mut term = Term::new();
    for peer in mesh.group_of(moved, src) {
        let dims = from.sharding.dims.iter().zip(&to.sharding.dims).zip(shape);
        let runs: SmallVec<[CopyRuns; 2]> =
            dims.map(|((a, b), &size)| copy_runs(a, b, size, mesh, &peer, dst)).collect();
        let count = |runs: &CopyRuns| runs.iter().map(|it| it.2).sum::<u64>();
        let n: u64 = runs.iter().map(count).product();
        if n > 0 {
            found += n;
            term.push(PeerCopy { member: mesh.index_in(axes, &peer) as usize, runs });
        }
    }
    let wanted: u64 = to.sharding.extents(shape, mesh, dst).iter().product();
    (found == wanted).then_some(term)
}
