//! How processes find each other: rank 0 listens, the others connect, and all compare what they run.
//!
//! Rank 0 takes the first free port of [`Master::ports`], on all interfaces; the others try all of
//! them until their time is up. Each connection starts with a magic number, and then says which job
//! it is of:
//!
//! * what is not planc (a port scanner, another service) is dropped, and rank 0 waits on;
//! * another job is told so, and looks elsewhere;
//! * a rank of this job that differs (another plan, program, option, or a rank that is here already)
//!   ends the run on all sides, with what differs;
//! * who comes when all ranks are here is told so, and ends nothing but itself.
//!
//! The connections then stay open as the ranks' [`Control`](crate::comm::control::Control).

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Weak};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Master;
use crate::comm::control::tcp::{AddError, FRAME_MAX, Inner, Kind, Pulse, Tcp, frame, read_frame};
use crate::comm::control::{Fault, ranks_text};
use crate::error::RunError;

/// What a connection starts with, in both directions. The last byte is the version of the protocol.
const MAGIC: [u8; 8] = *b"planc\r\n\x01";

/// How long the other end may take for its first words.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The most bytes of a frame before the other end is known.
const HELLO_MAX: usize = 64 << 10;

/// What one rank brings to the meeting.
#[derive(Debug, Clone)]
pub struct Meeting<'a> {
    /// Which rank.
    pub rank: u64,
    /// How many there are.
    pub world_size: u64,
    /// Where they meet.
    pub master: &'a Master,
    /// What must be the same on all: names and values.
    pub facts: Vec<(String, String)>,
    /// How long to wait for all.
    pub timeout: Duration,
    /// For ranks that are lost later.
    pub pulse: Pulse,
}

/// What a rank says of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    job: String,
    rank: u64,
    host: String,
    facts: Vec<(String, String)>,
}

/// What rank 0 answers where it does not take a rank in.
#[derive(Debug, Serialize, Deserialize)]
enum Refusal {
    /// It waits for the ranks of another job.
    OtherJob(String),
    /// All of its ranks are here.
    Complete,
    /// They do not fit together.
    Differs { who: String, differences: Vec<String> },
}

/// Meets the other ranks. `fault` is raised when one of them fails, from now on.
pub fn meet(meeting: &Meeting, fault: &Arc<Fault>) -> Result<Arc<Tcp>, RunError> {
    let (rank, n_ranks) = (meeting.rank, meeting.world_size);
    let tcp = Tcp::new(rank, n_ranks, &host_name(), fault, meeting.pulse);
    if n_ranks == 1 {
        return Ok(Arc::new(tcp));
    }
    tcp.start_beat().map_err(|it| meeting.error(format!("no thread can be started: {it}")))?;
    let until = Instant::now() + meeting.timeout;
    match rank {
        0 => listen(meeting, &tcp, until)?,
        _ => join(meeting, &tcp, until)?,
    }
    Ok(Arc::new(tcp))
}

impl Meeting<'_> {
    fn error(&self, why: String) -> RunError {
        let ports = match &self.master.ports[..] {
            [first, .., last] => format!("{first}-{last}"),
            ports => ports.first().map_or(String::new(), u16::to_string),
        };
        RunError::Rendezvous { master: format!("{}:{ports}", self.master.host), why }
    }

    /// Facts that all ranks compare, the number of ranks and the program among them.
    fn facts(&self) -> Vec<(String, String)> {
        let own = [("world size", self.world_size.to_string()), ("planc", version().to_string())];
        let own = own.into_iter().map(|(name, value)| (name.to_string(), value));
        own.chain(self.facts.iter().cloned()).collect()
    }
}

/// The version of this program.
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The name of this machine.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "unknown host".to_string() } else { name.trim().to_string() }
}

/// Rank 0: waits until all are here.
fn listen(meeting: &Meeting, tcp: &Tcp, until: Instant) -> Result<(), RunError> {
    let listener = bind(meeting)?;
    let desk = Desk {
        inner: Arc::downgrade(tcp.inner()),
        fault: tcp.fault_handle(),
        job: meeting.master.job.clone(),
        facts: meeting.facts(),
        host: host_name(),
        world_size: meeting.world_size,
    };
    let started = Builder::new().name("rendezvous".to_string()).spawn(move || desk.run(&listener));
    started.map_err(|it| meeting.error(format!("no thread can be started: {it}")))?;
    let inner = tcp.inner();
    let error = match inner.wait_complete(Some(until)) {
        Some(true) => {
            inner.go();
            return Ok(());
        }
        Some(false) => meeting.error(format!(
            "{} did not come within {} s; start all ranks (under Slurm with srun), see that they reach \
             this port, or give them more time with --timeout",
            ranks_text(&inner.absent()),
            meeting.timeout.as_secs()
        )),
        None => {
            // Those that come late would look for it until their time is up.
            inner.linger();
            RunError::Stopped
        }
    };
    let fault = tcp.fault_handle();
    fault.raise(error);
    Err(fault.get().expect("just raised"))
}

