//! How much scratch the instructions of a plan need on a GPU, on the rank that holds most.

use std::collections::HashMap;

use ir::Op;
use ir::plan::{BySection, Instruction, Plan, PlanSection};

use super::{Call, Operand, lower, transport};

/// Scratch that a plan needs on a GPU, on the rank that holds most.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    /// Bytes, by section and instruction. A batch has those of its calls together.
    pub needed: BySection<Vec<u64>>,
    /// Ops, each as often as it is called.
    pub ops: u64,
    /// Ops on different operands.
    pub distinct: u64,
    /// Calls of ops that no kernel does; they need none.
    pub without_kernel: u64,
}

/// Scratch of all instructions of a plan.
pub fn scratch(plan: &Plan) -> Scratch {
    let mut res = Scratch::default();
    // Layers are alike.
    let mut known: HashMap<(&Op, Vec<Operand>), Option<u64>> = HashMap::new();
    for section in PlanSection::ALL {
        // By stream: the call before, with what its batch needs.
        let mut before: Vec<Option<(Call<'_>, u64)>> = vec![None; plan.streams.len()];
        for instruction in plan.section(section) {
            let needed = match instruction {
                Instruction::Compute { op, args, results, stream } => {
                    let call = Call::new(plan, op, args, results);
                    let operands = call.args.iter().chain(&call.results).cloned().collect();
                    let lowered = || lower(&[call.as_op_call()]).ok().map(|it| it.workspace);
                    let own = *known.entry((op, operands)).or_insert_with(lowered);
                    res.ops += 1;
                    res.without_kernel += u64::from(own.is_none());
                    let own = own.unwrap_or(0);
                    let before = &mut before[stream.as_u32() as usize];
                    // A batch needs no more than its calls together.
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
            res.needed[section as usize].push(needed);
        }
    }
    res.distinct = known.len() as u64;
    res
}
