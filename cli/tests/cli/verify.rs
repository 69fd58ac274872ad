//! `planc verify`: what is proved of plans, and what is said of those that somebody edited.

use std::fs;

use serde_json::Value;

use crate::{Folder, Ran, position, unwrapped, workspace};

#[test]
fn a_plan_is_proved() {
    let folder = Folder::new("verify_plan", &[]);
    folder.works("compile model.ron --mesh 2x2 -q");
    let text = folder.works("verify model.plan");
    assert!(text.lines().all(|it| it.chars().count() <= 80), "{text}");
    insta::assert_snapshot!("verify", without_digests(&text));
    assert_eq!(folder.works("verify model.ron --mesh 2x2"), text);
    assert_eq!(folder.works("verify model.plan -q"), "");
}

#[test]
fn a_certificate_is_what_is_printed_for_programs() {
    let folder = Folder::new("verify_certificate", &[]);
    let printed =
        folder.works("verify model.ron --mesh 2x2x2 --format json --write-certificate c.json");
    assert_eq!(folder.read("c.json"), printed);
    let found: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!((&found["holds"], &found["coordinates"]), (&true.into(), &8.into()));
    let properties = found["properties"].as_array().expect("a list");
    assert_eq!(properties.len(), 12);
    assert!(properties.iter().all(|it| it["holds"] == true), "{printed}");
    let of = |name: &str| properties.iter().find(|it| it["property"] == name).expect("it is there");
    assert_eq!(of("gradients")["checked"]["trained"], 21);
    // 21 parameters with two moments each, 119,104 elements of 4 bytes, and a step.
    assert_eq!(of("checkpoint")["checked"]["entries"], 84);
    assert_eq!(of("checkpoint")["checked"]["bytes"], 4 * (3 * 119_104 + 21));
    // Another program has another digest.
    let other = folder.works("verify model.ron --mesh 8 --format json");
    let other: Value = serde_json::from_str(&other).expect("JSON");
    assert_ne!(found["digest"], other["digest"]);
}

/// Text in which digests, which are others with every change of the planner, are `..`.
fn without_digests(text: &str) -> String {
    let is_digest = |it: &str| it.len() == 64 && it.bytes().all(|it| it.is_ascii_hexdigit());
    let mut res = text.to_string();
    for word in text.split_whitespace().filter(|it| is_digest(it)) {
        res = res.replace(word, "..");
    }
    res
}

#[test]
fn a_certificate_is_compared_and_the_plan_of_another_is_refused() {
    let folder = Folder::new("verify_compared", &[]);
    let json = |line: &str| -> Value {
        serde_json::from_str(&folder.works(&format!("{line} --format json"))).expect("JSON")
    };
    let compiled = json("compile model.ron --mesh 2x2");
    folder.works("verify model.plan -q --write-certificate c.json");
    let written = folder.read("c.json");
    let certificate: Value = serde_json::from_str(&written).expect("JSON");
    let inspected = json("inspect model.plan");
    for name in ["model", "digest"] {
        assert_eq!(certificate[name].as_str().map(str::len), Some(64), "{certificate}");
        assert_eq!(certificate[name], compiled[name]);
        assert_eq!(certificate[name], inspected[name]);
    }
    // The model has the same plan again.
    folder.works("verify model.plan --certificate c.json");
    folder.works("verify model.ron --mesh 2x2 --certificate c.json");
    let refused = |line: &str, expect: &[&str]| {
        let ran = folder.planc(line);
        let text = unwrapped(&ran.stderr);
        assert_eq!(ran.code, 1, "{text}");
        assert!(text.contains("PL0655"), "{text}");
        for it in expect {
            assert!(text.contains(it), "{it} is not in {text}");
        }
    };
    let of = |name: &str| certificate[name].as_str().expect("a digest");
    let other = json("verify model.ron --mesh 4");
    let now = other["digest"].as_str().expect("a digest");
    refused(
        "verify model.ron --mesh 4 --certificate c.json",
        &[of("digest"), now, "another plan of the same model", "`mesh` is [[\"dp\",2],[\"tp\",2]]"],
    );
    refused(
        "verify model.ron --mesh 2x2 --set schedule.lr=2e-3 --certificate c.json",
        &[of("digest"), of("model"), "the certificate is of another plan: `digest` is"],
    );
    // A certificate that was edited is not one of the plan, whichever fact was.
    let races = "`properties.races.checked.ordered pairs` is 1, and of this plan ";
    let edits: [(&str, Value, &str); 4] = [
        ("/model", "0".repeat(64).into(), "`model` is \"0000"),
        ("/coordinates", 5.into(), "`coordinates` is 5, and of this plan 4"),
        ("/properties/6/checked/ordered pairs", 1.into(), races),
        ("/properties/0/claim", "all".into(), "`properties.program.claim` is \"all\", and of"),
    ];
    for (field, value, expect) in edits {
        let mut edited = certificate.clone();
        *edited.pointer_mut(field).unwrap_or_else(|| panic!("{field}: {certificate}")) = value;
        folder.write("edited.json", edited.to_string());
        refused("verify model.plan --certificate edited.json", &["was edited", expect]);
    }
    let mut fewer = certificate.clone();
    fewer["properties"].as_array_mut().expect("a list").pop();
    folder.write("fewer.json", fewer.to_string());
    let absent = "`properties.kernels.claim` is absent, and of this plan";
    refused("verify model.plan --certificate fewer.json", &["was edited", absent]);
    folder.write("empty.json", "{}");
    refused("verify model.plan --certificate empty.json", &["no certificate"]);
    let ran = folder.planc("verify model.plan --certificate missing.json");
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    assert!(ran.stderr.contains("PL0601"), "{}", ran.stderr);
    assert_eq!(folder.read("c.json"), written, "comparing writes nothing");
}

