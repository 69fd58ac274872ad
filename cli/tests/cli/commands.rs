//! What commands print and write when all is well.

use std::fs;

use serde_json::Value;

use crate::{Folder, unwrapped, workspace};

#[track_caller]
fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn compile_writes_a_plan_and_says_what_it_costs() {
    let folder = Folder::new("compile", &[]);
    let text = folder.works("compile model.ron --mesh 2x4");
    let part = |label: &str| text.lines().any(|it| it.starts_with(label));
    for label in ["parameters", "computes", "memory", "peak", "collectives", "compiled in"] {
        assert!(part(label), "no line `{label}`:\n{text}");
    }
    assert!(!part("amax groups"), "nothing is quantized:\n{text}");
    assert!(text.lines().all(|it| it.chars().count() <= 80), "{text}");
    assert!(folder.read("model.plan").starts_with("plan @llama-tiny phase=planned mesh=("));
}

/// All commands read patterns in the same way, and in linear time, also a pattern with many stars.
#[test]
fn names_are_chosen_by_patterns() {
    let folder = Folder::new("patterns", &[]);
    let said = folder.works("inspect model.ron --mesh 2 --param *layers.[!0].self_attn.?_proj*");
    assert!(said.contains("layers.1.self_attn.q_proj"), "{said}");
    assert!(!said.contains("layers.0.") && !said.contains("mlp"), "{said}");
    let frozen = "compile model.ron --mesh 2 --format json --set frozen=[\"*.[qkvo]_proj.weight\"]";
    assert!(folder.works(frozen).contains("\"parameters\""));
    let ran = folder.planc("inspect model.ron --mesh 2 --param *?*?*?*?*?*?*?*?*?*?*?*?!");
    assert!(ran.code == 1 && ran.stderr.contains("PL0608"), "{}", ran.stderr);
    for flag in ["inspect model.ron --mesh 2 --param", "run model.ron --load x --allow-missing"] {
        let ran = folder.planc(&format!("{flag} model.[qk"));
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        let expect = "no `]` closes the `[` at character 7 of `model.[qk`";
        assert!(unwrapped(&ran.stderr).contains(expect), "{}", ran.stderr);
    }
}

#[test]
fn the_same_model_compiles_to_the_same_bytes() {
    let folder = Folder::new("same_bytes", &[]);
    folder.works("compile model.ron --mesh 2x2 -q -o a.plan");
    folder.works("compile model.ron --mesh dp=2,tp=2 -q -o b.plan");
    assert_eq!(folder.read("a.plan"), folder.read("b.plan"));
}

/// Heads of 16 are for a kernel of our own, so that nobody asks for cuDNN.
#[test]
fn attentions_that_no_library_does_are_not_planned_ahead() {
    let folder = Folder::new("plan_attention", &[]);
    folder.works("compile model.ron --mesh 2x2 -q");
    let said = folder.works("doctor --plan-attention model.plan");
    assert_eq!(said, "the plan has no attention that cuDNN does\n");
    assert_eq!(folder.works("doctor --plan-attention model.plan --format json").trim(), "[]");
}

#[test]
fn compile_counts_for_programs() {
    let folder = Folder::new("compile_json", &[]);
    let found = json(&folder.works("compile model.ron --mesh 2x4 --format json"));
    assert_eq!(found["mesh"]["ranks"], 8);
    assert_eq!(found["output"], "model.plan");
    assert_eq!(found["summary"]["parameters"], 119_104);
    let memory = found["memory"]["total_bytes"].as_u64().expect("bytes");
    assert!(memory > 0);
    for part in ["elaborate", "passes", "lower", "schedule", "memory"] {
        assert!(found["time_ms"]["parts"][part].is_f64(), "no time of `{part}`");
    }
    let collectives = found["summary"]["collectives"].as_array().expect("a list");
    let gathers = collectives.iter().find(|it| it["axes"] == "dp" && it["kind"] == "all_gather");
    assert!(gathers.is_some_and(|it| it["wire_bytes"].as_u64() > Some(0)), "{collectives:?}");
}

