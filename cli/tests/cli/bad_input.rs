//! Bad input is exit code 1, nothing on stdout, and a report whose text is a snapshot.

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::{Folder, workspace};

/// Runs `planc line` in `folder`, which must be refused.
#[track_caller]
fn check_in(folder: &Folder, name: &str, line: &str) {
    let ran = folder.planc(line);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "planc {line}: {}", ran.stderr);
    insta::assert_snapshot!(name, format!("$ planc {line}\n{}", ran.stderr));
}

/// The same with the example model, in which some text is replaced.
#[track_caller]
fn check(name: &str, replace: &[(&str, &str)], line: &str) {
    check_in(&Folder::new(name, replace), name, line);
}

const COMPILE: &str = "compile model.ron --mesh 2x4";

/// A folder with `model.plan` for a small mesh, and nothing printed.
#[track_caller]
fn compiled(test: &str) -> Folder {
    let folder = Folder::new(test, &[]);
    folder.works("compile model.ron --mesh 2x2 -q");
    folder
}

#[test]
fn unknown_field() {
    check("unknown_field", &[("kv_heads: 2", "kv_head: 2")], COMPILE);
}

#[test]
fn unknown_module() {
    check("unknown_module", &[("RmsNorm(name", "RMSNorm(name")], COMPILE);
}

/// No name of a model or plan moves the cursor of a terminal: a model's is refused, a plan's is written out.
#[test]
fn names_with_control_characters_are_written_out() {
    let folder = compiled("control_characters");
    let check = |line: &str, code: i32| {
        let ran = folder.planc(line);
        let text = ran.stdout + &ran.stderr;
        assert!(text.contains("\\u{1b}[2J"), "{line}: {text}");
        assert!(!text.contains('\x1b'), "{line}: {text}");
        assert_eq!(ran.code, code, "{line}: {text}");
    };
    let plan = [" ", ",", "\n"].iter().fold(folder.read("model.plan"), |text, end| {
        let (from, to) = ("%lm_head.weight", "%\"lm_head.weight\\u{1b}[2J\"");
        text.replace(&format!("{from}{end}"), &format!("{to}{end}"))
    });
    folder.write("odd.plan", plan);
    check("inspect odd.plan", 0);
    check("inspect odd.plan --param lm_*", 0);
    let model = folder.read("model.ron");
    let name = "\"model.embed_tokens\\u{1b}[2J\"";
    folder.write("odd.ron", model.replace("\"model.embed_tokens\"", name));
    check("inspect odd.ron --mesh 2x2", 1);
    check("compile odd.ron --mesh 2x2 --emit plan", 1);
    folder.write("raw.ron", model.replace("\"model.embed_tokens\",", "\"model\x1b[2J\" dim_"));
    check("compile raw.ron --mesh 2x2", 1);
}

#[test]
fn not_ron() {
    check("not_ron", &[("vocab: 256, dim", "vocab: 256 dim")], COMPILE);
}

#[test]
fn wrong_type() {
    check("wrong_type", &[("heads: 4", "heads: \"4\"")], COMPILE);
}

#[test]
fn misspelt_axis() {
    check(
        "misspelt_axis",
        &[("sequence_parallel: true", "sequence_parallel: true,\n    tp_mesh: \"tpp\"")],
        COMPILE,
    );
}

#[test]
fn placement_on_missing_axis() {
    let option =
        "parameters: {\"*.q_proj.weight\": (placements: {\"tq\": Shard(0)})},\n    layers: [";
    check("placement_on_missing_axis", &[("layers: [\n", option)], COMPILE);
}

#[test]
fn placement_on_missing_dim() {
    let option =
        "parameters: {\"*.q_proj.weight\": (placements: {\"tp\": Shard(2)})},\n    layers: [";
    check("placement_on_missing_dim", &[("layers: [\n", option)], COMPILE);
}

#[test]
fn pattern_without_parameter() {
    check(
        "pattern_without_parameter",
        &[("layers: [\n", "frozen: [\"*.q_prj.weight\"],\n    layers: [\n")],
        COMPILE,
    );
}

#[test]
fn indivisible_heads() {
    check("indivisible_heads", &[("heads: 4, kv_heads: 2", "heads: 6, kv_heads: 2")], COMPILE);
}

#[test]
fn indivisible_batch() {
    check("indivisible_batch", &[("Global(8)", "Global(7)")], COMPILE);
}

#[test]
fn indivisible_kv_heads() {
    let heads = ("heads: 4, kv_heads: 2", "heads: 12, kv_heads: 3");
    check("indivisible_kv_heads", &[heads, ("dim: 64", "dim: 96")], COMPILE);
}

#[test]
fn mesh_with_too_many_axes() {
    check("mesh_with_too_many_axes", &[], "compile model.ron --mesh 2x2x2x2");
}

