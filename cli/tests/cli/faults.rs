//! A run that is killed, stopped, out of disk or slow at any of its steps and at any of its file operations, and goes on by
//! `--resume`: it ends as the run that nothing happened to, and no checkpoint is lost.
//!
//! `tests/faults.c` is loaded into planc, counts its file operations and lets one go wrong. `FAULTS=all` before the test
//! takes every one of them, and not one of [`STRIDE`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{available_parallelism, scope};

use serde_json::Value;

use crate::{Folder, files_of_any_run, free_port, names, nonfinite, workspace};

/// One fault of so many is tried. It has no divisor in common with the number of kinds.
const STRIDE: usize = 11;

const STEPS: u64 = 12;

/// The ranks of a run.
#[derive(Debug, Clone, Copy)]
struct Ranks {
    mesh: &'static str,
    processes: usize,
    /// More options.
    more: &'static str,
}

const RANKS: [Ranks; 4] = [
    Ranks { mesh: "1", processes: 1, more: "" },
    Ranks { mesh: "2x2", processes: 1, more: "" },
    Ranks { mesh: "2", processes: 2, more: "" },
    Ranks { mesh: "2x2", processes: 1, more: "--async-save" },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Kill,
    Term,
    Full,
    Slow,
}

/// Something that goes wrong once, in one process, before an operation on files of one class.
#[derive(Debug, Clone, Copy)]
struct Fault {
    process: usize,
    kind: Kind,
    class: &'static str,
    index: usize,
}

impl Fault {
    /// As `faults.c` reads it.
    fn text(self) -> String {
        let kind = match self.kind {
            Kind::Kill => "kill",
            Kind::Term => "term",
            Kind::Full => "full",
            Kind::Slow => "slow",
        };
        format!("{kind}:{}:{}", self.class, self.index)
    }
}

/// The model, its weights and its data, and where runs are.
struct Site {
    folder: Folder,
    shim: PathBuf,
}

impl Site {
    fn new(test: &str) -> Site {
        let folder = nonfinite::folder(test);
        let shim = folder.0.join("faults.so");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&shim)
            .arg(workspace("cli/tests/faults.c"))
            .output()
            .expect("cc, which links Rust programs, starts");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        Site { folder, shim }
    }

    /// Starts all processes of a run in a folder of its own and waits until they end.
    fn run(&self, name: &str, ranks: Ranks, data: &str, fault: Option<Fault>) -> Vec<Output> {
        let path = self.folder.0.join(name);
        fs::create_dir_all(&path).expect("a folder");
        let port = free_port();
        let (master, secret) =
            (format!("127.0.0.1:{port}"), format!("of the run at {name} on {port}"));
        let start = |process: usize| -> Child {
            let mut command = Command::new(env!("CARGO_BIN_EXE_planc"));
            command
                .args(["run", "../model.ron", "--mesh", ranks.mesh, "--data", data])
                .args(
                    "--weights ../weights.safetensors --save ckpt --save-every 4 --keep 2"
                        .split(' '),
                )
                .args(["--resume", "--metrics", "m.jsonl", "--timeout", "60"])
                .args(["--steps", &STEPS.to_string()])
                .args(ranks.more.split_whitespace())
                .current_dir(&path)
                .env("NO_COLOR", "1")
                .env("PLANC_JOB_SECRET", &secret)
                .env("LD_PRELOAD", &self.shim)
                .env("FAULT_LOG", format!("log.{process}"))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            if ranks.processes > 1 {
                let (process, all) = (process.to_string(), ranks.processes.to_string());
                command.args(["--rank", &process, "--world-size", &all, "--local-rank", &process]);
                command.args(["--master", &master]);
            }
            if let Some(fault) = fault.filter(|it| it.process == process) {
                command.env("FAULT", fault.text());
            }
            command.spawn().expect("planc starts")
        };
        let processes: Vec<Child> = (0..ranks.processes).map(start).collect();
        processes.into_iter().map(|it| it.wait_with_output().expect("it ends")).collect()
    }

    /// Reads the folder of a run that ended well.
    fn left(&self, name: &str) -> Left {
        let path = self.folder.0.join(name);
        let mut lines: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
        for line in self.folder.read(&format!("{name}/m.jsonl")).lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let fields = ["loss", "grad_norm", "lr", "tokens", "skipped"].map(|it| &line[it]);
            let fields = serde_json::to_string(&fields).expect("JSON");
            lines.entry(line["step"].as_u64().expect("a number")).or_default().insert(fields);
        }
        let steps = names(&path.join("ckpt")).into_iter();
        let step = |it: String| {
            let files = match it.starts_with("step-") {
                true => files_of_any_run(&path.join("ckpt").join(&it)),
                false => {
                    [(it.clone(), fs::read(path.join("ckpt").join(&it)).expect("a file"))].into()
                }
            };
            (it, files)
        };
        Left { lines, steps: steps.map(step).collect() }
    }

    /// The operations of each class that a process did.
    fn operations(&self, name: &str, process: usize) -> BTreeMap<&'static str, usize> {
        let log = self.folder.read(&format!("{name}/log.{process}"));
        let count = |class: &'static str| {
            let of_class = |it: &&str| it.starts_with(class) && !it.contains(" renamed ");
            (class, log.lines().filter(of_class).count())
        };
        ["ckpt", "metrics"].map(count).into()
    }

    /// Returns true if a process came to the operation that was to go wrong. Some processes do a few operations only if
    /// another did not.
    fn is_met(&self, name: &str, process: usize) -> bool {
        self.folder.read(&format!("{name}/log.{process}")).contains("other fault")
    }

    /// The newest checkpoint that rank 0 of a run came to commit.
    fn committed(&self, name: &str) -> Option<u64> {
        let log = self.folder.read(&format!("{name}/log.0"));
        let steps = log.lines().filter_map(|it| it.strip_prefix("ckpt renamed ckpt/step-"));
        steps.map(|it| it.parse().expect("a number")).max()
    }
}

