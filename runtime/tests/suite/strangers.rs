//! Strangers at the port of a run: hostile connections in all kinds, before and during a run of four processes.
//!
//! Nothing that they do ends the run or delays it, what they cost is bounded, and nobody tells them anything.
//! `STRANGERS=2000` makes that many connections, instead of a few of each kind.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use runtime::comm::control::frame::{Failure, Hello, Limits, Message, Sender};
use runtime::launch::secret::{Key, Nonces, Secret};
use runtime::launch::{Hosted, Master, Process, Waits};

use crate::processes::free_port;

const RANKS: u64 = 4;

/// The variable that has the secret, and the secret of the run.
const VARIABLE: &str = "PLANC_JOB_SECRET";
const SECRET: &str = "the ranks of the test know this";

/// The value of a fact, which no stranger may hear.
const PLAN: &str = "6f12a907";

/// The first bytes of a connection.
const MAGIC: &[u8; 8] = b"planc\r\n\x02";

/// Bytes of a nonce, and of a proof.
const NONCE: usize = 32;

/// A run that nobody disturbs takes this long between two steps.
const PACE: Duration = Duration::from_millis(20);

fn secret(text: &str) -> Option<Secret> {
    Secret::find(None, &|name| (name == VARIABLE).then(|| text.to_string())).expect("long enough")
}

/// Meets the others on a port, as one of `world_size`.
fn meet(rank: u64, world_size: u64, port: u16) -> Hosted {
    let host = "127.0.0.1".to_string();
    let secret = secret(SECRET);
    let master = Master { host, ports: vec![port], secret, ..Master::default() };
    let process = Process { by: "the test", rank, world_size, local_rank: 0, master };
    let waits = Waits { meeting: Duration::from_secs(60), answer: Duration::from_secs(60) };
    let facts = vec![("plan".to_string(), PLAN.to_string())];
    Hosted::process(&process, facts, (waits, Limits { data: 4096 }), Ok(())).expect("they meet")
}

/// The knowledge of a stranger.
struct World {
    port: u16,
    /// The bytes that a rank of this job once sent to rank 0, on another port.
    recorded: Vec<u8>,
    /// Connections that are kept until the end.
    held: Mutex<Vec<TcpStream>>,
}

/// A hostile connection; the result is what rank 0 said to it.
type Kind = fn(&World) -> io::Result<Vec<u8>>;

