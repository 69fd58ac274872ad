//! Connections for data: one between any two processes of a run on the CPU.
//!
//! Rank 0 tells all ranks a random number, and the address of each rank as it knows it from the rendezvous. Each rank listens
//! there, on a port that the system chooses and that rank 0 passes on. Of two ranks, the higher one connects. Both prove
//! themselves as at the rendezvous, with a key that is made of the job's and of the random number. Only ranks that rank
//! 0 took in know that number, so that without a secret nobody else joins here either.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::guests::{Guests, reserve};
use super::{Timed, exchange};
use crate::comm::control::frame::{Hello, Message, Sender};
use crate::comm::control::tcp::{Link, Tcp};
use crate::comm::control::{Control, Fault};
use crate::error::RunError;
use crate::launch::secret::{Key, NONCE, nonce};

/// The time that ranks take to connect at most. All have met before, and are at this point at once.
const LIMIT: Duration = Duration::from_secs(300);

/// The time of one try, after which a rank looks whether the run has failed.
const TRY: Duration = Duration::from_secs(2);

/// The time between two tries.
const PAUSE: Duration = Duration::from_millis(50);

/// The descriptors of a rank for each other one: for messages, and for both directions of data.
const DESCRIPTORS: u64 = 3;

/// A rank's way to ranks in other processes, which it has met.
#[derive(Debug)]
pub struct Pairs {
    tcp: Arc<Tcp>,
    key: Key,
}

/// The words of rank 0 before any rank listens.
#[derive(Serialize, Deserialize)]
struct Places {
    nonce: [u8; NONCE],
    /// By rank.
    addresses: Vec<IpAddr>,
}

impl Pairs {
    pub(crate) fn new(tcp: Arc<Tcp>, key: Key) -> Pairs {
        Pairs { tcp, key }
    }

    /// The fault that is raised when a rank fails.
    pub(crate) fn fault(&self) -> Arc<Fault> {
        self.tcp.fault_handle()
    }

    /// The time for which a rank waits for data.
    pub(crate) fn patience(&self) -> Duration {
        self.tcp.inner().pulse().answer
    }

    /// Connects to every other rank; returns the connections by rank. All ranks call it.
    pub(crate) fn connect(&self) -> Result<Vec<Option<Link>>, RunError> {
        let (tcp, inner) = (&*self.tcp, self.tcp.inner());
        let (rank, n_ranks) = (tcp.rank() as usize, tcp.n_ranks() as usize);
        if n_ranks == 1 {
            return Ok(vec![None]);
        }
        reserve(DESCRIPTORS * tcp.n_ranks()).map_err(|it| at("this machine", it))?;
        let places = match rank {
            0 => {
                let nonce = nonce().map_err(|it| at("this machine", it.to_string()))?;
                Some(Places { nonce, addresses: inner.addresses() })
            }
            _ => None,
        };
        let Places { nonce, addresses } = self.told(places, |it: &Places| it.addresses.len())?;
        let bound = TcpListener::bind((addresses[rank], 0));
        let listener = bound.and_then(|it| it.set_nonblocking(true).map(|()| it));
        let own = |it: io::Error| at(addresses[rank], format!("rank {rank} cannot listen: {it}"));
        let listener = listener.map_err(own)?;
        let port = listener.local_addr().map_err(own)?.port();
        let ports = match rank {
            0 => Some(inner.ports(port)?),
            _ => {
                inner.send_all(&Message::Port(port));
                None
            }
        };
        let ports = self.told(ports, Vec::len)?;
        let key = self.key.of_run(&nonce);
        let until = Instant::now() + LIMIT.min(self.patience());
        let mut links = scope(|scope| -> Result<BTreeMap<u64, Link>, RunError> {
            let above = scope.spawn(|| self.ending(self.accept(listener, &key, until)));
            let below = (0..rank).map(|it| {
                let address = SocketAddr::new(addresses[it], ports[it]);
                Ok((it as u64, self.call((it, address), &key, until)?))
            });
            let below = self.ending(below.collect::<Result<Vec<(u64, Link)>, RunError>>());
            let mut links = above.join().expect("it does not panic")?;
            links.extend(below?);
            Ok(links)
        })?;
        Ok((0..n_ranks as u64).map(|it| links.remove(&it)).collect())
    }

    /// Returns to all ranks the value of rank 0, which must have as many entries as there are ranks.
    fn told<T: Serialize + DeserializeOwned>(
        &self,
        given: Option<T>,
        entries: impl Fn(&T) -> usize,
    ) -> Result<T, RunError> {
        let given = given.map(|it| serde_json::to_vec(&it).expect("numbers and text are JSON"));
        let bytes = self.tcp.broadcast(given)?;
        let value = serde_json::from_slice(&bytes).ok();
        let value = value.filter(|it| entries(it) as u64 == self.tcp.n_ranks());
        value.ok_or_else(|| self.tcp.inner().gone(0, "sent what is no list of all ranks"))
    }

    /// Ends all ranks if it is an error: the other half of this rank waits for them.
    fn ending<T>(&self, result: Result<T, RunError>) -> Result<T, RunError> {
        result.map_err(|error| {
            if error != RunError::Stopped {
                self.tcp.fail(error);
            }
            RunError::Stopped
        })
    }

