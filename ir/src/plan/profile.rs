//! When memory is fullest, and with what.

use cranelift_entity::{EntityRef, SecondaryMap};

use crate::plan::{Arena, Buffer, Instruction, Plan, PlanSection, Role};

/// Memory of one rank. Liveness is in issue order; streams may keep bytes a little longer.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryProfile {
    /// Bytes of the arena of what survives a step.
    pub persistent_bytes: u64,
    /// Bytes of the arena of a step.
    pub step_bytes: u64,
    /// Bytes of scratch of all streams, on a GPU.
    pub workspace_bytes: u64,
    /// Bytes of the step's arena that are live at once, at most: what no plan can do without.
    pub live_bytes: u64,
    /// The instruction at which they are; `None` for a plan without temporaries.
    pub peak: Option<(PlanSection, usize)>,
    /// The largest buffers of the step's arena at the peak, with their bytes, largest first.
    pub largest: Vec<(Buffer, u64)>,
}

impl MemoryProfile {
    /// Bytes that a rank needs in all.
    pub fn total_bytes(&self) -> u64 {
        let arenas = self.persistent_bytes.saturating_add(self.step_bytes);
        arenas.saturating_add(self.workspace_bytes)
    }
}

/// How many tensors [`MemoryProfile::largest`] names.
const N_LARGEST: usize = 8;

/// Where the memory of a plan peaks.
pub fn memory_profile(plan: &Plan) -> MemoryProfile {
    let mut res = MemoryProfile {
        persistent_bytes: plan.persistent_bytes,
        step_bytes: plan.step_bytes,
        workspace_bytes: plan
            .streams
            .values()
            .fold(0, |all: u64, it| all.saturating_add(it.workspace)),
        live_bytes: 0,
        peak: None,
        largest: Vec::new(),
    };
    for sections in PlanSection::TIMELINES {
        let at: Vec<(PlanSection, usize)> = plan.timeline(sections).map(|it| it.0).collect();
        let mut peak = None;
        for (index, live) in plan.live_bytes(sections, |_| true).into_iter().enumerate() {
            // Micro-batches are much alike, and the last one is shown.
            let last = at[index].0 == PlanSection::Last
                && peak.is_some_and(|it: usize| at[it].0 < PlanSection::Last);
            if live > res.live_bytes || live == res.live_bytes && last {
                res.live_bytes = live;
                peak = Some(index);
            }
        }
        let Some(index) = peak else { continue };
        res.peak = Some(at[index]);
    }
    if let Some(at) = res.peak {
        let live = plan.live_at(at).into_iter();
        res.largest = live.map(|it| (it, plan.local_bytes(it))).collect();
        res.largest.sort_by_key(|&(buffer, bytes)| (std::cmp::Reverse(bytes), buffer.index()));
        res.largest.truncate(N_LARGEST);
    }
    res
}

impl Plan {
    /// Whether `buffer`, made by an instruction, takes over the bytes of an operand of that.
    pub fn takes_over(&self, (section, index): (PlanSection, usize), buffer: Buffer) -> bool {
        // Nothing else works in place.
        let Instruction::Compute { args, .. } = &self.section(section)[index] else { return false };
        let data = &self.buffers[buffer];
        let mut others = args.iter().filter(|&&it| it != buffer).map(|&it| &self.buffers[it]);
        data.offset.is_some()
            && others.any(|it| it.offset == data.offset && it.role.arena() == Arena::Step)
    }

    /// Bytes of the step's arena that are live at each instruction of a timeline, of the buffers that count.
    pub fn live_bytes(
        &self,
        sections: &[PlanSection],
        counts: impl Fn(Buffer) -> bool,
    ) -> Vec<u64> {
        let at: Vec<(PlanSection, usize)> = self.timeline(sections).map(|it| it.0).collect();
        let mut deltas = vec![0_i64; at.len() + 1];
        for (buffer, span) in self.spans(sections).iter() {
            let Some((first, last)) = span.filter(|_| counts(buffer)) else { continue };
            let bytes = self.local_bytes(buffer) as i64;
            deltas[first + usize::from(self.takes_over(at[first], buffer))] += bytes;
            deltas[last.saturating_add(1).min(at.len())] -= bytes;
        }
        let mut live = 0;
        deltas
            .iter()
            .take(at.len())
            .map(|it| {
                live += it;
                live as u64
            })
            .collect()
    }

    /// Buffers of the step's arena that are live at an instruction. What takes over the bytes of an operand there
    /// counts as that: their bytes are those of [`Plan::live_bytes`].
    pub fn live_at(&self, at: (PlanSection, usize)) -> Vec<Buffer> {
        let mut timelines = PlanSection::TIMELINES.into_iter();
        let sections = timelines.find(|it| it.contains(&at.0)).expect("each is in one");
        let before = sections.iter().take_while(|&&it| it != at.0);
        let index = before.map(|&it| self.section(it).len()).sum::<usize>() + at.1;
        let spans = self.spans(sections);
        let live = spans.iter().filter_map(|it| Some((it.0, (*it.1)?)));
        let live = live.filter(|it| it.1.0 <= index && index <= it.1.1);
        live.filter(|it| it.1.0 < index || !self.takes_over(at, it.0)).map(|it| it.0).collect()
    }

    /// Returns the first and the last instruction that touches each buffer of the step's arena, in a timeline
    /// or its last sections. A carried buffer lives to the end, and from the start if an earlier section made
    /// it.
    pub fn spans(&self, sections: &[PlanSection]) -> SecondaryMap<Buffer, Option<(usize, usize)>> {
        let mut res: SecondaryMap<Buffer, Option<(usize, usize)>> = SecondaryMap::new();
        res.resize(self.buffers.len());
        let timeline = PlanSection::TIMELINES.into_iter().find(|it| it.contains(&sections[0]));
        let earlier = timeline.into_iter().flatten().take_while(|it| **it != sections[0]);
        for buffer in earlier.flat_map(|&it| self.section(it)).flat_map(Instruction::writes) {
            if self.buffers[buffer].role == Role::Carried {
                res[buffer] = Some((0, usize::MAX));
            }
        }
        for (index, (_, instruction)) in self.timeline(sections).enumerate() {
            for buffer in instruction.reads().into_iter().chain(instruction.writes()) {
                let last = match self.buffers[buffer].role {
                    Role::Temp => index,
                    Role::Carried => usize::MAX,
                    Role::Param | Role::State | Role::Input => continue,
                };
                res[buffer].get_or_insert((index, last)).1 = last;
            }
        }
        res
    }
}
