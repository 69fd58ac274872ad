//! `gradients`: an optimizer trains with a tensor that `step` makes once, or sums over its micro-batches.
//!
//! The proof does not show that this tensor is the gradient of the optimizer's own parameter: exchanging two
//! gradients of one type passes.
//!
//! ```text
//! step     %w.grad = ..                          carried, where a step has one micro-batch; or
//! step     %w.grad.acc = add %w.grad.acc, ..     a state, from each of several; zero again in `update`; or
//! first    %w.grad.acc = ..                      carried, where sections differ;
//! step     %w.grad.acc = add %w.grad.acc, ..     added to by all others,
//! last     %w.grad.acc = add %w.grad.acc, ..     in `last` moved and reduced only
//! update   moved and reduced only, then
//! update   %w, %w.exp_avg, .. = adamw %w, %w.exp_avg, .., %that, ..
//! ```
//!
//! Parameters are written by their optimizer alone. It scales its gradient by the factor that `clip_scale` makes, and
//! changes them only on the condition that `clip_scale` makes.
//!
//! Several parameters may train with one gradient. The weights of `y = x A^T + x B^T` have the same gradient, and so do
//! two biases that are added to one sum; the planner computes it once. Each of their optimizers still gets it once, and
//! the norm counts it once per parameter. If an optimizer reads the gradient of another parameter by mistake, its own
//! gradient is left to the norm, which this property refuses, or to nothing, which `values` and `states` refuse. An
//! exchange of two gradients of one shape passes: that needs the model, which a plan does not have.

use std::collections::{BTreeMap, BTreeSet};

use cranelift_entity::SecondaryMap;

use super::{At, Cx, Flow, at_text};
use crate::checkpoint::{Update, update};
use crate::ops::Op;
use crate::plan::{Buffer, Instruction, Plan, PlanSection, Role};
use crate::types::DType;
use crate::verify::Property;

const PROPERTY: Property = Property::Gradients;

pub(super) fn check(cx: &mut Cx<'_>, flow: &Flow) {
    let plan = cx.plan;
    let mut updates: Vec<(At, Update)> = Vec::new();
    for (at, instruction) in plan.timeline(&PlanSection::ALL) {
        let Some(found) = update(instruction) else { continue };
        if at.0 != PlanSection::Update {
            cx.instruction(PROPERTY, at, "trains outside of `update`".into());
        }
        optimizer(cx, at, &found, instruction);
        updates.push((at, found));
    }
    only_optimizers_write_parameters(cx, flow, &updates);
    let mut roots: BTreeSet<Buffer> = BTreeSet::new();
    for (at, update) in &updates {
        roots.extend(root(cx, flow, *at, update));
    }
    norm(cx, flow, &updates);
    let counts = vec![
        ("parameters", plan.params.len() as u64),
        ("trained", updates.len() as u64),
        ("distinct gradients", roots.len() as u64),
        ("micro-batches", plan.micro_batches.into()),
    ];
    cx.proof.add(PROPERTY, counts);
}

/// An optimizer replaces a parameter and its states, in place.
fn optimizer(cx: &mut Cx<'_>, at: At, update: &Update, instruction: &Instruction) {
    let roles = |it: Buffer| cx.plan.buffers[it].role;
    let states = || update.states.iter().map(|it| it.0);
    if roles(update.param) != Role::Param || states().any(|it| roles(it) != Role::State) {
        cx.instruction(
            PROPERTY,
            at,
            "trains what is no parameter, or with what is no state".into(),
        );
    }
    // Kernels and references would do with less, and learn nothing of small gradients.
    let of_step = instruction
        .reads()
        .into_iter()
        .skip(1)
        .find(|&it| cx.plan.buffers[it].ty.dtype != DType::F32);
    if let Some(it) = of_step {
        let (name, dtype) = (cx.name(it), cx.plan.buffers[it].ty.dtype);
        let message = format!("trains with %{name} in {dtype}, and needs f32");
        cx.instruction(Property::Types, at, message);
    }
    let own = std::iter::once(update.param).chain(states());
    if !own.eq(instruction.writes().into_iter().take(1 + update.states.len())) {
        cx.instruction(PROPERTY, at, "does not replace what it updates".into());
    }
}

