//! `plan-memory`: an offset for every buffer.
//!
//! What survives a section gets bytes of its own, in order. Temporaries of all sections share one
//! arena: a walk in issue order takes the smallest hole that fits at a buffer's first use and gives it
//! back after its last. Streams run concurrently, so a hole carries the clock of its last tenants'
//! uses, and only an instruction that is ordered after all of them may have it.

use std::collections::{BTreeMap, BTreeSet};

use cranelift_entity::{EntityRef, SecondaryMap};
use ir::Phase;
use ir::plan::{
    ALIGN, Arena, Buffer, Clock, Clocks, Instruction, Plan, PlanSection, Stream, covers, join,
};
use smallvec::{SmallVec, smallvec};

use crate::{Pass, PassError};

/// See the [module docs](self).
#[derive(Debug, Clone, Copy, Default)]
pub struct PlanMemory;

impl Pass<Plan> for PlanMemory {
    fn name(&self) -> &'static str {
        "plan-memory"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Scheduled, Phase::Planned)
    }

    fn run(&self, plan: &mut Plan) -> Result<(), PassError> {
        let bytes = aligned_bytes(plan);
        plan.persistent_bytes = 0;
        for (buffer, data) in plan.buffers.iter_mut() {
            if data.role.arena() == Arena::Persistent {
                data.offset = Some(plan.persistent_bytes);
                plan.persistent_bytes += bytes[buffer];
            }
        }
        plan.step_bytes = 0;
        for section in PlanSection::ALL {
            let (offsets, end) = pack(plan, section, &bytes);
            for (buffer, offset) in offsets {
                plan.buffers[buffer].offset = Some(offset);
            }
            plan.step_bytes = plan.step_bytes.max(end);
        }
        plan.phase = Phase::Planned;
        Ok(())
    }
}

fn aligned_bytes(plan: &Plan) -> SecondaryMap<Buffer, u64> {
    let mut res = SecondaryMap::new();
    for buffer in plan.buffers.keys() {
        res[buffer] = plan.local_bytes(buffer).next_multiple_of(ALIGN);
    }
    res
}

/// Offsets of the temporaries of a section, and where the last of them ends.
fn pack(
    plan: &Plan,
    section: PlanSection,
    bytes: &SecondaryMap<Buffer, u64>,
) -> (Vec<(Buffer, u64)>, u64) {
    let spans = plan.spans(section);
    let mut clocks = Clocks::new(plan.streams.len(), plan.events);
    let zero: Clock = smallvec![0; plan.streams.len()];
    let mut used: SecondaryMap<Buffer, Clock> = SecondaryMap::with_default(zero);
    let mut offset_of: SecondaryMap<Buffer, u64> = SecondaryMap::new();
    let mut arena = Holes::default();
    let mut res = Vec::new();
    for (index, instruction) in plan.section(section).iter().enumerate() {
        let stream = instruction.stream();
        match instruction {
            Instruction::Record { event, .. } => {
                clocks.record(*event, stream);
                continue;
            }
            Instruction::Wait { event, .. } => {
                clocks.wait(*event, stream);
                if stream == Stream::new(0) {
                    arena.settle(clocks.of(stream));
                }
                continue;
            }
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. } => {}
        }
        let mut touched: SmallVec<[Buffer; 8]> = SmallVec::new();
        for buffer in instruction.reads().into_iter().chain(instruction.writes()) {
            if spans[buffer].is_some() && !touched.contains(&buffer) {
                touched.push(buffer);
            }
        }
        let now = clocks.of(stream).clone();
        for &buffer in &touched {
            if spans[buffer].is_some_and(|it| it.0 == index) {
                let offset = arena.take(bytes[buffer], &now);
                offset_of[buffer] = offset;
                res.push((buffer, offset));
            }
        }
        let time = clocks.run(stream);
        for &buffer in &touched {
            used[buffer][stream.index()] = time;
            if spans[buffer].is_some_and(|it| it.1 == index) {
                let hole = Hole { bytes: bytes[buffer], after: used[buffer].clone() };
                arena.give(offset_of[buffer], hole, clocks.of(Stream::new(0)));
            }
        }
    }
    (res, arena.end)
}

/// Free bytes, and the clock after which they may be written.
#[derive(Debug, Clone)]
struct Hole {
    bytes: u64,
    after: Clock,
}

/// The arena's free bytes, as the compute stream sees them.
#[derive(Debug, Default)]
struct Holes {
    /// By offset; no two of them touch.
    holes: BTreeMap<u64, Hole>,
    /// The same as `(bytes, offset)`.
    by_size: BTreeSet<(u64, u64)>,
    /// Bytes that another stream may still use, as far as the compute stream knows.
    unsettled: Vec<(u64, Hole)>,
    /// Everything behind is free.
    end: u64,
}

impl Holes {
    /// Takes `bytes` for an instruction that starts at `now`.
    fn take(&mut self, bytes: u64, now: &Clock) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let ready = |it: &&(u64, u64)| covers(now, &self.holes[&it.1].after);
        if let Some(&(_, offset)) = self.by_size.range((bytes, 0)..).find(ready) {
            let hole = self.remove(offset);
            if hole.bytes > bytes {
                self.insert(offset + bytes, Hole { bytes: hole.bytes - bytes, after: hole.after });
            }
            return offset;
        }
        let last = self.holes.last_key_value();
        let offset = match last {
            Some((&offset, hole))
                if offset + hole.bytes == self.end && covers(now, &hole.after) =>
            {
                self.remove(offset);
                offset
            }
            _ => self.end,
        };
        self.end = offset + bytes;
        offset
    }

    /// Frees bytes, of which the compute stream is at `now`.
    fn give(&mut self, offset: u64, hole: Hole, now: &Clock) {
        if hole.bytes == 0 {
        } else if covers(now, &hole.after) {
            self.free(offset, hole);
        } else {
            self.unsettled.push((offset, hole));
        }
    }

    /// The compute stream is at `now`.
    fn settle(&mut self, now: &Clock) {
        let unsettled = std::mem::take(&mut self.unsettled);
        for (offset, hole) in unsettled {
            self.give(offset, hole, now);
        }
    }

    /// Joins a hole with its neighbours.
    fn free(&mut self, mut offset: u64, mut hole: Hole) {
        let before = self.holes.range(..offset).next_back();
        if let Some((&at, _)) = before.filter(|it| it.0 + it.1.bytes == offset) {
            let other = self.remove(at);
            offset = at;
            hole.bytes += other.bytes;
            join(&mut hole.after, &other.after);
        }
        let next = offset + hole.bytes;
        if self.holes.contains_key(&next) {
            let other = self.remove(next);
            hole.bytes += other.bytes;
            join(&mut hole.after, &other.after);
        }
        self.insert(offset, hole);
    }

    fn insert(&mut self, offset: u64, hole: Hole) {
        self.by_size.insert((hole.bytes, offset));
        self.holes.insert(offset, hole);
    }

    fn remove(&mut self, offset: u64) -> Hole {
        let hole = self.holes.remove(&offset).expect("the hole is there");
        self.by_size.remove(&(hole.bytes, offset));
        hole
    }
}