/// A plan that was edited by hand runs if it is proved; planc says that it is not the one that it wrote.
#[test]
fn a_plan_that_was_edited_is_said_to_be() {
    let folder = Folder::new("verify_edited_note", &[]);
    folder.edit("2x2", |lines| {
        let at = position(lines, |it| it.starts_with("  run ("));
        lines[at] = lines[at].replace("steps:20", "steps:1");
    });
    for line in ["verify edited.plan", "inspect edited.plan", "run edited.plan"] {
        let ran = folder.planc(line);
        let text = unwrapped(&ran.stderr);
        assert_eq!(ran.code, 0, "{line}: {text}");
        assert!(text.contains("`edited.plan` was edited after planc wrote it"), "{line}: {text}");
    }
    // Comments and the spacing are nobody's meaning.
    let plan = folder.read("model.plan");
    folder.write("commented.plan", format!("; a comment\n{plan}"));
    folder.works("verify commented.plan -q");
    let edited = folder.read("edited.plan");
    let lines: Vec<&str> = edited.lines().filter(|it| !it.starts_with("  digest ")).collect();
    // The model's digest of an edited plan is not believed, nor without the line that tells.
    let forged: Vec<String> = lines
        .iter()
        .map(|it| match it.starts_with("  model ") {
            true => format!("  model {}", "0".repeat(64)),
            false => it.to_string(),
        })
        .collect();
    folder.write("forged.plan", forged.join("\n"));
    for line in ["verify forged.plan", "inspect forged.plan", "run forged.plan"] {
        let ran = folder.planc(line);
        let text = unwrapped(&ran.stderr);
        assert_eq!(ran.code, 0, "{line}: {text}");
        assert!(text.contains("`forged.plan` has no `digest` line"), "{line}: {text}");
        assert!(!ran.stdout.contains("0000000000"), "{line}: {}", ran.stdout);
    }
    for plan in ["edited", "forged"] {
        let found = folder.planc(&format!("verify {plan}.plan --format json")).stdout;
        let found: Value = serde_json::from_str(&found).expect("JSON");
        assert_eq!(found["model"], Value::Null, "{plan}");
    }
    // A plan that claims no model needs no line.
    let unclaimed: Vec<&str> = lines.into_iter().filter(|it| !it.starts_with("  model ")).collect();
    folder.write("unclaimed.plan", unclaimed.join("\n"));
    folder.works("verify unclaimed.plan -q");
}

/// What `verify` says of a plan for 2x2 after an edit: exit code 1, and no certificate.
#[track_caller]
fn edited(test: &str, edit: impl Fn(&mut Vec<String>)) -> Ran {
    let folder = Folder::new(test, &[]);
    edited_in(&folder, "2x2", edit)
}

/// The same of `model.ron` in a folder, on a mesh.
#[track_caller]
fn edited_in(folder: &Folder, mesh: &str, edit: impl Fn(&mut Vec<String>)) -> Ran {
    folder.edit(mesh, edit);
    let ran = folder.planc("verify edited.plan --write-certificate c.json");
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    assert!(!folder.0.join("c.json").exists(), "{}", ran.stdout);
    let run = folder.planc("run edited.plan --steps 1");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{}", run.stderr);
    ran
}

