//! The `planc` command as a user meets it: what it prints, writes and exits with.
//!
//! `INSTA_UPDATE=always cargo test -p cli` rewrites the snapshots.

mod bad_input;
mod checkpoints;
mod commands;
mod compiles;
mod cost;
mod data;
mod diagnostics;
mod diff;
mod edited;
mod errors;
mod faults;
mod foreign;
mod hostile;
mod import;
mod launch;
mod logs;
mod nonfinite;
mod outputs;
mod reports;
mod reshard;
mod resume;
mod signals;
mod streams;
mod verify;
mod wording;

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a run of `planc` left.
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

/// A folder of its own for one test, where `planc` runs.
struct Folder(PathBuf);

impl Folder {
    /// Empty but for `model.ron`, the llama-tiny example with some text replaced.
    #[track_caller]
    fn new(test: &str, replace: &[(&str, &str)]) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("the target folder is writable");
        let mut model =
            fs::read_to_string(workspace("examples/llama-tiny.ron")).expect("an example");
        for (from, to) in replace {
            assert!(model.contains(from), "the example has no `{from}`");
            model = model.replace(from, to);
        }
        let res = Folder(path);
        res.write("model.ron", model);
        res
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.0.join(name), content).expect("the target folder is writable");
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).expect("planc wrote it")
    }

    /// Runs `planc` here.
    fn planc(&self, line: &str) -> Ran {
        self.planc_with(line, &[])
    }

    /// Runs `planc` here, with more in its environment.
    fn planc_with(&self, line: &str, env: &[(&str, &str)]) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_planc"))
            .args(line.split_whitespace())
            .current_dir(&self.0)
            .env("NO_COLOR", "1")
            .envs(env.iter().copied())
            .output()
            .expect("planc starts");
        let text = |it: Vec<u8>| String::from_utf8(it).expect("planc prints UTF-8");
        Ran {
            code: output.status.code().expect("planc exits by itself"),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// Runs `planc` here; it must work.
    #[track_caller]
    fn works(&self, line: &str) -> String {
        let ran = self.planc(line);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "planc {line}");
        ran.stdout
    }

    /// Compiles `model.ron` for a mesh, and writes its lines after `edit` as `edited.plan`.
    #[track_caller]
    fn edit(&self, mesh: &str, edit: impl Fn(&mut Vec<String>)) {
        self.works(&format!("compile model.ron --mesh {mesh} -q"));
        let plan = self.read("model.plan");
        let mut lines: Vec<String> = plan.lines().map(str::to_string).collect();
        edit(&mut lines);
        let edited = lines.join("\n") + "\n";
        assert_ne!(edited, plan);
        self.write("edited.plan", edited);
    }
}

/// The line of a plan that fits.
#[track_caller]
fn position(lines: &[String], fits: impl Fn(&str) -> bool) -> usize {
    lines.iter().position(|it| fits(it)).expect("the plan has such a line")
}

/// Text as it was before it was wrapped and framed.
fn unwrapped(text: &str) -> String {
    text.replace(['\n', '|'], " ").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A file of the workspace.
fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("it is there");
    entries.map(|it| it.expect("readable").file_name().into_string().expect("text")).collect()
}

/// The files of a checkpoint, with the name of the run left out, which each run chooses anew.
fn files_of_any_run(step: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| {
        let mut bytes = fs::read(step.join(&name)).expect("readable");
        let head = format!("{}.", step.file_name().expect("it has a name").to_string_lossy());
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(head.len()).position(|it| it == head.as_bytes())
        {
            at += found + head.len();
            let end = (at + 8).min(bytes.len());
            bytes[at..end].fill(b'x');
        }
        (name, bytes)
    };
    names(step).into_iter().map(read).collect()
}

/// A port that no other run of this process has, below those that the system gives to connections.
fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = std::process::id() as usize * 499;
    loop {
        let next = first + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (next % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
