//! FLOPs of a step as MFU and HFU count them: those that training needs are the same on every mesh and under every
//! option, and what ranks repeat is reported.

use ir::cost::{StepCost, Target, Timeline};
use ir::model::MeshSpec;
use ir::plan::Plan;
use ir::summary::Summary;
use ir::{Graph, Section};
use passes::{Autodiff, PassManager};
use tests::example;

const LORA: &str = include_str!("flops/lora.ron");

fn graph(source: &str, mesh: &str, set: &[(&str, &str)]) -> Graph {
    let model = ir::model::parse_with(source, set).unwrap();
    ir::model::elaborate(&model, &MeshSpec::parse(mesh).unwrap()).unwrap()
}

fn compile(graph: Graph) -> Plan {
    codegen::compile(graph, &codegen::Options::default()).unwrap().plan.into_plan()
}

fn model_flops(source: &str, mesh: &str, set: &[(&str, &str)]) -> u128 {
    Summary::of(&compile(graph(source, mesh, set))).model_flops
}

/// FLOPs of a program with gradients and without shardings, in which each token is once and nothing is computed
/// again.
fn of_autodiff(mut graph: Graph) -> u128 {
    PassManager::default().run(&mut graph, &[&Autodiff]).unwrap();
    let shape = |it: &ir::Value| &graph.ty(*it).shape[..];
    let of = |node: &ir::Node| {
        let data = &graph.nodes[*node];
        assert!(matches!(data.section, Section::Prepare | Section::Forward | Section::Backward));
        let inputs: Vec<&[u64]> = data.inputs.iter().map(shape).collect();
        let results: Vec<&[u64]> = data.results.iter().map(shape).collect();
        u128::from(data.op.model_flops(&inputs, &results))
    };
    graph.order.iter().map(of).sum::<u128>() * u128::from(graph.micro_batches)
}

