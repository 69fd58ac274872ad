//! Real sockets on loopback; every rank is a thread with connections of its own.

use std::sync::mpsc::channel;
use std::thread::scope;

use super::*;
use crate::comm::control::Control;

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    listener.and_then(|it| it.local_addr()).expect("a free port").port()
}

fn master(ports: &[u16]) -> Master {
    Master { host: "127.0.0.1".to_string(), ports: ports.to_vec(), job: "test".to_string() }
}

fn meeting(rank: u64, world_size: u64, master: &Master) -> Meeting<'_> {
    Meeting {
        rank,
        world_size,
        master,
        facts: vec![("plan".to_string(), "6f12".to_string())],
        timeout: Duration::from_secs(60),
        pulse: Pulse::default(),
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

/// A port scanner, a browser, someone who says nothing, and a frame that would be too long.
#[test]
fn strangers_do_not_disturb() {
    let port = free_port();
    let master = master(&[port]);
    let ranks = scope(|scope| {
        let first = scope.spawn(|| meet(&meeting(0, 2, &master), &Arc::default()));
        let knock = |bytes: &[u8]| {
            let mut stream = loop {
                if let Ok(it) = TcpStream::connect(("127.0.0.1", port)) {
                    break it;
                }
            };
            stream.write_all(bytes).expect("it listens");
            stream
        };
        let mut long = MAGIC.to_vec();
        long.extend([Kind::Hello as u8, 0xff, 0xff, 0xff, 0xff]);
        let mut wrong = MAGIC.to_vec();
        wrong.extend(frame(Kind::Hello, b"{}"));
        let silent = knock(b"");
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &long, &wrong, &[0; 100]] {
            // It hangs up without a word.
            let mut answer = Vec::new();
            let _ = knock(bytes).read_to_end(&mut answer);
            assert!(answer.is_empty(), "{answer:?}");
        }
        let second = meet(&meeting(1, 2, &master), &Arc::default());
        drop(silent);
        [first.join().expect("no panic"), second]
    });
    end(ranks.into_iter().map(|it| it.expect("they met")).collect());
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
    let mute = Pulse { beat: long, silence: long, linger: long };
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
