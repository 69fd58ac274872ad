//! `values`, beyond what `accesses` sees: a buffer holds one value a section, and no value is made in vain.
//!
//! Temporaries and carried buffers are written once a timeline, except that several micro-batches may add to one sum;
//! states and parameters are written once a section. Two values in one buffer would be told apart by order alone,
//! which no name shows. And a value that nothing reads is a lost contribution.

use smallvec::SmallVec;

use super::gradients::adds_to;
use super::{At, Cx, Flow, at_text};
use crate::plan::{Arena, Buffer, Instruction, PlanSection, Role};
use crate::verify::Property;

const PROPERTY: Property = Property::Values;

pub(super) fn check(cx: &mut Cx<'_>, flow: &Flow) {
    let plan = cx.plan;
    let params = plan.buffers.iter().filter(|it| it.1.role == Role::Param);
    let trains = { params }.any(|it| !flow.writes[it.0].is_empty());
    for (buffer, data) in &plan.buffers {
        let writes = &flow.writes[buffer];
        if let (Role::Input, Some(&at)) = (data.role, writes.first()) {
            cx.instruction(PROPERTY, at, format!("writes %{}, which is an input", data.name));
        }
        if data.role == Role::Input && trains && flow.reads[buffer].is_empty() {
            cx.buffer(PROPERTY, buffer, "is an input, and nothing reads it".into());
        }
        let together = |a: PlanSection, b: PlanSection| match data.role.arena() {
            Arena::Persistent => a == b,
            Arena::Step => {
                PlanSection::TIMELINES.iter().any(|it| it.contains(&a) && it.contains(&b))
            }
        };
        let adds = |pair: &[At]| {
            let (section, index) = pair[1];
            let other_section = pair[0].0 != section && section != PlanSection::Update;
            other_section && adds_to(&plan.section(section)[index], buffer)
        };
        for pair in writes.windows(2).filter(|it| together(it[0].0, it[1].0) && !adds(it)) {
            let first = at_text(pair[0]);
            let message = format!("writes %{}, which holds another value since {first}", data.name);
            cx.instruction(PROPERTY, pair[1], message);
        }
    }
    for (at, instruction) in plan.timeline(&PlanSection::ALL) {
        let used = |it: Buffer| {
            let data = &plan.buffers[it];
            data.role.arena() == Arena::Persistent
                || !flow.reads[it].is_empty()
                || plan.results.iter().any(|result| result.1 == it)
        };
        let writes = instruction.writes();
        // An op may make more than is wanted; what collectives move is wanted.
        let lost: SmallVec<[Buffer; 2]> = match instruction {
            Instruction::Compute { .. } if writes.iter().any(|&it| used(it)) => SmallVec::new(),
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. }
            | Instruction::Record { .. }
            | Instruction::Wait { .. } => writes.iter().copied().filter(|&it| !used(it)).collect(),
        };
        for buffer in lost {
            let message = format!("makes %{}, which nothing reads", plan.buffers[buffer].name);
            cx.instruction(PROPERTY, at, message);
        }
    }
}
