//! `Meaning`: what a plan does, without how it is written down.
//!
//! Numbers of buffers, events, streams and communicators, offsets, and the order in which instructions of
//! different streams are listed are gone; names of values, and who waits for whom, remain. [`diff`]
//! compares two of them. Its records fold what repeated layers have in common, so that the meaning of a
//! plan of any depth is a file for people to read and to keep:
//!
//! ```text
//! model.layers.0.mlp.act = glu of model.layers.0.mlp.gate, model.layers.0.mlp.up
//! model.layers.1.mlp.act = glu of model.layers.1.mlp.gate, model.layers.1.mlp.up
//!   ->
//! model.layers.{i}.mlp.act = glu of model.layers.{i}.mlp.gate, model.layers.{i}.mlp.up     i = 0..1
//! ```

mod diff;
mod fold;
mod order;
#[cfg(test)]
mod tests;

use cranelift_entity::{EntityRef, SecondaryMap};
use serde::{Deserialize, Serialize};

use crate::Op;
use crate::graph::{Init, Name};
use crate::placement::{AxisSet, Mesh};
use crate::plan::{
    Buffer, Clock, Clocks, Instruction, Plan, PlanSection, Role, StreamKind, memory_profile,
};
use crate::run::Run;
use crate::summary::traffic;
use crate::types::DType;

pub use diff::{Area, Change, Diff, Subject, Total, TotalChange, diff};
pub use fold::{Folded, Layers, Named, layer, runs};

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Meaning {
    /// What is said once.
    pub program: Program,
    /// What is in memory, each tensor once.
    pub tensors: Vec<Tensor>,
    /// What is run, without events.
    pub calls: Vec<Call>,
    /// Tensors of the step's arena that are live at the peak, with their bytes.
    pub held: Vec<Held>,
}

/// What a plan says once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// The model's name.
    pub name: Name,
    /// The user's mesh.
    pub mesh: Vec<(Name, u32)>,
    /// The number of micro-batches before `update`.
    pub micro_batches: u32,
    /// Data, schedule of the learning rate, seed.
    pub run: Run,
    /// Names of results, and the tensors that hold them.
    pub results: Vec<(Name, Name)>,
    /// Bytes that survive a step.
    pub persistent_bytes: u64,
    /// Bytes of the arena of a step.
    pub step_bytes: u64,
    /// Bytes of scratch on a GPU.
    pub workspace_bytes: u64,
    /// The instruction at which most is live: its section, what it runs and what it makes.
    pub peak: Option<(PlanSection, String, Name)>,
}

/// One buffer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tensor {
    /// The value that it holds.
    pub name: Name,
    /// What it is for.
    pub role: Role,
    /// Element type.
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Where its elements live, in the user's axes.
    pub sharding: String,
    /// Bytes on each rank.
    pub bytes: u64,
    /// How a parameter starts, as RON.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub init: String,
    /// Other names of a parameter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<Name>,
}

/// One instruction that runs something.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Call {
    /// When.
    pub section: PlanSection,
    /// What.
    pub does: Does,
    /// Names of operands.
    pub args: Vec<Name>,
    /// How often its section has written each operand anew before; empty if none has been. What a temporary
    /// is made by is not counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rewritten: Vec<u32>,
    /// Names of results.
    pub results: Vec<Name>,
    /// Of a collective between ranks: [`traffic`] of one call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<(u64, u64)>,
    /// Of a collective on a stream of its own: the last instructions of other streams that it waits for,
    /// named after what they make. Empty: it starts with its section, or right behind the one before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<Name>,
    /// The first instruction of the compute stream that waits for it; none waits in its section if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Name>,
    /// The instruction ahead of it on its stream, in its section.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behind: Option<Name>,
}

/// What an instruction does.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Does {
    /// An op with its attributes, those that mention sizes on global shapes.
    Op(String),
    /// Values stay as they are, on other ranks or in another buffer.
    Move {
        /// `all_gather`, `slice`, `copy`, ...
        how: String,
        /// The user's axes, or parts of them.
        over: String,
    },
    /// Partial values become one; one is added to each other part by part.
    Reduce {
        /// `all_reduce` or `reduce_scatter`.
        how: String,
        /// `sum`, `max`, ...
        with: String,
        /// The user's axes, or parts of them.
        over: String,
        /// The type in which it happens.
        dtype: DType,
    },
}

/// A tensor that is live at the peak.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Held {
    /// Its name.
    pub name: Name,
    /// Bytes on each rank.
    pub bytes: u64,
}

/// A line of the file that keeps a [`Meaning`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Record {
    /// The first line.
    Program(Program),
    /// A tensor of some layers, or of none.
    Tensor(Folded<Tensor>),
    /// An instruction of some layers, or of none.
    Call(Folded<Call>),
    /// A tensor at the peak.
    Peak(Folded<Held>),
}

