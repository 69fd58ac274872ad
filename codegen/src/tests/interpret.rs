//! What programs compute, symbolically: a tensor is a hash of how it was made.
//!
//! A graph is run as its sections say, a plan by buffer in issue order, or by byte with streams that run
//! at random speeds. All three must leave the same states.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ir::graph::{Def, Name};
use ir::ops::Collective;
use ir::plan::{ALIGN, Arena, Buffer, Instruction, Plan, PlanSection, Role};
use ir::{Graph, Op, Section, Value};

/// States and parameters at the end, by name.
pub(super) type Outcome = BTreeMap<Name, u64>;

const STEPS: u64 = 2;
const MICRO_BATCHES: u64 = 2;

fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// What an op makes; parts of a collective are apart from each other.
fn result(op: &Op, inputs: &[u64], index: usize) -> u64 {
    match op {
        Op::Collective(_) => hash((op, inputs[index])),
        _ => hash((op, inputs, index)),
    }
}

/// The sections in running order, with `step` for any micro-batch, each with a seed for its inputs.
fn sections() -> Vec<(PlanSection, u64)> {
    let mut res = vec![(PlanSection::Prepare, 0)];
    for step in 0..STEPS {
        res.extend((0..MICRO_BATCHES).map(|it| (PlanSection::Step, step * MICRO_BATCHES + it)));
        res.push((PlanSection::Update, step * MICRO_BATCHES + MICRO_BATCHES - 1));
    }
    res
}

pub(super) fn graph(graph: &Graph) -> Outcome {
    let mut env: BTreeMap<Value, u64> = BTreeMap::new();
    let leaves = || graph.values.iter().filter(|it| !matches!(it.1.def, Def::Result { .. }));
    leaves().for_each(|(value, data)| _ = env.insert(value, hash(&data.name)));
    for (section, time) in sections() {
        for (value, data) in leaves().filter(|it| it.1.def == Def::Input) {
            env.insert(value, hash((&data.name, time)));
        }
        let sections: &[Section] = match section {
            PlanSection::Prepare => &[Section::Prepare],
            PlanSection::First | PlanSection::Step | PlanSection::Last => {
                &[Section::Forward, Section::Backward]
            }
            PlanSection::Update => &[Section::Update],
        };
        for &section in sections {
            let nodes = graph.order.iter().map(|&it| &graph.nodes[it]);
            for node in nodes.filter(|it| it.section == section) {
                let inputs: Vec<u64> = node.inputs.iter().map(|it| env[it]).collect();
                for (i, &value) in node.results.iter().enumerate() {
                    env.insert(value, result(&node.op, &inputs, i));
                }
            }
            let stores = graph.stores.iter().filter(|it| it.section == section);
            let new: Vec<(Value, u64)> = stores.map(|it| (it.state, env[&it.value])).collect();
            env.extend(new);
        }
    }
    let mut res = Outcome::new();
    for (value, data) in leaves().filter(|it| it.1.def != Def::Input) {
        res.insert(data.name.clone(), env[&value]);
    }
    for (name, value) in &graph.results {
        res.insert(format!("result {name}"), env[value]);
    }
    res
}

/// Where a plan keeps its data.
pub(super) trait Memory {
    fn read(&self, plan: &Plan, buffer: Buffer) -> u64;
    fn write(&mut self, plan: &Plan, buffer: Buffer, content: u64);
}

/// One number for each buffer.
#[derive(Default)]
pub(super) struct ByBuffer(BTreeMap<Buffer, u64>);

impl Memory for ByBuffer {
    fn read(&self, _plan: &Plan, buffer: Buffer) -> u64 {
        self.0.get(&buffer).copied().unwrap_or(0)
    }

    fn write(&mut self, _plan: &Plan, buffer: Buffer, content: u64) {
        self.0.insert(buffer, content);
    }
}

/// One number for each aligned piece of the arenas.
#[derive(Default)]
pub(super) struct ByByte(BTreeMap<(bool, u64), u64>);

