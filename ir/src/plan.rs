//! `Plan`: the instructions that every rank runs, over buffers, streams and communicators.
//!
//! A plan is SPMD: it has no list of ranks and no conditional on a coordinate. Every buffer keeps
//! its global type and its sharding, so that local shapes, bounds, checkpoint boxes and proofs are
//! derived from the plan alone. `runtime::bind` applies one mesh coordinate to it.
//!
//! A section is an instruction list in issue order. No event crosses a section: a section starts when
//! the one before is done on all streams. A step runs them so:
//!
//! ```text
//! prepare    after init or load
//! first      forward and backward pass of the first micro-batch
//! step       forward and backward pass of each micro-batch in between
//! last       forward and backward pass of the last micro-batch
//! update     once a step
//! ```
//!
//! If `first` or `last` is empty, `step` runs instead: a step of one micro-batch has `step` and `update`
//! only. With several, `first` gathers the weights that the others find, and writes the sums to which
//! the others add; `last` reduces those sums beside its backward pass.

mod clocks;
mod profile;

use cranelift_entity::{PrimaryMap, SecondaryMap, entity_impl};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::Phase;
use crate::checkpoint::update;
use crate::digest::Digest;
use crate::graph::{Init, Name};
use crate::ops::{CollectiveKind, Engine, Op};
use crate::placement::{AxisSet, Mesh, Sharding};
use crate::run::Run;
use crate::types::{Shape, TensorType};

pub use clocks::{Clock, Clocks, covers, join};
pub use profile::{MemoryProfile, memory_profile};

/// Offsets of buffers are multiples of this.
pub const ALIGN: u64 = 256;

/// A communicator: the ranks that differ on its axes only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Comm(u32);
entity_impl!(Comm, "c");

/// A queue of instructions that run in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(u32);
entity_impl!(Stream, "s");

/// A point on a stream that others can wait for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event(u32);
entity_impl!(Event, "e");

/// A tensor in memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Buffer(u32);
entity_impl!(Buffer, "b");

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The model's name.
    pub name: Name,
    /// The digest of the model that it was compiled from, if it was compiled from one.
    pub model: Option<Digest>,
    /// The mesh it was compiled for.
    pub mesh: Mesh,
    /// `Lowered`, `Scheduled` or `Planned`.
    pub phase: Phase,
    /// The number of micro-batches before `update`; see [`Plan::micro_batch`].
    pub micro_batches: u32,
    /// Communicators.
    pub comms: PrimaryMap<Comm, AxisSet>,
    /// Streams; the first is the compute stream.
    pub streams: PrimaryMap<Stream, StreamData>,
    /// Events are `0..events`.
    pub events: u32,
    /// All buffers.
    pub buffers: PrimaryMap<Buffer, BufferData>,
    /// Instructions, by [`PlanSection`].
    pub sections: BySection<Vec<Instruction>>,
    /// Bytes of the arena of what survives a step.
    pub persistent_bytes: u64,
    /// Bytes of the arena of temporaries, and of what a section leaves for later ones of the same step.
    pub step_bytes: u64,
    /// The model's parameters, for init, weights and checkpoints.
    pub params: Vec<PlanParam>,
    /// Scalars to report after `update`: `loss`, `grad_norm`.
    pub results: Vec<(Name, Buffer)>,
    /// Data and schedule: what the runtime needs besides the program.
    pub run: Run,
}

/// A section of a plan, an index into [`Plan::sections`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlanSection {
    /// Compute weights from master weights.
    Prepare,
    /// The first of several micro-batches.
    First,
    /// One micro-batch.
    Step,
    /// The last of several micro-batches.
    Last,
    /// Once a step.
    Update,
}

/// One value for each section, by `section as usize`.
pub type BySection<T> = [T; PlanSection::ALL.len()];

impl PlanSection {
    /// In running order.
    pub const ALL: [PlanSection; 5] = [
        PlanSection::Prepare,
        PlanSection::First,
        PlanSection::Step,
        PlanSection::Last,
        PlanSection::Update,
    ];

    /// The sections that run micro-batches, in running order.
    pub const MICRO_BATCHES: [PlanSection; 3] =
        [PlanSection::First, PlanSection::Step, PlanSection::Last];

