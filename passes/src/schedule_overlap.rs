//! `schedule-overlap`: lets communication run while the rank computes.
//!
//! Collectives move to a stream of their communicator, and the program is issued in a new order:
//!
//! ```text
//! before                            after
//! s0: %w0.full = all_gather %w0     s1: %w0.full = all_gather %w0
//! s0: %h0 = matmul %x, %w0.full     s1: %w1.full = all_gather %w1      while s0 uses %w0.full
//! s0: %w1.full = all_gather %w1     s0: %h0 = matmul %x, %w0.full
//! s0: %h1 = matmul %h0, %w1.full    s0: %h1 = matmul %h0, %w1.full
//! ```
//!
//! * A gather of what is there from the start (weights) is issued where its unit's work is `prefetch_forward`
//!   units ahead, and no earlier, so that gathered weights do not pile up; what is gathered a second time,
//!   `prefetch_backward` units ahead. A unit that keeps its weights for the backward pass counts again where
//!   one of them is read again.
//! * It goes before a reduction that is ready at the same point: more waits for it.
//! * Another gather may be issued before the first use of the collective ahead of it.
//! * A reduction is issued as soon as its operands are there. What only serves to store a result (a
//!   cast, an accumulation) is issued when that is there, and the result of a reduction is taken to be
//!   when `in_flight` more of them have been issued. That late the compute stream waits for it, also
//!   where nothing reads it yet, to know that its operands' memory is free; so the gradients of all units
//!   are not kept until the end.
//! * A collective starts when everything that was issued to the compute stream before it is done: what
//!   a unit no longer needs is then free for the weights of the next but one.
//!
//! The order is a walk of the dependency graph by these wishes. Events are then recorded only where a
//! vector clock shows that one stream does not know of the other yet.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use cranelift_entity::{EntityRef, SecondaryMap};
use ir::Phase;
use ir::ops::CollectiveKind;
use ir::plan::{
    Buffer, Clocks, Comm, Event, Instruction, Part, Plan, PlanSection, Stream, StreamKind,
};
use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
#[derive(Debug, Clone, Copy)]
pub struct ScheduleOverlap {
    /// How many gathers are issued before the first of them is used. 0: none is issued early.
    pub prefetch_forward: usize,
    /// The same for what is gathered again for the backward pass.
    pub prefetch_backward: usize,
    /// How many reductions are issued before the result of the first of them is used.
    pub in_flight: usize,
}

impl Default for ScheduleOverlap {
    fn default() -> ScheduleOverlap {
        ScheduleOverlap { prefetch_forward: 1, prefetch_backward: 1, in_flight: 1 }
    }
}

impl Pass<Plan> for ScheduleOverlap {
    fn name(&self) -> &'static str {
        "schedule-overlap"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Lowered, Phase::Scheduled)
    }

    fn run(&self, plan: &mut Plan) -> Result<(), PassError> {
        assign_streams(plan);
        for section in PlanSection::ALL {
            let instructions = std::mem::take(&mut plan.sections[section as usize]);
            let dependencies = dependencies(&instructions);
            let order = self.order(&instructions, &dependencies);
            plan.sections[section as usize] =
                issue(plan, instructions, &dependencies, &order, self.in_flight);
        }
        plan.phase = Phase::Scheduled;
        Ok(())
    }
}

/// Gives each communicator that moves data a stream, and its collectives to that.
fn assign_streams(plan: &mut Plan) {
    let mut of: SecondaryMap<Comm, Option<Stream>> = SecondaryMap::new();
    let collectives = plan.sections.iter().flatten().filter_map(comm);
    let mut comms: Vec<Comm> = collectives.collect();
    comms.sort();
    comms.dedup();
    for comm in comms {
        of[comm] = Some(plan.streams.push(StreamKind::Comm.into()));
    }
    for instruction in plan.sections.iter_mut().flatten() {
        let comm = comm(instruction);
        if let Instruction::Collective { stream, .. } = instruction {
            *stream = comm.and_then(|it| of[it]).unwrap_or(*stream);
        }
    }
}

