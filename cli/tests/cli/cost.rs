//! `--target`, `--mem-limit` and `planc sweep`.

use std::fs;

use serde_json::Value;

use crate::{Folder, unwrapped, workspace};

#[track_caller]
fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|it| panic!("{it}: {text}"))
}

/// Text without the times of compiling, which are never the same.
fn without_times(text: &str) -> String {
    let at = text.find("compiled in").unwrap_or(text.len());
    text[..at].to_string()
}

#[test]
fn compile_predicts_a_step_on_a_target() {
    let folder = Folder::new("target", &[]);
    let text = without_times(&folder.works("compile model.ron --mesh 2x4 --target h200"));
    insta::assert_snapshot!("compile_target", text);
    let found = json(&folder.works("compile model.ron --mesh 2x4 --target h200 --format json"));
    let prediction = &found["prediction"];
    let at = |name: &str| {
        prediction[name].as_f64().unwrap_or_else(|| panic!("no `{name}`: {prediction}"))
    };
    assert_eq!(prediction["target"], "h200");
    assert!(at("exposed_seconds") <= at("communication_seconds"));
    assert!(at("exposed_seconds") < at("seconds"));
    assert!(0.0 < at("mfu") && at("mfu") < at("hfu") && at("hfu") < 1.0, "{prediction}");
    assert!(prediction["of_fp8_peak"].is_null());
    let without = json(&folder.works("compile model.ron --mesh 2x4 --format json"));
    assert!(without["prediction"].is_null() && without["needs"].is_null());
    let needs = &found["needs"];
    assert_eq!(needs["planned_bytes"], found["memory"]["total_bytes"]);
    assert_eq!(found["memory"], without["memory"]);
}

#[test]
fn a_limit_that_is_kept_adds_what_is_compared_with_it() {
    let folder = Folder::new("limit_kept", &[]);
    let limited = without_times(&folder.works("compile model.ron --mesh 2x4 --mem-limit 1GiB"));
    let needs = "needs        64.8 MiB a rank, and may take 1.00 GiB (this decides whether it\n             \
                 fits): 64.8 MiB planned as above, 0 B beside it\n";
    assert!(limited.contains(needs), "{limited}");
    let without = without_times(&folder.works("compile model.ron --mesh 2x4"));
    assert_eq!(limited.replace(needs, ""), without);
}

#[test]
fn a_limit_names_the_peak_and_what_would_lower_it() {
    let folder = Folder::new("limit", &[]);
    let line = "compile model.ron --mesh 2x2 --mem-limit 65MiB";
    let ran = folder.planc(line);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    insta::assert_snapshot!("mem_limit", ran.stderr);
    assert!(!folder.0.join("model.plan").exists(), "a plan that does not fit is not written");

    let ran = folder.planc(&format!("{line} --format json"));
    let found = json(&ran.stderr);
    assert_eq!(found["code"], "PL0652");
    let details = &found["details"];
    let needs = details["needs"]["planned_bytes"].as_u64().expect("bytes");
    let plan = json(&folder.works("compile model.ron --mesh 2x2 --format json"));
    assert_eq!(plan["memory"]["total_bytes"], needs);
    assert_eq!(plan["memory"]["peak"]["what"], details["peak"]["what"]);

    // Each choice does what it says.
    let choices = details["choices"].as_array().expect("a list");
    assert!(choices.len() >= 5, "{choices:?}");
    assert!(choices.iter().any(|it| it["fits"] == true), "{choices:?}");
    for it in choices {
        let flags = it["flags"].as_str().expect("text").replace('\'', "");
        let mesh = if flags.contains("--mesh") { "" } else { "--mesh 2x2" };
        let chosen =
            json(&folder.works(&format!("compile model.ron {mesh} {flags} --format json")));
        assert_eq!(chosen["memory"]["total_bytes"], it["needs"]["planned_bytes"], "{flags}");
        assert!(it["needs"]["planned_bytes"].as_u64() < Some(needs), "{flags}");
        let fits = it["needs"]["planned_bytes"].as_u64() <= Some(65 << 20);
        assert_eq!(it["fits"], fits, "{flags}");
    }
}

