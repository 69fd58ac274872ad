//! Signals to `planc run`: what is finished and saved, what is said, and the exit code.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Folder;

/// A run that has begun.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(folder: &Folder, line: &str) -> Running {
        let mut child = Command::new(env!("CARGO_BIN_EXE_planc"))
            .args(line.split_whitespace())
            .current_dir(&folder.0)
            .stdout(Stdio::piped())
            .spawn()
            .expect("planc starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Running { child, lines }
    }

    /// Sends a signal.
    fn send(&self, signal: &str) {
        let line = format!("kill -{signal} {}", self.child.id());
        Command::new("sh").arg("-c").arg(line).status().expect("sh starts");
    }

    /// The next line of an event, and all before it.
    fn until(&mut self, event: &str) -> Vec<Value> {
        let mut res: Vec<Value> = Vec::new();
        while res.last().is_none_or(|it| it["event"] != event) {
            let line = self.lines.next().expect("the run goes on").expect("text");
            res.push(serde_json::from_str(&line).expect("JSON"));
        }
        res
    }

    /// All lines that are left, and the exit code.
    fn end(mut self) -> (Vec<Value>, Option<i32>) {
        let lines = self.lines.map(|it| serde_json::from_str(&it.expect("text")).expect("JSON"));
        let lines = lines.collect();
        (lines, self.child.wait().expect("it ends").code())
    }
}

const RUN: &str = "run model.ron --mesh 2x2 --format json";

fn losses(lines: &[Value]) -> Vec<(u64, f64)> {
    let step = |it: &Value| Some((it["step"].as_u64()?, it["loss"].as_f64()?));
    lines.iter().filter_map(step).collect()
}

/// The step is finished and saved, and the run that goes on is the one that was never stopped.
#[test]
fn a_run_that_is_stopped_can_go_on() {
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        for more in ["", "--async-save --save-every 1"] {
            let folder = Folder::new(&format!("signals_{signal}_{}", more.len()), &[]);
            let line = format!("{RUN} --steps 100000 --save ckpt {more}");
            let mut run = Running::start(&folder, &line);
            let mut all = run.until("step");
            all.extend(run.until("step"));
            run.send(signal);
            let (rest, exit) = run.end();
            all.extend(rest);
            assert_eq!(exit, Some(code), "{all:?}");
            let stop = all.iter().find(|it| it["event"] == "stopped").expect("it says so");
            assert_eq!(stop["signal"], format!("SIG{signal}"));
            assert_eq!(stop["saved"], true);
            let last = losses(&all).last().expect("a step").0;
            assert_eq!(stop["step"], last);
            assert_eq!(folder.read("ckpt/latest"), format!("step-{last}"));
            folder.works("ckpt verify ckpt");
            let straight = folder.works(&format!("{RUN} --steps {}", last + 2));
            let resumed = folder.works(&format!("{RUN} --steps {} --save ckpt --resume", last + 2));
            let lines = |text: &str| -> Vec<Value> {
                text.lines().map(|it| serde_json::from_str(it).expect("JSON")).collect()
            };
            let straight = losses(&lines(&straight));
            assert_eq!(losses(&all), straight[..last as usize]);
            assert_eq!(losses(&lines(&resumed)), straight[last as usize..]);
        }
    }
}

#[test]
fn without_a_folder_nothing_is_saved() {
    let folder = Folder::new("signals_unsaved", &[]);
    let mut run =
        Running::start(&folder, &format!("{RUN} --steps 100000 --trace t.json --metrics m.jsonl"));
    run.until("step");
    run.send("USR1");
    let warned = run.until("warning");
    let warning = warned.last().expect("a line")["message"].as_str().expect("text").to_string();
    assert!(warning.contains("SIGUSR1") && warning.contains("--save"), "{warning}");
    run.send("TERM");
    let (lines, code) = run.end();
    assert_eq!(code, Some(143));
    let stop = lines.iter().find(|it| it["event"] == "stopped").expect("it says so");
    assert_eq!(stop["saved"], false);
    assert_eq!(lines.last().expect("a line")["event"], "summary");
    // What else the run leaves is whole.
    let steps = folder.read("m.jsonl").lines().count() as u64;
    assert_eq!(stop["step"], steps);
    let _: Vec<Value> = serde_json::from_str(&folder.read("t.json")).expect("a whole trace");
}

/// Slurm's early warning.
#[test]
fn a_warning_saves_and_the_run_goes_on() {
    let folder = Folder::new("signals_usr1", &[]);
    let mut run = Running::start(&folder, &format!("{RUN} --steps 100000 --save ckpt"));
    // The signal may come before the end of the step that was just printed.
    let mut saved = run.until("step");
    run.send("USR1");
    saved.extend(run.until("saved"));
    let step = losses(&saved).last().expect("a step").0;
    let path = saved.last().expect("a line")["path"].as_str().expect("text").to_string();
    assert_eq!(path, format!("ckpt/step-{step}"));
    assert_eq!(losses(&run.until("step"))[0].0, step + 1);
    run.send("TERM");
    assert_eq!(run.end().1, Some(143));
}

/// SIGTERM that comes all the time interrupts no commit.
#[test]
fn repeated_terms_leave_a_whole_checkpoint() {
    let folder = Folder::new("signals_repeated", &[]);
    let mut run = Running::start(
        &folder,
        &format!("{RUN} --steps 100000 --save ckpt --save-every 1 --keep 2"),
    );
    run.until("saved");
    let pid = run.child.id();
    let line = format!("while kill -TERM {pid} 2>/dev/null; do :; done");
    let mut sender = Command::new("bash").arg("-c").arg(line).spawn().expect("bash starts");
    let (lines, code) = run.end();
    sender.wait().expect("it ends with the run");
    assert_eq!(code, Some(143));
    let stop = lines.iter().find(|it| it["event"] == "stopped").expect("it says so");
    assert_eq!(folder.read("ckpt/latest"), format!("step-{}", stop["step"]));
    folder.works("ckpt verify ckpt");
}

/// A step of this takes many times as long as two signals.
#[test]
fn a_second_interrupt_does_not_wait_for_the_step() {
    let folder = Folder::new("signals_twice", &[("Global(8)", "Global(2048)")]);
    let mut run = Running::start(&folder, &format!("{RUN} --steps 1000"));
    let began = Instant::now();
    run.until("step");
    let step = began.elapsed();
    // The line of a step comes before its end: a signal now may end the run with that step.
    std::thread::sleep(step / 4);
    run.send("INT");
    // Two that come together may be one.
    std::thread::sleep(Duration::from_millis(30));
    run.send("INT");
    let sent = Instant::now();
    let (lines, code) = run.end();
    assert_eq!((code, lines.len()), (Some(130), 0), "{lines:?}");
    assert!(sent.elapsed() < step, "{:?} of {step:?}", sent.elapsed());
}