fn reduces(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Collective { kind, .. } if kind.reduce().is_some())
}

/// The communicator on which an instruction moves data.
fn comm(instruction: &Instruction) -> Option<Comm> {
    match instruction {
        Instruction::Collective { kind, comm, .. } if !kind.is_local() => Some(*comm),
        Instruction::Collective { .. }
        | Instruction::Compute { .. }
        | Instruction::Copy { .. }
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => None,
    }
}

/// Why an instruction comes after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hazard {
    /// It reads what the other wrote.
    Flow,
    /// It overwrites what the other read or wrote.
    Reuse,
}

/// Nodes are instructions of a section by their index; an edge leads to what must come later.
type Dependencies = DiGraph<(), Hazard>;

fn dependencies(instructions: &[Instruction]) -> Dependencies {
    #[derive(Default, Clone)]
    struct Last {
        write: Option<NodeIndex>,
        reads: SmallVec<[NodeIndex; 4]>,
    }
    let mut res = Dependencies::with_capacity(instructions.len(), 3 * instructions.len());
    let mut last: SecondaryMap<Buffer, Last> = SecondaryMap::new();
    for instruction in instructions {
        let node = res.add_node(());
        let link = |res: &mut Dependencies, from: NodeIndex, hazard| {
            if from != node {
                res.add_edge(from, node, hazard);
            }
        };
        for buffer in instruction.reads() {
            let last = &mut last[buffer];
            last.write.into_iter().for_each(|it| link(&mut res, it, Hazard::Flow));
            last.reads.push(node);
        }
        for buffer in instruction.writes() {
            let last = &mut last[buffer];
            let reads = std::mem::take(&mut last.reads);
            let before = last.write.replace(node).into_iter().chain(reads);
            before.for_each(|it| link(&mut res, it, Hazard::Reuse));
        }
    }
    res
}

/// When an instruction is to be issued: at a point of program order.
type Key = (u32, Side, u32);

/// Where, at that point. The last part of a key is its own place in program order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Before,
    At,
    /// A gather of weights.
    Gather,
    After,
    Last,
}

impl ScheduleOverlap {
    /// The order in which instructions are issued.
    fn order(&self, instructions: &[Instruction], dependencies: &Dependencies) -> Vec<NodeIndex> {
        let mut keys: Vec<Key> =
            (0..instructions.len() as u32).map(|it| (it, Side::At, it)).collect();
        self.collective_keys(instructions, dependencies, &mut keys);
        if self.place_stores(instructions, dependencies, &mut keys) {
            self.collective_keys(instructions, dependencies, &mut keys);
        }
        let n_before = |node| dependencies.edges_directed(node, Direction::Incoming).count();
        let mut missing: Vec<usize> = dependencies.node_indices().map(n_before).collect();
        let ready = dependencies.node_indices().filter(|it| missing[it.index()] == 0);
        let mut heap: BinaryHeap<Reverse<(Key, NodeIndex)>> =
            ready.map(|it| Reverse((keys[it.index()], it))).collect();
        let mut res = Vec::with_capacity(instructions.len());
        while let Some(Reverse((_, node))) = heap.pop() {
            res.push(node);
            for next in dependencies.neighbors(node) {
                missing[next.index()] -= 1;
                if missing[next.index()] == 0 {
                    heap.push(Reverse((keys[next.index()], next)));
                }
            }
        }
        res
    }

