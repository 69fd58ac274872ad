//! `planc run --save` and `--load`, and what is left when the process or the disk gives up.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::{Folder, names};

/// Lines of a run with `--format json`.
fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|it| serde_json::from_str(it).expect("JSON")).collect()
}

/// Losses by step.
fn losses(text: &str) -> Vec<(u64, f64)> {
    let step = |it: &Value| Some((it["step"].as_u64()?, it["loss"].as_f64()?));
    lines(text).iter().filter_map(step).collect()
}

const RUN: &str = "run model.ron --mesh 2x2 --format json";

#[test]
fn a_run_goes_on_where_it_was_saved() {
    let folder = Folder::new("save_and_load", &[]);
    let more = "--save ckpt --save-every 3 --keep 2 --metrics log.jsonl";
    let straight = folder.works(&format!("{RUN} --steps 6 {more}"));
    let saved: Vec<String> = lines(&straight)
        .iter()
        .filter(|it| it["event"] == "saved")
        .filter_map(|it| Some(it["path"].as_str()?.to_string()))
        .collect();
    assert_eq!(saved, ["ckpt/step-3", "ckpt/step-6"]);
    let resumed = folder.works(&format!("{RUN} --steps 6 --load ckpt/step-3"));
    assert_eq!(lines(&resumed)[1]["step"], 3);
    assert_eq!(losses(&resumed), losses(&straight)[3..]);
    let text = folder.works("run model.ron --mesh 4 --steps 8 --load ckpt --metrics log.jsonl");
    let steps: Vec<u64> =
        lines(&folder.read("log.jsonl")).iter().filter_map(|it| it["step"].as_u64()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(text.contains("resumed from ckpt/step-6 at step 7; read "), "{text}");
    assert!(text.contains("trained 2 steps"), "{text}");
}

/// A checkpoint says which model and plan saved it. Another mesh loads it without a word, another model with one.
#[test]
fn a_checkpoint_knows_the_model_that_saved_it() {
    let folder = Folder::new("save_digests", &[]);
    folder.works(&format!("{RUN} --steps 2 --save ckpt"));
    let plan: Value =
        serde_json::from_str(&folder.works("verify model.ron --mesh 2x2 --format json"))
            .expect("JSON");
    let shown = folder.works("ckpt show ckpt");
    for (key, name) in [("model", "model"), ("plan", "digest")] {
        let digest = plan[name].as_str().expect("a digest");
        assert!(shown.contains(&format!("planc.digest.{key} = '{digest}'")), "{shown}");
    }
    folder.works("run model.ron --mesh 8 --steps 3 --load ckpt --format json");
    let other = "run model.ron --mesh 8 --set schedule.lr=2e-3 --steps 3 --load ckpt";
    let ran = folder.planc(other);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let text = format!("{}{}", ran.stdout, ran.stderr);
    assert!(text.contains("another model saved this checkpoint"), "{text}");
    assert!(text.contains(plan["model"].as_str().expect("a digest")), "{text}");
}

/// With no step left to train, what was loaded is saved as another mesh holds it.
#[test]
fn what_is_loaded_can_be_saved_at_once() {
    let folder = Folder::new("save_anew", &[]);
    folder.works(&format!("{RUN} --steps 2 --save here"));
    let ran = folder.planc("run model.ron --mesh 2x2x2 --steps 2 --load here --save there");
    assert!(ran.stderr.contains("nothing to train"), "{}", ran.stderr);
    assert!(ran.stdout.contains("saved there/step-2: "), "{}", ran.stdout);
    folder.works("ckpt verify there");
    folder.works("ckpt diff here there");
    assert!(folder.0.join("there/step-2/__7_0.distcp").exists());
}

#[test]
fn a_checkpoint_of_another_model_is_one_report() {
    let folder = Folder::new("another_model", &[]);
    folder.works("run model.ron --mesh 2 --steps 1 --save ckpt");
    let set = "--set layers[0].vocab=300 --set layers[1].n=1";
    let ran = folder.planc(&format!("run model.ron --mesh 2 --load ckpt {set} --format json"));
    assert_eq!(ran.code, 1);
    let report: Value = serde_json::from_str(&ran.stderr).expect("one object");
    assert_eq!(report["code"], "PL0752");
    let message = report["message"].as_str().expect("text");
    for line in [
        "does not fit the plan: 6 of another shape, 36 unexpected\n",
        "shape: `model.lm_head.weight` is [256, 64] and must be [300, 64]",
        "\nand 26 more unexpected",
        "unexpected: `model.model.layers.1.input_layernorm.weight`",
    ] {
        assert!(message.contains(line), "{message}");
    }
    // Six shapes, and nine parameters of a layer with two moments and a step.
    assert_eq!(message.lines().count(), 1 + 6 + 10 + 1, "{message}");
    let text = folder.planc(&format!("run model.ron --mesh 2 --load ckpt {set}")).stderr;
    assert!(text.contains("does not fit the plan"), "{text}");
    assert!(text.contains("help: load it with the model"), "{text}");
}

#[test]
fn weights_alone_are_one_line() {
    let folder = Folder::new("weights_alone", &[]);
    folder.works("run model.ron --mesh 2 --steps 1 --save ckpt -q");
    folder.works("ckpt export hf ckpt -o hf");
    folder.works("ckpt import hf hf --model model.ron -o weights");
    let run = "run model.ron --mesh 2 --steps 1 --format json --load";
    let report: Value =
        serde_json::from_str(&folder.planc(&format!("{run} weights")).stderr).expect("one object");
    let message = report["message"].as_str().expect("text");
    let line = "the checkpoint has no state of an optimizer; add `--allow-missing 'optim.*'` to load weights alone";
    assert_eq!(message.lines().nth(1), Some(line), "{message}");
    assert_eq!(message.lines().count(), 2, "{message}");
    // With all permitted, a checkpoint of nothing would go unnoticed.
    let ran = folder.planc(&format!("{run} hf --allow-missing * --allow-unexpected *"));
    let warning = lines(&ran.stdout).into_iter().find(|it| it["event"] == "warning");
    let warning = warning.map(|it| it["message"].to_string()).unwrap_or_default();
    assert!(warning.contains("no parameter at all is in the checkpoint"), "{}", ran.stdout);
    let text = folder.works(&format!("{run} weights --allow-missing optim.*"));
    assert!(!text.contains("no parameter"), "{text}");
}

#[test]
fn there_must_be_a_checkpoint() {
    let folder = Folder::new("no_checkpoint", &[]);
    let ran = folder.planc("run model.ron --mesh 1 --load nowhere");
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("nowhere"), "{}", ran.stderr);
    let ran = folder.planc("run model.ron --mesh 1 --keep 2");
    assert!(ran.stderr.contains("--save"), "{}", ran.stderr);
}