/// Llama-3-8B on 64 GPUs, as in docs/quantization.md. By hand, for `gate_proj`: two gathers and a reduction in bf16 of
/// 63 pieces of 224 x 4096 at 200 GB/s and 10 us each take 1.76 ms; of pieces of 256 x 4096, gathered as codes, 1.35.
#[test]
fn the_plan_says_how_weights_in_blocks_are_cut() {
    let folder = Folder::new("cuts", &[]);
    fs::copy(workspace("examples/llama3-8b.ron"), folder.0.join("8b.ron")).expect("an example");
    let compile =
        "compile 8b.ron --mesh 64x1 --set recipe=Float8BlockScaling() --set batch=Global(64)";
    let text = folder.works(&format!("{compile} -v"));
    let page = fs::read_to_string(workspace("docs/quantization.md")).expect("a page");
    let shown: Vec<&str> = page.lines().filter(|it| it.trim().starts_with("32 x ")).collect();
    assert_eq!(shown.len(), 2, "the page shows two weights");
    for line in shown {
        assert!(text.lines().any(|it| it == line), "no line {line:?} in\n{text}");
    }
    let found = json(&folder.works(&format!("{compile} --format json")));
    let cuts = found["cuts"].as_array().expect("a list");
    assert_eq!(cuts.len(), 7 * 32);
    let rounded: Vec<_> = cuts.iter().filter(|it| it["is_rounded"] == true).collect();
    assert_eq!(rounded.len(), 2 * 32);
    assert_eq!(rounded[0]["rounded"]["sharding"], "[dp%128, _]");
    let amax = folder.works("inspect 8b.plan --amax");
    let words: Vec<&str> = amax.split_whitespace().collect();
    let amax = words.join(" ");
    assert!(amax.contains("gathered over dp in FP8, cut between blocks"), "{amax}");
    assert!(amax.contains("gathered over dp before it is quantized"), "{amax}");
    let param = folder.works("inspect 8b.plan --param *.0.mlp.gate_proj.weight --coord dp=55");
    assert!(param.contains("[dp%128, _]") && param.contains("[14080,14336)"), "{param}");
}

/// Dims of llama-tiny are no multiples of 128. Two layers of seven projections, three GEMMs each.
#[test]
fn a_recipe_that_quantizes_nothing_is_noted() {
    let folder = Folder::new("unquantized", &[]);
    let compile =
        "compile model.ron --mesh 1 --set recipe=Float8BlockScaling() --set precision.compute=bf16";
    let text = unwrapped(&folder.works(compile));
    assert!(text.contains("note unquantized: `model.layers.0.self_attn.q_proj`,"), "{text}");
    assert!(text.contains("and 40 more are products that a recipe quantizes"), "{text}");
    let denied = folder.planc(&format!("{compile} --deny unquantized"));
    assert_eq!(denied.code, 1, "{}", denied.stdout);
    assert!(denied.stderr.starts_with("error[PL0611]"), "{}", denied.stderr);
}

/// Moments of a weight that was moved alone: the user's edit is no bug of planc.
#[test]
fn a_program_whose_weight_and_states_disagree_is_refused() {
    let folder = Folder::new("disagree", &[]);
    folder.works("compile model.ron --mesh 2x2 --emit logical -o x.ir");
    let text = folder.read("x.ir");
    let edited: Vec<String> = text
        .lines()
        .map(|it| match it.contains("param %model.layers.0.self_attn.q_proj.weight ") {
            true => it.replace("@ [tp.dp, _]", "@ [tp, dp]"),
            false => it.to_string(),
        })
        .collect();
    fs::write(folder.0.join("x.ir"), edited.join("\n") + "\n").expect("the folder is writable");
    let ran = folder.planc("compile x.ir");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.starts_with("error[PL0612]"), "{}", ran.stderr);
    assert!(unwrapped(&ran.stderr).contains("as of a weight and its states"), "{}", ran.stderr);
}

#[test]
fn every_phase_can_be_printed() {
    let folder = Folder::new("emit", &[]);
    for phase in ["logical", "sharded", "explicit", "local"] {
        let text = folder.works(&format!("compile model.ron --mesh 2x2 --emit {phase}"));
        let start = format!("graph @llama-tiny phase={phase} mesh=(dp=2, tp=2)");
        assert!(text.starts_with(&start), "{}", &text[..200]);
    }
    let text = folder.works("compile model.ron --mesh 2x2 --emit plan");
    assert!(text.starts_with("plan @llama-tiny phase=planned mesh=(dp=2, tp=2)"));
    assert!(!folder.0.join("model.plan").exists(), "what is printed is not written");
}

