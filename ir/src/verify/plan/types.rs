//! `types` and `reductions`: each op and each part of a collective, on types and layouts.
//!
//! What a value is still to be reduced over is part of its layout. Only a collective takes axes out of it,
//! and each part of one is exactly the step between the layouts of its two buffers; all other ops hand on
//! what they get, or are refused. So on every way from where a partial value is made to where it is used
//! whole, each of its axes is reduced once.

use cranelift_entity::SecondaryMap;
use smallvec::SmallVec;

use super::{At, Cx};
use crate::ops::Op;
use crate::placement::ReduceOp;
use crate::plan::{Buffer, Instruction, PlanSection};
use crate::verify::Property;
use crate::verify::op::{Checker, Class};

pub(super) fn check<'a>(
    cx: &mut Cx<'a>,
    class_of: &SecondaryMap<Buffer, Class>,
    checker: &mut Checker<'a>,
) {
    let plan = cx.plan;
    let (mut ops, mut parts_seen, mut reductions) = (0, 0, 0);
    // The last collective that read or wrote a buffer.
    let mut read_at: SecondaryMap<Buffer, Option<At>> = SecondaryMap::new();
    let mut written_at: SecondaryMap<Buffer, Option<At>> = SecondaryMap::new();
    read_at.resize(plan.buffers.len());
    written_at.resize(plan.buffers.len());
    for (at, instruction) in plan.timeline(&PlanSection::ALL) {
        match instruction {
            Instruction::Compute { op: Op::Collective(_) | Op::Reshard(_), .. } => {
                let message = "moves data, and is no collective instruction".into();
                cx.instruction(Property::Types, at, message);
            }
            Instruction::Compute { op, args, results, .. } => {
                ops += 1;
                let classes = |of: &[Buffer]| -> SmallVec<[Class; 4]> {
                    of.iter().map(|&it| class_of[it]).collect()
                };
                for fault in checker.op(op, &classes(args), &classes(results)) {
                    cx.instruction(fault.property, at, fault.message.clone());
                }
                if let (Some(dtype), Some(&operand)) = (op.casts_to(), args.first())
                    && plan.buffers[operand].ty.dtype == dtype
                {
                    let name = cx.name(operand);
                    let message = format!("makes {dtype} of %{name}, which is that already");
                    cx.instruction(Property::Types, at, message);
                }
                in_place(cx, at, op, args, results);
            }
            Instruction::Collective { kind, comm, parts, .. } => {
                parts.iter().for_each(|it| read_at[it.src] = Some(at));
                for part in parts {
                    parts_seen += 1;
                    reductions += u64::from(kind.reduces().is_some());
                    let (from, to) = (class_of[part.src], class_of[part.dst]);
                    if let Some(fault) = checker.part(*kind, plan.comms[*comm], from, to) {
                        cx.instruction(fault.property, at, fault.message.clone());
                    }
                    if part.adds && kind.reduces() != Some(ReduceOp::Sum) {
                        let message = "adds to a buffer what it does not sum".into();
                        cx.instruction(Property::Reductions, at, message);
                    }
                    if read_at[part.dst] == Some(at) {
                        let message = "writes a buffer that it reads".into();
                        cx.instruction(Property::Lifetimes, at, message);
                    }
                    if written_at[part.dst].replace(at) == Some(at) {
                        cx.instruction(Property::Values, at, "writes a buffer twice".into());
                    }
                }
            }
            Instruction::Copy { src, dst, .. } => {
                if class_of[*src] != class_of[*dst] {
                    let partial = |it: Buffer| plan.buffers[it].sharding.partial;
                    let property = match partial(*src) == partial(*dst) {
                        true => Property::Types,
                        false => Property::Reductions,
                    };
                    cx.instruction(property, at, "copies to another type or layout".into());
                }
                if src == dst {
                    cx.instruction(Property::Lifetimes, at, "copies a buffer to itself".into());
                }
            }
            Instruction::Record { .. } | Instruction::Wait { .. } => {}
        }
    }
    cx.proof.add(Property::Types, vec![("ops", ops), ("moved tensors", parts_seen)]);
    let partial = plan.buffers.values().filter(|it| it.sharding.partial.is_some()).count();
    cx.proof.add(
        Property::Reductions,
        vec![("partial values", partial as u64), ("reduced tensors", reductions)],
    );
}

/// A result is in the buffer of an operand only where the op allows it.
fn in_place(cx: &mut Cx<'_>, at: At, op: &Op, args: &[Buffer], results: &[Buffer]) {
    for (i, result) in results.iter().enumerate() {
        if results[..i].contains(result) {
            cx.instruction(Property::Values, at, "makes two results in one buffer".into());
        }
        for (operand, _) in args.iter().enumerate().filter(|it| it.1 == result) {
            if !op.in_place().contains(&(i, operand)) {
                let message = format!("makes result {i} in operand {operand}, which it may not");
                cx.instruction(Property::Lifetimes, at, message);
            }
        }
    }
}
