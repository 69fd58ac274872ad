//! Where rank 0 listens, who it lets in, and the scripts of `docs/gpu.md` that start all ranks.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::{Folder, workspace};

const SECRET: (&str, &str) = ("PLANC_JOB_SECRET", "0123456789abcdef");

/// One warning, of rank 0, where others reach it and there is no secret. On the CPU, the run is then refused.
#[test]
fn rank_0_warns_once_without_a_secret() {
    let folder = Folder::new("launch_warns", &[]);
    let check = |rank: u32, master: &str, more: &str, env: &[(&str, &str)], warnings: usize| {
        let line = format!(
            "run model.ron --mesh 2 --rank {rank} --world-size 2 --local-rank 0 --master {master} {more}"
        );
        let ran = folder.planc_with(&line, env);
        let found = ran.stderr.matches("warning: there is no job secret").count();
        assert_eq!((ran.code, found), (1, warnings), "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains("PL0547"), "{}", ran.stderr);
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
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|it| it.local_addr());
    let master = port.expect("a port that is free").to_string();
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
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|it| it.local_addr());
    let master = port.expect("a port that is free").to_string();
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
