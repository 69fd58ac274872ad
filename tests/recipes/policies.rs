//! Activation checkpointing names ops of the model; recipes and fusion put others in their place.

use ir::Node;
use ir::ops::OpKind;
use ir::summary::Summary;

use super::*;

const RECIPES: [&str; 6] = [
    "Bf16",
    "DelayedScaling(amax_history_len: 4)",
    "Float8CurrentScaling()",
    "Float8BlockScaling()",
    "MXFP8BlockScaling()",
    "NVFP4BlockScaling()",
];

/// Recipes that multiply FP8 data; the others multiply what it stands for.
const FP8: [&str; 3] = [RECIPES[1], RECIPES[2], RECIPES[3]];

/// The values that the backward pass recomputes, each with its op; gathers of weights are left out.
fn again(mesh: &str, recipe: &str, checkpoint: &str) -> Vec<(String, OpKind)> {
    let set = [("recipe", recipe), ("checkpoint", checkpoint)];
    let model = ir::model::parse_with(MODEL, &set).unwrap();
    let graph = ir::model::elaborate(&model, &ir::model::MeshSpec::parse(mesh).unwrap()).unwrap();
    let options =
        codegen::Options { dump_after: vec!["dce".into()], ..codegen::Options::default() };
    let compiled = codegen::compile(graph, &options).unwrap();
    let graph = ir::text::parse_graph(&compiled.dumps[0].text).unwrap();
    let makes = |node: &Node| {
        let data = &graph.nodes[*node];
        let mut names = data.results.iter().map(|&it| graph.values[it].name.as_str());
        let again = names.find_map(|it| it.strip_suffix(".again"))?;
        (!again.contains(".weight")).then(|| (again.to_string(), data.op.kind()))
    };
    graph.order.iter().filter_map(makes).collect()
}

#[track_caller]
fn check_again(mesh: &str, recipe: &str, checkpoint: &str, some: &[OpKind], none: &[OpKind]) {
    let found = again(mesh, recipe, checkpoint);
    let has = |kind: &OpKind| found.iter().any(|it| it.1 == *kind);
    let what = format!("mesh {mesh}, {recipe}, {checkpoint} computes again {found:?}");
    some.iter().for_each(|it| assert!(has(it), "{what}, and no {}", it.name()));
    none.iter().for_each(|it| assert!(!has(it), "{what}: {}", it.name()));
}

/// GEMMs of a step, and what they and attention count.
fn gemms(plan: &ir::plan::Plan) -> (usize, u64) {
    let timeline = plan.timeline(&ir::plan::PlanSection::ALL);
    let gemm = |it: &Instruction| match it {
        Instruction::Compute { op, .. } => matches!(op, Op::Matmul(_) | Op::QuantMatmul(_)),
        _ => false,
    };
    (timeline.filter(|it| gemm(it.1)).count(), Summary::of(plan).flops)
}

