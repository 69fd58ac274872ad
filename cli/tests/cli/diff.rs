//! `planc diff`: what it says, its exit codes, and the golden meanings of the examples.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::{Folder, workspace};

/// A name in tests/golden/plans, an example, and options.
const GOLDEN: [(&str, &str, &str); 8] = [
    ("mlp-2x2", "mlp", "--mesh 2x2"),
    ("llama-tiny-2x4", "llama-tiny", "--mesh 2x4"),
    ("llama-tiny-1", "llama-tiny", "--mesh 1"),
    ("llama-tiny-fp8-2x2x2", "llama-tiny-fp8", "--mesh 2x2x2"),
    ("llama-tiny-block-2x4", "llama-tiny-block", "--mesh 2x4"),
    ("gpt2-small-2x4", "gpt2-small", "--mesh 2x4"),
    ("llama3-8b-2x4", "llama3-8b", "--mesh 2x4"),
    ("llama3-405b-2048x8", "llama3-405b", "--mesh 2048x8"),
];

/// A change of the compiler shows here what it changes in the plans of the examples; `BLESS=1` takes it.
#[test]
fn plans_of_the_examples_mean_what_they_did() {
    let mut changed = String::new();
    for (name, example, options) in GOLDEN {
        let golden = workspace(&format!("tests/golden/plans/{name}.jsonl"));
        let model = workspace(&format!("examples/{example}.ron"));
        let planc = |command: &[&str]| {
            let mut planc = Command::new(env!("CARGO_BIN_EXE_planc"));
            planc.args(command).args(options.split(' ')).output().expect("planc starts")
        };
        let path = |it: &Path| it.display().to_string();
        if std::env::var_os("BLESS").is_some() {
            let made = planc(&["compile", &path(&model), "--emit", "meaning"]);
            assert!(made.status.success(), "{name}: {}", String::from_utf8_lossy(&made.stderr));
            fs::write(&golden, made.stdout).expect("the golden folder is writable");
            continue;
        }
        // Options are for the model; the golden file is what it is.
        let found = planc(&["diff", &path(&golden), &path(&model), "--exit-code"]);
        match found.status.code() {
            Some(0) => (),
            Some(1) => changed += &String::from_utf8_lossy(&found.stdout),
            code => panic!("{name}: {code:?} {}", String::from_utf8_lossy(&found.stderr)),
        }
    }
    assert!(
        changed.is_empty(),
        "plans of examples changed; `BLESS=1 cargo test -p cli plans_of_the_examples` takes that.\n\n{changed}"
    );
}

#[test]
fn a_plan_and_itself() {
    let folder = Folder::new("diff_itself", &[]);
    folder.works("compile model.ron --mesh 2x4 -o a.plan -q");
    folder.works("compile model.ron --mesh 2x4 --emit meaning -o a.jsonl");
    let same = "llama-tiny on dp=2 x tp=4: no difference in meaning\n";
    for line in ["a.plan a.plan", "a.plan model.ron --mesh 2x4", "a.jsonl a.plan", "a.plan a.jsonl"]
    {
        assert_eq!(folder.works(&format!("diff {line} --exit-code")), same, "{line}");
    }
    // Numbers of events, and names and order where they mean nothing.
    let text = folder.read("a.plan");
    let renamed = text
        .replace(" e1\n", " e1000\n")
        .replace(" e2\n", " e1\n")
        .replace(" e1000\n", " e2\n")
        .replace(".input_layernorm.grad.4", ".input_layernorm.grad.9");
    // Two products that do not read each other, the other way round.
    let line = |what: &str| {
        let of = |it: &&str| it.contains(&format!("%model.layers.0.mlp.{what}_proj = matmul"));
        renamed.lines().find(of).expect("it is there").to_string()
    };
    let (gate, up) = (line("gate"), line("up"));
    let swapped = renamed.replace(&gate, "first").replace(&up, &gate).replace("first", &up);
    assert!(text != renamed && renamed != swapped);
    // Without a digest, the plan does not claim to be as planc wrote it.
    let undated: Vec<&str> = swapped.lines().filter(|it| !it.starts_with("  digest ")).collect();
    folder.write("b.plan", undated.join("\n") + "\n");
    let ran = folder.planc("diff a.plan b.plan --exit-code");
    assert_eq!((ran.code, ran.stdout.as_str()), (0, same));
    assert!(ran.stderr.starts_with("warning: `b.plan` has no `digest` line"), "{}", ran.stderr);
}

#[test]
fn exit_codes() {
    let folder = Folder::new("diff_exit_codes", &[]);
    let code = |line: &str| folder.planc(line).code;
    assert_eq!(code("diff model.ron --mesh 2x4 --to-mesh 4x2"), 0);
    assert_eq!(code("diff model.ron --mesh 2x4 --to-mesh 4x2 --exit-code"), 1);
    assert_eq!(code("diff model.ron --mesh 2x4 --to-mesh 2x4 --exit-code -q"), 0);
    assert_eq!(code("diff model.ron missing.ron --mesh 2 --exit-code"), 2);
    assert_eq!(code("diff model.ron missing.ron --mesh 2"), 1);
    assert_eq!(code("diff model.ron --mesh 2"), 1);
    assert_eq!(code("diff model.ron --mesh 2 --exit-code"), 2);
}

#[test]
fn another_optimizer() {
    let folder = Folder::new("diff_optimizer", &[]);
    let set = "--to-set optimizer.weight_decay=0.2 --to-set schedule.lr=0.002";
    let text = folder.works(&format!("diff model.ron --mesh 2x4 {set}"));
    insta::assert_snapshot!("optimizer", &text);
}

#[test]
fn another_mesh() {
    let folder = Folder::new("diff_mesh", &[]);
    insta::assert_snapshot!("mesh", &folder.works("diff model.ron --mesh 2x4 --to-mesh 4x2"));
}

#[test]
fn no_prefetch() {
    let folder = Folder::new("diff_prefetch", &[]);
    insta::assert_snapshot!(
        "prefetch",
        &folder.works("diff model.ron --mesh 2x4 --to-prefetch-forward 0")
    );
}

#[test]
fn another_recipe() {
    let folder = Folder::new("diff_recipe", &[]);
    let line = "diff model.ron --mesh 2 --set precision.compute=bf16 --to-set recipe=Float8CurrentScaling()";
    insta::assert_snapshot!("recipe", &folder.works(line));
}

#[test]
fn as_json() {
    let folder = Folder::new("diff_json", &[]);
    let text = folder.works("diff model.ron --mesh 2 --to-set optimizer.eps=1e-6 --format json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(json["same"], false);
    let changes = json["changes"].as_array().expect("a list");
    let of_optimizer: Vec<_> = changes.iter().filter(|it| it["area"] == "numerics").collect();
    assert!(!of_optimizer.is_empty());
    for it in of_optimizer {
        let text = |side: &str| it[side].as_str().expect("both have it").to_string();
        assert!(text("from").contains("eps:1e-8") && text("to").contains("eps:1e-6"), "{it}");
    }
}

#[test]
fn a_meaning_that_was_cut() {
    let folder = Folder::new("diff_cut", &[]);
    let text = folder.works("compile model.ron --mesh 2 --emit meaning");
    folder.write("a.jsonl", &text[..text.len() - 20]);
    let ran = folder.planc("diff a.jsonl model.ron --mesh 2 --exit-code");
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("PL0603"), "{}", ran.stderr);
}
