//! Printing: one walk over the program into one `String`.

use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::ops::Range;

use cranelift_entity::{EntityRef, SecondaryMap};
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::{PHASES, is_name_byte, section_name};
use crate::digest::Digest;
use crate::graph::{AfterForward, Checkpoint, Def, Init, Param, Scope, ScopeData, Training};
use crate::ops::{Body, CollectiveKind, Fused, Op};
use crate::placement::{AxisSet, Mesh, Sharding};
use crate::plan::{Buffer, Instruction, Plan, PlanSection};
use crate::quant::Recipe;
use crate::run::Run;
use crate::{Graph, Node, Phase, Section, TensorType, Value};

/// The text form of a graph.
pub fn print_graph(graph: &Graph) -> String {
    let mut printer = Printer::new(&graph.mesh, 256 + 160 * graph.order.len());
    printer.header("graph", &graph.name, graph.phase, graph.weight_mesh, graph.micro_batches);
    printer.out.push_str(" {\n");
    let blank = Graph::new("", Mesh::default());
    printer.training(&graph.training, &blank.training);
    printer.run(&graph.run);
    for (scope, data) in &graph.scopes {
        printer.scope(scope, data);
    }
    printer.bodies(graph.order.iter().map(|&it| &graph.nodes[it].op));
    let mut printer = GraphPrinter { live: live(graph), graph, printer };
    printer.leaves();
    printer.nodes();
    printer.outcome();
    printer.printer.close()
}

/// The text form of a plan. One that was compiled from a model ends with its own digest.
pub fn print_plan(plan: &Plan) -> String {
    let mut text = plan_without_digest(plan);
    if plan.model.is_some() {
        let line = format!("  digest {}\n", Digest::of(&text));
        text.insert_str(text.len() - "}\n".len(), &line);
    }
    text
}

/// The text form of a plan without its own digest, which is of this text.
pub(crate) fn plan_without_digest(plan: &Plan) -> String {
    let n_insts: usize = plan.sections.iter().map(Vec::len).sum();
    let mut printer = Printer::new(&plan.mesh, 256 + 128 * (n_insts + plan.buffers.len()));
    printer.header("plan", &plan.name, plan.phase, None, plan.micro_batches);
    let sizes = [
        ("persistent_bytes", plan.persistent_bytes),
        ("step_bytes", plan.step_bytes),
        ("events", u64::from(plan.events)),
    ];
    for (name, size) in sizes.into_iter().filter(|it| it.1 != 0) {
        printer.write(format_args!(" {name}={size}"));
    }
    printer.out.push_str(" {\n");
    printer.run(&plan.run);
    for (comm, &axes) in &plan.comms {
        let names = plan.mesh.names(axes);
        printer.write(format_args!("  comm {comm} = ({names})\n"));
    }
    for (stream, data) in &plan.streams {
        printer.write(format_args!("  stream {stream} = {}", stream_name(data.kind)));
        if data.workspace > 0 {
            printer.write(format_args!(" workspace={}", data.workspace));
        }
        printer.out.push('\n');
    }
    let instructions = plan.sections.iter().flatten();
    printer.bodies(instructions.filter_map(|it| match it {
        Instruction::Compute { op, .. } => Some(op),
        _ => None,
    }));
    let mut printer = PlanPrinter { copies: copies(plan), plan, printer };
    printer.buffers();
    for section in PlanSection::ALL {
        printer.section(section);
    }
    for (name, buffer) in &plan.results {
        printer.printer.result(name);
        printer.buffer(*buffer);
        printer.printer.out.push('\n');
    }
    if let Some(model) = plan.model {
        printer.printer.write(format_args!("  model {model}\n"));
    }
    printer.printer.close()
}

pub(super) fn stream_name(kind: crate::plan::StreamKind) -> &'static str {
    match kind {
        crate::plan::StreamKind::Compute => "compute",
        crate::plan::StreamKind::Comm => "comm",
    }
}

/// What graphs and plans have in common.
struct Printer<'a> {
    out: String,
    mesh: &'a Mesh,
    /// Where each op was printed first: layers repeat, and RON is slow.
    ops: FxHashMap<&'a Op, Range<usize>>,
    /// Where each sharding was printed first.
    shardings: FxHashMap<&'a Sharding, Range<usize>>,
    /// For each body, how many before it have its name.
    bodies: FxHashMap<&'a Body, u32>,
}

