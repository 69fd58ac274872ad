//! Rank 0's reception, for as long as the run goes on: a rank that comes late is told so.
//!
//! One thread serves all who have not joined, and never waits for one of them. They are few at a time and have a
//! deadline each; if more come, the oldest that has not proved itself goes. A stranger therefore takes a
//! bounded number of descriptors and of bytes: until it has proved itself, the bytes of a nonce or of a
//! proof, and after that those of a hello.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{HANDSHAKE, MAGIC, differences};
use crate::comm::control::frame::{Failure, Frames, Hello, Limits, Message, Refusal, Sender};
use crate::comm::control::tcp::{Inner, Link, Occupied, remote};
use crate::comm::control::{Fault, lock};
use crate::error::RunError;
use crate::launch::secret::{Key, NONCE, Nonces, nonce};

/// The most connections that have not joined.
const GUESTS: usize = 64;

/// The most connections that are accepted before those that are here are heard.
const AT_ONCE: usize = 16;

/// Descriptors that are left for files of the run.
const RESERVE: u64 = 128;

/// The time between two looks of the desk whether the run is over.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Raises the limit of this process, so that there are descriptors for all ranks, for those that wait and for files.
pub(super) fn reserve(n_ranks: u64) -> Result<(), String> {
    let needed = n_ranks + GUESTS as u64 + RESERVE;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|it| needed <= it) {
        return Ok(());
    }
    let raised = Rlimit { current: Some(needed), ..limit };
    setrlimit(Resource::Nofile, raised).map_err(|_| {
        let most = limit.maximum.map_or("no".to_string(), |it| it.to_string());
        format!(
            "rank 0 needs {needed} descriptors for {n_ranks} ranks, and this process may have {most}; raise the \
             limit with `ulimit -n {needed}`"
        )
    })
}

/// See the [module docs](self).
pub(super) struct Desk {
    pub(super) inner: Weak<Inner>,
    pub(super) fault: Arc<Fault>,
    pub(super) key: Key,
    /// True if only ranks of the job know the key.
    pub(super) is_secret: bool,
    pub(super) facts: Vec<(String, String)>,
    pub(super) host: String,
    pub(super) world_size: u64,
    pub(super) limits: Limits,
    /// The rank that was turned away last because it differs, and the difference.
    pub(super) turned_away: Arc<Mutex<Option<String>>>,
}

/// A connection that has not joined.
struct Guest {
    stream: TcpStream,
    until: Instant,
    /// Bytes that belong to the stage.
    bytes: Vec<u8>,
    stage: Stage,
}

/// The message that a guest is to send next.
enum Stage {
    /// The magic number and a nonce.
    Greeting,
    /// The proof that it knows the key.
    Proof(Nonces),
    /// A hello, from one that has proved itself.
    Hello(Nonces, Frames),
}

/// The result of hearing a guest.
enum Heard {
    /// More must come.
    Waits(Guest),
    Hello(Hello, Link),
    /// It is no rank of this job, or has gone.
    Gone,
}

impl Desk {
    pub(super) fn run(self, listeners: &[TcpListener]) {
        let mut guests: VecDeque<Guest> = VecDeque::new();
        while let Some(inner) = self.inner.upgrade() {
            if inner.is_closing() {
                return;
            }
            wait(listeners, &guests);
            listeners.iter().for_each(|it| accept(it, &mut guests));
            for guest in std::mem::take(&mut guests) {
                match guest.hear(&self.key, self.limits) {
                    Ok(Heard::Waits(guest)) if Instant::now() < guest.until => {
                        guests.push_back(guest);
                    }
                    Ok(Heard::Hello(hello, link)) => self.receive(&inner, &hello, link),
                    Ok(Heard::Waits(_) | Heard::Gone) | Err(_) => (),
                }
            }
        }
    }

    fn receive(&self, inner: &Arc<Inner>, hello: &Hello, mut link: Link) {
        if let Some(failure) = &hello.failed {
            // The answer first: rank 0 may end as soon as it has heard of the failure.
            let _ = link.stream.write_all(&link.out.frame(&Message::Bye));
            self.hear_of(inner, hello, failure);
            return;
        }
        let Some(refusal) = self.look_at(inner, hello) else {
            let joined = Message::Joined(self.host.clone());
            // A connection that does not work is one that tries again.
            let _ = inner.add((hello.rank, &hello.host), link, Some(&joined));
            return;
        };
        // If it does not hear it, it hears the end of the connection.
        let _ = link.stream.write_all(&link.out.frame(&Message::Refused(refusal.clone())));
        if let (Refusal::Differs { who, differences }, true) = (refusal, self.is_secret) {
            inner.refuse(hello.rank);
            self.fault.raise(RunError::RanksDiffer { who, differences });
        }
    }

    /// Ends the run that waits for a rank which has failed. That rank need not know the facts, since that may be why.
    fn hear_of(&self, inner: &Inner, hello: &Hello, failure: &Failure) {
        let is_rank = self.is_secret || differences(&hello.facts, &self.facts).is_empty();
        if is_rank && waits_for(inner, hello.rank) {
            inner.refuse(hello.rank);
            if self.fault.get().is_none() {
                self.fault.raise(remote(failure.clone()));
            }
        } else if !self.is_secret {
            *lock(&self.turned_away) = Some(format!("turned away: {}", failure.message));
        }
    }