/// A small program that starts `planc` with a limit on the size of files, so that writes fail as they
/// do on a full disk.
#[test]
fn a_file_that_cannot_grow_is_named() {
    let folder = Folder::new("file_limit", &[]);
    folder.works("run model.ron --mesh 2 --steps 1 --save ckpt");
    let run = |more: &str| {
        let planc = env!("CARGO_BIN_EXE_planc");
        // Blocks of 512 or 1024 bytes: less than a rank writes.
        let line = format!(
            "trap '' XFSZ; ulimit -f 200; exec {planc} run model.ron --mesh 2 --save ckpt --load ckpt {more}"
        );
        let ran = Command::new("bash").arg("-c").arg(line).current_dir(&folder.0).output();
        let ran = ran.expect("bash starts");
        (ran.status.code(), String::from_utf8(ran.stderr).expect("text"))
    };
    for more in ["--steps 2", "--steps 2 --async-save"] {
        let (code, stderr) = run(more);
        assert_eq!(code, Some(1), "{stderr}");
        let words = stderr.split_whitespace().collect::<Vec<&str>>().join(" ").replace(" | ", " ");
        assert!(words.contains("`ckpt/step-2` was not saved: rank"), "{stderr}");
        assert!(words.contains("_0.distcp`: File too large"), "{stderr}");
        assert!(
            words.contains("help: `df -h` and `df -i` show the space that is left"),
            "{stderr}"
        );
    }
    // It goes on after step 2; that the last is not there must be heard by who started it.
    for more in ["", "--async-save"] {
        let (code, stderr) =
            run(&format!("--steps 3 --save-every 1 --save-failed continue {more}"));
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains("warning: checkpoint `ckpt/step-2` was not saved"), "{stderr}");
        assert!(stderr.contains("error[PL0751]"), "{stderr}");
        assert!(!stderr.contains("warning: checkpoint `ckpt/step-3`"), "{stderr}");
    }
    folder.works("run model.ron --mesh 2 --steps 3 --load ckpt/step-1");
    assert!(!folder.0.join("ckpt/step-2").exists());
}

