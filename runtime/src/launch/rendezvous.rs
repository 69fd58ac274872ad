//! How processes find each other: rank 0 listens, the others connect, and all compare what they run.
//!
//! Rank 0 takes the first free port of [`Master::ports`], on the master's address or on that of `--listen`; the
//! others try all ports until their time is up. Both ends of a connection prove that they know the secret
//! of the job ([`secret`](super::secret)) before either tells the other anything. Then the rank says hello:
//!
//! * a connection that does not prove itself is dropped, and rank 0 waits on. That is a port scanner, a
//!   stranger, or a rank of another job, which looks elsewhere;
//! * a rank of this job that differs (another plan, program, option, or a rank that is here already)
//!   ends the run on all sides, with what differs;
//! * a rank that comes when all ranks are here is told so, and ends nothing but itself.
//!
//! Without a secret nobody is known to be a rank of the job. A rank that differs is then turned away without
//! the values of rank 0, and the run waits on.
//!
//! The connections then stay open as the ranks' [`Control`](crate::comm::control::Control).

mod desk;
mod guests;
pub mod pairs;

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use self::desk::Desk;
use super::Master;
use super::secret::{Key, NONCE, Nonces, nonce};
use crate::comm::control::frame::{Failure, Hello, Limits, Message, Refusal, Sender};
use crate::comm::control::tcp::{Link, Pulse, Tcp};
use crate::comm::control::{Fault, lock, ranks_text};
use crate::error::RunError;

/// The bytes that a connection starts with, in both directions. The last is the version of the protocol.
const MAGIC: [u8; 8] = *b"planc\r\n\x02";

/// The time that the other end may take for the whole handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The time that a rank gives a port in its first round over all ports; twice that in the next, up to
/// [`HANDSHAKE`]. Rank 0 answers at once, and something else that is silent must not keep a rank from it.
const PATIENCE: Duration = Duration::from_millis(500);

/// The time that rank 0 waits for the master's name to be an address of its machine.
const NAMING: Duration = Duration::from_secs(10);

/// The time beyond its own that a rank waits which rank 0 has taken in: rank 0 may have started later, and knows
/// which ranks are missing.
const GRACE: Duration = Duration::from_secs(2);

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
    /// The sizes of messages that ranks take from each other.
    pub limits: Limits,
}