impl<'a> Printer<'a> {
    fn new(mesh: &'a Mesh, capacity: usize) -> Printer<'a> {
        Printer {
            out: String::with_capacity(capacity),
            mesh,
            ops: FxHashMap::default(),
            shardings: FxHashMap::default(),
            bodies: FxHashMap::default(),
        }
    }

    fn close(mut self) -> String {
        self.out.push_str("}\n");
        self.out
    }

    fn write(&mut self, args: std::fmt::Arguments<'_>) {
        self.out.write_fmt(args).expect("a String takes everything");
    }

    fn header(
        &mut self,
        kind: &str,
        name: &str,
        phase: Phase,
        weight_mesh: Option<AxisSet>,
        micro_batches: u32,
    ) {
        self.write(format_args!("{kind} @"));
        self.name(name);
        self.write(format_args!(" phase={} mesh=(", PHASES[phase as usize].1));
        for (i, axis) in self.mesh.axes.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            self.write(format_args!("{comma}{}={}", axis.name, axis.size));
            if let Some(whole) = &axis.part_of {
                self.write(format_args!(" of {whole}"));
            }
        }
        self.out.push(')');
        if let Some(axes) = weight_mesh {
            let names = self.mesh.names(axes);
            self.write(format_args!(" weight_mesh=({names})"));
        }
        if micro_batches != 1 {
            self.write(format_args!(" micro_batches={micro_batches}"));
        }
    }

    fn training(&mut self, training: &Training, default: &Training) {
        if training != default {
            self.out.push_str("  training ");
            self.ron(training);
            self.out.push('\n');
        }
    }

    fn run(&mut self, run: &Run) {
        if *run != Run::default() {
            self.out.push_str("  run ");
            self.ron(run);
            self.out.push('\n');
        }
    }

    fn scope(&mut self, scope: Scope, data: &ScopeData) {
        let is_root = scope.index() == 0;
        if is_root && *data == ScopeData::default() {
            return;
        }
        self.write(format_args!("  scope {} ", scope.index()));
        self.string(&data.path);
        match data.parent {
            None if is_root => (),
            None => self.out.push_str(" parent=none"),
            Some(parent) if parent.index() == 0 && !is_root => (),
            Some(parent) => self.write(format_args!(" parent={}", parent.index())),
        }
        if data.unit != 0 {
            self.write(format_args!(" unit={}", data.unit));
        }
        if let Some(layer) = data.layer {
            self.write(format_args!(" layer={layer}"));
        }
        if data.checkpoint != Checkpoint::default() {
            self.out.push_str(" checkpoint=");
            self.ron(&data.checkpoint);
        }
        match data.after_forward {
            AfterForward::Keep => (),
            AfterForward::Drop => self.out.push_str(" reshard"),
            AfterForward::KeepPiece(axes) => {
                self.write(format_args!(" reshard=({})", self.mesh.names(axes)));
            }
        }
        if let Some(axes) = data.weight_mesh {
            self.write(format_args!(" weight_mesh=({})", self.mesh.names(axes)));
        }
        if data.recipe != Recipe::default() {
            self.out.push_str(" recipe=");
            self.ron(&data.recipe);
        }
        self.out.push('\n');
    }

    fn ron(&mut self, value: &impl Serialize) {
        super::ron_options().to_writer(&mut self.out, value).expect("IR data has a RON form");
    }

    /// The bodies of these ops, each once.
    fn bodies(&mut self, ops: impl Iterator<Item = &'a Op>) {
        let mut seen: FxHashMap<&str, u32> = FxHashMap::default();
        for op in ops {
            let Op::Fused(Fused { body }) = op else { continue };
            if let Entry::Vacant(entry) = self.bodies.entry(body) {
                let count = seen.entry(body.name()).or_insert(0);
                entry.insert(*count);
                *count += 1;
                self.out.push_str("  body ");
                self.body_name(body);
                self.out.push(' ');
                let between = ["\n    ", "\n    ", "\n  "];
                body.write(&mut self.out, between).expect("a String takes everything");
                self.out.push('\n');
            }
        }
    }

    fn body_name(&mut self, body: &Body) {
        self.write(format_args!("@{}", body.name()));
        match self.bodies[body] {
            0 => (),
            n => self.write(format_args!("#{}", n + 1)),
        }
    }

