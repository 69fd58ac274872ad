//! Control among processes: every rank has a connection to rank 0, which passes on what concerns all.
//!
//! [`rendezvous`](crate::launch::rendezvous) makes the connections, and [`frame`](super::frame) says what goes
//! over them.
//!
//! A rank that fails says so; rank 0 tells the others. A process that is killed cannot, but its
//! system closes its connection, which is noticed at once. A machine that is lost does not do even
//! that, so everybody sends a beat from time to time and silence is an end as well.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::frame::{Failure, Frames, Limits, Message, Seal};
use super::{Control, Fault, Wish, lock};
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
    /// The time that a rank waits for a broadcast of rank 0, which may be alive and do nothing.
    pub answer: Duration,
}

impl Default for Pulse {
    fn default() -> Pulse {
        Pulse {
            beat: Duration::from_secs(10),
            silence: Duration::from_secs(90),
            linger: Duration::from_secs(10),
            answer: Duration::from_secs(600),
        }
    }
}

/// How long a full connection may keep a writer.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// The number of the largest broadcasts, and of calls, that rank 0 may be ahead of a rank that reads them.
const AHEAD: usize = 8;
const AHEAD_CALLS: usize = 1024;

/// How long a rank that is done waits for rank 0 to be done, so that its last words arrive.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The time that a rank other than rank 0 waits when the run has failed, so that its last message leaves this machine.
const PARTING: Duration = Duration::from_secs(1);

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
    limits: Limits,
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
    /// Bytes in the inbox.
    unread: usize,
    positions: Vec<Option<String>>,
    /// The greatest wish that nobody has planned yet; on rank 0.
    wish: Option<Wish>,
    /// Actions that were agreed, each with the step that it follows.
    plans: VecDeque<(u64, Wish)>,
    /// By rank, true if it knows of the newest of them; on rank 0.
    agreed: Vec<bool>,
    /// By rank, where it takes connections for data; on rank 0.
    ports: Vec<Option<u16>>,
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
    stream: TcpStream,
    /// Held while a frame is written.
    out: Mutex<Seal>,
}

/// A connection whose two ends have proved themselves.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) stream: TcpStream,
    /// Seals what this end sends.
    pub(crate) out: Seal,
    /// Reads what the other end sends.
    pub(crate) frames: Frames,
}