#[test]
fn a_deleted_wait_is_a_race_between_two_named_accesses() {
    let ran = edited("verify_wait", |lines| {
        let at = position(lines, |it| it.contains(": wait e0"));
        lines.remove(at);
    });
    insta::assert_snapshot!("verify_race", without_digests(&(ran.stdout + &ran.stderr)));
}

// C53 of the reports: the order of collectives is a cycle, which is named.
#[test]
fn an_early_wait_is_a_named_cycle() {
    let ran = edited("verify_cycle", |lines| {
        let records = |it: &str| it.strip_prefix("  s0: record ").map(str::to_string);
        let first = position(lines, |it| records(it).is_some());
        let wait = position(lines, |it| it.starts_with("  s1: wait "));
        assert!(first < wait, "communication of weights waits for the backward pass");
        let wait = lines.remove(wait);
        let step = position(lines, |it| it == "  step:");
        lines.insert(step + 1, wait);
    });
    insta::assert_snapshot!("verify_cycle", ran.stderr);
}

#[test]
fn a_deleted_parameter_line_is_missed() {
    let ran = edited("verify_param", |lines| {
        let at = position(lines, |it| it.starts_with("  param %model.norm.weight"));
        lines.remove(at);
    });
    assert!(ran.stderr.contains("no `param` line says how it"), "{}", ran.stderr);
}

#[test]
fn ids_that_no_table_has_are_refused() {
    let ran = edited("verify_vocab", |lines| {
        let at = position(lines, |it| it.starts_with("  run ("));
        lines[at] = lines[at].replace("vocab:256", "vocab:300");
    });
    assert!(ran.stderr.contains("ids are below 300"), "{}", ran.stderr);
}

/// A loss in chunks looks its labels up in pieces: 256 columns of logits, though there are 300 rows of the table.
#[test]
fn ids_that_no_chunk_of_logits_has_are_refused() {
    let replace = [
        ("vocab: 256, dim: 64)", "vocab: 300, dim: 64)"),
        ("LmHead(name: \"lm_head\"", "LmHead(name: \"lm_head\", chunks: 4, vocab: 256"),
    ];
    let folder = Folder::new("verify_chunks", &replace);
    let ran = edited_in(&folder, "2x2", |lines| {
        let at = position(lines, |it| it.starts_with("  run ("));
        lines[at] = lines[at].replace("vocab:256", "vocab:300");
    });
    assert!(ran.stderr.contains("ids are below 300"), "{}", ran.stderr);
}

#[test]
fn a_run_that_no_model_has_is_refused() {
    let check = |from: &str, to: &str, expect: &str| {
        let ran = edited("verify_run", |lines| {
            let at = position(lines, |it| it.starts_with("  run ("));
            assert!(lines[at].contains(from), "{}", lines[at]);
            lines[at] = lines[at].replace(from, to);
        });
        let text = unwrapped(&ran.stderr);
        assert!(text.contains(expect) && text.contains("edited.plan:2:"), "{text}");
    };
    let rate = "at least 0 and finite";
    check("lr:0.001", "lr:NaN", &format!("schedule.lr is NaN, and must be {rate}"));
    check("lr:0.001", "lr:-0.001", &format!("schedule.lr is -0.001, and must be {rate}"));
    check("lr:0.001", "lr:1e400", &format!("schedule.lr is inf, and must be {rate}"));
    let decay = "decay:Cosine(until:5,min:-1)";
    check("decay:Constant", decay, &format!("schedule.decay.min is -1, and must be {rate}"));
    let decay = "decay:Linear(until:0,min:0)";
    check("decay:Constant", decay, "schedule.decay.until is 0, and must be more than warmup");
    check("steps:20", "steps:0", "steps is 0, and must be at least 1");
    check("vocab:256", "vocab:0", "vocab is 0, and must be at least 1");
    let other = |batch: &str| format!("a batch is {batch} tokens, and `tokens` is i32[8, 32]");
    check("global_batch:8", "global_batch:16", &other("16 x 32"));
    check("global_batch:8,sequence:32", "global_batch:16,sequence:16", &other("16 x 16"));
    check("global_batch:8", "global_batch:18446744073709551615", "must be at most 2^40");
}

