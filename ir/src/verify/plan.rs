//! Invariants of a [`Plan`].
//!
//! In every phase:
//! * Handles are in range; buffers have distinct names and valid shardings; the first stream is for
//!   compute, scratch is aligned. Parameters are in buffers of that role, results are whole on every rank and survive their
//!   section.
//! * Ops type-check on global types and on what one rank holds; their operands agree on how the op's
//!   factors are sharded, and results are sharded as follows, so that a partial value meets linear ops
//!   only. Every part of a collective is the step that its kind and axes say. A copy changes nothing.
//! * A result is made in the buffer of an operand only where the op works in place.
//! * A buffer is written before it is read. Parameters, states and inputs are there from the start; what
//!   `step` leaves for `update` is no temporary, and what `prepare` leaves is a state.
//! * **No races.** Instructions that touch the same buffer, one of them writing, are ordered: by their
//!   stream, or by an event. Streams are otherwise taken to run at any speed.
//! * An event is recorded once and waited for after that, in the same section. So waiting is acyclic,
//!   and as every rank issues the same list, so is the order of collectives across communicators.
//! * Collectives of one communicator are on one stream, or ranks could meet in different ones. Nothing
//!   but collectives is on a stream for communication.
//!
//! `Lowered`: everything is on the compute stream.
//!
//! `Planned`: every buffer is inside its arena, aligned; those that survive a step do not overlap. The
//! two rules above hold by *byte*: whoever takes over the bytes of a temporary is ordered after all uses of
//! that, and nobody reads it any more; a result is there when the step is over. The bytes of an operand of its own an op may take over where it works
//! in place, all of them and no others.

use std::collections::BTreeMap;

use cranelift_entity::{EntityRef, SecondaryMap};
use rustc_hash::{FxBuildHasher, FxHashSet};
use smallvec::SmallVec;

use crate::Phase;
use crate::ops::{Collective, Op};
use crate::plan::{
    ALIGN, Arena, Buffer, Clocks, Comm, Instruction, Plan, PlanSection, Role, Stream, StreamKind,
};
use crate::verify::op::{Attributes, Checker, Class};
use crate::verify::{Place, VerifyError};

/// Every broken invariant. See the [module docs](self).
pub fn verify(plan: &Plan) -> Vec<VerifyError> {
    let mut cx = Cx { plan, errors: Vec::new() };
    cx.handles();
    if !cx.errors.is_empty() {
        return cx.errors;
    }
    let mut checker = Checker::new(&plan.mesh, Attributes::Local);
    let Some(class_of) = cx.buffers(&mut checker) else { return cx.errors };
    cx.ops(&class_of, &mut checker);
    cx.streams();
    cx.events();
    let mut bytes = SecondaryMap::new();
    for buffer in plan.buffers.keys() {
        bytes[buffer] = checker.local_bytes(class_of[buffer]);
    }
    let placed = plan.phase >= Phase::Planned && cx.offsets(&bytes);
    cx.accesses(placed.then_some(&bytes));
    cx.errors
}

struct Cx<'a> {
    plan: &'a Plan,
    errors: Vec<VerifyError>,
}

impl<'a> Cx<'a> {
    fn program(&mut self, message: &str) {
        let message = message.to_string();
        self.errors.push(VerifyError { place: Place::Program, context: String::new(), message });
    }

    fn buffer(&mut self, buffer: Buffer, message: String) {
        let data = &self.plan.buffers[buffer];
        let sharding = data.sharding.display(&self.plan.mesh);
        let context = format!("{} @ {sharding} {}", data.ty, data.role.name());
        let place = Place::Buffer(data.name.clone());
        self.errors.push(VerifyError { place, context, message });
    }

    fn instruction(&mut self, at: (PlanSection, usize), message: String) {
        let place = Place::Instruction { section: at.0, index: at.1 };
        let context = show(self.plan, &self.plan.section(at.0)[at.1]);
        self.errors.push(VerifyError { place, context, message });
    }

