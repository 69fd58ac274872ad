//! [`Order`]: what is over when an instruction starts, whatever streams do.
//!
//! Instructions of one stream run one after the other; `record` and `wait` are the only other order. Each
//! stream knows how far every stream had come, at least, when its own last instruction started; a wait
//! learns what the event's stream knew when it recorded. Vector clocks, as in race detectors.

use cranelift_entity::EntityRef;
use smallvec::SmallVec;

use crate::plan::{Event, Stream};

type Known = SmallVec<[u32; 8]>;

/// Knowledge of all streams, as a section is walked in issue order.
pub(super) struct Order {
    known: Vec<Known>,
    marks: Vec<Option<Known>>,
}

impl Order {
    /// At the start of a section.
    pub fn new(n_streams: usize, n_events: u32) -> Order {
        let nothing = Known::from_elem(0, n_streams);
        Order { known: vec![nothing; n_streams], marks: vec![None; n_events as usize] }
    }

    /// An instruction of `stream`; the time that it takes there, counted from 1.
    pub fn starts(&mut self, stream: Stream) -> u32 {
        let time = &mut self.known[stream.index()][stream.index()];
        *time += 1;
        *time
    }

    pub fn record(&mut self, event: Event, stream: Stream) {
        self.marks[event.index()] = Some(self.known[stream.index()].clone());
    }

    /// A wait for what was not recorded waits for nothing, and is reported elsewhere.
    pub fn wait(&mut self, event: Event, stream: Stream) {
        let Some(mark) = &self.marks[event.index()] else { return };
        let known = &mut self.known[stream.index()];
        known.iter_mut().zip(mark).for_each(|(known, &it)| *known = it.max(*known));
    }

    /// Whether the instruction that `other` had at `time` is over when the last one of `stream` starts.
    pub fn is_over(&self, other: Stream, time: u32, stream: Stream) -> bool {
        self.known[stream.index()][other.index()] >= time
    }
}