impl Tcp {
    /// A rank without connections; `fault` is raised when any rank fails.
    pub fn new(
        (rank, n_ranks): (u64, u64),
        host: &str,
        fault: &Arc<Fault>,
        (pulse, limits): (Pulse, Limits),
    ) -> Tcp {
        let state = State {
            peers: (0..n_ranks).map(|_| None).collect(),
            told: false,
            refused: vec![false; n_ranks as usize],
            complete: n_ranks == 1,
            inbox: VecDeque::new(),
            unread: 0,
            positions: vec![None; n_ranks as usize],
            wish: None,
            plans: VecDeque::new(),
            agreed: vec![false; n_ranks as usize],
            ports: vec![None; n_ranks as usize],
            readers: 0,
        };
        let inner = Arc::new(Inner {
            rank,
            n_ranks,
            host: host.to_string(),
            pulse,
            limits,
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
                    inner.send_all(&Message::Beat);
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
    /// is sent first.
    pub(crate) fn add(
        self: &Arc<Inner>,
        (rank, host): (u64, &str),
        link: Link,
        greeting: Option<&Message>,
    ) -> io::Result<()> {
        let Link { stream, out, frames } = link;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(self.pulse.silence))?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        let peer = Arc::new(Peer { rank, host: host.to_string(), stream, out: Mutex::new(out) });
        {
            // Held from before others see the peer, so that nothing is written before the greeting.
            let mut out = lock(&peer.out);
            lock(&self.state).peers[rank as usize] = Some(peer.clone());
            // Of a failure before it came it would not hear otherwise.
            let failure = self.fault.get().map(|it| Message::Fail(self.failure(&it)));
            let words = greeting.into_iter().chain(&failure);
            let words: Vec<u8> = words.flat_map(|it| out.frame(it)).collect();
            if let Err(error) = (&peer.stream).write_all(&words) {
                lock(&self.state).peers[rank as usize] = None;
                return Err(error);
            }
        }
        lock(&self.state).readers += 1;
        let (inner, reader) = (self.clone(), peer.clone());
        let body = move || inner.read(&reader, frames);
        let name = format!("from rank {rank}");
        if let Err(error) = Builder::new().name(name).stack_size(STACK).spawn(body) {
            let mut state = lock(&self.state);
            state.readers -= 1;
            state.peers[rank as usize] = None;
            return Err(error);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the reason for which rank 0 has no place for a rank; `None` if it waits for that rank.
    pub(crate) fn occupied(&self, rank: u64) -> Option<Occupied> {
        let state = lock(&self.state);
        if state.complete {
            return Some(Occupied::Complete);
        }
        state.peers[rank as usize].as_ref().map(|it| Occupied::Taken(it.host.clone()))
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

    /// The address of each rank as rank 0 knows it. Ranks that come over the loopback are on the machine of rank 0, which
    /// has the address that the others reach it at.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let ip = |it: io::Result<SocketAddr>| it.map(|it| it.ip().to_canonical());
        let peers = self.peers();
        let mut ours = peers.iter().filter_map(|it| ip(it.stream.local_addr()).ok());
        let here = ours.clone().find(|it| !it.is_loopback()).or_else(|| ours.next());
        let here = here.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let mut res = vec![here; self.n_ranks as usize];
        for peer in peers {
            let theirs = ip(peer.stream.peer_addr()).ok().filter(|it| !it.is_loopback());
            res[peer.rank as usize] = theirs.unwrap_or(here);
        }
        res
    }

    /// The ports of all ranks for data, on rank 0, whose own is `port`.
    pub(crate) fn ports(&self, port: u16) -> Result<Vec<u16>, RunError> {
        lock(&self.state).ports[0] = Some(port);
        let missing = |it: &State| it.ports.iter().position(Option::is_none);
        let failed = || self.fault.get().is_some();
        self.wait_until(self.pulse.answer, |it| missing(it).is_none() || failed());
        let state = lock(&self.state);
        match missing(&state) {
            None => Ok(state.ports.iter().flatten().copied().collect()),
            Some(_) if failed() => Err(RunError::Stopped),
            Some(rank) => {
                drop(state);
                Err(self.gone(rank as u64, "does not take connections for data"))
            }
        }
    }

    /// The error of a rank that this one waits for in vain.
    pub(crate) fn gone(&self, rank: u64, how: &str) -> RunError {
        let state = lock(&self.state);
        let host = state.peers[rank as usize].as_ref().map_or("?", |it| &it.host).to_string();
        RunError::RankGone { rank, host, how: how.to_string() }
    }

    pub(crate) fn pulse(&self) -> Pulse {
        self.pulse
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
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
        self.send_all(&Message::Go);
    }

    /// As when the process is killed: it says nothing more, and its connections end.
    #[cfg(test)]
    pub(crate) fn die(&self) {
        self.closing.store(true, Ordering::Relaxed);
        for peer in self.peers() {
            peer.stream.shutdown(Shutdown::Both).expect("it is open");
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
    pub(crate) fn send_all(&self, message: &Message) {
        for peer in self.peers() {
            let _ = peer.send(message);
        }
    }

    /// Tells the other processes of a failure.
    fn tell(&self, error: &RunError) {
        self.send_all(&Message::Fail(self.failure(error)));
        lock(&self.state).told = true;
        self.changed.notify_all();
    }

    /// A failure as others should see it.
    pub(crate) fn failure(&self, error: &RunError) -> Failure {
        Failure {
            code: error.code().to_string(),
            message: self.message(error),
            bug: error.is_bug(),
        }
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
    fn read(&self, peer: &Peer, mut frames: Frames) {
        let mut said_bye = false;
        loop {
            match frames.read(&mut &peer.stream) {
                Ok(Message::Bye) => {
                    said_bye = true;
                    // It may go: nothing that concerns it will come.
                    if self.rank == 0 {
                        let _ = peer.stream.shutdown(Shutdown::Write);
                    }
                }
                Ok(message) => {
                    if let Err(how) = self.take(peer, message) {
                        self.fault.raise(peer.gone(how));
                        break;
                    }
                }
                Err(error) => {
                    if !said_bye && !self.is_closing() {
                        self.fault.raise(peer.gone(how(&error, self.pulse)));
                    }
                    break;
                }
            }
        }
        lock(&self.state).readers -= 1;
        self.changed.notify_all();
    }

    /// Does what a message says; the error is what is wrong with the rank that sent it.
    fn take(&self, peer: &Peer, message: Message) -> Result<(), String> {
        match message {
            Message::Go => lock(&self.state).complete = true,
            Message::Data(bytes) => {
                let mut state = lock(&self.state);
                state.unread += bytes.len();
                state.inbox.push_back(bytes);
                // Rank 0 is a few broadcasts ahead at most, since it waits for the others in every step.
                if state.unread > AHEAD * self.limits.data || state.inbox.len() > AHEAD_CALLS {
                    return Err("sends more than this rank asked for".to_string());
                }
            }
            Message::Position(text) => {
                lock(&self.state).positions[peer.rank as usize].get_or_insert(text);
            }
            Message::Wish(wish) => {
                let mut state = lock(&self.state);
                state.wish = state.wish.max(Some(wish));
            }
            Message::Plan(step, wish) => {
                lock(&self.state).plans.push_back((step, wish));
                // If rank 0 does not hear it, its connection is at its end.
                let _ = peer.send(&Message::Agreed);
            }
            Message::Agreed => lock(&self.state).agreed[peer.rank as usize] = true,
            Message::Port(port) => lock(&self.state).ports[peer.rank as usize] = Some(port),
            // A process ends with the first failure, so that this is the only one that it keeps.
            Message::Fail(failure) if self.fault.get().is_none() => {
                self.fault.raise(remote(failure));
            }
            // Messages of the handshake mean nothing here, and a beat has done its work by coming.
            Message::Fail(_)
            | Message::Beat
            | Message::Hello(_)
            | Message::Joined(_)
            | Message::Refused(_)
            | Message::Bye => return Ok(()),
        }
        self.changed.notify_all();
        Ok(())
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
                let _ = peer.send(&Message::Bye);
            }
            let _ = peer.stream.shutdown(Shutdown::Write);
        }
        // Rank 0 may be an impostor, and must not keep this rank once the run has failed.
        let limit = if failed && self.rank != 0 { PARTING } else { CLOSE_LIMIT };
        self.wait_until(limit, |it| it.readers == 0);
        for peer in self.peers() {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A reason for which rank 0 has no place for a rank.
#[derive(Debug)]
pub(crate) enum Occupied {
    /// All ranks are here.
    Complete,
    /// The rank is here, from this host.
    Taken(String),
}

impl Peer {
    fn send(&self, message: &Message) -> io::Result<()> {
        let mut out = lock(&self.out);
        let frame = out.frame(message);
        (&self.stream).write_all(&frame)
    }

    fn gone(&self, how: String) -> RunError {
        RunError::RankGone { rank: self.rank, host: self.host.clone(), how }
    }
}

/// The error that another process failed with. For the first failure of a run only, since it is kept for good.
pub(crate) fn remote(Failure { code, message, bug }: Failure) -> RunError {
    // Codes are static everywhere else.
    RunError::Remote { code: code.leak(), message, bug }
}

/// Describes the end of a rank by the error of its connection.
fn how(error: &io::Error, pulse: Pulse) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => "ended without a word".to_string(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("has been silent for {} s", pulse.silence.as_secs())
        }
        _ => format!("cannot be heard any more: {error}"),
    }
}

impl Control for Tcp {
    fn rank(&self) -> u64 {
        self.0.rank
    }

    fn n_ranks(&self) -> u64 {
        self.0.n_ranks
    }

    fn broadcast_after(&self, bytes: Option<Vec<u8>>, work: Duration) -> Result<Vec<u8>, RunError> {
        let inner = &*self.0;
        assert_eq!(bytes.is_some(), inner.rank == 0, "rank 0 gives, the others get");
        if let Some(bytes) = bytes {
            assert!(bytes.len() <= inner.limits.data, "control carries ids and messages, not data");
            let message = Message::Data(bytes);
            inner.send_all(&message);
            let Message::Data(bytes) = message else { unreachable!("it was made so") };
            // A rank that did not get it is gone, and its reader says so.
            return if inner.fault.get().is_some() { Err(RunError::Stopped) } else { Ok(bytes) };
        }
        let (began, limit) = (Instant::now(), inner.pulse.answer.saturating_add(work));
        let mut state = lock(&inner.state);
        loop {
            if inner.fault.get().is_some() {
                return Err(RunError::Stopped);
            }
            if let Some(bytes) = state.inbox.pop_front() {
                state.unread -= bytes.len();
                return Ok(bytes);
            }
            let first = |how: String| {
                let host = state.peers[0].as_ref().map_or("?", |it| &it.host).to_string();
                Err(RunError::RankGone { rank: 0, host, how })
            };
            if state.readers == 0 {
                return first("is done before the others are".to_string());
            }
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                let seconds = limit.as_secs();
                return first(format!("has not sent for {seconds} s what the others wait for"));
            }
            let waited = inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Rank 0 plans for the step that it has not begun. Every step has collectives over all ranks, so no rank can end
    /// that step before rank 0 begins it, which it does when all ranks have said that they know of the plan. Without a
    /// wish nothing is sent.
    fn agree(&self, step: u64, wish: Option<Wish>) -> Result<Option<Wish>, RunError> {
        let inner = &*self.0;
        if inner.n_ranks == 1 {
            return Ok(wish);
        }
        if let (Some(wish), true) = (wish, inner.rank != 0) {
            inner.send_all(&Message::Wish(wish));
        }
        let mut state = lock(&inner.state);
        // Rank 0 may have planned for the next step before another rank has ended this one.
        let mut due = None;
        while let Some(plan) = state.plans.pop_front_if(|it| it.0 <= step) {
            due = due.max(Some(plan.1));
        }
        if inner.rank != 0 || matches!(due, Some(Wish::Stop(_))) {
            return Ok(due);
        }
        let Some(next) = state.wish.take().max(wish) else { return Ok(due) };
        state.plans.push_back((step + 1, next));
        state.agreed.fill(false);
        drop(state);
        inner.send_all(&Message::Plan(step + 1, next));
        let unheard = |it: &State| (1..it.agreed.len()).find(|&rank| !it.agreed[rank]);
        inner.wait_until(inner.pulse.answer, |it| {
            unheard(it).is_none() || inner.fault.get().is_some()
        });
        let state = lock(&inner.state);
        match unheard(&state) {
            None => Ok(due),
            Some(_) if inner.fault.get().is_some() => Err(RunError::Stopped),
            Some(rank) => {
                drop(state);
                let seconds = inner.pulse.answer.as_secs();
                let how = format!("has not answered for {seconds} s that it knows of a signal");
                Err(inner.gone(rank as u64, &how))
            }
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
            inner.send_all(&Message::Position(position.clone()));
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