#[test]
fn dumps_go_into_a_folder_or_to_stderr() {
    let folder = Folder::new("dump", &[]);
    folder.works("compile model.ron --mesh 2x2 -q --dump-ir-after all --dump-dir ir");
    assert!(folder.read("ir/01-autodiff.ir").starts_with("graph @llama-tiny phase=logical"));
    let ran = folder.planc("compile model.ron --mesh 2x2 -q --dump-ir-after cse");
    assert!(ran.stderr.starts_with("; after cse\ngraph @llama-tiny phase=explicit"));
    assert_eq!((ran.code, ran.stdout.as_str()), (0, ""));
}

#[test]
fn time_of_passes_is_printed() {
    let text = Folder::new("time", &[]).works("compile model.ron --mesh 2 --time-passes");
    assert!(text.contains("propagate-shardings"), "{text}");
}

#[test]
fn run_trains_and_writes_metrics() {
    let folder = Folder::new("run", &[]);
    let text = folder.works("run model.ron --mesh 2x2 --steps 3 --log-every 2 --metrics m.jsonl");
    let steps: Vec<&str> = text.lines().filter(|it| it.starts_with("step: ")).collect();
    assert_eq!(steps.len(), 3, "first, every second, last:\n{text}");
    assert!(steps[0].contains("  loss: ") && steps[0].contains("  tps: "));
    assert!(text.lines().last().is_some_and(|it| it.starts_with("trained 3 steps in ")));
    let metrics: Vec<Value> = folder.read("m.jsonl").lines().map(json).collect();
    assert_eq!(metrics.len(), 3);
    assert_eq!(metrics[2]["step"], 3);
    assert!(metrics[0]["loss"].as_f64() > metrics[2]["loss"].as_f64(), "it learns");
}

#[test]
fn a_plan_trains_like_its_model() {
    let folder = Folder::new("run_plan", &[]);
    folder.works("compile model.ron --mesh 4 -q");
    folder.works("run model.plan --steps 2 -q --metrics a.jsonl");
    folder.works("run model.ron --mesh 4 --steps 2 -q --metrics b.jsonl");
    let losses = |name: &str| -> Vec<Value> {
        folder.read(name).lines().map(|it| json(it)["loss"].clone()).collect()
    };
    assert_eq!(losses("a.jsonl"), losses("b.jsonl"));
}

