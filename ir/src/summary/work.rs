//! Model FLOPs of a plan, and the FLOPs that several ranks repeat.
//!
//! A plan has global types, so the operations of an instruction on global shapes count every token once,
//! whatever the mesh is. Of the instructions of a micro-batch, two kinds count as work of the model:
//!
//! ```text
//! fprop           the result `loss` depends on it
//! dgrad, wgrad    it depends on a gradient
//! recomputation   neither: gradients depend on it, and it depends on the forward pass only
//! ```
//!
//! A weight that is not trained has no wgrad, and a plan has no gradient that no optimizer reads.

use std::collections::BTreeMap;

use cranelift_entity::EntitySet;
use rustc_hash::FxHashSet;
use serde::Serialize;
use smallvec::SmallVec;

use crate::Shape;
use crate::graph::Name;
use crate::ops::Op;
use crate::placement::{AxisSet, axes_alike};
use crate::plan::{Buffer, Instruction, Plan, PlanSection};

/// Operations that several ranks do alike, on the same operands.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Repeated {
    /// Names of the axes along which ranks do the same, as in `dp, tp`.
    pub axes: String,
    /// Number of ranks that do the same.
    pub ranks: u64,
    /// Operations of one rank and one step, of those in [`Summary::flops`](super::Summary::flops).
    pub flops: u64,
    /// Names of the tensors that they make, those of most operations first.
    pub tensors: Vec<Name>,
}

/// Operations of one step that a rank executes: [`Summary::flops`](super::Summary::flops).
pub(crate) fn executed_flops(plan: &Plan) -> u64 {
    plan.timeline(&PlanSection::ALL).fold(0, |sum: u64, ((section, _), instruction)| {
        let Instruction::Compute { op, args, results, .. } = instruction else { return sum };
        let times = u64::from(plan.runs(section));
        op_flops(plan, op, args, results).saturating_mul(times).saturating_add(sum)
    })
}

/// Operations of one step over all ranks as model FLOPs utilization counts them:
/// [`Summary::model_flops`](super::Summary::model_flops).
///
/// A program without a result `loss` trains nothing, and each of its operations counts.
pub(crate) fn model_flops(plan: &Plan) -> u128 {
    let step = plan.section(plan.last_micro_batch());
    let forward = forward(plan);
    let mut gradients = Gradients::new(plan, forward.as_deref());
    let mut res = 0;
    for (index, instruction) in step.iter().enumerate() {
        let is_gradient = gradients.reach(instruction);
        let is_forward = forward.as_ref().is_none_or(|it| it[index]);
        if let (Instruction::Compute { op, args, results, .. }, true) =
            (instruction, is_forward || is_gradient)
        {
            let shapes = |it: &[Buffer]| -> SmallVec<[&[u64]; 4]> {
                it.iter().map(|&it| &plan.buffers[it].ty.shape[..]).collect()
            };
            res += u128::from(op.model_flops(&shapes(args), &shapes(results)));
        }
    }
    res * u128::from(plan.micro_batches)
}

/// Returns, for each instruction of the last micro-batch, true if the loss depends on it. Returns `None` if
/// there is no loss.
fn forward(plan: &Plan) -> Option<Vec<bool>> {
    let loss = plan.results.iter().find(|it| it.0 == "loss")?.1;
    let mut needed: EntitySet<Buffer> = EntitySet::with_capacity(plan.buffers.len());
    needed.insert(loss);
    let update = plan.section(PlanSection::Update).iter().rev();
    update.for_each(|it| _ = need(it, &mut needed));
    let step = plan.section(plan.last_micro_batch()).iter().rev();
    let mut res: Vec<bool> = step.map(|it| need(it, &mut needed)).collect();
    res.reverse();
    Some(res)
}

/// Returns true if an instruction makes a needed buffer, and marks its operands as needed then.
fn need(instruction: &Instruction, needed: &mut EntitySet<Buffer>) -> bool {
    match instruction {
        Instruction::Compute { args, results, .. } => {
            let is_needed = results.iter().any(|&it| needed.contains(it));
            if is_needed {
                args.iter().for_each(|&it| _ = needed.insert(it));
            }
            is_needed
        }
        Instruction::Collective { parts, .. } => {
            let is_needed = parts.iter().any(|it| needed.contains(it.dst));
            // One call may move weights of the forward pass and others.
            for part in parts {
                if needed.contains(part.dst) {
                    needed.insert(part.src);
                }
            }
            is_needed
        }
        Instruction::Copy { src, dst, .. } => {
            let is_needed = needed.contains(*dst);
            if is_needed {
                needed.insert(*src);
            }
            is_needed
        }
        Instruction::Record { .. } | Instruction::Wait { .. } => false,
    }
}

