//! What the parts of a step are, read off the plan: where gradients begin, and what a buffer is there for.

use cranelift_entity::SecondaryMap;
use ir::ops::CollectiveKind;
use ir::plan::{Arena, Buffer, Instruction, Plan, PlanSection, Role};

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Up to the loss.
    Forward,
    /// The rest of a micro-batch.
    Backward,
    /// Once a step.
    Update,
}

impl Phase {
    /// In running order.
    pub const ALL: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::Update];

    /// In lower case.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Update => "update",
        }
    }
}

/// What a buffer of the step's arena is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// A weight, put together.
    Weight,
    /// Made by the forward pass, read by the backward pass.
    Kept,
    /// Of the forward pass alone.
    Forward,
    /// Of the backward pass alone: gradients of activations, and what it computes again.
    Backward,
    /// On its way to the optimizer.
    Gradient,
    /// Of the update alone.
    Update,
}

impl Purpose {
    /// In the order in which they are stacked.
    pub const ALL: [Purpose; 6] = [
        Purpose::Gradient,
        Purpose::Kept,
        Purpose::Weight,
        Purpose::Forward,
        Purpose::Backward,
        Purpose::Update,
    ];

    /// For a legend.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weight => "gathered weights",
            Purpose::Kept => "activations kept for backward",
            Purpose::Forward => "forward temporaries",
            Purpose::Backward => "backward temporaries",
            Purpose::Gradient => "gradients of weights",
            Purpose::Update => "update temporaries",
        }
    }

    /// For class names.
    pub fn key(self) -> &'static str {
        match self {
            Purpose::Weight => "weight",
            Purpose::Kept => "kept",
            Purpose::Forward => "forward",
            Purpose::Backward => "backward",
            Purpose::Gradient => "gradient",
            Purpose::Update => "update",
        }
    }
}

/// Phases of a step.
pub struct Phases {
    /// The sections that the page draws: the last micro-batch and the update.
    pub sections: [PlanSection; 2],
    /// The instruction of the micro-batch that the backward pass starts with.
    pub backward: usize,
    /// Instructions of the micro-batch.
    pub n_step: usize,
    /// Instructions of the micro-batch and of `update`.
    pub n: usize,
}

impl Phases {
    /// The backward pass starts behind the first `cross_entropy`, which makes the gradient of the logits with
    /// the loss, or with the first op that is the gradient of one. A loss in chunks starts its own before the
    /// last chunk is computed.
    pub fn of(plan: &Plan, micro_batch: PlanSection) -> Phases {
        let sections = [micro_batch, PlanSection::Update];
        let step = plan.section(sections[0]);
        let starts = |(index, it): (usize, &Instruction)| {
            let Instruction::Compute { op, .. } = it else { return None };
            let is = |of: &dyn Fn(&str) -> bool| op.parts().any(|it| of(it.kind().name()));
            match is(&|it| it == "cross_entropy") {
                true => Some(index + 1),
                false => is(&|it| it.ends_with("_grad")).then_some(index),
            }
        };
        Phases {
            sections,
            backward: step.iter().enumerate().find_map(starts).unwrap_or(step.len()),
            n_step: step.len(),
            n: step.len() + plan.section(PlanSection::Update).len(),
        }
    }

    /// The phase of an instruction, counted through the micro-batch and then `update`.
    pub fn at(&self, index: usize) -> Phase {
        match index {
            _ if index < self.backward => Phase::Forward,
            _ if index < self.n_step => Phase::Backward,
            _ => Phase::Update,
        }
    }

    /// Where a phase starts and ends.
    pub fn range(&self, phase: Phase) -> (usize, usize) {
        match phase {
            Phase::Forward => (0, self.backward),
            Phase::Backward => (self.backward, self.n_step),
            Phase::Update => (self.n_step, self.n),
        }
    }
}

/// The sections of a step.
pub const STEP: &[PlanSection] = PlanSection::TIMELINES[1];

