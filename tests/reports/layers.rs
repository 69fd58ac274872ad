//! A model is planned alike however its layers are written: in one `Repeat`, in several, or one by one.

use crate::harness::*;

const LAYER: &str = "norm: RmsNorm(), attention: (heads: 4, kv_heads: 2, rope: (theta: 100)), \
                     mlp: (ffn: 12, activation: swiglu), bias: false";

/// A model of four layers, written as `layers`.
fn model(layers: &str) -> String {
    format!(
        r#"Model(name: "m", batch: Global(16), sequence: 4, sequence_parallel: true,
        init: Normal(std: 0.3), schedule: (lr: 0.1), layers: [
            Embedding(name: "embed", vocab: 13, dim: 16),
            {layers}
            RmsNorm(name: "norm"), LmHead(name: "head"), CrossEntropy(),
        ])"#
    )
}

fn repeated() -> String {
    model(&format!("Repeat(n: 4, prefix: \"layers\", body: [TransformerLayer({LAYER})]),"))
}

fn one_by_one(name: &str) -> String {
    let layer = |i: u32| format!("TransformerLayer(name: \"{name}{i}\", {LAYER}),");
    model(&(0..4).map(layer).collect::<String>())
}

/// Options under which units, recomputation, or both are something else.
const OPTIONS: [&[(&str, &str)]; 9] = [
    &[("checkpoint", "Full"), ("fsdp.units", "Model")],
    &[],
    &[("checkpoint", "Full")],
    &[("checkpoint", "Selective([\"matmul\"])")],
    &[("checkpoint", "Full"), ("fsdp.units", "Layers(2)")],
    &[("checkpoint", "Full"), ("fsdp.units", "Layers(3)")],
    &[("checkpoint", "Recompute([\"glu\"])"), ("fsdp.units", "Model")],
    &[("fsdp.reshard_after_forward", "2")],
    &[("fsdp.reshard_after_forward", "false"), ("fsdp.reshard_root", "true")],
];

/// All of these give one plan, to the letter.
#[track_caller]
fn check_alike(sources: &[String]) {
    for mesh in ["4", "2x2"] {
        for set in OPTIONS {
            let text = |it: &String| compile(it, mesh, set).to_string();
            let first = text(&sources[0]);
            for other in &sources[1..] {
                assert!(text(other) == first, "mesh {mesh}, {set:?}: another plan of\n{other}");
            }
        }
    }
}

#[test]
fn layers_in_a_repeat_in_several_and_one_by_one_give_one_plan() {
    let repeat = |n: u32, first: u32| {
        format!(
            "Repeat(n: {n}, first: {first}, prefix: \"layers\", body: [TransformerLayer({LAYER})]),"
        )
    };
    let mixed =
        format!("{}TransformerLayer(name: \"layers.1\", {LAYER}), {}", repeat(1, 0), repeat(2, 2));
    check_alike(&[
        repeated(),
        one_by_one("layers."),
        model(&[repeat(1, 0), repeat(3, 1)].concat()),
        model(&[repeat(2, 0), repeat(1, 2), repeat(1, 3)].concat()),
        model(&mixed),
    ]);
}

/// Several layers in one iteration, with something between them that has weights, and something that has no name.
#[test]
fn layers_in_one_body_are_units_of_their_own() {
    let body = |prefix: &str| {
        format!(
            "TransformerLayer(name: \"{prefix}a\", {LAYER}), RmsNorm(name: \"{prefix}norm\"), \
             Residual(name: \"{}\", body: [Activation(kind: gelu)]), TransformerLayer(name: \"{prefix}b\", {LAYER}),",
            prefix.trim_end_matches('.')
        )
    };
    let repeat = format!("Repeat(n: 2, prefix: \"layers\", body: [{}]),", body(""));
    let one_by_one = [body("layers.0."), body("layers.1.")].concat();
    check_alike(&[model(&repeat), model(&one_by_one)]);
    let graph = logical(&model(&repeat), "2", &[("checkpoint", "Full")]).unwrap();
    let unit = |path: &str| graph.scopes.values().find(|it| it.path == path).unwrap().unit;
    let layer = |path: &str| graph.scopes.values().find(|it| it.path == path).unwrap().layer;
    assert_eq!(["norm", "layers.0.norm", "layers.1.a"].map(layer), [None, Some(0), Some(2)]);
    let units =
        ["embed", "layers.0.a", "layers.0.norm", "layers.0.b", "layers.1.b", "norm", "head"];
    assert_eq!(units.map(unit), [0, 1, 1, 2, 4, 5, 5]);
}