/// Takes the first free port, on all interfaces.
fn bind(meeting: &Meeting) -> Result<TcpListener, RunError> {
    let mut why = String::new();
    for &port in &meeting.master.ports {
        let bound = match TcpListener::bind(("::", port)) {
            // Without IPv6 there is only the other.
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                TcpListener::bind(("0.0.0.0", port))
            }
            bound => bound,
        };
        match bound.and_then(|it| it.set_nonblocking(true).map(|()| it)) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                why =
                    "the port is in use, by another run or program; give another port".to_string();
            }
            Err(error) => why = format!("rank 0 cannot listen: {error}"),
        }
    }
    Err(meeting.error(why))
}

/// Rank 0's reception, for as long as the run goes on: who comes late is told so.
struct Desk {
    inner: Weak<Inner>,
    fault: Arc<Fault>,
    job: String,
    facts: Vec<(String, String)>,
    host: String,
    world_size: u64,
}

impl Desk {
    fn run(self, listener: &TcpListener) {
        let desk = Arc::new(self);
        while let Some(inner) = desk.inner.upgrade() {
            if inner.is_closing() {
                return;
            }
            // Once the run goes on, those who come can wait a little for their refusal.
            let pause = Duration::from_millis(if inner.is_complete() { 200 } else { 10 });
            drop(inner);
            match listener.accept() {
                Ok((stream, _)) => {
                    let desk = desk.clone();
                    // A connection that says nothing keeps its thread only. Without one, it is
                    // dropped, and tries again.
                    let _ = Builder::new().spawn(move || desk.receive(stream));
                }
                // Nobody there, or one that has gone again.
                Err(_) => sleep(pause),
            }
        }
    }

    fn receive(&self, mut stream: TcpStream) {
        // What is not planc is not worth a word.
        let Ok(hello) = read_hello(&mut stream) else { return };
        let Some(inner) = self.inner.upgrade() else { return };
        let refusal = match self.look_at(&hello, inner.is_complete()) {
            Some(refusal) => refusal,
            None => {
                let greeting = [&MAGIC[..], &frame(Kind::Joined, self.host.as_bytes())].concat();
                let Ok(answering) = stream.try_clone() else { return };
                let who = (hello.rank, hello.host.as_str());
                match inner.add(who, answering, &greeting) {
                    Ok(()) => return,
                    Err(AddError::Complete) => Refusal::Complete,
                    Err(AddError::Taken(host)) => {
                        let who = format!("rank {} came twice", hello.rank);
                        let hosts = format!("from {host} and from {}", hello.host);
                        Refusal::Differs { who, differences: vec![hosts] }
                    }
                    Err(AddError::Io(_)) => return,
                }
            }
        };
        let text = serde_json::to_vec(&refusal).unwrap_or_default();
        // If it does not hear it, it hears the end of the connection.
        let _ = stream.write_all(&[&MAGIC[..], &frame(Kind::Refused, &text)].concat());
        if let Refusal::Differs { who, differences } = refusal {
            inner.refuse(hello.rank);
            self.fault.raise(RunError::RanksDiffer { who, differences });
        }
    }

    /// Why this rank cannot be of the run, which is `complete` or still waits for ranks.
    fn look_at(&self, hello: &Hello, complete: bool) -> Option<Refusal> {
        if hello.job != self.job {
            return Some(Refusal::OtherJob(self.job.clone()));
        }
        // Whatever else is wrong with it: it is none of those that run, and must not end them.
        if complete {
            return Some(Refusal::Complete);
        }
        let mut differences = differences(&hello.facts, &self.facts);
        if differences.is_empty() && !(1..self.world_size).contains(&hello.rank) {
            differences.push(format!("there is no rank {} of {}", hello.rank, self.world_size));
        }
        if differences.is_empty() {
            return None;
        }
        let who = format!("rank {} ({}) and rank 0 ({}) differ", hello.rank, hello.host, self.host);
        Some(Refusal::Differs { who, differences })
    }
}

/// `` plan is 6f12 and 8a03 ``, of those and of rank 0.
fn differences(theirs: &[(String, String)], ours: &[(String, String)]) -> Vec<String> {
    let value = |facts: &[(String, String)], name: &str| {
        facts.iter().find(|it| it.0 == name).map_or("not given".to_string(), |it| it.1.clone())
    };
    let mut names: Vec<&String> = ours.iter().chain(theirs).map(|it| &it.0).collect();
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|it| seen.insert(*it));
    let values = names.into_iter().map(|it| (it, value(theirs, it), value(ours, it)));
    let differ = values.filter(|it| it.1 != it.2);
    differ.map(|(name, theirs, ours)| format!("{name} is {theirs} and {ours}")).collect()
}