/// Meets the other ranks. `fault` is raised when one of them fails, from now on. If it is raised already, this rank
/// tells the others, and all end with that.
pub fn meet(meeting: &Meeting, fault: &Arc<Fault>) -> Result<Arc<Tcp>, RunError> {
    let ranks = (meeting.rank, meeting.world_size);
    let tcp = Tcp::new(ranks, &host_name(), fault, (meeting.pulse, meeting.limits));
    if meeting.world_size == 1 {
        return Ok(Arc::new(tcp));
    }
    tcp.start_beat().map_err(|it| meeting.error(format!("no thread can be started: {it}")))?;
    let until = Instant::now() + meeting.timeout;
    match meeting.rank {
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

    pub(crate) fn key(&self) -> Key {
        Key::of(self.master.secret.as_ref(), &self.master.job)
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
    let listeners = bind(meeting)?;
    let here = listeners.iter().all(|it| it.local_addr().is_ok_and(|it| it.ip().is_loopback()));
    let turned_away = Arc::new(Mutex::new(None));
    let desk = Desk {
        inner: Arc::downgrade(tcp.inner()),
        fault: tcp.fault_handle(),
        key: meeting.key(),
        is_secret: meeting.master.secret.is_some(),
        facts: meeting.facts(),
        host: host_name(),
        world_size: meeting.world_size,
        limits: meeting.limits,
        turned_away: turned_away.clone(),
    };
    guests::reserve(meeting.world_size).map_err(|it| meeting.error(it))?;
    let started = Builder::new().name("rendezvous".to_string()).spawn(move || desk.run(&listeners));
    started.map_err(|it| meeting.error(format!("no thread can be started: {it}")))?;
    let inner = tcp.inner();
    let error = match inner.wait_complete(Some(until)) {
        Some(true) => {
            inner.go();
            return Ok(());
        }
        Some(false) => {
            let away = lock(&turned_away).take();
            let away = away.map_or(String::new(), |it| format!(" ({it})"));
            let only = if here { ", on addresses of this machine only" } else { "" };
            meeting.error(format!(
                "{} did not come within {} s{away}; start all ranks (under Slurm with srun), with one job \
                 secret, see that they reach this port, where rank 0 listens{only}, or give them more time with \
                 --timeout",
                ranks_text(&inner.absent()),
                meeting.timeout.as_secs()
            ))
        }
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

/// Takes the first free port, on the addresses of the master that are this machine's.
fn bind(meeting: &Meeting) -> Result<Vec<TcpListener>, RunError> {
    let (began, host) = (Instant::now(), meeting.master.listens_as());
    let naming = if is_literal(host) { Duration::ZERO } else { NAMING.min(meeting.timeout) };
    let addresses = loop {
        match meeting.master.listening() {
            Ok(it) => break it,
            // The name of a service may be known a little later than the process starts.
            Err(_) if began.elapsed() < naming => sleep(PATIENCE),
            Err(why) => return Err(meeting.error(why)),
        }
    };
    let mut why = String::new();
    'ports: for &port in &meeting.master.ports {
        let mut listeners = Vec::new();
        for &address in &addresses {
            let bound = TcpListener::bind((address, port));
            match bound.and_then(|it| it.set_nonblocking(true).map(|()| it)) {
                Ok(listener) => listeners.push(listener),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    why = "the port is in use, by another run or program; give another port"
                        .to_string();
                    continue 'ports;
                }
                Err(error) => why = format!("rank 0 cannot listen on {address}: {error}"),
            }
        }
        if !listeners.is_empty() {
            return Ok(listeners);
        }
    }
    Err(meeting.error(why))
}

impl Master {
    /// The addresses that rank 0 listens on: that of `--listen`, else those of the master that are this
    /// machine's. The error says why there are none.
    fn listening(&self) -> Result<Vec<IpAddr>, String> {
        let is_ours = |it: &IpAddr| match TcpListener::bind((*it, 0)) {
            Ok(_) => true,
            Err(error) => error.kind() != io::ErrorKind::AddrNotAvailable,
        };
        let text =
            |all: &[IpAddr]| all.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
        let ask =
            "say with --listen which address of this machine rank 0 listens on, or 0.0.0.0 for all";
        let all = self.addresses().map_err(|it| match &self.listen {
            Some(listen) => format!("--listen is `{listen}`, which is no address: {it}; {ask}"),
            None => format!("rank 0 does not know the address of `{}`: {it}; {ask}", self.host),
        })?;
        let (ours, others): (Vec<IpAddr>, Vec<IpAddr>) = all.into_iter().partition(is_ours);
        if let (true, Some(listen)) = (ours.is_empty(), &self.listen) {
            return Err(format!(
                "--listen is `{listen}`, which is no address of this machine; {ask}"
            ));
        }
        if ours.is_empty() {
            let (host, others) = (&self.host, text(&others));
            return Err(format!("`{host}` ({others}) is no address of this machine; {ask}"));
        }
        // Some systems give the name of a machine to its loopback, which others do not reach.
        let is_name = self.host != "localhost" && !is_literal(&self.host);
        let only_here = ours.iter().all(IpAddr::is_loopback);
        if self.listen.is_none() && is_name && only_here && !self.one_machine {
            let (host, ours) = (&self.host, text(&ours));
            return Err(format!(
                "`{host}` is {ours} here, which other machines do not reach; {ask}"
            ));
        }
        Ok(ours)
    }

    /// The address or name of `--listen`, else of the master.
    fn listens_as(&self) -> &str {
        self.listen.as_ref().unwrap_or(&self.host)
    }

    /// The addresses of `--listen`, else of the master.
    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        let mut res: Vec<IpAddr> =
            (self.listens_as(), 0).to_socket_addrs()?.map(|it| it.ip()).collect();
        let mut seen = std::collections::BTreeSet::new();
        res.retain(|it| seen.insert(*it));
        Ok(res)
    }

    /// Warnings for the user about the address that rank 0 listens on, and about who is let in.
    pub(super) fn warnings(&self) -> Vec<String> {
        let Some(secret) = &self.secret else {
            let addresses = self.addresses().unwrap_or_default();
            if addresses.iter().all(IpAddr::is_loopback) {
                return Vec::new();
            }
            return vec![format!(
                "there is no job secret, so that whoever reaches {} can join this run as one of its ranks; \
                 set PLANC_JOB_SECRET or PLANC_JOB_SECRET_FILE for all ranks",
                addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
            )];
        };
        let open = secret.open_file().map(|it| {
            format!("every user of this machine can read the job secret in `{}`", it.display())
        });
        open.into_iter().collect()
    }
}

fn is_literal(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok()
}

/// One fact that is not the same on two ranks.
struct Difference {
    name: String,
    theirs: String,
    ours: String,
}

/// `` plan is 6f12 and 8a03 ``, of those and of rank 0.
fn differences(theirs: &[(String, String)], ours: &[(String, String)]) -> Vec<Difference> {
    let value = |facts: &[(String, String)], name: &str| {
        facts.iter().find(|it| it.0 == name).map_or("not given".to_string(), |it| it.1.clone())
    };
    let mut names: Vec<&String> = ours.iter().chain(theirs).map(|it| &it.0).collect();
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|it| seen.insert(*it));
    let values = names.into_iter().map(|it| (it, value(theirs, it), value(ours, it)));
    values
        .filter(|it| it.1 != it.2)
        .map(|(name, theirs, ours)| Difference { name: name.clone(), theirs, ours })
        .collect()
}

