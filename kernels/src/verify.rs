//! What of a plan is proved here: every op has a kernel that takes its operands, and scratch for it.
//!
//! On a CPU every op has one: [`run_f32`](crate::run_f32) or the op's reference, which take whatever the op
//! type-checks on. For a GPU each op is lowered as it will be when the plan is loaded. An op that no GPU
//! kernel does is no mistake of the plan, and is counted.

use std::collections::HashMap;

use ir::Op;
use ir::plan::{Instruction, Plan, PlanSection, Stream};
use ir::verify::{Place, Proof, Property, VerifyError};

use crate::cuda::{Call, Operand, lower, transport};

/// Adds [`Property::Kernels`] to what is proved of a plan. Its types must hold, or nothing is added.
pub fn prove(plan: &Plan, proof: &mut Proof) {
    let basic = |it: &VerifyError| {
        matches!(it.property, Some(Property::Program | Property::Types | Property::Reductions))
    };
    if proof.broken.iter().any(basic) {
        return;
    }
    let mut known: Known<'_> = HashMap::new();
    let (mut ops, mut without) = (0, 0);
    for section in PlanSection::ALL {
        // By stream: the call before, with what its batch needs.
        let mut before: Vec<Option<(Call<'_>, u64)>> = vec![None; plan.streams.len()];
        for (index, instruction) in plan.section(section).iter().enumerate() {
            let stream = instruction.stream();
            let needed = match instruction {
                Instruction::Compute { op, args, results, .. } => {
                    ops += 1;
                    let call = Call::new(plan, op, args, results);
                    let own = workspace(&mut known, &call);
                    without += u64::from(own.is_none());
                    let own = own.unwrap_or(0);
                    let before = &mut before[stream.as_u32() as usize];
                    let batch = before.take().filter(|it| it.0.goes_with(&call));
                    let all = own + batch.map_or(0, |it| it.1);
                    *before = (own > 0).then_some((call, all));
                    all
                }
                Instruction::Collective { kind, comm, parts, .. } => {
                    transport::workspace_of(plan, *kind, *comm, parts)
                }
                Instruction::Copy { .. }
                | Instruction::Record { .. }
                | Instruction::Wait { .. } => 0,
            };
            if needed > plan.streams[stream].workspace {
                let place = Place::Instruction { section, index };
                proof.broken.push(too_little(plan, stream, place, needed));
            }
        }
    }
    let counts = vec![
        ("ops", ops),
        ("distinct calls", known.len() as u64),
        ("ops without a GPU kernel", without),
    ];
    proof.add(Property::Kernels, counts);
}

/// Scratch of calls seen before, by op and operands: layers are alike.
type Known<'a> = HashMap<(&'a Op, Vec<Operand>), Option<u64>>;

/// Scratch of a call on a GPU; none if no kernel does it.
fn workspace<'a>(known: &mut Known<'a>, call: &Call<'a>) -> Option<u64> {
    let operands = call.args.iter().chain(&call.results).cloned().collect();
    let lowered = || lower(&[call.as_op_call()]).ok().map(|it| it.workspace);
    *known.entry((call.op, operands)).or_insert_with(lowered)
}

fn too_little(plan: &Plan, stream: Stream, place: Place, needed: u64) -> VerifyError {
    let stated = plan.streams[stream].workspace;
    let message = format!("needs {needed} bytes of scratch, and {stream} has {stated}");
    VerifyError { property: Some(Property::Kernels), place, context: String::new(), message }
}