/// The buffers that depend on a gradient, for a walk over a micro-batch in issue order.
struct Gradients<'a> {
    reached: EntitySet<Buffer>,
    /// Ops without operands in the forward pass. Every other op without operands starts the backward pass,
    /// unless it recomputes one of these.
    constants: FxHashSet<&'a Op>,
}

impl<'a> Gradients<'a> {
    fn new(plan: &'a Plan, forward: Option<&[bool]>) -> Gradients<'a> {
        let step = plan.section(plan.last_micro_batch()).iter().enumerate();
        let constants = step.filter_map(|(index, it)| match it {
            Instruction::Compute { op, args, .. } if args.is_empty() => {
                forward.is_none_or(|it| it[index]).then_some(op)
            }
            _ => None,
        });
        let reached = EntitySet::with_capacity(plan.buffers.len());
        Gradients { reached, constants: constants.collect() }
    }

    /// Returns true if an instruction depends on a gradient, and marks its results then.
    fn reach(&mut self, instruction: &Instruction) -> bool {
        match instruction {
            Instruction::Compute { op, args, results, .. } => {
                let starts = args.is_empty() && !self.constants.contains(op);
                let depends = starts || args.iter().any(|&it| self.reached.contains(it));
                for (index, &result) in results.iter().enumerate() {
                    if depends || op.first_gradients().contains(&index) {
                        self.reached.insert(result);
                    }
                }
                depends
            }
            Instruction::Collective { parts, .. } => {
                for part in parts {
                    if self.reached.contains(part.src) {
                        self.reached.insert(part.dst);
                    }
                }
                false
            }
            Instruction::Copy { src, dst, .. } => {
                if self.reached.contains(*src) {
                    self.reached.insert(*dst);
                }
                false
            }
            Instruction::Record { .. } | Instruction::Wait { .. } => false,
        }
    }
}

/// Operations that ranks repeat, most first.
pub(super) fn repeated(plan: &Plan) -> Vec<Repeated> {
    let mut by_axes: BTreeMap<AxisSet, BTreeMap<Buffer, u64>> = BTreeMap::new();
    for ((section, _), instruction) in
        plan.timeline(&[plan.last_micro_batch(), PlanSection::Update])
    {
        let Instruction::Compute { op, args, results, .. } = instruction else { continue };
        let shardings = args.iter().chain(results).map(|&it| &plan.buffers[it].sharding);
        let alike = axes_alike(shardings, &plan.mesh);
        if alike.is_empty() {
            continue;
        }
        let flops = op_flops(plan, op, args, results);
        if flops > 0 {
            let of_tensor = by_axes.entry(alike).or_default().entry(results[0]).or_default();
            *of_tensor = flops.saturating_mul(times(plan, section)).saturating_add(*of_tensor);
        }
    }
    let mut res: Vec<Repeated> = by_axes
        .into_iter()
        .map(|(axes, tensors)| {
            let mut tensors: Vec<(Buffer, u64)> = tensors.into_iter().collect();
            // Those of equal size stay in program order.
            tensors.sort_by_key(|it| std::cmp::Reverse(it.1));
            Repeated {
                axes: plan.mesh.names(axes),
                ranks: plan.mesh.set_size(axes),
                flops: tensors.iter().fold(0, |sum: u64, it| sum.saturating_add(it.1)),
                tensors: tensors.iter().map(|it| plan.buffers[it.0].name.clone()).collect(),
            }
        })
        .collect();
    res.sort_by_key(|it| std::cmp::Reverse(it.flops));
    res
}

/// Operations of one call of an op that one rank executes.
pub(crate) fn op_flops(plan: &Plan, op: &Op, args: &[Buffer], results: &[Buffer]) -> u64 {
    // Most ops are bound by memory. Global shapes are at hand, and no local one is larger.
    let global = |it: &[Buffer]| -> SmallVec<[&[u64]; 4]> {
        it.iter().map(|&it| &plan.buffers[it].ty.shape[..]).collect()
    };
    if op.flops(&global(args), &global(results)) == 0 {
        return 0;
    }
    let shapes = |it: &[Buffer]| -> SmallVec<[Shape; 4]> {
        it.iter().map(|&it| plan.local_shape(it)).collect()
    };
    let (args, results) = (shapes(args), shapes(results));
    let args: SmallVec<[&[u64]; 4]> = args.iter().map(|it| &it[..]).collect();
    let results: SmallVec<[&[u64]; 4]> = results.iter().map(|it| &it[..]).collect();
    op.flops(&args, &results)
}

/// The number of times a section counts in a step, where one micro-batch stands for all.
fn times(plan: &Plan, section: PlanSection) -> u64 {
    match section {
        PlanSection::First | PlanSection::Step | PlanSection::Last => plan.micro_batches.into(),
        PlanSection::Prepare | PlanSection::Update => 1,
    }
}
