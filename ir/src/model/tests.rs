//! Whole models: names, placements, and the text of every error.

mod names;

use std::path::Path;

use super::attributes::attributes;
use super::*;
use crate::graph::{Checkpoint, ScopeData};
use crate::ops::{OpKind, Origin};
use crate::placement::{AxisSet, Sharding};
use crate::quant::{AmaxAlgo, Format, QuantSpec, Role, Scaling};
use crate::{DType, Graph, Phase, Section};

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|it| panic!("{}: {it}", path.display()))
}

#[track_caller]
fn graph_of(source: &str, mesh: &str, overrides: &[(&str, &str)]) -> Graph {
    let model = parse_with(source, overrides).unwrap_or_else(|it| panic!("{it} at {}", it.at));
    let mesh = MeshSpec::parse(mesh).expect("a mesh");
    elaborate(&model, &mesh).unwrap_or_else(|it| panic!("{it} at {}", it.at))
}

fn tiny(mesh: &str, overrides: &[(&str, &str)]) -> Graph {
    graph_of(&example("llama-tiny.ron"), mesh, overrides)
}

#[track_caller]
fn sharding(graph: &Graph, value: &str) -> String {
    let found = graph.values.values().find(|it| it.name == value);
    let found = found.unwrap_or_else(|| panic!("there is no `{value}`"));
    let sharding: &Sharding = found.sharding.as_ref().expect("a sharding");
    sharding.display(&graph.mesh).to_string()
}

#[track_caller]
fn check(graph: &Graph, expect: &[(&str, &str)]) {
    for (value, expect) in expect {
        assert_eq!(&sharding(graph, value), expect, "{value}");
    }
}

#[test]
fn every_example_elaborates_on_every_mesh() {
    let meshes = ["1", "2", "8", "2x4", "4x2", "2x2x2", "1x8", "8x1", "2x1x4", "dp=2,tp=2"];
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let mut n = 0;
    for entry in std::fs::read_dir(dir).expect("the examples") {
        let name = entry.expect("an example").file_name().into_string().expect("a name");
        let source = example(&name);
        for mesh in meshes {
            // 12 heads do not divide over 8, nor do 4.
            if mesh == "1x8" && matches!(name.as_str(), "gpt2-small.ron" | "llama-tiny.ron") {
                continue;
            }
            let batch = [("batch", "PerReplica(2)"), ("micro_batches", "2")];
            let graph = graph_of(&source, mesh, &batch);
            assert_eq!(graph.phase, Phase::Logical);
            for value in graph.values.values() {
                if let Some(sharding) = &value.sharding {
                    sharding.validate(&value.ty.shape, &graph.mesh).expect("a valid sharding");
                    for axis in sharding.sharded_axes().iter() {
                        assert!(graph.mesh.size(axis) > 1, "`{}` on {mesh} of {name}", value.name);
                    }
                }
            }
            let sections: Vec<Section> =
                graph.order.iter().map(|&it| graph.nodes[it].section).collect();
            assert!(sections.is_sorted());
            n += 1;
        }
    }
    assert!(n > 50);
}

#[test]
fn parameters_are_those_of_hugging_face() {
    let graph = tiny("2x4", &[]);
    let mut found: Vec<(String, Vec<u64>)> = graph
        .params
        .iter()
        .map(|it| &graph.values[it.value])
        .map(|it| (it.name.clone(), it.ty.shape.to_vec()))
        .collect();
    found.sort();
    let mut expect = vec![
        ("lm_head.weight".to_string(), vec![256, 64]),
        ("model.embed_tokens.weight".to_string(), vec![256, 64]),
        ("model.norm.weight".to_string(), vec![64]),
    ];
    for i in 0..2 {
        let layer = [
            ("input_layernorm", vec![64]),
            ("mlp.down_proj", vec![64, 160]),
            ("mlp.gate_proj", vec![160, 64]),
            ("mlp.up_proj", vec![160, 64]),
            ("post_attention_layernorm", vec![64]),
            ("self_attn.k_proj", vec![32, 64]),
            ("self_attn.o_proj", vec![64, 64]),
            ("self_attn.q_proj", vec![64, 64]),
            ("self_attn.v_proj", vec![32, 64]),
        ];
        expect
            .extend(layer.map(|(name, shape)| (format!("model.layers.{i}.{name}.weight"), shape)));
    }
    expect.sort();
    assert_eq!(found, expect);
    assert!(graph.params.iter().all(|it| it.decay == (graph.ty(it.value).ndim() == 2)));
}

#[test]
fn fsdp_shards_are_minor_and_kv_heads_are_replicated() {
    let graph = tiny("2x4", &[]);
    check(
        &graph,
        &[
            ("tokens", "[dp, _]"),
            ("model.embed_tokens.weight", "[tp_kv.tp_rep.dp, _]"),
            ("model.embed_tokens", "[dp, tp_kv.tp_rep, _]"),
            ("model.layers.0.input_layernorm.weight", "[dp]"),
            ("model.layers.0.input_layernorm.weight.full", "[_]"),
            ("model.layers.0.self_attn.q_proj.weight.full", "[tp_kv.tp_rep, _]"),
            ("model.layers.0.self_attn.k_proj.weight", "[tp_kv.tp_rep.dp, _]"),
            ("model.layers.0.self_attn.k_proj.weight.full", "[tp_kv, _]"),
            ("model.layers.0.self_attn.o_proj.weight", "[dp, tp_kv.tp_rep]"),
            ("model.layers.0.self_attn.o_proj", "[dp, tp_kv.tp_rep, _]"),
            ("model.layers.1.mlp.down_proj.weight.full", "[_, tp_kv.tp_rep]"),
            ("model.layers.1.mlp_residual", "[dp, tp_kv.tp_rep, _]"),
            ("lm_head.weight.full", "[tp_kv.tp_rep, _]"),
        ],
    );
    let graph = tiny("4x2", &[("sequence_parallel", "false")]);
    check(
        &graph,
        &[
            ("model.layers.0.self_attn.k_proj.weight", "[tp.dp, _]"),
            ("model.layers.0.self_attn.k_proj.weight.full", "[tp, _]"),
            ("model.layers.0.self_attn.o_proj", "[dp, _, _]"),
        ],
    );
}

#[test]
fn hsdp_shards_on_its_shard_axis_only() {
    let graph = tiny("2x2x2", &[]);
    check(
        &graph,
        &[
            ("labels", "[dp_replicate.dp_shard, _]"),
            ("model.layers.0.self_attn.q_proj.weight", "[tp.dp_shard, _]"),
            ("model.norm.weight", "[dp_shard]"),
            ("model.layers.0.mlp_residual", "[dp_replicate.dp_shard, tp, _]"),
        ],
    );
    assert_eq!(graph.weight_mesh, None);
}

#[test]
fn multi_query_attention_replicates_its_one_head() {
    let overrides = [("layers[1].body[0].attention.kv_heads", "1")];
    let graph = tiny("2x4", &overrides);
    check(
        &graph,
        &[
            ("model.layers.0.self_attn.v_proj.weight", "[tp.dp, _]"),
            ("model.layers.0.self_attn.v_proj.weight.full", "[_, _]"),
        ],
    );
}

#[test]
fn fsdp_of_another_dim_and_none() {
    let graph = tiny("2x4", &[("fsdp.dim", "1")]);
    check(
        &graph,
        &[
            ("model.layers.0.self_attn.q_proj.weight", "[tp_kv.tp_rep, dp]"),
            ("model.layers.0.self_attn.o_proj.weight", "[_, tp_kv.tp_rep.dp]"),
            ("model.norm.weight", "[dp]"),
        ],
    );
    let graph = tiny("2x4", &[("fsdp.axes", "[]")]);
    check(&graph, &[("model.norm.weight", "[_]"), ("model.norm.weight.full", "[_]")]);
}

#[test]
fn compute_weights_are_cast_in_prepare() {
    let graph = tiny("2x4", &[("precision.compute", "bf16")]);
    let param = &graph.params[1];
    assert_eq!(graph.ty(param.value).dtype, DType::F32);
    assert_eq!(graph.ty(param.compute).dtype, DType::Bf16);
    assert_eq!(graph.ty(param.full).dtype, DType::Bf16);
    assert_eq!(graph.stores.len(), graph.params.len());
    assert_eq!(graph.section(graph.stores[0].value), Section::Prepare);
    assert_eq!(graph.ty(graph.results[0].1).dtype, DType::F32);
    check(&graph, &[("model.norm.weight.compute", "[dp]")]);
}

#[test]
fn units_and_checkpoints_follow_layers() {
    let graph = tiny("2", &[("checkpoint", "Full")]);
    let unit = |path: &str| {
        let found = graph.scopes.values().find(|it| it.path == path).expect("a scope");
        (found.unit, found.after_forward, found.checkpoint.clone())
    };
    use crate::graph::AfterForward::{Drop, Keep};
    use crate::graph::Checkpoint::{Full, None};
    assert_eq!(unit("model.embed_tokens"), (0, Keep, None));
    assert_eq!(unit("model.layers.0.self_attn.q_proj"), (1, Drop, Full));
    assert_eq!(unit("model.layers.1"), (2, Drop, Full));
    assert_eq!(unit("model.norm"), (3, Keep, None));
    assert_eq!(unit("lm_head"), (3, Keep, None));
    let graph = tiny("2", &[("fsdp.units", "Model")]);
    assert!(graph.scopes.values().all(|it| it.unit == 0));
}

