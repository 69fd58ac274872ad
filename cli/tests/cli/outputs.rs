//! What commands write: never over files of others, as a whole or not at all, and to pipes and devices as before.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Folder, unwrapped};

/// Each command that writes a file, with `OUT` for its name.
const COMMANDS: [&str; 8] = [
    "compile model.ron --mesh 2 -o OUT",
    "compile model.ron --mesh 2 --emit meaning -o OUT",
    "compile model.ron --mesh 2 --emit sharded -o OUT",
    "inspect model.ron --mesh 2 --html OUT",
    "verify model.ron --mesh 2 --write-certificate OUT",
    "run model.ron --mesh 2 --steps 1 --metrics OUT",
    "run model.ron --mesh 2 --steps 1 --trace OUT",
    "import hf config.json -o OUT",
];

fn folder(test: &str) -> Folder {
    let folder = Folder::new(test, &[]);
    folder.write(
        "config.json",
        r#"{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 256, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64}"#,
    );
    folder
}

fn names(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(&folder.0).expect("a folder");
    let name = |it: fs::DirEntry| it.file_name().into_string().expect("text");
    let mut res: Vec<String> = entries.map(|it| name(it.expect("readable"))).collect();
    res.sort();
    res
}

#[test]
fn files_of_others_are_not_overwritten() {
    let folder = folder("outputs_of_others");
    let others: [(&str, &[u8], &str); 5] = [
        ("tokens.bin", &[7, 0, 9, 0], "binary data that planc did not write"),
        ("w.safetensors", b"\x02\0\0\0\0\0\0\0{}", "a safetensors file"),
        ("w.pt", b"PK\x03\x04..", "a zip archive, as `torch.save` writes"),
        ("job.sh", b"#!/bin/sh\n", "a script that planc did not write (`#!/bin/sh`)"),
        ("data.jsonl", b"{\"text\": 1}\n", "JSON that planc did not write (`{\"text\": 1}`)"),
    ];
    for line in COMMANDS {
        for (name, bytes, seems) in others {
            folder.write(name, bytes);
            let line = line.replace("OUT", name);
            let ran = folder.planc(&format!("{line} --message-format json"));
            assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{line}: {}", ran.stderr);
            let report: Value = serde_json::from_str(&ran.stderr).expect("one object");
            assert_eq!(report["code"], "PL0614", "{line}: {report}");
            let message = report["message"].as_str().expect("text");
            assert!(message.contains(name) && message.ends_with(seems), "{line}: {message}");
            assert!(report["help"].as_str().is_some_and(|it| it.contains("--force")), "{report}");
            assert_eq!(fs::read(folder.0.join(name)).expect("it is there"), bytes, "{line}");
        }
        let line = line.replace("OUT", "job.sh");
        folder.works(&format!("{line} --force"));
        assert_ne!(folder.read("job.sh"), "#!/bin/sh\n", "{line}");
        folder.write("empty", "");
        folder.works(&line.replace("job.sh", "empty"));
    }
}

/// Each command writes over what it wrote, and nothing is left beside it.
#[test]
fn files_of_planc_are_overwritten() {
    let folder = folder("outputs_of_planc");
    for (i, line) in COMMANDS.iter().enumerate() {
        let name = format!("out{i}");
        let line = line.replace("OUT", &name);
        folder.works(&line);
        let first = folder.read(&name);
        if line.starts_with("import") {
            assert!(folder.planc(&line).stderr.contains("PL0614"), "a model is its user's");
            continue;
        }
        folder.works(&line);
        assert_eq!(folder.read(&name).len() > 100, first.len() > 100, "{line}");
        // A file of planc's in another format is not one of these.
        let other = if i == 3 { "out0" } else { "out3" };
        if i > 2 {
            let ran = folder.planc(&line.replace(&name, other));
            let said = if other == "out0" { "a plan or IR" } else { "a report of planc" };
            assert!(ran.stderr.contains("PL0614") && ran.stderr.contains(said), "{}", ran.stderr);
        }
    }
    let expected: Vec<String> = ["config.json", "model.ron"]
        .into_iter()
        .map(str::to_string)
        .chain((0..8).map(|it| format!("out{it}")))
        .collect();
    assert_eq!(names(&folder), expected);
}

