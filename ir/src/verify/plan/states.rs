//! `states`: each is made, updated once a step, and of use in a later one.
//!
//! ```text
//! of an optimizer    update   s = f(s, ..)                 zero at first
//! made of a weight   prepare  s = f(%w)    update  s = f(new %w)
//! a sum              step     s = s + ..   update  s = 0
//! a history          step or update        s = f(s, ..)
//! ```
//!
//! `step` stands for each section that runs a micro-batch. That nothing writes a state twice in a section is for
//! `values`. What the first of several micro-batches leaves to the others is a weight, moved, or a sum:
//!
//! ```text
//! a weight           first    %w.full = all_gather %w
//! a sum              first    s = ..       step, last  s = s + ..
//! ```

use cranelift_entity::SecondaryMap;

use super::gradients::adds_to;
use super::{At, Cx, Flow, at_text};
use crate::plan::{Buffer, Instruction, Plan, PlanSection, Role};
use crate::verify::Property;

const PROPERTY: Property = Property::States;

pub(super) fn check(cx: &mut Cx<'_>, flow: &Flow) {
    let plan = cx.plan;
    let weights = OfWeights::of(plan, flow);
    let states: Vec<Buffer> =
        plan.buffers.iter().filter(|it| it.1.role == Role::State).map(|it| it.0).collect();
    let mut kinds = [0_u64; 3];
    for &state in &states {
        let (kind, wrong) = kind(plan, flow, &weights, state);
        kinds[kind as usize] += 1;
        if let Some(wrong) = wrong {
            cx.buffer(PROPERTY, state, wrong);
        }
    }
    let first: Vec<Buffer> = plan
        .buffers
        .iter()
        .filter(|it| it.1.role == Role::Carried)
        .map(|it| it.0)
        .filter(|&it| flow.write_in(it, PlanSection::First).is_some())
        .collect();
    for buffer in first {
        match left_by_first(plan, flow, buffer) {
            Ok(kind) => kinds[kind as usize] += u64::from(matches!(kind, Kind::Sum)),
            Err(wrong) => cx.buffer(PROPERTY, buffer, wrong),
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
fn kind(plan: &Plan, flow: &Flow, weights: &OfWeights, state: Buffer) -> (Kind, Option<String>) {
    let [prepare, update] =
        [PlanSection::Prepare, PlanSection::Update].map(|it| flow.write_in(state, it));
    let fail = |kind, why: String| (kind, Some(why));
    let in_update = |index| at_text((PlanSection::Update, index));
    let of_itself = |section, index| made_of_itself(plan, flow, section, index, state);
    if flow.writes[state].is_empty() {
        return fail(Kind::Kept, "is a state, and nothing writes it".into());
    }
    let steps = match in_micro_batches(plan, flow, state) {
        Ok(it) => it,
        Err(why) => return fail(Kind::Kept, why),
    };
    let adds = |&&(section, at): &&At| adds_to(&plan.section(section)[at], state);
    if let Some(reset) = update.filter(|&it| is_zero(plan, flow, it, state)) {
        let late = flow.reads_in(state, PlanSection::Update).find(|&it| it > reset);
        let other = steps.iter().find(|it| !adds(it));
        return match (other, late) {
            _ if steps.is_empty() => {
                fail(Kind::Sum, "is zero after each step, and `step` adds nothing".into())
            }
            (Some(&at), _) => {
                let at = at_text(at);
                fail(Kind::Sum, format!("is a sum over micro-batches, and {at} does not add to it"))
            }
            (None, Some(late)) => {
                let (late, reset) = (in_update(late), in_update(reset));
                fail(Kind::Sum, format!("is read in {late}, after {reset} set it to zero"))
            }
            (None, None) if !is_used(plan, flow, state, reset) => {
                fail(Kind::Sum, "is a sum over micro-batches, and `update` does not use it".into())
            }
            (None, None) => (Kind::Sum, None),
        };
    }
    let read_in_update = flow.reads_in(state, PlanSection::Update).next().is_some();
    if steps.iter().any(|it| adds(&it)) && read_in_update && update.is_none() {
        let why = "is added to in each `step`, and `update` never resets it";
        return fail(Kind::Sum, why.into());
    }
    if let Some(&at) = steps.iter().find(|it| !of_itself(it.0, it.1))
        && read_in_update
        && plan.micro_batches > 1
    {
        let at = at_text(at);
        let why = format!("is replaced in {at}, whatever micro-batches before left");
        return fail(Kind::Kept, why);
    }
    if !steps.is_empty() {
        return (Kind::Kept, None);
    }
    match (prepare, update) {
        (_, Some(at)) if of_itself(PlanSection::Update, at) => (Kind::Kept, None),
        (Some(_), None) if weights.in_prepare[state] => fail(
            Kind::Derived,
            "is made of what `update` changes, and `update` does not make it anew".into(),
        ),
        (None, Some(_)) if weights.in_update[state] => fail(
            Kind::Derived,
            "is made of weights in `update`, and for the first step `prepare` does not".into(),
        ),
        (_, Some(at)) if is_read_late_only(flow, state, at) => {
            let at = in_update(at);
            let why = format!("is read behind {at} only, so that nothing of it is left to a step");
            fail(Kind::Derived, why)
        }
        (_, Some(_)) | (Some(_), None) | (None, None) => (Kind::Derived, None),
    }
}

/// The places at which micro-batches write a buffer. An error if only some of the sections that run write it.
fn in_micro_batches(plan: &Plan, flow: &Flow, buffer: Buffer) -> Result<Vec<At>, String> {
    let run = PlanSection::MICRO_BATCHES.into_iter().filter(|&it| plan.runs(it) > 0);
    let (mut written, mut left) = (Vec::new(), None);
    for section in run {
        match flow.write_in(buffer, section) {
            Some(index) => written.push((section, index)),
            None => left = Some(section),
        }
    }
    match (written.first(), left) {
        (Some(&at), Some(left)) => {
            Err(format!("is written in {}, and `{}` leaves it", at_text(at), left.name()))
        }
        (Some(_), None) | (None, _) => Ok(written),
    }
}

/// The kind of a buffer that the first of several micro-batches leaves to the others, or its fault.
fn left_by_first(plan: &Plan, flow: &Flow, buffer: Buffer) -> Result<Kind, String> {
    let len = plan.section(PlanSection::First).len();
    let (from, maker) = flow.moved_from(plan, (PlanSection::First, len), buffer);
    let stays = |section| flow.write_in(from, section).is_none();
    let survives = matches!(plan.buffers[from].role, Role::Param | Role::State);
    if maker.is_none() && survives && PlanSection::MICRO_BATCHES.into_iter().all(stays) {
        return Ok(Kind::Derived);
    }
    let written = in_micro_batches(plan, flow, buffer)?;
    let other = written[1..].iter().find(|it| !adds_to(&plan.section(it.0)[it.1], buffer));
    let used = flow.reads[buffer].iter().any(|it| !written.contains(it));
    match other {
        Some(&at) => {
            let at = at_text(at);
            Err(format!("is a sum over micro-batches, and {at} does not add to it"))
        }
        None if !used => {
            Err("is a sum over micro-batches, and `update` does not use it".to_string())
        }
        None => Ok(Kind::Sum),
    }
}

/// Whether `update` reads a state before instruction `reset`, and more than its shape.
fn is_used(plan: &Plan, flow: &Flow, state: Buffer, reset: usize) -> bool {
    let update = plan.section(PlanSection::Update);
    let shape = |it: &Instruction| match it {
        Instruction::Compute { op, .. } => op.is_zero(),
        _ => false,
    };
    flow.reads_in(state, PlanSection::Update).any(|it| it < reset && !shape(&update[it]))
}

/// Whether what `update` leaves in a state is never read, though what it makes of it is.
fn is_read_late_only(flow: &Flow, state: Buffer, update: usize) -> bool {
    let mut reads = flow.reads[state].iter().filter(|it| it.0 != PlanSection::Prepare).peekable();
    reads.peek().is_some() && reads.all(|it| it.0 == PlanSection::Update && it.1 > update)
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
    maker.is_some_and(|it| match &plan.section(PlanSection::Update)[it] {
        Instruction::Compute { op, .. } => op.is_zero(),
        _ => false,
    })
}

/// What is made of weights.
struct OfWeights {
    /// By `prepare`, of what a step changes.
    in_prepare: SecondaryMap<Buffer, bool>,
    /// By `update`.
    in_update: SecondaryMap<Buffer, bool>,
}

impl OfWeights {
    fn of(plan: &Plan, flow: &Flow) -> OfWeights {
        let changes = |it: Buffer| {
            let survives = matches!(plan.buffers[it].role, Role::Param | Role::State);
            survives && flow.writes[it].iter().any(|it| it.0 != PlanSection::Prepare)
        };
        let is_param = |it: Buffer| plan.buffers[it].role == Role::Param;
        OfWeights {
            in_prepare: made_of(plan, PlanSection::Prepare, changes),
            in_update: made_of(plan, PlanSection::Update, is_param),
        }
    }
}

/// What a section makes of certain buffers, and those. Parts of a collective have nothing to do with each other.
fn made_of(
    plan: &Plan,
    section: PlanSection,
    from: impl Fn(Buffer) -> bool,
) -> SecondaryMap<Buffer, bool> {
    let mut res = SecondaryMap::new();
    res.resize(plan.buffers.len());
    plan.buffers.keys().filter(|it| from(*it)).for_each(|it| res[it] = true);
    for instruction in plan.section(section) {
        if let Instruction::Collective { parts, .. } = instruction {
            parts.iter().for_each(|it| res[it.dst] |= res[it.src]);
            continue;
        }
        let of = instruction.reads().iter().any(|&it| res[it]);
        instruction.writes().iter().for_each(|&it| res[it] |= of);
    }
    res
}