/// Recipes by scope, where they are another than the enclosing scope's.
#[track_caller]
fn check_recipes(source: &str, expect: &[(&str, &str)]) {
    let graph = graph_of(source, "2x2", &[]);
    let differs = |it: &&ScopeData| it.parent.is_none_or(|up| graph.scopes[up].recipe != it.recipe);
    let found = graph.scopes.values().filter(differs);
    let found: Vec<_> = found.map(|it| (it.path.as_str(), it.recipe.name())).collect();
    assert_eq!(found, expect);
}

#[test]
fn a_recipe_is_that_of_the_innermost_module_that_has_one() {
    let fp8 = example("llama-tiny-fp8.ron");
    let with = |from: &str, to: &str| {
        assert!(fp8.contains(from), "`{from}` is not in the example");
        fp8.replacen(from, to, 1)
    };
    let model = ("", "Float8CurrentScaling");
    check_recipes(&example("llama-tiny.ron"), &[("", "Bf16")]);
    check_recipes(&fp8, &[model, ("lm_head", "Bf16")]);
    check_recipes(
        &with("LmHead(", "LmHead(recipe: MXFP8BlockScaling(), "),
        &[model, ("lm_head", "MXFP8BlockScaling")],
    );
    check_recipes(
        &with("n: 4,", "n: 4, num_layers_at_start_in_bf16: 1, num_layers_at_end_in_bf16: 2,"),
        &[
            model,
            ("model.layers.0", "Bf16"),
            ("model.layers.2", "Bf16"),
            ("model.layers.3", "Bf16"),
            ("lm_head", "Bf16"),
        ],
    );
    check_recipes(
        &with("n: 4,", "n: 1, recipe: DelayedScaling(margin: 1),"),
        &[model, ("", "DelayedScaling"), ("lm_head", "Bf16")],
    );
    // The module is more inside than the layer.
    check_recipes(
        &with("n: 4,", "n: 1, num_layers_at_end_in_bf16: 1,")
            .replace("ffn: 512", "ffn: 512, recipe: NVFP4BlockScaling()"),
        &[
            model,
            ("model.layers.0", "Bf16"),
            ("model.layers.0.mlp", "NVFP4BlockScaling"),
            ("lm_head", "Bf16"),
        ],
    );
}

#[test]
fn a_custom_recipe_is_stated_by_operand() {
    let source = r#"Custom(
        input: (format: E4M3, scaling: Delayed(history: 16)),
        weight: (format: E4M3, scaling: Block(rows: 128, columns: 128)),
    )"#;
    let graph = tiny("1", &[("recipe", source)]);
    let recipe = &graph.scopes.values().next().expect("the model").recipe;
    let (format, algo) = (Format::E4M3, AmaxAlgo::Max);
    let delayed = Scaling::Delayed { margin: 0, history: 16, algo };
    let block = Scaling::Block { rows: 128, columns: 128, pow2: true };
    assert_eq!(recipe.spec(Role::Input), Some(QuantSpec { format, scaling: delayed }));
    assert_eq!(recipe.spec(Role::Weight), Some(QuantSpec { format, scaling: block }));
    assert_eq!(recipe.spec(Role::Grad), None);
}

#[test]
fn a_scope_has_the_weight_mesh_that_is_declared() {
    let fp8 = ("recipe", "Float8CurrentScaling()");
    let graph = tiny("2x2", &[fp8, ("weight_mesh", "[\"dp\"]")]);
    assert_eq!(graph.weight_mesh.map(|it| graph.mesh.names(it)), Some("dp".to_string()));
    assert!(graph.scopes.values().all(|it| it.weight_mesh.is_none()));
    let graph = tiny("2x2", &[fp8, ("layers[1].weight_mesh", "[\"tp\"]")]);
    assert_eq!(graph.weight_mesh, None);
    let of = |path: &str| graph.scopes.values().find(|it| it.path == path).expect("a scope");
    let mesh = of("model.layers.1.mlp.up_proj").weight_mesh.expect("a weight mesh");
    assert_eq!(graph.mesh.names(mesh), "tp");
    assert_eq!(of("lm_head").weight_mesh, None);
}

#[test]
fn tied_parameters_are_one() {
    let graph = graph_of(&example("gpt2-small.ron"), "2x4", &[]);
    let found: Vec<_> = graph.params.iter().filter(|it| !it.aliases.is_empty()).collect();
    assert_eq!(found.len(), 1);
    assert_eq!(graph.values[found[0].value].name, "transformer.wte.weight");
    assert_eq!(found[0].aliases, ["lm_head.weight"]);
    let n: u64 = graph.params.iter().map(|it| graph.ty(it.value).n_elements()).sum();
    assert_eq!(n, 124_439_808);
}

#[test]
fn sizes_of_llama_3() {
    for (name, expect) in [
        ("llama3-8b.ron", 8_030_261_248u64),
        ("llama3-70b.ron", 70_553_706_496),
        ("llama3-405b.ron", 405_853_388_800),
    ] {
        let graph = graph_of(&example(name), "2x4", &[]);
        let n: u64 = graph.params.iter().map(|it| graph.ty(it.value).n_elements()).sum();
        assert_eq!(n, expect, "{name}");
    }
}

/// The error's code, text, help and the piece of source that it points at.
fn report(source: &str, mesh: &str) -> String {
    let model = parse(source).and_then(|it| elaborate(&it, &MeshSpec::parse(mesh)?));
    let error = model.map(drop).expect_err("an error");
    let at = error.span(source).map_or(error.at.to_string(), |it| source[it].to_string());
    let help = error.help().map_or(String::new(), |it| format!("\nhelp: {it}"));
    format!("{}: {error}\nat: {at}{help}", error.code())
}

/// What the tiny Llama reports with `from` replaced by `to`.
#[track_caller]
fn check_error(from: &str, to: &str, mesh: &str, expect: &str) {
    let source = example("llama-tiny.ron");
    assert!(source.contains(from), "`{from}` is not in the example");
    assert_eq!(report(&source.replacen(from, to, 1), mesh), expect);
}

#[test]
fn numbers_that_a_field_does_not_take() {
    for (to, expect) in [
        ("sequence: 8.0,", "a whole number for `sequence`, found `8.0`\nat: 8.0"),
        ("sequence: 32, seed: -1,", "a whole number of at least 0 for `seed`, found `-1`\nat: -1"),
        ("sequence: 32, steps: 1e3,", "a whole number for `steps`, found `1e3`\nat: 1e3"),
        (
            "sequence: 32, micro_batches: 5000000000,",
            "a smaller whole number for `micro_batches`, found `5000000000`\nat: 5000000000",
        ),
        (
            "sequence: 32, seed: 20000000000000000000,",
            "a smaller whole number for `seed`, found `20000000000000000000`\nat: 20000000000000000000",
        ),
    ] {
        check_error("sequence: 32,", to, "1", &format!("PL0103: expected {expect}"));
    }
}

#[test]
fn brackets_that_are_nested_too_deep() {
    for n in [50, 100_000] {
        let layers = "Residual(body: [".repeat(n);
        let source =
            example("llama-tiny.ron").replacen("layers: [", &format!("layers: [{layers}"), 1);
        let text = report(&source, "1");
        assert!(
            text.starts_with("PL0101: brackets are nested deeper than any model needs"),
            "{text}"
        );
    }
    // As deep as the message says.
    let linear = "Linear(name: \"x\", out_features: 64)";
    let nested = format!("{}{linear}{}", "Residual(body: [".repeat(19), "])".repeat(19));
    let source = example("llama-tiny.ron");
    let source = source.replacen("layers: [", &format!("layers: [{nested}, "), 1);
    parse(&source).expect("a model");
}

/// The advice for an axis that the model does not have works as it is written.
#[test]
fn the_advice_for_axes_of_other_systems_works() {
    let source = example("llama-tiny.ron");
    let with =
        |fields: &str| source.replacen("sequence: 32,", &format!("sequence: 32, {fields},"), 1);
    for fields in [
        "tp_mesh: \"tensor\"",
        "tp_mesh: \"model\"",
        "data_parallel: [\"data\"]",
        "fsdp: (axes: [\"fsdp\"])",
    ] {
        let text = report(&with(fields), "2x2");
        assert!(text.starts_with("PL0201"), "{text}");
        let advice = text.split_once("write all of `").expect("fields").1;
        let advice = advice.split_once('`').expect("an end").0;
        for mesh in ["2x2", "2"] {
            let graph = graph_of(&with(advice), mesh, &[]);
            let sharded = graph.params.iter().filter(|it| {
                let sharding = graph.values[it.value].sharding.as_ref();
                sharding.is_some_and(|it| it.sharded_axes() != AxisSet::EMPTY)
            });
            assert_eq!(sharded.count(), graph.params.len(), "{advice} on {mesh}");
        }
        graph_of(&with(advice), "1x2", &[]);
    }
}

