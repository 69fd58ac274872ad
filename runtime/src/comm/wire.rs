//! Ranks as processes: every member of a group sends what it holds to all others of the group.
//!
//! There is one connection between any two processes. All ranks come to their collectives in one order, so that what comes
//! over a connection next is for the collective that waits for it. It is the occasion, the bytes of all parts, and
//! a tag, the HMAC of both and of their number. No length is sent: both ends know it from the plan.
//!
//! A thread for each connection writes, so that two ranks never wait for each other with full buffers. When a rank fails, all
//! connections are shut down, which wakes whoever reads or writes.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use hmac::Mac;
use ir::plan::{Buffer, Comm, PlanSection};

use super::{Carrier, Occasion, Post, Posts};
use crate::bind::{At, BoundPlan, Group};
use crate::comm::control::Fault;
use crate::comm::control::frame::{Seal, TAG};
use crate::comm::control::tcp::Link;
use crate::error::RunError;
use crate::memory::Bytes;

/// The connections of one rank.
#[derive(Debug)]
pub struct Wire {
    plan: Arc<BoundPlan>,
    /// By rank; none for this one.
    peers: Vec<Option<Peer>>,
    /// The time for which nothing may come.
    patience: Duration,
    /// Gets a word when the run has failed.
    failed: Receiver<()>,
}

#[derive(Debug)]
struct Peer {
    input: BufReader<TcpStream>,
    seal: Seal,
    /// Takes the posts to be written; `None` at the end.
    output: Option<Sender<(Occasion, Post)>>,
    writer: Option<JoinHandle<()>>,
}

/// The result of reading.
enum Lost {
    /// The connection does not work.
    Connection(io::Error),
    /// The other rank is elsewhere in its plan.
    Diverged(Occasion),
}

/// Bytes of an occasion.
const HEAD: usize = 17;

/// Bytes that are collected before they are sent, and that are read at once.
const CHUNK: usize = 64 << 10;

/// The time in which the first cause is heard of when a connection ends.
const GRACE: Duration = Duration::from_secs(10);

/// Threads here only move bytes.
const STACK: usize = 256 << 10;

impl Wire {
    /// The carrier of a rank that has these connections, by rank. They end when `fault` is raised.
    pub(crate) fn new(
        plan: &Arc<BoundPlan>,
        links: Vec<Option<Link>>,
        patience: Duration,
        fault: &Fault,
    ) -> Result<Wire, RunError> {
        let (mut peers, mut streams) = (Vec::new(), Vec::new());
        for (link, rank) in links.into_iter().zip(0..) {
            let peer = link.map(|link| {
                let stream = Arc::new(link.stream.try_clone()?);
                streams.push(Arc::downgrade(&stream));
                Peer::new(rank, link, stream, patience)
            });
            let why = |it: io::Error| RunError::Thread { rank, why: it.to_string() };
            peers.push(peer.transpose().map_err(why)?);
        }
        let (word, failed) = channel();
        fault.listen(move |_| {
            // The error of one that has ended by itself says nothing.
            let open = streams.iter().filter_map(Weak::upgrade);
            open.for_each(|it: Arc<TcpStream>| _ = it.shutdown(Shutdown::Both));
            let _ = word.send(());
        });
        Ok(Wire { plan: plan.clone(), peers, patience, failed })
    }

    /// The error of a connection that ended, unless the run has failed.
    fn lost(&self, rank: u64, occasion: Occasion, error: &io::Error) -> RunError {
        let is_late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let seconds = self.patience.as_secs();
        if let (true, Occasion::Instruction(at)) = (is_late, occasion) {
            let streams = vec![format!("{occasion} waits for rank {rank}")];
            return RunError::Stuck { seconds, section: at.section, streams };
        }
        if !is_late && self.failed.recv_timeout(GRACE).is_ok() {
            return RunError::Stopped;
        }
        let how = match is_late {
            true => format!("has sent nothing for {seconds} s that {occasion} waits for"),
            false => format!("cannot be heard any more: {error}"),
        };
        let address = self.peers[rank as usize].as_ref().map(|it| it.input.get_ref().peer_addr());
        let host = address.and_then(Result::ok).map_or("?".to_string(), |it| it.ip().to_string());
        RunError::RankGone { rank, host, how }
    }
}

