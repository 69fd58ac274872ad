//! `states`: each is made, updated once a step, and of use in a later one.
//!
//! ```text
//! of an optimizer    update   s = f(s, ..)                 zero at first
//! made of a weight   prepare  s = f(%w)    update  s = f(new %w)
//! a sum              step     s = s + ..   update  s = 0
//! a history          step or update        s = f(s, ..)
//! ```
//!
//! That nothing writes one twice in a section is for `values`.

use cranelift_entity::SecondaryMap;

use super::gradients::adds_to;
use super::{Cx, Flow, at_text};
use crate::ops::Op;
use crate::plan::{Buffer, Instruction, Plan, PlanSection, Role};
use crate::verify::Property;

const PROPERTY: Property = Property::States;

pub(super) fn check(cx: &mut Cx<'_>, flow: &Flow) {
    let plan = cx.plan;
    let stale = changes(plan, flow);
    let states: Vec<Buffer> =
        plan.buffers.iter().filter(|it| it.1.role == Role::State).map(|it| it.0).collect();
    let mut kinds = [0_u64; 3];
    for &state in &states {
        let (kind, wrong) = kind(plan, flow, &stale, state);
        kinds[kind as usize] += 1;
        if let Some(wrong) = wrong {
            cx.buffer(PROPERTY, state, wrong);
        }
    }
    let counts = vec![
        ("states", states.len() as u64),
        ("kept from step to step", kinds[Kind::Kept as usize]),
        ("made of weights", kinds[Kind::Derived as usize]),
        ("sums over micro-batches", kinds[Kind::Sum as usize]),
    ];
    cx.proof.add(PROPERTY, counts);
}

#[derive(Clone, Copy)]
enum Kind {
    Kept,
    Derived,
    Sum,
}

/// What a state is, and what is wrong with it as such.
fn kind(
    plan: &Plan,
    flow: &Flow,
    stale: &SecondaryMap<Buffer, bool>,
    state: Buffer,
) -> (Kind, Option<String>) {
    let [prepare, step, update] = PlanSection::ALL.map(|it| flow.write_in(state, it));
    let fail = |kind, why: String| (kind, Some(why));
    if flow.writes[state].is_empty() {
        return fail(Kind::Kept, "is a state, and nothing writes it".into());
    }
    if flow.reads[state].is_empty() {
        return fail(Kind::Kept, "is a state, and nothing reads it".into());
    }
    let of_itself = |section, index| made_of_itself(plan, flow, section, index, state);
    if let Some(reset) = update.filter(|&it| is_zero(plan, flow, it, state)) {
        let late = flow.reads_in(state, PlanSection::Update).find(|&it| it > reset);
        return match (step, late) {
            (None, _) => fail(Kind::Sum, "is zero after each step, and `step` adds nothing".into()),
            (Some(at), _) if !adds_to(&plan.section(PlanSection::Step)[at], state) => {
                let at = at_text((PlanSection::Step, at));
                fail(Kind::Sum, format!("is a sum over micro-batches, and {at} does not add to it"))
            }
            (Some(_), Some(late)) => {
                let (late, reset) =
                    (at_text((PlanSection::Update, late)), at_text((PlanSection::Update, reset)));
                fail(Kind::Sum, format!("is read in {late}, after {reset} set it to zero"))
            }
            (Some(_), None) => (Kind::Sum, None),
        };
    }
    if let Some(at) = step {
        if !of_itself(PlanSection::Step, at) {
            let at = at_text((PlanSection::Step, at));
            return fail(
                Kind::Kept,
                format!("is replaced in {at}, whatever micro-batches before left"),
            );
        }
        if flow.reads_in(state, PlanSection::Update).next().is_some() && update.is_none() {
            return fail(
                Kind::Sum,
                "is added to in each `step`, and `update` never resets it".into(),
            );
        }
    }
    let kept = step.is_some() || update.is_some_and(|it| of_itself(PlanSection::Update, it));
    if kept {
        return (Kind::Kept, None);
    }
    match (prepare, update) {
        (Some(_), None) if stale[state] => fail(
            Kind::Derived,
            "is made of what `update` changes, and `update` does not make it anew".into(),
        ),
        (None, Some(_)) => {
            fail(Kind::Derived, "is read in the first step, and `prepare` does not make it".into())
        }
        (_, Some(at)) if !is_read_before(flow, state, at) => {
            let at = at_text((PlanSection::Update, at));
            fail(
                Kind::Derived,
                format!("is read behind {at} only, so that nothing of it is left to a step"),
            )
        }
        (_, Some(_)) | (Some(_), None) | (None, None) => (Kind::Derived, None),
    }
}

/// Whether what `update` leaves in a state is read, by a step or by the next update.
fn is_read_before(flow: &Flow, state: Buffer, update: usize) -> bool {
    flow.reads_in(state, PlanSection::Step).next().is_some()
        || flow.reads_in(state, PlanSection::Update).any(|it| it <= update)
}

/// Whether the instruction that makes the new content of a state, before that is moved, reads the old.
fn made_of_itself(
    plan: &Plan,
    flow: &Flow,
    section: PlanSection,
    index: usize,
    state: Buffer,
) -> bool {
    let (_, maker) = flow.moved_from(plan, (section, index + 1), state);
    maker.is_some_and(|it| plan.section(section)[it].reads().contains(&state))
}

/// Whether instruction `index` of `update` sets a state to zero.
pub(super) fn is_zero(plan: &Plan, flow: &Flow, index: usize, state: Buffer) -> bool {
    let (_, maker) = flow.moved_from(plan, (PlanSection::Update, index + 1), state);
    let Some(Instruction::Compute { op, .. }) =
        maker.map(|it| &plan.section(PlanSection::Update)[it])
    else {
        return false;
    };
    match op {
        Op::ZerosLike(_) => true,
        Op::Fill(it) => it.value.0 == 0.0,
        // No other op makes zeros whatever it gets.
        _ => false,
    }
}

/// What `prepare` makes of buffers that a step changes.
fn changes(plan: &Plan, flow: &Flow) -> SecondaryMap<Buffer, bool> {
    let mut res = SecondaryMap::new();
    res.resize(plan.buffers.len());
    for (buffer, writes) in plan.buffers.keys().map(|it| (it, &flow.writes[it])) {
        res[buffer] =
            Flow::survives(plan, buffer) && writes.iter().any(|it| it.0 != PlanSection::Prepare);
    }
    for instruction in plan.section(PlanSection::Prepare) {
        let of = instruction.reads().iter().any(|&it| res[it]);
        instruction.writes().iter().for_each(|&it| res[it] |= of);
    }
    res
}