fn only_optimizers_write_parameters(cx: &mut Cx<'_>, flow: &Flow, updates: &[(At, Update)]) {
    let mut trained: SecondaryMap<Buffer, Option<At>> = SecondaryMap::new();
    updates.iter().for_each(|(at, it)| trained[it.param] = Some(*at));
    let params = cx.plan.buffers.iter().filter(|it| it.1.role == Role::Param);
    for (param, data) in params {
        for &at in flow.writes[param].iter().filter(|it| trained[param] != Some(**it)) {
            let message = format!("writes the parameter %{}, and is not its optimizer", data.name);
            cx.instruction(PROPERTY, at, message);
        }
        // What reads a weight beside its optimizer makes the next step's of it.
        let Some(at) = trained[param] else { continue };
        for early in flow.reads_in(param, PlanSection::Update).filter(|&it| it < at.1) {
            let message = format!("reads %{}, which {} has yet to train", data.name, at_text(at));
            cx.instruction(PROPERTY, (PlanSection::Update, early), message);
        }
    }
}

/// The buffer in which the backward passes leave the gradient of an optimizer.
fn root(cx: &mut Cx<'_>, flow: &Flow, at: At, update: &Update) -> Option<Buffer> {
    let plan = cx.plan;
    let last = plan.last_micro_batch();
    let (found, maker) = flow.moved_from(plan, at, update.grad);
    let (root, wrong) = match (maker, plan.runs(PlanSection::First) > 0) {
        (Some(maker), _) => (found, Some(format!("is made in {}", at_text((at.0, maker))))),
        (None, false) => (found, made_in_step(plan, flow, found)),
        (None, true) => {
            let (root, made) = flow.moved_from(plan, (last, plan.section(last).len()), found);
            (root, added_up(plan, flow, root, (last, made)))
        }
    };
    match wrong {
        None => Some(root),
        Some(why) => {
            let name = cx.name(root);
            cx.instruction(PROPERTY, at, format!("trains with %{name}, which {why}"));
            None
        }
    }
}

/// The fault of a gradient in a plan where all micro-batches run `step`; `None` if it has none.
fn made_in_step(plan: &Plan, flow: &Flow, root: Buffer) -> Option<String> {
    let made = flow.write_in(root, PlanSection::Step);
    match (plan.buffers[root].role, made) {
        (_, None) => Some("`step` does not make".to_string()),
        (Role::Carried, Some(_)) if plan.micro_batches == 1 => None,
        (Role::Carried, Some(_)) => Some("is of the last micro-batch alone".to_string()),
        (Role::State, Some(made)) => {
            let step = &plan.section(PlanSection::Step)[made];
            match adds_to(step, root) {
                true => None,
                false => Some(format!("{} does not add to", at_text((PlanSection::Step, made)))),
            }
        }
        (Role::Param | Role::Input | Role::Temp, Some(_)) => Some("is no gradient".into()),
    }
}

/// The fault of a sum that the first micro-batch starts and the last one ends, in `made`; `None` if it has none.
fn added_up(
    plan: &Plan,
    flow: &Flow,
    sum: Buffer,
    (last, made): (PlanSection, Option<usize>),
) -> Option<String> {
    if plan.buffers[sum].role != Role::Carried {
        return Some("is no sum of this step's micro-batches".to_string());
    }
    let mut all = PlanSection::MICRO_BATCHES.into_iter().filter(|&it| plan.runs(it) > 0);
    all.find_map(|section| {
        let made = if section == last { made } else { flow.write_in(sum, section) };
        let adds =
            |it: usize| section == PlanSection::First || adds_to(&plan.section(section)[it], sum);
        match made {
            None => Some(format!("`{}` does not make", section.name())),
            Some(it) if adds(it) => None,
            Some(it) => Some(format!("{} does not add to", at_text((section, it)))),
        }
    })
}

