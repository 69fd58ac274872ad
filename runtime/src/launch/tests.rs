//! Tables of what launchers set, and what follows.

use super::*;

/// Reads `RANK=0 WORLD_SIZE=2`.
fn detect(flags: &LaunchFlags, variables: &str) -> Result<Launch, RunError> {
    let pairs: Vec<(&str, &str)> =
        variables.split_whitespace().filter_map(|it| it.split_once('=')).collect();
    let env = |name: &str| pairs.iter().find(|it| it.0 == name).map(|it| it.1.to_string());
    Launch::detect(flags, &env)
}

/// `rank/world_size local host:port..port job`.
fn text(launch: Launch) -> String {
    match launch {
        Launch::Threads => "threads".to_string(),
        Launch::Process(it) => {
            let ports: Vec<String> = it.master.ports.iter().map(u16::to_string).collect();
            let ports = match &ports[..] {
                [one] => one.clone(),
                several => format!("{}..{}", several[0], several[several.len() - 1]),
            };
            let (rank, size, local, host) =
                (it.rank, it.world_size, it.local_rank, &it.master.host);
            format!("{}: {rank}/{size} {local} {host} {ports} ({})", it.by, it.master.job)
        }
    }
}

#[track_caller]
fn check(variables: &str, expect: &str) {
    let found = detect(&LaunchFlags::default(), variables);
    assert_eq!(found.map(text).unwrap_or_else(|it| it.to_string()), expect, "{variables}");
}

fn flags(rank: u64, master: &str) -> LaunchFlags {
    LaunchFlags {
        rank: Some(rank),
        world_size: Some(4),
        local_rank: Some(1),
        master: Some(master.to_string()),
        ..LaunchFlags::default()
    }
}

#[track_caller]
fn check_flags(flags: &LaunchFlags, expect: &str) {
    let variables = "RANK=7 WORLD_SIZE=8 LOCAL_RANK=7 MASTER_ADDR=a MASTER_PORT=1";
    let found = detect(flags, variables);
    assert_eq!(found.map(text).unwrap_or_else(|it| it.to_string()), expect);
}

#[test]
fn nothing_set_is_threads() {
    check("", "threads");
    check("MASTER_ADDR=a MASTER_PORT=1", "threads");
    check("RANK= WORLD_SIZE=", "threads");
    // A shell in an allocation of one task.
    check("SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_JOB_NODELIST=n1", "threads");
    check("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_JOB_NODELIST=n1", "threads");
}

#[test]
fn flags_come_first() {
    check_flags(&flags(3, "node1:29500"), "the command line: 3/4 1 node1 29500 ()");
    check_flags(&flags(0, "[fd00::1]:80"), "the command line: 0/4 1 fd00::1 80 ()");
    let form = "which is not host:port; give it as node1:29500 or [fd00::1]:29500";
    for master in ["node1", ":80", "fd00::1:80", "[]:80"] {
        check_flags(&flags(0, master), &format!("--master is `{master}`, {form}"));
    }
    check_flags(&flags(0, "a:0"), "--master is `0`, which is no port; ports are 1 to 65535");
    check_flags(
        &flags(4, "a:1"),
        "--rank is `4`, which is not below --world-size = 4; ranks count from 0",
    );
    let part = LaunchFlags { rank: Some(1), world_size: Some(2), ..LaunchFlags::default() };
    check_flags(
        &part,
        "the command line says which rank this process is, but not --local-rank, --master; give all \
         of --rank, --world-size, --local-rank, --master",
    );
    let none = LaunchFlags { world_size: Some(0), ..flags(0, "a:1") };
    check_flags(&none, "--world-size is `0`, which leaves no rank to run");
}

