//! How much scratch each stream needs on a GPU, which a plan must know before it runs.
//!
//! A stream has one region, which its instructions have one after the other. Sizes are those of the
//! rank that holds most.

use ir::plan::{ALIGN, Plan, PlanSection};
use kernels::cuda::scratch;

/// Sets the workspace of every stream. An op that no kernel runs needs none.
pub fn add_workspaces(plan: &mut Plan) {
    let found = scratch(plan);
    for section in PlanSection::ALL {
        for (instruction, &needed) in
            plan.sections[section as usize].iter().zip(&found.needed[section as usize])
        {
            let stream = &mut plan.streams[instruction.stream()];
            stream.workspace = stream.workspace.max(needed.next_multiple_of(ALIGN));
        }
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