impl Call {
    /// `, operand 2 as written anew`, where the order of reads and writes of one tensor matters.
    fn rewritten_text(&self, args: std::ops::Range<usize>) -> String {
        let text = |arg: usize| match self.rewritten.get(arg).copied().unwrap_or(0) {
            0 => String::new(),
            1 => format!(", operand {} as written anew", arg + 1),
            n => format!(", operand {} as written {n} times", arg + 1),
        };
        args.map(text).collect()
    }
}

impl Does {
    /// `matmul(transpose_b:true)`, `all_gather over dp`, `all_reduce(sum) over tp in f32`.
    pub fn text(&self) -> String {
        match self {
            Does::Op(op) => op.clone(),
            Does::Move { how, over } if over.is_empty() => how.clone(),
            Does::Move { how, over } => format!("{how} over {over}"),
            Does::Reduce { how, with, over, dtype } => {
                format!("{how}({with}) over {over} in {dtype}")
            }
        }
    }
}

impl Meaning {
    /// What a plan does.
    pub fn of(plan: &Plan) -> Meaning {
        let profile = memory_profile(plan);
        let label = |(section, index): (PlanSection, usize)| {
            let instruction = &plan.section(section)[index];
            (section, instruction.name().to_string(), made_by(plan, instruction))
        };
        let held = profile.peak.map_or(Vec::new(), |at| plan.live_at(at));
        let held = held
            .into_iter()
            .map(|it| Held { name: plan.buffers[it].name.clone(), bytes: plan.local_bytes(it) });
        let axes = plan.mesh.user_axes();
        Meaning {
            program: Program {
                name: plan.name.clone(),
                mesh: axes.iter().map(|it| (it.0.to_string(), it.1)).collect(),
                micro_batches: plan.micro_batches,
                run: plan.run.clone(),
                results: plan
                    .results
                    .iter()
                    .map(|(name, buffer)| (name.clone(), plan.buffers[*buffer].name.clone()))
                    .collect(),
                persistent_bytes: plan.persistent_bytes,
                step_bytes: plan.step_bytes,
                workspace_bytes: profile.workspace_bytes,
                peak: profile.peak.map(label),
            },
            tensors: tensors(plan),
            calls: PlanSection::ALL.into_iter().flat_map(|it| calls(plan, it)).collect(),
            held: held.collect(),
        }
    }

    /// The lines of its file.
    pub fn records(&self) -> Vec<Record> {
        let mut res = vec![Record::Program(self.program.clone())];
        res.extend(fold::fold(&self.tensors).into_iter().map(Record::Tensor));
        res.extend(fold::fold(&self.calls).into_iter().map(Record::Call));
        res.extend(fold::fold(&self.held).into_iter().map(Record::Peak));
        res
    }

    /// The inverse of [`Meaning::records`], but for the order; `None` if the first line is none of a
    /// program.
    pub fn from_records(records: Vec<Record>) -> Option<Meaning> {
        let mut records = records.into_iter();
        let Some(Record::Program(program)) = records.next() else { return None };
        let mut res = Meaning { program, tensors: Vec::new(), calls: Vec::new(), held: Vec::new() };
        for record in records {
            match record {
                Record::Program(_) => return None,
                Record::Tensor(it) => res.tensors.extend(it.unfolded()),
                Record::Call(it) => res.calls.extend(it.unfolded()),
                Record::Peak(it) => res.held.extend(it.unfolded()),
            }
        }
        Some(res)
    }
}

fn tensors(plan: &Plan) -> Vec<Tensor> {
    let mut res: Vec<Tensor> = plan
        .buffers
        .iter()
        .map(|(buffer, data)| {
            let sharding = data.sharding.display(&plan.mesh).to_string();
            let sharding = plan.mesh.in_user_axes(&sharding, ".");
            Tensor {
                name: data.name.clone(),
                role: data.role,
                dtype: data.ty.dtype,
                shape: data.ty.shape.to_vec(),
                sharding: plan.mesh.in_user_axes(&sharding, ", "),
                bytes: plan.local_bytes(buffer),
                init: String::new(),
                aliases: Vec::new(),
            }
        })
        .collect();
    for param in &plan.params {
        let tensor = &mut res[param.buffer.index()];
        tensor.init = init_text(&param.init);
        tensor.aliases = param.aliases.clone();
    }
    res
}

fn init_text(init: &Init) -> String {
    ron::to_string(init).expect("numbers have a text")
}

fn over(mesh: &Mesh, axes: AxisSet) -> String {
    mesh.in_user_axes(&mesh.names(axes), ", ")
}

/// The name of an instruction: the first thing that it makes.
fn made_by(plan: &Plan, instruction: &Instruction) -> Name {
    instruction.writes().first().map_or(Name::new(), |&it| plan.buffers[it].name.clone())
}