/// Whatever is gathered together, a layer is what is recomputed: `Full` keeps one input of each.
#[test]
fn layers_are_recomputed_one_by_one_whatever_the_units() {
    for units in ["EachLayer", "Layers(2)", "Model"] {
        let set = [
            ("fsdp.units", units),
            ("fsdp.reshard_after_forward", "false"),
            ("batch", "Global(256)"),
        ];
        let bytes = |set: Set| compile(&repeated(), "4", set).step_bytes;
        let full = [&set[..], &[("checkpoint", "Full")]].concat();
        assert!(bytes(&full) < bytes(&set), "{units}: `Full` saves nothing");
    }
}

/// `cases/models/unrolled.ron` and `rep1.ron`: names that are no numbers change nothing but names.
#[test]
fn layers_one_by_one_are_gathered_and_recomputed_one_by_one() {
    let rep1 =
        |i: u32| format!("Repeat(n: 1, prefix: \"x{i}\", body: [TransformerLayer({LAYER})]),");
    let rep1 = model(&(0..4).map(rep1).collect::<String>());
    let sources = [repeated(), one_by_one("x."), one_by_one("x"), rep1];
    for mesh in ["4", "2x2"] {
        for set in OPTIONS {
            let [expect, others @ ..] = sources.each_ref().map(|it| compile(it, mesh, set));
            let summary = ir::summary::Summary::of(&expect);
            for plan in others {
                assert_eq!(ir::summary::Summary::of(&plan), summary, "mesh {mesh}, {set:?}");
            }
        }
    }
    let flops = |set| ir::summary::Summary::of(&compile(&one_by_one("x"), "4", set)).flops;
    assert!(flops(&[("checkpoint", "Full")]) > flops(&[]), "`Full` computes nothing again");
    // Initial weights follow from names, so losses are compared where names agree.
    let expect = train(&repeated(), "2x2", &[("checkpoint", "Full")], 2);
    train(&one_by_one("layers."), "2x2", &[("checkpoint", "Full")], 2).check_same(&expect);
}

/// Megatron counts layers, not iterations.
#[test]
fn layers_in_bf16_are_counted_as_layers() {
    let repeat = |n: u32, names: &[&str]| {
        let layer = |it: &&str| format!("TransformerLayer(name: \"{it}\", {LAYER}),");
        let body: String = names.iter().map(layer).collect();
        let source = model(&format!(
            "Repeat(n: {n}, prefix: \"layers\", body: [{body}], num_layers_at_start_in_bf16: 1, \
             num_layers_at_end_in_bf16: 2),"
        ));
        let graph = logical(&source, "2", &[("recipe", "Float8CurrentScaling()")]).unwrap();
        let mlps = graph.scopes.values().filter(|it| it.path.ends_with(".mlp"));
        mlps.map(|it| it.recipe.name()).collect::<Vec<_>>()
    };
    let (fp8, bf16) = ("Float8CurrentScaling", "Bf16");
    assert_eq!(repeat(4, &["a"]), [bf16, fp8, bf16, bf16]);
    assert_eq!(repeat(2, &["a", "b"]), [bf16, fp8, bf16, bf16]);
    assert_eq!(repeat(3, &["a", "b"]), [bf16, fp8, fp8, fp8, bf16, bf16]);
}

#[test]
fn two_repeats_do_not_share_numbers() {
    let repeat = |n: u32, first: u32| {
        format!(
            "Repeat(n: {n}, first: {first}, prefix: \"layers\", body: [TransformerLayer({LAYER})]),"
        )
    };
    assert_eq!(
        error(&model(&[repeat(3, 0), repeat(2, 2)].concat()), "1", &[]),
        "PL0211: `layers.2` is an iteration of this `Repeat`, which counts 2 to 3, and of layers[1], which counts \
         0 to 2; help: `first: 3` counts on where the other ends"
    );
    let graph = logical(&model(&[repeat(2, 3), repeat(1, 60)].concat()), "1", &[]).unwrap();
    let names = graph.params.iter().map(|it| &graph.values[it.value].name);
    let norms: Vec<&String> = names.filter(|it| it.ends_with("input_layernorm.weight")).collect();
    assert_eq!(
        norms,
        ["layers.3", "layers.4", "layers.60"]
            .map(|it| format!("{it}.input_layernorm.weight"))
            .each_ref()
    );
}
