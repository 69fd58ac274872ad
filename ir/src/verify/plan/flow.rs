//! Which instructions write and read each buffer, for checks that follow values.

use cranelift_entity::SecondaryMap;
use smallvec::SmallVec;

use super::At;
use crate::plan::{Buffer, Instruction, Plan, PlanSection};

/// Writers and readers of all buffers, in issue order.
pub(super) struct Flow {
    pub writes: SecondaryMap<Buffer, SmallVec<[At; 2]>>,
    pub reads: SecondaryMap<Buffer, SmallVec<[At; 4]>>,
}

impl Flow {
    pub fn of(plan: &Plan) -> Flow {
        let mut res = Flow { writes: SecondaryMap::new(), reads: SecondaryMap::new() };
        res.writes.resize(plan.buffers.len());
        res.reads.resize(plan.buffers.len());
        for (at, instruction) in plan.timeline(&PlanSection::ALL) {
            for buffer in instruction.reads() {
                if res.reads[buffer].last() != Some(&at) {
                    res.reads[buffer].push(at);
                }
            }
            instruction.writes().iter().for_each(|&it| res.writes[it].push(at));
        }
        res
    }

    /// The first write of a buffer in a section.
    pub fn write_in(&self, buffer: Buffer, section: PlanSection) -> Option<usize> {
        self.writes[buffer].iter().find(|it| it.0 == section).map(|it| it.1)
    }

    /// Reads of a buffer in a section.
    pub fn reads_in(
        &self,
        buffer: Buffer,
        section: PlanSection,
    ) -> impl Iterator<Item = usize> + '_ {
        self.reads[buffer].iter().filter(move |it| it.0 == section).map(|it| it.1)
    }

    /// What `buffer` holds for the instruction `at`: the buffer that its content was first made in, before
    /// collectives and copies of the same section moved it, and the instruction that made it; none if an
    /// earlier section did. Types are not changed on the way, and nothing is added.
    pub fn moved_from(&self, plan: &Plan, at: At, buffer: Buffer) -> (Buffer, Option<usize>) {
        let (mut buffer, mut before) = (buffer, at.1);
        loop {
            let mut writes = self.writes[buffer].iter().filter(|it| it.0 == at.0 && it.1 < before);
            let Some(&(_, writer)) = writes.next_back() else { return (buffer, None) };
            let from = match &plan.section(at.0)[writer] {
                Instruction::Collective { parts, .. } => {
                    parts.iter().find(|it| it.dst == buffer && !it.adds).map(|it| it.src)
                }
                Instruction::Copy { src, .. } => Some(*src),
                Instruction::Compute { .. }
                | Instruction::Record { .. }
                | Instruction::Wait { .. } => None,
            };
            let Some(from) = from else { return (buffer, Some(writer)) };
            (buffer, before) = (from, writer);
        }
    }
}