fn pieces(plan: &Plan, buffer: Buffer) -> impl Iterator<Item = (bool, u64)> {
    let start = plan.buffers[buffer].offset.expect("it is planned");
    let end = start + plan.local_bytes(buffer);
    let step = plan.buffers[buffer].role.arena() == Arena::Step;
    (start..end).step_by(ALIGN as usize).map(move |it| (step, it))
}

impl Memory for ByByte {
    fn read(&self, plan: &Plan, buffer: Buffer) -> u64 {
        let mut held: Vec<u64> =
            pieces(plan, buffer).map(|it| self.0.get(&it).copied().unwrap_or(0)).collect();
        held.dedup();
        if held.len() == 1 { held[0] } else { hash(held) }
    }

    fn write(&mut self, plan: &Plan, buffer: Buffer, content: u64) {
        pieces(plan, buffer).for_each(|it| _ = self.0.insert(it, content));
    }
}

/// Runs a plan; `pick(n)` is below `n` and says which of the streams that can go on does.
pub(super) fn plan(
    plan: &Plan,
    mut memory: impl Memory,
    mut pick: impl FnMut(usize) -> usize,
) -> Outcome {
    let of_role = |roles: &[Role]| -> Vec<Buffer> {
        plan.buffers.iter().filter(|it| roles.contains(&it.1.role)).map(|it| it.0).collect()
    };
    let inputs = of_role(&[Role::Input]);
    for buffer in of_role(&[Role::Param, Role::State]) {
        memory.write(plan, buffer, hash(&plan.buffers[buffer].name));
    }
    for (section, time) in sections() {
        for &buffer in &inputs {
            memory.write(plan, buffer, hash((&plan.buffers[buffer].name, time)));
        }
        let section = match section {
            PlanSection::Step => plan.micro_batch((time % MICRO_BATCHES) as u32),
            other => other,
        };
        let mut queues: BTreeMap<_, Vec<&Instruction>> = BTreeMap::new();
        for instruction in plan.section(section).iter().rev() {
            queues.entry(instruction.stream()).or_default().push(instruction);
        }
        let mut recorded = vec![false; plan.events as usize];
        while !queues.is_empty() {
            let can_go_on: Vec<_> = queues
                .iter()
                .filter(|it| match it.1.last() {
                    Some(Instruction::Wait { event, .. }) => recorded[event.as_u32() as usize],
                    _ => true,
                })
                .map(|it| *it.0)
                .collect();
            let stream = can_go_on[pick(can_go_on.len())];
            let Some(instruction) = queues.get_mut(&stream).and_then(|it| it.pop()) else {
                queues.remove(&stream);
                continue;
            };
            if let Instruction::Record { event, .. } = instruction {
                recorded[event.as_u32() as usize] = true;
            }
            execute(plan, instruction, &mut memory);
        }
    }
    let mut res = Outcome::new();
    for buffer in of_role(&[Role::Param, Role::State]) {
        res.insert(plan.buffers[buffer].name.clone(), memory.read(plan, buffer));
    }
    for (name, buffer) in &plan.results {
        res.insert(format!("result {name}"), memory.read(plan, *buffer));
    }
    res
}

fn execute(plan: &Plan, instruction: &Instruction, memory: &mut impl Memory) {
    let inputs: Vec<u64> = instruction.reads().iter().map(|&it| memory.read(plan, it)).collect();
    for (i, &buffer) in instruction.writes().iter().enumerate() {
        let content = match instruction {
            Instruction::Compute { op, .. } => result(op, &inputs, i),
            Instruction::Collective { kind, comm, .. } => {
                result(&Collective { kind: *kind, axes: plan.comms[*comm] }.into(), &inputs, i)
            }
            Instruction::Copy { .. } => inputs[i],
            Instruction::Record { .. } | Instruction::Wait { .. } => unreachable!("writes nothing"),
        };
        memory.write(plan, buffer, content);
    }
}