#[test]
fn a_folder_has_the_checkpoints_of_one_run() {
    let folder = Folder::new("one_run", &[]);
    let run = "run model.ron --mesh 2 --save ckpt --save-every 1";
    let steps = |folder: &Folder| {
        let mut res = names(&folder.0.join("ckpt"));
        res.sort();
        res
    };
    // The same command line starts, and goes on.
    let started = folder.works(&format!("{run} --steps 2 --resume"));
    assert!(started.contains("weights: random"), "{started}");
    let resumed = folder.works(&format!("{run} --steps 4 --resume"));
    assert!(resumed.contains("resumed from ckpt/step-2 at step 3"), "{resumed}");
    folder.works("run model.ron --mesh 2 --steps 1 --save other");
    for more in ["", "--load other"] {
        let ran = folder.planc(&format!("{run} --steps 3 --seed 9 {more} --format json"));
        assert_eq!((ran.code, ran.stdout.contains("loss")), (1, false), "{}", ran.stdout);
        let report: Value = serde_json::from_str(&ran.stderr).expect("one object");
        assert_eq!(report["code"], "PL0755");
        assert_eq!(report["message"], "`ckpt` holds checkpoints of another run, up to step 4");
    }
    // What came after the step that it goes on from did not happen.
    folder.works(&format!("{run} --steps 3 --load ckpt/step-2"));
    assert_eq!(steps(&folder), ["latest", "step-1", "step-2", "step-3"]);
    folder.works("run model.ron --mesh 2 --steps 2 --save ckpt --overwrite");
    assert_eq!(steps(&folder), ["latest", "step-2"]);
    let ran = folder.planc("run model.ron --mesh 2 --save ckpt --resume --load ckpt");
    assert!(ran.code == 2 && ran.stderr.contains("cannot be used with"), "{}", ran.stderr);
}

