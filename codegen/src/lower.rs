//! `lower`: from the program of one rank to instructions over buffers.
//!
//! Every value gets a buffer named after it, but for the next content of a state, where possible:
//!
//! ```text
//! %p.next = adamw %p, ...          %p = adamw %p, ...          if nothing reads the old %p later
//! store %p = %p.next in update
//! ```
//!
//! A store that cannot be made in place is a copy at the end of its section. All instructions are
//! queued on the compute stream, in program order: `schedule-overlap` spreads them.
//!
//! The forward and the backward pass become one section where a step has one micro-batch, and up to three
//! where it has several, each with temporaries of its own:
//!
//! ```text
//! first    gathers the weights that are kept; writes the sums over micro-batches
//! step     reads those weights; GEMMs and reductions add to the sums directly
//! last     does the same, then moves and reduces the sums (nodes of `Update` in the graph)
//! ```

use std::collections::{BTreeMap, BTreeSet};

use cranelift_entity::{EntityRef, PrimaryMap, SecondaryMap};
use ir::graph::{AfterForward, Def, Name, Store};
use ir::ops::CollectiveKind;
use ir::placement::{AxisSet, ReduceOp, Sharding};
use ir::plan::{
    Buffer, BufferData, Comm, Instruction, Part, Plan, PlanParam, PlanSection, Role, Stream,
    StreamKind,
};
use ir::{Graph, Node, Op, Phase, Section, Value};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

/// Lowers a graph in phase `Local`.
///
/// # Panics
/// If the graph is in another phase.
pub fn lower(graph: &Graph) -> Plan {
    assert_eq!(graph.phase, Phase::Local, "only the program of one rank can be lowered");
    let order = order(graph);
    let uses = Uses::of(graph, &order);
    let homes = Homes::of(graph, &uses);
    let stages = Stages::of(graph, &order, &uses, &homes);
    // Only a step of several micro-batches makes several buffers of a value.
    let names = graph.values.values().filter(|_| graph.micro_batches > 1);
    let names = names.map(|it| it.name.clone()).collect();
    let mut lowering = Lowering {
        graph,
        uses: &uses,
        homes: &homes,
        stages: &stages,
        buffer_of: SecondaryMap::new(),
        compute: Stream::new(0),
        comms: BTreeMap::new(),
        pass: Pass::ONCE,
        names,
        plan: empty_plan(graph),
    };
    lowering.leaves();
    let of = |section: Section| order.iter().filter(move |&&it| graph.nodes[it].section == section);
    lowering.pass.section = PlanSection::Prepare;
    of(Section::Prepare).for_each(|&it| lowering.node(it));
    lowering.copies(Section::Prepare);
    for &pass in passes(graph) {
        lowering.pass = pass;
        for section in [Section::Forward, Section::Backward] {
            of(section).for_each(|&it| lowering.node(it));
            lowering.copies(section);
        }
        if pass.last {
            of(Section::Update).filter(|&&it| stages.reduces[it]).for_each(|&it| lowering.node(it));
        }
    }
    lowering.pass = Pass { section: PlanSection::Update, ..Pass::ONCE };
    of(Section::Update).filter(|&&it| !stages.reduces[it]).for_each(|&it| lowering.node(it));
    lowering.copies(Section::Update);
    lowering.finish()
}

/// One lowering of the forward and the backward pass.
#[derive(Debug, Clone, Copy)]
struct Pass {
    section: PlanSection,
    /// True for the first micro-batch.
    first: bool,
    /// True for the last micro-batch.
    last: bool,
    /// Suffix of its temporaries' names; empty for the last micro-batch.
    suffix: &'static str,
}

impl Pass {
    const ONCE: Pass = Pass { section: PlanSection::Step, first: true, last: true, suffix: "" };
    const FIRST: Pass =
        Pass { section: PlanSection::First, first: true, last: false, suffix: ".first" };
    const BETWEEN: Pass =
        Pass { section: PlanSection::Step, first: false, last: false, suffix: ".step" };
    const LAST: Pass = Pass { section: PlanSection::Last, first: false, last: true, suffix: "" };
}

/// The sections that the forward and the backward pass become.
fn passes(graph: &Graph) -> &'static [Pass] {
    match graph.micro_batches {
        0 | 1 => &[Pass::ONCE],
        2 => &[Pass::FIRST, Pass::LAST],
        _ => &[Pass::FIRST, Pass::BETWEEN, Pass::LAST],
    }
}