/// Whether a plan is sound, decided slowly: all orders that streams allow, pair by pair.
pub(super) fn is_sound(plan: &Plan) -> bool {
    let mut tenant: BTreeMap<(bool, u64), Buffer> = BTreeMap::new();
    let sections = PlanSection::ALL.into_iter().all(|section| {
        let instructions = plan.section(section);
        let before = happens_before(instructions);
        let carries = section.finds_carried(|it| !plan.section(it).is_empty());
        tenant.retain(|_, it| carries && plan.buffers[*it].role == Role::Carried);
        reads_what_it_means(plan, instructions, &mut tenant)
            && (0..instructions.len()).all(|then| {
                (0..then).all(|first| {
                    before[then][first]
                        || !conflict(plan, &instructions[first], &instructions[then])
                })
            })
    });
    let held = |it: Buffer| pieces(plan, it).all(|piece| tenant.get(&piece) == Some(&it));
    sections && plan.results.iter().all(|it| held(it.1))
}

/// For each instruction, those that are over when it starts.
fn happens_before(instructions: &[Instruction]) -> Vec<Vec<bool>> {
    let mut res: Vec<Vec<bool>> = Vec::new();
    for (then, instruction) in instructions.iter().enumerate() {
        let mut row = vec![false; instructions.len()];
        for first in 0..then {
            let same_stream = instructions[first].stream() == instruction.stream();
            let event = matches!((&instructions[first], instruction),
                (Instruction::Record { event: a, .. }, Instruction::Wait { event: b, .. }) if a == b);
            if same_stream || event {
                row[first] = true;
                row.iter_mut().zip(&res[first]).for_each(|(a, &b)| *a |= b);
            }
        }
        res.push(row);
    }
    res
}

/// Whether both touch the same bytes, one of them writing.
fn conflict(plan: &Plan, a: &Instruction, b: &Instruction) -> bool {
    let overlap = |a: &[Buffer], b: &[Buffer]| {
        a.iter().any(|&a| {
            b.iter().any(|&b| pieces(plan, a).any(|it| pieces(plan, b).any(|other| it == other)))
        })
    };
    let (a, b) = ([a.reads(), a.writes()], [b.reads(), b.writes()]);
    overlap(&a[0], &b[1]) || overlap(&a[1], &b[0]) || overlap(&a[1], &b[1])
}

/// Whether, in issue order, every byte read was last written for the buffer that is read.
fn reads_what_it_means(
    plan: &Plan,
    instructions: &[Instruction],
    tenant: &mut BTreeMap<(bool, u64), Buffer>,
) -> bool {
    for (buffer, data) in &plan.buffers {
        if matches!(data.role, Role::Param | Role::State | Role::Input) {
            pieces(plan, buffer).for_each(|it| _ = tenant.insert(it, buffer));
        }
    }
    for instruction in instructions {
        let held = |it: Buffer| pieces(plan, it).all(|piece| tenant.get(&piece) == Some(&it));
        if !instruction.reads().iter().all(|&it| held(it)) {
            return false;
        }
        for buffer in instruction.writes() {
            pieces(plan, buffer).for_each(|it| _ = tenant.insert(it, buffer));
        }
        let held = |it: Buffer| pieces(plan, it).all(|piece| tenant.get(&piece) == Some(&it));
        let taken_over = |it: Buffer| match instruction {
            Instruction::Compute { op, args, results, .. } => op.in_place().iter().any(|pair| {
                let same = pieces(plan, results[pair.0]).eq(pieces(plan, it));
                args[pair.1] == it && same && args.iter().filter(|&&arg| arg == it).count() == 1
            }),
            _ => false,
        };
        // What was written is there, and what was read is gone only where the op says so.
        if !instruction.writes().iter().all(|&it| held(it))
            || !instruction.reads().iter().all(|&it| held(it) || taken_over(it))
        {
            return false;
        }
    }
    true
}