/// Schedulers start a job again while the old process still lives.
#[test]
fn a_second_run_on_one_folder_is_refused_by_name() {
    let folder = Folder::new("two_writers", &[]);
    let run = "run model.ron --mesh 2 --save ckpt --save-every 1 --keep 2 --resume";
    let mut first = Command::new(env!("CARGO_BIN_EXE_planc"))
        .args(format!("{run} --steps 1000000").split_whitespace())
        .current_dir(&folder.0)
        .stdout(Stdio::null())
        .spawn()
        .expect("planc starts");
    while !folder.0.join("ckpt/latest").exists() {
        assert!(first.try_wait().expect("it is a child").is_none(), "it runs on");
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = folder.planc(&format!("{run} --steps 2 --format json"));
    let importing = folder.planc("ckpt import full none.safetensors -o ckpt");
    first.kill().expect("it runs");
    first.wait().expect("it has ended");
    assert_eq!((second.code, second.stdout.contains("loss")), (1, false), "{}", second.stdout);
    let report: Value = serde_json::from_str(&second.stderr).expect("one object");
    assert_eq!(report["code"], "PL0712");
    let message = report["message"].as_str().expect("text");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux has it");
    assert!(message.starts_with("`ckpt` is locked by run "), "{message}");
    assert!(
        message.ends_with(&format!(", process {} on {}", first.id(), host.trim())),
        "{message}"
    );
    assert_eq!(importing.code, 1);
    // Its process has ended, so that the next goes on at once, and without a word.
    assert!(folder.0.join("ckpt/.lock").exists());
    let last = fs::read_to_string(folder.0.join("ckpt/latest")).expect("it was saved");
    let last: u64 = last.strip_prefix("step-").expect("a step").parse().expect("a number");
    let resumed = folder.works(&format!("{run} --steps {}", last + 2));
    assert!(resumed.contains("resumed from ckpt/step-"), "{resumed}");
    let left = names(&folder.0.join("ckpt"));
    assert!(left.iter().all(|it| !it.starts_with('.')), "{left:?}");
}

/// Of the same size, and with an archive that is whole: what is beside it says what it should be.
#[test]
fn a_file_of_an_older_step_is_refused() {
    let folder = Folder::new("older_step", &[]);
    folder.works("run model.ron --mesh 2 --steps 2 --save ckpt --save-every 1");
    let file = |step: u64| folder.0.join(format!("ckpt/step-{step}/__1_0.distcp"));
    fs::copy(file(1), file(2)).expect("copied");
    for command in [
        "run model.ron --mesh 2 --steps 3 --load ckpt",
        "run model.ron --mesh 4 --steps 3 --load ckpt",
        "ckpt reshard ckpt --plan model.ron --mesh 4 -o out",
        "ckpt export full ckpt -o full.safetensors",
        "ckpt export hf ckpt -o hf",
    ] {
        check_refused(&folder, command, "__1_0.distcp");
    }
}

/// A bit that flipped after it was saved on one rank is found by whoever reads the piece that it is in, and gets no
/// fresh checksum. The file says nothing of pieces where an earlier version wrote it.
#[test]
fn a_flipped_bit_is_refused_on_any_mesh() {
    let folder = Folder::new("flipped_bit", &[("vocab: 256", "vocab: 9000")]);
    folder.works("run model.ron --mesh 1 --steps 1 --save ckpt");
    let path = folder.0.join("ckpt/step-1/__0_0.distcp");
    let sums = folder.0.join("ckpt/step-1/__0_0.distcp.sums");
    let text = fs::read_to_string(&sums).expect("it is there");
    let embedding: Value = text
        .lines()
        .map(|it| serde_json::from_str(it).expect("JSON"))
        .find(|it: &Value| it["key"] == "model.model.embed_tokens.weight")
        .expect("the model has one");
    // 9000 rows of 64 numbers.
    assert_eq!(embedding["pieces"].as_array().expect("a list").len(), 3);
    let mut bytes = fs::read(&path).expect("it is there");
    let at = embedding["at"].as_u64().expect("a number") + 2_000_000;
    bytes[at as usize] ^= 1;
    fs::write(&path, bytes).expect("it is writable");
    let whole: Vec<String> = text
        .lines()
        .map(|it| {
            let mut it: Value = serde_json::from_str(it).expect("JSON");
            it.as_object_mut().expect("an object").remove("pieces");
            it.to_string() + "\n"
        })
        .collect();
    for text in [text, whole.concat()] {
        fs::write(&sums, text).expect("it is writable");
        for command in [
            "run model.ron --mesh 1 --steps 2 --load ckpt",
            "run model.ron --mesh 2 --steps 2 --load ckpt",
            "run model.ron --mesh 2x2 --steps 2 --load ckpt",
            "ckpt reshard ckpt --plan model.ron --mesh 2 -o out",
            "ckpt export full ckpt -o full.safetensors",
            "ckpt export hf ckpt -o hf",
        ] {
            check_refused(&folder, command, "__0_0.distcp");
        }
    }
}

/// A command ends with a checksum that is not that of a file, and leaves nothing.
#[track_caller]
fn check_refused(folder: &Folder, command: &str, file: &str) {
    let before = names(&folder.0);
    let ran = folder.planc(&format!("{command} --format json"));
    assert_eq!(ran.code, 1, "{command}: {}", ran.stdout);
    let report: Value = serde_json::from_str(&ran.stderr).expect("one object");
    assert_eq!(report["code"], "PL0706", "{command}: {report}");
    assert!(report["message"].as_str().expect("text").contains(file), "{command}: {report}");
    let after: Vec<String> = names(&folder.0);
    let new = after.iter().filter(|it| !before.contains(it) && *it != "out");
    assert_eq!(new.count(), 0, "{command} leaves {after:?}");
    let out = folder.0.join("out");
    assert!(!out.exists() || names(&out).is_empty(), "{command} leaves {:?}", names(&out));
}

#[test]
fn a_file_of_another_save_is_found() {
    let folder = Folder::new("another_save", &[]);
    folder.works("run model.ron --mesh 2 --steps 2 --save ckpt --save-every 1");
    // Of the same size, with its checksums: each item is what it says.
    for name in ["__1_0.distcp", "__1_0.distcp.sums"] {
        let from = folder.0.join("ckpt/step-1").join(name);
        fs::copy(from, folder.0.join("ckpt/step-2").join(name)).expect("copied");
    }
    folder.works("ckpt verify ckpt/step-1");
    let verified = folder.planc("ckpt verify ckpt");
    assert_eq!(verified.code, 1);
    let loaded = folder.planc("run model.ron --mesh 2 --steps 3 --load ckpt");
    assert_eq!(loaded.code, 1);
    for text in [verified.stdout, loaded.stderr] {
        let words =
            text.split_whitespace().filter(|it| *it != "|").collect::<Vec<&str>>().join(" ");
        assert!(
            words.contains("__1_0.distcp`, byte 0: the file is of another save (step-1 of run "),
            "{text}"
        );
    }
}

/// What `latest` names is whole, and training goes on from it, whenever the process was killed.
#[test]
fn a_killed_run_leaves_its_last_checkpoint() {
    let folder = Folder::new("killed", &[]);
    let straight = losses(&folder.works(&format!("{RUN} --steps 400")));
    let mut last = 0;
    let mut loaded = 0;
    for attempt in 0..10u64 {
        let more = if attempt % 2 == 0 { "" } else { "--async-save" };
        let line = format!("{RUN} --steps 400 --save ckpt --save-every 1 --keep 2 --resume {more}");
        let mut child = Command::new(env!("CARGO_BIN_EXE_planc"))
            .args(line.split_whitespace())
            .current_dir(&folder.0)
            .stdout(Stdio::null())
            .spawn()
            .expect("planc starts");
        // At any point: what comes next does not depend on how far it came.
        std::thread::sleep(Duration::from_millis(150 + attempt * 37));
        child.kill().expect("it runs, or has run");
        child.wait().expect("it has ended");
        let Ok(latest) = fs::read_to_string(folder.0.join("ckpt/latest")) else { continue };
        let step: u64 = latest.strip_prefix("step-").expect("a step").parse().expect("a number");
        assert!(step >= last, "{latest} after {last}");
        last = step;
        let ran = folder.works(&format!("{RUN} --steps {} --load ckpt", step + 1));
        assert_eq!(losses(&ran), straight[step as usize..step as usize + 1], "{latest}");
        loaded += 1;
    }
    assert!(loaded >= 5, "most runs come to save: {loaded}");
    // The next save removes what was left behind.
    folder.works(&format!("{RUN} --steps {} --load ckpt --save ckpt", last + 1));
    let left = names(&folder.0.join("ckpt"));
    assert!(left.iter().all(|it| !it.starts_with('.')), "{left:?}");
}
