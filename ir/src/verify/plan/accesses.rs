//! `values`, `lifetimes` and `races`: one walk in issue order over maps of who touched which bytes last.
//!
//! ```text
//! bytes       0       256             1024      1280
//! segments    | %a     | %b            |         ..
//! written     | s0: 12 | s1: 14        |
//! read since  | s1: 15 |               |
//! ```
//!
//! A write makes one segment of its bytes, whatever was there; so a map has at most as many segments as
//! there were writes, and each access costs a search and the segments that it touches: near-linear in the
//! length of the plan. Three things are seen on the way:
//! * what is read has been written (`values`), and its bytes are still its own (`lifetimes`);
//! * an instruction makes a result in the bytes of an operand only where the op works in place;
//! * whoever touches bytes starts after those that touched them before are over, if one of the two writes
//!   ([`Order`]).
//!
//! Before there are offsets, every buffer has bytes of its own. A section that runs several times a step is
//! walked twice: what a third run finds is what the second did.

use std::collections::BTreeMap;

use cranelift_entity::SecondaryMap;
use smallvec::{SmallVec, smallvec};

use super::order::Order;
use super::{At, Cx, at_text};
use crate::plan::{Arena, Buffer, Instruction, PlanSection, Role, Stream};
use crate::verify::Property;

/// `bytes` says how large buffers are, once they have a place.
pub(super) fn check(cx: &mut Cx<'_>, bytes: Option<&SecondaryMap<Buffer, u64>>) {
    let plan = cx.plan;
    let order = Order::new(plan.streams.len(), plan.events);
    let mut walk = Walk {
        ranges: ranges(cx, bytes),
        cx,
        order,
        there: SecondaryMap::new(),
        arenas: [BTreeMap::new(), BTreeMap::new()],
        at: (PlanSection::Prepare, 0),
        run: 0,
        counts: Counts::default(),
    };
    walk.there.resize(plan.buffers.len());
    for (buffer, data) in &plan.buffers {
        if matches!(data.role, Role::Param | Role::State | Role::Input) {
            walk.there[buffer] = true;
            walk.settle(buffer);
        }
    }
    for sections in PlanSection::TIMELINES {
        for &section in sections {
            walk.section(section);
            // The second run finds the memory that the first one left.
            if plan.runs(section) > 1 && walk.cx.proof.broken.is_empty() {
                walk.section(section);
            }
        }
        walk.results(sections.contains(&PlanSection::Update));
        walk.arenas[Arena::Step as usize].clear();
        let step = plan.buffers.iter().filter(|it| it.1.role.arena() == Arena::Step);
        step.for_each(|it| walk.there[it.0] = false);
    }
    let Counts { reads, writes, pairs, takeovers } = walk.counts;
    cx.proof.add(Property::Values, vec![("reads", reads), ("writes", writes)]);
    cx.proof.add(Property::Lifetimes, vec![("accesses", reads + writes), ("in place", takeovers)]);
    cx.proof.add(Property::Races, vec![("ordered pairs", pairs)]);
}

/// Where each buffer is: its first byte and the one behind it.
fn ranges(
    cx: &Cx<'_>,
    bytes: Option<&SecondaryMap<Buffer, u64>>,
) -> SecondaryMap<Buffer, (u64, u64)> {
    let mut res = SecondaryMap::new();
    res.resize(cx.plan.buffers.len());
    for (buffer, data) in &cx.plan.buffers {
        let number = u64::from(buffer.as_u32());
        res[buffer] = match bytes {
            // Where the end is no number, the buffer is not inside its arena, which was reported.
            Some(bytes) => {
                let start = data.offset.unwrap_or(0);
                (start, start.saturating_add(bytes[buffer]))
            }
            None => (number, number + 1),
        };
    }
    res
}

/// Bytes of an arena that are alike.
#[derive(Debug, Clone, Default)]
struct Segment {
    end: u64,
    /// Whose content they hold.
    tenant: Option<Buffer>,
    /// Who wrote them.
    write: Option<Access>,
    /// Who has read them since, the last one of each stream.
    reads: SmallVec<[Access; 2]>,
}