    /// Keys that let collectives start early; everything else stays where it is.
    fn collective_keys(
        &self,
        instructions: &[Instruction],
        dependencies: &Dependencies,
        keys: &mut [Key],
    ) {
        let mut of_comm: SecondaryMap<Comm, Chain> = SecondaryMap::new();
        let gathers = Gathers::find(instructions, dependencies);
        for (index, instruction) in instructions.iter().enumerate() {
            let (Some(comm), Instruction::Collective { kind, .. }) =
                (comm(instruction), instruction)
            else {
                continue;
            };
            let node = NodeIndex::new(index);
            let chain = &mut of_comm[comm];
            let before = dependencies.neighbors_directed(node, Direction::Incoming);
            let operands = before.map(|it| keys[it.index()].0).max();
            let first_use = first_use(dependencies, node).unwrap_or(index as u32);
            let wish = match operands {
                _ if let Some(units) = gathers.units[index] => {
                    let ahead = match gathers.again[index] {
                        true => self.prefetch_backward,
                        false => self.prefetch_forward,
                    };
                    let wish = gathers.point(units, first_use, ahead).max(chain.last_gather);
                    chain.last_gather = wish;
                    (wish.0, wish.1, index as u32)
                }
                None => keys[index],
                Some(operands) if kind.reduce().is_some() => (operands, Side::After, index as u32),
                Some(operands) => {
                    let ahead = (chain.first_use, Side::Before, index as u32);
                    ahead.max((operands, Side::After, index as u32))
                }
            };
            keys[index] = keys[index].min(wish);
            chain.first_use = first_use;
        }
    }

    /// Issues what only stores a result (a cast, an accumulation) when that is there, so that it need not
    /// be kept; for a reduction, when `in_flight` more have been issued. Sums over micro-batches that are reduced
    /// in this section are placed in the same way. Returns true if there are any.
    fn place_stores(
        &self,
        instructions: &[Instruction],
        dependencies: &Dependencies,
        keys: &mut [Key],
    ) -> bool {
        let mut served: SecondaryMap<Comm, Vec<u32>> = SecondaryMap::new();
        let mut nth_reduction: Vec<Option<(Comm, usize)>> = vec![None; instructions.len()];
        for (index, instruction) in instructions.iter().enumerate() {
            let (Some(comm), Instruction::Collective { kind, .. }) =
                (comm(instruction), instruction)
            else {
                continue;
            };
            if kind.reduce().is_some() {
                nth_reduction[index] = Some((comm, served[comm].len()));
                served[comm].push(keys[index].0);
            }
        }
        // `ends`: the result is only stored or reduced. `adds`: the instruction adds to a sum.
        let none = vec![false; instructions.len()];
        let (mut stores, mut ends, mut adds) = (none.clone(), none.clone(), none);
        let mut reduced = false;
        for (index, instruction) in instructions.iter().enumerate().rev() {
            let node = NodeIndex::new(index);
            let all = |of: &[bool]| dependencies.neighbors(node).all(|it| of[it.index()]);
            let light = is_light(instruction);
            let reads = instruction.reads();
            let in_place = instruction.writes().iter().any(|it| reads.contains(it));
            adds[index] = light && (in_place || all(&adds));
            let late = light && adds[index] && all(&ends) && !all(&stores);
            reduced |= late;
            stores[index] = light && all(&stores) || late;
            ends[index] = (light || nth_reduction[index].is_some()) && all(&ends);
        }
        for index in (0..instructions.len()).filter(|&it| stores[it]) {
            let flows = dependencies.edges_directed(NodeIndex::new(index), Direction::Incoming);
            let flows = flows.filter(|it| *it.weight() == Hazard::Flow);
            let ready = flows.map(|it| it.source().index()).map(|it| match nth_reduction[it] {
                Some((comm, nth)) => {
                    served[comm].get(nth + self.in_flight).copied().unwrap_or(u32::MAX)
                }
                None => keys[it].0,
            });
            if let Some(ready) = ready.max() {
                keys[index] = (ready, Side::Last, index as u32);
            }
        }
        reduced
    }
}

/// Whether an instruction takes next to no time.
fn is_light(instruction: &Instruction) -> bool {
    match instruction {
        Instruction::Compute { op, .. } => op.is_sum(),
        Instruction::Collective { kind, .. } => kind.is_local(),
        Instruction::Copy { .. } => true,
        Instruction::Record { .. } | Instruction::Wait { .. } => false,
    }
}

