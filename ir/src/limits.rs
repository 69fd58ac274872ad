//! Limits on the total size and work of a program.
//!
//! One tensor has at most [`TensorType::MAX_ELEMENTS`]. A program of many may still have more bytes, or take more
//! operations, than the numbers of a plan hold: planc reports this as an error of the user, so no sum overflows.

use crate::ops::Op;
use crate::plan::{Buffer, Instruction, Plan, PlanSection};
use crate::summary::{op_flops, traffic};
use crate::{Graph, TensorType};

/// The most bytes that all tensors of a graph have together, each once, whatever the mesh. Passes add tensors, so
/// there is room below [`MAX_PLAN_BYTES`].
const MAX_GRAPH_BYTES: u128 = 1 << 60;

/// The most bytes that all buffers of a plan have together: differences of sums of them are computed in an `i64`.
const MAX_PLAN_BYTES: u128 = 1 << 63;

/// The most operations, and the most bytes sent, of a rank in a step. The model FLOPs may count one operation
/// several times, so there is room below 2^64.
const MAX_A_STEP: u128 = 1 << 60;

impl Graph {
    /// A message about the part that is too large; `None` if the program can be planned.
    pub fn exceeds(&self) -> Option<String> {
        let tensors = self.values.values().map(|it| (it.name.as_str(), &it.ty));
        too_many_bytes(tensors, MAX_GRAPH_BYTES)
    }
}

impl Plan {
    /// A message about the part that is too large; `None` if all sums over the plan can be computed.
    pub fn exceeds(&self) -> Option<String> {
        let buffers = self.buffers.values().map(|it| (it.name.as_str(), &it.ty));
        too_many_bytes(buffers, MAX_PLAN_BYTES).or_else(|| self.too_much_work())
    }

    /// Operations and bytes of collectives that are more than the sums over a step hold.
    fn too_much_work(&self) -> Option<String> {
        let (mut flops, mut sent) = (0_u128, 0_u128);
        for section in PlanSection::ALL {
            let times = u128::from(self.runs(section));
            for instruction in self.section(section) {
                let (all, work, what) = match instruction {
                    Instruction::Compute { op, args, results, .. } => {
                        (&mut flops, self.flops(op, args, results), "operations")
                    }
                    Instruction::Collective { kind, comm, parts, .. } => {
                        let (bytes, wire) = traffic(self, *kind, self.comms[*comm], parts);
                        (&mut sent, bytes.max(wire), "bytes in collectives")
                    }
                    Instruction::Copy { .. }
                    | Instruction::Record { .. }
                    | Instruction::Wait { .. } => continue,
                };
                *all += u128::from(work) * times;
                if *all > MAX_A_STEP {
                    let made = instruction.writes();
                    let made = made.first().map_or("", |it| self.buffers[*it].name.as_str());
                    return Some(format!(
                        "a step takes more than 2^60 {what} on a rank, counted up to `{}` that makes `{made}` \
                         ({:.1e} of them, {times} times); use a smaller model or batch, or more ranks",
                        instruction.name(),
                        work as f64,
                    ));
                }
            }
        }
        None
    }

    /// Operations of an instruction on a rank; 0 if the op does not take these operands, which the verifier reports.
    fn flops(&self, op: &Op, args: &[Buffer], results: &[Buffer]) -> u64 {
        let types = |it: &[Buffer]| -> Vec<&TensorType> {
            it.iter().map(|&it| &self.buffers[it].ty).collect()
        };
        let made = op.infer(&types(args));
        if !made.is_ok_and(|it| it.iter().eq(types(results))) {
            return 0;
        }
        op_flops(self, op, args, results)
    }
}

/// Returns a message if tensors have more than `most` bytes together. It names the largest one.
fn too_many_bytes<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a TensorType)> + Clone,
    most: u128,
) -> Option<String> {
    let bytes: u128 = tensors.clone().map(|it| u128::from(it.1.bytes())).sum();
    let (largest, ty) = tensors.max_by_key(|it| it.1.bytes()).filter(|_| bytes > most)?;
    Some(format!(
        "all tensors together have {:.1e} bytes, and planning holds 2^{}; the largest is `{largest}`, {ty}",
        bytes as f64,
        most.ilog2(),
    ))
}

#[cfg(test)]
mod tests {
    use crate::text::parse_plan;

    /// Returns the parser's error for a plan with these statements; empty if it parses.
    fn refused(statements: &str) -> String {
        let text = format!(
            "plan @p phase=lowered mesh=(dp=1) micro_batches=1000000 {{\n  comm c0 = (dp)\n  stream s0 = compute\n\
             {statements}}}\n"
        );
        parse_plan(&text).err().map(|it| it.message).unwrap_or_default()
    }

    #[test]
    fn sums_that_no_number_holds_are_refused() {
        let matrix =
            |name: &str, k: u64| format!("  buffer %{name} : f32[8388608, {k}] @ [_, _] temp\n");
        let step = "  step:\n  s0: %c = matmul(transpose_b:true) %a, %b\n";
        let small = [matrix("a", 2), matrix("b", 2), matrix("c", 8388608)].concat();
        assert_eq!(refused(&(small.clone() + &step.replace("step", "update"))), "");
        assert_eq!(
            refused(&(small + step)),
            "a step takes more than 2^60 operations on a rank, counted up to `matmul` that makes `c` (2.8e14 of \
             them, 1000000 times); use a smaller model or batch, or more ranks"
        );
        let many: String = (0..40_000).map(|it| matrix(&format!("w{it}"), 8388608)).collect();
        assert_eq!(
            refused(&many),
            "all tensors together have 1.1e19 bytes, and planning holds 2^63; the largest is `w39999`, \
             f32[8388608, 8388608]"
        );
    }
}