/// What an instruction did when its stream was at `time`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Access {
    at: At,
    /// The run of a section, counted through all runs.
    run: u32,
    stream: Stream,
    time: u32,
}

#[derive(Default)]
struct Counts {
    reads: u64,
    writes: u64,
    pairs: u64,
    takeovers: u64,
}

struct Walk<'a, 'b> {
    cx: &'b mut Cx<'a>,
    order: Order,
    ranges: SecondaryMap<Buffer, (u64, u64)>,
    /// What has been written, and not since been lost with its section.
    there: SecondaryMap<Buffer, bool>,
    /// Segments by their first byte.
    arenas: [BTreeMap<u64, Segment>; 2],
    at: At,
    run: u32,
    counts: Counts,
}

impl Walk<'_, '_> {
    fn section(&mut self, section: PlanSection) {
        let plan = self.cx.plan;
        self.run += 1;
        self.order = Order::new(plan.streams.len(), plan.events);
        for (index, instruction) in plan.section(section).iter().enumerate() {
            self.at = (section, index);
            self.instruction(instruction);
        }
        let temps = plan.buffers.iter().filter(|it| it.1.role == Role::Temp);
        temps.for_each(|it| self.there[it.0] = false);
    }

    fn instruction(&mut self, instruction: &Instruction) {
        let stream = instruction.stream();
        match instruction {
            Instruction::Record { event, .. } => self.order.record(*event, stream),
            Instruction::Wait { event, .. } => self.order.wait(*event, stream),
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. } => {
                let time = self.order.starts(stream);
                let access = Access { at: self.at, run: self.run, stream, time };
                let (reads, writes) = (instruction.reads(), instruction.writes());
                reads.iter().for_each(|&it| self.read(it, access));
                for i in 0..writes.len() {
                    self.write(instruction, &reads, &writes[..=i], access);
                }
            }
        }
    }

    /// A buffer has its bytes, as if written long ago.
    fn settle(&mut self, buffer: Buffer) {
        let (start, end) = self.ranges[buffer];
        if start < end {
            let segment = Segment { end, tenant: Some(buffer), ..Segment::default() };
            self.map(buffer).insert(start, segment);
        }
    }

    fn map(&mut self, buffer: Buffer) -> &mut BTreeMap<u64, Segment> {
        &mut self.arenas[self.cx.plan.buffers[buffer].role.arena() as usize]
    }

    fn read(&mut self, buffer: Buffer, access: Access) {
        self.counts.reads += 1;
        let name = self.cx.name(buffer);
        if !self.there[buffer] {
            let message = format!("reads %{name}, which nothing has written in time");
            return self.cx.instruction(Property::Values, self.at, message);
        }
        let (start, end) = self.ranges[buffer];
        let mut before: SmallVec<[Access; 2]> = SmallVec::new();
        let mut lost = None;
        let mut read = |segment: &mut Segment| {
            if segment.tenant != Some(buffer) {
                lost = lost.or(segment.tenant);
                return;
            }
            before.extend(segment.write);
            match segment.reads.iter_mut().find(|it| it.stream == access.stream) {
                Some(last) => *last = access,
                None => segment.reads.push(access),
            }
        };
        // Most segments are those of one buffer, which one search finds.
        let map = self.map(buffer);
        match map.get_mut(&start) {
            Some(segment) if segment.end >= end && start < end => read(segment),
            _ => overlapping(map, start, end).for_each(|it| read(it.1)),
        }
        if let Some(other) = lost {
            let other = self.cx.name(other);
            let message = format!("reads %{name}, whose bytes hold %{other} by now");
            self.cx.instruction(Property::Lifetimes, self.at, message);
        }
        before.iter().for_each(|&it| self.expect_over(it, access, buffer, "written"));
    }

    /// Writes the last of `writes`; the instruction has written the others before.
    fn write(
        &mut self,
        instruction: &Instruction,
        reads: &[Buffer],
        writes: &[Buffer],
        access: Access,
    ) {
        self.counts.writes += 1;
        let buffer = writes[writes.len() - 1];
        self.there[buffer] = true;
        let (start, end) = self.ranges[buffer];
        if start >= end {
            return;
        }
        for (from, old) in self.replace(buffer, access) {
            let Some(tenant) = old.tenant else { continue };
            let own = tenant == buffer;
            if !own && (reads.contains(&tenant) || writes.contains(&tenant)) && self.there[tenant] {
                let whole = (from, old.end) == (start, end) && self.ranges[tenant] == (start, end);
                if whole && may_take_over(instruction, writes.len() - 1, tenant) {
                    self.counts.takeovers += 1;
                } else {
                    let name = self.cx.name(tenant);
                    let message = format!("overwrites %{name}, which it uses itself");
                    self.cx.instruction(Property::Lifetimes, self.at, message);
                }
            }
            old.write.iter().for_each(|&it| self.expect_over(it, access, tenant, "written"));
            old.reads.iter().for_each(|&it| self.expect_over(it, access, tenant, "read"));
        }
    }

    /// `buffer` becomes the tenant of its bytes; the segments that were there, cut to them.
    fn replace(&mut self, buffer: Buffer, access: Access) -> SmallVec<[(u64, Segment); 4]> {
        let (start, end) = self.ranges[buffer];
        let map = self.map(buffer);
        let new =
            || Segment { end, tenant: Some(buffer), write: Some(access), reads: SmallVec::new() };
        if let Some(old) = map.get_mut(&start).filter(|it| it.end == end) {
            return smallvec![(start, std::mem::replace(old, new()))];
        }
        let touched: SmallVec<[u64; 4]> = overlapping(map, start, end).map(|it| *it.0).collect();
        let mut res = SmallVec::new();
        for from in touched {
            let Some(mut old) = map.remove(&from) else {
                continue;
            };
            if from < start {
                map.insert(from, Segment { end: start, ..old.clone() });
            }
            if old.end > end {
                map.insert(end, old.clone());
            }
            old.end = old.end.min(end);
            res.push((from.max(start), old));
        }
        map.insert(start, new());
        res
    }

    /// An access that touches bytes starts after one before that touched them is over.
    fn expect_over(&mut self, first: Access, then: Access, buffer: Buffer, done: &str) {
        // All streams are done at the end of a section.
        if first.at == then.at || first.run != then.run {
            return;
        }
        self.counts.pairs += 1;
        if self.order.is_over(first.stream, first.time, then.stream) {
            return;
        }
        let name = self.cx.name(buffer);
        let message = format!(
            "races with {}: %{name} is {done} there on {}, and nothing orders the two",
            at_text(first.at),
            first.stream
        );
        self.cx.instruction(Property::Races, then.at, message);
    }

    /// What the runtime reads after a step was made, and is still there.
    fn results(&mut self, after_step: bool) {
        for (name, buffer) in &self.cx.plan.results {
            let (start, end) = self.ranges[*buffer];
            if !self.there[*buffer] {
                if after_step {
                    let message = format!("holds the result `{name}`, which nothing makes");
                    self.cx.buffer(Property::Values, *buffer, message);
                }
                continue;
            }
            let lost = overlapping(self.map(*buffer), start, end)
                .filter_map(|it| it.1.tenant.filter(|it| it != buffer));
            let lost = { lost }.next();
            if let Some(other) = lost {
                let other = self.cx.name(other);
                let message = format!("holds the result `{name}`, and its bytes hold %{other}");
                self.cx.buffer(Property::Lifetimes, *buffer, message);
            }
        }
    }
}

/// Segments with bytes in `start..end`.
fn overlapping(
    map: &mut BTreeMap<u64, Segment>,
    start: u64,
    end: u64,
) -> impl Iterator<Item = (&u64, &mut Segment)> {
    let before = map.range(..start).next_back().filter(|it| it.1.end > start);
    let first = before.map_or(start, |it| *it.0);
    map.range_mut(first..end.max(first))
}

/// Whether result `index` may be made in the bytes of `operand`.
fn may_take_over(instruction: &Instruction, index: usize, operand: Buffer) -> bool {
    let Instruction::Compute { op, args, .. } = instruction else {
        return false;
    };
    let mut of_operand = args.iter().enumerate().filter(|it| *it.1 == operand).peekable();
    of_operand.peek().is_some() && of_operand.all(|it| op.in_place().contains(&(index, it.0)))
}