    /// The connections of all higher ranks. Whoever else comes is dropped.
    fn accept(
        &self,
        listener: TcpListener,
        key: &Key,
        until: Instant,
    ) -> Result<BTreeMap<u64, Link>, RunError> {
        let mut missing: BTreeSet<u64> = (self.tcp.rank() + 1..self.tcp.n_ranks()).collect();
        let mut guests = Guests::new(key.clone(), self.tcp.inner().limits());
        let (listeners, mut links) = ([listener], BTreeMap::new());
        while let Some(&next) = missing.first() {
            if self.tcp.fault().is_some() {
                return Err(RunError::Stopped);
            }
            if Instant::now() > until {
                return Err(self.tcp.inner().gone(next, "does not connect to exchange data"));
            }
            for (hello, link) in guests.hear(&listeners) {
                if missing.remove(&hello.rank) {
                    links.insert(hello.rank, link);
                }
            }
        }
        Ok(links)
    }

    /// The connection to a lower rank.
    fn call(
        &self,
        (rank, address): (usize, SocketAddr),
        key: &Key,
        until: Instant,
    ) -> Result<Link, RunError> {
        loop {
            if self.tcp.fault().is_some() {
                return Err(RunError::Stopped);
            }
            match self.dial(address, key) {
                Ok(link) => return Ok(link),
                Err(_) if Instant::now() < until => sleep(PAUSE),
                Err(error) => {
                    let ranks = format!("rank {} does not reach rank {rank}", self.tcp.rank());
                    return Err(at(
                        address,
                        format!(
                            "{ranks} to exchange data: {error}; ranks on the CPU connect to each other, on ports \
                             that the system chooses: let them through"
                        ),
                    ));
                }
            }
        }
    }

    fn dial(&self, address: SocketAddr, key: &Key) -> io::Result<Link> {
        let until = Instant::now() + TRY;
        let stream = TcpStream::connect_timeout(&address, TRY)?;
        let mut timed = Timed { stream: &stream, until };
        let (nonces, proof) = exchange(&mut timed)?;
        if !key.accepts(Sender::First, &nonces, &proof) {
            return Err(io::Error::other("another program answers"));
        }
        let mut out = key.seal(Sender::Other, &nonces);
        let hello =
            Hello { rank: self.tcp.rank(), host: String::new(), facts: Vec::new(), failed: None };
        let hello = out.frame(&Message::Hello(hello));
        timed.write_all(&[&key.proof(Sender::Other, &nonces)[..], &hello].concat())?;
        let frames = key.frames(Sender::First, &nonces, self.tcp.inner().limits());
        Ok(Link { stream, out, frames })
    }
}

fn at(place: impl ToString, why: String) -> RunError {
    RunError::Rendezvous { master: place.to_string(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::control::frame::Limits;
    use crate::comm::control::tcp::Pulse;

    /// The pairs of a rank of two that has met nobody.
    fn pairs(rank: u64) -> Pairs {
        let terms = (Pulse::default(), Limits { data: 0 });
        let tcp = Tcp::new((rank, 2), "here", &Arc::default(), terms);
        Pairs::new(Arc::new(tcp), Key::of(None, "job"))
    }

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        listener.set_nonblocking(true).expect("it is a socket");
        let address = listener.local_addr().expect("it is bound");
        (listener, address)
    }

    /// The rank that knows the number of the run is taken, whoever else connects, and nobody is waited for.
    #[test]
    fn data_is_taken_from_ranks_of_the_run_only() {
        let (listener, address) = listener();
        let (key, other) = (pairs(0).key.of_run(&[1; NONCE]), pairs(0).key.of_run(&[2; NONCE]));
        let until = Instant::now() + Duration::from_secs(60);
        let silent = TcpStream::connect(address).expect("it listens");
        let mut loud = TcpStream::connect(address).expect("it listens");
        loud.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it listens");
        let links = scope(|scope| {
            let accepting = scope.spawn(|| pairs(0).accept(listener, &key, until));
            let error = pairs(1).dial(address, &other).expect_err("it has another number");
            assert_eq!(error.to_string(), "another program answers");
            // It does not care who answers, and guesses.
            let stream = TcpStream::connect(address).expect("it listens");
            let mut timed = Timed { stream: &stream, until };
            exchange(&mut timed).expect("rank 0 proves itself first");
            timed.write_all(&[0; 200]).expect("it listens");
            // A rank that is not expected.
            pairs(0).dial(address, &key).expect("it knows the number");
            pairs(1).dial(address, &key).expect("it knows the number");
            accepting.join().expect("no panic").expect("rank 1 has come")
        });
        assert_eq!(links.keys().collect::<Vec<_>>(), [&1]);
        drop(silent);
    }

    /// Ranks that never come are named, and a failure elsewhere ends the wait for them.
    #[test]
    fn a_rank_waits_neither_for_ever_nor_when_the_run_has_failed() {
        let key = pairs(0).key.of_run(&[1; NONCE]);
        let (listener, address) = listener();
        let alone = pairs(0);
        let error = alone.accept(listener, &key, Instant::now()).expect_err("nobody comes");
        assert_eq!(error.code(), "PL0565");
        assert!(error.to_string().starts_with("rank 1 (?) does not connect"), "{error}");
        // Nobody listens there by now.
        let error = pairs(1).call((0, address), &key, Instant::now()).expect_err("nobody is there");
        assert_eq!(error.code(), "PL0563");
        alone.tcp.fail(RunError::NoDriver);
        let until = Instant::now() + LIMIT;
        let (listener, address) = self::listener();
        assert_eq!(alone.accept(listener, &key, until).expect_err("it failed"), RunError::Stopped);
        assert_eq!(
            alone.call((1, address), &key, until).expect_err("it failed"),
            RunError::Stopped
        );
    }
}
