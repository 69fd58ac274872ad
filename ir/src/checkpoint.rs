//! `CheckpointLayout`: what of a plan's state is saved, under which keys, and which coordinate writes which part.
//!
//! A pure function of the plan and the order of its parameters; it does not grow with the mesh. Which state belongs to
//! which parameter, and what each group of parameters is trained with, is read off the optimizer's
//! instructions; names are never parsed. Keys are those of PyTorch's `get_state_dict`:
//!
//! ```text
//! model.<param>                     a master weight; other names of a tied one share its bytes
//! optim.state.<param>.exp_avg       what the optimizer of <param> works on besides it
//! planc.state.<buffer>              any other state: codes, scales, amax histories
//! planc.digest.model, .plan         digests of what saved it
//! ```
//!
//! Not saved is what is not needed: sums over micro-batches, which `update` leaves at zero, and weights
//! for computing that `prepare` makes by rounding a master weight.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::digest::Digest;
use crate::graph::Name;
use crate::placement::{AxisSet, Chunk, Coord, Mesh, Sharding};
use crate::plan::{Buffer, Buffers, Instruction, Plan, PlanSection, Role};
use crate::run::Run;
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointLayout {
    /// Where everything lives.
    pub mesh: Mesh,
    /// Parameters, then states.
    pub entries: Vec<Entry>,
    /// Parameters that are trained alike, as PyTorch groups them; none without an optimizer.
    pub groups: Vec<ParamGroup>,
    /// Data and schedule.
    pub run: Run,
    /// The digests of the plan that saves it and of its model; see [`CheckpointLayout::to_save`].
    pub digests: Option<Digests>,
    /// The data that the run reads, as the checkpoint describes it; who runs the plan fills it in.
    pub data: Option<String>,
}

/// Digests of the model and the plan that saved a checkpoint. They inform the user; any plan that fits may load it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digests {
    /// The digest of its model.
    pub model: Digest,
    /// The digest of its plan.
    pub plan: Digest,
}

/// A tensor that is saved.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its key.
    pub key: String,
    /// The key's parts, from which PyTorch makes nested dicts.
    pub path: Vec<String>,
    /// Other keys of the same bytes.
    pub aliases: Vec<(String, Vec<String>)>,
    /// Where its elements are.
    pub source: Source,
    /// Element type and global shape.
    pub ty: TensorType,
    /// Which elements a coordinate holds.
    pub sharding: Sharding,
    /// What it is.
    pub kind: Kind,
    /// Which of those that hold the same writes it; see [`Sharding::owns`].
    pub salt: u64,
}

/// Where the elements of an entry are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In a buffer of the plan.
    Buffer(Buffer),
    /// With what was loaded and the plan has no use for; counted from 0.
    Kept(usize),
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A master weight.
    Param,
    /// State of the optimizer.
    Optimizer {
        /// The parameter.
        param: Name,
        /// `exp_avg`.
        name: &'static str,
    },
    /// State of the optimizer of a parameter that this plan does not train.
    Kept,
    /// Any other state.
    State {
        /// Those with the same number are of use together only: codes and their scale.
        together: u32,
    },
}

/// Parameters that are trained with the same numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamGroup {
    /// How.
    pub optimizer: Optimizer,
    /// Their names, in the order of the plan.
    pub params: Vec<Name>,
}

/// An optimizer and its numbers, besides the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// Adam, with decay of the weight or in the gradient.
    Adam {
        /// Whether decay is decoupled from the gradient: AdamW.
        decoupled: bool,
        /// Decay rates of both moments.
        betas: (f64, f64),
        /// Added to the root of the second moment.
        eps: f64,
        /// Decay of the weight.
        weight_decay: f64,
    },
    /// Gradient descent.
    Sgd {
        /// Decay rate of the momentum buffer.
        momentum: f64,
        /// Decay of the weight.
        weight_decay: f64,
    },
}

/// A plan whose state cannot be saved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "state `{name}` is a partial value ({sharding}) between steps, which no checkpoint holds; reduce it \
     before the step ends"
)]
pub struct LayoutError {
    /// The buffer.
    pub name: Name,
    /// Its sharding.
    pub sharding: String,
}

/// An optimizer's instruction: what it trains, and the states it works on.
pub(crate) struct Update {
    pub(crate) param: Buffer,
    pub(crate) states: Vec<(Buffer, &'static str)>,
    pub(crate) grad: Buffer,
    /// The factor of gradients, and the condition of the update.
    pub(crate) scale_and_applied: [Buffer; 2],
    optimizer: Optimizer,
}

impl Entry {
    /// The boxes that this coordinate writes, in the order in which it holds them.
    pub fn chunks_written(&self, mesh: &Mesh, coord: &[u32]) -> Vec<Chunk> {
        match self.sharding.owns(coord, mesh, self.salt) {
            true => self.sharding.chunks(&self.ty.shape, mesh, coord),
            false => Vec::new(),
        }
    }