/// If no choice is enough, two together may be.
#[test]
fn a_limit_that_no_choice_keeps_names_pairs() {
    let folder = Folder::new("limit_pairs", &[]);
    let choices = |limit: u64| -> Vec<(String, u64, bool)> {
        let line = format!(
            "compile model.ron --mesh 2x2 --set batch=Global(64) --mem-limit {limit}B --format json"
        );
        let found = json(&folder.planc(&line).stderr);
        let choices = found["details"]["choices"].as_array().expect("a list").iter();
        let of_ranks = choices.filter(|it| it["ranks"] == 4);
        let choice = |it: &serde_json::Value| {
            let bytes = it["needs"]["planned_bytes"].as_u64().expect("bytes");
            (it["flags"].as_str().expect("text").to_string(), bytes, it["fits"] == true)
        };
        of_ranks.map(choice).collect()
    };
    let options = |flags: &str| flags.matches("--set").count() + flags.matches("--mesh").count();
    let alone = choices(1);
    let least =
        alone.iter().filter(|it| options(&it.0) <= 1).map(|it| it.1).min().expect("a choice");
    let found = choices(least - 1);
    let pairs: Vec<_> = found.iter().filter(|it| options(&it.0) == 2 && it.2).collect();
    assert!(!pairs.is_empty(), "{found:?}");
    // What is named does what it says.
    let flags = pairs[0].0.replace('\'', "");
    let mesh = if flags.contains("--mesh") { "" } else { "--mesh 2x2" };
    let line = format!(
        "compile model.ron {mesh} --set batch=Global(64) {flags} --mem-limit {}B",
        least - 1
    );
    folder.works(&line);
}

#[test]
fn a_target_has_so_much_memory() {
    let folder = Folder::new("target_memory", &[]);
    let model = workspace("examples/llama3-70b.ron");
    folder.write("large.ron", std::fs::read(model).expect("an example"));
    let ran = folder.planc("compile large.ron --mesh 2x4 --target h200");
    assert_eq!(ran.code, 1);
    insta::assert_snapshot!("target_memory", ran.stderr);
}

#[test]
fn sweep_compares_meshes() {
    let folder = Folder::new("sweep", &[]);
    let line = "sweep model.ron --gpus 16 --target h200 --set batch=Global(16)";
    insta::assert_snapshot!("sweep", folder.works(line));
    assert!(!folder.0.join("model.plan").exists(), "nothing is written");
    let found = json(&folder.works(&format!("{line} --format json")));
    let meshes = found["meshes"].as_array().expect("a list");
    // A mesh's figures are those of compiling for it.
    for it in meshes {
        let mesh = it["mesh"].as_str().expect("text");
        let line = format!(
            "compile model.ron --mesh {mesh} --target h200 --set batch=Global(16) --format json"
        );
        let plan = json(&folder.works(&line));
        assert_eq!(plan["prediction"]["seconds"], it["seconds"], "{mesh}");
        assert_eq!(plan["memory"]["total_bytes"], it["planned_bytes"], "{mesh}");
    }
    let seconds: Vec<f64> = meshes.iter().filter_map(|it| it["seconds"].as_f64()).collect();
    assert_eq!(seconds.len(), meshes.len());
    assert!(seconds.is_sorted(), "{seconds:?}");
}

/// D22, MaxText#5088: axes that cut nothing make all ranks do the same work, and a GPU's MFU looks fine.
#[test]
fn meshes_with_axes_without_a_job_are_refused() {
    let folder = Folder::new("jobs", &[]);
    let set = |it: &str| format!("--set meshes={it} --set batch=PerReplica(4)");
    let foreign = set("{1:[\"dp\"],2:[\"fsdp\",\"tensor\"]}");
    let ran = folder.planc(&format!("compile model.ron --mesh 2x4 {foreign}"));
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    let text = unwrapped(&ran.stderr);
    assert!(text.contains("error[PL0218]"), "{text}");
    assert!(text.contains("axis `fsdp` of size 2 cuts no data, weight or activation"), "{text}");
    assert!(text.contains("call the axis `dp`"), "{text}");

    let line = format!("sweep model.ron --gpus 4 --target h200 {foreign} --format json");
    let found = json(&folder.works(&line));
    let meshes: Vec<&Value> =
        found["meshes"].as_array().expect("a list").iter().map(|it| &it["mesh"]).collect();
    assert_eq!(meshes, ["4"]);
    for it in found["refused"].as_array().expect("a list") {
        let why = it["why"].as_str().expect("text");
        assert!(why.contains("cuts no data, weight or activation"), "{it}");
    }

    let foreign = set("{2:[\"fsdp\",\"tensor\"]}");
    let ran = folder.planc(&format!("sweep model.ron --gpus 4 --target h200 {foreign}"));
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("error[PL0654]"), "{}", ran.stderr);
    let text = unwrapped(&ran.stderr);
    assert!(text.contains("axis `tensor` of size 4 cuts no data"), "{text}");
    assert!(text.contains("axis `fsdp` of size 2 cuts no data"), "{text}");

    let spare = format!("{} --set replicas=[\"spare\"]", set("{2:[\"dp\",\"spare\"]}"));
    folder.works(&format!("compile model.ron --mesh 2x2 {spare}"));
    let text = folder.works(&format!("sweep model.ron --gpus 4 --target h200 {spare}"));
    assert!(unwrapped(&text).contains("4 ranks of `spare` would do the same work"), "{text}");
}