    fn instructions(
        &self,
    ) -> impl Iterator<Item = ((PlanSection, usize), &'a Instruction)> + use<'a> {
        let plan = self.plan;
        PlanSection::ALL.into_iter().flat_map(move |section| {
            plan.section(section).iter().enumerate().map(move |it| ((section, it.0), it.1))
        })
    }

    fn handles(&mut self) {
        let plan = self.plan;
        let is_buffer = |it: &Buffer| it.index() < plan.buffers.len();
        if plan.streams.values().next().map(|it| it.kind) != Some(StreamKind::Compute) {
            self.program("the first stream is not for compute");
        }
        if let Some((stream, it)) = plan.streams.iter().find(|it| it.1.workspace % ALIGN != 0) {
            self.program(&format!("{stream}: {} is not a multiple of {ALIGN}", it.workspace));
        }
        for (at, instruction) in self.instructions() {
            let stream = instruction.stream().index() < plan.streams.len();
            let rest = match instruction {
                Instruction::Compute { args, results, .. } => {
                    args.iter().chain(results).all(is_buffer)
                }
                Instruction::Collective { comm, parts, .. } => {
                    comm.index() < plan.comms.len()
                        && parts.iter().all(|it| is_buffer(&it.src) && is_buffer(&it.dst))
                }
                Instruction::Copy { src, dst, .. } => is_buffer(src) && is_buffer(dst),
                Instruction::Record { event, .. } | Instruction::Wait { event, .. } => {
                    event.index() < plan.events as usize
                }
            };
            if !(stream && rest) {
                let place = Place::Instruction { section: at.0, index: at.1 };
                let message = "names a buffer, stream, event or communicator that does not exist";
                let (context, message) = (format!("{instruction:?}"), message.to_string());
                self.errors.push(VerifyError { place, context, message });
            }
        }
        let mut named =
            plan.params.iter().map(|it| it.buffer).chain(plan.results.iter().map(|it| it.1));
        if !named.all(|it| is_buffer(&it)) {
            self.program("a parameter or result is in a buffer that does not exist");
        }
        if plan.comms.values().any(|it| !it.is_subset(plan.mesh.all())) {
            self.program("a communicator is over an axis that the mesh lacks");
        }
    }

    /// The class of each buffer, unless one has no valid sharding.
    fn buffers(&mut self, checker: &mut Checker<'a>) -> Option<SecondaryMap<Buffer, Class>> {
        let plan = self.plan;
        let mut names: FxHashSet<&str> =
            FxHashSet::with_capacity_and_hasher(plan.buffers.len(), FxBuildHasher);
        let mut class_of = SecondaryMap::new();
        class_of.resize(plan.buffers.len());
        let mut valid = true;
        for (buffer, data) in &plan.buffers {
            if !names.insert(&data.name) {
                self.buffer(buffer, "another buffer has this name".into());
            }
            match checker.class(&data.ty, &data.sharding) {
                Ok(class) => class_of[buffer] = class,
                Err(error) => {
                    valid = false;
                    let place = Place::Buffer(data.name.clone());
                    let (context, message) = (data.ty.to_string(), error.to_string());
                    self.errors.push(VerifyError { place, context, message });
                }
            }
        }
        let mut listed: SecondaryMap<Buffer, bool> = SecondaryMap::new();
        for param in &plan.params {
            if std::mem::replace(&mut listed[param.buffer], true) {
                self.buffer(param.buffer, "is listed as a parameter more than once".into());
            }
            if plan.buffers[param.buffer].role != Role::Param {
                self.buffer(param.buffer, "holds a parameter, and says that it does not".into());
            }
        }
        for (name, buffer) in &plan.results {
            let data = &plan.buffers[*buffer];
            if data.role == Role::Temp {
                self.buffer(*buffer, format!("holds the result `{name}`, and is a temporary"));
            }
            if !data.sharding.sharded_axes().union(data.sharding.partial_axes()).is_empty() {
                let message = format!("holds the result `{name}`, and is not whole on every rank");
                self.buffer(*buffer, message);
            }
        }
        valid.then_some(class_of)
    }

    fn ops(&mut self, class_of: &SecondaryMap<Buffer, Class>, checker: &mut Checker<'a>) {
        let plan = self.plan;
        for (at, instruction) in self.instructions() {
            match instruction {
                Instruction::Compute { op: Op::Collective(_) | Op::Reshard(_), .. } => {
                    self.instruction(at, "moves data, and is no collective instruction".into());
                }
                Instruction::Compute { op, args, results, .. } => {
                    let classes = |of: &[Buffer]| -> SmallVec<[Class; 4]> {
                        of.iter().map(|&it| class_of[it]).collect()
                    };
                    for error in checker.op(op, &classes(args), &classes(results)) {
                        let error = error.clone();
                        self.instruction(at, error);
                    }
                    self.in_place(at, op, args, results);
                }
                Instruction::Collective { kind, comm, parts, .. } => {
                    for part in parts {
                        let (from, to) = (class_of[part.src], class_of[part.dst]);
                        if let Some(error) = checker.part(*kind, plan.comms[*comm], from, to) {
                            let error = error.to_string();
                            self.instruction(at, error);
                        }
                        if parts.iter().any(|it| it.src == part.dst) {
                            self.instruction(at, "writes a buffer that it reads".into());
                        }
                        if parts.iter().filter(|it| it.dst == part.dst).count() > 1 {
                            self.instruction(at, "writes a buffer twice".into());
                        }
                    }
                }
                Instruction::Copy { src, dst, .. } => {
                    if class_of[*src] != class_of[*dst] {
                        self.instruction(at, "copies to another type or layout".into());
                    }
                    if src == dst {
                        self.instruction(at, "copies a buffer to itself".into());
                    }
                }
                Instruction::Record { .. } | Instruction::Wait { .. } => {}
            }
        }
    }

    /// A result is in the buffer of an operand only where the op allows it.
    fn in_place(&mut self, at: (PlanSection, usize), op: &Op, args: &[Buffer], results: &[Buffer]) {
        for (i, result) in results.iter().enumerate() {
            if results[..i].contains(result) {
                self.instruction(at, "makes two results in one buffer".into());
            }
            for (operand, _) in args.iter().enumerate().filter(|it| it.1 == result) {
                if !op.in_place().contains(&(i, operand)) {
                    let message =
                        format!("makes result {i} in operand {operand}, which it may not");
                    self.instruction(at, message);
                }
            }
        }
    }

    fn streams(&mut self) {
        let plan = self.plan;
        let mut stream_of: SecondaryMap<Comm, Option<Stream>> = SecondaryMap::new();
        for (at, instruction) in self.instructions() {
            let stream = instruction.stream();
            if plan.phase < Phase::Scheduled && stream.index() != 0 {
                self.instruction(at, "is scheduled too early".into());
            }
            match instruction {
                Instruction::Collective { kind, comm, .. } if !kind.is_local() => {
                    let first = *stream_of[*comm].get_or_insert(stream);
                    if first != stream {
                        let message = format!("{comm} has collectives on {first} and on {stream}");
                        self.instruction(at, message);
                    }
                }
                Instruction::Collective { .. }
                | Instruction::Compute { .. }
                | Instruction::Copy { .. } => {
                    if plan.streams[stream].kind != StreamKind::Compute {
                        self.instruction(at, "computes on a stream for communication".into());
                    }
                }
                Instruction::Record { .. } | Instruction::Wait { .. } => {}
            }
        }
    }

    fn events(&mut self) {
        let mut recorded = vec![None; self.plan.events as usize];
        for (at, instruction) in self.instructions() {
            match instruction {
                Instruction::Record { event, .. } => {
                    if recorded[event.index()].replace(at.0).is_some() {
                        self.instruction(at, "the event is recorded twice".into());
                    }
                }
                Instruction::Wait { event, .. } => {
                    if recorded[event.index()] != Some(at.0) {
                        self.instruction(at, "waits for what this section has not recorded".into());
                    }
                }
                Instruction::Compute { .. }
                | Instruction::Collective { .. }
                | Instruction::Copy { .. } => {}
            }
        }
    }

    /// Whether every buffer has its place.
    fn offsets(&mut self, bytes: &SecondaryMap<Buffer, u64>) -> bool {
        let plan = self.plan;
        let mut valid = true;
        let mut persistent: Vec<(u64, u64, Buffer)> = Vec::new();
        for (buffer, data) in &plan.buffers {
            let Some(offset) = data.offset else {
                valid = false;
                self.buffer(buffer, "has no offset".into());
                continue;
            };
            if offset % ALIGN != 0 {
                self.buffer(buffer, format!("offset {offset} is not a multiple of {ALIGN}"));
            }
            let size = match data.role.arena() {
                Arena::Persistent => plan.persistent_bytes,
                Arena::Step => plan.step_bytes,
            };
            let end = offset.checked_add(bytes[buffer]).filter(|&it| it <= size);
            match end {
                None => {
                    let bytes = bytes[buffer];
                    let message = format!("{bytes} bytes at {offset} leave an arena of {size}");
                    self.buffer(buffer, message);
                }
                Some(end) if data.role.arena() == Arena::Persistent && end > offset => {
                    persistent.push((offset, end, buffer));
                }
                Some(_) => {}
            }
        }
        persistent.sort();
        for pair in persistent.windows(2) {
            if pair[1].0 < pair[0].1 {
                let name = &plan.buffers[pair[0].2].name;
                self.buffer(pair[1].2, format!("overlaps %{name}, and both survive a step"));
            }
        }
        valid
    }

    /// Everything is written before it is read, and no two accesses race; by byte, where `bytes` says
    /// how large buffers are.
    fn accesses(&mut self, bytes: Option<&SecondaryMap<Buffer, u64>>) {
        let plan = self.plan;
        let mut contents: SecondaryMap<Buffer, Content> = SecondaryMap::new();
        contents.resize(plan.buffers.len());
        for (buffer, data) in &plan.buffers {
            contents[buffer].there = match data.role {
                Role::Param | Role::State | Role::Input => true,
                Role::Carried | Role::Temp => false,
            };
        }
        for sections in PlanSection::TIMELINES {
            let mut tenants = BTreeMap::new();
            for &section in sections {
                let mut walk = Walk {
                    cx: self,
                    clocks: Clocks::new(plan.streams.len(), plan.events),
                    contents: &mut contents,
                    tenants: &mut tenants,
                    bytes,
                    at: (section, 0),
                };
                for (index, instruction) in plan.section(section).iter().enumerate() {
                    walk.at = (section, index);
                    walk.instruction(instruction);
                }
                end_section(plan, &mut contents);
            }
            self.results(&contents);
            for (buffer, data) in &plan.buffers {
                contents[buffer].there &= data.role.arena() == Arena::Persistent;
            }
        }
    }

    /// What the runtime reads after a step is still there.
    fn results(&mut self, contents: &SecondaryMap<Buffer, Content>) {
        for (name, buffer) in &self.plan.results {
            if let Some(other) = contents[*buffer].lost_to {
                let other = &self.plan.buffers[other].name;
                let message = format!("holds the result `{name}`, and its bytes hold %{other}");
                self.buffer(*buffer, message);
            }
        }
    }
}

/// All streams are done, and temporaries with them.
fn end_section(plan: &Plan, contents: &mut SecondaryMap<Buffer, Content>) {
    for (buffer, data) in &plan.buffers {
        let content = &mut contents[buffer];
        content.write = None;
        content.reads.clear();
        content.there &= data.role != Role::Temp;
    }
}

/// What is known of a buffer's content.
#[derive(Debug, Clone, Default)]
struct Content {
    /// It has been written, and not been overwritten by another buffer.
    there: bool,
    /// The buffer that took over its bytes.
    lost_to: Option<Buffer>,
    /// Last write.
    write: Option<Access>,
    /// Reads since, the last one of each stream.
    reads: SmallVec<[Access; 2]>,
}

/// An access by an instruction of the section, done when `stream` has reached `time`.
#[derive(Debug, Clone, Copy)]
struct Access {
    stream: Stream,
    time: u32,
    index: usize,
}

/// A walk through a section in issue order.
struct Walk<'a, 'b> {
    cx: &'b mut Cx<'a>,
    clocks: Clocks,
    contents: &'b mut SecondaryMap<Buffer, Content>,
    /// Who was the last to write bytes of the step's arena: start -> (end, buffer).
    tenants: &'b mut BTreeMap<u64, (u64, Buffer)>,
    bytes: Option<&'b SecondaryMap<Buffer, u64>>,
    at: (PlanSection, usize),
}

impl Walk<'_, '_> {
    fn instruction(&mut self, instruction: &Instruction) {
        let stream = instruction.stream();
        match instruction {
            Instruction::Record { event, .. } => {
                self.clocks.record(*event, stream);
            }
            // An event that was not recorded is reported already.
            Instruction::Wait { event, .. } => {
                self.clocks.wait(*event, stream);
            }
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. } => {
                let time = self.clocks.run(stream);
                let access = Access { stream, time, index: self.at.1 };
                let (reads, writes) = (instruction.reads(), instruction.writes());
                reads.iter().for_each(|&it| self.read(it, access));
                for i in 0..writes.len() {
                    self.write(instruction, &reads, &writes[..=i], access);
                }
            }
        }
    }