const KINDS: [(&str, Kind); 23] = [
    ("connects and goes", |world| world.say(&[])),
    ("connects and is silent", |world| world.hold(&[])),
    ("starts as planc does and is silent", |world| world.hold(&MAGIC[..4])),
    ("speaks an older protocol", |world| world.ask(b"planc\r\n\x01\x01\xff\xff\xff\xff{}")),
    ("is a browser", |world| world.ask(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")),
    ("wants TLS", |world| world.ask(&[&[0x16, 3, 1, 2, 0, 1, 0][..], &[7; 512]].concat())),
    ("sends zeros", |world| world.ask(&vec![0; 1 << 20])),
    ("sends one byte at a time", |world| world.trickle()),
    ("greets and goes", |world| world.say(&greeting())),
    ("greets and is silent", |world| world.hold(&greeting())),
    ("proves nothing", |world| world.greet(greeting())?.answer(&[5; NONCE])),
    ("sends back the proof of rank 0", |world| {
        let guest = world.greet(greeting())?;
        let proof = guest.proof.clone();
        guest.answer(&proof)
    }),
    ("sends back the nonce of rank 0", |world| {
        let first = world.greet(greeting())?;
        let second = world.greet([&MAGIC[..], &first.nonces.first].concat())?;
        let (of_first, of_second) = (first.proof.clone(), second.proof.clone());
        Ok([first.answer(&of_second)?, second.answer(&of_first)?].concat())
    }),
    ("repeats what a rank said", |world| world.ask(&world.recorded)),
    ("repeats what a rank said, when asked", |world| {
        let (greeting, rest) = world.recorded.split_at(MAGIC.len() + NONCE);
        world.greet(greeting.to_vec())?.answer(rest)
    }),
    ("guesses, and has other facts", |world| world.guess(Some("a guess of a stranger"), hello(1))),
    ("guesses, and is a rank that is there", |world| {
        world.guess(Some("a guess of a stranger"), hello(2))
    }),
    ("guesses, and is no rank", |world| {
        world.guess(Some("a guess of a stranger"), hello(u64::MAX))
    }),
    ("has no secret", |world| world.guess(None, hello(1))),
    ("guesses, and fails", |world| {
        let message = "\x1b[2Jall is lost".to_string();
        let failure = Failure { code: "PL0508".to_string(), message, bug: false };
        world.guess(Some("a guess of a stranger"), Message::Fail(failure))
    }),
    ("guesses, and comes to say that it failed", |world| {
        let Message::Hello(it) = hello(1) else { unreachable!("it was made so") };
        let (code, message) = ("PL0508".to_string(), "all is lost".to_string());
        let failed = Some(Failure { code, message, bug: false });
        world.guess(Some("a guess of a stranger"), Message::Hello(Hello { failed, ..it }))
    }),
    ("guesses, and obeys no terminal", |world| {
        let Message::Hello(it) = hello(1) else { unreachable!("it was made so") };
        let host = "\x1b]0;owned\x07\x1b[2J".to_string();
        world.guess(Some("a guess of a stranger"), Message::Hello(Hello { host, ..it }))
    }),
    ("guesses, and has 4 GiB to say", |world| {
        let guest = world.greet(greeting())?;
        let key = Key::of(secret("a guess of a stranger").as_ref(), "");
        let proof = key.proof(Sender::Other, &guest.nonces);
        guest.answer(&[&proof[..], &[1, 0xff, 0xff, 0xff, 0xff], &[0; 4096]].concat())
    }),
];

fn greeting() -> Vec<u8> {
    [&MAGIC[..], &[9; NONCE]].concat()
}

fn hello(rank: u64) -> Message {
    let facts = vec![("plan".to_string(), "8a03".to_string())];
    Message::Hello(Hello { rank, host: "elsewhere".to_string(), facts, failed: None })
}

/// A stranger that has greeted and was answered.
struct Greeted {
    stream: TcpStream,
    nonces: Nonces,
    proof: Vec<u8>,
    heard: Vec<u8>,
}

impl World {
    fn connect(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).expect("rank 0 listens");
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        Ok(stream)
    }

    fn say(&self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        self.connect()?.write_all(bytes)?;
        Ok(Vec::new())
    }

    fn hold(&self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = self.connect()?;
        stream.write_all(bytes)?;
        self.held.lock().expect("no panic").push(stream);
        Ok(Vec::new())
    }

    /// Says that, and hears all that comes.
    fn ask(&self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = self.connect()?;
        // It may hang up before it has heard all.
        let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
        Ok(rest(&mut stream))
    }

    fn trickle(&self) -> io::Result<Vec<u8>> {
        let mut stream = self.connect()?;
        for byte in [greeting(), vec![5; NONCE]].concat() {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            sleep(Duration::from_millis(5));
        }
        Ok(rest(&mut stream))
    }

    fn greet(&self, greeting: Vec<u8>) -> io::Result<Greeted> {
        let mut stream = self.connect()?;
        stream.write_all(&greeting)?;
        let mut heard = vec![0; MAGIC.len() + 2 * NONCE];
        stream.read_exact(&mut heard)?;
        let (nonce, proof) = heard[MAGIC.len()..].split_at(NONCE);
        let nonce_of = |it: &[u8]| it.try_into().expect("32 bytes");
        let nonces = Nonces { other: nonce_of(&greeting[MAGIC.len()..]), first: nonce_of(nonce) };
        Ok(Greeted { stream, nonces, proof: proof.to_vec(), heard })
    }

    /// Goes on as a rank with that secret would.
    fn guess(&self, guess: Option<&str>, message: Message) -> io::Result<Vec<u8>> {
        let guest = self.greet(greeting())?;
        let key = Key::of(guess.and_then(secret).as_ref(), "");
        let proof = key.proof(Sender::Other, &guest.nonces);
        let frame = key.seal(Sender::Other, &guest.nonces).frame(&message);
        guest.answer(&[&proof[..], &frame].concat())
    }
}

impl Greeted {
    fn answer(mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let _ = self.stream.write_all(bytes);
        Ok([self.heard, rest(&mut self.stream)].concat())
    }
}

fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut res = Vec::new();
    let _ = stream.read_to_end(&mut res);
    res
}

