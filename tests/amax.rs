//! Amax groups: which axes a scale agrees over, whatever the mesh is called, and that codes then are those
//! of one rank.

use std::path::Path;

use codegen::Compiled;
use ir::amax::{Reason, ScaledOperand, ScalingKind, scaled_gemms};
use ir::graph::WeightMeshProblem;
use ir::model::MeshSpec;
use ir::placement::AxisSet;
use ir::plan::Plan;
use ir::quant::{Format, Role, ScaleRule};
use kernels::Proved;
use runtime::{Data, Session, SessionOptions};

type Set<'a> = &'a [(&'a str, &'a str)];

fn llama() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/llama-tiny-fp8.ron");
    std::fs::read_to_string(path).unwrap()
}

#[track_caller]
fn compile(source: &str, mesh: &str, set: Set) -> Compiled {
    let model = ir::model::parse_with(source, set).unwrap();
    let graph = ir::model::elaborate(&model, &MeshSpec::parse(mesh).unwrap());
    let graph = graph.unwrap_or_else(|it| panic!("{mesh}: {it}"));
    codegen::compile(graph, &codegen::Options::default())
        .unwrap_or_else(|it| panic!("{mesh}: {it}"))
}

fn operands(plan: &Plan, role: Role) -> Vec<ScaledOperand> {
    let all = scaled_gemms(plan).into_iter().flat_map(|it| it.operands);
    all.filter(|it| it.role == role).collect()
}

/// Weights agree over the axes that shard them and over no others, activations over those that gather them.
#[track_caller]
fn check_groups(mesh: &str, set: Set, sharding: &str, tp: &str) {
    let compiled = compile(&llama(), mesh, set);
    let plan = &compiled.plan;
    assert_eq!(compiled.weight_mesh_lints, [], "{mesh}: nothing was declared");
    let weights = operands(plan, Role::Weight);
    // 4 layers, 7 projections, read by fprop and dgrad.
    assert_eq!(weights.len(), 4 * 7 * 2, "{mesh}");
    for it in weights {
        let axes = plan.mesh.names(it.group);
        assert_eq!((axes.as_str(), it.varies), (sharding, AxisSet::EMPTY), "{mesh}: {}", it.tensor);
        assert_eq!(it.reason, Reason::Sharded);
    }
    for it in operands(plan, Role::Input).iter().chain(&operands(plan, Role::Grad)) {
        // What a column-parallel projection reads, and what comes back to a row-parallel one.
        let gathered = it.tensor.contains("layernorm") || it.tensor.contains("residual");
        let expect = if gathered { tp } else { "" };
        assert_eq!(plan.mesh.names(it.group), expect, "{mesh}: {}", it.tensor);
        assert_eq!(it.group.union(it.varies), plan.mesh.all(), "{mesh}: {}", it.tensor);
    }
}