/// Nodes that the plan runs in another section than the graph, and values that outlive their section.
struct Stages {
    /// Nodes of `Update` that only move and reduce sums over micro-batches: the end of the last one.
    reduces: SecondaryMap<Node, bool>,
    /// Nodes that gather weights for all micro-batches of a step, where no unit drops its weights.
    gathers: SecondaryMap<Node, bool>,
    /// Values that are read or stored after the section that makes them.
    outlives: SecondaryMap<Value, bool>,
    /// The sum over micro-batches to which a value is added, where nothing else reads that value.
    added_to: SecondaryMap<Value, Option<Value>>,
}

impl Stages {
    fn of(graph: &Graph, order: &[Node], uses: &Uses, homes: &Homes) -> Stages {
        let mut res = Stages {
            reduces: SecondaryMap::new(),
            gathers: SecondaryMap::new(),
            outlives: SecondaryMap::new(),
            added_to: added_to(graph, order, uses, homes),
        };
        let mut scopes = graph.scopes.values();
        let keeps = scopes.all(|it| it.after_forward == AfterForward::Keep);
        let keeps = keeps && graph.micro_batches > 1;
        for &node in order {
            let data = &graph.nodes[node];
            let Op::Collective(op) = &data.op else { continue };
            let is_sum = |&it: &Value| match graph.values[it].def {
                Def::Sum => true,
                Def::Input | Def::Param | Def::State => false,
                Def::Result { node, .. } => res.reduces[node],
            };
            let is_weight = |&it: &Value| match graph.values[it].def {
                Def::Param | Def::State => uses.written[it]
                    .iter()
                    .all(|it| matches!(it, Section::Prepare | Section::Update)),
                Def::Input | Def::Sum => false,
                Def::Result { node, .. } => res.gathers[node],
            };
            match data.section {
                Section::Update => res.reduces[node] = data.inputs.iter().all(is_sum),
                Section::Forward if keeps => {
                    let moves = op.kind.reduce().is_none();
                    res.gathers[node] = moves && data.inputs.iter().all(is_weight);
                }
                Section::Prepare | Section::Forward | Section::Backward => {}
            }
        }
        for &node in order {
            for &input in &graph.nodes[node].inputs {
                let Some(maker) = graph.producer(input) else { continue };
                res.outlives[input] |= res.stage(graph, maker) < res.stage(graph, node)
                    || res.gathers[maker] && !res.gathers[node];
            }
        }
        for store in &graph.stores {
            let Some(maker) = graph.producer(store.value) else { continue };
            let section = plan_section(store.section);
            // What is gathered once for all micro-batches is stored by each of them.
            res.outlives[store.value] |= res.stage(graph, maker) < section
                || res.gathers[maker] && section == PlanSection::Step;
        }
        res
    }

    /// Returns the section of a node, with `Step` for every micro-batch.
    fn stage(&self, graph: &Graph, node: Node) -> PlanSection {
        match self.reduces[node] {
            true => PlanSection::Step,
            false => plan_section(graph.nodes[node].section),
        }
    }
}

/// See [`Stages::added_to`].
fn added_to(
    graph: &Graph,
    order: &[Node],
    uses: &Uses,
    homes: &Homes,
) -> SecondaryMap<Value, Option<Value>> {
    let mut n_reads: SecondaryMap<Value, u32> = SecondaryMap::new();
    order.iter().flat_map(|&it| &graph.nodes[it].inputs).for_each(|&it| n_reads[it] += 1);
    let mut res = SecondaryMap::new();
    for &node in order {
        let data = &graph.nodes[node];
        let (Op::Add(_), &[sum, value]) = (&data.op, &data.inputs[..]) else { continue };
        let alone = n_reads[value] == 1 && uses.stored[value].is_empty() && !uses.result[value];
        let alike =
            graph.ty(sum) == graph.ty(value) && graph.sharding(sum) == graph.sharding(value);
        let of_pass = graph.section(value) != Section::Prepare;
        let in_place = homes.of[data.results[0]] == Some(sum);
        if graph.values[sum].def == Def::Sum && in_place && alone && alike && of_pass {
            res[value] = Some(sum);
        }
    }
    res
}

