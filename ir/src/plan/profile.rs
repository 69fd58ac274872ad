//! When memory is fullest, and with what.

use cranelift_entity::{EntityRef, SecondaryMap};

use crate::plan::{Arena, Buffer, Plan, PlanSection};

/// Memory of one rank. Liveness is in issue order; streams may keep bytes a little longer.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryProfile {
    /// Bytes of the arena of what survives a section.
    pub persistent_bytes: u64,
    /// Bytes of the arena of temporaries.
    pub step_bytes: u64,
    /// Bytes of temporaries that are live at once, at most: what no plan can do without.
    pub live_bytes: u64,
    /// The instruction at which they are; `None` for a plan without temporaries.
    pub peak: Option<(PlanSection, usize)>,
    /// The largest temporaries at the peak, with their bytes, largest first.
    pub largest: Vec<(Buffer, u64)>,
}

impl MemoryProfile {
    /// Bytes that a rank needs in all.
    pub fn total_bytes(&self) -> u64 {
        self.persistent_bytes + self.step_bytes
    }
}

/// How many tensors [`MemoryProfile::largest`] names.
const N_LARGEST: usize = 8;

/// Where the memory of a plan peaks.
pub fn memory_profile(plan: &Plan) -> MemoryProfile {
    let mut res = MemoryProfile {
        persistent_bytes: plan.persistent_bytes,
        step_bytes: plan.step_bytes,
        live_bytes: 0,
        peak: None,
        largest: Vec::new(),
    };
    for section in PlanSection::ALL {
        let spans = plan.spans(section);
        let mut deltas = vec![0_i64; plan.section(section).len() + 1];
        let spans = spans.iter().filter_map(|it| Some((it.0, (*it.1)?)));
        for (buffer, (first, last)) in spans {
            let bytes = plan.local_bytes(buffer) as i64;
            deltas[first + usize::from(plan.takes_over(section, first, buffer))] += bytes;
            deltas[last + 1] -= bytes;
        }
        let mut live = 0;
        for (index, delta) in deltas.into_iter().enumerate() {
            live += delta;
            if live as u64 > res.live_bytes {
                res.live_bytes = live as u64;
                res.peak = Some((section, index));
            }
        }
    }
    if let Some((section, index)) = res.peak {
        let spans = plan.spans(section);
        let live = spans.iter().filter_map(|(buffer, it)| {
            let &(first, last) = it.as_ref()?;
            (first <= index && index <= last).then(|| (buffer, plan.local_bytes(buffer)))
        });
        res.largest = live.collect();
        res.largest.sort_by_key(|&(buffer, bytes)| (std::cmp::Reverse(bytes), buffer.index()));
        res.largest.truncate(N_LARGEST);
    }
    res
}

impl Plan {
    /// Whether `buffer`, made by an instruction, takes over the bytes of an operand of that.
    fn takes_over(&self, section: PlanSection, index: usize, buffer: Buffer) -> bool {
        let data = &self.buffers[buffer];
        let reads = self.section(section)[index].reads();
        let mut others = reads.iter().filter(|&&it| it != buffer).map(|&it| &self.buffers[it]);
        data.offset.is_some()
            && others.any(|it| it.offset == data.offset && it.role.arena() == Arena::Step)
    }

    /// For each temporary of a section, the first and the last instruction that touches it.
    pub fn spans(&self, section: PlanSection) -> SecondaryMap<Buffer, Option<(usize, usize)>> {
        let mut res: SecondaryMap<Buffer, Option<(usize, usize)>> = SecondaryMap::new();
        res.resize(self.buffers.len());
        for (index, instruction) in self.section(section).iter().enumerate() {
            for buffer in instruction.reads().into_iter().chain(instruction.writes()) {
                if self.buffers[buffer].role.arena() == Arena::Step {
                    res[buffer].get_or_insert((index, index)).1 = index;
                }
            }
        }
        res
    }
}