    /// Sections between which the arena of a step keeps what is carried, in running order.
    pub const TIMELINES: [&[PlanSection]; 2] = [
        &[PlanSection::Prepare],
        &[PlanSection::First, PlanSection::Step, PlanSection::Last, PlanSection::Update],
    ];

    /// The number of times it runs in a step of `micro_batches`; `has` says which sections are not empty.
    pub fn runs(self, micro_batches: u32, has: impl Fn(PlanSection) -> bool) -> u32 {
        let first = u32::from(has(PlanSection::First)).min(micro_batches);
        let last = u32::from(has(PlanSection::Last)).min(micro_batches - first);
        match self {
            PlanSection::Prepare => 0,
            PlanSection::First => first,
            PlanSection::Step => micro_batches - first - last,
            PlanSection::Last => last,
            PlanSection::Update => 1,
        }
    }

    /// Returns true if it finds the buffers that earlier sections of the step carried. Every section of a step does,
    /// except the one that a step begins with. `has` says which sections are not empty.
    pub fn finds_carried(self, has: impl Fn(PlanSection) -> bool) -> bool {
        match self {
            PlanSection::Prepare | PlanSection::First => false,
            PlanSection::Step => has(PlanSection::First),
            PlanSection::Last | PlanSection::Update => true,
        }
    }

    /// The spelling in text IR.
    pub fn name(self) -> &'static str {
        match self {
            PlanSection::Prepare => "prepare",
            PlanSection::First => "first",
            PlanSection::Step => "step",
            PlanSection::Last => "last",
            PlanSection::Update => "update",
        }
    }
}

/// A queue of instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamData {
    /// What it is for.
    pub kind: StreamKind,
    /// Bytes of scratch on a GPU: as much as the instruction needs that needs most.
    pub workspace: u64,
}

impl From<StreamKind> for StreamData {
    fn from(kind: StreamKind) -> StreamData {
        StreamData { kind, workspace: 0 }
    }
}

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamKind {
    /// Ops.
    Compute,
    /// Collectives of one communicator.
    Comm,
}

/// One tensor in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct BufferData {
    /// The name of the value it holds.
    pub name: Name,
    /// Element type and global shape.
    pub ty: TensorType,
    /// Where its elements live.
    pub sharding: Sharding,
    /// What it is for.
    pub role: Role,
    /// Byte offset in its arena (see [`Role::arena`]); set by `plan-memory`.
    pub offset: Option<u64>,
}

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A master weight.
    Param,
    /// Survives a step; zero at the start.
    State,
    /// Written by the runtime.
    Input,
    /// Made by a micro-batch for later ones or for `update`, or in any section for the runtime: there until the
    /// step is over.
    Carried,
    /// Lives within one section.
    Temp,
}

/// The two lifetimes of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arena {
    /// What is there stays.
    Persistent,
    /// Reused within a step.
    Step,
}

impl Role {
    /// Where buffers of this role live.
    pub fn arena(self) -> Arena {
        match self {
            Role::Param | Role::State | Role::Input => Arena::Persistent,
            Role::Carried | Role::Temp => Arena::Step,
        }
    }

    /// The spelling in text IR.
    pub fn name(self) -> &'static str {
        match self {
            Role::Param => "param",
            Role::State => "state",
            Role::Input => "input",
            Role::Carried => "carried",
            Role::Temp => "temp",
        }
    }
}

/// Buffers of one instruction.
pub type Buffers = SmallVec<[Buffer; 4]>;

/// One entry of a section.
#[derive(Debug, Clone, PartialEq)]
pub enum Instruction {
    /// Runs an op on local data.
    Compute {
        /// The op, with local attributes.
        op: Op,
        /// Operands.
        args: Buffers,
        /// Results; one may be an operand where the op works in place.
        results: Buffers,
        /// Where it is queued.
        stream: Stream,
    },
    /// Moves data among the ranks of a communicator, all parts in one call.
    Collective {
        /// How.
        kind: CollectiveKind,
        /// Among whom. Local kinds use it for their axes only.
        comm: Comm,
        /// What.
        parts: SmallVec<[Part; 1]>,
        /// Where it is queued.
        stream: Stream,
    },
    /// Copies a buffer to another of the same local shape.
    Copy {
        /// Source.
        src: Buffer,
        /// Destination.
        dst: Buffer,
        /// Where it is queued.
        stream: Stream,
    },
    /// Marks a point of `stream`.
    Record {
        /// The event.
        event: Event,
        /// The stream.
        stream: Stream,
    },
    /// Holds `stream` until `event` has been reached.
    Wait {
        /// The event.
        event: Event,
        /// The stream.
        stream: Stream,
    },
}