/// The files of a run, but for the times that it took.
#[derive(Debug, PartialEq)]
struct Left {
    /// By step, the numbers that were written of it: one line, if all that did it came to the same.
    lines: BTreeMap<u64, BTreeSet<String>>,
    /// By name in the folder of checkpoints, the files and their bytes.
    steps: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
}

impl Left {
    /// The difference to the run that nothing happened to. A run that was stopped has saved at another step as well. One
    /// that was killed after its last checkpoint had its name may have older ones than it was to keep.
    fn differs(&self, straight: &Left) -> Option<String> {
        if self.lines != straight.lines {
            return Some(format!("metrics {:?} and {:?}", self.lines, straight.lines));
        }
        let names: Vec<&String> = self.steps.keys().collect();
        let (latest, steps) = names.split_first().expect("there are checkpoints");
        let are_steps = steps.iter().all(|it| it.starts_with("step-"));
        if *latest != "latest" || !are_steps || !steps.contains(&&format!("step-{STEPS}")) {
            return Some(format!("{names:?} in the folder"));
        }
        let both = self.steps.iter().filter_map(|it| Some((it, straight.steps.get(it.0)?)));
        let differ = both.filter(|((_, ours), theirs)| ours != theirs).map(|it| it.0.0);
        let differ: Vec<&String> = differ.collect();
        (!differ.is_empty()).then(|| format!("{differ:?} have other bytes"))
    }
}

/// Checks the processes of a run that was to meet a fault; returns what is wrong.
fn ended(outputs: &[Output], fault: Fault, is_met: bool) -> Result<(), String> {
    for (process, output) in outputs.iter().enumerate() {
        let (code, signal) = (output.status.code(), output.status.signal());
        let expected = match fault.kind {
            _ if !is_met => code == Some(0),
            Kind::Slow => code == Some(0),
            Kind::Kill if process == fault.process => signal == Some(9),
            // It is done, or says that the other one is gone.
            Kind::Kill | Kind::Full => code == Some(0) || code == Some(1),
            // In the last step a signal changes nothing; before the first it ends a process at once.
            Kind::Term => matches!(code, Some(0 | 143)) || signal == Some(15) || code == Some(1),
        };
        let stderr = String::from_utf8_lossy(&output.stderr);
        if !expected || (code == Some(1)) != stderr.contains("error[PL") {
            return Err(format!("process {process} ended with {}: {stderr}", output.status));
        }
    }
    Ok(())
}

/// Lets a fault happen, goes on, and compares; returns what is wrong.
fn check(
    site: &Site,
    (name, data): (&str, &str),
    ranks: Ranks,
    fault: Fault,
    straight: &Left,
) -> Result<(), String> {
    let outputs = site.run(name, ranks, data, Some(fault));
    ended(&outputs, fault, site.is_met(name, fault.process))?;
    let committed = site.committed(name);
    let resumed = site.run(name, ranks, data, None);
    for output in &resumed {
        if output.status.code() != Some(0) {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(format!("resuming ended with {}: {stderr}", output.status));
        }
    }
    let stdout = String::from_utf8_lossy(&resumed[0].stdout);
    let from = stdout.split_once("resumed from ckpt/step-").map(|it| it.1);
    let from: Option<u64> = from.and_then(|it| it.split(' ').next()?.parse().ok());
    if from < committed {
        return Err(format!("{committed:?} was committed, and it went on from {from:?}"));
    }
    site.left(name).differs(straight).map_or(Ok(()), Err)
}

