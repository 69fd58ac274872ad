//! Invariants of a [`Plan`], one file for each group of them.
//!
//! [`verify`] is what holds after every pass over plans:
//! * `program`: handles are in range; names are distinct; parameters are in buffers of that role, results
//!   are whole on every rank and survive their section.
//! * `types`: ops type-check on global types and on what one rank holds, and are laid out as their factors
//!   say; every part of a collective is the step that its kind and axes say. So a partial value meets
//!   linear ops only, and is whole only behind a reduction over its axes.
//! * `communication`: an event is recorded once and waited for after that, in the same section;
//!   collectives of one communicator are on one stream, and nothing else is there.
//! * `accesses`: what is read was written and is still there, and no two accesses race; by buffer, and by
//!   byte once there are offsets.
//! * `memory`: buffers are inside their arenas, aligned; those that survive a step do not overlap.
//!
//! [`prove`] adds, for a plan that is done, what makes it a training step: `values`, `gradients`, `states`,
//! `checkpoint`, and the exact sizes of `memory`.
//!
//! The proof does not show that a plan computes its model; see [`NOT_PROVED`](crate::verify::NOT_PROVED).
//!
//! Order, bytes and the peak are counted here independently of passes: `accesses` has clocks of its own.
//! Trusted are the placement algebra ([`crate::placement`]), ops' factors ([`crate::ops`]) and the layout of
//! checkpoints ([`crate::checkpoint`]), which passes use as well, and which are tested against PyTorch.

mod accesses;
mod checkpoint;
mod communication;
mod flow;
mod gradients;
mod memory;
mod order;
mod program;
mod states;
mod types;
mod values;

use cranelift_entity::SecondaryMap;

use crate::Phase;
use crate::plan::{Buffer, Instruction, Plan, PlanSection};
use crate::verify::op::{Attributes, Checker};
use crate::verify::{Place, Proof, Property, VerifyError};

use flow::Flow;

/// Every broken invariant that each pass must keep. See the [module docs](self).
pub fn verify(plan: &Plan) -> Vec<VerifyError> {
    check(plan, Depth::Pass).broken
}

/// Proves everything that is claimed of a plan, but that there are kernels, which `kernels` knows.
///
/// A plan that is not in phase `Planned` is proved what [`verify`] checks.
pub fn prove(plan: &Plan) -> Proof {
    check(plan, Depth::Whole)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    Pass,
    Whole,
}

fn check(plan: &Plan, depth: Depth) -> Proof {
    let mut cx = Cx { plan, proof: Proof::default() };
    program::handles(&mut cx);
    if !cx.proof.broken.is_empty() {
        return cx.proof;
    }
    let mut checker = Checker::new(&plan.mesh, Attributes::Local);
    let Some(class_of) = program::buffers(&mut cx, &mut checker) else { return cx.proof };
    types::check(&mut cx, &class_of, &mut checker);
    communication::check(&mut cx);
    let mut bytes = SecondaryMap::new();
    for buffer in plan.buffers.keys() {
        bytes[buffer] = checker.local_bytes(class_of[buffer]);
    }
    let placed = plan.phase >= Phase::Planned && memory::places(&mut cx, &bytes);
    accesses::check(&mut cx, placed.then_some(&bytes));
    // What follows reads operands as ops have them.
    let well_formed =
        |it: &VerifyError| !matches!(it.property, Some(Property::Program | Property::Types));
    if depth == Depth::Whole && placed && cx.proof.broken.iter().all(well_formed) {
        let flow = Flow::of(plan);
        program::run(&mut cx, &flow);
        memory::sizes(&mut cx, &bytes, &flow);
        values::check(&mut cx, &flow);
        gradients::check(&mut cx, &flow);
        states::check(&mut cx, &flow);
        checkpoint::check(&mut cx, &flow);
    }
    cx.proof.checked.sort_by_key(|it| it.property);
    cx.proof.broken.sort_by_key(|it| it.property);
    cx.proof
}

/// An instruction: its section and its index there.
type At = (PlanSection, usize);

/// A plan, and what is known of it so far.
struct Cx<'a> {
    plan: &'a Plan,
    proof: Proof,
}

impl<'a> Cx<'a> {
    fn fail(&mut self, property: Property, place: Place, context: String, message: String) {
        let property = Some(property);
        self.proof.broken.push(VerifyError { property, place, context, message });
    }

    fn program(&mut self, property: Property, message: String) {
        self.fail(property, Place::Program, String::new(), message);
    }

    fn buffer(&mut self, property: Property, buffer: Buffer, message: String) {
        let data = &self.plan.buffers[buffer];
        let sharding = data.sharding.display(&self.plan.mesh);
        let context = format!("{} @ {sharding} {}", data.ty, data.role.name());
        self.fail(property, Place::Buffer(data.name.clone()), context, message);
    }

    fn instruction(&mut self, property: Property, at: At, message: String) {
        let place = Place::Instruction { section: at.0, index: at.1 };
        let context = show(self.plan, &self.plan.section(at.0)[at.1]);
        self.fail(property, place, context, message);
    }

    fn name(&self, buffer: Buffer) -> &'a str {
        &self.plan.buffers[buffer].name
    }
}

/// `step 12`.
fn at_text(at: At) -> String {
    format!("{} {}", at.0.name(), at.1)
}

/// `s0: %c = add %a, %b`.
fn show(plan: &Plan, instruction: &Instruction) -> String {
    let names = |of: &[Buffer]| {
        let names = of.iter().map(|&it| format!("%{}", plan.buffers[it].name));
        names.collect::<Vec<_>>().join(", ")
    };
    let what = match instruction {
        Instruction::Compute { op, .. } => op.to_text(),
        Instruction::Collective { kind, comm, .. } => {
            format!("{kind}({})", plan.mesh.names(plan.comms[*comm]))
        }
        Instruction::Copy { .. } => "copy".to_string(),
        Instruction::Record { event, stream } => return format!("{stream}: record {event}"),
        Instruction::Wait { event, stream } => return format!("{stream}: wait {event}"),
    };
    let (reads, writes) = (instruction.reads(), instruction.writes());
    let space = if reads.is_empty() { "" } else { " " };
    let (reads, writes) = (names(&reads), names(&writes));
    format!("{}: {writes} = {what}{space}{reads}", instruction.stream())
}