fn does(plan: &Plan, instruction: &Instruction) -> Option<Does> {
    Some(match instruction {
        Instruction::Compute { op, results, .. } => {
            let shapes: Vec<&[u64]> =
                results.iter().map(|&it| &plan.buffers[it].ty.shape[..]).collect();
            let mut op = op.localize(&shapes).unwrap_or_else(|| op.clone());
            // Whether ranks hold equal numbers of blocks is a matter of placement.
            if let Op::QuantizeBlock(it) = &mut op {
                it.uneven = false;
            }
            Does::Op(op.to_text())
        }
        Instruction::Copy { .. } => Does::Move { how: "copy".to_string(), over: String::new() },
        Instruction::Collective { kind, comm, parts, .. } => {
            let onto = if parts.iter().any(|it| it.adds) { " onto a sum" } else { "" };
            let how = format!("{}{onto}", kind.name());
            let over = over(&plan.mesh, plan.comms[*comm]);
            match kind.reduces() {
                Some(with) => {
                    let dtype =
                        parts.first().map_or(DType::F32, |it| plan.buffers[it.src].ty.dtype);
                    Does::Reduce { how, with: with.name().to_string(), over, dtype }
                }
                None => Does::Move { how, over },
            }
        }
        Instruction::Record { .. } | Instruction::Wait { .. } => return None,
    })
}

/// The instructions of a section, with what they wait for.
fn calls(plan: &Plan, section: PlanSection) -> Vec<Call> {
    /// What has been given to a stream: the call, and what was known to be over when it starts.
    struct Given {
        call: usize,
        start: Clock,
    }
    let n_streams = plan.streams.len();
    let mut clocks = Clocks::new(n_streams, plan.events);
    let mut given: Vec<Vec<Given>> = (0..n_streams).map(|_| Vec::new()).collect();
    // Up to which time the compute stream knows of each other.
    let mut known = vec![0; n_streams];
    let mut res: Vec<Call> = Vec::new();
    let mut writes: SecondaryMap<Buffer, u32> = SecondaryMap::new();
    for instruction in plan.section(section) {
        let stream = instruction.stream();
        match instruction {
            Instruction::Record { event, .. } => {
                clocks.record(*event, stream);
            }
            Instruction::Wait { event, .. } => {
                clocks.wait(*event, stream);
            }
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. } => (),
        }
        let Some(does) = does(plan, instruction) else { continue };
        let names = |it: &[Buffer]| -> Vec<Name> {
            it.iter().map(|&it| plan.buffers[it].name.clone()).collect()
        };
        let bytes = match instruction {
            Instruction::Collective { kind, comm, parts, .. } if !kind.is_local() => {
                Some(traffic(plan, *kind, plan.comms[*comm], parts))
            }
            _ => None,
        };
        let rewritten: Vec<u32> = instruction
            .reads()
            .iter()
            .map(|&it| match plan.buffers[it].role {
                Role::Param | Role::State | Role::Input => writes[it],
                Role::Carried | Role::Temp => writes[it].saturating_sub(1),
            })
            .collect();
        instruction.writes().iter().for_each(|&it| writes[it] += 1);
        let start = clocks.of(stream).clone();
        let index = stream.index();
        let mut call = Call {
            section,
            does,
            args: names(&instruction.reads()),
            rewritten: if rewritten.iter().all(|&it| it == 0) { Vec::new() } else { rewritten },
            results: names(&instruction.writes()),
            bytes,
            after: Vec::new(),
            before: None,
            behind: given[index].last().map(|it| res[it.call].results[0].clone()),
        };
        if plan.streams[stream].kind == StreamKind::Comm {
            let last = given[index].last();
            // What is new to this stream, but for what follows from something else that is.
            let news: Vec<(usize, usize)> = (0..n_streams)
                .filter(|&it| it != index && start[it] > last.map_or(0, |last| last.start[it]))
                .map(|it| (it, start[it] as usize))
                .collect();
            let follows = |&(stream, time): &(usize, usize)| {
                let others = news.iter().filter(|it| it.0 != stream);
                let mut starts = others.map(|it| &given[it.0][it.1 - 1].start);
                starts.any(|it| it[stream] as usize >= time)
            };
            let news = news.iter().filter(|it| !follows(it));
            call.after =
                news.map(|it| res[given[it.0][it.1 - 1].call].results[0].clone()).collect();
            call.after.sort();
        } else if index == 0 {
            for (other, known) in known.iter_mut().enumerate().skip(1) {
                let waited = given[other].iter().take(start[other] as usize).skip(*known);
                for it in waited {
                    res[it.call].before = call.results.first().cloned();
                }
                *known = start[other] as usize;
            }
        }
        clocks.run(stream);
        given[index].push(Given { call: res.len(), start });
        res.push(call);
    }
    res
}