/// Returns the plan's section for a section of the graph, with `Step` for every micro-batch.
fn plan_section(section: Section) -> PlanSection {
    match section {
        Section::Prepare => PlanSection::Prepare,
        Section::Forward | Section::Backward => PlanSection::Step,
        Section::Update => PlanSection::Update,
    }
}

fn empty_plan(graph: &Graph) -> Plan {
    let mut streams = PrimaryMap::new();
    streams.push(StreamKind::Compute.into());
    Plan {
        name: graph.name.clone(),
        mesh: graph.mesh.clone(),
        phase: Phase::Lowered,
        micro_batches: graph.micro_batches,
        comms: PrimaryMap::new(),
        streams,
        events: 0,
        buffers: PrimaryMap::new(),
        sections: Default::default(),
        persistent_bytes: 0,
        model: None,
        step_bytes: 0,
        params: Vec::new(),
        results: Vec::new(),
        run: graph.run.clone(),
    }
}

/// Program order, in which what only makes the next content of a state comes after the last reader
/// of the old content: zeroing an accumulator, say. Then it can be made in place.
fn order(graph: &Graph) -> Vec<Node> {
    let uses = Uses::of(graph, &graph.order);
    let mut keys: Vec<(u32, u32, Node)> =
        (0..).zip(&graph.order).map(|it| (it.0, 0, *it.1)).collect();
    for store in &graph.stores {
        let Some(node) = graph.producer(store.value) else { continue };
        let unread = graph.nodes[node].results.iter().all(|&it| uses.last(it).is_none());
        let at = uses.position[node];
        let later = uses.last_in(store.state, store.section).filter(|&reader| reader > at);
        if let (true, true, Some(reader)) =
            (unread, graph.nodes[node].section == store.section, later)
        {
            let key = &mut keys[at as usize];
            *key = (*key).max((reader, 1, node));
        }
    }
    keys.sort();
    keys.into_iter().map(|it| it.2).collect()
}

/// Who reads a value, and when. A position is an index into the program order.
struct Uses {
    /// Position of each node.
    position: SecondaryMap<Node, u32>,
    /// The last reader in each section.
    last: SecondaryMap<Value, [Option<u32>; 4]>,
    /// It is a result of the program.
    result: SecondaryMap<Value, bool>,
    /// Sections at whose end it is stored.
    stored: SecondaryMap<Value, SmallVec<[Section; 1]>>,
    /// For a state, sections at whose end it is written.
    written: SecondaryMap<Value, SmallVec<[Section; 2]>>,
}

impl Uses {
    fn of(graph: &Graph, order: &[Node]) -> Uses {
        let mut res = Uses {
            position: SecondaryMap::new(),
            last: SecondaryMap::new(),
            result: SecondaryMap::new(),
            stored: SecondaryMap::new(),
            written: SecondaryMap::new(),
        };
        for (&node, at) in order.iter().zip(0..) {
            res.position[node] = at;
            let data = &graph.nodes[node];
            for &input in &data.inputs {
                res.last[input][data.section as usize] = Some(at);
            }
        }
        graph.results.iter().for_each(|it| res.result[it.1] = true);
        for store in &graph.stores {
            res.stored[store.value].push(store.section);
            res.written[store.state].push(store.section);
        }
        res
    }

    fn last_in(&self, value: Value, section: Section) -> Option<u32> {
        self.last[value][section as usize]
    }

    fn last(&self, value: Value) -> Option<u32> {
        self.last[value].iter().flatten().max().copied()
    }

    /// Nothing reads or writes this state.
    fn is_dead(&self, state: Value) -> bool {
        self.last(state).is_none()
            && self.written[state].is_empty()
            && self.stored[state].is_empty()
            && !self.result[state]
    }

    fn read_after(&self, value: Value, section: Section) -> bool {
        self.last[value][section as usize + 1..].iter().any(Option::is_some)
    }
}

/// Values that are made in the buffer of a state.
struct Homes {
    of: SecondaryMap<Value, Option<Value>>,
}

impl Homes {
    fn of(graph: &Graph, uses: &Uses) -> Homes {
        let mut res = Homes { of: SecondaryMap::new() };
        let mut stores: Vec<&Store> = graph.stores.iter().collect();
        stores.sort_by_key(|it| it.section);
        let mut tenants: SecondaryMap<Value, Vec<Value>> = SecondaryMap::new();
        for &store in &stores {
            if res.fits(graph, uses, &tenants[store.state], store) {
                res.of[store.value] = Some(store.state);
                tenants[store.state].push(store.value);
            }
        }
        res
    }

