//! Control among processes: every rank has a connection to rank 0, which passes on what concerns all.
//!
//! [`rendezvous`](crate::launch::rendezvous) makes the connections; here is what goes over them. A
//! frame is a byte of `Kind`, the length of its payload in four (little endian), and the payload.
//!
//! A rank that fails says so; rank 0 tells the others. A process that is killed cannot, but its
//! system closes its connection, which is noticed at once. A machine that is lost does not do even
//! that, so everybody sends a beat from time to time and silence is an end as well.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Control, Fault, lock};
use crate::error::RunError;

/// How often ranks show that they are there, and what they take for an end.
#[derive(Debug, Clone, Copy)]
pub struct Pulse {
    /// Between beats.
    pub beat: Duration,
    /// Without a word of a rank. A process that is stopped or starved for so long is taken for gone.
    pub silence: Duration,
    /// How long rank 0 stays to tell ranks that come late of a failure.
    pub linger: Duration,
}

impl Default for Pulse {
    fn default() -> Pulse {
        Pulse {
            beat: Duration::from_secs(10),
            silence: Duration::from_secs(90),
            linger: Duration::from_secs(10),
        }
    }
}

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Who connects, to rank 0.
    Hello = 1,
    /// Rank 0 has taken this rank in.
    Joined = 2,
    /// Rank 0 has not; why.
    Refused = 3,
    /// All ranks are here.
    Go = 4,
    /// Of a broadcast.
    Data = 5,
    /// The first failure.
    Fail = 6,
    /// Where a rank was, to rank 0.
    Position = 7,
    /// A sign of life.
    Beat = 8,
    /// The last of a rank that is done.
    Bye = 9,
}

/// The most bytes of a frame; more is no frame of ours.
pub(crate) const FRAME_MAX: usize = 64 << 20;

/// How long a full connection may keep a writer.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// How long a rank that is done waits for rank 0 to be done, so that its last words arrive.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// One process's connections; see the [module docs](self).
#[derive(Debug)]
pub struct Tcp(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    rank: u64,
    n_ranks: u64,
    /// The name of this machine.
    host: String,
    pulse: Pulse,
    fault: Arc<Fault>,
    state: Mutex<State>,
    changed: Condvar,
    /// This process is done, so connections may end.
    closing: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// By rank: rank 0 has all others, the others have rank 0.
    peers: Vec<Option<Arc<Peer>>>,
    /// By rank: it came and was sent away.
    refused: Vec<bool>,
    /// The other ranks have been told of the failure.
    told: bool,
    /// All ranks are here.
    complete: bool,
    /// Broadcasts of rank 0 that this rank has not read.
    inbox: VecDeque<Vec<u8>>,
    positions: Vec<Option<String>>,
    /// Connections that are still read.
    readers: usize,
}

impl State {
    fn absent(&self) -> Vec<usize> {
        let ranks = self.peers.iter().zip(&self.refused).enumerate().skip(1);
        ranks.filter(|(_, (peer, refused))| peer.is_none() && !**refused).map(|it| it.0).collect()
    }
}

/// The other end of a connection.
#[derive(Debug)]
struct Peer {
    rank: u64,
    host: String,
    out: Mutex<TcpStream>,
}

/// What a failure is to other processes.
#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    code: String,
    message: String,
    bug: bool,
}

