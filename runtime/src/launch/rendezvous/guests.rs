//! Connections to a rank that have not proved themselves.
//!
//! One thread serves all of them, and never waits for one. They are few at a time and have a
//! deadline each; if more come, the oldest that has not proved itself goes. A stranger therefore takes a
//! bounded number of descriptors and of bytes: until it has proved itself, the bytes of a nonce or of a
//! proof, and after that those of a hello.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{HANDSHAKE, MAGIC};
use crate::comm::control::frame::{Frames, Hello, Limits, Message, Sender};
use crate::comm::control::tcp::Link;
use crate::launch::secret::{Key, NONCE, Nonces, nonce};

/// The most connections that have not joined.
const GUESTS: usize = 64;

/// The most connections that are accepted before those that are here are heard.
const AT_ONCE: usize = 16;

/// Descriptors that are left for files of the run.
const RESERVE: u64 = 128;

/// The time between two looks of the desk whether the run is over.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Raises the limit of this process, so that there are descriptors for all connections to ranks, for those that wait and for
/// files.
pub(super) fn reserve(connections: u64) -> Result<(), String> {
    let needed = connections + GUESTS as u64 + RESERVE;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|it| needed <= it) {
        return Ok(());
    }
    let raised = Rlimit { current: Some(needed), ..limit };
    setrlimit(Resource::Nofile, raised).map_err(|_| {
        let most = limit.maximum.map_or("no".to_string(), |it| it.to_string());
        format!(
            "this rank needs {needed} descriptors for {connections} connections, and this process may have {most}; raise the \
             limit with `ulimit -n {needed}`"
        )
    })
}

/// See the [module docs](self).
pub(super) struct Guests {
    key: Key,
    limits: Limits,
    waiting: VecDeque<Guest>,
}

impl Guests {
    pub(super) fn new(key: Key, limits: Limits) -> Guests {
        Guests { key, limits, waiting: VecDeque::new() }
    }

    /// Waits for a short time until someone comes or says something. Returns those that have proved themselves, with
    /// their hellos.
    pub(super) fn hear(&mut self, listeners: &[TcpListener]) -> Vec<(Hello, Link)> {
        wait(listeners, &self.waiting);
        listeners.iter().for_each(|it| accept(it, &mut self.waiting));
        let mut res = Vec::new();
        for guest in std::mem::take(&mut self.waiting) {
            match guest.hear(&self.key, self.limits) {
                Ok(Heard::Waits(guest)) if Instant::now() < guest.until => {
                    self.waiting.push_back(guest);
                }
                Ok(Heard::Hello(hello, link)) => res.push((hello, link)),
                Ok(Heard::Waits(_) | Heard::Gone) | Err(_) => (),
            }
        }
        res
    }
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