#[test]
fn run_speaks_json_lines() {
    let folder = Folder::new("run_json", &[]);
    let text = folder.works("run model.ron --mesh 1 --steps 2 --format json");
    let lines: Vec<Value> = text.lines().map(json).collect();
    assert_eq!(lines[1]["step"], 1);
    assert_eq!((&lines[3]["event"], &lines[3]["steps"]), (&json(r#""summary""#), &json("2")));
}

#[test]
fn inspect_placements() {
    let folder = Folder::new("inspect_placements", &[]);
    let text = folder.works("inspect model.ron --mesh 2x4 --param *layers.0.self_attn.k*");
    insta::assert_snapshot!("inspect_k_proj", text);
    let text =
        folder.works("inspect model.ron --mesh dp_replicate=2,dp_shard=2,tp=2 --param *norm*");
    insta::assert_snapshot!("inspect_norms", text);
}

#[test]
fn inspect_one_coordinate() {
    let folder = Folder::new("inspect_coord", &[]);
    let line = "inspect model.ron --mesh 2x4 --param *.0.mlp.up_proj.weight --coord dp=1,tp=3";
    insta::assert_snapshot!("inspect_coord", folder.works(line));
    let found = json(&folder.works(&format!("{line} --format json")));
    assert_eq!(found["mesh"]["listed"], json("[7]"));
    let tensor = &found["tensors"][0];
    assert_eq!(tensor["torch"], json(r#"["StridedShard(0, 4)", "Shard(0)"]"#));
    assert_eq!(tensor["shards"][0]["dims"], json("[[[140, 160]], [[0, 64]]]"));
}

#[test]
fn drawings_obey_colors_and_the_width() {
    let folder = Folder::new("inspect_drawing", &[]);
    let line = "inspect model.ron --mesh 8 --param model.norm.weight";
    let plain = folder.works(line);
    assert!(!plain.contains('\x1b') && plain.is_ascii(), "{plain}");
    assert!(plain.lines().all(|it| it.len() <= 80), "{plain}");
    let colored = folder.works(&format!("{line} --color always"));
    assert!(colored.contains("\x1b[38;5;16;48;5;"), "{colored}");
    let mut without = String::new();
    for (i, part) in colored.split('\x1b').enumerate() {
        without += if i == 0 { part } else { part.split_once('m').expect("a colour").1 };
    }
    assert_eq!(without, plain);
    let narrow = folder.planc_with(&format!("{line} --coord dp=5"), &[("COLUMNS", "50")]).stdout;
    let drawn: Vec<&str> = narrow.lines().filter(|it| it.contains('|')).collect();
    assert!(!drawn.is_empty() && drawn.iter().all(|it| it.len() <= 50), "{narrow}");
    assert!(narrow.contains("*5") && narrow.contains("* held by rank 5"), "{narrow}");
    assert!(narrow.contains(" of 8 pieces of dim 0 are folded"), "{narrow}");
}

#[test]
fn inspect_writes_a_page() {
    let folder = Folder::new("inspect_html", &[]);
    let line = "inspect model.ron --mesh 2x4 --html report.html";
    let said = folder.works(line);
    assert!(said.starts_with("llama-tiny on dp=2 x tp=4 (8 ranks) -> report.html ("), "{said}");
    let page = folder.read("report.html");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>"), "{}", page.len());
    let from_elsewhere = ["http:", "https:", "src=", "@import", "url("];
    assert!(from_elsewhere.iter().all(|it| !page.contains(it)), "a page is whole by itself");
    let found = json(&folder.works(&format!("{line} --format json --target b200")));
    assert_eq!((&found["output"], &found["target"]), (&"report.html".into(), &"b200".into()));
    assert_eq!(folder.works(&format!("{line} -q")), "");
    assert_eq!(folder.read("report.html"), page, "the same plan gives the same page");
    assert_eq!(folder.planc("inspect model.ron --mesh 2 --html a.html --amax").code, 2);
    assert_eq!(folder.planc("inspect model.ron --mesh 2 --target b200").code, 2);
    let over = folder.planc("inspect model.ron --mesh 2 --html model.ron");
    assert!(over.code == 1 && over.stderr.contains("PL0613"), "{}", over.stderr);
    let target = folder.planc("inspect model.ron --mesh 2 --html a.html --target h20");
    assert!(target.code == 1 && target.stderr.contains("PL0650"), "{}", target.stderr);
}

/// Names are the user's, and are text wherever they stand.
#[test]
fn names_cannot_change_a_page() {
    let name = "</script><script>alert(1)</script>";
    let folder =
        Folder::new("inspect_escaped", &[("name: \"llama-tiny\"", &format!("name: {name:?}"))]);
    folder.works("inspect model.ron --mesh 2 --html report.html");
    assert!(!folder.read("report.html").contains("<script>alert"));
}

#[test]
fn inspect_costs() {
    let folder = Folder::new("inspect_costs", &[]);
    let text = folder.works("inspect model.ron --mesh 2 --collectives --memory");
    assert!(text.contains("all_gather") && text.contains("temporary: "), "{text}");
    assert!(!text.contains("torch"), "placements were not asked for");
    assert!(text.lines().all(|it| it.chars().count() <= 80), "{text}");
    let found = json(&folder.works("inspect model.ron --mesh 2 --collectives --format json"));
    assert!(found["collectives"][0]["wire_bytes"].is_u64());
}

/// The llama-tiny example in FP8.
const FP8: [(&str, &str); 1] = [(
    "sequence: 32,",
    "sequence: 32, recipe: Float8CurrentScaling(), precision: (compute: bf16),",
)];

#[test]
fn inspect_amax_groups() {
    let folder = Folder::new("inspect_amax", &FP8);
    let mesh = "--mesh dp_replicate=2,dp_shard=2,tp=2";
    let text = folder.works(&format!("inspect model.ron {mesh} --amax"));
    assert!(text.lines().all(|it| it.chars().count() <= 80), "{text}");
    insta::assert_snapshot!("inspect_amax", text);
    let found = json(&folder.works(&format!("inspect model.ron {mesh} --amax --format json")));
    let fprop = &found["amax"][0];
    assert_eq!(
        (&fprop["gemm"], &fprop["role"]),
        (&"model.layers.0.self_attn.q_proj".into(), &"fprop".into())
    );
    let weight = &fprop["operands"][1];
    assert_eq!(weight["tensor"], "model.layers.0.self_attn.q_proj.weight");
    assert_eq!(weight["group"], json(r#"{"axes": "dp_shard, tp", "ranks": 4}"#));
    let compiled = folder.works(&format!("compile model.ron {mesh}"));
    assert!(compiled.contains("amax groups  14 weights over dp_shard, tp\n"), "{compiled}");
    let text = Folder::new("inspect_amax_none", &[]).works("inspect model.ron --mesh 2 --amax");
    assert!(text.ends_with("No GEMM multiplies codes: no module has a recipe.\n"), "{text}");
}

#[test]
fn inspect_amax_groups_of_a_refined_axis_and_of_histories() {
    let folder = Folder::new("inspect_amax_delayed", &FP8);
    // Two KV heads: tp=4 is used as tp_kv=2 x tp_rep=2.
    let line = "inspect model.ron --mesh 2x4 --amax --format json --set recipe=DelayedScaling()";
    let found = json(&folder.works(line));
    let weight_of = |gemm: &str| {
        let gemms = found["amax"].as_array().expect("a list");
        let gemm = gemms.iter().find(|it| it["gemm"] == gemm).expect("a GEMM");
        gemm["operands"][1]["group"].clone()
    };
    assert_eq!(weight_of("model.layers.0.self_attn.q_proj")["axes"], "dp, tp");
    let k_proj = weight_of("model.layers.0.self_attn.k_proj");
    assert_eq!(k_proj, json(r#"{"axes": "dp, tp", "ranks": 8}"#));
}

#[test]
fn a_weight_mesh_that_misses_an_axis_is_a_lint_that_can_be_denied() {
    let folder = Folder::new("weight_mesh", &FP8);
    let line = "compile model.ron --mesh 2x4 --set weight_mesh=[\"dp\"]";
    let text = folder.works(line).split_whitespace().collect::<Vec<_>>().join(" ");
    let lint =
        "are sharded over dp, tp, of which `weight_mesh` (dp) misses tp: their scales vary over tp";
    assert!(text.contains(lint), "{text}");
    let denied = folder.planc(&format!("{line} --deny amax"));
    assert_eq!(denied.code, 1);
    assert!(
        denied.stderr.contains("PL0611") && denied.stderr.contains("amax: "),
        "{}",
        denied.stderr
    );
    folder.works("compile model.ron --mesh 2x4 -q --deny amax");
}

#[test]
fn usage_errors_are_2_and_help_is_0() {
    let folder = Folder::new("usage", &[]);
    assert_eq!(folder.planc("compile").code, 2);
    assert_eq!(folder.planc("compile model.ron --meshh 2").code, 2);
    assert_eq!(folder.planc("--help").code, 0);
    assert!(folder.works("--version").starts_with("planc "));
}

#[test]
fn help_fits_80_columns() {
    let folder = Folder::new("help", &[]);
    for line in ["--help", "compile --help", "run --help", "inspect --help", "explain --help"] {
        let text = folder.works(line);
        assert!(text.lines().all(|it| it.chars().count() <= 80), "{line}:\n{text}");
    }
}

#[test]
fn explain_prints_a_code() {
    insta::assert_snapshot!("explain", Folder::new("explain", &[]).works("explain PL0204"));
}

#[test]
fn prefetching_is_a_choice_of_compiling() {
    let folder = Folder::new("prefetch", &[]);
    let plan = |options: &str| {
        folder.works(&format!("compile model.ron --mesh 4 -q -o a.plan {options}"));
        folder.read("a.plan")
    };
    let usual = plan("");
    assert_eq!(plan("--prefetch-forward 1 --prefetch-backward 1"), usual);
    assert_ne!(plan("--prefetch-forward 0"), usual);
    assert_ne!(plan("--prefetch-backward 0"), usual);
    let run = folder.planc("inspect a.plan --prefetch-forward 2");
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("cannot change what is compiled already"), "{}", run.stderr);
}

/// A launcher that started one process says nothing that a run on the CPU could not do.
#[test]
fn a_launcher_of_one_process_runs_on_the_cpu() {
    let folder = Folder::new("launcher_of_one", &[]);
    let launch = "--rank 0 --world-size 1 --local-rank 0 --master localhost:1";
    let found = folder.works(&format!("run model.ron --mesh 1 --steps 1 {launch}"));
    assert!(found.contains("trained 1 step"), "{found}");
}