/// Whether an instruction adds something to what `sum` holds, which it counts once.
pub(super) fn adds_to(instruction: &Instruction, sum: Buffer) -> bool {
    let (op, args, results) = match instruction {
        Instruction::Compute { op, args, results, .. } => (op, args, results),
        // No part reads what another writes.
        Instruction::Collective { parts, .. } => {
            return parts.iter().any(|it| it.dst == sum && it.adds);
        }
        Instruction::Copy { .. } | Instruction::Record { .. } | Instruction::Wait { .. } => {
            return false;
        }
    };
    let mut of_sum = (0..args.len()).filter(|&it| args[it] == sum);
    match (of_sum.next(), of_sum.next()) {
        (Some(operand), None) => {
            op.without(operand).is_some() && args.len() > 1 && results.as_slice() == [sum]
        }
        (None, _) | (Some(_), Some(_)) => false,
    }
}

/// Each gradient is in the norm once per parameter that it trains, and nothing else is.
fn norm(cx: &mut Cx<'_>, flow: &Flow, updates: &[(At, Update)]) {
    let plan = cx.plan;
    let section = plan.section(PlanSection::Update);
    let scale = section.iter().enumerate().find_map(|(index, it)| match it {
        Instruction::Compute { op: Op::ClipScale(_), args, results, .. } => {
            Some((index, args[0], [results[0], results[2]]))
        }
        _ => None,
    });
    let squares =
        |it: &Instruction| matches!(it, Instruction::Compute { op: Op::SumSquares(_), .. });
    let Some((scale, sum, scale_and_applied)) = scale else {
        if let Some(index) = section.iter().position(squares) {
            cx.instruction(PROPERTY, (PlanSection::Update, index), "is in no norm".into());
        }
        return;
    };
    // For each instruction, how often its result is a term of the sum.
    let mut times: BTreeMap<usize, u64> = BTreeMap::new();
    let mut counted: SecondaryMap<Buffer, u64> = SecondaryMap::new();
    let mut terms = vec![(scale, sum, 1)];
    loop {
        for (reader, term, n) in std::mem::take(&mut terms) {
            match flow.moved_from(plan, (PlanSection::Update, reader), term) {
                (_, Some(maker)) => {
                    let times: &mut u64 = times.entry(maker).or_default();
                    *times = times.saturating_add(n);
                }
                (it, None) => {
                    let message = format!("counts %{}, which `update` does not make", cx.name(it));
                    cx.instruction(PROPERTY, (PlanSection::Update, reader), message);
                }
            }
        }
        // The last maker first: by then all readers of what it makes are known.
        let Some((index, n)) = times.pop_last() else { break };
        match &section[index] {
            Instruction::Compute { op: Op::SumSquares(_), args, .. } => {
                counted[args[0]] = counted[args[0]].saturating_add(n);
            }
            Instruction::Compute { op: Op::Add(_), args, .. } => {
                terms.extend(args.iter().map(|&it| (index, it, n)));
            }
            _ => {
                let message = "is in the gradient's norm, and is no sum of squares".into();
                cx.instruction(PROPERTY, (PlanSection::Update, index), message);
            }
        }
    }
    let mut trained: SecondaryMap<Buffer, u64> = SecondaryMap::new();
    updates.iter().for_each(|it| trained[it.1.grad] += 1);
    for (at, update) in updates {
        if update.scale_and_applied != scale_and_applied {
            let [scale, applied] = update.scale_and_applied.map(|it| cx.name(it));
            let [other, condition] = scale_and_applied.map(|it| cx.name(it));
            let message = format!(
                "scales its gradient by %{scale} on condition of %{applied}, and `clip_scale` makes %{other} and \
                 %{condition} for that"
            );
            cx.instruction(PROPERTY, *at, message);
        }
        let (n, of) = (counted[update.grad], trained[update.grad]);
        if n != of {
            let name = cx.name(update.grad);
            let message = format!(
                "trains with %{name}, which is {n} times in the gradient's norm and trains {of} \
                 parameter(s)"
            );
            cx.instruction(PROPERTY, *at, message);
        }
    }
    for (index, instruction) in section.iter().enumerate().filter(|it| squares(it.1)) {
        let grad = instruction.reads()[0];
        if trained[grad] == 0 {
            let message = format!("counts %{}, which reaches no optimizer", cx.name(grad));
            cx.instruction(PROPERTY, (PlanSection::Update, index), message);
        }
    }
}