#[test]
fn sweep_puts_last_what_does_not_fit() {
    let folder = Folder::new("sweep_limit", &[]);
    let line = "sweep model.ron --gpus 8 --target cpu --set batch=Global(8) --mem-limit 67950000 --format json";
    let found = json(&folder.works(line));
    let meshes = found["meshes"].as_array().expect("a list");
    let fits: Vec<bool> = meshes.iter().map(|it| it["fits"] == true).collect();
    let n = fits.iter().filter(|it| **it).count();
    assert!(0 < n && n < fits.len(), "{fits:?}");
    assert!(fits[..n].iter().all(|it| *it), "{fits:?}");
    for it in meshes {
        assert_eq!(it["fits"], it["planned_bytes"].as_u64() <= Some(67_950_000), "{it}");
    }
}

/// A model in which eight ranks along an axis do the same.
const SPARE: &str = "graph @f phase=logical mesh=(dp=2, spare=8) {
  input %x : bf16[32, 1024] @ [dp, _] pinned
  param %w : bf16[4096, 1024] @ [_, _] pinned
  forward:
  %y = matmul(transpose_b:true) %x, %w : bf16[32, 4096]
  result y = %y
}
";

#[test]
fn work_that_ranks_repeat_is_reported_and_can_be_denied() {
    let folder = Folder::new("repeated", &[]);
    folder.write("f.ir", SPARE);
    let words = "repeated: `y.local` are computed by 8 ranks alike, those along spare: 100 % of the FLOPs of a step";
    let found = folder.works("compile f.ir");
    assert!(unwrapped(&found).contains(words), "{found}");
    let denied = folder.planc("compile f.ir --deny repeated");
    assert_eq!(denied.code, 1, "{}", denied.stdout);
    assert!(unwrapped(&denied.stderr).contains(words), "{}", denied.stderr);
    let found = json(&folder.works("compile f.ir --format json"));
    let summary = &found["summary"];
    assert_eq!(summary["repeated"][0]["axes"], "spare");
    assert_eq!(summary["repeated"][0]["flops"], summary["flops"]);
    assert!(found["lints"].as_array().expect("a list").iter().any(|it| it["lint"] == "repeated"));
    // Of 16 ranks that execute, two are needed.
    let [flops, model] = ["flops", "model_flops"].map(|it| summary[it].as_u64().expect("a count"));
    assert_eq!(16 * flops, 8 * model);
    assert!(!folder.works("compile model.ron --mesh 2x2").contains("repeated:"));
    let ran = folder.planc("run f.ir --steps 1");
    let what = words.strip_prefix("repeated: ").expect("the lint");
    assert!(unwrapped(&ran.stderr).contains(what), "{}", ran.stderr);
    // Without a parallel mode, tp ranks compute the same products.
    let model = "Model(name: \"plain\", batch: Global(8), sequence: 32, layers: [Embedding(name: \"e\", vocab: 64, \
                 dim: 64), Linear(name: \"a\", out_features: 512), Linear(name: \"b\", out_features: 64), \
                 LmHead(name: \"h\"), CrossEntropy()])";
    folder.write("plain.ron", model);
    let swept = unwrapped(&folder.works("sweep plain.ron --gpus 4 --target h200"));
    let said = swept.split_once("Repeated work").expect("a section").1;
    assert!(said.contains("1x4: `") && said.contains("are computed by 4 ranks alike"), "{swept}");
    assert!(!said.contains("4x1: `"), "{swept}");
}

