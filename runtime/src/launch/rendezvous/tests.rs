//! Real sockets on loopback; every rank is a thread with connections of its own.

use std::sync::mpsc::channel;
use std::thread::scope;

use super::*;
use crate::comm::control::Control;
use crate::launch::secret::Secret;

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    listener.and_then(|it| it.local_addr()).expect("a free port").port()
}

/// Without a secret.
fn open_master(ports: &[u16]) -> Master {
    let (host, job) = ("127.0.0.1".to_string(), "test".to_string());
    Master { host, ports: ports.to_vec(), job, ..Master::default() }
}

fn secret(text: &str) -> Option<Secret> {
    Secret::find(None, &|name| (name == "PLANC_JOB_SECRET").then(|| text.to_string()))
        .expect("it is long enough")
}

fn master(ports: &[u16]) -> Master {
    Master { secret: secret("0123456789abcdef"), ..open_master(ports) }
}

fn meeting(rank: u64, world_size: u64, master: &Master) -> Meeting<'_> {
    Meeting {
        rank,
        world_size,
        master,
        facts: vec![("plan".to_string(), "6f12".to_string())],
        timeout: Duration::from_secs(60),
        pulse: Pulse::default(),
        limits: Limits { data: 64 << 10 },
    }
}

type Met = Result<Arc<Tcp>, RunError>;

/// Meets as these, all at once.
fn meet_all(meetings: &[Meeting]) -> Vec<Met> {
    scope(|scope| {
        let ranks: Vec<_> =
            meetings.iter().map(|it| scope.spawn(|| meet(it, &Arc::default()))).collect();
        ranks.into_iter().map(|it| it.join().expect("no panic")).collect()
    })
}

fn together(n: u64) -> Vec<Arc<Tcp>> {
    let master = master(&[free_port()]);
    let meetings: Vec<Meeting> = (0..n).map(|it| meeting(it, n, &master)).collect();
    meet_all(&meetings).into_iter().map(|it| it.expect("all meet")).collect()
}

/// Ends all ranks at once, as at the end of a run.
fn end(ranks: Vec<Arc<Tcp>>) {
    scope(|scope| ranks.into_iter().for_each(|it| drop(scope.spawn(move || drop(it)))));
}

fn errors(met: Vec<Met>) -> Vec<String> {
    met.into_iter().map(|it| it.expect_err("it is refused").to_string()).collect()
}

/// Waits for a rank to hear of a failure, without which the test would not end.
fn fault(rank: &Tcp) -> RunError {
    let (sender, receiver) = channel();
    rank.fault_handle().listen(move |error| {
        let _ = sender.send(error.clone());
    });
    receiver.recv().expect("the fault outlives its listeners")
}

#[test]
fn broadcasts_come_in_order() {
    let ranks = together(5);
    scope(|scope| {
        for rank in &ranks {
            scope.spawn(move || {
                for i in 0..100u32 {
                    let bytes = vec![i as u8; i as usize * 100];
                    let given = (rank.rank() == 0).then(|| bytes.clone());
                    assert_eq!(rank.broadcast(given), Ok(bytes));
                }
            });
        }
    });
    end(ranks);
}

#[test]
fn a_run_of_one_needs_no_port() {
    let master = master(&[]);
    let rank = meet(&meeting(0, 1, &master), &Arc::default()).expect("alone");
    assert_eq!(rank.broadcast(Some(vec![1])), Ok(vec![1]));
}

/// Under torchrun others may hold some of the ports.
#[test]
fn a_port_that_is_taken_is_passed_over() {
    let taken = TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    let taken = taken.expect("a port");
    let first = taken.local_addr().expect("bound").port();
    // What is there does not speak planc: it hangs up.
    let service = std::thread::spawn(move || {
        for stream in taken.incoming().take(1) {
            drop(stream);
        }
    });
    let master = master(&[first, free_port()]);
    let meetings: Vec<Meeting> = (0..2).map(|it| meeting(it, 2, &master)).collect();
    let ranks: Vec<Arc<Tcp>> =
        meet_all(&meetings).into_iter().map(|it| it.expect("they meet")).collect();
    end(ranks);
    service.join().expect("it was asked");
}