/// The bytes that a rank of this job sends to rank 0 until it has joined, as a relay between them hears them.
fn record() -> Vec<u8> {
    let (port, relay) = (free_port(), TcpListener::bind(("127.0.0.1", 0)).expect("a port"));
    let between = relay.local_addr().expect("bound").port();
    scope(|scope| {
        let ranks = [(0, port), (1, between)];
        let ranks = ranks.map(|(rank, port)| scope.spawn(move || meet(rank, 2, port)));
        // Rank 1 tries until rank 0 is there, too.
        let (mut rank, first) = loop {
            let rank = relay.accept().expect("rank 1 comes").0;
            if let Ok(it) = TcpStream::connect(("127.0.0.1", port)) {
                break (rank, it);
            }
        };
        let clone = |it: &TcpStream| it.try_clone().expect("it is open");
        let (back, mut forth) = ((clone(&first), clone(&rank)), first);
        scope.spawn(move || pass_on(back.0, back.1));
        let mut said = Vec::new();
        // Magic number, nonce, proof, and the head of a hello.
        let mut needed = MAGIC.len() + 2 * NONCE + 5;
        while said.len() < needed {
            let mut byte = [0];
            rank.read_exact(&mut byte).expect("it says hello");
            forth.write_all(&byte).expect("rank 0 listens");
            said.push(byte[0]);
            if said.len() == MAGIC.len() + 2 * NONCE + 5 {
                let length: [u8; 4] = said[said.len() - 4..].try_into().expect("four bytes");
                needed += u32::from_le_bytes(length) as usize + NONCE;
            }
        }
        scope.spawn(move || pass_on(rank, forth));
        let ranks = ranks.map(|it| it.join().expect("they meet"));
        let _ends = ranks.map(|it| scope.spawn(move || drop(it)));
        said
    })
}

fn pass_on(mut from: TcpStream, mut to: TcpStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// Makes connections of all kinds, so many of each, some at a time, and checks what they heard.
fn storm(world: &World, each: usize) {
    let (next, n) = (AtomicUsize::new(0), each * KINDS.len());
    let heard: Mutex<BTreeSet<String>> = Mutex::default();
    scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= n {
                        return;
                    }
                    let (name, kind) = KINDS[i % KINDS.len()];
                    // An error is rank 0 that hangs up.
                    let bytes = kind(world).unwrap_or_default();
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    let most = MAGIC.len() + 2 * NONCE;
                    if bytes.len() > most * 2 || text.contains("plan is") || text.contains(PLAN) {
                        heard.lock().expect("no panic").insert(format!("{name}: {text}"));
                    }
                }
            });
        }
    });
    assert_eq!(*heard.lock().expect("no panic"), BTreeSet::new(), "facts were told");
}

/// The address and the number of a rank, for its process.
const RANK: &str = "PLANC_TEST_STRANGERS";

/// A rank of the test below, when that starts this binary again: it runs steps until its stdin ends.
#[test]
fn rank() {
    let Ok(given) = std::env::var(RANK) else { return };
    let (rank, port) = given.split_once(' ').expect("two numbers");
    let (rank, port) = (rank.parse().expect("a rank"), port.parse().expect("a port"));
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later").as_millis();
    let here = now();
    let hosted = meet(rank, RANKS, port);
    println!("\nmet {here} {}", now());
    let (ended, end) = channel();
    std::thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        let _ = ended.send(());
    });
    let (mut last, mut longest, mut steps) = (Instant::now(), Duration::ZERO, 0u64);
    let control = &hosted.ranks[0].control;
    loop {
        // Rank 0 sets the pace; an empty message is the last.
        let over = rank == 0 && end.recv_timeout(PACE) != Err(RecvTimeoutError::Timeout);
        let bytes = if over { Vec::new() } else { vec![1] };
        let heard = control.broadcast((rank == 0).then_some(bytes)).expect("the run goes on");
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if heard.is_empty() {
            break;
        }
        steps += 1;
    }
    assert_eq!(hosted.fault.get(), None);
    println!("\nran {} {steps}", longest.as_millis());
}