/// The other ranks: finds rank 0 and waits until it has all.
fn join(meeting: &Meeting, tcp: &Tcp, until: Instant) -> Result<(), RunError> {
    let (inner, fault) = (tcp.inner(), tcp.fault_handle());
    let failed = fault.get().map(|it| (inner.failure(&it), it));
    let (link, host) = find(meeting, failed.as_ref(), until)?;
    inner
        .add((0, &host), link, None)
        .map_err(|it| meeting.error(format!("the connection does not work: {it}")))?;
    match inner.wait_complete(Some(until + GRACE)) {
        Some(true) => return Ok(()),
        Some(false) => fault.raise(meeting.error(format!(
            "rank 0 ({host}) took this rank in, and has not begun within {} s; see what rank 0 waits for, or give \
             more time with --timeout",
            meeting.timeout.as_secs()
        ))),
        None => (),
    }
    Err(fault.get().expect("that is why the wait ended"))
}

/// What came of one try to connect.
enum Try {
    Joined(Box<Link>, String),
    /// It will not do; the error is final.
    Refused(RunError),
    /// It may do later, or elsewhere; what was found.
    NotYet(String),
}

/// The error of this rank, as others and as it sees it.
type Failed<'a> = Option<&'a (Failure, RunError)>;

fn find(meeting: &Meeting, failed: Failed, until: Instant) -> Result<(Link, String), RunError> {
    let (mut pause, mut patience) = (Duration::from_millis(20), PATIENCE);
    let mut found: Vec<String> = Vec::new();
    loop {
        let left = || until.saturating_duration_since(Instant::now());
        if !found.is_empty() && left().is_zero() {
            return Err(meeting.error(format!(
                "rank 0 was not found there within {} s ({}); start rank 0, see that its host and port \
                 are right and reachable, or give more time with --timeout",
                meeting.timeout.as_secs(),
                found.join("; ")
            )));
        }
        found.clear();
        for &port in &meeting.master.ports {
            // At least once, also when the time is up.
            if !found.is_empty() && left().is_zero() {
                break;
            }
            match try_port(meeting, failed, port, (patience, until)) {
                Try::Joined(link, host) => return Ok((*link, host)),
                Try::Refused(error) => return Err(error),
                Try::NotYet(what) if !found.contains(&what) => found.push(what),
                Try::NotYet(_) => (),
            }
        }
        sleep(pause.min(left()));
        pause = (pause * 2).min(Duration::from_secs(1));
        patience = (patience * 2).min(HANDSHAKE);
    }
}

