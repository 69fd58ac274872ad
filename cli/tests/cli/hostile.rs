//! Input that is too large, too long or no file: an error, within bounds of memory.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};

use crate::Folder;

/// Runs `planc line` in `folder` with at most so many KiB of address space.
fn limited(folder: &Folder, kib: u64, line: &str) -> Output {
    let script = format!("ulimit -v {kib}; exec \"$0\" {line}");
    let mut command = Command::new("bash");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_planc")]).current_dir(&folder.0);
    command.env("NO_COLOR", "1").output().expect("bash is there")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A GiB, of which planning a small model takes a tenth: no size of a tensor, and no number of ranks, is a size of
/// anything in memory.
const GIB: u64 = 1 << 20;

#[test]
fn memory_does_not_depend_on_sizes() {
    let folder = Folder::new("sizes", &[]);
    let check = |line: &str, message: &str| {
        let ran = limited(&folder, GIB, &format!("compile model.ron {line} -o a.plan"));
        let stderr = text(&ran.stderr);
        let code = if message.is_empty() { 0 } else { 1 };
        assert_eq!(ran.status.code(), Some(code), "{line}: {stderr}");
        assert!(crate::unwrapped(&stderr).contains(message), "{line}: {stderr}");
    };
    let (mlp, attention) = ("layers[1].body[0].mlp", "layers[1].body[0].attention");
    check("--mesh 1 --set layers[0].vocab=4294967295", "");
    check(&format!("--mesh 2x4 --set {mlp}.ffn=4294967296"), "");
    let heads = |it: &str| format!("--set {attention}.{it}=4294967296");
    let heads = [heads("heads"), heads("kv_heads"), format!("--set {attention}.head_dim=2")];
    check(&format!("--mesh 2x4 {}", heads.join(" ")), "");
    check("--mesh 262144x4 --set 'batch=PerReplica(1)'", "");
    check("--mesh 1048576x4 --set 'batch=PerReplica(1)'", "has more than 2^20 ranks");
    check("--mesh 1 --set layers[0].vocab=1099511627776", "has more than 2^46 elements");
    let large = format!(
        "--mesh 1 --set 'batch=Global(1)' --set layers[0].dim=8388608 --set {mlp}.ffn=8388608 \
         --set {attention}.head_dim=2097152"
    );
    check(&large, "");
    check(
        &format!("{large} --set layers[1].n=1000"),
        "all tensors together have 3.4e18 bytes, and planning holds 2^60; the largest is",
    );
    check(
        "--mesh 1 --set sequence=4294967296 --set 'batch=Global(4)'",
        "a step takes more than 2^60 operations on a rank",
    );
}

#[test]
fn repeating_is_bounded() {
    let folder = Folder::new("repeats", &[]);
    let body = "Repeat(n:10000,prefix:\"b\",body:[Dropout(rate:0.1)])";
    let layers = format!(
        "[Embedding(vocab:8,dim:8),Repeat(n:10000,prefix:\"a\",body:[{body}]),LmHead(),CrossEntropy()]"
    );
    let ran =
        limited(&folder, 4 * GIB, &format!("compile model.ron --mesh 1 --set 'layers={layers}'"));
    let stderr = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{stderr}");
    let message = "the model has 1000001 ops, and planning holds 1000000";
    assert!(crate::unwrapped(&stderr).contains(message), "{stderr}");
}

#[test]
fn numbers_of_a_plan_are_no_sizes_in_memory() {
    let folder = Folder::new("plan_numbers", &[]);
    folder.edit("2x2", |lines| {
        let events = lines[0].find("events=").expect("a plan has events");
        let rest = lines[0][events..].find(' ').expect("more follows");
        lines[0].replace_range(events..events + rest, "events=4294967295");
    });
    let ran = limited(&folder, GIB, "verify edited.plan");
    let stderr = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("4294967295 events are more than the"), "{stderr}");
}

/// An error in a long line is shown with the text around it.
#[test]
fn long_lines() {
    let folder = Folder::new("long_lines", &[]);
    let check = |line: &str, shown: &str, at: &str| {
        let ran = folder.planc(line);
        assert_eq!(ran.code, 1, "{line}: {}", ran.stderr);
        assert!(ran.stderr.len() < 2000, "{line}: {} bytes", ran.stderr.len());
        assert!(ran.stderr.contains(shown) && ran.stderr.contains(at), "{line}: {}", ran.stderr);
    };
    let modules = "RmsNorm(),".repeat(7000);
    let model = format!("Model(name:\"m\",batch:Global(2),sequence:4,layers:[{modules}RmsNom()])");
    folder.write("long.ron", model);
    check("compile long.ron --mesh 1", "...", "long.ron:1:70");
    folder.works("compile model.ron --mesh 1 -q");
    let plan = folder.read("model.plan").replacen(
        "buffer %",
        &format!("{}bufer %", " ".repeat(70_000)),
        1,
    );
    folder.write("long.plan", plan);
    check("verify long.plan", "...", ":70003]");
    let profile =
        std::fs::read_to_string(crate::workspace("ir/profiles/h200.ron")).expect("it is there");
    let long = format!("{} memory: (\"", " ".repeat(70_000));
    folder.write("long_h200.ron", profile.replacen("    memory: (", &long, 1));
    check("compile model.ron --mesh 1 --target long_h200.ron", "...", "long_h200.ron:");
}