#[test]
fn torchrun() {
    let all = "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29500";
    check(all, "torchrun: 3/8 1 node1 29500 ()");
    // Its agent may hold the port.
    check(
        &format!("{all} TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=2 SLURM_PROCID=0"),
        "torchrun: 3/8 1 node1 29501..29508 (torchrun none.2 on 29500)",
    );
    let high = all.replace("29500", "65530");
    check(
        &format!("{high} TORCHELASTIC_RUN_ID=x"),
        "torchrun: 3/8 1 node1 65529..65522 (torchrun x. on 65530)",
    );
    check(
        "WORLD_SIZE=8 MASTER_ADDR=a",
        "torchrun says which rank this process is, but not RANK, LOCAL_RANK, MASTER_PORT; give all of \
         RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    );
    check(&all.replace("RANK=3", "RANK=-1"), "RANK is `-1`, which is not a whole number from 0 on");
    check(
        &all.replace("RANK=3", "RANK=8"),
        "RANK is `8`, which is not below WORLD_SIZE = 8; ranks count from 0",
    );
    check(
        &all.replace("29500", "70000"),
        "MASTER_PORT is `70000`, which is no port; ports are 1 to 65535",
    );
}

#[test]
fn slurm() {
    let all = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=1234567 \
               SLURM_JOB_NODELIST=node[003-005,9],login1";
    check(all, "Slurm: 5/8 1 node003 19567..19574 (Slurm 1234567.)");
    // A step on some of the nodes, with fewer tasks.
    check(
        &format!("{all} SLURM_STEP_ID=2 SLURM_STEP_NODELIST=node[4-5] SLURM_STEP_NUM_TASKS=6"),
        "Slurm: 5/6 1 node4 19567..19574 (Slurm 1234567.2)",
    );
    check(
        &format!("{all} MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"),
        "Slurm: 5/8 1 10.0.0.1 29500 (Slurm 1234567.)",
    );
    // A step of one task, as of `srun --pty bash`, also in an allocation for more.
    let shell = all.replace("PROCID=5", "PROCID=0") + " SLURM_STEP_ID=0";
    check(&shell.replace("NTASKS=8", "NTASKS=1"), "threads");
    check(&format!("{shell} SLURM_STEP_NUM_TASKS=1"), "threads");
    check(
        &all.replace("SLURM_LOCALID=1", ""),
        "Slurm says which rank this process is, but not SLURM_LOCALID; give all of SLURM_PROCID, \
         SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST",
    );
    check(
        &all.replace("NTASKS=8", "NTASKS=many"),
        "SLURM_NTASKS is `many`, which is not a whole number from 0 on",
    );
    check(
        &all.replace("SLURM_JOB_ID=1234567", ""),
        "Slurm says which rank this process is, but not SLURM_JOB_ID or MASTER_PORT; give all of \
         SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST",
    );
    check(
        &all.replace("node[003", "node[a003"),
        "SLURM_JOB_NODELIST is `node[a003-005,9],login1`, which is no list of nodes; set MASTER_ADDR \
         to the first",
    );
}

#[test]
fn the_first_host_of_a_list() {
    let cases = [
        ("node1", Some("node1")),
        ("node1,node2", Some("node1")),
        ("node[003-005,9],login1", Some("node003")),
        ("node[9,003-005]", Some("node9")),
        ("rack[1-2]n[07-08]-ib", Some("rack1n07-ib")),
        ("login1,node[1-2]", Some("login1")),
        ("gpu-a.cluster.local", Some("gpu-a.cluster.local")),
        ("", None),
        (",node1", None),
        ("node[1-2", None),
        ("node]1", None),
        ("node[]", None),
        ("node[-2]", None),
        ("(null)", None),
    ];
    for (list, expect) in cases {
        assert_eq!(first_host(list).as_deref(), expect, "{list}");
    }
}

#[test]
fn the_gpu_of_a_rank() {
    let rank = Hosted::threads(3).ranks.remove(2);
    assert_eq!((rank.gpu(8), rank.gpu(1)), (2, 2), "a thread is not moved to another's GPU");
    let process = Process {
        by: "the test",
        rank: 0,
        world_size: 1,
        local_rank: 2,
        master: Master::default(),
    };
    let waits = Waits { meeting: Duration::ZERO, answer: Duration::ZERO };
    let hosted = Hosted::process(&process, Vec::new(), (waits, Limits { data: 0 }), Ok(()));
    let process = hosted.expect("nobody else is to come").ranks.remove(0);
    assert_eq!((process.gpu(8), process.gpu(1)), (2, 0));
}

/// A name that is this machine's loopback is where rank 0 listens, if nobody comes from elsewhere.
#[test]
fn launchers_say_when_all_ranks_are_on_one_machine() {
    let torchrun = "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29500";
    let slurm = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a";
    for (variables, expect) in [
        (format!("{torchrun} LOCAL_WORLD_SIZE=8"), true),
        (format!("{torchrun} LOCAL_WORLD_SIZE=4"), false),
        (torchrun.to_string(), false),
        (format!("{slurm} SLURM_JOB_NUM_NODES=1"), true),
        (format!("{slurm} SLURM_JOB_NUM_NODES=2"), false),
        (format!("{slurm} SLURM_JOB_NUM_NODES=2 SLURM_STEP_NUM_NODES=1"), true),
    ] {
        let launch = detect(&LaunchFlags::default(), &variables);
        let Ok(Launch::Process(it)) = launch else { panic!("{variables}: {launch:?}") };
        assert_eq!(it.master.one_machine, expect, "{variables}");
    }
}

/// The flags that go with any launcher do not say which rank this is.
#[test]
fn where_to_listen_and_the_secret_go_with_any_launcher() {
    let extra = LaunchFlags {
        listen: Some("0.0.0.0".to_string()),
        secret_file: Some("/not/there".into()),
        ..LaunchFlags::default()
    };
    assert_eq!(detect(&extra, ""), Ok(Launch::Threads));
    let all = "RANK=0 WORLD_SIZE=8 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500";
    assert_eq!(detect(&extra, all).expect_err("no such file").code(), "PL0567");
    let listen = LaunchFlags { secret_file: None, ..extra };
    let secret = "PLANC_JOB_SECRET=0123456789abcdef";
    let launch = detect(&listen, &format!("{all} {secret}")).expect("both are given");
    let Launch::Process(it) = &launch else { panic!("{launch:?}") };
    assert_eq!(it.master.listen.as_deref(), Some("0.0.0.0"));
    assert!(it.master.secret.is_some() && !format!("{launch:?}").contains("0123"), "{launch:?}");
}

/// One warning, of rank 0, where others than this machine reach it and nothing keeps them out.
#[test]
fn without_a_secret_other_addresses_than_loopback_are_warned_of() {
    let check = |variables: &str, flags: &LaunchFlags, expect: &[&str]| {
        let warnings = detect(flags, variables).expect("it is whole").warnings();
        assert_eq!(warnings, expect, "{variables}");
    };
    let none = LaunchFlags::default();
    let of = |rank: u64, host: &str| {
        format!("RANK={rank} WORLD_SIZE=8 LOCAL_RANK=0 MASTER_ADDR={host} MASTER_PORT=29500")
    };
    let warning = "there is no job secret, so that whoever reaches 10.0.0.5 can join this run as one of \
                   its ranks; set PLANC_JOB_SECRET or PLANC_JOB_SECRET_FILE for all ranks";
    check(&of(0, "10.0.0.5"), &none, &[warning]);
    check(&of(1, "10.0.0.5"), &none, &[]);
    check(&of(0, "127.0.0.1"), &none, &[]);
    check(&of(0, "localhost"), &none, &[]);
    check(&format!("{} PLANC_JOB_SECRET=0123456789abcdef", of(0, "10.0.0.5")), &none, &[]);
    let all = LaunchFlags { listen: Some("0.0.0.0".to_string()), ..LaunchFlags::default() };
    check(&of(0, "127.0.0.1"), &all, &[&warning.replace("10.0.0.5", "0.0.0.0")]);
    let file = std::env::temp_dir().join(format!("planc-open-{}", std::process::id()));
    std::fs::write(&file, "0123456789abcdef").expect("it can be written");
    let flags = LaunchFlags { secret_file: Some(file.clone()), ..LaunchFlags::default() };
    for (mode, warnings) in [(0o600, 0), (0o644, 1)] {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&file, permissions).expect("it is ours");
        let found = detect(&flags, &of(0, "10.0.0.5")).expect("it is whole").warnings();
        assert_eq!(found.len(), warnings, "{found:?}");
    }
    std::fs::remove_file(&file).expect("it is there");
}
