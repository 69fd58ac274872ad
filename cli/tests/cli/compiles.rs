//! Models that compile on every mesh, train the same losses there, and are labelled as PyTorch labels them.

use std::fs;

use crate::{Folder, position, unwrapped, workspace};

/// A folder with a model of `cases` as `model.ron`.
#[track_caller]
fn case(test: &str, name: &str) -> Folder {
    let folder = Folder::new(test, &[]);
    let path = workspace(&format!("cli/tests/cli/cases/{name}.ron"));
    folder.write("model.ron", fs::read_to_string(path).expect("a case"));
    folder
}

/// Losses and gradient norms of three steps, as `run` prints them.
#[track_caller]
fn steps(folder: &Folder, line: &str) -> Vec<String> {
    let ran = folder.planc(&format!("run model.ron --steps 3 {line}"));
    assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
    let steps = ran.stdout.lines().filter(|it| it.starts_with("step:"));
    let steps = steps.map(|it| it.split("lr:").next().expect("a part").to_string());
    let steps: Vec<String> = steps.collect();
    assert_eq!(steps.len(), 3, "{}", ran.stdout);
    steps
}

/// The model trains alike on `first` and on all other meshes, with these options.
#[track_caller]
fn check(name: &str, set: &str, first: &str, meshes: &[&str]) {
    let folder = case(&format!("compiles_{name}"), name);
    let expect = steps(&folder, &format!("--mesh {first} {set}"));
    for mesh in meshes {
        assert_eq!(steps(&folder, &format!("--mesh {mesh} {set}")), expect, "{name} on {mesh}");
    }
}

#[test]
fn parameters_with_one_gradient() {
    for name in ["two_weights", "two_biases", "one_bias", "modules"] {
        check(name, "", "1", &["2", "1x2", "2x2", "2x4"]);
    }
}

#[test]
fn sizes_that_tp_does_not_divide() {
    check("ffn_uneven", "", "1", &["1x2", "2x2", "1x4"]);
    check("norm_tp_uneven", "--set batch=Global(4)", "1x1", &["1x2", "2x2", "4x2"]);
}

/// The report of `verify` on an edited plan for one rank, in which two parameters have one gradient.
#[track_caller]
fn edited(test: &str, edit: impl Fn(&mut Vec<String>)) -> String {
    let folder = case(test, "two_weights");
    folder.edit("1", edit);
    let ran = folder.planc("verify edited.plan");
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    unwrapped(&(ran.stdout + &ran.stderr))
}

#[test]
fn the_proof_counts_distinct_gradients_and_the_norm_counts_parameters() {
    let folder = case("one_gradient_proof", "two_weights");
    let text = folder.works("verify model.ron --mesh 1 --format json");
    let found: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let properties = found["properties"].as_array().expect("a list");
    let of = properties.iter().find(|it| it["property"] == "gradients").expect("it is there");
    // Embedding, head, and two weights with one gradient.
    assert_eq!(
        (&of["checked"]["trained"], &of["checked"]["distinct gradients"]),
        (&4.into(), &3.into())
    );
    let sum = |it: &str| it.contains("%grad_sumsq = add ");
    // The shared gradient is a term for each of its parameters: once is too few, three times too many.
    let once = edited("one_gradient_once", |lines| {
        let at = position(lines, sum);
        let (head, terms) = lines[at].split_once("add ").expect("terms");
        let mut terms: Vec<&str> = terms.split(", ").collect();
        let all = terms.len();
        terms.dedup();
        assert_eq!(terms.len() + 1, all, "{}", lines[at]);
        lines[at] = format!("{head}add {}", terms.join(", "));
    });
    assert!(once.contains("is 1 times in the gradient's norm and trains 2 parameter(s)"), "{once}");
    let thrice = edited("one_gradient_thrice", |lines| {
        let at = position(lines, sum);
        let (_, terms) = lines[at].split_once("add ").expect("terms");
        let terms: Vec<&str> = terms.split(", ").collect();
        let twice = terms.windows(2).find(|it| it[0] == it[1]).expect("a gradient of two")[0];
        lines[at] = format!("{}, {twice}", lines[at]);
    });
    assert!(thrice.contains("is 3 times in the gradient's norm"), "{thrice}");
}