#[test]
fn reducing_once_a_step_is_noted_where_it_is_slower() {
    let folder = Folder::new("late_reduction", &[]);
    let model = fs::read(workspace("examples/llama3-8b.ron")).expect("an example");
    folder.write("8b.ron", model);
    let once = "compile 8b.ron --mesh 8 --set micro_batches=4 --set batch=PerReplica(4) \
                --set reduce_gradients=LastMicroBatch --target h200";
    let words =
        "late-reduction: a step with `reduce_gradients: LastMicroBatch` is predicted to take";
    let text = unwrapped(&folder.works(once));
    assert!(text.contains(words), "{text}");
    let denied = folder.planc(&format!("{once} --deny late-reduction"));
    assert_eq!(denied.code, 1, "{}", denied.stdout);
    assert!(unwrapped(&denied.stderr).contains(words), "{}", denied.stderr);
    // With weights that stay gathered it is faster, and nothing is to be said.
    let kept = folder.works(&format!("{once} --set fsdp.reshard_after_forward=false"));
    assert!(!unwrapped(&kept).contains("late-reduction"), "{kept}");
}

#[test]
fn tensor_parallelism_across_nodes_is_a_note_where_a_sweep_refuses_it() {
    let folder =
        Folder::new("across_nodes", &[("heads: 4, kv_heads: 2", "heads: 16, kv_heads: 16")]);
    let words = "16 tensor-parallel ranks are more than a node's 8";
    let compile = |more: &str| folder.planc(&format!("compile model.ron --mesh 1x16 {more}"));
    assert!(!compile("").stdout.contains(words));
    // The CPU's profile has 64 ranks to a node.
    assert!(!compile("--target cpu").stdout.contains(words));
    let found = compile("--target h200").stdout;
    assert!(unwrapped(&found).contains(&format!("note tp-across-nodes: {words}")), "{found}");
    let no_target = compile("--deny tp-across-nodes");
    assert!(
        unwrapped(&no_target.stderr).contains("has no machine to look at"),
        "{}",
        no_target.stderr
    );
    let denied = compile("--target h200 --deny tp-across-nodes");
    assert_eq!(denied.code, 1, "{}", denied.stdout);
    assert!(unwrapped(&denied.stderr).contains(words), "{}", denied.stderr);
    // Ranks of tp are 8 apart.
    let apart =
        folder.planc("compile model.ron --mesh tp=2,dp=8 --target h200 --set batch=Global(8)");
    let words_apart = "2 tensor-parallel ranks are on 2 nodes of 8; make `tp` the last axis";
    assert!(unwrapped(&apart.stdout).contains(words_apart), "{}{}", apart.stdout, apart.stderr);
    let sweep = folder.planc("sweep model.ron --gpus 16 --target h200 --set batch=Global(16)");
    assert!(unwrapped(&sweep.stdout).contains(words), "{}", sweep.stdout);
    assert_eq!(sweep.stderr, "", "a bar is for terminals");
}

#[test]
fn wrong_targets_and_sizes_are_refused() {
    let folder = Folder::new("targets", &[]);
    let check = |line: &str, expect: &str| {
        let ran = folder.planc(line);
        let text = ran.stderr.split_whitespace().collect::<Vec<&str>>().join(" ");
        assert_ne!(ran.code, 0, "{line}");
        assert!(text.contains(expect), "{line}: {}", ran.stderr);
    };
    check("compile model.ron --mesh 2 --target v100", "there is no target `v100`");
    check("compile model.ron --mesh 2 --target v100", "one of a100, b200, cpu, h100, h200");
    check("compile model.ron --mesh 2 --target v100.ron", "cannot read `v100.ron`");
    check("compile model.ron --mesh 2 --target model.ron", "`model.ron` is no profile of a target");
    check("compile model.ron --mesh 2 --mem-limit 140gbit", "`gbit` is no unit; write GiB");
    let fp8 = "--set recipe=Float8CurrentScaling() --set precision.compute=bf16";
    check(&format!("compile model.ron --mesh 1 --target a100 {fp8}"), "error[PL0653]");
    check(&format!("sweep model.ron --gpus 2 --target a100 {fp8}"), "error[PL0653]");
    check(
        "compile model.ron --mesh 2 --mem-limit 80",
        "without a unit this is bytes; write `80GiB`",
    );
    check("inspect model.ron --mesh 2 --target h200", "--html <FILE>");
    check("sweep model.ron --gpus 7 --target h200", "error[PL0654]");
    // A mistake that every mesh has is the model's own.
    check("sweep model.ron --gpus 4 --target h200 --set frozen=[\"*norm\"]", "error[PL0209]");
    check(
        "sweep model.ron --gpus 4 --target h200 --set frozen=[\"*norm\"]",
        "matches no parameter",
    );
    check("sweep model.ron --gpus 0 --target h200", "0 is not in 1..=1048576");
    folder.works("compile model.ron --mesh 1 -q");
    check("sweep model.plan --gpus 8 --target h200", "`model.plan` is for one mesh already");
}