    /// The state whose buffer `value` is in, if it is in one.
    fn state(&self, graph: &Graph, value: Value) -> Option<Value> {
        match graph.values[value].def {
            Def::Param | Def::State | Def::Sum => Some(value),
            Def::Input => None,
            Def::Result { .. } => self.of[value],
        }
    }

    /// Whether `store.value` can be made in the buffer of its state, which held `tenants` before:
    /// nothing may want the content before it later, or its own after the state is next written.
    fn fits(&self, graph: &Graph, uses: &Uses, tenants: &[Value], store: &Store) -> bool {
        let Store { state, value, section } = *store;
        let Def::Result { node, index } = graph.values[value].def else { return false };
        let (data, at) = (&graph.nodes[node], uses.position[node]);
        let same = graph.ty(value) == graph.ty(state)
            && graph.sharding(value) == graph.sharding(state)
            && data.section == section
            && self.of[value].is_none();
        let in_place = data.inputs.iter().enumerate().all(|(operand, &it)| {
            self.state(graph, it) != Some(state)
                || data.op.in_place().contains(&(index as usize, operand))
        });
        let state_is_free = uses.last_in(state, section).is_none_or(|it| it <= at)
            && !uses.stored[state].contains(&section);
        let tenants_are_gone = tenants.iter().all(|&it| {
            uses.last(it).is_none_or(|it| it <= at)
                && !uses.result[it]
                && uses.stored[it].iter().all(|&it| it < section)
        });
        let next = uses.written[state].iter().filter(|&&it| it > section).min();
        let lives_long_enough = next.is_none_or(|&next| {
            // What `prepare` makes is read in every step, and `next` comes round before the second.
            let until = if section == Section::Prepare { section } else { next };
            !uses.read_after(value, until)
                && !uses.result[value]
                && uses.stored[value].iter().all(|&it| it < next && (it == section || it < until))
        });
        same && in_place && state_is_free && tenants_are_gone && lives_long_enough
    }
}

struct Lowering<'a> {
    graph: &'a Graph,
    uses: &'a Uses,
    homes: &'a Homes,
    stages: &'a Stages,
    buffer_of: SecondaryMap<Value, Option<Buffer>>,
    /// What everything is queued on.
    compute: Stream,
    /// By axes, and whether weights are gathered.
    comms: BTreeMap<(AxisSet, bool), Comm>,
    /// The section that is being made.
    pass: Pass,
    /// The names of all values, and of the buffers made of them, if a step has several micro-batches.
    names: FxHashSet<Name>,
    plan: Plan,
}