impl Tcp {
    /// A rank without connections; `fault` is raised when any rank fails.
    pub fn new(rank: u64, n_ranks: u64, host: &str, fault: &Arc<Fault>, pulse: Pulse) -> Tcp {
        let state = State {
            peers: (0..n_ranks).map(|_| None).collect(),
            told: false,
            refused: vec![false; n_ranks as usize],
            complete: n_ranks == 1,
            inbox: VecDeque::new(),
            positions: vec![None; n_ranks as usize],
            readers: 0,
        };
        let inner = Arc::new(Inner {
            rank,
            n_ranks,
            host: host.to_string(),
            pulse,
            fault: fault.clone(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
        });
        let told = Arc::downgrade(&inner);
        fault.listen(move |error| {
            if let Some(inner) = told.upgrade() {
                inner.tell(error);
            }
        });
        Tcp(inner)
    }

    /// What is raised when a rank fails.
    pub(crate) fn fault_handle(&self) -> Arc<Fault> {
        self.0.fault.clone()
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Starts to send beats.
    pub(crate) fn start_beat(&self) -> io::Result<()> {
        let inner = Arc::downgrade(&self.0);
        let beat = self.0.pulse.beat;
        Builder::new().name("beat".to_string()).stack_size(STACK).spawn(move || {
            let mut last = Instant::now();
            while let Some(inner) = Weak::upgrade(&inner) {
                if inner.closing.load(Ordering::Relaxed) {
                    return;
                }
                if last.elapsed() >= beat {
                    last = Instant::now();
                    inner.send_all(Kind::Beat, &[]);
                }
                // Short, so that the thread ends soon after the run.
                inner.wait_until(beat.min(Duration::from_secs(1)), |_| inner.is_closing());
            }
        })?;
        Ok(())
    }
}

/// Threads here only move bytes.
const STACK: usize = 256 << 10;

impl Inner {
    /// Takes a connection in, of which the other end is `rank`, and reads it from now on. `greeting`
    /// is its first frame.
    pub(crate) fn add(
        self: &Arc<Inner>,
        (rank, host): (u64, &str),
        stream: TcpStream,
        greeting: &[u8],
    ) -> Result<(), AddError> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(self.pulse.silence))?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        let reading = stream.try_clone()?;
        let peer = Arc::new(Peer { rank, host: host.to_string(), out: Mutex::new(stream) });
        {
            // Held from before others see the peer, so that nothing is written before the greeting.
            let mut out = lock(&peer.out);
            self.place(&peer)?;
            // Of a failure before it came it would not hear otherwise.
            let failure = self.fault.get().map(|it| self.failure(&it)).unwrap_or_default();
            if let Err(error) = out.write_all(&[greeting, &failure].concat()) {
                lock(&self.state).peers[rank as usize] = None;
                return Err(error.into());
            }
        }
        lock(&self.state).readers += 1;
        let (inner, reader) = (self.clone(), peer.clone());
        let body = move || inner.read(&reader, reading);
        let name = format!("from rank {rank}");
        if let Err(error) = Builder::new().name(name).stack_size(STACK).spawn(body) {
            let mut state = lock(&self.state);
            state.readers -= 1;
            state.peers[rank as usize] = None;
            return Err(error.into());
        }
        self.changed.notify_all();
        Ok(())
    }

    fn place(&self, peer: &Arc<Peer>) -> Result<(), AddError> {
        let mut state = lock(&self.state);
        if state.complete && self.rank == 0 {
            return Err(AddError::Complete);
        }
        let place = &mut state.peers[peer.rank as usize];
        if let Some(other) = place {
            return Err(AddError::Taken(other.host.clone()));
        }
        *place = Some(peer.clone());
        Ok(())
    }