/// One tensor of a collective. What moves follows from the shardings of both buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Part {
    /// Source.
    pub src: Buffer,
    /// Destination.
    pub dst: Buffer,
    /// True if the result is added to the content of the destination.
    pub adds: bool,
}

/// A parameter as the runtime sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanParam {
    /// Holds the master weight; its name is the parameter's.
    pub buffer: Buffer,
    /// The layout of the buffer with the axes of size 1 by which the model cuts it, as PyTorch labels it; `None` where
    /// that is the buffer's own.
    pub label: Option<Sharding>,
    /// How it starts.
    pub init: Init,
    /// Other names of the same tensor.
    pub aliases: Vec<Name>,
}

impl Instruction {
    /// What it does: the name of its op or collective, `copy`, `record` or `wait`.
    pub fn name(&self) -> &str {
        match self {
            Instruction::Compute { op, .. } => op.name(),
            Instruction::Collective { kind, .. } => kind.name(),
            Instruction::Copy { .. } => "copy",
            Instruction::Record { .. } => "record",
            Instruction::Wait { .. } => "wait",
        }
    }

    /// The stream it is queued on.
    pub fn stream(&self) -> Stream {
        match self {
            Instruction::Compute { stream, .. }
            | Instruction::Collective { stream, .. }
            | Instruction::Copy { stream, .. }
            | Instruction::Record { stream, .. }
            | Instruction::Wait { stream, .. } => *stream,
        }
    }

    /// Buffers it reads; a collective reads the sources of all parts, in order, and then the sums that it adds to.
    pub fn reads(&self) -> Buffers {
        match self {
            Instruction::Compute { args, .. } => args.clone(),
            Instruction::Collective { parts, .. } => {
                let sums = parts.iter().filter(|it| it.adds).map(|it| it.dst);
                parts.iter().map(|it| it.src).chain(sums).collect()
            }
            Instruction::Copy { src, .. } => Buffers::from_slice(&[*src]),
            Instruction::Record { .. } | Instruction::Wait { .. } => Buffers::new(),
        }
    }

    /// Buffers it writes.
    pub fn writes(&self) -> Buffers {
        match self {
            Instruction::Compute { results, .. } => results.clone(),
            Instruction::Collective { parts, .. } => parts.iter().map(|it| it.dst).collect(),
            Instruction::Copy { dst, .. } => Buffers::from_slice(&[*dst]),
            Instruction::Record { .. } | Instruction::Wait { .. } => Buffers::new(),
        }
    }
}