    /// The coordinates that write it, one for each shard.
    pub fn writers(&self, mesh: &Mesh) -> Vec<Coord> {
        let sharded = self.sharding.sharded_axes();
        let copies = mesh.all().minus(sharded);
        let origin = mesh.coord_of(0);
        let all: Vec<Coord> = mesh.group_of(copies, &origin).collect();
        let mut res: Vec<Coord> = mesh.group_of(sharded, &origin).collect();
        for (shard, coord) in res.iter_mut().enumerate() {
            let copy = &all[(self.salt as usize + shard) % all.len()];
            copies.iter().for_each(|it| coord[it.0 as usize] = copy[it.0 as usize]);
        }
        res
    }

    fn bytes(&self) -> u64 {
        self.ty.n_elements() * self.ty.dtype.bytes()
    }
}

/// About the bytes that an item of a file takes beside its data, which counts for the many numbers of optimizers.
const ITEM: u64 = 1024;

impl CheckpointLayout {
    /// What of `plan` is saved.
    pub fn of(plan: &Plan) -> Result<CheckpointLayout, LayoutError> {
        let updates: Vec<Update> =
            plan.section(PlanSection::Update).iter().filter_map(update).collect();
        let by_param: FxHashMap<Buffer, &Update> =
            updates.iter().map(|it| (it.param, it)).collect();
        let mut entries = Vec::new();
        let mut groups: Vec<ParamGroup> = Vec::new();
        for param in &plan.params {
            let name = &plan.buffers[param.buffer].name;
            let mut entry = entry(plan, param.buffer, &["model", name], Kind::Param);
            entry.aliases = param.aliases.iter().map(|it| key(&["model", it])).collect();
            entries.push(entry);
            let Some(update) = by_param.get(&param.buffer) else { continue };
            for &(state, what) in &update.states {
                let kind = Kind::Optimizer { param: name.clone(), name: what };
                entries.push(self::entry(plan, state, &["optim", "state", name, what], kind));
            }
            let group = groups.iter_mut().find(|it| it.optimizer == update.optimizer);
            match group {
                Some(it) => it.params.push(name.clone()),
                None => groups
                    .push(ParamGroup { optimizer: update.optimizer, params: vec![name.clone()] }),
            }
        }
        let mut left_out = not_saved(plan);
        left_out.extend(updates.iter().flat_map(|it| it.states.iter().map(|it| it.0)));
        let together = together(plan);
        for (buffer, data) in plan.buffers.iter() {
            if data.role == Role::State && !left_out.contains(&buffer) {
                let kind = Kind::State { together: together[&buffer] };
                entries.push(entry(plan, buffer, &["planc", "state", &data.name], kind));
            }
        }
        if let Some(it) = entries.iter().find(|it| it.sharding.partial.is_some()) {
            let sharding = it.sharding.display(&plan.mesh).to_string();
            return Err(LayoutError { name: it.key.clone(), sharding });
        }
        let mut res = CheckpointLayout {
            mesh: plan.mesh.clone(),
            entries,
            groups,
            run: plan.run.clone(),
            digests: None,
            data: None,
        };
        res.balance();
        Ok(res)
    }

    /// The layout of a checkpoint that `plan` saves, with digests of the plan and its model.
    pub fn to_save(plan: &Plan) -> Result<CheckpointLayout, LayoutError> {
        let digests = plan.model.map(|model| Digests { model, plan: Digest::of_plan(plan) });
        Ok(CheckpointLayout { digests, ..CheckpointLayout::of(plan)? })
    }

    /// Adds a tensor that the plan has no use for, to be saved again; its number.
    pub fn keep(&mut self, path: Vec<String>, ty: TensorType, sharding: Sharding) -> usize {
        let kept = self.entries.iter().filter(|it| it.kind == Kind::Kept).count();
        let (source, key) = (Source::Kept(kept), path.join("."));
        let (kind, aliases, salt) = (Kind::Kept, Vec::new(), 0);
        self.entries.push(Entry { key, path, aliases, source, ty, sharding, kind, salt });
        self.balance();
        kept
    }