    /// Waits until all ranks are here (rank 0), or rank 0 says so; `None` is a failure, `Some(false)`
    /// the end of the time.
    pub(crate) fn wait_complete(&self, until: Option<Instant>) -> Option<bool> {
        let mut state = lock(&self.state);
        loop {
            if self.fault.get().is_some() {
                return None;
            }
            let others = state.peers.iter().filter(|it| it.is_some()).count() as u64;
            if state.complete || (self.rank == 0 && others + 1 == self.n_ranks) {
                state.complete = true;
                return Some(true);
            }
            let limit = Duration::from_secs(3600);
            let left = until.map_or(limit, |it| it.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Some(false);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The ranks that have not come to rank 0.
    pub(crate) fn absent(&self) -> Vec<usize> {
        lock(&self.state).absent()
    }

    /// Notes that a rank came and was sent away.
    pub(crate) fn refuse(&self, rank: u64) {
        if let Some(it) = lock(&self.state).refused.get_mut(rank as usize) {
            *it = true;
        }
        self.changed.notify_all();
    }

    /// After a failure, waits until all ranks have come and heard of it, for some time.
    pub(crate) fn linger(&self) {
        self.wait_until(self.pulse.linger, |it| it.absent().is_empty());
    }

    /// Waits until it is so, at most so long.
    fn wait_until(&self, limit: Duration, done: impl Fn(&State) -> bool) {
        let state = lock(&self.state);
        let waited = self.changed.wait_timeout_while(state, limit, |it| !done(it));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Rank 0 tells all that the run begins.
    pub(crate) fn go(&self) {
        self.send_all(Kind::Go, &[]);
    }

    /// As when the process is killed: it says nothing more, and its connections end.
    #[cfg(test)]
    pub(crate) fn die(&self) {
        self.closing.store(true, Ordering::Relaxed);
        for peer in self.peers() {
            lock(&peer.out).shutdown(Shutdown::Both).expect("it is open");
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        lock(&self.state).complete
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    fn peers(&self) -> Vec<Arc<Peer>> {
        lock(&self.state).peers.iter().flatten().cloned().collect()
    }

    /// A connection that cannot be written to is one whose reader finds out, too.
    fn send_all(&self, kind: Kind, payload: &[u8]) {
        let frame = frame(kind, payload);
        for peer in self.peers() {
            let _ = peer.send_raw(&frame);
        }
    }

    /// Tells the other processes of a failure.
    fn tell(&self, error: &RunError) {
        let frame = self.failure(error);
        for peer in self.peers() {
            let _ = peer.send_raw(&frame);
        }
        lock(&self.state).told = true;
        self.changed.notify_all();
    }

    /// The frame that tells of a failure.
    fn failure(&self, error: &RunError) -> Vec<u8> {
        let failure = Failure {
            code: error.code().to_string(),
            message: self.message(error),
            bug: error.is_bug(),
        };
        frame(Kind::Fail, &serde_json::to_vec(&failure).unwrap_or_default())
    }

    /// The error as others should see it: with the rank that it is from.
    fn message(&self, error: &RunError) -> String {
        match error {
            RunError::Rank { .. }
            | RunError::Remote { .. }
            | RunError::RankGone { .. }
            | RunError::RanksDiffer { .. }
            | RunError::Rendezvous { .. } => error.to_string(),
            other => format!("rank {} ({}): {other}", self.rank, self.host),
        }
    }

    /// Reads a connection to its end.
    fn read(&self, peer: &Peer, mut stream: TcpStream) {
        let mut said_bye = false;
        loop {
            match read_frame(&mut stream, FRAME_MAX) {
                Ok((Kind::Bye, _)) => {
                    said_bye = true;
                    // It may go: nothing that concerns it will come.
                    if self.rank == 0 {
                        let _ = lock(&peer.out).shutdown(Shutdown::Write);
                    }
                }
                Ok((kind, payload)) => self.take(peer, kind, payload),
                Err(error) => {
                    if !said_bye && !self.is_closing() {
                        self.fault.raise(peer.gone(&error, self.pulse));
                    }
                    break;
                }
            }
        }
        lock(&self.state).readers -= 1;
        self.changed.notify_all();
    }

    fn take(&self, peer: &Peer, kind: Kind, payload: Vec<u8>) {
        match kind {
            Kind::Go => lock(&self.state).complete = true,
            Kind::Data => lock(&self.state).inbox.push_back(payload),
            Kind::Position => {
                let text = String::from_utf8_lossy(&payload).into_owned();
                lock(&self.state).positions[peer.rank as usize].get_or_insert(text);
            }
            Kind::Fail => self.fault.raise(remote(peer, &payload)),
            // Frames of the handshake mean nothing here, and a beat has done its work by coming.
            Kind::Beat | Kind::Hello | Kind::Joined | Kind::Refused | Kind::Bye => return,
        }
        self.changed.notify_all();
    }

    /// Ends all connections, after the last words have been said and heard.
    fn close(&self) {
        let failed = self.fault.get().is_some();
        if failed {
            // Another thread may be about to.
            self.wait_until(CLOSE_LIMIT, |it| it.told);
        }
        if self.closing.swap(true, Ordering::Relaxed) {
            return;
        }
        self.changed.notify_all();
        for peer in self.peers() {
            if !failed {
                let _ = peer.send_raw(&frame(Kind::Bye, &[]));
            }
            let _ = lock(&peer.out).shutdown(Shutdown::Write);
        }
        self.wait_until(CLOSE_LIMIT, |it| it.readers == 0);
        for peer in self.peers() {
            let _ = lock(&peer.out).shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Why a connection is not taken in.
#[derive(Debug)]
pub(crate) enum AddError {
    /// All ranks are here.
    Complete,
    /// The rank is here, from this host.
    Taken(String),
    /// The connection does not work.
    Io(io::Error),
}

impl From<io::Error> for AddError {
    fn from(error: io::Error) -> AddError {
        AddError::Io(error)
    }
}

impl Peer {
    fn send_raw(&self, frame: &[u8]) -> io::Result<()> {
        lock(&self.out).write_all(frame)
    }

    fn gone(&self, error: &io::Error, pulse: Pulse) -> RunError {
        let how = match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => "ended without a word".to_string(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("has been silent for {} s", pulse.silence.as_secs())
            }
            _ => format!("cannot be heard any more: {error}"),
        };
        RunError::RankGone { rank: self.rank, host: self.host.clone(), how }
    }
}

/// What another process failed with.
fn remote(peer: &Peer, payload: &[u8]) -> RunError {
    let Ok(failure) = serde_json::from_slice::<Failure>(payload) else {
        let how = "failed and could not say how".to_string();
        return RunError::RankGone { rank: peer.rank, host: peer.host.clone(), how };
    };
    // Codes are static everywhere else. A process ends with the first failure, so that this is the
    // only one that it keeps.
    let code = failure.code.leak();
    RunError::Remote { code, message: failure.message, bug: failure.bug }
}

pub(crate) fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() <= FRAME_MAX, "control carries ids and messages, not data");
    let mut res = vec![kind as u8];
    res.extend((payload.len() as u32).to_le_bytes());
    res.extend(payload);
    res
}

/// The next frame; `InvalidData` for what is none.
pub(crate) fn read_frame(stream: &mut impl Read, max: usize) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a frame of planc");
    let kind = match kind {
        1 => Kind::Hello,
        2 => Kind::Joined,
        3 => Kind::Refused,
        4 => Kind::Go,
        5 => Kind::Data,
        6 => Kind::Fail,
        7 => Kind::Position,
        8 => Kind::Beat,
        9 => Kind::Bye,
        _ => return Err(invalid()),
    };
    let length = u32::from_le_bytes(length) as usize;
    if length > max {
        return Err(invalid());
    }
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload)?;
    Ok((kind, payload))
}

impl Control for Tcp {
    fn rank(&self) -> u64 {
        self.0.rank
    }

    fn n_ranks(&self) -> u64 {
        self.0.n_ranks
    }

    fn broadcast(&self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, RunError> {
        let inner = &*self.0;
        assert_eq!(bytes.is_some(), inner.rank == 0, "rank 0 gives, the others get");
        if let Some(bytes) = bytes {
            inner.send_all(Kind::Data, &bytes);
            // A rank that did not get it is gone, and its reader says so.
            return if inner.fault.get().is_some() { Err(RunError::Stopped) } else { Ok(bytes) };
        }
        let mut state = lock(&inner.state);
        loop {
            if inner.fault.get().is_some() {
                return Err(RunError::Stopped);
            }
            if let Some(bytes) = state.inbox.pop_front() {
                return Ok(bytes);
            }
            if state.readers == 0 {
                let host = state.peers[0].as_ref().map_or("?", |it| &it.host).to_string();
                let how = "is done before the others are".to_string();
                return Err(RunError::RankGone { rank: 0, host, how });
            }
            state = inner.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn fail(&self, error: RunError) {
        self.0.fault.raise(error);
    }

    fn fault(&self) -> Option<RunError> {
        self.0.fault.get()
    }

    fn report(&self, position: String) {
        let inner = &*self.0;
        if inner.rank != 0 {
            inner.send_all(Kind::Position, position.as_bytes());
        }
        lock(&inner.state).positions[inner.rank as usize].get_or_insert(position);
        inner.changed.notify_all();
    }

    fn positions(&self, limit: Duration) -> Vec<Option<String>> {
        let inner = &*self.0;
        let until = Instant::now() + limit;
        let mut state = lock(&inner.state);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let all = state.positions.iter().all(Option::is_some);
            if all || inner.rank != 0 || left.is_zero() || state.readers == 0 {
                return state.positions.clone();
            }
            let waited = inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