impl Lowering<'_> {
    /// Buffers of what the program starts with.
    fn leaves(&mut self) {
        for (value, data) in &self.graph.values {
            let role = match data.def {
                Def::Param => Role::Param,
                Def::State | Def::Sum if self.uses.is_dead(value) => continue,
                Def::State => Role::State,
                Def::Sum => Role::Carried,
                Def::Input => Role::Input,
                Def::Result { .. } => continue,
            };
            self.make(value, data.name.clone(), role);
        }
    }

    fn make(&mut self, value: Value, name: Name, role: Role) -> Buffer {
        let ty = self.graph.ty(value).clone();
        let sharding = self.graph.sharding(value).clone();
        let buffer = self.plan.buffers.push(BufferData { name, ty, sharding, role, offset: None });
        self.buffer_of[value] = Some(buffer);
        buffer
    }

    fn buffer(&self, value: Value) -> Buffer {
        self.buffer_of[value].unwrap_or_else(|| {
            panic!("`{}` is read before it is made", self.graph.values[value].name)
        })
    }

    fn node(&mut self, node: Node) {
        let graph = self.graph;
        let data = &graph.nodes[node];
        if self.stages.gathers[node] && !self.pass.first {
            return;
        }
        let (mut op, mut inputs) = (data.op.clone(), data.inputs.clone());
        let sum = inputs.iter().position(|&it| graph.values[it].def == Def::Sum);
        if let (Op::Add(_), Some(&one)) = (&op, inputs.get(1))
            && self.made_onto(one).is_some()
        {
            self.buffer_of[data.results[0]] = self.buffer_of[one];
            return;
        }
        if let Some((operand, less)) = sum.and_then(|it| Some((it, op.without(it)?)))
            && self.pass.first
            && data.section == Section::Backward
        {
            (op, _) = (less, inputs.remove(operand));
        }
        for &result in &data.results {
            match self.homes.of[result].or(self.made_onto(result)) {
                Some(state) => self.buffer_of[result] = Some(self.buffer(state)),
                None => self.result(result),
            }
        }
        let args = inputs.iter().map(|&it| self.buffer(it));
        let results = data.results.iter().map(|&it| self.buffer(it));
        let instruction = match op {
            Op::Collective(it) => {
                let adds = data
                    .results
                    .iter()
                    .map(|&result| !self.pass.first && self.made_onto(result).is_some());
                let parts = args.zip(results).zip(adds);
                let parts = parts.map(|((src, dst), adds)| Part { src, dst, adds }).collect();
                let comm = self.comm(it.axes, self.gathers_weights(node));
                Instruction::Collective { kind: it.kind, comm, parts, stream: self.compute }
            }
            op => {
                let (args, results) = (args.collect(), results.collect());
                Instruction::Compute { op, args, results, stream: self.compute }
            }
        };
        self.push(instruction);
    }

    /// The sum that a value is made in: the first micro-batch writes it, and reductions add to it.
    fn made_onto(&self, value: Value) -> Option<Value> {
        let sum = self.stages.added_to[value]?;
        let maker = self.graph.producer(value)?;
        let reduces = match &self.graph.nodes[maker].op {
            Op::Collective(it) => it.kind.reduces() == Some(ReduceOp::Sum),
            // A GEMM adds to a sum itself.
            _ => false,
        };
        (self.pass.first || reduces).then_some(sum)
    }

    /// Makes a buffer for what no state holds. What `prepare` leaves is there for all steps.
    fn result(&mut self, value: Value) {
        let graph = self.graph;
        let maker = graph.producer(value).expect("a node makes it");
        let lasting = match self.pass.section {
            PlanSection::Prepare => Role::State,
            PlanSection::First | PlanSection::Step | PlanSection::Last | PlanSection::Update => {
                Role::Carried
            }
        };
        // If a value belongs to one micro-batch alone, the last one's survives.
        let ends = self.pass.last || self.stages.gathers[maker];
        let outlives = ends && (self.stages.outlives[value] || self.uses.result[value]);
        let (name, suffix) = (&graph.values[value].name, self.pass.suffix);
        let name = match outlives {
            true => name.clone(),
            false => self.unique(format!("{name}{suffix}")),
        };
        self.make(value, name, if outlives { lasting } else { Role::Temp });
    }

    /// A name that nothing else has: this one, if no other pass made it of a value of that name.
    fn unique(&mut self, mut name: Name) -> Name {
        if !self.pass.suffix.is_empty() {
            while !self.names.insert(name.clone()) {
                name.push('_');
            }
        }
        name
    }

    /// Weights are gathered on a communicator of their own, so that a gather does not wait for the
    /// reduction of gradients in front of it.
    fn comm(&mut self, axes: AxisSet, gathers_weights: bool) -> Comm {
        let make = || self.plan.comms.push(axes);
        *self.comms.entry((axes, gathers_weights)).or_insert_with(make)
    }

    /// Whether a collective gathers what is there from the start.
    fn gathers_weights(&self, node: Node) -> bool {
        let data = &self.graph.nodes[node];
        let is_weight = |&it: &Value| matches!(self.graph.values[it].def, Def::Param | Def::State);
        let gathers =
            matches!(&data.op, Op::Collective(it) if it.kind == CollectiveKind::AllGather);
        gathers && data.inputs.iter().all(is_weight)
    }

    /// Writes the states of `section` whose next content was not made in their buffers. All of them
    /// get what the others held before.
    fn copies(&mut self, section: Section) {
        let pending: Vec<Store> = self
            .graph
            .stores
            .iter()
            .filter(|it| it.section == section && it.value != it.state)
            .filter(|it| self.homes.of[it.value] != Some(it.state))
            .copied()
            .collect();
        let written: BTreeSet<Buffer> = pending.iter().map(|it| self.buffer(it.state)).collect();
        let mut old: BTreeMap<Buffer, Buffer> = BTreeMap::new();
        let mut sources = Vec::new();
        for store in &pending {
            let src = self.buffer(store.value);
            let kept = match old.get(&src) {
                None if written.contains(&src) => self.keep(src, section),
                kept => kept.copied().unwrap_or(src),
            };
            old.insert(src, kept);
            sources.push(kept);
        }
        for (store, src) in pending.iter().zip(sources) {
            let dst = self.buffer(store.state);
            self.push(Instruction::Copy { src, dst, stream: self.compute });
        }
    }

    /// A copy of a state as it was before the stores of `section`.
    fn keep(&mut self, src: Buffer, section: Section) -> Buffer {
        let mut data = self.plan.buffers[src].clone();
        let (section, suffix) = (format!("{section:?}").to_lowercase(), self.pass.suffix);
        data.name = self.unique(format!("{}.before_{section}{suffix}", data.name));
        data.role = Role::Temp;
        let dst = self.plan.buffers.push(data);
        self.push(Instruction::Copy { src, dst, stream: self.compute });
        dst
    }

    fn push(&mut self, instruction: Instruction) {
        self.plan.sections[self.pass.section as usize].push(instruction);
    }

    fn finish(mut self) -> Plan {
        // A pass may have laid a parameter out otherwise since.
        let is_of = |label: &Sharding, value: Value| {
            label.without_unit_axes(&self.graph.mesh) == *self.graph.sharding(value)
        };
        let params = self.graph.params.iter().map(|it| PlanParam {
            buffer: self.buffer(it.value),
            label: it.label.clone().filter(|label| is_of(label, it.value)),
            init: it.init,
            aliases: it.aliases.clone(),
        });
        self.plan.params = params.collect();
        let results = self.graph.results.iter().map(|it| (it.0.clone(), self.buffer(it.1)));
        self.plan.results = results.collect();
        self.plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lowers a graph of leaves `%p` (parameter), `%s`, `%t` (states), `%x` (input), and compares all
    /// instructions.
    #[track_caller]
    fn check(body: &str, expect: &str) {
        let text = format!(
            "graph @test phase=local mesh=(dp=2) {{
  input %x : f32[8] @ [_]
  param %p : f32[8] @ [_] init=Zeros
  state %s : f32[8] @ [_]
  state %t : f32[8] @ [_]
{body}}}
"
        );
        let graph = ir::text::parse_graph(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
        let plan = lower(&graph);
        assert_eq!(ir::verify::plan::verify(&plan), []);
        let text = plan.to_string();
        let (_, issued) = text.split_once("  step:\n").expect("it has a step");
        assert_eq!(issued.trim_end_matches("}\n"), expect, "{text}");
    }

    #[test]
    fn a_state_is_updated_in_place() {
        check(
            "  backward:
  %sum = add %s, %x : f32[8] @ [_]
  store %s = %sum in backward
",
            "  s0: %s = add %s, %x\n",
        );
    }

    #[test]
    fn a_state_that_is_read_later_is_copied() {
        check(
            "  backward:
  %sum = add %x, %s : f32[8] @ [_]
  %y = add %s, %sum : f32[8] @ [_]
  store %s = %sum in backward
  store %t = %y in backward
",
            "  s0: %sum = add %x, %s\n  s0: %t = add %s, %sum\n  s0: %s = copy %sum\n",
        );
    }

    #[test]
    fn an_accumulator_is_zeroed_after_its_last_reader() {
        check(
            "  backward:
  %sum = add %s, %x : f32[8] @ [_]
  update:
  %zero = zeros_like %s : f32[8] @ [_]
  %next = add %p, %s : f32[8] @ [_]
  store %s = %sum in backward
  store %s = %zero in update
  store %p = %next in update
",
            "  s0: %s = add %s, %x\n  update:\n  s0: %p = add %p, %s\n  s0: %s = zeros_like %s\n",
        );
    }

    #[test]
    fn states_can_trade_places() {
        check(
            "  backward:
  store %s = %t in backward
  store %t = %s in backward
",
            "  s0: %t.before_backward = copy %t
  s0: %s.before_backward = copy %s
  s0: %s = copy %t.before_backward
  s0: %t = copy %s.before_backward
",
        );
    }
}