#[test]
fn a_port_in_use_is_an_error_of_rank_0() {
    let taken = TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    let port = taken.as_ref().expect("a port").local_addr().expect("bound").port();
    let error = meet(&meeting(0, 2, &master(&[port])), &Arc::default()).expect_err("in use");
    assert_eq!(
        error.to_string(),
        format!(
            "the ranks cannot meet at 127.0.0.1:{port}: the port is in use, by another run or program; \
             give another port"
        )
    );
}

#[test]
fn another_plan_is_refused_on_all_sides() {
    let master = master(&[free_port()]);
    let mut meetings: Vec<Meeting> = (0..3).map(|it| meeting(it, 3, &master)).collect();
    meetings[2].facts[0].1 = "8a03".to_string();
    meetings[2].facts.push(("seed".to_string(), "1".to_string()));
    let host = host_name();
    let expect = format!(
        "rank 2 ({host}) and rank 0 ({host}) differ: plan is 8a03 and 6f12, seed is 1 and not given; \
         start all ranks with the same program, model and options"
    );
    for error in errors(meet_all(&meetings)) {
        assert_eq!(error, expect);
    }
}

#[test]
fn another_world_size_is_refused() {
    let master = master(&[free_port()]);
    let met = meet_all(&[meeting(0, 2, &master), meeting(1, 4, &master)]);
    for error in errors(met) {
        assert!(error.contains("differ: world size is 4 and 2;"), "{error}");
    }
}

