//! Streams that are closed or full end nothing but the printing.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::Folder;

/// The exit code of `planc line` with these streams.
#[track_caller]
fn code(folder: &Folder, line: &str, stdout: Stdio, stderr: Stdio) -> i32 {
    let mut command = Command::new(env!("CARGO_BIN_EXE_planc"));
    command.args(line.split_whitespace()).current_dir(&folder.0).stdout(stdout).stderr(stderr);
    command.status().expect("planc starts").code().expect("planc exits by itself")
}

/// A pipe that nobody reads.
fn closed() -> Stdio {
    std::io::pipe().expect("a pipe").1.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

#[test]
fn dumps_to_a_closed_stderr() {
    let folder = Folder::new("closed_stderr", &[]);
    let line = "compile model.ron --mesh 2x2 -q --dump-ir-after all";
    assert_eq!(code(&folder, line, Stdio::null(), closed()), 0);
    assert_eq!(code(&folder, line, Stdio::null(), full()), 0);
    let line = "compile model.ron --mesh 2x2 --emit plan --time-passes";
    assert_eq!(code(&folder, line, Stdio::null(), full()), 0);
    assert_eq!(code(&folder, "compile missing.ron", Stdio::null(), full()), 1);
}

#[test]
fn results_to_a_closed_stdout() {
    let folder = Folder::new("closed_stdout", &[]);
    for line in ["inspect model.ron --mesh 2x2", "compile model.ron --mesh 2 --emit plan"] {
        assert_eq!(code(&folder, line, closed(), Stdio::null()), 0, "{line}");
    }
}

#[test]
fn training_goes_on_without_readers() {
    let folder = Folder::new("closed_run", &[]);
    let line = "run model.ron --mesh 2 --steps 3 --metrics m.jsonl";
    assert_eq!(code(&folder, line, closed(), closed()), 0);
    assert_eq!(folder.read("m.jsonl").lines().count(), 3);
}

#[test]
fn a_step_that_is_not_finite_is_told_once() {
    let folder = Folder::new("nan_loss", &[]);
    let ran = folder.planc("run model.ron --mesh 1 --steps 4 --set schedule.lr=1e30");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(ran.stderr.matches(" is skipped: the loss or").count(), 1, "{}", ran.stderr);
    assert_eq!(ran.stderr.matches(" is not finite: rank 0").count(), 1, "{}", ran.stderr);
    assert!(ran.stdout.contains("trained 4 steps"), "{}", ran.stdout);
}