/// An optimizer that reads the gradient of another parameter leaves its own to nobody.
#[test]
fn the_gradient_of_another_parameter() {
    let report = edited("one_gradient_other", |lines| {
        let adam = |lines: &[String], name: &str| {
            position(lines, |it| it.contains("= adamw") && it.contains(&format!("s0: %{name}, ")))
        };
        let grad = |line: &str| {
            let operands: Vec<&str> = line.split(", ").collect();
            operands[operands.len() - 4].to_string()
        };
        let (own, other) = (adam(lines, "emb.weight"), adam(lines, "head.weight"));
        lines[own] = lines[own].replace(&grad(&lines[own]), &grad(&lines[other]));
    });
    assert!(report.contains("values") || report.contains("gradients"), "{report}");
}

/// PyTorch's notation of a parameter, or of a state, as `inspect` prints it.
#[track_caller]
fn label(folder: &Folder, mesh: &str, name: &str) -> String {
    let text = folder.works(&format!("inspect model.ron --mesh {mesh} --states --param {name}"));
    let line = text.lines().find(|it| it.trim_start().starts_with("torch ")).expect("a label");
    line.split(" or ").nth(1).expect("the short form").to_string()
}

/// FSDP2 labels a weight on every axis that it is given, also one of size 1.
#[test]
fn axes_of_size_1_are_labelled_like_those_of_fsdp2() {
    let folder = Folder::new("labels_of_size_1", &[]);
    let q = "model.layers.0.self_attn.q_proj.weight";
    let o = "model.layers.0.self_attn.o_proj.weight";
    for (mesh, name, expect) in [
        ("2x2", q, "[SS(0, 2), S(0)]"),
        ("1x2", q, "[SS(0, 2), S(0)]"),
        ("2x1", q, "[S(0), S(0)]"),
        ("1x1", q, "[S(0), S(0)]"),
        ("1", q, "[S(0)]"),
        ("1x4", "model.layers.0.self_attn.k_proj.weight", "[SS(0, 4), S(0)]"),
        ("1x2", o, "[S(0), S(1)]"),
        ("2x1", o, "[S(0), S(1)]"),
        ("1x2", "model.norm.weight", "[S(0), R]"),
        ("2x1", "model.norm.weight", "[S(0), R]"),
        ("dp_replicate=1,dp_shard=2,tp=1", q, "[R, S(0), S(0)]"),
        ("dp_replicate=2,dp_shard=1,tp=2", q, "[R, SS(0, 2), S(0)]"),
    ] {
        assert_eq!(label(&folder, mesh, name), expect, "{name} on {mesh}");
        let moment = format!("{name}.exp_avg");
        assert_eq!(label(&folder, mesh, &moment), expect, "{moment} on {mesh}");
    }
    // From a plan, as from the model, and in JSON.
    folder.works("compile model.ron --mesh 1x2 -q");
    let text = folder.works(&format!("inspect model.plan --param {q} --format json"));
    assert!(unspaced(&text).contains(r#""torch":["StridedShard(0,2)","Shard(0)"]"#), "{text}");
}

fn unspaced(text: &str) -> String {
    text.split_whitespace().collect()
}

/// A label that says something else than the buffer's layout is refused.
#[test]
fn a_label_of_another_layout() {
    let folder = Folder::new("label_of_another_layout", &[]);
    folder.edit("1x2", |lines| {
        let at =
            position(lines, |it| it.starts_with("  param ") && it.contains("label=[tp.dp, _]"));
        lines[at] = lines[at].replace("label=[tp.dp, _]", "label=[dp, tp]");
    });
    let ran = folder.planc("verify edited.plan");
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    let text = unwrapped(&(ran.stdout + &ran.stderr));
    assert!(text.contains("has the label [dp, tp], which is another layout"), "{text}");
}