#[test]
fn a_rank_that_comes_twice_is_refused() {
    let master = master(&[free_port()]);
    // Rank 2 does not come at all.
    let pulse = Pulse { linger: Duration::ZERO, ..Pulse::default() };
    let met = meet_all(&[0, 1, 1].map(|it| Meeting { pulse, ..meeting(it, 3, &master) }));
    for error in errors(met) {
        assert!(error.starts_with("rank 1 came twice: from "), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let master = master(&[free_port()]);
    let short = |rank| {
        let timeout = if rank == 0 { Duration::from_millis(300) } else { Duration::from_secs(60) };
        Meeting { timeout, ..meeting(rank, 5, &master) }
    };
    let met = meet_all(&[short(0), short(3)]);
    for error in errors(met) {
        assert!(error.contains("ranks 1-2, 4 did not come within 0 s"), "{error}");
    }
}

#[test]
fn a_rank_0_that_does_not_come_is_an_error() {
    let port = free_port();
    let timeout = Duration::from_millis(100);
    let master = master(&[port]);
    let met = meet(&Meeting { timeout, ..meeting(1, 2, &master) }, &Arc::default());
    let error = met.expect_err("nobody is there").to_string();
    assert!(error.contains("rank 0 was not found there within 0 s (Connection refused"), "{error}");
}

/// Something that accepts and says nothing does not keep a rank much longer than it wants to wait.
#[test]
fn a_silent_service_is_no_rank_0() {
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let master = master(&[silent.local_addr().expect("bound").port()]);
    let timeout = Duration::from_millis(100);
    let began = Instant::now();
    let met = meet(&Meeting { timeout, ..meeting(1, 2, &master) }, &Arc::default());
    let error = met.expect_err("nobody answers").to_string();
    assert!(error.contains("does not answer as planc"), "{error}");
    assert!(began.elapsed() < HANDSHAKE, "it took {:?}", began.elapsed());
}

/// A second run on the same port, started later.
#[test]
fn a_run_that_is_complete_takes_no_more() {
    let port = free_port();
    let master = master(&[port]);
    let first: Vec<Met> = meet_all(&[meeting(0, 2, &master), meeting(1, 2, &master)]);
    // One of the same plan, of another, and of a larger mesh.
    let mut other = meeting(1, 2, &master);
    other.facts[0].1 = "8a03".to_string();
    for late in [meeting(1, 2, &master), other, meeting(3, 4, &master)] {
        let error = meet(&late, &Arc::default()).expect_err("it is taken");
        assert_eq!(
            error.to_string(),
            format!(
                "the ranks cannot meet at 127.0.0.1:{port}: the run on port {port} has all its ranks; \
                 a second run needs another port"
            )
        );
    }
    let ranks: Vec<Arc<Tcp>> = first.into_iter().map(|it| it.expect("they met")).collect();
    assert_eq!(ranks[0].fault(), None, "the first run goes on");
    end(ranks);
}

/// Two jobs with the same ports on one machine, as of two torchruns: each finds its own.
#[test]
fn jobs_that_share_ports_find_their_own() {
    let ports = [free_port(), free_port()];
    let (a, b) = (master(&ports), Master { job: "other".to_string(), ..master(&ports) });
    let met =
        meet_all(&[meeting(1, 2, &a), meeting(1, 2, &b), meeting(0, 2, &a), meeting(0, 2, &b)]);
    let ranks: Vec<Arc<Tcp>> = met.into_iter().map(|it| it.expect("each finds its own")).collect();
    end(ranks);
}

/// What one rank fails with is what all end with, its code as well.
#[test]
fn a_failure_ends_all_with_its_cause() {
    for failing in [0, 2] {
        let ranks = together(4);
        scope(|scope| {
            let waiting = ranks[1..].iter().filter(|it| it.rank() != failing);
            let waiting: Vec<_> = waiting.map(|it| scope.spawn(|| it.broadcast(None))).collect();
            let error = RunError::NotExact { buffer: "ids".to_string(), value: 1 << 25 };
            ranks[failing as usize].fail(error);
            for it in waiting {
                assert_eq!(it.join().expect("no panic"), Err(RunError::Stopped));
            }
        });
        for rank in &ranks {
            let error = fault(rank);
            assert_eq!((error.code(), error.is_bug()), ("PL0508", false));
            let who = format!("rank {failing} ({}): ", host_name());
            let named = error.to_string().starts_with(&who);
            assert_eq!(named, rank.rank() != failing, "{error}");
            assert!(error.to_string().contains("`ids` holds 33554432"), "{error}");
        }
        end(ranks);
    }
}

/// A process that is killed: its system closes its connections.
#[test]
fn a_rank_that_dies_ends_all() {
    for dying in [0, 2] {
        let ranks = together(4);
        ranks[dying].inner().die();
        for (rank, it) in ranks.iter().enumerate().filter(|it| it.0 != dying) {
            let error = fault(it);
            assert_eq!(error.code(), "PL0565", "rank {rank}: {error}");
            let who = format!("rank {dying} ({}) ended without a word", host_name());
            assert!(error.to_string().starts_with(&who), "rank {rank}: {error}");
        }
        end(ranks);
    }
}

/// A machine that is lost closes nothing.
#[test]
fn a_rank_that_is_silent_ends_all() {
    let master = master(&[free_port()]);
    let long = Duration::from_secs(600);
    let mute = Pulse { beat: long, silence: long, linger: long, answer: long };
    let strict = Pulse { beat: Duration::from_millis(50), silence: Duration::from_secs(1), ..mute };
    let pulses = [strict, mute, strict];
    let meetings: Vec<Meeting> = (0..3u64)
        .map(|it| Meeting { pulse: pulses[it as usize], ..meeting(it, 3, &master) })
        .collect();
    let met = meet_all(&meetings);
    let ranks: Vec<Arc<Tcp>> = met.into_iter().map(|it| it.expect("they meet")).collect();
    for rank in &ranks {
        let error = fault(rank).to_string();
        assert!(error.contains("rank 1 (") && error.contains("silent for 1 s"), "{error}");
    }
    end(ranks);
}

#[test]
fn a_rank_that_is_done_is_not_an_error() {
    let mut ranks = together(3);
    drop(ranks.remove(1));
    drop(ranks.remove(1));
    let last = ranks.remove(0);
    assert_eq!(last.fault(), None);
}

#[test]
fn rank_0_hears_where_all_were() {
    let ranks = together(3);
    for rank in [0, 2] {
        ranks[rank].report(format!("step[{rank}]"));
    }
    ranks[1].report("step[1]".to_string());
    let positions = ranks[0].positions(Duration::from_secs(60));
    let expect = (0..3).map(|it| Some(format!("step[{it}]"))).collect::<Vec<_>>();
    assert_eq!(positions, expect);
    end(ranks);
}

/// A rank with another secret, or none, neither joins nor ends a run.
#[test]
fn ranks_with_another_secret_do_not_meet() {
    let port = free_port();
    let ours = master(&[port]);
    let timeout = Duration::from_millis(300);
    let ranks = scope(|scope| {
        let first = scope.spawn(|| meet(&meeting(0, 2, &ours), &Arc::default()));
        for secret in [None, secret("0123456789abcdeg")] {
            let theirs = Master { secret, ..ours.clone() };
            let mut other = meeting(1, 2, &theirs);
            other.facts[0].1 = "8a03".to_string();
            let met = meet(&Meeting { timeout, ..other }, &Arc::default());
            let error = met.expect_err("it does not know the secret").to_string();
            let why = format!("port {port} is of another job, or of one with another secret");
            assert!(error.contains(&why), "{error}");
        }
        let second = meet(&meeting(1, 2, &ours), &Arc::default());
        [first.join().expect("no panic"), second]
    });
    end(ranks.into_iter().map(|it| it.expect("they met")).collect());
}

/// Without a secret, a rank that differs may be anyone: it hears no values, and ends nothing but itself.
#[test]
fn without_a_secret_a_rank_that_differs_is_turned_away() {
    let master = open_master(&[free_port()]);
    let ranks = scope(|scope| {
        let first = scope.spawn(|| meet(&meeting(0, 2, &master), &Arc::default()));
        let host = host_name();
        let mut other = meeting(1, 2, &master);
        other.facts[0].1 = "8a03".to_string();
        let error = meet(&other, &Arc::default()).expect_err("it differs").to_string();
        let differ = format!("rank 1 ({host}) and rank 0 differ: plan is not that of rank 0;");
        assert!(error.starts_with(&differ), "{error}");
        let error = meet(&meeting(7, 2, &master), &Arc::default()).expect_err("no such rank");
        assert!(error.to_string().contains("there is no rank 7 of 2"), "{error}");
        let second = meet(&meeting(1, 2, &master), &Arc::default());
        [first.join().expect("no panic"), second]
    });
    end(ranks.into_iter().map(|it| it.expect("they met")).collect());
}

/// Rank 0 says what was wrong with it if no other rank comes in its place.
#[test]
fn rank_0_says_whom_it_turned_away() {
    let master = open_master(&[free_port()]);
    let mut meetings = [meeting(0, 2, &master), meeting(1, 2, &master)];
    meetings[0].timeout = Duration::from_millis(500);
    meetings[1].facts[0].1 = "8a\x1b[2J03".to_string();
    let error = errors(meet_all(&meetings)).remove(0);
    let away = format!(
        "rank 1 did not come within 0 s (rank 1 ({}) was turned away: plan is 8a\\u{{1b}}[2J03 and 6f12)",
        host_name()
    );
    assert!(error.contains(&away), "{error}");
}

/// The time that a rank may take to end on a busy machine; the impostors below would hold it for a minute.
const SLACK: Duration = Duration::from_secs(4);

/// An impostor that sends a byte now and then, as the start of an answer, keeps nobody.
#[test]
fn an_impostor_of_rank_0_that_trickles_does_not_hold_ranks() {
    let impostor = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let master = master(&[impostor.local_addr().expect("bound").port()]);
    let timeout = Duration::from_secs(1);
    let done = std::sync::atomic::AtomicBool::new(false);
    let began = Instant::now();
    let error = scope(|scope| {
        scope.spawn(|| {
            impostor.set_nonblocking(true).expect("it can");
            let mut held: Vec<TcpStream> = Vec::new();
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                held.extend(impostor.accept().ok().map(|it| it.0));
                let bytes = [&MAGIC[..], &[7; 64]].concat();
                for (i, stream) in held.iter_mut().enumerate() {
                    let _ = stream.write_all(&bytes[i % bytes.len()..][..1]);
                }
                sleep(Duration::from_millis(20));
            }
        });
        let met = meet(&Meeting { timeout, ..meeting(1, 2, &master) }, &Arc::default());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        met.expect_err("nobody has the secret").to_string()
    });
    assert!(error.contains("does not answer as planc"), "{error}");
    assert!(began.elapsed() < timeout + SLACK, "it took {:?}", began.elapsed());
}

/// Without a secret an impostor can take ranks in, and let them wait: to begin, or for what it should send.
#[test]
fn an_impostor_of_rank_0_that_takes_ranks_in_does_not_hold_them() {
    let timeout = Duration::from_millis(500);
    let master = open_master(&[free_port()]);
    let began = Instant::now();
    scope(|scope| {
        // Rank 2 never comes, and it goes on beating.
        let first = scope.spawn(|| meet(&meeting(0, 3, &master), &Arc::default()));
        let met = meet(&Meeting { timeout, ..meeting(1, 3, &master) }, &Arc::default());
        let error = met.expect_err("it does not begin").to_string();
        assert!(error.contains("took this rank in, and has not begun within 0 s"), "{error}");
        assert!(began.elapsed() < timeout + GRACE + SLACK, "it took {:?}", began.elapsed());
        assert!(first.join().expect("no panic").is_err(), "it hears of that");
    });
    let port = open_master(&[free_port()]);
    let pulse = Pulse { answer: timeout, ..Pulse::default() };
    let met = meet_all(&[0, 1].map(|it| Meeting { pulse, ..meeting(it, 2, &port) }));
    let ranks: Vec<Arc<Tcp>> = met.into_iter().map(|it| it.expect("they meet")).collect();
    let began = Instant::now();
    let error = ranks[1].broadcast(None).expect_err("it sends nothing").to_string();
    assert!(error.contains("has not sent for 0 s what the others wait for"), "{error}");
    assert!(began.elapsed() < timeout + SLACK, "it took {:?}", began.elapsed());
    end(ranks);
}

/// Meets as three ranks of which one has failed before, and returns what all end with.
fn meet_failed(failing: usize, master: &Master, facts: Vec<(String, String)>) -> Vec<RunError> {
    let mut meetings = [0, 1, 2].map(|it| meeting(it, 3, master));
    meetings[0].timeout = Duration::from_secs(3);
    meetings[failing].facts = facts;
    let faults: [Arc<Fault>; 3] = Default::default();
    faults[failing].raise(RunError::NoDriver);
    scope(|scope| {
        let ranks = meetings.iter().zip(&faults);
        let ranks: Vec<_> = ranks.map(|(it, fault)| scope.spawn(|| meet(it, fault))).collect();
        let met = ranks.into_iter().map(|it| it.join().expect("no panic"));
        met.map(|it| it.expect_err("all end")).collect()
    })
}

/// A rank whose own checks fail comes to say so, whichever it is, and whether it knows what the others run.
#[test]
fn a_rank_that_fails_its_own_checks_tells_the_others() {
    for (failing, is_secret, knows) in [
        (0, true, true),
        (0, true, false),
        (0, false, true),
        (2, true, true),
        (2, true, false),
        (2, false, true),
    ] {
        let ports = [free_port()];
        let master = if is_secret { master(&ports) } else { open_master(&ports) };
        let facts = if knows { meeting(0, 3, &master).facts } else { Vec::new() };
        for (rank, error) in meet_failed(failing, &master, facts).iter().enumerate() {
            assert_eq!(error.code(), RunError::NoDriver.code(), "rank {rank}: {error}");
            let named = error.to_string().starts_with(&format!("rank {failing} ("));
            assert_eq!(named, rank != failing, "rank {rank}: {error}");
        }
    }
    // Without a secret, it may be anyone.
    let errors = meet_failed(2, &open_master(&[free_port()]), Vec::new());
    let error = errors[0].to_string();
    assert!(
        error.contains("rank 2 did not come") && error.contains("turned away: rank 2 ("),
        "{error}"
    );
}

/// A stranger that has joined, without a secret, cannot make a rank grow: rank 0 takes no broadcasts, and
/// others take what the plan needs.
#[test]
fn a_peer_that_floods_is_cut_off() {
    let master = open_master(&[free_port()]);
    let met = meet_all(&[0, 1].map(|it| meeting(it, 2, &master)));
    let ranks: Vec<Arc<Tcp>> = met.into_iter().map(|it| it.expect("they meet")).collect();
    ranks[1].inner().send_all(&Message::Data(vec![0; 1024]));
    for rank in &ranks {
        let error = fault(rank).to_string();
        assert!(error.contains("rank 1 (") && error.contains("no message of planc"), "{error}");
    }
    end(ranks);
    let ranks = together(2);
    for _ in 0..9 {
        ranks[0].inner().send_all(&Message::Data(vec![0; 64 << 10]));
    }
    let error = fault(&ranks[1]).to_string();
    assert!(error.contains("sends more than this rank asked for"), "{error}");
    end(ranks);
}

#[track_caller]
fn check_listening(
    host: &str,
    listen: Option<&str>,
    one_machine: bool,
    expect: Result<&str, &str>,
) {
    let listen = listen.map(str::to_string);
    let master = Master { host: host.to_string(), listen, one_machine, ..Master::default() };
    let found = master.listening().map(|it| it[0].to_string());
    match (found, expect) {
        (Err(found), Err(expect)) => assert!(found.contains(expect), "{found}"),
        (found, expect) => assert_eq!(found, expect.map(str::to_string).map_err(str::to_string)),
    }
}

/// The master's address where it is this machine's, else the one that is given.
#[test]
fn rank_0_listens_on_the_address_of_the_master() {
    check_listening("127.0.0.1", None, false, Ok("127.0.0.1"));
    check_listening("127.0.0.7", None, false, Ok("127.0.0.7"));
    check_listening("127.0.0.1", Some("0.0.0.0"), false, Ok("0.0.0.0"));
    // The address of a service: a TEST-NET, which no machine has.
    let ask = "say with --listen which address of this machine rank 0 listens on";
    check_listening("192.0.2.1", None, false, Err("`192.0.2.1` (192.0.2.1) is no address of this"));
    check_listening("192.0.2.1", None, false, Err(ask));
    check_listening("192.0.2.1", Some("127.0.0.1"), false, Ok("127.0.0.1"));
    check_listening(
        "127.0.0.1",
        Some("192.0.2.1"),
        false,
        Err("which is no address of this machine"),
    );
    check_listening("127.0.0.1", Some("not an address"), false, Err("which is no address: "));
    check_listening("no.such.host.invalid", None, false, Err("does not know the address of"));
    assert!(Master { host: "localhost".to_string(), ..Master::default() }.listening().is_ok());
}

/// Rank 0 is not reached on other addresses than those that it listens on.
#[test]
fn rank_0_listens_on_one_address_only() {
    let master = master(&[free_port()]);
    let met = scope(|scope| {
        let first = scope.spawn(|| meet(&meeting(0, 2, &master), &Arc::default()));
        let second = meet(&meeting(1, 2, &master), &Arc::default());
        [first.join().expect("no panic"), second]
    });
    let elsewhere = TcpStream::connect(("127.0.0.2", master.ports[0]));
    assert_eq!(elsewhere.expect_err("closed").kind(), io::ErrorKind::ConnectionRefused);
    end(met.into_iter().map(|it| it.expect("they meet")).collect());
}