#[test]
fn a_profile_of_ones_own_is_a_file() {
    let folder = Folder::new("own_target", &[]);
    let text = std::fs::read_to_string(workspace("ir/profiles/h200.ron")).expect("a profile");
    folder.write("mine.ron", text.replace("name: \"h200\"", "name: \"mine\""));
    let of = |target: &str| {
        let line = format!("compile model.ron --mesh 2x4 --target {target} --format json");
        json(&folder.works(&line))["prediction"].clone()
    };
    let (mine, theirs) = (of("mine.ron"), of("h200"));
    assert_eq!(mine["target"], "mine");
    assert_eq!(mine["seconds"], theirs["seconds"]);
}

/// A profile with a number that no machine has is refused, with the field and its place in the file.
#[test]
fn numbers_that_no_machine_has_are_refused() {
    let folder = Folder::new("absurd_target", &[]);
    let profile = std::fs::read_to_string(workspace("ir/profiles/h200.ron")).expect("a profile");
    let check = |from: &str, to: &str, expect: &str| {
        assert!(profile.contains(from), "{from}");
        folder.write("mine.ron", profile.replacen(from, to, 1));
        let ran = folder.planc("compile model.ron --mesh 2x4 --target mine.ron --format json");
        let found = json(&ran.stderr);
        assert_eq!((ran.code, &found["code"]), (1, &"PL0651".into()), "{}", ran.stderr);
        let message = found["message"].as_str().expect("a message");
        assert!(message.contains(expect), "{message}");
        let line = profile[..profile.find(from).expect("it is there")].lines().count();
        assert_eq!(found["spans"][0]["line"], line, "{}", ran.stderr);
    };
    let amount = "a number from 1 to 1e21";
    check(
        "memory: (149250113536",
        "memory: (1e400",
        &format!("`memory` is inf, and must be {amount}"),
    );
    check("bandwidth: (4.2e12", "bandwidth: (NaN", "`bandwidth` is NaN");
    check("peak: (989e12", "peak: (1e-300", "`peak` is 1e-300");
    check("ranks_per_node: 8", "ranks_per_node: 0", "`ranks_per_node` is 0,");
    check("tile: (128, 256)", "tile: (128, 0)", "`tile[1]` is 0,");
    check(
        "launch: (5e-6",
        "launch: (1e308",
        "`launch` is 1e308, and must be a number from 0 to 1000",
    );
    check("tree_node: 28e-6", "tree_node: -28e-6", "`hops.tree_node` is -2.8e-5");
    check("fp8: Some((1467e12", "fp8: Some((-1", "`gemm.fp8` is -1,");
    check("(996147200,", "(-1,", "`communicators[0]` is -1,");
    check("sustained: (0.881", "sustained: (1.5", "a number from 0.001 to 1");
    check("network: (37e9", "network: (fast", "Expected float");
    check(
        "points: ((67108864, 201e9)",
        "points: ((67108864, 1e-300)",
        "`node.reduce_scatter.points` gives no",
    );
}

/// A move of the reports C58 and C59, as `planc compile` shows it.
fn move_of(name: &str, mesh: &str, sizes: &str, from: &str, to: &str) -> String {
    let folder = Folder::new(name, &[]);
    let text = format!(
        "graph @{name} phase=logical mesh=({mesh}) {{\n  input %x : f32[{sizes}] @ {from} pinned\n  state %y : \
         f32[{sizes}] @ {to} pinned\n  forward:\n  %moved = reshard %x : f32[{sizes}] @ {to} pinned\n  store %y = %moved in \
         forward\n}}\n"
    );
    folder.write("move.ir", text);
    without_times(&folder.works("compile move.ir --target h200"))
}

// C58 (xla#15207): shards of 2048 B; no rank sends more than two, and none has the tensor's 16 KiB.
#[test]
fn a_move_of_two_axes_into_one_dimension_is_seen() {
    let text = move_of("c58", "x=4, y=2", "16, 16, 16", "[y, _, x]", "[_, x.y, _]");
    insta::assert_snapshot!("c58", text);
}

// C59 (pytorch#157585): one exchange, and no gather.
#[test]
fn a_swap_of_dimensions_is_seen() {
    let text = move_of("c59", "dp=16, tp=8", "256, 512", "[dp, tp]", "[tp, dp]");
    insta::assert_snapshot!("c59", text);
}