#[test]
fn a_gradient_that_reaches_no_optimizer_is_missed() {
    let ran = edited("verify_gradient", |lines| {
        let at = position(lines, |it| it.starts_with("  s0: %model.norm.weight, "));
        lines.remove(at);
    });
    let text = unwrapped(&ran.stderr);
    assert!(text.contains("counts %model.norm.weight.grad, which reaches no optimizer"), "{text}");
}

/// Numbers that no `model.ron` may have are no plan's either: attributes of ops, inits, the run.
/// An optimizer that reads another factor, or another condition, would train without clipping, or in a step that is skipped.
#[test]
fn optimizers_read_the_factor_and_the_condition_of_clip_scale() {
    for from in ["%grad_scale", "%applied"] {
        let ran = edited("verify_scale", |lines| {
            let at = position(lines, |it| it.contains("= adamw("));
            lines[at] = lines[at].replacen(from, "%loss.count.sum", 1);
        });
        let text = unwrapped(&ran.stderr);
        assert!(text.contains("breaks a promise (`gradients`)"), "{text}");
        assert!(text.contains("`clip_scale` makes %grad_scale and %applied for that"), "{text}");
    }
}

#[test]
fn numbers_out_of_range_are_refused_at_their_line() {
    let check = |from: &str, to: &str, expect: &str| {
        let ran = edited("verify_numbers", |lines| {
            let at = position(lines, |it| it.contains(from));
            lines[at] = lines[at].replacen(from, to, 1);
        });
        let text = unwrapped(&ran.stderr);
        assert!(text.contains(expect), "{text}");
        assert!(text.contains("edited.plan:"), "{text}");
    };
    check("beta2:0.95", "beta2:9.5", "`beta2` is 9.5, and must be at least 0 and below 1");
    check("beta2:0.95", "beta2:NaN", "`beta2` is NaN, and must be at least 0 and below 1");
    check(",eps:1e-8", ",eps:-1e-8", "`eps` is -1e-8, and must be more than 0 and finite");
    check("rms_norm(eps:1e-5", "rms_norm(eps:-1.0", "`eps` is -1, and must be more than 0");
    let clip = "= clip_scale(max_norm:Some(0.0)) %";
    check("= clip_scale %", clip, "`max_norm` is 0, and must be more than 0 and finite");
    check("theta:10000.0", "theta:inf", "`theta` is inf, and must be more than 0 and finite");
    check(
        "lr:0.001",
        "lr:1e300",
        "schedule.lr is 1e300, and must be at least 0 and finite; in f32",
    );
    check("std:0.02", "std:NaN", "init: `std` is NaN, and must be at least 0 and finite");
    check("mean:0.0", "mean:inf", "init: `mean` is inf, and must be finite");
}

/// An alias is a further name of one parameter. One that is another parameter would save this under its name.
#[test]
fn an_alias_that_is_the_name_of_something_else_is_refused_at_its_line() {
    let check = |edits: &[(&str, &str)], expect: &str| {
        let folder = mlp("verify_alias", &[]);
        let mut line = 0;
        let ran = edited_in(&folder, "2x2", |lines| {
            for (param, aliases) in edits {
                let at = position(lines, |it| it.starts_with(&format!("  param %{param} ")));
                lines[at] = format!("{} aliases=({aliases})", lines[at]);
            }
        });
        for (at, it) in folder.read("edited.plan").lines().enumerate() {
            if it.contains(" aliases=") {
                line = at + 1;
            }
        }
        let text = unwrapped(&ran.stderr);
        assert!(text.contains(expect), "{text}");
        assert!(text.contains(&format!("edited.plan:{line}:")), "{text}");
    };
    let another = "has the alias `mlp.up.weight`, which is another parameter";
    check(&[("own.up.weight", "%mlp.up.weight")], another);
    check(&[("own.up.weight", "%own.up.weight")], "has its own name `own.up.weight` as an alias");
    check(&[("own.up.weight", "%a, %a")], "has the alias `a` twice");
    let twice = "has the alias `a`, which is an alias of %mlp.up.weight already";
    check(&[("mlp.up.weight", "%a"), ("own.up.weight", "%a")], twice);
}

#[test]
fn the_alias_of_a_tie_is_proved() {
    let tied = "sequence: 32, tied: [(\"lm_head.weight\", \"model.embed_tokens.weight\")],";
    let folder = Folder::new("verify_tied", &[("sequence: 32,", tied)]);
    folder.works("compile model.ron --mesh 2x2 -q");
    assert!(folder.read("model.plan").contains(" aliases=(%lm_head.weight)"));
    folder.works("verify model.plan");
}