/// The parameter of which a buffer holds the value, moved, rounded or quantized; none for what is not one.
pub fn weights(plan: &Plan) -> SecondaryMap<Buffer, Option<Buffer>> {
    let mut res: SecondaryMap<Buffer, Option<Buffer>> = SecondaryMap::new();
    res.resize(plan.buffers.len());
    plan.params.iter().for_each(|it| res[it.buffer] = Some(it.buffer));
    for (_, instruction) in plan.timeline(&PlanSection::ALL[..PlanSection::Update as usize]) {
        match instruction {
            Instruction::Collective { kind, parts, .. } => {
                let moves = kind.reduce().is_none() || matches!(kind, CollectiveKind::ToPartial(_));
                for part in parts.iter().filter(|_| moves) {
                    res[part.dst] = res[part.dst].or(res[part.src]);
                }
            }
            Instruction::Copy { src, dst, .. } => res[*dst] = res[*dst].or(res[*src]),
            Instruction::Compute { op, args, results, .. } if op.is_form() => {
                let of = args.first().and_then(|it| res[*it]);
                for result in results {
                    let is_scale = plan.buffers[*result].ty.n_elements() == 1;
                    res[*result] = res[*result].or(of.filter(|_| !is_scale));
                }
            }
            Instruction::Compute { .. } | Instruction::Record { .. } | Instruction::Wait { .. } => {
            }
        }
    }
    res
}

/// The parameter that a buffer brings the gradient of to its optimizer.
pub fn gradients(plan: &Plan) -> SecondaryMap<Buffer, Option<Buffer>> {
    let mut res: SecondaryMap<Buffer, Option<Buffer>> = SecondaryMap::new();
    res.resize(plan.buffers.len());
    for instruction in plan.section(PlanSection::Update) {
        let writes = instruction.writes();
        let param = writes.iter().find(|it| plan.buffers[**it].role == Role::Param);
        let Some(&param) = param else { continue };
        for read in instruction.reads() {
            let data = &plan.buffers[read];
            let same = data.ty.shape == plan.buffers[param].ty.shape;
            if same && data.role.arena() == Arena::Step {
                res[read] = Some(param);
            }
        }
    }
    let all: Vec<&Instruction> = plan.timeline(STEP).map(|it| it.1).collect();
    for instruction in all.into_iter().rev() {
        match instruction {
            Instruction::Collective { parts, .. } => {
                parts.iter().for_each(|it| res[it.src] = res[it.src].or(res[it.dst]));
            }
            Instruction::Copy { src, dst, .. } => res[*src] = res[*src].or(res[*dst]),
            Instruction::Compute { op, args, results, .. } if op.is_sum() => {
                let of = results.first().and_then(|it| res[*it]);
                args.iter().for_each(|it| res[*it] = res[*it].or(of));
            }
            Instruction::Compute { .. } | Instruction::Record { .. } | Instruction::Wait { .. } => {
            }
        }
    }
    res
}

/// What each buffer of the step's arena is there for.
pub fn purposes(plan: &Plan, phases: &Phases) -> SecondaryMap<Buffer, Option<Purpose>> {
    let (weights, gradients) = (weights(plan), gradients(plan));
    let mut res: SecondaryMap<Buffer, Option<Purpose>> = SecondaryMap::new();
    res.resize(plan.buffers.len());
    for (buffer, span) in plan.spans(&phases.sections).iter() {
        let Some((first, last)) = *span else { continue };
        res[buffer] = Some(if gradients[buffer].is_some() {
            Purpose::Gradient
        } else if weights[buffer].is_some() {
            Purpose::Weight
        } else {
            match (phases.at(first), phases.at(last)) {
                (Phase::Forward, Phase::Forward) => Purpose::Forward,
                (Phase::Forward, _) => Purpose::Kept,
                (Phase::Backward, _) => Purpose::Backward,
                (Phase::Update, _) => Purpose::Update,
            }
        });
    }
    res
}
