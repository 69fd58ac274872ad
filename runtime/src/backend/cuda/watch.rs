//! Waiting for the device without ever waiting for good.
//!
//! A rank that is stuck or gone shows on the others as a stream that does not end, and no library
//! reports it. So before each collective the stream itself writes which instruction it has come to into
//! memory of the host, and whoever waits looks whether anything moves.

use std::thread;
use std::time::{Duration, Instant};

use crate::backend::cuda::driver::{CudaStream, HostMemory};
use crate::error::RunError;

/// How long to look again and again before sleeping in between.
const SPIN: Duration = Duration::from_micros(200);
/// How long to sleep.
const NAP: Duration = Duration::from_micros(50);

/// How far the streams have come: a word for each, written by the device.
#[derive(Debug)]
pub struct Markers {
    /// The index of an instruction, plus one; 0 before the first that is marked.
    words: HostMemory,
    address: u64,
    /// Whether streams can write words.
    on: bool,
}

impl Markers {
    /// For these streams, all at their start.
    pub fn new(streams: &[CudaStream]) -> Result<Markers, RunError> {
        let words = HostMemory::new(4 * streams.len())?;
        let address = words.device_address()?;
        let mut res = Markers { words, address, on: true };
        if let Some(first) = streams.first() {
            // Some drivers and virtual machines cannot; reports are then less exact, and that is all.
            res.on = first.write_word(address, 0).and_then(|()| first.synchronize()).is_ok();
        }
        Ok(res)
    }

    /// Queues a mark: `stream`, the one with this number, has come to this instruction.
    pub fn mark(
        &self,
        instruction: usize,
        number: usize,
        stream: &CudaStream,
    ) -> Result<(), RunError> {
        match self.on {
            true => stream.write_word(self.address + 4 * number as u64, instruction as u32 + 1),
            false => Ok(()),
        }
    }

    /// Whether marks are made.
    pub fn are_on(&self) -> bool {
        self.on
    }

    /// Makes marks no more: a graph that holds them could not be recorded.
    pub fn turn_off(&mut self) {
        self.on = false;
    }

    /// Forgets all marks. No stream is at work.
    pub fn clear(&mut self, n_streams: usize) {
        (0..n_streams).for_each(|it| self.words.set_word(it, 0));
    }

    /// The last marked instruction that a stream has come to.
    pub fn reached(&self, number: usize) -> Option<usize> {
        self.words.word(number).checked_sub(1).map(|it| it as usize)
    }
}

/// What was seen at one look.
pub type Seen = Vec<Option<usize>>;

/// Notices when nothing moves.
#[derive(Debug)]
pub struct Watch {
    began: Instant,
    /// What was seen last, and since when it is the same.
    seen: Option<(Seen, Instant)>,
}

impl Watch {
    /// Begins to wait.
    pub fn new() -> Watch {
        Watch { began: Instant::now(), seen: None }
    }

    /// How long everything has looked as it does.
    pub fn still_for(&mut self, seen: Seen) -> Duration {
        let now = Instant::now();
        match &self.seen {
            Some((last, since)) if *last == seen => now - *since,
            _ => {
                self.seen = Some((seen, now));
                Duration::ZERO
            }
        }
    }

    /// Lets some time pass before the next look.
    pub fn pause(&self) {
        match self.began.elapsed() < SPIN {
            true => std::hint::spin_loop(),
            false => thread::sleep(NAP),
        }
    }
}

/// Whether `condition` holds within some time.
pub fn passes_within(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let watch = Watch::new();
    while !condition() {
        if watch.began.elapsed() >= limit {
            return false;
        }
        watch.pause();
    }
    true
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}
