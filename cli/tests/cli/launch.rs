//! Where rank 0 listens, who it lets in, the scripts of `docs/gpu.md` that start all ranks, and CPU ranks in several
//! processes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, copy, sink};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use crate::{Folder, files_of_any_run, free_port, workspace};

const SECRET: (&str, &str) = ("PLANC_JOB_SECRET", "0123456789abcdef");

/// A port that is free, on the loopback.
fn master() -> String {
    format!("127.0.0.1:{}", free_port())
}

/// Starts all processes of a run on the CPU, as a launcher does.
fn start(folder: &Folder, processes: usize, line: &str) -> Vec<Child> {
    let master = master();
    let process = |rank: usize| {
        Command::new(env!("CARGO_BIN_EXE_planc"))
            .args(line.split_whitespace())
            .args(["--world-size", &processes.to_string(), "--rank", &rank.to_string()])
            .args(["--local-rank", &rank.to_string(), "--master", &master])
            .current_dir(&folder.0)
            .envs([SECRET, ("NO_COLOR", "1")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("planc starts")
    };
    (0..processes).map(process).collect()
}

/// Sends a signal.
fn send(process: &Child, signal: &str) {
    let line = format!("kill -{signal} {}", process.id());
    Command::new("sh").arg("-c").arg(line).status().expect("sh starts");
}

/// Waits until rank 0 has printed a step. The pipe is then to be read to its end, so that it is never full.
fn wait_for_a_step(processes: &mut [Child]) -> BufReader<ChildStdout> {
    let mut out = BufReader::new(processes[0].stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.starts_with("step:") {
        line.clear();
        assert!(out.read_line(&mut line).expect("text") > 0, "the run goes on");
    }
    out
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Losses, norms and checkpoints of one process with threads are those of as many processes as ranks.
#[test]
fn cpu_ranks_in_processes_compute_the_same() {
    let fp8 = "--set recipe=Float8CurrentScaling() --set batch=Global(2) --set sequence=64";
    for (mesh, processes, set) in
        [("2", 2, ""), ("2x2", 4, ""), ("1x2", 2, fp8), ("2", 2, fp8), ("2x2", 4, fp8)]
    {
        let test = format!("launch_same_{mesh}_{}", set.len());
        let folder = Folder::new(&test, &[]);
        let run = format!("run model.ron --mesh {mesh} --steps 4 {set} --metrics");
        folder.works(&format!("{run} threads.jsonl --save threads"));
        let ranks = start(&folder, processes, &format!("{run} processes.jsonl --save processes"));
        for (rank, process) in ranks.into_iter().enumerate() {
            let Output { status, stdout, stderr } = process.wait_with_output().expect("it ends");
            assert_eq!((status.code(), text(&stderr).as_str()), (Some(0), ""), "{test}");
            assert!(rank == 0 || stdout.is_empty(), "{}", text(&stdout));
        }
        let numbers = |name: &str| -> Vec<String> {
            let line = |it: &str| {
                let it: serde_json::Value = serde_json::from_str(it).expect("JSON");
                format!("{} {} {}", it["step"], it["loss"], it["grad_norm"])
            };
            folder.read(name).lines().map(line).collect()
        };
        assert_eq!(numbers("processes.jsonl"), numbers("threads.jsonl"), "{test}");
        let saved = |name: &str| -> BTreeMap<String, Vec<u8>> {
            files_of_any_run(&folder.0.join(name).join("step-4"))
        };
        let (threads, processes) = (saved("threads"), saved("processes"));
        assert!(threads.keys().eq(processes.keys()), "{test}");
        let differ: Vec<&String> =
            threads.keys().filter(|&it| threads[it] != processes[it]).collect();
        assert_eq!(differ, Vec::<&String>::new(), "{test}");
    }
}

/// Whichever rank is killed, the others say so and end.
#[test]
fn a_killed_process_ends_the_others_on_the_cpu() {
    let folder = Folder::new("launch_killed", &[]);
    for killed in 0..4 {
        let mut ranks = start(&folder, 4, "run model.ron --mesh 2x2 --steps 1000000");
        let mut out = wait_for_a_step(&mut ranks);
        ranks[killed].kill().expect("it runs");
        copy(&mut out, &mut sink()).expect("it ends");
        for (rank, process) in ranks.into_iter().enumerate() {
            let Output { status, stderr, .. } = process.wait_with_output().expect("it ends");
            if rank != killed {
                let stderr = text(&stderr);
                assert_eq!(status.code(), Some(1), "{stderr}");
                assert!(
                    stderr.contains("PL0565") && stderr.contains(&format!("rank {killed} (")),
                    "rank {rank}: {stderr}"
                );
            }
        }
    }
}

/// A process that stands still says nothing; the others tell where all ranks were.
#[test]
fn a_stopped_process_ends_the_others_on_the_cpu() {
    let folder = Folder::new("launch_stopped", &[]);
    let mut ranks = start(&folder, 2, "run model.ron --mesh 2 --steps 1000000 --timeout 5");
    let mut out = wait_for_a_step(&mut ranks);
    send(&ranks[1], "STOP");
    copy(&mut out, &mut sink()).expect("it ends");
    let stopped = ranks.remove(1);
    let Output { status, stderr, .. } = ranks.remove(0).wait_with_output().expect("it ends");
    send(&stopped, "KILL");
    stopped.wait_with_output().expect("it has ended");
    let stderr = crate::unwrapped(&text(&stderr));
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("PL0551") && stderr.contains("waits for rank 1"), "{stderr}");
    assert!(stderr.contains("when it ended: rank 0 at "), "{stderr}");
    assert!(stderr.contains("rank 1 gave no answer"), "{stderr}");
}

/// The signal comes to one process, and all finish the same step, which is saved.
#[test]
fn a_signal_to_one_process_stops_all_on_the_cpu() {
    for signalled in [0, 3] {
        let folder = Folder::new(&format!("launch_term_{signalled}"), &[]);
        let mut ranks = start(&folder, 4, "run model.ron --mesh 2x2 --steps 1000000 --save ckpt");
        let mut out = wait_for_a_step(&mut ranks);
        send(&ranks[signalled], "TERM");
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("text");
        for process in ranks {
            let Output { status, stderr, .. } = process.wait_with_output().expect("it ends");
            assert_eq!((status.code(), text(&stderr).as_str()), (Some(143), ""));
        }
        let step = folder.read("ckpt/latest").replace("step-", "");
        assert!(rest.contains(&format!("SIGTERM: stopped after step {step} of")), "{rest}");
        folder.works("ckpt verify ckpt");
    }
}

/// One warning, of rank 0, where others reach it and there is no secret. The other rank never comes.
#[test]
fn rank_0_warns_once_without_a_secret() {
    let folder = Folder::new("launch_warns", &[]);
    let check = |rank: u32, master: &str, more: &str, env: &[(&str, &str)], warnings: usize| {
        let line = format!(
            "run model.ron --mesh 2 --rank {rank} --world-size 2 --local-rank 0 --master {master} --timeout 1 {more}"
        );
        let ran = folder.planc_with(&line, env);
        let found = ran.stderr.matches("warning: there is no job secret").count();
        assert_eq!((ran.code, found), (1, warnings), "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains("PL0563"), "{}", ran.stderr);
    };
    check(0, "10.0.0.5:29500", "", &[], 1);
    check(1, "10.0.0.5:29500", "", &[], 0);
    check(0, "10.0.0.5:29500", "", &[SECRET], 0);
    check(0, "127.0.0.1:29500", "", &[], 0);
    check(0, "127.0.0.1:29500", "--listen 0.0.0.0", &[], 1);
}

#[test]
fn a_secret_that_is_none_is_refused() {
    let folder = Folder::new("launch_secret", &[]);
    folder.write("short", "hunter2\n");
    let launch =
        "run model.ron --mesh 2 --rank 0 --world-size 2 --local-rank 0 --master 127.0.0.1:1";
    let check = |more: &str, env: &[(&str, &str)], expect: &str| {
        let ran = folder.planc_with(&format!("{launch} {more}"), env);
        assert!(ran.code == 1 && ran.stderr.contains("PL0567"), "{}", ran.stderr);
        assert!(ran.stderr.contains(expect) && !ran.stderr.contains("hunter2"), "{}", ran.stderr);
    };
    check("--job-secret-file short", &[], "`short` has 7 bytes");
    check("--job-secret-file absent", &[], "`absent` cannot be read");
    check("", &[("PLANC_JOB_SECRET", "hunter2")], "PLANC_JOB_SECRET has 7 bytes");
    check("", &[SECRET, ("PLANC_JOB_SECRET_FILE", "short")], "is there twice");
}

/// All ranks find the same mistake, meet to tell each other, and none waits until its time is up.
#[test]
fn ranks_that_fail_their_own_checks_end_together() {
    let folder = Folder::new("launch_own_checks", &[]);
    let master = master();
    let began = std::time::Instant::now();
    let ranks = [0, 1, 2].map(|rank| {
        Command::new(env!("CARGO_BIN_EXE_planc"))
            .args("run model.ron --mesh 2 --device cuda --world-size 3 --local-rank 0".split(' '))
            .args(["--rank", &rank.to_string(), "--master", &master])
            .current_dir(&folder.0)
            .env("NO_COLOR", "1")
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("planc starts")
    });
    for rank in ranks {
        let output = rank.wait_with_output().expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("PL0562") && stderr.contains("3 processes"), "{stderr}");
    }
    assert!(began.elapsed().as_secs() < 120, "it took {:?}", began.elapsed());
}

/// A rank without a plan comes to say so, and rank 0 does not wait for it until its time is up.
#[test]
fn a_rank_without_a_plan_tells_the_others() {
    let folder = Folder::new("launch_no_plan", &[]);
    let master = master();
    let began = std::time::Instant::now();
    let ranks = [("model.ron", "0"), ("absent.ron", "1")].map(|(model, rank)| {
        Command::new(env!("CARGO_BIN_EXE_planc"))
            .args(["run", model, "--mesh", "2", "--device", "cuda", "--world-size", "2"])
            .args(["--local-rank", "0", "--rank", rank, "--master", &master])
            .current_dir(&folder.0)
            .envs([SECRET, ("NO_COLOR", "1")])
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("planc starts")
    });
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        // Without a driver, rank 0 has an error of its own.
        let of_1 = stderr.contains("PL0601") && stderr.contains("absent.ron");
        assert!(of_1 || rank == 0 && stderr.contains("PL0540"), "rank {rank}: {stderr}");
    }
    // Rank 0 would give a rank of which it hears nothing ten seconds.
    assert!(began.elapsed().as_secs() < 9, "it took {:?}", began.elapsed());
}

/// The scripts of `docs/gpu.md`, with launchers that say what secret they would hand to ranks.
#[test]
fn the_scripts_of_the_docs_make_a_secret() {
    let page = fs::read_to_string(workspace("docs/gpu.md")).expect("it is there");
    let scripts: Vec<&str> =
        page.split("```").skip(1).step_by(2).filter(|it| it.contains("openssl rand")).collect();
    assert_eq!(scripts.len(), 3, "one machine, Slurm, several torchruns");
    for (i, script) in scripts.iter().enumerate() {
        let folder = Folder::new(&format!("launch_script_{i}"), &[]);
        let stub = |name: &str, body: &str| {
            folder.write(name, format!("#!/bin/sh\n{body}\n"));
            let path = folder.0.join(name);
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
        };
        // As of `openssl rand -hex 32`, of which a machine for tests may have none.
        stub(
            "openssl",
            "test \"$*\" = 'rand -hex 32' && od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n'",
        );
        let hand = "for it; do test \"$last\" = --job-secret-file && cat \"$it\"; last=$it; done\n\
                    printf %s \"$PLANC_JOB_SECRET\"";
        stub("torchrun", hand);
        stub("srun", hand);
        let path =
            format!("{}:{}", folder.0.display(), std::env::var("PATH").expect("there is one"));
        let output = Command::new("bash")
            .args(["-euc", script])
            .current_dir(&folder.0)
            .env_remove(SECRET.0)
            .envs([
                ("HOME", folder.0.display().to_string()),
                ("PATH", path),
                ("I", "0".to_string()),
            ])
            .output()
            .expect("bash starts");
        let secret = String::from_utf8_lossy(&output.stdout);
        let is_hex = secret.bytes().all(|it| it.is_ascii_hexdigit());
        assert!(is_hex && secret.len() == 64, "{script}: {secret:?} {output:?}");
        if let Ok(file) = folder.0.join("llama.secret").metadata() {
            assert_eq!(file.permissions().mode() & 0o777, 0o600, "others cannot read it");
        }
    }
}