fn start(rank: u64, port: u16) -> Child {
    Command::new(std::env::current_exe().expect("a test"))
        .args(["--exact", "strangers::rank", "--nocapture"])
        .env(RANK, format!("{rank} {port}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("it starts")
}

/// Resident bytes and open descriptors of a process.
fn usage(pid: u32) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|it| it.strip_prefix("VmRSS:")).expect("Linux says it");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count();
    (kib << 10, open)
}

/// The most that a process uses until it is told to stop.
fn watch(pid: u32, watching: &AtomicBool) -> (u64, usize) {
    let mut most = (0, 0);
    while watching.load(Ordering::Relaxed) {
        let (bytes, open) = usage(pid);
        most = (most.0.max(bytes), most.1.max(open));
        sleep(Duration::from_millis(2));
    }
    most
}

/// Lets a watch end, whatever happens.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

type Lines = io::Lines<BufReader<ChildStdout>>;

/// The numbers of the line of a rank that starts so.
fn numbers(lines: &mut Lines, start: &str) -> [u64; 2] {
    let line = lines.find_map(|it| it.expect("text").strip_prefix(start).map(str::to_string));
    let line = line.unwrap_or_else(|| panic!("the rank ended before it `{start}`"));
    let all: Vec<u64> = line.split_whitespace().map(|it| it.parse().expect("a number")).collect();
    all.try_into().expect("two numbers")
}

#[test]
fn strangers_neither_end_a_run_nor_delay_it() {
    let given = std::env::var("STRANGERS").ok();
    let connections: usize = given.as_ref().map_or(88, |it| it.parse().expect("a number"));
    // On a machine that builds something, processes wait for each other anyway.
    let delay = if given.is_some() { 1000 } else { 10_000 };
    let each = connections.div_ceil(2 * KINDS.len());
    let world = World { port: free_port(), recorded: record(), held: Mutex::default() };
    let mut ranks = vec![start(0, world.port)];
    let pid = ranks[0].id();
    while TcpStream::connect(("127.0.0.1", world.port)).is_err() {
        sleep(PACE);
    }
    let (before, watching) = (usage(pid), AtomicBool::new(true));
    let (most, mut lines) = scope(|scope| {
        let _stop = Stop(&watching);
        let watch = scope.spawn(|| watch(pid, &watching));
        // Half of them before the other ranks come, and while they do.
        let early = scope.spawn(|| storm(&world, each));
        while world.held.lock().expect("no panic").len() < 3 {
            sleep(PACE);
        }
        ranks.extend((1..RANKS).map(|it| start(it, world.port)));
        let stdouts = ranks.iter_mut().map(|it| it.stdout.take().expect("it is piped"));
        let mut lines: Vec<Lines> = stdouts.map(|it| BufReader::new(it).lines()).collect();
        let met: Vec<[u64; 2]> = lines.iter_mut().map(|it| numbers(it, "met ")).collect();
        let came = met.iter().map(|it| it[0]).max().expect("ranks");
        let took = met.iter().map(|it| it[1]).max().expect("ranks").saturating_sub(came);
        println!("all met {took} ms after the last had come");
        assert!(took < delay, "the ranks met after {took} ms");
        early.join().expect("no facts are told");
        storm(&world, each);
        drop(_stop);
        (watch.join().expect("rank 0 runs"), lines)
    });
    drop(ranks[0].stdin.take());
    for (rank, lines) in lines.iter_mut().enumerate() {
        let [longest, steps] = numbers(lines, "ran ");
        println!("rank {rank}: {steps} steps, the longest {longest} ms");
        assert!(longest < delay, "rank {rank} waited for {longest} ms");
    }
    for (rank, mut child) in ranks.into_iter().enumerate() {
        assert!(child.wait().expect("it was started").success(), "rank {rank}");
    }
    let (bytes, open) = (most.0.saturating_sub(before.0), most.1.saturating_sub(before.1));
    println!(
        "{} connections of {} kinds: rank 0 grew by {bytes} bytes and {open} descriptors",
        2 * each * KINDS.len(),
        KINDS.len()
    );
    assert!(bytes < 64 << 20 && open < 128, "rank 0 grew by {bytes} bytes, {open} descriptors");
}