impl Carrier for Wire {
    fn exchange(
        &mut self,
        _: Comm,
        group: &Group,
        occasion: Occasion,
        post: Post,
    ) -> Result<Posts, RunError> {
        let others = |member: usize| (member != group.index).then(|| group.members[member]);
        for rank in (0..group.members.len()).filter_map(others) {
            let peer = self.peers[rank as usize].as_mut().expect("all other ranks are peers");
            // If its writer has ended, the connection has, and the reader finds out.
            let _ = peer.output.as_ref().map(|it| it.send((occasion, post.clone())));
        }
        let mut posts = Vec::with_capacity(group.members.len());
        for member in 0..group.members.len() {
            let Some(rank) = others(member) else {
                posts.push(post.clone());
                continue;
            };
            let lengths = match occasion {
                // Local shapes are the same on all ranks.
                Occasion::Instruction(_) => post.iter().map(Bytes::len).collect(),
                Occasion::Broadcast { buffer, root } if root == member => {
                    vec![self.plan.buffers[buffer].bytes()]
                }
                Occasion::Broadcast { .. } => vec![0],
            };
            let peer = self.peers[rank as usize].as_mut().expect("all other ranks are peers");
            let received = peer.receive(occasion, &lengths).map_err(|lost| match lost {
                Lost::Connection(error) => self.lost(rank, occasion, &error),
                Lost::Diverged(theirs) => {
                    RunError::Diverged { ours: occasion.to_string(), theirs: theirs.to_string() }
                }
            });
            posts.push(received?);
        }
        Ok(posts.into())
    }
}

impl Peer {
    fn new(rank: u64, link: Link, stream: Arc<TcpStream>, patience: Duration) -> io::Result<Peer> {
        let Link { stream: input, out, frames } = link;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        let (output, posts) = channel();
        let name = format!("to rank {rank}");
        let body = move || write(&stream, out, &posts);
        let writer = Builder::new().name(name).stack_size(STACK).spawn(body)?;
        Ok(Peer {
            input: BufReader::with_capacity(CHUNK, input),
            seal: frames.into_seal(),
            output: Some(output),
            writer: Some(writer),
        })
    }

    /// The other rank's post for this occasion, whose parts have so many bytes.
    fn receive(&mut self, occasion: Occasion, lengths: &[usize]) -> Result<Post, Lost> {
        let mut head = [0; HEAD];
        self.read(&mut head)?;
        if head != occasion.to_bytes() {
            return Err(match Occasion::from_bytes(&head) {
                Some(theirs) => Lost::Diverged(theirs),
                None => Lost::Connection(invalid()),
            });
        }
        let mut mac = self.seal.mac().chain_update(head);
        let mut post = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let mut bytes = Bytes::zeroed(length);
            self.read(bytes.all_mut())?;
            mac.update(bytes.all());
            post.push(bytes);
        }
        let mut tag = [0; TAG];
        self.read(&mut tag)?;
        mac.verify_slice(&tag).map_err(|_| Lost::Connection(invalid()))?;
        Ok(Arc::new(post))
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), Lost> {
        self.input.read_exact(bytes).map_err(Lost::Connection)
    }
}

/// Everything that was to be written is, unless the run has failed.
impl Drop for Peer {
    fn drop(&mut self) {
        self.output = None;
        if let Some(writer) = self.writer.take() {
            // A panic there is the end of the connection, which the other rank sees.
            let _ = writer.join();
        }
    }
}

/// Writes posts until there are no more. If the connection ends, whoever reads it says so.
fn write(stream: &TcpStream, mut seal: Seal, posts: &Receiver<(Occasion, Post)>) {
    let mut out = BufWriter::with_capacity(CHUNK, stream);
    for (occasion, post) in posts {
        let head = occasion.to_bytes();
        let mut mac = seal.mac().chain_update(head);
        post.iter().for_each(|it| mac.update(it.all()));
        let mut pieces = std::iter::once(&head[..]).chain(post.iter().map(Bytes::all));
        let written = pieces.try_for_each(|it| out.write_all(it));
        let sealed = written.and_then(|()| out.write_all(&mac.finalize().into_bytes()));
        if sealed.and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

impl Occasion {
    fn to_bytes(self) -> [u8; HEAD] {
        let (kind, a, b) = match self {
            Occasion::Instruction(at) => (0, at.section as u64, at.index as u64),
            Occasion::Broadcast { buffer, root } => (1, u64::from(buffer.as_u32()), root as u64),
        };
        let mut res = [kind; HEAD];
        res[1..9].copy_from_slice(&a.to_le_bytes());
        res[9..].copy_from_slice(&b.to_le_bytes());
        res
    }

    fn from_bytes(&[kind, ref rest @ ..]: &[u8; HEAD]) -> Option<Occasion> {
        let (a, b) = rest.split_first_chunk()?;
        let (a, b) = (u64::from_le_bytes(*a), u64::from_le_bytes(b.try_into().ok()?));
        let (small, b) = (u32::try_from(a).ok()?, usize::try_from(b).ok()?);
        match kind {
            0 => {
                let section = *PlanSection::ALL.get(small as usize)?;
                Some(Occasion::Instruction(At { section, index: b }))
            }
            1 => Some(Occasion::Broadcast { buffer: Buffer::from_u32(small), root: b }),
            _ => None,
        }
    }
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it sent what is no data of this run")
}

#[cfg(test)]
mod tests;
