//! Rank 0's reception, for as long as the run goes on: a rank that comes late is told so.

use std::io::Write;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, Weak};

use super::differences;
use super::guests::Guests;
use crate::comm::control::frame::{Failure, Hello, Limits, Message, Refusal};
use crate::comm::control::tcp::{Inner, Link, Occupied, remote};
use crate::comm::control::{Fault, lock};
use crate::error::RunError;
use crate::launch::secret::Key;

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

impl Desk {
    pub(super) fn run(self, listeners: &[TcpListener]) {
        let mut guests = Guests::new(self.key.clone(), self.limits);
        while let Some(inner) = self.inner.upgrade() {
            if inner.is_closing() {
                return;
            }
            for (hello, link) in guests.hear(listeners) {
                self.receive(&inner, &hello, link);
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