    fn op(&mut self, op: &'a Op) {
        match op {
            Op::Collective(it) => return self.collective(it.kind, Some(it.axes)),
            Op::Fused(it) => return self.body_name(&it.body),
            _ => (),
        }
        match self.ops.get(op) {
            Some(range) => self.out.extend_from_within(range.clone()),
            None => {
                let start = self.out.len();
                self.out.push_str(&op.to_text());
                self.ops.insert(op, start..self.out.len());
            }
        }
    }

    /// `reduce_scatter(sum, tp)`; a plan names a communicator instead of axes.
    fn collective(&mut self, kind: CollectiveKind, axes: Option<AxisSet>) {
        self.out.push_str(kind.name());
        let reduce = kind.reduce().map(|it| it.name());
        let names = axes.map(|it| self.mesh.names(it));
        match (reduce, names) {
            (None, None) => (),
            (Some(reduce), None) => self.write(format_args!("({reduce})")),
            (None, Some(names)) => self.write(format_args!("({names})")),
            (Some(reduce), Some(names)) if names.is_empty() => {
                self.write(format_args!("({reduce})"));
            }
            (Some(reduce), Some(names)) => self.write(format_args!("({reduce}, {names})")),
        }
    }

    fn ty(&mut self, ty: &TensorType) {
        self.out.push_str(ty.dtype.name());
        self.shape(&ty.shape);
    }

    fn shape(&mut self, shape: &[u64]) {
        self.out.push('[');
        for (i, &size) in shape.iter().enumerate() {
            self.comma(i);
            self.write(format_args!("{size}"));
        }
        self.out.push(']');
    }

    fn sharding(&mut self, sharding: &'a Sharding) {
        self.out.push_str(" @ ");
        match self.shardings.get(sharding) {
            Some(range) => self.out.extend_from_within(range.clone()),
            None => {
                let start = self.out.len();
                self.write(format_args!("{}", sharding.display(self.mesh)));
                self.shardings.insert(sharding, start..self.out.len());
            }
        }
    }

    /// The local shape as a comment, where it differs.
    fn local(&mut self, ty: &TensorType, sharding: &Sharding) {
        let local = sharding.local_shape(&ty.shape, self.mesh);
        if local != ty.shape {
            self.out.push_str("  ; ");
            self.shape(&local);
        }
    }

    fn label(&mut self, label: &'a Option<Sharding>) {
        if let Some(label) = label {
            self.write(format_args!(" label={}", label.display(self.mesh)));
        }
    }

    fn aliases(&mut self, aliases: &[String]) {
        if aliases.is_empty() {
            return;
        }
        self.out.push_str(" aliases=(");
        for (i, alias) in aliases.iter().enumerate() {
            self.comma(i);
            self.value_name(alias);
        }
        self.out.push(')');
    }

    fn init(&mut self, init: &Init) {
        if *init != Init::Zeros {
            self.out.push_str(" init=");
            self.ron(init);
        }
    }

    fn result(&mut self, name: &str) {
        self.out.push_str("  result ");
        self.name(name);
        self.out.push_str(" = ");
    }

    fn comma(&mut self, i: usize) {
        self.out.push_str(if i == 0 { "" } else { ", " });
    }

    fn value_name(&mut self, name: &str) {
        self.out.push('%');
        self.name(name);
    }

    fn name(&mut self, name: &str) {
        match !name.is_empty() && name.bytes().all(is_name_byte) {
            true => self.out.push_str(name),
            false => self.string(name),
        }
    }

    fn string(&mut self, text: &str) {
        self.ron(&text);
    }
}

/// Values that the text mentions: leaves, and results of nodes that are part of the program.
fn live(graph: &Graph) -> SecondaryMap<Value, bool> {
    let mut res = SecondaryMap::new();
    res.resize(graph.values.len());
    for (value, data) in &graph.values {
        res[value] = !matches!(data.def, Def::Result { .. });
    }
    for &node in &graph.order {
        for &result in &graph.nodes[node].results {
            res[result] = true;
        }
    }
    res
}

struct GraphPrinter<'a> {
    graph: &'a Graph,
    printer: Printer<'a>,
    live: SecondaryMap<Value, bool>,
}