/// Tries all addresses of the master with one port. A service may be silent for `patience`; rank 0, once it has proved
/// that it is that, may take until the handshake's or the meeting's end.
fn try_port(
    meeting: &Meeting,
    failed: Failed,
    port: u16,
    (patience, end): (Duration, Instant),
) -> Try {
    let addresses = match (meeting.master.host.as_str(), port).to_socket_addrs() {
        Ok(it) => it,
        Err(error) => return Try::NotYet(format!("no such host: {error}")),
    };
    let mut what = "no such host".to_string();
    for address in addresses {
        let now = Instant::now();
        let left = end.saturating_duration_since(now).max(Duration::from_millis(200));
        let limits = [patience, HANDSHAKE].map(|it| now + it.min(left));
        what = match TcpStream::connect_timeout(&address, limits[0] - now) {
            Ok(stream) => match greet(meeting, failed, (stream, port), limits) {
                Try::NotYet(what) => what,
                done => return done,
            },
            Err(error) => error.to_string(),
        };
    }
    Try::NotYet(what)
}

fn greet(
    meeting: &Meeting,
    failed: Failed,
    (stream, port): (TcpStream, u16),
    [proof_until, joined_until]: [Instant; 2],
) -> Try {
    let answer = || Try::NotYet(format!("port {port} does not answer as planc"));
    let mut timed = Timed { stream: &stream, until: proof_until };
    let Ok((nonces, proof)) = exchange(&mut timed) else { return answer() };
    let key = meeting.key();
    if !key.accepts(Sender::First, &nonces, &proof) {
        return Try::NotYet(format!(
            "port {port} is of another job, or of one with another secret than this rank's"
        ));
    }
    // Rank 0 counts this rank as told once it has answered: a rank that hangs up before would look for it in vain.
    timed.until = joined_until;
    let hello = Message::Hello(Hello {
        rank: meeting.rank,
        host: host_name(),
        facts: meeting.facts(),
        failed: failed.map(|it| it.0.clone()),
    });
    let mut out = key.seal(Sender::Other, &nonces);
    let mut frames = key.frames(Sender::First, &nonces, meeting.limits);
    let words = [&key.proof(Sender::Other, &nonces)[..], &out.frame(&hello)].concat();
    let heard = timed.write_all(&words).and_then(|()| frames.read(&mut timed));
    if let (Ok(_), Some((_, error))) = (&heard, failed) {
        // It has been said, whatever rank 0 makes of it.
        return Try::Refused(error.clone());
    }
    match heard {
        Ok(Message::Joined(host)) => Try::Joined(Box::new(Link { stream, out, frames }), host),
        Ok(Message::Refused(Refusal::Complete)) => Try::Refused(meeting.error(format!(
            "the run on port {port} has all its ranks; a second run needs another port"
        ))),
        Ok(Message::Refused(Refusal::Differs { who, differences })) => {
            Try::Refused(RunError::RanksDiffer { who, differences })
        }
        Ok(_) | Err(_) => answer(),
    }
}

/// Exchanges magic numbers and nonces; returns the proof of rank 0 as well.
fn exchange(stream: &mut Timed) -> io::Result<(Nonces, [u8; NONCE])> {
    let other = nonce()?;
    stream.write_all(&[&MAGIC[..], &other].concat())?;
    let (mut magic, mut first, mut proof) = ([0; MAGIC.len()], [0; NONCE], [0; NONCE]);
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    stream.read_exact(&mut first)?;
    stream.read_exact(&mut proof)?;
    Ok((Nonces { other, first }, proof))
}

/// A stream whose reads and writes together end at one time, however slowly the bytes come.
struct Timed<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