/// Advice on the number of axes names a mesh of this model.
#[test]
fn the_advice_for_a_number_of_axes_works() {
    let source = example("llama-tiny.ron");
    let fields = "sequence: 32, meshes: {1: [\"x\"], 2: [\"y\", \"z\"]}, data_parallel: [\"x\", \"y\"], \
                  tp_mesh: \"z\",";
    let source = source.replacen("sequence: 32,", fields, 1);
    let text = report(&source, "2x2x2");
    assert!(text.starts_with("PL0205") && !text.contains("dp"), "{text}");
    let mesh = text.split_once("`--mesh ").expect("a mesh").1.trim_end_matches('`');
    assert_eq!(mesh, "y=2,z=2");
    graph_of(&source, mesh, &[]);
}

#[test]
fn schema_errors_point_at_the_word() {
    check_error(
        "kv_heads: 2",
        "kv_head: 2",
        "1",
        "PL0102: `MultiheadAttention` has no field `kv_head`\nat: kv_head\nhelp: did you mean `kv_heads`?",
    );
    check_error(
        "RmsNorm(name",
        "RMSNorm(name",
        "1",
        "PL0105: unknown module `RMSNorm`\nat: RMSNorm\nhelp: did you mean `RmsNorm`?",
    );
    check_error(
        "swiglu",
        "swigelu",
        "1",
        "PL0105: unknown activation `swigelu`\nat: swigelu\nhelp: did you mean `swiglu`?",
    );
    check_error(
        "ffn: 160",
        "ffn: \"160\"",
        "1",
        "PL0103: expected a whole number, found `\"160\"`\nat: \"160\"",
    );
    check_error(
        "sequence_parallel: true",
        "sequence_parallel: 1",
        "1",
        "PL0103: expected true or false, found `1`\nat: 1",
    );
    check_error("sequence: 32,", "", "1", "PL0104: `Model` needs the field `sequence`\nat: ");
    check_error(
        "sequence: 32,",
        "sequence: 32, sequence: 33,",
        "1",
        "PL0106: the field `sequence` is given twice\nat: sequence",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, meshes: {1: [\"dp\"], 2: [\"dp\", \"tp\"], 1: [\"tp\"]},",
        "1",
        "PL0106: the key `1` is given twice in one map, first at 5:28\nat: 1",
    );
    for field in [
        "parameters: {\"*\": (placements: ",
        "layers: [Block(params: {\"w\": (shape: [8], placements: ",
    ] {
        let source =
            format!("Model(\n{field}{{\"dp\": Replicate,\n\"tp\": Shard(0), \"tp\": Shard(1)}})");
        let close = if field.starts_with("layers") {
            "}, inputs: [], ops: [], outputs: [])]"
        } else {
            "}, layers: []"
        };
        let rest = "name: \"m\", batch: Global(1), sequence: 1)";
        let error =
            super::parse(&format!("{source}{close}, {rest}")).expect_err("a key is there twice");
        assert_eq!((error.code(), error.at.to_string().as_str()), ("PL0106", "3:17"), "{field}");
        assert_eq!(error.to_string(), "the key `\"tp\"` is given twice in one map, first at 3:1");
    }
}

#[test]
fn errors_about_words_and_types() {
    check_error(
        "sequence: 32,",
        "sequence: 32, fsdp: (reshard_after_forward: 1.5),",
        "1",
        "PL0103: expected true, false or a number of ranks, found the floating point number `1.5`\n\
         at: 1.5",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, checkpoint: Selective([\"attnetion\"]),",
        "1",
        "PL0105: unknown op `attnetion`\nat: Selective\nhelp: did you mean `attention`?",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, precision: (compute: i32),",
        "1",
        "PL0216: precision.compute is i32, and must be f32 or bf16\nat: i32",
    );
    check_error(
        "LmHead(name: \"lm_head\")",
        "LmHead(name: \"lm_head\", chunks: 129)",
        "1",
        "PL0216: chunks is 129, and must be from 1 to 128\nat: 129",
    );
    check_error(
        "LmHead(name: \"lm_head\")",
        "LmHead(name: \"lm_head\", chunks: 33)",
        "1",
        "PL0216: chunks is 33, and must be at most the 32 tokens of a sequence\nat: 33",
    );
}

#[test]
fn ids_are_below_what_every_table_and_the_logits_have() {
    let vocab = |head: &str| {
        let source = example("llama-tiny.ron").replace("LmHead(name: \"lm_head\"", head);
        let model = parse(&source).expect("a model");
        elaborate(&model, &MeshSpec::parse("2x2").expect("a mesh")).expect("a graph").run.vocab
    };
    assert_eq!(vocab("LmHead(name: \"lm_head\", vocab: 128"), 128);
    assert_eq!(vocab("LmHead(name: \"lm_head\", vocab: 512"), 256);
}

#[test]
fn errors_about_recipes() {
    let check = |recipe: &str, expect: &str| {
        let to = format!("sequence: 32, recipe: {recipe},");
        check_error("sequence: 32,", &to, "2x2", expect);
    };
    check(
        "MXFP8BlockScale()",
        "PL0105: unknown recipe `MXFP8BlockScale`\nat: MXFP8BlockScale\nhelp: did you mean \
         `MXFP8BlockScaling`?",
    );
    check("bf16", "PL0105: unknown recipe `bf16`\nat: bf16\nhelp: did you mean `Bf16`?");
    check(
        "DelayedScaling(amax_history: 16)",
        "PL0102: `DelayedScaling` has no field `amax_history`\nat: amax_history\nhelp: did you mean \
         `amax_history_len`?",
    );
    check(
        "Float8CurrentScaling(fp8_format: E5M2)",
        "PL0105: unknown FP8 format `E5M2`\nat: E5M2\nhelp: did you mean `E4M3`?",
    );
    check(
        "DelayedScaling(amax_history_len: 0)",
        "PL0216: recipe.amax_history_len is 0, and must be at least 1\nat: 0",
    );
    check(
        "Custom(grad: (format: E2M1, scaling: Mx()))",
        "PL0216: recipe.grad.format is E2M1, and must be E4M3 or E5M2 with this scaling\nat: E2M1",
    );
    // A transform of one operand only would not cancel, and a weight is rounded before there is a seed.
    check(
        "Custom(input: (format: E2M1, scaling: NvFp4(hadamard: true)), grad: (format: E2M1, scaling: NvFp4()))",
        "PL0216: recipe.input.scaling.hadamard is true, and must be the same for input and grad, and \
         false for weight: it cancels in wgrad only\nat: true",
    );
    check(
        "Custom(input: (format: E2M1, scaling: NvFp4(two_dimensional: true, hadamard: true)))",
        "PL0216: recipe.input.scaling.hadamard is true, and must be false with blocks of 16x16, whose \
         columns are not rounded again\nat: true",
    );
    check(
        "Custom(weight: (format: E2M1, scaling: NvFp4(stochastic: true)))",
        "PL0216: recipe.weight.scaling.stochastic is true, and must be false: a weight is rounded \
         outside of a micro-batch, which has the seed\nat: true",
    );
    check_error(
        "ffn: 160",
        "ffn: 160, recipe: DelayedScaling(margin: -2)",
        "2x2",
        "PL0216: recipe.margin is -2, and must be from 0 to 17\nat: -2",
    );
    check_error(
        "n: 2",
        "n: 2, num_layers_at_start_in_bf16: 3",
        "2x2",
        "PL0216: num_layers_at_start_in_bf16 is 3, and must be at most 2, the layers of this `Repeat`\nat: 3",
    );
    check_error(
        "n: 2",
        "n: 2, num_layers_at_start_in_bf16: 1, num_layers_at_end_in_bf16: 2",
        "2x2",
        "PL0216: num_layers_at_end_in_bf16 is 2, and must be at most 1, the layers that are not at the \
         start\nat: 2",
    );
}

#[test]
fn errors_about_axes() {
    check_error(
        "sequence: 32,",
        "sequence: 32, fsdp: (axes: [\"tp\"]),",
        "2x2",
        "PL0215: axis `tp` is both an axis of FSDP and tensor-parallel; one axis can do one of \
         them\nat: axes",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, tp_mesh: \"pt\",",
        "1",
        "PL0201: no mesh of this model has an axis `pt`\nat: \"pt\"\nhelp: did you mean `tp`?",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, fsdp: (axes: [\"dp\", \"dp_shrad\"]),",
        "1",
        "PL0201: no mesh of this model has an axis `dp_shrad`\nat: \"dp_shrad\"\n\
         help: did you mean `dp_shard`?",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, parameters: {\"lm_head.weight\": (placements: {\"ep\": Shard(0)})},",
        "2x2",
        "PL0201: no mesh of this model has an axis `ep`\nat: placements\n\
         help: planc has no expert parallelism; this model has the axes dp, tp, dp_replicate, dp_shard",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, parameters: {\"lm_head.weight\": (placements: {\"tp\": Shard(2)})},",
        "2x2",
        "PL0202: `lm_head.weight`: axis `tp` shards dim 2, but the tensor has 2 dimensions, counted \
         from 0\nat: placements",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, tp_mesh: \"dp\",",
        "2",
        "PL0215: axis `dp` is both data-parallel and tensor-parallel; one axis can do one of them\n\
         at: \"dp\"",
    );
    check_error(
        "",
        "",
        "2x2x2x2",
        "PL0205: the mesh has 4 axes, and the model names the axes of meshes of 1 (dp), 2 (dp, tp), \
         3 (dp_replicate, dp_shard, tp)\nat: --mesh\nhelp: name the axes in `meshes`, or give a mesh that \
         the model has: `--mesh dp_replicate=2,dp_shard=2,tp=2`",
    );
    check_error(
        "",
        "",
        "2x0",
        "PL0206: the mesh has an axis of size 0, number 2 of `2x0`; an axis needs at least one rank\n\
         at: --mesh\n\
         help: write `8`, `2x4` or `dp=2,tp=4`",
    );
}

#[test]
fn errors_about_sizes() {
    check_error(
        "heads: 4, kv_heads: 2",
        "heads: 12, head_dim: 16, kv_heads: 3",
        "2x2",
        "PL0204: `layers[1].body[0].attention`: kv_heads is 3, which neither divides nor is divided by \
         `tp` of size 2\nat: 3\nhelp: use a `tp` that divides 3 (each rank gets some of the KV heads) \
         or a multiple of it (each KV head is replicated)",
    );
    check_error(
        "",
        "",
        "1x8",
        "PL0203: `layers[1].body[0].attention`: the number of query heads is 4, which `tp` of size 8 \
         does not divide\nat: 4\nhelp: use a `tp` that divides the 4 heads",
    );
    check_error(
        "sequence: 32",
        "sequence: 30",
        "2x4",
        "PL0203: `model.embed_tokens`: dim 1 (sequence) is 30, which `tp` of size 4 does not divide\n\
         at: 30\nhelp: use a sequence that it divides, or `sequence_parallel: false`",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, micro_batches: 2,",
        "8",
        "PL0207: a batch of 8 sequences is not divisible by 2 micro-batches times 8 data-parallel \
         coordinates (dp = 8)\nat: Global\nhelp: use a batch that is a multiple of 16, or fewer \
         micro-batches",
    );
}

#[test]
fn errors_about_patterns_and_structure() {
    check_error(
        "sequence: 32,",
        "sequence: 32, frozen: [\"lm_haed.weight\"],",
        "1",
        "PL0209: `lm_haed.weight` in frozen matches no parameter of the model\nat: \"lm_haed.weight\"\n\
         help: the nearest parameter is `lm_head.weight`",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, frozen: [\"*\", \"model.[norm\"],",
        "1",
        "PL0209: no `]` closes the `[` at character 7 of `model.[norm`; write `[[]` for the character `[`\n\
         at: \"model.[norm\"",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, parameters: {\"*.[qk\": (init: Zeros)},",
        "1",
        "PL0209: no `]` closes the `[` at character 3 of `*.[qk`; write `[[]` for the character `[`\n\
         at: \"*.[qk\"",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, tied: [(\"lm_head.weight\", \"model.norm.weight\")],",
        "1",
        "PL0210: `lm_head.weight` of shape [256, 64] is tied to `model.norm.weight` of shape [64]\n\
         at: LmHead\nhelp: tied parameters have one shape",
    );
    check_error(
        "CrossEntropy(),",
        "",
        "1",
        "PL0212: the model has no loss; its last layer must be \
        `CrossEntropy`\nat: layers",
    );
    check_error(
        "LmHead(name: \"lm_head\")",
        "RmsNorm(name: \"model.norm\"), LmHead(name: \"lm_head\")",
        "1",
        "PL0211: two parameters are called `model.norm.weight`; give one of their modules another \
         name, or tie them\nat: \"model.norm\"",
    );
    check_error(
        "LmHead(name: \"lm_head\")",
        "DotProductAttention(heads: 4)",
        "1",
        "PL0212: `layers[3]` takes 3 tensors: queries, keys and values, and the module before it \
         gives 1\nat: DotProductAttention",
    );
}

/// Two segments of 3 rows are 6 rows, which 2 ranks divide. Each segment is still cut on its own, unevenly (C12).
#[test]
fn segments_are_cut_each_on_its_own() {
    let source = |rows: u64| {
        format!(
            r#"Model(name: "m", batch: Global(4), sequence: 4, layers: [
                Embedding(name: "embed", vocab: 8, dim: 4),
                Linear(name: "mlp", fused: {{"gate_proj": {rows}, "up_proj": {rows}}}, parallel_mode: Column),
                Activation(kind: swiglu),
                Linear(name: "down", out_features: 4, parallel_mode: Row),
                LmHead(name: "head"),
                CrossEntropy(),
            ])"#
        )
    };
    for rows in [3, 4] {
        let graph = graph_of(&source(rows), "2x2", &[]);
        check(&graph, &[("mlp.gate_proj.weight", "[tp.dp, _]"), ("mlp.up_proj.bias.full", "[tp]")]);
    }
}

#[test]
fn errors_in_blocks() {
    let source = |ops: &str| {
        format!(
            r#"Model(name: "m", batch: Global(4), sequence: 4, layers: [
                Embedding(name: "embed", vocab: 8, dim: 4),
                Block(name: "own", inputs: ["x"], params: {{"w": (shape: [4, 6])}}, ops: [{ops}], outputs: ["y"]),
                LmHead(name: "head"),
                CrossEntropy(),
            ])"#
        )
    };
    let matmul =
        |input: &str| format!(r#"(op: "matmul", inputs: ["{input}", "w"], outputs: ["y"])"#);
    graph_of(&source(&matmul("x")), "2x2", &[]);
    assert_eq!(
        report(&source(&matmul("z")), "2x2"),
        "PL0214: `own`: no value is called `z` here\nat: \"z\"\nhelp: one of labels, w, x"
    );
    let op = |op: &str| {
        report(&source(&format!(r#"(op: "{op}", inputs: ["x", "w"], outputs: ["y"])"#)), "1")
    };
    assert_eq!(
        op("matmull"),
        "PL0213: `own`: unknown op `matmull`\nat: \"matmull\"\nhelp: did you mean `matmul`?"
    );
    assert_eq!(
        op("biasadd"),
        "PL0213: `own`: unknown op `biasadd`\nat: \"biasadd\"\nhelp: did you mean `bias_add`?"
    );
    assert_eq!(
        op("matmul(transpose_c:true)"),
        "PL0213: `own`: `matmul` has no attribute `transpose_c`; did you mean `transpose_a`?\n\
         at: \"matmul(transpose_c:true)\""
    );
    assert_eq!(op("scale"), "PL0213: `own`: `scale` needs the attribute `factor`\nat: \"scale\"");
    assert_eq!(
        op("scale(factor:a)"),
        "PL0213: `own`: attributes of `scale`: expected float\nat: \"scale(factor:a)\""
    );
    assert_eq!(
        op("add"),
        "PL0208: `own.y` (add): numbers of dims: 3 and 2 differ\nat: \"add\"\n\
         help: `bias_add` adds a vector to every row"
    );
    assert_eq!(
        report(&source(r#"(op: "scale(factor:2)", inputs: ["x"], outputs: ["x"])"#), "1"),
        "PL0213: `own`: two values are called `x`; give one of them another name\nat: outputs"
    );
    assert_eq!(
        report(&source(r#"(op: "add", inputs: ["x", "w"], outputs: [])"#), "1"),
        "PL0213: `own`: an op needs a name for each of its results\nat: outputs"
    );
    assert_eq!(
        report(
            &source(r#"(op: "matmul(transpose_b:true)", inputs: ["x", "w"], outputs: ["y"])"#),
            "1"
        ),
        "PL0208: `own.y` (matmul(transpose_b:true)): contracted sizes: 4 and 6 differ\nat: \"matmul(transpose_b:true)\""
    );
}

#[test]
fn overrides_replace_values_and_name_themselves() {
    let source = example("llama-tiny.ron");
    let set = |path, value| parse_with(&source, &[(path, value)]);
    assert!(!set("sequence_parallel", "false").expect("a model").sequence_parallel);
    assert_eq!(set("micro_batches", "2").expect("a model").micro_batches, 2);
    assert_eq!(set("precision.compute", "bf16").expect("a model").precision.compute, DType::Bf16);
    let error = |path, value| set(path, value).expect_err("an error").to_string();
    assert_eq!(
        error("precision.compute", "bf17"),
        "`precision.compute=bf17` cannot be set: unknown dtype `bf17`; did you mean `bf16`?"
    );
    assert_eq!(
        error("micro_batchs", "2"),
        "`micro_batchs=2` cannot be set: `Model` has no field `micro_batchs`; did you mean \
         `micro_batches`?"
    );
    let recipe = |value| set("recipe", value).expect("a model").recipe.name();
    assert_eq!(recipe("DelayedScaling(margin: 1)"), "DelayedScaling");
    assert_eq!(recipe("Bf16"), "Bf16");
    assert_eq!(
        error("recipe", "Float8CurentScaling()"),
        "`recipe=Float8CurentScaling()` cannot be set: unknown recipe `Float8CurentScaling`; did you \
         mean `Float8CurrentScaling`?"
    );
    assert_eq!(
        error("recipe", "Float8CurrentScaling"),
        "`recipe=Float8CurrentScaling` cannot be set: expected `Float8CurrentScaling(...)`, whose brackets hold its \
         fields or nothing, found the name alone"
    );
    assert_eq!(
        error("layers[9].n", "2"),
        "`layers[9].n=2` cannot be set: `layers` has no such entry"
    );
    assert_eq!(
        error("precision", "bf16"),
        "`precision=bf16` cannot be set: expected fields in `(...)`, found `bf16`"
    );
    assert_eq!(
        error("sequence", "abc"),
        "`sequence=abc` cannot be set: expected a whole number, found `abc`"
    );
}

/// A value that does not fit comes with those that were probably meant, and with nothing if there are none.
#[test]
fn overrides_that_were_meant() {
    let source = example("llama-tiny.ron");
    #[track_caller]
    fn check(source: &str, path: &str, value: &str, expect: Option<&str>) {
        let error = parse_with(source, &[(path, value)]).expect_err("an error");
        assert_eq!(error.help().as_deref(), expect, "{error}");
    }
    let current = "did you mean `--set 'recipe=Float8CurrentScaling()'`?";
    check(&source, "recipe", "Float8CurrentScaling", Some(current));
    check(
        &source,
        "precision",
        "bf16",
        Some(
            "did you mean `--set 'precision.storage=bf16'`, `--set 'precision.compute=bf16'`, \
             `--set 'precision.reduce=bf16'` or `--set 'precision.output=bf16'`?",
        ),
    );
    check(
        &source,
        "batch",
        "16",
        Some("did you mean `--set 'batch=Global(16)'` or `--set 'batch=PerReplica(16)'`?"),
    );
    check(&source, "name", "x", Some("did you mean `--set 'name=\"x\"'`?"));
    check(&source, "sequence", "abc", None);
    check(&source, "layers[9].n", "2", None);
    check(&source, "micro_batchs", "2", None);
}

/// The same words in the file.
#[test]
fn names_that_lack_brackets() {
    let with = |from: &str, to: &str| example("llama-tiny.ron").replacen(from, to, 1);
    let source = with("sequence: 32,", "sequence: 32, recipe: Float8CurrentScaling,");
    let error = parse(&source).expect_err("an error");
    assert_eq!(&source[error.span(&source).expect("a place")], "Float8CurrentScaling");
    assert_eq!(error.code(), "PL0103");
    let source = with("batch: Global(8)", "batch: 8");
    let error = parse(&source).expect_err("an error");
    assert_eq!(error.to_string(), "expected a name, found `8`");
    let source = with("sequence: 32,", "sequence: 32, precision: bf16,");
    let error = parse(&source).expect_err("an error");
    assert_eq!(&source[error.span(&source).expect("a place")], "bf16");
    assert_eq!(error.to_string(), "expected fields in `(...)`, found `bf16`");
}

#[test]
fn options_of_one_parameter() {
    let source = example("llama-tiny.ron").replacen(
        "sequence: 32,",
        r#"sequence: 32,
        frozen: ["model.embed_tokens.*"],
        no_decay: ["lm_head.weight"],
        parameters: {
            "*.up_proj.weight": (placements: {"tp": Shard(0), "dp": Shard(1)}),
            "*.gate_proj.weight": (placements: {"tp": Shard(0), "dp": StridedShard(0, 4)}),
            "*.down_proj.weight": (fsdp_dim: 1, init: Zeros),
        },"#,
        1,
    );
    let graph = graph_of(&source, "2x4", &[]);
    check(
        &graph,
        &[
            ("model.layers.0.mlp.up_proj.weight", "[tp_kv.tp_rep, dp]"),
            ("model.layers.0.mlp.up_proj.weight.full", "[tp_kv.tp_rep, _]"),
            ("model.layers.0.mlp.gate_proj.weight", "[tp_kv.tp_rep.dp, _]"),
            ("model.layers.0.mlp.down_proj.weight", "[_, tp_kv.tp_rep.dp]"),
        ],
    );
    let param = |name: &str| {
        graph.params.iter().find(|it| graph.values[it.value].name == name).expect("a parameter")
    };
    assert!(!param("model.embed_tokens.weight").trainable);
    assert!(!param("lm_head.weight").decay);
    assert!(param("model.layers.0.mlp.up_proj.weight").placed);
    assert!(!param("model.layers.0.mlp.down_proj.weight").placed);
    assert_eq!(param("model.layers.1.mlp.down_proj.weight").init, crate::graph::Init::Zeros);
}

#[test]
fn two_attentions_share_a_refined_axis() {
    let source = example("llama-tiny.ron").replacen(
        "RmsNorm(name: \"model.norm\", eps: 1e-5),",
        r#"Residual(name: "extra", body: [
            MultiheadAttention(heads: 8, kv_heads: 4, bias: false, qk_norm: RmsNorm()),
        ], dropout: 0.1),
        RmsNorm(name: "model.norm", eps: 1e-5),"#,
        1,
    );
    let overrides = [("layers[1].body[0].attention.heads", "8")];
    let graph = graph_of(&source, "1x8", &overrides);
    check(
        &graph,
        &[
            ("model.layers.0.self_attn.k_proj.weight.full", "[tp_kv, _]"),
            ("extra.k_proj.weight.full", "[tp_kv.tp_kv2, _]"),
            ("extra.q_proj.weight.full", "[tp_kv.tp_kv2.tp_rep2, _]"),
            ("extra.q_norm.weight.full", "[_]"),
            ("seed", "[]"),
        ],
    );
}

/// The reference of the schema names every field of every module, and its example is a model.
#[test]
fn the_documentation_is_complete() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/model.md");
    let docs = std::fs::read_to_string(path).expect("the documentation");
    let known = |source: &str| match parse(source).map_err(|it| *it.problem) {
        Err(Problem::UnknownField { known, .. } | Problem::UnknownVariant { known, .. }) => known,
        it => panic!("{source}: {it:?}"),
    };
    let check = |words: &[String], of: &str| {
        for word in words {
            assert!(
                docs.contains(&format!("`{word}`")),
                "`{word}` of {of} is not in docs/model.md"
            );
        }
    };
    check(&known("(zz: 1)"), "Model");
    for field in ["fsdp", "precision"] {
        check(&known(&format!("({field}: (zz: 1))")), field);
    }
    check(&known("(parameters: {\"a\": (zz: 1)})"), "parameters");
    let modules = known("(layers: [Zz()])");
    check(&modules, "layers");
    for module in modules {
        check(&known(&format!("(layers: [{module}(zz: 1)])")), &module);
    }
    let recipes = known("(recipe: Zz)");
    check(&recipes, "recipe");
    for recipe in recipes.iter().filter(|it| *it != "Bf16") {
        check(&known(&format!("(recipe: {recipe}(zz: 1))")), recipe);
    }
    check(&known("(recipe: Custom(input: (format: E4M3, scaling: Zz)))"), "Custom");
    for &kind in OpKind::ALL.iter().filter(|it| it.origins().contains(&Origin::Model)) {
        let rows = docs.lines().filter(|it| it.starts_with(&format!("| `{}` |", kind.name())));
        let rows: Vec<&str> = rows.collect();
        assert!(!rows.is_empty(), "the op `{}` has no row in docs/model.md", kind.name());
        for attribute in attributes(kind) {
            let is_there = rows.iter().any(|it| it.contains(&format!("`{attribute}")));
            assert!(is_there, "`{attribute}` of `{}` is not in docs/model.md", kind.name());
        }
    }
    let example = docs.split("```ron").nth(1).and_then(|it| it.split("```").next());
    graph_of(example.expect("an example"), "2x2", &[]);
}

/// A number out of its range is an error that points at the number.
#[test]
fn numbers_out_of_range() {
    #[track_caller]
    fn model(fields: &str, expect: &str) {
        let to = format!("sequence: 32, {fields},");
        check_error("sequence: 32,", &to, "2x2", &format!("PL0216: {expect}"));
    }
    #[track_caller]
    fn module(from: &str, to: &str, expect: &str) {
        check_error(from, to, "2x2", &format!("PL0216: {expect}"));
    }
    #[track_caller]
    fn layer(layer: &str, expect: &str) {
        let to = format!("{layer}, LmHead(name: \"lm_head\")");
        check_error("LmHead(name: \"lm_head\")", &to, "2x2", &format!("PL0216: {expect}"));
    }
    let real = "and must be more than 0 and finite";
    model("clip_norm: 0", &format!("clip_norm is 0, {real}\nat: 0"));
    model("clip_norm: -1.5", &format!("clip_norm is -1.5, {real}\nat: -1.5"));
    model("clip_norm: inf", &format!("clip_norm is inf, {real}\nat: inf"));
    let rate = "and must be at least 0 and finite";
    module("lr: 1e-3", "lr: -1e-3", &format!("schedule.lr is -0.001, {rate}\nat: -1e-3"));
    module("lr: 1e-3", "lr: NaN", &format!("schedule.lr is NaN, {rate}\nat: NaN"));
    module(
        "lr: 1e-3",
        "lr: 1, decay: Linear(until: 9, min: -1)",
        &format!("schedule.decay.min is -1, {rate}\nat: -1"),
    );
    module(
        "lr: 1e-3",
        "lr: 1, warmup: 10, decay: Cosine(until: 10, min: 0)",
        "schedule.decay.until is 10, and must be more than warmup, which is 10\nat: 10",
    );
    let below = "and must be at least 0 and below 1";
    module("(0.9, 0.95)", "(0.9, 1)", &format!("optimizer.betas[1] is 1, {below}\nat: 1"));
    module("eps: 1e-8", "eps: 0", &format!("optimizer.eps is 0, {real}\nat: 0"));
    module(
        "weight_decay: 0.1",
        "weight_decay: -0.1",
        &format!("optimizer.weight_decay is -0.1, {rate}\nat: -0.1"),
    );
    module(
        "AdamW(betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1)",
        "Sgd(momentum: 1)",
        &format!("optimizer.momentum is 1, {below}\nat: 1"),
    );
    model("init: Normal(std: -1)", &format!("init.std is -1, {rate}\nat: -1"));
    model("init: Normal(mean: NaN, std: 1)", "init.mean is NaN, and must be finite\nat: NaN");
    model(
        "output_init: Uniform(low: 1, high: 1)",
        "output_init.high is 1, and must be more than low, which is 1\nat: 1",
    );
    model(
        "parameters: {\"lm_head.weight\": (init: Normal(std: inf))}",
        &format!("init.std is inf, {rate}\nat: inf"),
    );
    model("micro_batches: 0", "micro_batches is 0, and must be at least 1\nat: 0");
    model("steps: 0", "steps is 0, and must be at least 1\nat: 0");
    model("fsdp: (units: Layers(0))", "fsdp.units is 0, and must be at least 1\nat: Layers");
    model(
        "fsdp: (dim: 9)",
        "the FSDP dimension of `model.embed_tokens.weight` is 9, and must be below 2, the number of \
         its dimensions\nat: 9",
    );
    model(
        "parameters: {\"lm_head.*\": (fsdp_dim: 2)}",
        "the FSDP dimension of `lm_head.weight` is 2, and must be below 2, the number of its \
         dimensions\nat: 2",
    );
    module("Global(8)", "Global(0)", "batch is 0, and must be at least 1\nat: Global");
    module("sequence: 32", "sequence: 0", "sequence is 0, and must be at least 1\nat: 0");
    module("vocab: 256", "vocab: 0", "vocab is 0, and must be at least 1\nat: 0");
    module("dim: 64", "dim: 0", "dim is 0, and must be at least 1\nat: 0");
    module(
        "dim: 64",
        "dim: 1099511627777",
        "dim is 1099511627777, and must be at most 2^40\nat: 1099511627777",
    );
    module("ffn: 160", "ffn: 0", "ffn is 0, and must be at least 1\nat: 0");
    module("heads: 4", "heads: 0", "heads is 0, and must be at least 1\nat: 0");
    module("kv_heads: 2", "kv_heads: 0", "kv_heads is 0, and must be at least 1\nat: 0");
    module("heads: 4", "heads: 4, head_dim: 0", "head_dim is 0, and must be at least 1\nat: 0");
    module("heads: 4", "heads: 4, scale: 0", &format!("scale is 0, {real}\nat: 0"));
    module("n: 2", "n: 0", "n is 0, and must be from 1 to 10000\nat: 0");
    module("n: 2", "n: 10001", "n is 10001, and must be from 1 to 10000\nat: 10001");
    module("theta: 10000", "theta: -1", &format!("theta is -1, {real}\nat: -1"));
    module(
        "theta: 10000",
        "scaling: Llama3(factor: 0)",
        &format!("scaling.factor is 0, {real}\nat: 0"),
    );
    module("RmsNorm(eps: 1e-5)", "RmsNorm(eps: 0)", &format!("norm.eps is 0, {real}\nat: 0"));
    module(
        "eps: 1e-5),\n        Lm",
        "eps: -1),\n        Lm",
        &format!("eps is -1, {real}\nat: -1"),
    );
    module(
        "dim: 64",
        "dim: 64, padding_idx: 256",
        "padding_idx is 256, and must be at least 0 and below vocab, which is 256\nat: 256",
    );
    module(
        "bias: false",
        "bias: false, hidden_dropout: 1",
        &format!("hidden_dropout is 1, {below}\nat: 1"),
    );
    layer("Residual(body: [], dropout: -0.5)", &format!("dropout is -0.5, {below}\nat: -0.5"));
    layer("Dropout(rate: 1.5)", &format!("rate is 1.5, {below}\nat: 1.5"));
    layer("PositionEmbedding(positions: 0)", "positions is 0, and must be at least 1\nat: 0");
    layer("Linear(out_features: 0)", "out_features is 0, and must be at least 1\nat: 0");
    layer(
        "Linear(fused: {\"a\": 4, \"b\": 0})",
        "fused[\"b\"] is 0, and must be at least 1\nat: 0",
    );
    layer(
        "Block(inputs: [\"x\"], params: {\"w\": (shape: [4, 0])}, ops: [], outputs: [\"x\"])",
        "shape[1] is 0, and must be at least 1\nat: 0",
    );
    layer(
        "Block(inputs: [\"x\"], ops: [(op: \"scale(factor:inf)\", inputs: [\"x\"], outputs: [\"y\"])], \
         outputs: [\"y\"])",
        "an attribute of `scale` is inf, and must be finite\nat: \"scale(factor:inf)\"",
    );
    layer(
        "Block(inputs: [\"x\"], ops: [(op: \"merge_dims(dim:18446744073709551615)\", inputs: [\"x\"], \
         outputs: [\"y\"])], outputs: [\"y\"])",
        "a dimension of `merge_dims` is 18446744073709551615, and must be at most 2^40\n\
         at: \"merge_dims(dim:18446744073709551615)\"",
    );
    module(
        "CrossEntropy()",
        "CrossEntropy(label_smoothing: 1)",
        &format!("label_smoothing is 1, {below}\nat: 1"),
    );
}

/// Products are computed without overflow, and no tensor is too large to have addresses.
#[test]
fn products_out_of_range() {
    let many = "1099511627776";
    check_error(
        "Global(8)",
        &format!("PerReplica({many})"),
        "2x2",
        "PL0216: batch times data-parallel coordinates is 1099511627776 times 2, and must be at most \
         2^40\nat: PerReplica",
    );
    check_error(
        "Global(8),\n    sequence: 32,",
        &format!("Global({many}), sequence: {many},"),
        "2x2",
        "PL0216: the shape of `tokens` is [1099511627776, 1099511627776], and must be one of at most \
         2^46 elements\nat: Global",
    );
    check_error(
        "vocab: 256, dim: 64",
        &format!("vocab: {many}, dim: {many}"),
        "2x2",
        "PL0216: the shape of `model.embed_tokens.weight` is [1099511627776, 1099511627776], and must \
         be one of at most 2^46 elements\nat: Embedding",
    );
    check_error(
        "heads: 4",
        &format!("heads: 4, head_dim: {many}"),
        "2x2",
        "PL0216: heads times head_dim is 4 times 1099511627776, and must be at most 2^40\n\
         at: 1099511627776",
    );
    check_error(
        "Global(8),\n    sequence: 32,",
        &format!("Global(512), sequence: {many},"),
        "2x2",
        "PL0216: the shape of `tokens` is [512, 1099511627776], and must be one of at most 2^46 \
         elements\nat: Global",
    );
}

/// A name that is tied leads to one parameter, which has the options.
#[test]
fn errors_about_ties() {
    #[track_caller]
    fn check(fields: &str, expect: &str) {
        let to = format!("sequence: 32, {fields},");
        check_error("sequence: 32,", &to, "1", &format!("PL0209: {expect}"));
    }
    check(
        r#"tied: [("lm_head.weight", "lm_head.weight")]"#,
        "`lm_head.weight` in tied is tied to itself\nat: \"lm_head.weight\"",
    );
    check(
        r#"tied: [("a", "b"), ("b", "a")]"#,
        "`a` in tied leads to no parameter, but in a circle: `a` -> `b` -> `a`\nat: \"a\"",
    );
    check(
        r#"tied: [("lm_head.weight", "b"), ("b", "c"), ("c", "b")]"#,
        "`lm_head.weight` in tied leads to no parameter, but in a circle: `lm_head.weight` -> `b` -> \
         `c` -> `b`\nat: \"lm_head.weight\"",
    );
    let embedding = r#""model.embed_tokens.weight""#;
    check(
        &format!(r#"tied: [("lm_head.weight", {embedding}), ("lm_head.weight", "b")]"#),
        "`lm_head.weight` in tied is tied twice, to `model.embed_tokens.weight` and to `b`\n\
         at: \"lm_head.weight\"",
    );
    check(
        &format!(
            r#"tied: [("lm_head.weight", {embedding})], parameters: {{"lm_head.*": (init: Zeros)}}"#
        ),
        "`lm_head.*` in parameters is tied to `model.embed_tokens.weight`, which has the options of \
         both\nat: \"lm_head.*\"\nhelp: give the option to `model.embed_tokens.weight`",
    );
    check(
        &format!(r#"tied: [("lm_head.weight", {embedding})], frozen: ["lm_head.weight"]"#),
        "`lm_head.weight` in frozen is tied to `model.embed_tokens.weight`, which has the options of \
         both\nat: \"lm_head.weight\"\nhelp: give the option to `model.embed_tokens.weight`",
    );
}

/// Both names of a tie are those of parameters, and the parameter comes first.
#[test]
fn ties_of_names_that_nothing_has() {
    #[track_caller]
    fn check(alias: &str, name: &str, expect: &str) {
        let to = format!("sequence: 32, tied: [(\"{alias}\", \"{name}\")],");
        check_error("sequence: 32,", &to, "1", &format!("PL0209: {expect}"));
    }
    let embedding = "model.embed_tokens.weight";
    check(
        "lm_head.weight",
        "embed_tokens.weight",
        "`embed_tokens.weight` in tied matches no parameter of the model\n\
         at: \"embed_tokens.weight\"\nhelp: the nearest parameter is `model.embed_tokens.weight`",
    );
    check(
        "lm_haed.weight",
        embedding,
        "`lm_haed.weight` in tied matches no parameter of the model\nat: \"lm_haed.weight\"\n\
         help: the nearest parameter is `lm_head.weight`",
    );
    check(
        "embed_tokens.weight",
        "lm_head.weight",
        "`embed_tokens.weight` in tied matches no parameter of the model\n\
         at: \"embed_tokens.weight\"\nhelp: the nearest parameter is `model.embed_tokens.weight`",
    );
    check(
        embedding,
        "lm_head.weight",
        "`model.embed_tokens.weight` in tied is declared before `lm_head.weight`, and of tied names \
         the first is the parameter: write (\"lm_head.weight\", \"model.embed_tokens.weight\")\n\
         at: \"model.embed_tokens.weight\"",
    );
    check_error(
        "LmHead(name: \"lm_head\")",
        "LmHead(name: \"model.embed_tokens\")",
        "1",
        "PL0211: two parameters are called `model.embed_tokens.weight`; give one of their modules \
         another name, or tie them\nat: \"model.embed_tokens\"",
    );
    let source = example("llama-tiny.ron")
        .replacen("32,", "32, tied: [(\"lm_head.weight\", \"model.embed_tokens.weight\")],", 1)
        .replacen("\"lm_head\")", "\"lm_head\", weight: (init: Zeros))", 1);
    assert_eq!(
        report(&source, "1"),
        "PL0209: `lm_head.weight` in the options of its module is tied to \
         `model.embed_tokens.weight`, which has the options of both\nat: weight\n\
         help: give the option to `model.embed_tokens.weight`"
    );
}

#[test]
fn names_of_parts_and_ops_that_the_model_has_not() {
    check_error(
        "heads: 4,",
        "heads: 4, names: {\"q_porj\": \"wq\"},",
        "1",
        "PL0209: `model.layers.0.self_attn` has no part `q_porj`\nat: names\n\
         help: did you mean `q_proj`?",
    );
    check_error(
        "sequence: 32,",
        "sequence: 32, checkpoint: Recompute([\"glu\", \"layer_norm\"]),",
        "1",
        "PL0209: no op of these layers is `layer_norm`\nat: Recompute\n\
         help: one of add, attention, glu, matmul, rms_norm, rope",
    );
    check_error(
        "n: 2,",
        "n: 2, checkpoint: Selective([\"quantize\"]),",
        "1",
        "PL0209: no op of these layers is `quantize`\nat: Selective\n\
         help: one of add, attention, glu, matmul, rms_norm, rope",
    );
    let checkpoint = ("checkpoint", "Selective([\"quantize\", \"all_gather\", \"transpose\"])");
    tiny("1", &[checkpoint, ("recipe", "Float8CurrentScaling()")]);
    // A list that no layer has is read, too.
    check_error(
        "sequence: 32,",
        "sequence: 32, checkpoint: Selective([\"attnetion\"]), fsdp: (units: Model),",
        "1",
        "PL0105: unknown op `attnetion`\nat: Selective\nhelp: did you mean `attention`?",
    );
}

/// Ops outside layers are never computed again.
#[test]
fn checkpoints_of_ops_that_are_in_no_layer() {
    for op in ["embedding", "ce_max"] {
        let source = example("llama-tiny.ron");
        let text = format!("Selective([\"{op}\"])");
        let model = parse_with(&source, &[("checkpoint", text.as_str())]).expect("a model");
        let graph = elaborate(&model, &MeshSpec::parse("1").expect("a mesh"));
        let error = graph.map(drop).expect_err("an error");
        assert_eq!(error.code(), "PL0209");
        assert_eq!(error.to_string(), format!("no op of these layers is `{op}`"));
        let help = error.help().expect("the ops of the layers");
        assert!(!help.contains("embedding") && !help.contains("ce_"), "{help}");
    }
}

#[test]
fn fields_of_layers_in_a_model_that_has_none() {
    let model = "Model(name: \"m\", batch: Global(8), sequence: 8, FIELD, layers: [Embedding(name: \"e\", vocab: 32, \
                 dim: 16), LmHead(name: \"h\"), CrossEntropy()])";
    let layers =
        "this model has no layers, which are `TransformerLayer`s and the iterations of a `Repeat`";
    for (field, text, at) in [
        ("checkpoint", "checkpoint: Full", "Full"),
        ("fsdp.units", "fsdp: (units: Layers(1))", "Layers"),
    ] {
        assert_eq!(
            report(&model.replace("FIELD", text), "1"),
            format!("PL0217: `{field}` has no effect here: {layers}\nat: {at}")
        );
    }
}

#[test]
fn fields_that_have_no_effect() {
    check_error(
        "heads: 4,",
        "heads: 4, name: \"attn\",",
        "1",
        "PL0217: `name` has no effect here: write `names: {\"self_attn\": ..}` in the layer\n\
         at: \"attn\"",
    );
    check_error(
        "theta: 10000",
        "theta: 10000, tp_mesh: \"tp\"",
        "1",
        "PL0217: `tp_mesh` has no effect here: the rope of an attention has what the attention has\n\
         at: \"tp\"",
    );
}

#[test]
fn fields_that_change_nothing_are_refused() {
    let gemm = "nothing here is a GEMM, which is all that a recipe quantizes";
    let scales = "it is of scales of quantized weights, and no recipe quantizes a weight here";
    let fsdp_dim = "FSDP cuts the only dimension of a vector, and `placements` that name an axis of FSDP say \
                    which dimension it cuts";
    let both = "a GEMM is quantized if both its operands are, such as `input` and `weight`";
    for (from, field, name, why) in [
        ("sequence: 32,", "parameters: {\"*norm.weight\": (fsdp_dim: 0)}", "fsdp_dim", fsdp_dim),
        (
            "sequence: 32,",
            "parameters: {\"lm_head.weight\": (fsdp_dim: 1, placements: {\"dp\": Shard(0)})}",
            "fsdp_dim",
            fsdp_dim,
        ),
        ("sequence: 32,", "weight_mesh: [\"dp\"]", "weight_mesh", scales),
        ("\"lm_head\",", "weight_mesh: [\"dp\"]", "weight_mesh", scales),
        ("\"model.norm\",", "recipe: Float8CurrentScaling()", "recipe", gemm),
        ("\"model.embed_tokens\",", "recipe: DelayedScaling()", "recipe", gemm),
        ("sequence: 32,", "recipe: Custom()", "recipe", both),
        (
            "\"lm_head\",",
            "recipe: Custom(input: (format: E4M3, scaling: Current()))",
            "recipe",
            both,
        ),
        (
            "sequence: 32,",
            "data_parallel: [\"dp\", \"dp\"]",
            "data_parallel[1]",
            "`dp` is in the list twice",
        ),
        (
            "sequence: 32,",
            "fsdp: (axes: [\"dp\", \"dp\"])",
            "fsdp.axes[1]",
            "`dp` is in the list twice",
        ),
        (
            "sequence: 32,",
            "decay: [\"*norm.weight\"], no_decay: [\"*norm.weight\", \"lm_head.weight\"]",
            "decay",
            "`no_decay` matches each parameter that `*norm.weight` does, and wins",
        ),
    ] {
        let source = example("llama-tiny.ron").replacen("\"lm_head\")", "\"lm_head\",)", 1);
        let source = source.replacen("\"model.norm\")", "\"model.norm\",)", 1);
        assert!(source.contains(from), "{from}");
        let text = report(&source.replacen(from, &format!("{from} {field},"), 1), "2x2");
        let expect = format!("PL0217: `{name}` has no effect here: {why}\nat: ");
        assert!(text.starts_with(&expect), "{field}: {text}");
    }
    // What changes something of what it matches stays.
    tiny("2x2", &[("decay", "[\"*.weight\"]"), ("no_decay", "[\"lm_head.weight\"]")]);
    tiny("2x2", &[("parameters", "{\"*\": (fsdp_dim: 1)}")]);
    let bf16 = ("recipe", "Float8CurrentScaling()");
    tiny(
        "2x2",
        &[bf16, ("weight_mesh", "[\"dp\"]"), ("layers[1].num_layers_at_start_in_bf16", "1")],
    );
}

#[test]
fn a_model_trains_something() {
    let expect = "PL0219: all parameters are frozen: a step would train nothing\nat: ";
    for fields in ["frozen: [\"*\"]", "parameters: {\"*\": (trainable: false)}"] {
        let source = example("llama-tiny.ron");
        let source = source.replacen("sequence: 32,", &format!("sequence: 32, {fields},"), 1);
        let text = report(&source, "1");
        assert!(text.starts_with(expect), "{text}");
    }
    tiny("1", &[("frozen", "[\"*\"]"), ("parameters", "{\"lm_head.weight\": (trainable: true)}")]);
}

/// A module that reads a tied weight may repeat how it starts, and say nothing else.
#[test]
fn inits_of_tied_weights_have_no_effect() {
    let source = example("llama-tiny.ron").replacen(
        "32,",
        "32, tied: [(\"lm_head.weight\", \"model.embed_tokens.weight\")],",
        1,
    );
    let with =
        |init: &str| source.replacen("\"lm_head\")", &format!("\"lm_head\", init: {init})"), 1);
    assert_eq!(
        report(&with("Normal(std: 0.5)"), "1"),
        "PL0217: `init` has no effect here: `lm_head.weight` is tied to `model.embed_tokens.weight`, and \
         starts as that does\nat: Normal"
    );
    let owner = graph_of(&source, "1", &[]).params[0].init;
    let crate::graph::Init::Normal { mean, std } = owner else { panic!("{owner:?}") };
    graph_of(&with(&format!("Normal(mean: {mean:?}, std: {std:?})")), "1", &[]);
    // One text for two layers, whose first counts.
    let set = [
        (
            "tied",
            "[(\"model.layers.1.mlp.up_proj.weight\", \"model.layers.0.mlp.up_proj.weight\")]",
        ),
        ("layers[1].body[0].mlp.init", "Normal(std: 0.5)"),
    ];
    tiny("1", &set);
}

#[test]
fn declared_names_have_no_control_characters() {
    let expect = |found: &str| {
        format!("name is {found}, and must be without control or invisible characters")
    };
    for (written, found) in [
        (r"llama\ntiny", r#""llama\ntiny""#),
        (r"llama\ttiny", r#""llama\ttiny""#),
        (r"\u{1b}[31mllama", r#""\u{1b}[31mllama""#),
        (r"llama\u{202e}", r#""llama\u{202e}""#),
    ] {
        let source = example("llama-tiny.ron");
        let text = report(&source.replacen("llama-tiny", written, 1), "1");
        assert!(text.starts_with(&format!("PL0216: {}", expect(found))), "{text}");
        let text = report(&source.replacen("model.norm", written, 1), "1");
        assert!(text.starts_with(&format!("PL0216: {}", expect(found))), "{text}");
    }
}

/// An axis that cuts nothing is an error, unless the model says that its ranks do the same work.
#[test]
fn axes_without_a_job() {
    let with = |fields: &str| {
        example("llama-tiny.ron").replacen("sequence: 32,", &format!("sequence: 32, {fields}"), 1)
    };
    let what =
        "cuts no data, weight or activation: its ranks would all do the same work\nat: --mesh";
    let meshes = "meshes: {2: [\"fsdp\", \"tensor\"]},";
    assert_eq!(
        report(&with(meshes), "2x1"),
        format!(
            "PL0218: axis `fsdp` of size 2 {what}\nhelp: call the axis `dp` (or `dp_replicate` and \
             `dp_shard`), or write `data_parallel: [\"fsdp\"], fsdp: (axes: [\"fsdp\"])`"
        )
    );
    assert_eq!(
        report(&with(meshes), "1x2"),
        format!(
            "PL0218: axis `tensor` of size 2 {what}\nhelp: call the axis `tp`, or write `tp_mesh: \"tensor\"`"
        )
    );
    let given = "data_parallel: [\"fsdp\"], fsdp: (axes: [\"fsdp\"]), tp_mesh: \"tensor\",";
    graph_of(&with(&format!("{meshes} {given}")), "2x2", &[]);
    let spare = "meshes: {2: [\"dp\", \"spare\"]},";
    assert_eq!(
        report(&with(&format!("{spare} weight_mesh: [\"spare\"],")), "2x2"),
        format!(
            "PL0218: axis `spare` of size 2 {what}\nhelp: give it a job in `data_parallel`, `fsdp.axes`, \
             `tp_mesh` or `placements`, leave it out of the mesh, or write `replicas: [\"spare\"]`"
        )
    );
    graph_of(&with(spare), "4x1", &[]);
    graph_of(&with(&format!("{spare} replicas: [\"spare\"],")), "2x2", &[]);
    graph_of(
        &with(&format!(
            "{spare} parameters: {{\"lm_head.weight\": (placements: {{\"spare\": Shard(0)}})}},"
        )),
        "2x2",
        &[],
    );
    assert_eq!(
        report(&with(&format!("{spare} replicas: [\"spar\"],")), "2x2"),
        "PL0201: no mesh of this model has an axis `spar`\nat: \"spar\"\nhelp: did you mean `spare`?"
    );
    assert_eq!(
        report(&with(&format!("{spare} replicas: [\"dp\"],")), "2x1"),
        "PL0215: axis `dp` is both an axis of replicas and one that cuts tensors; one axis can do one \
         of them\nat: replicas"
    );
    // `dp_replicate` cuts the batch.
    assert_eq!(
        report(&with("data_parallel: [\"dp_shard\"],"), "2x2x1"),
        format!(
            "PL0218: axis `dp_replicate` of size 2 {what}\nhelp: give it a job in `data_parallel`, \
         `fsdp.axes`, `tp_mesh` or `placements`, leave it out of the mesh, or write `replicas: \
         [\"dp_replicate\"]`"
        )
    );
    assert_eq!(
        report(&with(""), "cp=2"),
        "PL0201: no mesh of this model has an axis `cp`\nat: --mesh\nhelp: planc has no context \
         parallelism; `sequence_parallel: true` cuts the sequences of activations between layers over \
         the tensor-parallel axis; this model has the axes dp, tp, dp_replicate, dp_shard"
    );
}

/// Editors on Windows write a byte order mark; errors point behind it.
#[test]
fn a_byte_order_mark_is_skipped() {
    let source = format!("\u{feff}{}", example("llama-tiny.ron"));
    assert_eq!(graph_of(&source, "2", &[("sequence", "16")]).run.sequence, 16);
    assert_eq!(
        report(&source.replace("sequence: 32", "sequence: 0"), "1"),
        "PL0216: sequence is 0, and must be at least 1\nat: 0"
    );
    assert_eq!(
        report(&source.replace("kv_heads: 2", "kv_head: 2"), "1"),
        "PL0102: `MultiheadAttention` has no field `kv_head`\nat: kv_head\nhelp: did you mean \
         `kv_heads`?"
    );
}

#[test]
fn a_parameter_is_no_part_of_a_sum() {
    // Also on a mesh where the axis has one coordinate.
    for mesh in ["2x2", "2x1"] {
        check_error(
            "sequence: 32,",
            "sequence: 32, parameters: {\"lm_head.weight\": (placements: {\"tp\": Partial(sum)})},",
            mesh,
            "PL0202: `lm_head.weight`: a parameter cannot be `Partial` over `tp`: each rank holds its values, not a \
             part of a sum\nat: Partial\nhelp: write `\"tp\": Replicate` or `\"tp\": Shard(dim)`",
        );
    }
}

/// `None` is a policy of a `Repeat`, and replaces that of the model and of a `Repeat` around it.
#[test]
fn a_repeat_without_checkpointing() {
    let full = tiny("1", &[("checkpoint", "Full")]);
    let none = tiny("1", &[("checkpoint", "Full"), ("layers[1].checkpoint", "None")]);
    let policies = |graph: &Graph| -> Vec<Checkpoint> {
        let layers = graph.scopes.values().filter(|it| it.layer.is_some());
        layers.map(|it| it.checkpoint.clone()).collect()
    };
    assert!(policies(&full).contains(&Checkpoint::Full));
    let policies = policies(&none);
    assert!(!policies.is_empty() && policies.iter().all(|it| *it == Checkpoint::None));
}
