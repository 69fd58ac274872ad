//! [`prove`] checks all properties of a plan; [`Proved`] is a plan that has them.
//!
//! `ir` proves all properties except the kernels. This module checks that every op has a kernel for its operands,
//! and scratch for it.
//!
//! On a CPU every op has one: [`run_f32`](crate::run_f32) or the op's reference, which take whatever the op
//! type-checks on. For a GPU each op is lowered as it will be when the plan is loaded. An op that no GPU
//! kernel does is no mistake of the plan, and is counted.

use std::collections::BTreeMap;
use std::ops::Deref;

use ir::Phase;
use ir::plan::{ALIGN, Plan, PlanSection, Stream};
use ir::verify::{Place, Proof, Property, VerifyError};

use crate::cuda::scratch;

/// A plan of which all properties hold. Only [`Proved::of`] makes one, and nothing can change it, so that what runs is
/// what was proved.
#[derive(Debug, Clone, PartialEq)]
pub struct Proved(Plan);

impl Proved {
    /// Proves a plan. Returns the failed proof otherwise.
    pub fn of(plan: Plan) -> Result<Proved, Box<Proof>> {
        let mut proof = prove(&plan);
        if plan.phase < Phase::Planned {
            let message = "its buffers have no place in memory yet".to_string();
            proof.broken.push(VerifyError {
                property: Some(Property::Memory),
                ..broken(Place::Program, message)
            });
        }
        if proof.broken.is_empty() { Ok(Proved(plan)) } else { Err(Box::new(proof)) }
    }

    /// A plan that nothing was proved of, for tests of the runtime: their plans are no training steps.
    #[cfg(feature = "unproved")]
    pub fn unproved(plan: Plan) -> Proved {
        Proved(plan)
    }

    /// The plan, which may be changed and must be proved again to run.
    pub fn into_plan(self) -> Plan {
        self.0
    }
}

impl Deref for Proved {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}

/// Proves a plan: [`ir::verify::plan::prove`], and that there are kernels for it.
pub fn prove(plan: &Plan) -> Proof {
    let mut proof = ir::verify::plan::prove(plan);
    prove_kernels(plan, &mut proof);
    proof
}

/// Adds [`Property::Kernels`] to what is proved of a plan. Its types must hold, or nothing is added.
fn prove_kernels(plan: &Plan, proof: &mut Proof) {
    let basic = |it: &VerifyError| {
        matches!(it.property, Some(Property::Program | Property::Types | Property::Reductions))
    };
    if proof.broken.iter().any(basic) {
        return;
    }
    let found = scratch(plan);
    let mut most: BTreeMap<Stream, u64> = plan.streams.keys().map(|it| (it, 0)).collect();
    for section in PlanSection::ALL {
        let needed = &found.needed[section as usize];
        for (index, (instruction, &needed)) in plan.section(section).iter().zip(needed).enumerate()
        {
            let stream = instruction.stream();
            let most = most.entry(stream).or_default();
            *most = needed.next_multiple_of(ALIGN).max(*most);
            if needed > plan.streams[stream].workspace {
                let place = Place::Instruction { section, index };
                let why = format!("needs {needed} bytes of scratch, and {}", stated(plan, stream));
                proof.broken.push(broken(place, why));
            }
        }
    }
    for (stream, most) in most {
        if plan.streams[stream].workspace > most {
            let why =
                format!("{} of scratch, and none needs more than {most}", stated(plan, stream));
            proof.broken.push(broken(Place::Program, why));
        }
    }
    let counts = vec![
        ("ops", found.ops),
        ("distinct calls", found.distinct),
        ("ops without a GPU kernel", found.without_kernel),
    ];
    proof.add(Property::Kernels, counts);
}

fn stated(plan: &Plan, stream: Stream) -> String {
    format!("{stream} has {}", plan.streams[stream].workspace)
}

fn broken(place: Place, message: String) -> VerifyError {
    VerifyError { property: Some(Property::Kernels), place, context: String::new(), message }
}