#[test]
fn mesh_axis_of_0() {
    check("mesh_axis_of_0", &[], "compile model.ron --mesh 2x0");
}

#[test]
fn mesh_that_is_none() {
    check("mesh_that_is_none", &[], "compile model.ron --mesh 2*4");
}

#[test]
fn mesh_axis_that_is_unknown() {
    check("mesh_axis_that_is_unknown", &[], "compile model.ron --mesh dp=2,pt=4");
}

#[test]
fn no_mesh() {
    check("no_mesh", &[], "run model.ron");
}

#[test]
fn override_of_nothing() {
    check("override_of_nothing", &[], "compile model.ron --mesh 2x4 --set layers[0].dimm=64");
}

#[test]
fn missing_file() {
    check("missing_file", &[], "compile modle.ron --mesh 2x4");
}

#[test]
fn directory() {
    let folder = Folder::new("directory", &[]);
    std::fs::create_dir(folder.0.join("models")).expect("the folder is writable");
    check_in(&folder, "directory", "compile models --mesh 2x4");
}

#[test]
fn not_utf8() {
    let folder = Folder::new("not_utf8", &[]);
    folder.write("latin.ron", b"Model(name: \"Bj\xf6rn\")");
    check_in(&folder, "not_utf8", "compile latin.ron --mesh 2x4");
}

#[test]
fn unwritable_output() {
    check("unwritable_output", &[], "compile model.ron --mesh 2 -o missing/model.plan");
}

#[test]
fn unknown_pass() {
    check("unknown_pass", &[], "compile model.ron --mesh 2x4 --dump-ir-after localise");
}

#[test]
fn denied_lint() {
    check("denied_lint", &[], "compile model.ron --mesh 3x1 --deny uneven --set batch=Global(9)");
}

/// Errors of passes point at the block or module that the value at fault comes from.
#[test]
fn an_op_without_a_gradient() {
    let block = r#"        Block(
            name: "own",
            inputs: ["x"],
            params: {"own.weight": (shape: [64])},
            ops: [
                (op: "bias_add", inputs: ["x", "own.weight"], outputs: ["h"]),
                (op: "activation_grad(kind:gelu)", inputs: ["h", "h"], outputs: ["y"]),
            ],
            outputs: ["y"],
        ),
        Repeat("#;
    check("an_op_without_a_gradient", &[("        Repeat(", block)], "compile model.ron --mesh 1");
}

#[test]
fn compiling_a_plan() {
    check_in(&compiled("compiling_a_plan"), "compiling_a_plan", "compile model.plan");
}

#[test]
fn truncated_plan() {
    let folder = compiled("truncated_plan");
    let plan = folder.read("model.plan");
    let start = plan.find("  buffer").expect("a plan has buffers");
    folder.write("cut.plan", &plan[..start + 30]);
    check_in(&folder, "truncated_plan", "run cut.plan");
}

#[test]
fn plan_of_another_batch() {
    let folder = compiled("plan_of_another_batch");
    let plan = folder.read("model.plan");
    folder.write("edited.plan", plan.replacen("global_batch:8", "global_batch:16", 1));
    check_in(&folder, "plan_of_another_batch", "run edited.plan");
}

#[test]
fn plan_for_another_mesh() {
    let folder = compiled("plan_for_another_mesh");
    check_in(&folder, "plan_for_another_mesh", "run model.plan --mesh 2x4");
}

#[test]
fn override_of_a_plan() {
    let folder = compiled("override_of_a_plan");
    check_in(&folder, "override_of_a_plan", "run model.plan --set sequence=64");
}

#[test]
fn million_ranks() {
    check(
        "million_ranks",
        &[("Global(8)", "PerReplica(1)"), ("sequence_parallel: true,", "")],
        "run model.ron --mesh dp=1000000",
    );
}

#[test]
fn zero_steps() {
    check_in(&compiled("zero_steps"), "zero_steps", "run model.plan --steps 0");
}

#[test]
fn data_too_short() {
    let folder = compiled("data_too_short");
    folder.write("short.txt", "too short");
    check_in(&folder, "data_too_short", "run model.plan --data short.txt");
}

#[test]
fn missing_data() {
    check_in(&compiled("missing_data"), "missing_data", "run model.plan --data missing.bin");
}

#[test]
fn token_outside_vocabulary() {
    let folder = compiled("token_outside_vocabulary");
    let mut tokens = vec![1_u16; 4096];
    tokens[3] = 256;
    let bytes: Vec<u8> = tokens.iter().flat_map(|it| it.to_le_bytes()).collect();
    folder.write("tokens.bin", bytes);
    check_in(&folder, "token_outside_vocabulary", "run model.plan --data tokens.bin");
}