impl Plan {
    /// Instructions of some sections, one after the other, with their place.
    pub fn timeline<'a>(
        &'a self,
        sections: &'a [PlanSection],
    ) -> impl Iterator<Item = ((PlanSection, usize), &'a Instruction)> {
        sections.iter().flat_map(move |&section| {
            self.section(section).iter().enumerate().map(move |it| ((section, it.0), it.1))
        })
    }

    /// Returns true if it has GEMMs on FP8 data.
    pub fn multiplies_in_fp8(&self) -> bool {
        let is_fp8 = |it: &Instruction| match it {
            Instruction::Compute { op, .. } => matches!(op.engine(), Engine::Fp8Gemm { .. }),
            _ => false,
        };
        self.sections.iter().flatten().any(is_fp8)
    }

    /// Instructions of a section.
    pub fn section(&self, section: PlanSection) -> &[Instruction] {
        &self.sections[section as usize]
    }

    /// The section that runs micro-batch `index` of a step, counted from 0.
    pub fn micro_batch(&self, index: u32) -> PlanSection {
        let has = |section| !self.section(section).is_empty();
        if index == 0 && has(PlanSection::First) {
            PlanSection::First
        } else if index + 1 >= self.micro_batches && has(PlanSection::Last) {
            PlanSection::Last
        } else {
            PlanSection::Step
        }
    }

    /// The section that runs the last micro-batch of a step.
    pub fn last_micro_batch(&self) -> PlanSection {
        self.micro_batch(self.micro_batches.saturating_sub(1))
    }

    /// The number of times a section runs in a step.
    pub fn runs(&self, section: PlanSection) -> u32 {
        section.runs(self.micro_batches, |it| !self.section(it).is_empty())
    }

    /// Largest local shape of a buffer over all ranks: what is allocated.
    pub fn local_shape(&self, buffer: Buffer) -> Shape {
        let data = &self.buffers[buffer];
        data.sharding.local_shape(&data.ty.shape, &self.mesh)
    }

    /// Bytes allocated for a buffer on each rank.
    pub fn local_bytes(&self, buffer: Buffer) -> u64 {
        let data = &self.buffers[buffer];
        data.sharding.local_elements(&data.ty.shape, &self.mesh) * data.ty.dtype.bytes()
    }

    /// A stream by what it is for: `s0 compute`, or the user's axes and what moves over them, that of which there are
    /// most instructions first: `s1 dp: all_gather of weights`, `s3 dp: reduce_scatter, all_reduce`. One on which
    /// nothing moves is `s4`.
    pub fn stream_title(&self, stream: Stream) -> String {
        match self.streams[stream].kind {
            StreamKind::Compute => return format!("{stream} compute"),
            StreamKind::Comm => (),
        }
        let mut axes = AxisSet::EMPTY;
        let is_weight = |it: &Part| matches!(self.buffers[it.src].role, Role::Param | Role::State);
        let mut kinds: Vec<(&str, usize)> = Vec::new();
        for it in self.sections.iter().flatten().filter(|it| it.stream() == stream) {
            let Instruction::Collective { kind, comm, parts, .. } = it else { continue };
            axes = self.comms[*comm];
            let what = match kind {
                CollectiveKind::AllGather if parts.iter().all(is_weight) => "all_gather of weights",
                _ => kind.name(),
            };
            match kinds.iter_mut().find(|it| it.0 == what) {
                Some((_, n)) => *n += 1,
                None => kinds.push((what, 1)),
            }
        }
        if kinds.is_empty() {
            return stream.to_string();
        }
        kinds.sort_by_key(|it| std::cmp::Reverse(it.1));
        let kinds: Vec<&str> = kinds.iter().map(|it| it.0).collect();
        let axes = self.mesh.in_user_axes(&self.mesh.names(axes), ", ");
        format!("{stream} {axes}: {}", kinds.join(", "))
    }

    /// Communicators over which ranks meet, in order.
    pub fn meeting_comms(&self) -> Vec<Comm> {
        let mut used = vec![false; self.comms.len()];
        for instruction in self.sections.iter().flatten() {
            if let Instruction::Collective { kind, comm, .. } = instruction
                && !kind.is_local()
                && self.mesh.set_size(self.comms[*comm]) > 1
            {
                used[comm.as_u32() as usize] = true;
            }
        }
        self.comms.keys().filter(|it| used[it.as_u32() as usize]).collect()
    }

    /// Layouts by which PyTorch labels buffers: those of parameters, and of the optimizer states that are laid out like
    /// their parameter. `None` where it is the buffer's own sharding.
    pub fn labels(&self) -> SecondaryMap<Buffer, Option<&Sharding>> {
        let mut res = SecondaryMap::new();
        self.params.iter().for_each(|it| res[it.buffer] = it.label.as_ref());
        for instruction in self.section(PlanSection::Update) {
            let Some(update) = update(instruction) else { continue };
            let sharding = |it: Buffer| &self.buffers[it].sharding;
            for (state, _) in update.states {
                if sharding(state) == sharding(update.param) {
                    res[state] = res[update.param];
                }
            }
        }
        res
    }

    /// The buffer of this name.
    pub fn buffer(&self, name: &str) -> Option<Buffer> {
        self.buffers.iter().find(|it| it.1.name == name).map(|it| it.0)
    }
}