    /// Chooses who writes what: of each kind of copies, the largest first, to those that write least.
    fn balance(&mut self) {
        let CheckpointLayout { mesh, entries, .. } = self;
        let mut by_axes: BTreeMap<AxisSet, Vec<usize>> = BTreeMap::new();
        for (i, entry) in entries.iter().enumerate() {
            by_axes.entry(entry.sharding.sharded_axes()).or_default().push(i);
        }
        for (sharded, mut members) in by_axes {
            let copies = mesh.set_size(mesh.all().minus(sharded));
            members.sort_by_key(|&it| Reverse(entries[it].bytes()));
            let mut loads: BinaryHeap<Reverse<(u64, u64)>> =
                (0..copies.min(members.len() as u64)).map(|it| Reverse((0, it))).collect();
            for member in members {
                let Reverse((load, salt)) = loads.pop().expect("there is a copy");
                entries[member].salt = salt;
                loads.push(Reverse((load + entries[member].bytes() + ITEM, salt)));
            }
        }
    }
}

fn entry(plan: &Plan, buffer: Buffer, path: &[&str], kind: Kind) -> Entry {
    let data = &plan.buffers[buffer];
    let (key, path) = key(path);
    Entry {
        key,
        path,
        aliases: Vec::new(),
        source: Source::Buffer(buffer),
        ty: data.ty.clone(),
        sharding: data.sharding.clone(),
        kind,
        salt: 0,
    }
}

fn key(path: &[&str]) -> (String, Vec<String>) {
    (path.join("."), path.iter().map(|it| it.to_string()).collect())
}

/// What an instruction trains, if it is an optimizer's.
pub(crate) fn update(instruction: &Instruction) -> Option<Update> {
    let Instruction::Compute { op, args, .. } = instruction else { return None };
    let trains = op.trains()?;
    let states = args[1..].iter().copied().zip(trains.states.iter().copied()).collect();
    let (grad, optimizer) = (trains.grad(), trains.optimizer);
    let scale_and_applied = [args[grad + 1], args[grad + 3]];
    Some(Update { param: args[0], states, grad: args[grad], scale_and_applied, optimizer })
}

/// States that a step ends with at zero, and roundings of master weights.
fn not_saved(plan: &Plan) -> FxHashSet<Buffer> {
    let mut res: FxHashSet<Buffer> = FxHashSet::default();
    for instruction in plan.section(PlanSection::Update) {
        let reads = instruction.reads();
        for (i, buffer) in instruction.writes().into_iter().enumerate() {
            let zero = match instruction {
                Instruction::Compute { op, .. } => op.is_zero(),
                // Zeros are zeros wherever they are moved, and however they are reduced.
                Instruction::Collective { parts, .. } => res.contains(&reads[i]) && !parts[i].adds,
                Instruction::Copy { .. } => res.contains(&reads[i]),
                Instruction::Record { .. } | Instruction::Wait { .. } => false,
            };
            // The last that writes it counts.
            if zero {
                res.insert(buffer);
            } else {
                res.remove(&buffer);
            }
        }
    }
    for instruction in plan.section(PlanSection::Prepare) {
        if let Instruction::Compute { op, args, results, .. } = instruction
            && op.casts_to().is_some()
            && plan.buffers[args[0]].role == Role::Param
        {
            res.extend(results.iter().copied());
        }
    }
    res
}

/// A number for each state, the same for those that are of use together only: what `prepare` makes of
/// one weight, and a history and the scale that is made of it.
fn together(plan: &Plan) -> FxHashMap<Buffer, u32> {
    let mut sets = Sets::default();
    for (args, results) in delayed_updates(plan) {
        sets.join(plan, args.iter().chain(results));
    }
    for instruction in plan.section(PlanSection::Prepare) {
        match instruction {
            // Parts of a collective have nothing to do with each other.
            Instruction::Collective { parts, .. } => {
                parts.iter().for_each(|it| sets.join(plan, [&it.src, &it.dst]));
            }
            Instruction::Compute { .. }
            | Instruction::Copy { .. }
            | Instruction::Record { .. }
            | Instruction::Wait { .. } => {
                let (reads, writes): (Buffers, Buffers) =
                    (instruction.reads(), instruction.writes());
                sets.join(plan, reads.iter().chain(&writes));
            }
        }
    }
    let mut numbers: FxHashMap<Buffer, u32> = FxHashMap::default();
    let states = plan.buffers.iter().filter(|it| it.1.role == Role::State);
    let mut res = FxHashMap::default();
    for (buffer, _) in states {
        let next = numbers.len() as u32;
        res.insert(buffer, *numbers.entry(sets.root(buffer)).or_insert(next));
    }
    res
}

/// Operands and results of the instructions that take an amax into a history.
fn delayed_updates(plan: &Plan) -> impl Iterator<Item = (&Buffers, &Buffers)> {
    plan.timeline(&PlanSection::ALL).filter_map(|(_, it)| match it {
        Instruction::Compute { op, args, results, .. } if op.history().is_some() => {
            Some((args, results))
        }
        _ => None,
    })
}

/// States that follow the amaxes of each step under delayed scaling: histories, and scales that are made of them.
pub fn histories(plan: &Plan) -> Vec<Buffer> {
    let mut res: Vec<Buffer> = delayed_updates(plan)
        .flat_map(|it| it.0)
        .copied()
        .filter(|&it| plan.buffers[it].role == Role::State)
        .collect();
    res.sort();
    res.dedup();
    res
}

/// Disjoint sets of buffers.
#[derive(Default)]
struct Sets(FxHashMap<Buffer, Buffer>);

impl Sets {
    fn root(&mut self, mut it: Buffer) -> Buffer {
        while let Some(&parent) = self.0.get(&it) {
            if let Some(&above) = self.0.get(&parent) {
                self.0.insert(it, above);
            }
            it = parent;
        }
        it
    }

    fn join<'a>(&mut self, plan: &Plan, buffers: impl IntoIterator<Item = &'a Buffer>) {
        let mut first = None;
        for &buffer in buffers {
            if plan.buffers[buffer].role == Role::Input {
                continue;
            }
            let root = self.root(buffer);
            let first = *first.get_or_insert(root);
            if first != root {
                self.0.insert(root, first);
            }
        }
    }
}