#[test]
fn more_steps_than_data() {
    let folder = compiled("more_steps_than_data");
    let tokens = std::fs::read(workspace("tests/golden/llama-f32/tokens.safetensors"));
    folder.write("tokens.safetensors", tokens.expect("golden data"));
    let line = "run model.plan --data tokens.safetensors --steps 21";
    check_in(&folder, "more_steps_than_data", line);
}

/// `w.safetensors`: the golden weights, changed.
#[track_caller]
fn check_weights(name: &str, change: impl Fn(&mut Vec<(String, Vec<usize>)>)) {
    let folder = compiled(name);
    let golden = std::fs::read(workspace("tests/golden/llama-f32/init.safetensors"));
    let golden = golden.expect("golden data");
    let golden = safetensors::SafeTensors::deserialize(&golden).expect("golden data");
    let mut tensors: Vec<(String, Vec<usize>)> =
        golden.iter().map(|(name, it)| (name.to_string(), it.shape().to_vec())).collect();
    tensors.sort();
    change(&mut tensors);
    let zeros = vec![0_u8; 1 << 20];
    let view = |shape: &[usize]| {
        let bytes = 4 * shape.iter().product::<usize>();
        TensorView::new(Dtype::F32, shape.to_vec(), &zeros[..bytes]).expect("a tensor of zeros")
    };
    let views: Vec<(&str, TensorView)> =
        tensors.iter().map(|(name, shape)| (name.as_str(), view(shape))).collect();
    folder.write("w.safetensors", safetensors::serialize(views, None).expect("tensors of zeros"));
    check_in(&folder, name, "run model.plan --weights w.safetensors");
}

#[test]
fn weights_with_other_names() {
    check_weights("weights_with_other_names", |it| it[0].0 = "head.weight".to_string());
}

#[test]
fn weights_of_another_shape() {
    check_weights("weights_of_another_shape", |it| it[0].1 = vec![128, 64]);
}

#[test]
fn weights_that_are_no_safetensors() {
    let folder = compiled("weights_that_are_no_safetensors");
    folder.write("w.safetensors", "version https://git-lfs.github.com/spec/v1\n");
    let line = "run model.plan --weights w.safetensors";
    check_in(&folder, "weights_that_are_no_safetensors", line);
}

#[test]
fn unknown_coord_axis() {
    check_in(
        &compiled("unknown_coord_axis"),
        "unknown_coord_axis",
        "inspect model.plan --coord pp=1",
    );
}

#[test]
fn coord_beyond_the_mesh() {
    let folder = compiled("coord_beyond_the_mesh");
    check_in(&folder, "coord_beyond_the_mesh", "inspect model.plan --coord dp=1,tp=2");
}

#[test]
fn coord_with_an_axis_twice() {
    let folder = compiled("coord_with_an_axis_twice");
    check_in(&folder, "coord_with_an_axis_twice", "inspect model.plan --coord dp=1,dp=0");
}

#[test]
fn unknown_param() {
    check_in(&compiled("unknown_param"), "unknown_param", "inspect model.plan --param q_proj");
}

#[test]
fn unknown_code() {
    check("unknown_code", &[], "explain PL9999");
}

/// For a program: one object, with the position where there is one.
#[test]
fn json() {
    check("json", &[("kv_heads: 2", "kv_head: 2")], "compile model.ron --mesh 2x4 --format json");
}

#[test]
fn output_over_the_input() {
    let folder = Folder::new("output_over_the_input", &[]);
    check_in(&folder, "output_over_the_input", "compile model.ron --mesh 2 -o ./model.ron");
    assert!(folder.read("model.ron").contains("Model("));
}

#[test]
fn output_over_a_model() {
    let folder = Folder::new("output_over_a_model", &[]);
    folder.write("other.ron", "Model()");
    check_in(&folder, "output_over_a_model", "compile model.ron --mesh 2 -o other.ron");
    assert_eq!(folder.read("other.ron"), "Model()");
}

#[test]
fn a_program_as_json() {
    check("a_program_as_json", &[], "compile model.ron --mesh 2 --emit plan --format json");
}

#[test]
fn an_overridden_value() {
    check("an_overridden_value", &[], "compile model.ron --mesh 2x4 --set sequence=7");
}

#[test]
fn an_override_of_the_wrong_type() {
    check("an_override_of_the_wrong_type", &[], "compile model.ron --mesh 2x4 --set sequence=abc");
}

#[test]
fn metrics_into_a_missing_folder() {
    let folder = compiled("metrics_into_a_missing_folder");
    let line = "run model.plan --steps 1 --metrics missing/m.jsonl";
    check_in(&folder, "metrics_into_a_missing_folder", line);
}