impl<'a> GraphPrinter<'a> {
    /// Inputs, the parameters in their own order, and states.
    fn leaves(&mut self) {
        let graph = self.graph;
        let mut listed: SecondaryMap<Value, bool> = SecondaryMap::new();
        for (value, _) in graph.values.iter().filter(|it| it.1.def == Def::Input) {
            self.leaf("input", value);
            self.end(value);
        }
        for param in &graph.params {
            listed[param.value] = true;
            self.param(param);
        }
        for (value, _) in graph.values.iter().filter(|it| it.1.def == Def::Param) {
            if !listed[value] {
                self.leaf("param", value);
                self.printer.out.push_str(" unlisted");
                self.end(value);
            }
        }
        for (value, data) in &graph.values {
            let kind = match data.def {
                Def::State => "state",
                Def::Sum => "sum",
                Def::Input | Def::Param | Def::Result { .. } => continue,
            };
            self.leaf(kind, value);
            self.end(value);
        }
    }

    fn param(&mut self, param: &'a Param) {
        self.leaf("param", param.value);
        self.printer.label(&param.label);
        self.printer.init(&param.init);
        if param.decay {
            self.printer.out.push_str(" decay");
        }
        if !param.trainable {
            self.printer.out.push_str(" frozen");
        }
        if param.placed {
            self.printer.out.push_str(" placed");
        }
        if param.reduce_dtype != self.graph.ty(param.value).dtype {
            self.printer.write(format_args!(" reduce={}", param.reduce_dtype));
        }
        self.printer.aliases(&param.aliases);
        // A value that nothing makes any more cannot be named.
        let compute = if self.live[param.compute] { param.compute } else { param.value };
        let full = if self.live[param.full] { param.full } else { compute };
        let grad = param.grad.filter(|&it| self.live[it]);
        let links = [
            ("compute", (compute != param.value).then_some(compute)),
            ("full", (full != compute).then_some(full)),
            ("grad", grad),
        ];
        for (key, value) in links {
            if let Some(value) = value {
                self.printer.write(format_args!(" {key}="));
                self.value(value);
            }
        }
        self.in_scope(param.scope);
        self.end(param.value);
    }

    fn leaf(&mut self, kind: &str, value: Value) {
        self.printer.write(format_args!("  {kind} "));
        self.value(value);
        self.printer.out.push_str(" : ");
        self.typed(value);
    }

    fn nodes(&mut self) {
        let mut section = None;
        for &node in &self.graph.order {
            let data = &self.graph.nodes[node];
            if section != Some(data.section) {
                section = Some(data.section);
                self.printer.write(format_args!("  {}:\n", section_name(data.section)));
            }
            self.node(node);
        }
    }

    fn node(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        self.printer.out.push_str("  ");
        self.values(&data.results);
        self.printer.out.push_str(" = ");
        self.printer.op(&data.op);
        if !data.inputs.is_empty() {
            self.printer.out.push(' ');
            self.values(&data.inputs);
        }
        self.printer.out.push_str(" : ");
        for (i, &result) in data.results.iter().enumerate() {
            self.printer.comma(i);
            self.typed(result);
        }
        self.in_scope(data.scope);
        match data.results.as_slice() {
            &[one] => self.end(one),
            _ => self.printer.out.push('\n'),
        }
    }

    /// Stores and results.
    fn outcome(&mut self) {
        for store in &self.graph.stores {
            self.printer.out.push_str("  store ");
            self.value(store.state);
            self.printer.out.push_str(" = ");
            self.value(store.value);
            if store.section != Section::Update {
                self.printer.write(format_args!(" in {}", section_name(store.section)));
            }
            self.printer.out.push('\n');
        }
        for (name, value) in &self.graph.results {
            self.printer.result(name);
            self.value(*value);
            self.printer.out.push('\n');
        }
    }

    /// Type, sharding and what else belongs to one value.
    fn typed(&mut self, value: Value) {
        let data = &self.graph.values[value];
        self.printer.ty(&data.ty);
        if let Some(sharding) = &data.sharding {
            self.printer.sharding(sharding);
        }
        if data.pinned {
            self.printer.out.push_str(" pinned");
        }
        if let Some(like) = data.like.filter(|&it| self.live[it]) {
            self.printer.out.push_str(" like=");
            self.value(like);
        }
    }