    fn read(&mut self, buffer: Buffer, access: Access) {
        let content = &self.contents[buffer];
        let data = &self.cx.plan.buffers[buffer];
        if !content.there {
            let message = match content.lost_to {
                Some(other) => {
                    let other = &self.cx.plan.buffers[other].name;
                    format!("reads %{}, whose bytes hold %{other} by now", data.name)
                }
                None => format!("reads %{}, which nothing has written in time", data.name),
            };
            self.cx.instruction(self.at, message);
        }
        self.expect_after(buffer, content.write, access, "written");
        let reads = &mut self.contents[buffer].reads;
        match reads.iter_mut().find(|it| it.stream == access.stream) {
            Some(last) => *last = access,
            None => reads.push(access),
        }
    }

    /// Writes the last of `writes`; the instruction has written the others before.
    fn write(
        &mut self,
        instruction: &Instruction,
        reads: &[Buffer],
        writes: &[Buffer],
        access: Access,
    ) {
        let buffer = writes[writes.len() - 1];
        self.expect_over(buffer, access);
        let step = self.cx.plan.buffers[buffer].role.arena() == Arena::Step;
        if let (false, true, Some(bytes)) = (self.contents[buffer].there, step, self.bytes) {
            for (other, whole) in self.take_over(buffer, bytes[buffer]) {
                if !reads.contains(&other) && !writes.contains(&other) {
                    self.expect_over(other, access);
                } else if !(whole && may_take_over(instruction, writes.len() - 1, other)) {
                    let name = &self.cx.plan.buffers[other].name;
                    let message = format!("overwrites %{name}, which it uses itself");
                    self.cx.instruction(self.at, message);
                }
                self.contents[other].there = false;
                self.contents[other].lost_to = Some(buffer);
            }
        }
        let content = &mut self.contents[buffer];
        (content.there, content.lost_to) = (true, None);
        content.write = Some(access);
        content.reads.clear();
    }