#[test]
fn replica_axes_stay_out_of_amax_groups_of_weights() {
    check_groups("dp_replicate=2,dp_shard=2,tp=2", &[], "dp_shard, tp", "tp");
    check_groups("dp_shard=2,tp=2,dp_replicate=2", &[], "dp_shard, tp", "tp");
    check_groups("tp=2,dp_replicate=2,dp_shard=2", &[], "tp, dp_shard", "tp");
    let named = [
        ("meshes", r#"{3: ["a", "b", "c"]}"#),
        ("data_parallel", r#"["a", "b"]"#),
        ("fsdp", r#"(axes: ["b"])"#),
        ("tp_mesh", r#""c""#),
    ];
    check_groups("2x2x2", &named, "b, c", "c");
    check_groups("c=2,b=2,a=2", &named, "c, b", "c");
}

/// Codes and inverse scales of all weights, as bits, after `prepare`.
fn codes(plan: &Proved) -> Vec<(String, Vec<u32>)> {
    let session = Session::new(plan, &SessionOptions::default()).unwrap();
    session.prepare().unwrap();
    let is_code = |name: &str| name.ends_with(".compute") || name.ends_with(".scale_inv");
    let names = plan.buffers.values().map(|it| (&it.name, it.role, it.ty.dtype));
    let mut res: Vec<_> = names
        .filter(|it| it.1 == ir::plan::Role::State && is_code(it.0) && it.2 != ir::DType::Bf16)
        .map(|it| {
            let bits = session.read(it.0).unwrap().data.iter().map(|it| it.to_bits()).collect();
            (it.0.clone(), bits)
        })
        .collect();
    res.sort();
    res
}

/// Each shard was quantized on ranks of its own, so codes that are those of one rank say that the scale was the
/// same on every shard.
#[test]
fn codes_of_weights_are_those_of_one_rank() {
    for recipe in [
        "Float8CurrentScaling()",
        "Float8CurrentScaling(use_power_2_scales: true)",
        "DelayedScaling()",
    ] {
        let codes = |mesh: &str| codes(&compile(&llama(), mesh, &[("recipe", recipe)]).plan);
        let expect = codes("1");
        assert_eq!(expect.len(), 4 * 7 * 2, "{recipe}: codes and a scale of each weight");
        assert!(
            expect.iter().all(|it| it.1.iter().any(|&it| it != 0)),
            "{recipe}: they are not zero"
        );
        for mesh in ["2", "4", "2x2", "2x4", "2x2x2"] {
            assert!(
                codes(mesh) == expect,
                "{recipe} on {mesh}: codes or scales are not those of one rank"
            );
        }
    }
}

#[test]
fn a_weight_mesh_without_tp_gives_each_tp_shard_its_own_scale() {
    let mesh = "dp_replicate=2,dp_shard=2,tp=2";
    let compiled = compile(&llama(), mesh, &[("weight_mesh", r#"["dp_shard"]"#)]);
    let plan = &compiled.plan;
    let [lint] = &compiled.weight_mesh_lints[..] else {
        panic!("{:?}", compiled.weight_mesh_lints)
    };
    assert_eq!(lint.problem, WeightMeshProblem::Varies);
    let names = |axes| plan.mesh.names(axes);
    assert_eq!(names(lint.axes), "tp");
    assert_eq!(
        (names(lint.weight_mesh), names(lint.sharded)),
        ("dp_shard".into(), "dp_shard, tp".into())
    );
    assert_eq!(lint.weights.len(), 4 * 7);
    for it in operands(plan, Role::Weight) {
        assert_eq!(
            (names(it.group), names(it.varies)),
            ("dp_shard".into(), "tp".into()),
            "{}",
            it.tensor
        );
    }

    let session = Session::new(plan, &SessionOptions::default()).unwrap();
    session.prepare().unwrap();
    let read = |name: &str| session.read(name).unwrap();
    // Rows of one are cut over tp, columns of the other.
    for (name, by_rows) in [("mlp.up_proj", true), ("mlp.down_proj", false)] {
        let name = format!("model.layers.0.{name}.weight");
        let weight = read(&name);
        let columns = weight.shape[1];
        let half = |i: usize| match by_rows {
            true => usize::from(i / columns >= weight.shape[0] / 2),
            false => usize::from(i % columns >= columns / 2),
        };
        let mut amaxes = [0.0_f32; 2];
        for (i, it) in weight.data.iter().enumerate() {
            amaxes[half(i)] = amaxes[half(i)].max(it.abs());
        }
        assert_ne!(amaxes[0], amaxes[1], "{name}: else this test shows nothing");
        let scales = amaxes.map(|it| ScaleRule::tensor(Format::E4M3).scale(it));
        let inverse = read(&format!("{name}.scale_inv"));
        assert_eq!(inverse.shape[..], [2], "{name}");
        assert_eq!(inverse.data, scales.map(|it| 1.0 / it), "{name}");
        for (i, (&code, &x)) in
            read(&format!("{name}.compute")).data.iter().zip(&weight.data).enumerate()
        {
            let expect = Format::E4M3.round(x * scales[half(i)]);
            assert_eq!(code, expect, "{name}[{i}]");
        }
    }
    // It trains, and a second step reads what the first has quantized.
    let data = Data::synthetic(&plan.run, 7);
    for step in 0..2 {
        let batch = data.batch(step).unwrap();
        let report = session.step(&batch, 1e-3, step + 1).unwrap();
        assert!(report.loss.is_some_and(f32::is_finite), "{report:?}");
    }
}

/// What is said of a declared `weight_mesh`, one line for each lint.
#[track_caller]
fn check_lints(mesh: &str, set: Set, expect: &[(WeightMeshProblem, &str)]) {
    let compiled = compile(&llama(), mesh, set);
    let names = |axes| compiled.plan.mesh.names(axes);
    let found: Vec<_> =
        compiled.weight_mesh_lints.iter().map(|it| (it.problem, names(it.axes))).collect();
    let expect: Vec<_> = expect.iter().map(|it| (it.0, it.1.to_string())).collect();
    assert_eq!(found, expect, "{mesh}, {set:?}");
}

#[test]
fn declared_weight_meshes_are_compared_with_what_shards_the_weights() {
    use WeightMeshProblem::{Gathered, History, Replicas, Varies};
    let hsdp = "dp_replicate=2,dp_shard=2,tp=2";
    check_lints(hsdp, &[], &[]);
    check_lints(hsdp, &[("weight_mesh", r#"["dp_shard", "tp"]"#)], &[]);
    let all = [("weight_mesh", r#"["dp_replicate", "dp_shard", "tp"]"#)];
    check_lints(hsdp, &all, &[(Replicas, "dp_replicate")]);
    let tp = ("weight_mesh", r#"["tp"]"#);
    check_lints(hsdp, &[tp], &[(Gathered, "dp_shard")]);
    check_lints("2x4", &[("weight_mesh", r#"["dp"]"#)], &[(Varies, "tp")]);
    let delayed = ("recipe", "DelayedScaling()");
    check_lints("2x4", &[("weight_mesh", r#"["dp"]"#), delayed], &[(History, "tp")]);
    // One layer says so, and is alone in it.
    let one = [("layers[1].weight_mesh", r#"["dp"]"#)];
    check_lints("2x4", &one, &[(Varies, "tp")]);
    // With 2 KV heads, tp=4 is tp_kv=2 x tp_rep=2, and K is sharded over the first.
    let heads = ("layers[1].body[0].attention.kv_heads", "2");
    check_lints("2x4", &[heads, ("weight_mesh", r#"["dp", "tp"]"#)], &[]);
}

/// A projection to 17 features and back: of 17 rows, ranks 6 and 7 of 8 have none.
const ODD: &str = r#"Model(
    name: "odd",
    batch: Global(8),
    sequence: 4,
    init: Normal(std: 0.5),
    precision: (compute: bf16),
    recipe: Float8CurrentScaling(),
    layers: [
        Embedding(name: "embed", vocab: 16, dim: 32),
        Linear(name: "up", out_features: 17, bias: false),
        Linear(name: "down", out_features: 32, bias: false),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

#[test]
fn a_rank_with_an_empty_shard_takes_part() {
    let expect = codes(&compile(ODD, "1", &[]).plan);
    for mesh in ["8", "2x4", "4x2"] {
        let plan = compile(ODD, mesh, &[]).plan;
        let up = &plan.buffers[plan.buffer("up.weight").unwrap()];
        let rows =
            |rank: u64| up.sharding.extents(&up.ty.shape, &plan.mesh, &plan.mesh.coord_of(rank))[0];
        if mesh == "8" {
            assert_eq!((0..8).map(rows).collect::<Vec<_>>(), [3, 3, 3, 3, 3, 2, 0, 0]);
        }
        assert!(codes(&plan) == expect, "{mesh}: codes or scales are not those of one rank");
        let session = Session::new(&plan, &SessionOptions::default()).unwrap();
        session.prepare().unwrap();
        let batch = Data::synthetic(&plan.run, 7).batch(0).unwrap();
        let report = session.step(&batch, 1e-3, 1).unwrap();
        assert!(report.loss.is_some_and(f32::is_finite), "{mesh}: {report:?}");
    }
}

#[test]
fn a_history_is_one_over_all_axes_on_which_its_tensor_varies() {
    let compiled = compile(&llama(), "2x4", &[("recipe", "DelayedScaling()")]);
    for gemm in scaled_gemms(&compiled.plan) {
        for it in gemm.operands {
            assert_eq!(
                (it.scaling, it.reason),
                (ScalingKind::Delayed, Reason::History),
                "{}",
                it.tensor
            );
            assert_eq!(compiled.plan.mesh.names(it.group), "dp, tp", "{}", it.tensor);
            assert_eq!(it.varies, AxisSet::EMPTY, "{}", it.tensor);
        }
    }
}

/// NVFP4 has a scale of the tensor above those of blocks, blocks of 128 and MXFP8 have none.
#[test]
fn recipes_of_blocks_say_what_amaxes_they_have() {
    for (recipe, scaling) in [
        ("Float8BlockScaling()", ScalingKind::Block),
        ("MXFP8BlockScaling()", ScalingKind::Block),
        ("NVFP4BlockScaling()", ScalingKind::NvFp4),
    ] {
        let plan = compile(&llama(), "2x2x2", &[("recipe", recipe)]).plan;
        // Projections that tp cuts within a block of 128 stay in bf16.
        let gemms = scaled_gemms(&plan);
        assert!(!gemms.is_empty(), "{recipe}");
        for it in gemms.iter().flat_map(|it| &it.operands) {
            assert_eq!(it.scaling, scaling, "{recipe}: {}", it.tensor);
            if scaling == ScalingKind::Block {
                assert!(matches!(it.reason, Reason::Blocks { .. }), "{recipe}");
                assert_eq!(it.group, AxisSet::EMPTY, "{recipe}");
            }
        }
        for it in operands(&plan, Role::Weight) {
            assert!(it.tensor.ends_with("_proj.weight"), "{recipe}: {}", it.tensor);
            let axes = if scaling == ScalingKind::Block { "" } else { "dp_shard, tp" };
            assert_eq!(plan.mesh.names(it.group), axes, "{recipe}: {}", it.tensor);
        }
    }
}