/// Gathers of what is there from the start, and of pieces that are kept of what they gave.
#[derive(Debug, Default)]
struct Gathers {
    /// By instruction: the communicator whose units tell when it is needed.
    units: Vec<Option<Comm>>,
    /// By instruction: it gathers what was gathered before.
    again: Vec<bool>,
    /// Where, in program order, units start that read what is gathered on a communicator: at the first
    /// use of a gather, and where something of it is read for the second time.
    starts: SecondaryMap<Comm, Vec<u32>>,
    /// By instruction: the last one before it that communicates with nobody.
    before: Vec<Option<u32>>,
}

impl Gathers {
    fn find(instructions: &[Instruction], dependencies: &Dependencies) -> Gathers {
        let n = instructions.len();
        let mut res = Gathers { units: vec![None; n], again: vec![false; n], ..Gathers::default() };
        // The communicator on which a kept piece was gathered.
        let mut kept: SecondaryMap<Buffer, Option<Comm>> = SecondaryMap::new();
        let mut known: SecondaryMap<Buffer, bool> = SecondaryMap::new();
        // The communicator of what is in a buffer, and how often it was read.
        let mut held: SecondaryMap<Buffer, Option<(usize, u32)>> = SecondaryMap::new();
        let mut of_gather: Vec<(Comm, [Option<u32>; 2])> = Vec::new();
        let mut last = None;
        for (index, instruction) in instructions.iter().enumerate() {
            if let Instruction::Collective { kind: CollectiveKind::Slice, parts, .. } = instruction
            {
                let of = |part: &Part| held[part.src].map(|it| of_gather[it.0].0);
                parts.iter().for_each(|it| kept[it.dst] = of(it));
                if parts.iter().all(|it| kept[it.dst].is_some()) {
                    res.before.push(last);
                    continue;
                }
            }
            for buffer in instruction.reads() {
                let Some((gather, n_reads)) = &mut held[buffer] else { continue };
                if let Some(start) = of_gather[*gather].1.get_mut(*n_reads as usize) {
                    start.get_or_insert(index as u32);
                }
                *n_reads += 1;
            }
            res.before.push(last);
            let node = NodeIndex::new(index);
            let is_leaf =
                dependencies.neighbors_directed(node, Direction::Incoming).next().is_none();
            match (comm(instruction), instruction) {
                (
                    Some(comm),
                    Instruction::Collective { kind: CollectiveKind::AllGather, parts, .. },
                ) if is_leaf || parts.iter().all(|it| kept[it.src].is_some()) => {
                    let comm = parts.iter().find_map(|it| kept[it.src]).unwrap_or(comm);
                    res.units[index] = Some(comm);
                    res.again[index] =
                        parts.iter().any(|it| known[it.src] || kept[it.src].is_some());
                    for part in parts {
                        known[part.src] = true;
                        held[part.dst] = Some((of_gather.len(), 0));
                    }
                    of_gather.push((comm, [None; 2]));
                }
                (Some(_), _) => (),
                (None, _) => last = Some(index as u32),
            }
        }
        for (comm, starts) in of_gather {
            res.starts[comm].extend(starts.into_iter().flatten());
        }
        for comm in res.starts.keys().collect::<Vec<_>>() {
            res.starts[comm].sort();
        }
        res
    }

    /// Where to issue a gather that is first used at `first_use`, so that it is `ahead` units early:
    /// behind what comes before that unit's work.
    fn point(&self, comm: Comm, first_use: u32, ahead: usize) -> (u32, Side) {
        let starts = &self.starts[comm];
        let own = starts.partition_point(|&it| it < first_use);
        let start = own.checked_sub(ahead).map(|it| starts.get(it).copied().unwrap_or(first_use));
        match start.and_then(|it| self.before[it as usize]) {
            Some(before) => (before, Side::Gather),
            None => (0, Side::Before),
        }
    }
}

/// Collectives of one communicator so far.
#[derive(Debug, Clone)]
struct Chain {
    /// Where the last gather of what is there from the start is issued.
    last_gather: (u32, Side),
    /// First use of the last collective.
    first_use: u32,
}

impl Default for Chain {
    fn default() -> Chain {
        Chain { last_gather: (0, Side::Before), first_use: 0 }
    }
}