    /// `buffer` becomes the tenant of its bytes; the tenants before, and whether they had the same ones.
    fn take_over(&mut self, buffer: Buffer, bytes: u64) -> SmallVec<[(Buffer, bool); 4]> {
        let offset = self.cx.plan.buffers[buffer].offset.filter(|_| bytes > 0);
        let Some(start) = offset else { return SmallVec::new() };
        let end = start + bytes;
        let before = self.tenants.range(..start).next_back().filter(|it| it.1.0 > start);
        let first = before.map_or(start, |it| *it.0);
        let old: SmallVec<[(u64, u64, Buffer); 4]> =
            self.tenants.range(first..end).map(|(&start, &(end, it))| (start, end, it)).collect();
        for &(from, to, other) in &old {
            self.tenants.remove(&from);
            if from < start {
                self.tenants.insert(from, (start, other));
            }
            if to > end {
                self.tenants.insert(end, (to, other));
            }
        }
        self.tenants.insert(start, (end, buffer));
        let others = old.into_iter().filter(|it| it.2 != buffer);
        others.map(|(from, to, other)| (other, (from, to) == (start, end))).collect()
    }

    /// Every use of what `buffer` holds is over when `access` starts.
    fn expect_over(&mut self, buffer: Buffer, access: Access) {
        self.expect_after(buffer, self.contents[buffer].write, access, "written");
        for i in 0..self.contents[buffer].reads.len() {
            let read = self.contents[buffer].reads[i];
            self.expect_after(buffer, Some(read), access, "read");
        }
    }