/// `Full` computes 6 of the 7 GEMMs of a layer again, as nothing reads what `down_proj` gives. With what `matmul` and
/// `attention` name kept, none.
#[test]
fn selective_matmul_keeps_the_results_of_gemms_under_every_recipe() {
    let layers = 4;
    for recipe in RECIPES {
        for mesh in ["1", "2x2"] {
            let plan = |checkpoint: &str| {
                let set = [
                    ("recipe", recipe),
                    ("checkpoint", checkpoint),
                    ("layers[1].n", "4"),
                    ("batch", "Global(16)"),
                ];
                compile(mesh, &set).plan
            };
            let what = format!("{recipe} on mesh {mesh}");
            let (none, full) = (plan("None"), plan("Full"));
            let both = plan(r#"Selective(["matmul", "attention"])"#);
            let matmul = plan(r#"Selective(["matmul"])"#);
            assert_eq!(gemms(&both), gemms(&none), "{what}");
            assert_eq!(gemms(&matmul).0, gemms(&none).0, "{what}");
            assert_eq!(gemms(&full).0, gemms(&none).0 + 6 * layers, "{what}");
            assert!(gemms(&full).1 > gemms(&matmul).1, "{what}");
            let bytes = [&full, &matmul, &both, &none].map(|it| it.step_bytes);
            assert!(bytes.is_sorted() && bytes[0] < bytes[1], "{what}: {bytes:?}");
            assert!(bytes[1] < bytes[3], "{what}: {bytes:?}");
        }
    }
}

/// The FP8 data of a norm is kept in place of the norm, and so is what is gathered of it; that of attention is made
/// again, as its gradient reads attention's own result. No scale is made twice.
#[test]
fn names_cover_fp8_data_of_results() {
    use OpKind::*;
    let scales = [Amax, QuantScale, DelayedScale, DelayedUpdate];
    for recipe in FP8 {
        for mesh in ["1", "2x2"] {
            let quantizes = if recipe == RECIPES[3] { QuantizeBlock } else { Quantize };
            let check = |checkpoint: &str, some: &[OpKind], none: &[OpKind]| {
                check_again(mesh, recipe, checkpoint, some, &[none, &scales].concat());
            };
            check(r#"Selective(["matmul"])"#, &[RmsNorm, Glu, Attention], &[QuantMatmul]);
            check(r#"Selective(["rms_norm"])"#, &[Glu, QuantMatmul], &[RmsNorm]);
            check(r#"Selective(["attention"])"#, &[quantizes], &[Attention]);
            check(r#"Recompute(["glu"])"#, &[Glu, quantizes], &[RmsNorm, QuantMatmul]);
            check(r#"Recompute(["rms_norm"])"#, &[RmsNorm], &[Glu, QuantMatmul]);
            check(r#"Recompute(["matmul"])"#, &[QuantMatmul], &[RmsNorm, Glu]);
        }
        let names = |checkpoint: &str| {
            let again = again("2x2", recipe, checkpoint);
            let gathers = again.into_iter().filter(|it| it.1 == Collective).map(|it| it.0);
            gathers.collect::<Vec<String>>()
        };
        assert!(names(r#"Selective(["all_gather", "reduce_scatter"])"#).is_empty(), "{recipe}");
        assert!(!names(r#"Selective(["attention"])"#).is_empty(), "{recipe}");
    }
}

/// A bias is part of the GEMM that adds it, and codes of an activation are part of that.
#[test]
fn names_cover_what_fusion_adds() {
    use OpKind::*;
    let biased =
        [("layers[1].body[0].bias", "true"), ("layers[1].body[0].mlp.activation", "gelu_tanh")];
    for recipe in RECIPES {
        let count = |checkpoint: &str, counts: fn(&Op) -> bool| {
            let set = [&biased[..], &[("recipe", recipe), ("checkpoint", checkpoint)]].concat();
            let plan = compile("1", &set).plan;
            let timeline = plan.timeline(&ir::plan::PlanSection::ALL);
            let fits = |it: &Instruction| match it {
                Instruction::Compute { op, .. } => counts(op),
                _ => false,
            };
            timeline.filter(|it| fits(it.1)).count()
        };
        let matmul = r#"Selective(["matmul"])"#;
        let adds = count(matmul, |it| it.kind() == BiasAdd);
        assert_eq!(adds, 0, "{recipe}: GEMMs add their biases, and no bias is added again");
        let gemms = |checkpoint| count(checkpoint, |it| matches!(it.kind(), Matmul | QuantMatmul));
        assert_eq!(gemms(matmul), gemms("None"), "{recipe}");
    }
}

/// Recomputed values equal the first ones, FP8 data included. Scales of a history differ in the second step.
#[test]
fn policies_change_no_bit_under_any_recipe() {
    for recipe in FP8 {
        let run = |checkpoint| {
            let session = start_with("2x2", &[("recipe", recipe), ("checkpoint", checkpoint)]);
            let data = Data::synthetic(&session.plan().run, 7);
            [0, 1].map(|step| {
                let report = session.step(&data.batch(step).unwrap(), 1e-3, step + 1).unwrap();
                report.loss.unwrap().to_bits()
            })
        };
        let expect = run("None");
        for checkpoint in
            [r#"Selective(["matmul"])"#, r#"Selective(["rms_norm"])"#, r#"Recompute(["glu"])"#]
        {
            assert_eq!(run(checkpoint), expect, "{recipe}, {checkpoint}");
        }
    }
}