/// The first instruction, in program order, that reads what `node` makes.
fn first_use(dependencies: &Dependencies, node: NodeIndex) -> Option<u32> {
    let uses = dependencies.edges(node).filter(|it| *it.weight() == Hazard::Flow);
    uses.map(|it| it.target().index() as u32).min()
}

/// The instructions in this order, with the events that make it safe.
fn issue(
    plan: &mut Plan,
    instructions: Vec<Instruction>,
    dependencies: &Dependencies,
    order: &[NodeIndex],
    in_flight: usize,
) -> Vec<Instruction> {
    let waits = waits(plan, &instructions, dependencies, order, in_flight);
    let mut wanted = vec![false; instructions.len()];
    waits.iter().flatten().for_each(|&it| wanted[it as usize] = true);
    let mut event_of: Vec<Option<Event>> = vec![None; instructions.len()];
    let mut instructions: Vec<Option<Instruction>> = instructions.into_iter().map(Some).collect();
    let mut res = Vec::with_capacity(instructions.len() * 3 / 2);
    for (&node, waits) in order.iter().zip(&waits) {
        let instruction = instructions[node.index()].take().expect("each is issued once");
        let stream = instruction.stream();
        for &other in waits {
            let event = event_of[other as usize].expect("what is waited for was issued before");
            res.push(Instruction::Wait { event, stream });
        }
        res.push(instruction);
        if wanted[node.index()] {
            let event = Event::new(plan.events as usize);
            plan.events += 1;
            event_of[node.index()] = Some(event);
            res.push(Instruction::Record { event, stream });
        }
    }
    res
}

/// For each instruction in issue order, those that its stream must wait for. The compute stream waits
/// for reductions, of which `in_flight` may follow, so that it knows when their operands' memory is free.
fn waits(
    plan: &Plan,
    instructions: &[Instruction],
    dependencies: &Dependencies,
    order: &[NodeIndex],
    in_flight: usize,
) -> Vec<SmallVec<[u32; 2]>> {
    let mut clocks = Clocks::new(plan.streams.len(), instructions.len() as u32);
    let mut issued: Vec<(usize, u32)> = vec![(0, 0); instructions.len()];
    let mut last_compute: Option<usize> = None;
    let mut reductions: SecondaryMap<Comm, VecDeque<usize>> = SecondaryMap::new();
    let mut awaited: SmallVec<[usize; 2]> = SmallVec::new();
    let mut res = Vec::with_capacity(order.len());
    for (at, &node) in order.iter().enumerate() {
        let instruction = &instructions[node.index()];
        let stream = instruction.stream();
        let before = dependencies.neighbors_directed(node, Direction::Incoming);
        let mut before: SmallVec<[usize; 8]> = before.map(|it| it.index()).collect();
        if let Some(comm) = comm(instruction) {
            before.extend(last_compute);
            if reduces(instruction) {
                let chain = &mut reductions[comm];
                chain.push_back(node.index());
                if chain.len() > in_flight + 1 {
                    awaited.extend(chain.pop_front());
                }
            }
        } else {
            last_compute = Some(node.index());
            before.append(&mut awaited);
        }
        // The latest first: it knows of most others.
        before.sort_by_key(|&it| Reverse(issued[it].0));
        let mut waits = SmallVec::new();
        for other in before {
            if !clocks.saw(stream, instructions[other].stream(), issued[other].1) {
                clocks.wait(Event::new(other), stream);
                waits.push(other as u32);
            }
        }
        res.push(waits);
        issued[node.index()] = (at, clocks.run(stream));
        clocks.record(Event::new(node.index()), stream);
    }
    res
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PassManager;

    /// Schedules `body` as the `step` of a plan on (dp=2, tp=2), and compares what is issued.
    #[track_caller]
    fn check(schedule: ScheduleOverlap, body: &str, expect: &str) {
        let text = format!(
            "plan @test phase=lowered mesh=(dp=2, tp=2) {{
  comm c0 = (dp)
  comm c1 = (tp)
  stream s0 = compute
  buffer %w0 : f32[8, 8] @ [dp, _] param
  buffer %w1 : f32[8, 8] @ [dp, _] param
  buffer %w2 : f32[8, 8] @ [dp, _] param
  buffer %x : f32[8, 8] @ [_, _] input
  buffer %w0.full : f32[8, 8] @ [_, _] temp
  buffer %w0.kept : f32[8, 8] @ [tp, _] temp
  buffer %w1.full : f32[8, 8] @ [_, _] temp
  buffer %w2.full : f32[8, 8] @ [_, _] temp
  buffer %h0 : f32[8, 8] @ [_, _] temp
  buffer %h1 : f32[8, 8] @ [_, _] temp
  buffer %h2 : f32[8, 8] @ [_, _] carried
  buffer %g0 : f32[8, 8] @ [_, _] sum(dp) temp
  buffer %g1 : f32[8, 8] @ [_, _] sum(dp) temp
  buffer %g0.sum : f32[8, 8] @ [dp, _] temp
  buffer %g1.sum : f32[8, 8] @ [dp, _] temp
  buffer %acc0 : f32[8, 8] @ [dp, _] state
  buffer %acc1 : f32[8, 8] @ [dp, _] state
  step:
{body}}}
"
        );
        let mut plan = ir::text::parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
        PassManager::default().run(&mut plan, &[&schedule]).unwrap();
        let text = plan.to_string();
        let (_, issued) = text.split_once("  step:\n").unwrap();
        assert_eq!(issued.trim_end_matches("}\n"), expect, "{issued}");
    }

    const GATHERS: &str = "  s0: %w0.full = all_gather %w0 on c0
  s0: %h0 = mul %x, %w0.full
  s0: %w1.full = all_gather %w1 on c0
  s0: %h1 = mul %h0, %w1.full
  s0: %w2.full = all_gather %w2 on c0
  s0: %h2 = mul %h1, %w2.full