/// Names and values of any length are printed, or refused in some other way than by a panic.
#[test]
fn long_names_and_values() {
    let name = "x".repeat(70_000);
    let folder = Folder::new("long_names", &[("\"model.norm\"", &format!("\"{name}\""))]);
    let lines = [
        "compile model.ron --mesh 2x2",
        "inspect model.ron --mesh 2x2",
        "inspect model.ron --mesh 2x2 --param *",
    ];
    for line in lines {
        folder.works(line);
    }
    for set in [format!("name={name}"), format!("{name}=1"), format!("sequence=\"{name}")] {
        let ran = folder.planc(&format!("compile model.ron --mesh 1 --set {set}"));
        assert_eq!(ran.code, 1, "{}", &ran.stderr[..200]);
    }
    // The message shows both ends of a long value, and no more.
    let list = vec!["\"dp\""; 10_000].join(",");
    for set in [
        format!("layers=[{list}]"),
        format!("sequence={name}"),
        format!("init={name}(1)"),
        format!("sequence.{name}=1"),
        name.clone(),
    ] {
        let ran = folder.planc(&format!("compile model.ron --mesh 1 --set {set}"));
        assert_eq!(ran.code, 1, "{}", &ran.stderr[..200]);
        let (start, len) = (&set[..20], ran.stderr.len());
        assert!(len < 2000, "{start}: {len} bytes of message");
    }
}

#[test]
fn arguments_that_are_no_text() {
    let folder = Folder::new("no_text", &[]);
    let bytes = OsStr::from_bytes(b"\xff\xfe");
    let run = |args: &[&OsStr]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_planc"));
        command.args(args).current_dir(&folder.0).output().expect("planc starts")
    };
    for format in ["text", "json"] {
        let args = ["--format", format, "compile", "model.ron", "--mesh"].map(OsStr::new);
        let ran = run(&[&args[..], &[bytes]].concat());
        assert_eq!(ran.status.code(), Some(2), "{}", text(&ran.stderr));
        assert!(text(&ran.stderr).contains("invalid UTF-8"), "{}", text(&ran.stderr));
    }
    let ran = run(&[OsStr::new("compile"), bytes, OsStr::new("--mesh=1")]);
    assert_eq!(ran.status.code(), Some(1), "{}", text(&ran.stderr));
}

/// Devices are refused at once; weights, data and checkpoints must be files.
#[test]
fn devices() {
    let folder = Folder::new("devices", &[]);
    let check = |line: &str, message: &str| {
        let ran = limited(&folder, GIB, line);
        let stderr = text(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{line}: {stderr}");
        assert!(crate::unwrapped(&stderr).contains(message), "{line}: {stderr}");
    };
    check("compile /dev/zero --mesh 1", "cannot read `/dev/zero`: it is a device");
    check("verify /dev/zero", "cannot read `/dev/zero`: it is a device");
    check(
        "compile model.ron --mesh 1 --target /dev/zero",
        "cannot read `/dev/zero`: it is a device",
    );
    check("import hf /dev/zero", "cannot read `/dev/zero`: it is a device");
    for option in ["data", "weights"] {
        let line = format!("run model.ron --mesh 1 --{option} /dev/zero");
        check(&line, "cannot read `/dev/zero`: it is no regular file");
    }
}

/// `planc compile <(..)` and `/dev/stdin` are read.
#[test]
fn pipes() {
    let folder = Folder::new("pipes", &[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_planc"));
    command.args(["compile", "/dev/stdin", "--mesh", "1", "--emit", "logical"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().expect("planc starts");
    let model = folder.read("model.ron");
    child.stdin.take().expect("a pipe").write_all(model.as_bytes()).expect("planc reads it");
    let ran = child.wait_with_output().expect("planc ends");
    assert!(ran.status.success() && text(&ran.stdout).starts_with("graph @llama-tiny"));
    let script =
        format!("{} compile <(cat model.ron) --mesh 1 --emit logical", env!("CARGO_BIN_EXE_planc"));
    let mut command = Command::new("bash");
    let ran = command.args(["-c", &script]).current_dir(&folder.0).output().expect("bash starts");
    assert!(text(&ran.stdout).starts_with("graph @llama-tiny"), "{}", text(&ran.stderr));
    let file = File::open(folder.0.join("model.ron")).expect("it is there");
    let mut command = Command::new(env!("CARGO_BIN_EXE_planc"));
    command.args(["compile", "/dev/stdin", "--mesh", "1", "--emit", "logical"]).stdin(file);
    assert!(command.output().expect("planc starts").status.success());
}