    /// Ends a line that is about one value.
    fn end(&mut self, value: Value) {
        let data = &self.graph.values[value];
        if let (Phase::Local, Some(sharding)) = (self.graph.phase, &data.sharding) {
            self.printer.local(&data.ty, sharding);
        }
        self.printer.out.push('\n');
    }

    fn in_scope(&mut self, scope: Scope) {
        if scope.index() != 0 {
            self.printer.write(format_args!(" in {}", scope.index()));
        }
    }

    fn values(&mut self, values: &[Value]) {
        for (i, &value) in values.iter().enumerate() {
            self.printer.comma(i);
            self.value(value);
        }
    }

    fn value(&mut self, value: Value) {
        self.printer.value_name(&self.graph.values[value].name);
    }
}

/// For each buffer, how many before it have its name.
fn copies(plan: &Plan) -> SecondaryMap<Buffer, u32> {
    let mut res = SecondaryMap::new();
    res.resize(plan.buffers.len());
    let mut seen: FxHashMap<&str, u32> = FxHashMap::default();
    seen.reserve(plan.buffers.len());
    for (buffer, data) in &plan.buffers {
        let count = seen.entry(&data.name).or_insert(0);
        res[buffer] = *count;
        *count += 1;
    }
    res
}

struct PlanPrinter<'a> {
    plan: &'a Plan,
    printer: Printer<'a>,
    copies: SecondaryMap<Buffer, u32>,
}

impl<'a> PlanPrinter<'a> {
    fn buffers(&mut self) {
        for data in self.plan.buffers.values() {
            self.printer.out.push_str("  buffer ");
            self.printer.value_name(&data.name);
            self.printer.out.push_str(" : ");
            self.printer.ty(&data.ty);
            self.printer.sharding(&data.sharding);
            self.printer.write(format_args!(" {}", data.role.name()));
            if let Some(offset) = data.offset {
                self.printer.write(format_args!(" at {offset}"));
            }
            self.printer.local(&data.ty, &data.sharding);
            self.printer.out.push('\n');
        }
        for param in &self.plan.params {
            self.printer.out.push_str("  param ");
            self.buffer(param.buffer);
            self.printer.label(&param.label);
            self.printer.init(&param.init);
            self.printer.aliases(&param.aliases);
            self.printer.out.push('\n');
        }
    }

    fn section(&mut self, section: PlanSection) {
        let plan = self.plan;
        if plan.section(section).is_empty() {
            return;
        }
        self.printer.write(format_args!("  {}:\n", section.name()));
        for inst in plan.section(section) {
            self.printer.write(format_args!("  {}: ", inst.stream()));
            self.inst(inst);
            self.printer.out.push('\n');
        }
    }

    fn inst(&mut self, inst: &'a Instruction) {
        match inst {
            Instruction::Compute { op, args, results, stream: _ } => {
                self.list(results.iter().copied());
                self.printer.out.push_str(" = ");
                self.printer.op(op);
                self.printer.out.push_str(if args.is_empty() { "" } else { " " });
                self.list(args.iter().copied());
            }
            Instruction::Collective { kind, comm, parts, stream: _ } => {
                for (i, part) in parts.iter().enumerate() {
                    self.printer.comma(i);
                    self.printer.out.push_str(if part.adds { "+" } else { "" });
                    self.buffer(part.dst);
                }
                self.printer.out.push_str(" = ");
                self.printer.collective(*kind, None);
                self.printer.out.push(' ');
                self.list(parts.iter().map(|it| it.src));
                self.printer.write(format_args!(" on {comm}"));
            }
            Instruction::Copy { src, dst, stream: _ } => {
                self.buffer(*dst);
                self.printer.out.push_str(" = copy ");
                self.buffer(*src);
            }
            Instruction::Record { event, stream: _ } => {
                self.printer.write(format_args!("record {event}"));
            }
            Instruction::Wait { event, stream: _ } => {
                self.printer.write(format_args!("wait {event}"));
            }
        }
    }

    fn list(&mut self, buffers: impl Iterator<Item = Buffer>) {
        for (i, buffer) in buffers.enumerate() {
            self.printer.comma(i);
            self.buffer(buffer);
        }
    }

    fn buffer(&mut self, buffer: Buffer) {
        self.printer.value_name(&self.plan.buffers[buffer].name);
        match self.copies[buffer] {
            0 => (),
            n => self.printer.write(format_args!("#{}", n + 1)),
        }
    }
}