";

    #[test]
    fn weights_are_gathered_one_unit_ahead() {
        let expect = "  s1: %w0.full = all_gather %w0 on c0
  s1: record e0
  s1: %w1.full = all_gather %w1 on c0
  s1: record e1
  s0: wait e0
  s0: %h0 = mul %x, %w0.full
  s0: record e2
  s1: wait e2
  s1: %w2.full = all_gather %w2 on c0
  s1: record e3
  s0: wait e1
  s0: %h1 = mul %h0, %w1.full
  s0: wait e3
  s0: %h2 = mul %h1, %w2.full
";
        check(ScheduleOverlap::default(), GATHERS, expect);
    }

    /// The first unit is gathered again when the backward pass of the last one, which kept its weights,
    /// starts; before the reduction that is ready then.
    #[test]
    fn what_is_gathered_again_waits_for_the_backward_pass() {
        let body = "  s0: %w0.full = all_gather %w0 on c0
  s0: %h0 = mul %x, %w0.full
  s0: %w1.full = all_gather %w1 on c0
  s0: %h1 = mul %h0, %w1.full
  s0: %g1 = to_partial(sum) %h1 on c0
  s0: %g1.sum = reduce_scatter(sum) %g1 on c0
  s0: %h1 = mul %h1, %w1.full
  s0: %w2.full = all_gather %w0 on c0
  s0: %h2 = mul %h1, %w2.full
";
        let expect = "  s1: %w0.full = all_gather %w0 on c0
  s1: record e0
  s1: %w1.full = all_gather %w1 on c0
  s1: record e1
  s0: wait e0
  s0: %h0 = mul %x, %w0.full
  s0: wait e1
  s0: %h1 = mul %h0, %w1.full
  s0: %g1 = to_partial(sum) %h1 on c0
  s0: record e2
  s1: wait e2
  s1: %w2.full = all_gather %w0 on c0
  s1: record e3
  s1: %g1.sum = reduce_scatter(sum) %g1 on c0
  s0: %h1 = mul %h1, %w1.full
  s0: wait e3
  s0: %h2 = mul %h1, %w2.full
";
        check(ScheduleOverlap::default(), body, expect);
    }

    /// A piece that was kept is there long before, but what is gathered from it waits just so.
    #[test]
    fn what_is_gathered_again_from_a_group_waits_for_the_backward_pass() {
        let body = "  s0: %w0.full = all_gather %w0 on c0
  s0: %w0.kept = slice %w0.full on c1
  s0: %h0 = mul %x, %w0.full
  s0: %w1.full = all_gather %w1 on c0
  s0: %h1 = mul %h0, %w1.full
  s0: %h1 = mul %h1, %w1.full
  s0: %w2.full = all_gather %w0.kept on c1
  s0: %h2 = mul %h1, %w2.full
";
        let expect = "  s1: %w0.full = all_gather %w0 on c0
  s1: record e0
  s1: %w1.full = all_gather %w1 on c0
  s1: record e1
  s0: wait e0
  s0: %w0.kept = slice %w0.full on c1
  s0: %h0 = mul %x, %w0.full
  s0: wait e1
  s0: %h1 = mul %h0, %w1.full
  s0: record e2
  s2: wait e2
  s2: %w2.full = all_gather %w0.kept on c1
  s2: record e3
  s0: %h1 = mul %h1, %w1.full
  s0: wait e3
  s0: %h2 = mul %h1, %w2.full
";
        check(ScheduleOverlap::default(), body, expect);
    }

    #[test]
    fn weights_are_gathered_as_far_ahead_as_asked() {
        let expect = "  s1: %w0.full = all_gather %w0 on c0
  s1: record e0
  s1: %w1.full = all_gather %w1 on c0
  s1: record e1
  s1: %w2.full = all_gather %w2 on c0
  s1: record e2
  s0: wait e0
  s0: %h0 = mul %x, %w0.full
  s0: wait e1
  s0: %h1 = mul %h0, %w1.full
  s0: wait e2
  s0: %h2 = mul %h1, %w2.full
";
        check(
            ScheduleOverlap { prefetch_forward: 2, ..ScheduleOverlap::default() },
            GATHERS,
            expect,
        );
    }

    #[test]
    fn without_prefetch_nothing_moves() {
        let expect = "  s1: %w0.full = all_gather %w0 on c0
  s1: record e0
  s0: wait e0
  s0: %h0 = mul %x, %w0.full
  s0: record e1
  s1: wait e1
  s1: %w1.full = all_gather %w1 on c0
  s1: record e2
  s0: wait e2
  s0: %h1 = mul %h0, %w1.full
  s0: record e3
  s1: wait e3
  s1: %w2.full = all_gather %w2 on c0
  s1: record e4
  s0: wait e4
  s0: %h2 = mul %h1, %w2.full
";
        check(
            ScheduleOverlap { prefetch_forward: 0, prefetch_backward: 0, in_flight: 0 },
            GATHERS,
            expect,
        );
    }

    #[test]
    fn accumulation_waits_for_the_next_reduction() {
        let body = "  s0: %g1 = to_partial(sum) %x on c0
  s0: %g1.sum = reduce_scatter(sum) %g1 on c0
  s0: %acc1 = add %acc1, %g1.sum
  s0: %h0 = mul %x, %x
  s0: %g0 = to_partial(sum) %h0 on c0
  s0: %g0.sum = reduce_scatter(sum) %g0 on c0
  s0: %acc0 = add %acc0, %g0.sum
  s0: %h2 = mul %h0, %x
";
        let expect = "  s0: %g1 = to_partial(sum) %x on c0
  s0: record e0
  s1: wait e0
  s1: %g1.sum = reduce_scatter(sum) %g1 on c0
  s1: record e1
  s0: %h0 = mul %x, %x
  s0: %g0 = to_partial(sum) %h0 on c0
  s0: record e2
  s1: wait e2
  s1: %g0.sum = reduce_scatter(sum) %g0 on c0
  s1: record e3
  s0: wait e1
  s0: %acc1 = add %acc1, %g1.sum
  s0: %h2 = mul %h0, %x
  s0: wait e3
  s0: %acc0 = add %acc0, %g0.sum
";
        check(ScheduleOverlap::default(), body, expect);
    }
}