/// The options change what is computed where, how often and in which type, and never what training needs.
#[test]
fn model_flops_depend_on_the_model_alone() {
    let options: [&[(&str, &str)]; 12] = [
        &[],
        &[("micro_batches", "2")],
        &[("micro_batches", "2"), ("reduce_gradients", "LastMicroBatch")],
        &[("checkpoint", "Full")],
        &[("checkpoint", r#"Selective(["matmul"])"#)],
        &[("checkpoint", r#"Recompute(["matmul", "attention"])"#), ("micro_batches", "2")],
        &[("recipe", "Float8CurrentScaling()")],
        &[("recipe", "DelayedScaling()"), ("checkpoint", "Full")],
        &[("recipe", "MXFP8BlockScaling()"), ("checkpoint", "Full")],
        &[("layers[3].chunks", "4"), ("checkpoint", "Full")],
        &[("layers[3].chunks", "4"), ("recipe", "Float8CurrentScaling()")],
        &[("sequence_parallel", "false"), ("precision", "(compute: bf16)")],
    ];
    let source = example("llama-tiny");
    let expected = of_autodiff(graph(&source, "1", &[]));
    for mesh in ["1", "2", "4", "1x4", "2x2", "2x2x2"] {
        for set in options {
            assert_eq!(model_flops(&source, mesh, set), expected, "{mesh} {set:?}");
        }
    }
}

#[test]
fn model_flops_of_examples_are_those_of_every_token_once() {
    for name in ["gpt2-small", "llama-tiny-block", "llama-tiny-fp8", "mlp"] {
        let source = example(name);
        let expected = of_autodiff(graph(&source, "1", &[]));
        for mesh in ["1", "2", "2x2"] {
            // A model without layers has nothing to checkpoint.
            let last = if name == "mlp" { ("micro_batches", "1") } else { ("checkpoint", "Full") };
            for set in [&[][..], &[last]] {
                assert_eq!(model_flops(&source, mesh, set), expected, "{name} {mesh} {set:?}");
            }
        }
    }
    let expected = of_autodiff(graph(LORA, "2", &[]));
    for (mesh, set) in [("2", ("checkpoint", "Full")), ("2x2", ("micro_batches", "1"))] {
        assert_eq!(model_flops(LORA, mesh, &[set]), expected, "lora {mesh} {set:?}");
    }
}

/// `6 N s + 12 l h s^2` for a sequence of `s` tokens, with `N` weights in matrix products.
#[test]
fn model_flops_of_a_llama_are_those_of_palm() {
    let (l, h, kv, ffn, vocab) = (32, 4096, 1024, 14336, 128_256);
    let layer = 2 * h * h + 2 * h * kv + 3 * h * ffn;
    for s in [4096_u128, 8192] {
        let n: u128 = l * layer + h * vocab;
        let (batch, expected) = (2, 6 * n * s + 12 * l * h * s * s);
        let set = [("sequence", &*s.to_string()), ("batch", "Global(2)")];
        assert_eq!(model_flops(&example("llama3-8b"), "2x4", &set), batch * expected, "{s}");
    }
}

/// Counted by hand: which of its three products each weight has.
#[test]
fn frozen_weights_have_no_wgrad_and_what_only_they_feed_no_dgrad() {
    let (tokens, sequence, h) = (64, 64, 64);
    let (square, adapter, mlp, head) = (h * h, 8 * h, 3 * h * 160, h * 256);
    let [once, twice, all] = [2, 4, 6].map(|it| it * tokens);
    // Nothing before the first adapter is trained, so the first layer's input has no gradient.
    let first = once * 3 * square + twice * adapter;
    let second = twice * 3 * square + all * adapter;
    // The adapter's second factor, the output projection and the MLP, of both layers.
    let rest = all * adapter + twice * (square + mlp);
    let attention = 12 * tokens * sequence * h;
    let expected = first + second + 2 * (rest + attention) + twice * head;
    assert_eq!(model_flops(LORA, "1", &[]), expected);

    // With all but the norms frozen there is no wgrad at all, and the first norm feeds all of the first layer.
    let source = example("llama-tiny");
    let all = model_flops(&source, "1", &[]);
    let frozen = [("frozen", r#"["*proj*", "lm_head*", "model.embed_tokens*"]"#)];
    let tokens = 8 * 32;
    let weights = 2 * (2 * h * h + 2 * h * 32 + mlp) + head;
    assert_eq!(all - model_flops(&source, "1", &frozen), 2 * tokens * weights);
}

fn cost(source: &str, mesh: &str, set: &[(&str, &str)]) -> StepCost {
    let (plan, h200) = (compile(graph(source, mesh, set)), Target::builtin("h200").unwrap());
    Timeline::predict(&plan, &h200).step_cost(&plan, &h200)
}

/// FP8 makes the step shorter and leaves the model as it is, so it uses more of the bf16 peak.
#[test]
fn mfu_of_fp8_is_of_both_peaks() {
    let source = example("llama3-8b");
    let current = [("sequence", "8192"), ("recipe", "Float8CurrentScaling()")];
    let bf16 = cost(&source, "2", &current[..1]);
    let fp8 = cost(&source, "2", &current);
    assert_eq!(bf16.of_fp8_peak, None);
    let ratio = bf16.seconds / fp8.seconds;
    let expected = bf16.of_bf16_peak.mfu * ratio;
    assert!((fp8.of_bf16_peak.mfu - expected).abs() < 1e-9, "{fp8:?} {expected}");
    assert!((0.88..0.91).contains(&fp8.of_bf16_peak.mfu), "{fp8:?}");
    let of_fp8 = fp8.of_fp8_peak.unwrap();
    assert!((0.44..0.46).contains(&of_fp8.mfu), "{fp8:?}");
    assert!((of_fp8.hfu * 1979.0 - fp8.of_bf16_peak.hfu * 989.0).abs() < 1e-9, "{fp8:?}");
}

#[test]
fn recomputation_is_executed_and_not_needed() {
    let source = example("llama3-8b");
    let kept = cost(&source, "2", &[]);
    let again = cost(&source, "2", &[("checkpoint", "Full")]);
    let flops =
        |it: &StepCost| [it.of_bf16_peak.mfu * it.seconds, it.of_bf16_peak.hfu * it.seconds];
    let ([kept_model, kept_all], [again_model, again_all]) = (flops(&kept), flops(&again));
    assert!((kept_model / again_model - 1.0).abs() < 1e-9, "{kept:?} {again:?}");
    assert!(again_all > 1.2 * kept_all, "{kept:?} {again:?}");
}

/// Along an axis that cuts nothing ranks do the same, and that is work of the model only once.
#[test]
fn ranks_along_an_axis_without_a_job_repeat_all_work() {
    let text = |mesh: &str| {
        format!(
            "graph @f phase=logical mesh=({mesh}) {{
               input %x : bf16[32, 1024] @ [dp, _] pinned
               param %w : bf16[4096, 1024] @ [_, _] pinned
               forward:
               %y = matmul(transpose_b:true) %x, %w : bf16[32, 4096]
               result y = %y
             }}"
        )
    };
    let summary = |mesh: &str| Summary::of(&compile(ir::text::parse_graph(&text(mesh)).unwrap()));
    let (without, with) = (summary("dp=2"), summary("dp=2, spare=8"));
    assert_eq!(without.repeated, []);
    assert_eq!(with.model_flops, without.model_flops);
    let [it] = &with.repeated[..] else { panic!("{:?}", with.repeated) };
    assert_eq!((&*it.axes, it.ranks, it.flops), ("spare", 8, with.flops));
    assert_eq!(u128::from(with.flops) * 16, with.model_flops * 8);
}

/// From 458,752 tokens on, gathering a weight is cheaper than gathering the input of one GEMM. Without the second walk,
/// every rank would compute all heads: a step would take 445 s there, and 574 s at 524,288 tokens.
#[test]
fn tensor_parallelism_holds_at_long_sequences() {
    let source = example("llama3-8b");
    let h100 = Target::builtin("h100").unwrap();
    let mut shorter = 0.0;
    for (sequence, seconds) in
        [("262144", 43.0), ("458752", 121.0), ("524288", 156.0), ("1048576", 591.0)]
    {
        let set = [("sequence", sequence), ("checkpoint", "Full")];
        let plan = compile(graph(&source, "1x4", &set));
        assert_eq!(Summary::of(&plan).repeated, [], "{sequence}");
        let cost = Timeline::predict(&plan, &h100).step_cost(&plan, &h100);
        assert!((cost.seconds / seconds - 1.0).abs() < 0.01, "{sequence}: {cost:?}");
        // Attention, which uses more of the peak as MFU counts, is a growing share.
        assert!(cost.of_bf16_peak.mfu > shorter, "{sequence}: {cost:?}");
        shorter = cost.of_bf16_peak.mfu;
    }
}