/// The proof does not see that two weights of one shape exchanged their gradients, and says so.
#[test]
fn exchanged_gradients_pass_and_no_property_claims_that_they_would_not() {
    let folder = mlp("verify_exchanged", &[]);
    folder.edit("2x2", |lines| {
        let [gate, up] = ["gate", "up"].map(|it| {
            position(lines, |line| line.starts_with(&format!("  s0: %own.{it}.weight, ")))
        });
        lines[gate] = lines[gate].replace("%own.gate.weight.grad", "%own.up.weight.grad");
        lines[up] = lines[up].replace("%own.up.weight.grad", "%own.gate.weight.grad");
    });
    let ran = folder.planc("verify edited.plan");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let text = unwrapped(&ran.stdout);
    assert!(text.contains("each optimizer gets one tensor of its shape from `step`"), "{text}");
    assert!(text.contains("not proved: that the plan computes its model"), "{text}");
    let json = folder.planc("verify edited.plan --format json").stdout;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["not_proved"].as_str().is_some_and(|it| it.contains("exchange")), "{json}");
}

/// A folder with the MLP example, in which some text is replaced.
fn mlp(test: &str, replace: &[(&str, &str)]) -> Folder {
    let folder = Folder::new(test, &[]);
    let mut model = fs::read_to_string(workspace("examples/mlp.ron")).expect("an example");
    for (from, to) in replace {
        assert!(model.contains(from), "the example has no `{from}`");
        model = model.replace(from, to);
    }
    folder.write("model.ron", model);
    folder
}

#[test]
fn a_result_that_nothing_makes_is_missed() {
    let ran = edited_in(&mlp("verify_result", &[]), "1", |lines| {
        let at = position(lines, |it| it.starts_with("  s0: %loss = div "));
        lines.remove(at);
    });
    let text = unwrapped(&ran.stderr);
    assert!(text.contains("holds the result `loss`, which nothing makes"), "{text}");
}

// Without a norm, nothing else reads the sum of a gradient.
#[test]
fn a_sum_over_micro_batches_that_no_optimizer_reads_is_missed() {
    let replace =
        [("momentum: 0.9", "momentum: 0"), ("sequence: 8,", "sequence: 8, micro_batches: 2,")];
    let ran = edited_in(&mlp("verify_sum", &replace), "1", |lines| {
        lines.retain(|it| {
            !it.contains("%head.weight.sumsq =") && !it.contains("%head.weight = sgd ")
        });
        lines.iter_mut().for_each(|it| *it = it.replace(", %head.weight.sumsq", ""));
    });
    let text = unwrapped(&ran.stderr);
    assert!(text.contains("is a sum over micro-batches, and `update` does not use it"), "{text}");
}

#[test]
fn thousands_of_early_waits_are_one_named_cycle() {
    const N: usize = 4000;
    let ran = edited("verify_many_waits", |lines| {
        let first: usize = 1000;
        lines[0] = lines[0].replace("events=57 ", &format!("events={} ", first + N));
        let step = position(lines, |it| it == "  step:");
        let update = position(lines, |it| it == "  update:");
        let all = |what: &str| {
            (first..first + N).map(|it| format!("  s0: {what} e{it}")).collect::<Vec<_>>()
        };
        lines.splice(update..update, all("record"));
        lines.splice(step + 1..step + 1, all("wait"));
    });
    let text = unwrapped(&ran.stderr);
    assert_eq!(text.matches("a cycle of waits").count(), 1, "{text}");
}

#[test]
fn copies_that_are_too_many_to_ask_are_counted() {
    // 262,144 ranks.
    let folder = Folder::new("verify_many_ranks", &[("batch: Global(8)", "batch: Global(131072)")]);
    let printed = folder.works("verify model.ron --mesh 131072x2 --format json");
    let found: Value = serde_json::from_str(&printed).expect("JSON");
    let properties = found["properties"].as_array().expect("a list");
    let checkpoint = properties.iter().find(|it| it["property"] == "checkpoint");
    let checked = &checkpoint.expect("it is there")["checked"];
    let skipped = &checked["kinds over too many coordinates to ask"];
    assert_eq!(skipped, &checked["kinds of copies"]);
    assert!(skipped.as_u64() > Some(0), "{checked}");
}
