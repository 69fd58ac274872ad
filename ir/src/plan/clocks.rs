//! What is ordered before what: a vector clock per stream.
//!
//! Streams run concurrently, and `Record` and `Wait` are the only edges between them. Time on a stream
//! is the number of instructions that it has been given; the clock of a stream says, for every stream,
//! up to which time it is known to be done. So whether an instruction is over when another starts is
//! one comparison, without running anything.

use smallvec::{SmallVec, smallvec};

use crate::plan::{Event, Stream};
use cranelift_entity::EntityRef;

/// For each stream, the time up to which it is done.
pub type Clock = SmallVec<[u32; 8]>;

/// Clocks of all streams, as its instructions are walked in issue order.
#[derive(Debug, Clone)]
pub struct Clocks {
    now: Vec<Clock>,
    recorded: Vec<Option<Clock>>,
}

impl Clocks {
    /// Clocks at the start of a section, for events `0..events`.
    pub fn new(streams: usize, events: u32) -> Clocks {
        let zero: Clock = smallvec![0; streams];
        Clocks { now: vec![zero; streams], recorded: vec![None; events as usize] }
    }

    /// An instruction is queued on `stream`; the time at which it is done.
    pub fn run(&mut self, stream: Stream) -> u32 {
        let time = &mut self.now[stream.index()][stream.index()];
        *time += 1;
        *time
    }

    /// `event` marks what `stream` has been given; false if it had been recorded already.
    pub fn record(&mut self, event: Event, stream: Stream) -> bool {
        let first = self.recorded[event.index()].is_none();
        self.recorded[event.index()] = Some(self.now[stream.index()].clone());
        first
    }

    /// `stream` continues after `event`; false if nothing has recorded it.
    pub fn wait(&mut self, event: Event, stream: Stream) -> bool {
        let Some(event) = &self.recorded[event.index()] else { return false };
        join(&mut self.now[stream.index()], event);
        true
    }

    /// A section ends: what any stream has been given is over when the next one starts.
    pub fn meet(&mut self) {
        let now: Clock = self.now.iter().enumerate().map(|(stream, it)| it[stream]).collect();
        self.now.fill(now);
    }

    /// What is over when the next instruction of `stream` starts.
    pub fn of(&self, stream: Stream) -> &Clock {
        &self.now[stream.index()]
    }

    /// Whether what `other` did up to `time` is over when the next instruction of `stream` starts.
    pub fn saw(&self, stream: Stream, other: Stream, time: u32) -> bool {
        self.now[stream.index()][other.index()] >= time
    }
}

/// The later of two clocks, stream by stream.
pub fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(a, &b)| *a = b.max(*a));
}

/// Whether everything that `clock` says is over when `now` is.
pub fn covers(now: &Clock, clock: &Clock) -> bool {
    now.iter().zip(clock).all(|(now, it)| now >= it)
}