    /// Returns the reason for which this rank cannot be part of the run.
    fn look_at(&self, inner: &Inner, hello: &Hello) -> Option<Refusal> {
        // Whatever else is wrong with it: it is none of those that run, and must not end them.
        if inner.is_complete() {
            return Some(Refusal::Complete);
        }
        // It hears how the run failed, of which rank 0 may not know what it was to be.
        if self.is_secret && self.fault.get().is_some() && waits_for(inner, hello.rank) {
            return None;
        }
        let differ = differences(&hello.facts, &self.facts);
        if !differ.is_empty() {
            let values =
                differ.iter().map(|it| format!("{} is {} and {}", it.name, it.theirs, it.ours));
            let names = differ.iter().map(|it| format!("{} is not that of rank 0", it.name));
            return Some(self.differs(hello, values.collect(), names.collect()));
        }
        if !(1..self.world_size).contains(&hello.rank) {
            let why = vec![format!("there is no rank {} of {}", hello.rank, self.world_size)];
            return Some(self.differs(hello, why.clone(), why));
        }
        match inner.occupied(hello.rank)? {
            Occupied::Complete => Some(Refusal::Complete),
            Occupied::Taken(host) => {
                let who = format!("rank {} came twice", hello.rank);
                let hosts = match self.is_secret {
                    true => format!("from {host} and from {}", hello.host),
                    false => format!("once more from {}", hello.host),
                };
                Some(Refusal::Differs { who, differences: vec![hosts] })
            }
        }
    }

    /// The refusal of a rank that differs, with `values`. Without a secret it may be anyone, and gets `names`.
    fn differs(&self, hello: &Hello, values: Vec<String>, names: Vec<String>) -> Refusal {
        let theirs = format!("rank {} ({})", hello.rank, hello.host);
        if self.is_secret {
            let who = format!("{theirs} and rank 0 ({}) differ", self.host);
            return Refusal::Differs { who, differences: values };
        }
        let away = format!("{theirs} was turned away: {}", values.join(", "));
        *lock(&self.turned_away) = Some(away);
        Refusal::Differs { who: format!("{theirs} and rank 0 differ"), differences: names }
    }
}

/// Returns true if the run has not begun and lacks this rank.
fn waits_for(inner: &Inner, rank: u64) -> bool {
    !inner.is_complete() && inner.absent().iter().any(|&it| it as u64 == rank)
}

/// Waits until someone comes or says something, for some time.
fn wait(listeners: &[TcpListener], guests: &VecDeque<Guest>) {
    let listeners = listeners.iter().map(|it| PollFd::new(it, PollFlags::IN));
    let guests = guests.iter().map(|it| PollFd::new(&it.stream, PollFlags::IN));
    // A failure is an interrupt; the round after it finds nothing.
    let _ = poll(&mut listeners.chain(guests).collect::<Vec<_>>(), Some(&LOOK));
}

fn accept(listener: &TcpListener, guests: &mut VecDeque<Guest>) {
    for _ in 0..AT_ONCE {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // One that has gone again, or there are no descriptors: then the oldest gives its own.
            Err(_) => {
                guests.pop_front();
                return sleep(Duration::from_millis(10));
            }
        };
        // Descriptors are the lowest that are free, so that this one says how many are in use.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let scarce = stream.as_raw_fd() as u64 + RESERVE / 2 >= limit;
        if scarce || guests.len() == GUESTS {
            let oldest = guests.iter().position(|it| !matches!(it.stage, Stage::Hello(..)));
            if guests.remove(oldest.unwrap_or(0)).is_none() {
                continue;
            }
        }
        if stream.set_nonblocking(true).is_ok() {
            let (until, bytes) = (Instant::now() + HANDSHAKE, Vec::new());
            guests.push_back(Guest { stream, until, bytes, stage: Stage::Greeting });
        }
    }
}

impl Guest {
    /// Reads what has come, and answers. An error is a connection that ends or says what no rank says.
    fn hear(mut self, key: &Key, limits: Limits) -> io::Result<Heard> {
        loop {
            let needed = match &self.stage {
                Stage::Greeting => MAGIC.len() + NONCE,
                Stage::Proof(_) => NONCE,
                Stage::Hello(_, frames) => frames.needs(&self.bytes)?,
            };
            if self.bytes.len() < needed {
                let mut chunk = [0; 1024];
                let missing = (needed - self.bytes.len()).min(chunk.len());
                match self.stream.read(&mut chunk[..missing]) {
                    Ok(0) => return Ok(Heard::Gone),
                    Ok(n) => self.bytes.extend(&chunk[..n]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(Heard::Waits(self));
                    }
                    Err(error) => return Err(error),
                }
                continue;
            }
            let bytes = std::mem::take(&mut self.bytes);
            self.stage = match self.stage {
                Stage::Greeting => {
                    let Some(nonce) = bytes.strip_prefix(&MAGIC) else { return Ok(Heard::Gone) };
                    let other = nonce.try_into().expect("as many were read");
                    Stage::Proof(challenge(&mut self.stream, key, other)?)
                }
                Stage::Proof(nonces) if key.accepts(Sender::Other, &nonces, &bytes) => {
                    Stage::Hello(nonces, key.frames(Sender::Other, &nonces, limits))
                }
                Stage::Proof(_) => return Ok(Heard::Gone),
                Stage::Hello(nonces, mut frames) => {
                    let Message::Hello(hello) = frames.open(bytes)? else { return Ok(Heard::Gone) };
                    let out = key.seal(Sender::First, &nonces);
                    return Ok(Heard::Hello(hello, Link { stream: self.stream, out, frames }));
                }
            };
        }
    }
}

/// Answers a greeting with a nonce and the proof of rank 0.
fn challenge(stream: &mut TcpStream, key: &Key, other: [u8; NONCE]) -> io::Result<Nonces> {
    let nonces = Nonces { other, first: nonce()? };
    let proof = key.proof(Sender::First, &nonces);
    stream.write_all(&[&MAGIC[..], &nonces.first, &proof].concat())?;
    Ok(nonces)
}