#[test]
fn dumps_and_pages_spare_files_of_others() {
    let folder = folder("outputs_dumps");
    let dump = "compile model.ron --mesh 2 --dump-ir-after cse --dump-dir dump -q";
    folder.works(dump);
    folder.works(dump);
    let name = names(&Folder(folder.0.join("dump"))).pop().expect("a dump");
    folder.write(&format!("dump/{name}"), "notes");
    let ran = folder.planc(dump);
    assert!(ran.code == 1 && unwrapped(&ran.stderr).contains("`notes`"), "{}", ran.stderr);
    folder.works("man pages");
    folder.works("man pages");
    assert!(folder.read("pages/planc-run.1").contains(".TH planc-run"));
    folder.write("pages/planc.1", "mine");
    assert!(folder.planc("man pages").stderr.contains("PL0614"));
    folder.works("man pages --force");
    let left = names(&Folder(folder.0.join("pages")));
    assert!(left.iter().all(|it| it.starts_with("planc") && it.ends_with(".1")), "{left:?}");
}

#[test]
fn pipes_devices_and_links_work() {
    let folder = folder("outputs_direct");
    for line in &COMMANDS[..7] {
        folder.works(&line.replace("OUT", "/dev/null"));
        let text = folder.works(&format!("{} -q", line.replace("OUT", "/dev/stdout")));
        assert!(text.len() > 50, "{line}: {text}");
        // A redirection is what the shell opened, whatever was in it.
        folder.write("log.txt", "of another program\n");
        let status = Command::new(env!("CARGO_BIN_EXE_planc"))
            .args(line.replace("OUT", "/dev/stdout").split_whitespace())
            .arg("-q")
            .current_dir(&folder.0)
            .stdout(Stdio::from(fs::File::create(folder.0.join("log.txt")).expect("a file")))
            .status();
        assert!(status.expect("planc starts").success(), "{line}");
        assert!(folder.read("log.txt").len() > 50, "{line}");
    }
    // A link stays a link.
    symlink("there.plan", folder.0.join("link.plan")).expect("a link");
    for _ in 0..2 {
        folder.works("compile model.ron --mesh 2 -q -o link.plan");
        assert!(folder.0.join("link.plan").is_symlink());
        folder.works("verify there.plan");
    }
    let ran = folder.planc("compile model.ron --mesh 2 -o /dev/full");
    assert!(ran.code == 1 && ran.stderr.contains("PL0601"), "{}", ran.stderr);
}

/// A limit on the size of files is as a full disk: the plan that was there is there.
#[test]
fn an_output_that_does_not_fit_leaves_what_was_there() {
    let folder = folder("outputs_limit");
    folder.works("compile model.ron --mesh 2 -q");
    let before = folder.read("model.plan");
    let planc = env!("CARGO_BIN_EXE_planc");
    let line = format!("trap '' XFSZ; ulimit -f 2; exec {planc} compile model.ron --mesh 4");
    let ran = Command::new("bash").arg("-c").arg(line).current_dir(&folder.0).output();
    let ran = ran.expect("bash starts");
    assert_eq!(ran.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("PL0601"));
    assert_eq!(folder.read("model.plan"), before);
    assert_eq!(names(&folder), ["config.json", "model.plan", "model.ron"]);
}

/// Files for people to look at are no reason to lose a night of training: a run that cannot write them says so once.
#[test]
fn a_full_disk_does_not_end_a_run() {
    let folder = folder("outputs_full");
    for flag in ["--metrics", "--trace"] {
        let ran = folder.planc(&format!("run model.ron --mesh 2 --steps 3 {flag} /dev/full"));
        assert_eq!(ran.code, 0, "{flag}: {}", ran.stderr);
        assert!(ran.stdout.contains("step:   3"), "{}", ran.stdout);
        let warnings = ran.stderr.matches("cannot write `/dev/full`").count();
        assert_eq!(warnings, 1, "{flag}: {}", ran.stderr);
        assert!(ran.stderr.contains("the run goes on without"), "{}", ran.stderr);
    }
    // Event files and metrics that come to a limit in the middle keep the steps before, whole.
    let planc = env!("CARGO_BIN_EXE_planc");
    let line = format!(
        "trap '' XFSZ; ulimit -f 1; exec {planc} run model.ron --mesh 2 --steps 20 --metrics m.jsonl --tensorboard logs"
    );
    let ran = Command::new("bash").arg("-c").arg(line).current_dir(&folder.0).output();
    let ran = ran.expect("bash starts");
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(0), "{stderr}");
    for name in ["m.jsonl", "logs/events"] {
        assert_eq!(stderr.matches(&format!("cannot write `{name}")).count(), 1, "{stderr}");
    }
    let lines = folder.read("m.jsonl");
    assert!(lines.ends_with('\n') && lines.lines().count() > 1);
    for line in lines.lines() {
        let _: Value = serde_json::from_str(line).expect("a whole line");
    }
}