/// Tries faults on all cores, and prints how many there were.
#[track_caller]
fn check_all(
    site: &Site,
    ranks: Ranks,
    faults: &[(Fault, String)],
    straight: &BTreeMap<String, Left>,
) {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((fault, data)) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = format!("{}.{}.{}", fault.process, fault.text(), faults.len())
                        .replace(':', ".");
                    let name = format!("{name}.{}", data.replace(['.', '/'], "_"));
                    match check(site, (&name, data), ranks, *fault, &straight[data]) {
                        Ok(()) => fs::remove_dir_all(site.folder.0.join(name)).expect("ours"),
                        Err(why) => wrong.lock().expect("whole").push(format!("{fault:?}: {why}")),
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("whole");
    println!("{ranks:?}: {} faults, {} went wrong", faults.len(), wrong.len());
    assert!(
        wrong.is_empty(),
        "{ranks:?}, {} of {}:\n{}",
        wrong.len(),
        faults.len(),
        wrong.join("\n")
    );
}

/// The unbroken run, in a folder of its own.
fn straight(site: &Site, ranks: Ranks, data: &str) -> Left {
    let name = format!("straight_{}", data.replace(['.', '/'], "_"));
    for output in site.run(&name, ranks, data, None) {
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let left = site.left(&name);
    assert!(left.lines.keys().copied().eq(1..=STEPS), "{:?}", left.lines);
    assert!(left.steps.contains_key("step-12") && left.steps.contains_key("step-8"));
    left
}

fn is_all() -> bool {
    std::env::var("FAULTS").is_ok_and(|it| it == "all")
}

fn check_operations(ranks: Ranks) {
    let site = Site::new(&format!("faults_{}_{}{}", ranks.mesh, ranks.processes, ranks.more));
    let data = "../data12.bin";
    site.folder.write("data12.bin", nonfinite::data(STEPS, None));
    let straight = straight(&site, ranks, data);
    let mut faults = Vec::new();
    for process in 0..ranks.processes {
        for (class, operations) in site.operations("straight____data12_bin", process) {
            for index in 0..operations {
                for kind in [Kind::Kill, Kind::Term, Kind::Full, Kind::Slow] {
                    faults.push((Fault { process, kind, class, index }, data.to_string()));
                }
            }
        }
    }
    assert!(faults.len() > 100, "{}", faults.len());
    let stride = if is_all() { 1 } else { STRIDE };
    let faults: Vec<(Fault, String)> = faults.into_iter().step_by(stride).collect();
    check_all(&site, ranks, &faults, &[(data.to_string(), straight)].into());
}

#[test]
fn a_fault_loses_nothing_on_one_rank() {
    check_operations(RANKS[0]);
}

#[test]
fn a_fault_loses_nothing_on_2x2() {
    check_operations(RANKS[1]);
}

#[test]
fn a_fault_loses_nothing_on_two_processes() {
    check_operations(RANKS[2]);
}

#[test]
fn a_fault_loses_nothing_while_training_goes_on() {
    check_operations(RANKS[3]);
}

/// A batch makes the gradients of one step overflow. The step is skipped, and the run is killed as the line of a step is
/// written, the same one or another: what goes on is the run that skipped the step and was not killed.
#[test]
fn a_step_that_is_not_finite_is_resumed_as_any_other() {
    for ranks in RANKS {
        let site = Site::new(&format!(
            "faults_nonfinite_{}_{}{}",
            ranks.mesh, ranks.processes, ranks.more
        ));
        let (mut runs, mut faults) = (BTreeMap::new(), Vec::new());
        let bad: Vec<u64> = if is_all() { (1..=STEPS).collect() } else { vec![5] };
        for bad in bad {
            let name = format!("bad{bad}.bin");
            site.folder.write(&name, nonfinite::data(STEPS, Some(bad)));
            let data = format!("../{name}");
            let left = straight(&site, ranks, &data);
            let skipped =
                left.lines.iter().filter(|it| it.1.iter().all(|it| it.contains("nonfinite")));
            assert_eq!(skipped.map(|it| *it.0).collect::<Vec<u64>>(), [bad]);
            runs.insert(data.clone(), left);
            let steps: Vec<u64> = if is_all() { (1..=STEPS).collect() } else { vec![4, 5, 9] };
            for step in steps {
                // The file of metrics is opened and cut before lines are written.
                let (kind, class, index) = (Kind::Kill, "metrics", 1 + step as usize);
                faults.push((Fault { process: 0, kind, class, index }, data.clone()));
            }
        }
        check_all(&site, ranks, &faults, &runs);
    }
}