    fn expect_after(&mut self, buffer: Buffer, first: Option<Access>, then: Access, done: &str) {
        let Some(first) = first else { return };
        if self.clocks.saw(then.stream, first.stream, first.time) {
            return;
        }
        let name = &self.cx.plan.buffers[buffer].name;
        let message = format!(
            "races with {} {}: %{name} is {done} there on {}, and nothing orders the two",
            self.at.0.name(),
            first.index,
            first.stream
        );
        self.cx.instruction(self.at, message);
    }
}

/// Whether result `index` may be made in the bytes of `operand`.
fn may_take_over(instruction: &Instruction, index: usize, operand: Buffer) -> bool {
    let Instruction::Compute { op, args, .. } = instruction else { return false };
    let mut of_operand = args.iter().enumerate().filter(|it| *it.1 == operand).peekable();
    of_operand.peek().is_some() && of_operand.all(|it| op.in_place().contains(&(index, it.0)))
}

/// `s0: %c = add %a, %b`.
fn show(plan: &Plan, instruction: &Instruction) -> String {
    let names = |of: &[Buffer]| {
        let names = of.iter().map(|&it| format!("%{}", plan.buffers[it].name));
        names.collect::<Vec<_>>().join(", ")
    };
    let what = match instruction {
        Instruction::Compute { op, .. } => op.to_text(),
        Instruction::Collective { kind, comm, .. } => {
            Op::from(Collective { kind: *kind, axes: plan.comms[*comm] }).to_text()
        }
        Instruction::Copy { .. } => "copy".to_string(),
        Instruction::Record { event, stream } => return format!("{stream}: record {event}"),
        Instruction::Wait { event, stream } => return format!("{stream}: wait {event}"),
    };
    let (reads, writes) = (instruction.reads(), instruction.writes());
    let space = if reads.is_empty() { "" } else { " " };
    let (reads, writes) = (names(&reads), names(&writes));
    format!("{}: {writes} = {what}{space}{reads}", instruction.stream())
}