fn read_hello(stream: &mut TcpStream) -> io::Result<Hello> {
    // What a listener accepts may inherit that it does not wait.
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HANDSHAKE))?;
    stream.set_write_timeout(Some(HANDSHAKE))?;
    read_magic(stream)?;
    match read_frame(stream, HELLO_MAX)? {
        (Kind::Hello, payload) => Ok(serde_json::from_slice(&payload)?),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn read_magic(stream: &mut TcpStream) -> io::Result<()> {
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic)?;
    if magic == MAGIC { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// The other ranks: finds rank 0 and waits until it has all.
fn join(meeting: &Meeting, tcp: &Tcp, until: Instant) -> Result<(), RunError> {
    let (stream, host) = find(meeting, until)?;
    let inner = tcp.inner();
    inner.add((0, &host), stream, &[]).map_err(|it| {
        meeting.error(match it {
            AddError::Io(error) => format!("the connection does not work: {error}"),
            AddError::Complete | AddError::Taken(_) => "it was joined twice".to_string(),
        })
    })?;
    // Rank 0 knows how long to wait for the others.
    match inner.wait_complete(None) {
        Some(_) => Ok(()),
        None => Err(tcp.fault_handle().get().expect("that is why the wait ended")),
    }
}

/// What came of one try to connect.
enum Try {
    Joined(TcpStream, String),
    /// It will not do; the error is final.
    Refused(RunError),
    /// It may do later, or elsewhere; what was found.
    NotYet(String),
}

fn find(meeting: &Meeting, until: Instant) -> Result<(TcpStream, String), RunError> {
    let mut pause = Duration::from_millis(20);
    loop {
        let mut found = Vec::new();
        for &port in &meeting.master.ports {
            match try_port(meeting, port, until) {
                Try::Joined(stream, host) => return Ok((stream, host)),
                Try::Refused(error) => return Err(error),
                Try::NotYet(what) if !found.contains(&what) => found.push(what),
                Try::NotYet(_) => (),
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(meeting.error(format!(
                "rank 0 was not found there within {} s ({}); start rank 0, see that its host and port \
                 are right and reachable, or give more time with --timeout",
                meeting.timeout.as_secs(),
                found.join("; ")
            )));
        }
        sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

fn try_port(meeting: &Meeting, port: u16, until: Instant) -> Try {
    let addresses = match (meeting.master.host.as_str(), port).to_socket_addrs() {
        Ok(it) => it,
        Err(error) => return Try::NotYet(format!("no such host: {error}")),
    };
    let mut what = "no such host".to_string();
    for address in addresses {
        let left = until.saturating_duration_since(Instant::now());
        // At least once, also when the time is up.
        let limit = left.clamp(Duration::from_millis(200), Duration::from_secs(5));
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return greet(meeting, stream, port, until),
            Err(error) => what = error.to_string(),
        }
    }
    Try::NotYet(what)
}

fn greet(meeting: &Meeting, mut stream: TcpStream, port: u16, until: Instant) -> Try {
    // Something that accepts and says nothing must not keep a rank beyond its time.
    let left = until.saturating_duration_since(Instant::now());
    let limit = left.clamp(Duration::from_secs(1), HANDSHAKE);
    let answer = (|| -> io::Result<(Kind, Vec<u8>)> {
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        let hello = Hello {
            job: meeting.master.job.clone(),
            rank: meeting.rank,
            host: host_name(),
            facts: meeting.facts(),
        };
        let text = serde_json::to_vec(&hello)?;
        stream.write_all(&[&MAGIC[..], &frame(Kind::Hello, &text)].concat())?;
        read_magic(&mut stream)?;
        read_frame(&mut stream, FRAME_MAX)
    })();
    match answer {
        Ok((Kind::Joined, host)) => {
            Try::Joined(stream, String::from_utf8_lossy(&host).into_owned())
        }
        Ok((Kind::Refused, text)) => match serde_json::from_slice(&text) {
            Ok(Refusal::OtherJob(job)) => {
                Try::NotYet(format!("port {port} is used by job `{job}`"))
            }
            Ok(Refusal::Complete) => Try::Refused(meeting.error(format!(
                "the run on port {port} has all its ranks; a second run needs another port"
            ))),
            Ok(Refusal::Differs { who, differences }) => {
                Try::Refused(RunError::RanksDiffer { who, differences })
            }
            Err(_) => Try::NotYet(format!("port {port} does not answer as planc")),
        },
        _ => Try::NotYet(format!("port {port} does not answer as planc")),
    }
}

#[cfg(test)]
mod tests;
