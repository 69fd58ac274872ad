//! `plan-memory`: an offset for every buffer.
//!
//! What survives a step gets bytes of its own, in order. Temporaries of all sections share one
//! arena: a walk in issue order takes the smallest hole that fits at a buffer's first use and gives it
//! back after its last. The sections of a step are one walk, and what one leaves for others is there to
//! the end, so gradients take the place of activations. Buffers that several micro-batches share are placed first, at
//! the bottom of the arena, for the whole step. A result takes over the bytes of an operand that dies where the op
//! allows it ([`ir::ops::OpDef::in_place`]). Streams run concurrently, so a hole carries the clock of its last tenants'
//! uses, and only an instruction that is ordered after all of them may have it.

use std::collections::{BTreeMap, BTreeSet};

use cranelift_entity::{EntityRef, SecondaryMap};
use ir::Phase;
use ir::plan::{
    ALIGN, Arena, Buffer, Clock, Clocks, Instruction, Plan, PlanSection, Role, Stream, covers, join,
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
        for sections in PlanSection::TIMELINES {
            let (offsets, end) = pack(plan, sections, &bytes);
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

/// Offsets of what a timeline has in the step's arena, and where the last of it ends.
fn pack(
    plan: &Plan,
    sections: &[PlanSection],
    bytes: &SecondaryMap<Buffer, u64>,
) -> (Vec<(Buffer, u64)>, u64) {
    let spans = plan.spans(sections);
    let mut clocks = Clocks::new(plan.streams.len(), plan.events);
    let zero: Clock = smallvec![0; plan.streams.len()];
    let mut used: SecondaryMap<Buffer, Clock> = SecondaryMap::with_default(zero);
    let mut offset_of: SecondaryMap<Buffer, u64> = SecondaryMap::new();
    let mut last_touch: SecondaryMap<Buffer, Option<usize>> = SecondaryMap::new();
    last_touch.resize(plan.buffers.len());
    let mut arena = Holes::default();
    let mut res = Vec::new();
    let mut placed: SecondaryMap<Buffer, bool> = SecondaryMap::new();
    for buffer in shared(plan, sections) {
        res.push((buffer, arena.take(bytes[buffer], clocks.of(Stream::new(0)))));
        placed[buffer] = true;
    }
    for (index, (at, instruction)) in plan.timeline(sections).enumerate() {
        let stream = instruction.stream();
        if at.1 == 0 {
            clocks.meet();
            arena.settle(clocks.of(Stream::new(0)));
        }
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
            if spans[buffer].is_some() && last_touch[buffer].replace(index) != Some(index) {
                touched.push(buffer);
            }
        }
        let now = clocks.of(stream).clone();
        let mut taken: SmallVec<[Buffer; 2]> = SmallVec::new();
        for &buffer in &touched {
            if spans[buffer].is_some_and(|it| it.0 == index) && !placed[buffer] {
                let dies = |it: Buffer| {
                    spans[it].is_some_and(|it| it.1 == index)
                        && !taken.contains(&it)
                        && plan.local_bytes(it) == plan.local_bytes(buffer)
                        && covers(&now, &used[it])
                };
                let offset = match operand_for(instruction, buffer, dies) {
                    Some(operand) => {
                        taken.push(operand);
                        offset_of[operand]
                    }
                    None => arena.take(bytes[buffer], &now),
                };
                offset_of[buffer] = offset;
                res.push((buffer, offset));
            }
        }
        let time = clocks.run(stream);
        for &buffer in &touched {
            used[buffer][stream.index()] = time;
            if spans[buffer].is_some_and(|it| it.1 == index) && !taken.contains(&buffer) {
                let hole = Hole { bytes: bytes[buffer], after: used[buffer].clone() };
                arena.give(offset_of[buffer], hole, clocks.of(Stream::new(0)));
            }
        }
    }
    (res, arena.end)
}

/// The carried buffers that more than one micro-batch touches, in order.
fn shared(plan: &Plan, sections: &[PlanSection]) -> Vec<Buffer> {
    let mut first: SecondaryMap<Buffer, Option<PlanSection>> = SecondaryMap::new();
    let mut shared: SecondaryMap<Buffer, bool> = SecondaryMap::new();
    for ((section, _), instruction) in plan.timeline(sections) {
        if !PlanSection::MICRO_BATCHES.contains(&section) {
            continue;
        }
        for buffer in instruction.reads().into_iter().chain(instruction.writes()) {
            shared[buffer] |= *first[buffer].get_or_insert(section) != section;
        }
    }
    let carried = plan.buffers.iter().filter(|it| it.1.role == Role::Carried);
    carried.map(|it| it.0).filter(|&it| shared[it]).collect()
}

/// An operand that `dies` and in whose bytes the op may make `result`.
fn operand_for(
    instruction: &Instruction,
    result: Buffer,
    dies: impl Fn(Buffer) -> bool,
) -> Option<Buffer> {
    let Instruction::Compute { op, args, results, .. } = instruction else { return None };
    let once = |it: Buffer| args.iter().filter(|&&arg| arg == it).count() == 1;
    let mut pairs = op.in_place().iter().filter(|it| results[it.0] == result);
    pairs.find(|it| once(args[it.1]) && dies(args[it.1])).map(|it| args[it.1])
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PassManager;

    /// Plans `step`, of temporaries of 256 bytes, and compares offsets in units of that.
    #[track_caller]
    fn check(step: &str, expect: &[(&str, u64)]) {
        let mut temps = String::new();
        for (name, _) in expect {
            temps += &format!("  buffer %{name} : f32[8, 8] @ [_, _] temp\n");
        }
        let text = format!(
            "plan @test phase=scheduled mesh=(dp=2) events=4 {{
  comm c0 = (dp)
  stream s0 = compute
  stream s1 = comm
  buffer %p : f32[16, 4] @ [dp, _] param
  buffer %x : f32[8, 8] @ [_, _] input
  buffer %half : f32[8, 8] @ [dp, _] input
  buffer %out : f32[8, 8] @ [_, _] state
{temps}  step:
{step}}}
"
        );
        let mut plan = ir::text::parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
        PassManager::default().run(&mut plan, &[&PlanMemory]).unwrap();
        let offset = |name: &str| plan.buffers[plan.buffer(name).unwrap()].offset.unwrap();
        let found: Vec<(&str, u64)> =
            expect.iter().map(|it| (it.0, offset(it.0) / ALIGN)).collect();
        assert_eq!(found, expect);
        let end = found.iter().map(|it| it.1 + 1).max().unwrap();
        assert_eq!((plan.persistent_bytes, plan.step_bytes), (4 * ALIGN, end * ALIGN));
    }

    #[test]
    fn bytes_are_reused_after_the_last_use() {
        let step = "  s0: %a = transpose(perm:[1,0]) %x
  s0: %b = transpose(perm:[1,0]) %a
  s0: %c = transpose(perm:[1,0]) %b
  s0: %out = transpose(perm:[1,0]) %c
";
        check(step, &[("a", 0), ("b", 1), ("c", 0)]);
    }

    #[test]
    fn a_result_takes_over_a_dying_operand() {
        let step = "  s0: %a = mul %x, %x
  s0: %b = mul %a, %x
  s0: %c = mul %x, %b
  s0: %out = mul %b, %c
";
        check(step, &[("a", 0), ("b", 0), ("c", 1)]);
    }

    #[test]
    fn bytes_that_another_stream_may_still_use_are_left_alone() {
        let gather = "  s0: %a = mul %x, %x
  s0: %out = mul %a, %x
  s1: %b = all_gather %half on c0
  s1: record e0
  s0: wait e0
  s0: %out = mul %b, %x
";
        check(gather, &[("a", 0), ("b", 1)]);
        let after = gather.replace("  s1: %b", "  s0: record e1\n  s1: wait e1\n  s1: %b");
        check(&after, &[("a", 0), ("b", 0)]);
    }
}
