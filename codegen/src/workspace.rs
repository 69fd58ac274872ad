//! How much scratch each stream needs on a GPU, which a plan must know before it runs.
//!
//! A stream has one region, which its instructions have one after the other. Sizes are those of the
//! rank that holds most.

use cranelift_entity::{EntityRef, PrimaryMap};
use ir::plan::{ALIGN, Instruction, Plan, Stream};
use ir::{Op, Shape};
use kernels::cuda::{Call, lower, transport};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Sets the workspace of every stream. An op that no kernel runs needs none.
pub fn add_workspaces(plan: &mut Plan) {
    let mut bytes: PrimaryMap<Stream, u64> = plan.streams.keys().map(|_| 0).collect();
    let mut known = Known::default();
    for section in &plan.sections {
        // By stream: the call before, with what all calls of its batch need.
        let mut before: Vec<Option<(Call<'_>, u64)>> = vec![None; plan.streams.len()];
        for instruction in section {
            let stream = instruction.stream();
            let needed = match instruction {
                Instruction::Compute { op, args, results, .. } => {
                    let call = Call::new(plan, op, args, results);
                    let own = known.workspace(&call);
                    let before = &mut before[stream.index()];
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
            bytes[stream] = bytes[stream].max(needed);
        }
    }
    for (stream, bytes) in bytes {
        plan.streams[stream].workspace = bytes.next_multiple_of(ALIGN);
    }
}

/// What the workspaces of an op depend on.
type Key<'a> = (&'a Op, SmallVec<[Shape; 8]>);

/// Workspaces of calls seen before: layers are alike.
#[derive(Default)]
struct Known<'a> {
    workspaces: FxHashMap<Key<'a>, u64>,
}

impl<'a> Known<'a> {
    fn workspace(&mut self, call: &Call<'a>) -> u64 {
        let operands = call.args.iter().chain(&call.results);
        let shapes = operands.map(|it| it.shape.iter().map(|&it| it as u64).collect());
        let key = (call.op, shapes.collect());
        *self
            .workspaces
            .entry(key)
            .or_insert_with(|| lower(&[call.as_op_call()]).map_or(0, |program| program.workspace))
    }
}

#[cfg(test)]
mod tests {
    use kernels::cuda::GEMM_WORKSPACE;

    use super::*;

    /// The workspaces of the streams of a step.
    fn workspaces(step: &str) -> Vec<u64> {
        let text = format!(
            "plan @test phase=scheduled mesh=(dp=3) {{
  comm c0 = (dp)
  stream s0 = compute
  stream s1 = comm
  buffer %x : f32[96, 9000] @ [dp, _] input
  buffer %w : f32[9000, 5] @ [_, _] param
  buffer %y : f32[96, 5] @ [dp, _] temp
  buffer %a : f32[] @ [] sum(dp) temp
  buffer %b : f32[] @ [] sum(dp) temp
  buffer %odd : bf16[7] @ [dp] param
  buffer %odd.full : bf16[7] @ [_] temp
  step:
{step}}}
"
        );
        let mut plan = ir::text::parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
        assert_eq!(ir::verify::plan::verify(&plan), []);
        add_workspaces(&mut plan);
        plan.streams.values().map(|it| it.workspace).collect()
    }

    #[test]
    fn a_stream_has_what_its_largest_instruction_needs() {
        let step = "  s0: %y = matmul %x, %w\n  s0: %a = sum_squares %x\n";
        assert_eq!(workspaces(step), [GEMM_WORKSPACE, 0]);
        // 32 x 9000 elements in chunks of 32768 are 9 parts of 8 bytes.
        assert_eq!(workspaces("  s0: %a = sum_squares %x\n"), [256, 0]);
    }

    #[test]
    fn calls_of_a_batch_need_scratch_together() {
        let step = "  s0: %a = sum_squares %x\n  s0: %b = sum_squares %x\n";
        assert_eq!(workspaces(step), [512, 0]);
    }

    #[test]
    fn an_uneven_gather_goes_through_scratch() {
        // Three buffers of three elements, where ranks hold three, three and one.
        let step = "  s1: %odd.full = all_gather %odd on c0\n";
        assert_eq!(workspaces(step), [0, 256]);
    }
}
