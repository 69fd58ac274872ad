//! What ranks tell each other besides data: an id to meet by, an algorithm, who failed.
//!
//! [`threads`] is for ranks of one process, [`tcp`] for processes, with the messages of [`frame`]. Either way one [`Fault`] a process
//! keeps the first failure of any rank, wherever it ran.

pub mod frame;
pub mod tcp;
pub mod threads;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::RunError;

/// One rank's connection to all ranks of a run. Ranks are threads of one process, or processes.
///
/// All ranks call [`Control::broadcast`] in the same order. After a failure every call of every rank
/// returns an error, and [`Control::fault`] says the first cause.
pub trait Control: Send + Sync {
    /// This rank.
    fn rank(&self) -> u64;
    /// How many there are.
    fn n_ranks(&self) -> u64;
    /// Gives all ranks what rank 0 calls this with; the others give nothing.
    fn broadcast(&self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, RunError> {
        self.broadcast_after(bytes, Duration::ZERO)
    }
    /// As [`Control::broadcast`], of what rank 0 may take so long to find out.
    fn broadcast_after(&self, bytes: Option<Vec<u8>>, work: Duration) -> Result<Vec<u8>, RunError>;
    /// Agrees with all ranks on an action after this step, which this rank has done. Every rank calls it after every
    /// step but the last and gives its wish, if it has one. A wish of one process becomes what all do, after this step
    /// or a later one.
    fn agree(&self, step: u64, wish: Option<Wish>) -> Result<Option<Wish>, RunError>;
    /// Ends all ranks, wherever they run; the first error is the one that they end with.
    fn fail(&self, error: RunError);
    /// The first failure, of any rank.
    fn fault(&self) -> Option<RunError>;
    /// Says where this rank was when the run failed: ``at step[12] `matmul` making `h` ``.
    fn report(&self, position: String);
    /// What the ranks reported, in rank order, waiting up to `limit` for those that have not. Only
    /// rank 0 hears of ranks in other processes.
    fn positions(&self, limit: Duration) -> Vec<Option<String>>;
}

/// The action that a signal asks of a run. Of several wishes the greatest is granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// To save.
    Save,
    /// To save and to stop: the number of the signal.
    Stop(u8),
}

impl fmt::Debug for dyn Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Control({} of {})", self.rank(), self.n_ranks())
    }
}

/// The first failure of a run, as one process knows it, and whom to tell.
#[derive(Default)]
pub struct Fault(Mutex<FaultState>);

#[derive(Default)]
struct FaultState {
    first: Option<RunError>,
    listeners: Vec<Listener>,
}

type Listener = Box<dyn Fn(&RunError) + Send>;

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fault").field(&self.get()).finish()
    }
}

impl Fault {
    /// Keeps `error` if it is the first, and tells all listeners.
    pub fn raise(&self, error: RunError) {
        let listeners = {
            let mut state = lock(&self.0);
            if state.first.is_some() {
                return;
            }
            state.first = Some(error.clone());
            std::mem::take(&mut state.listeners)
        };
        listeners.iter().for_each(|it| it(&error));
    }

    /// The first failure.
    pub fn get(&self) -> Option<RunError> {
        lock(&self.0).first.clone()
    }

    /// Calls `listener` when there is a failure; at once if there is one.
    pub fn listen(&self, listener: impl Fn(&RunError) + Send + 'static) {
        let raised = {
            let mut state = lock(&self.0);
            if state.first.is_none() {
                state.listeners.push(Box::new(listener));
                return;
            }
            state.first.clone()
        };
        raised.iter().for_each(listener);
    }
}

/// A panic while holding a lock ends the run anyway; the state behind it is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `` ranks 0, 2-3 at step[12] `matmul` making `h` ``, ranks at one place together.
pub fn positions_text(positions: &[Option<String>]) -> Vec<String> {
    let mut places: Vec<(&Option<String>, Vec<usize>)> = Vec::new();
    for (rank, position) in positions.iter().enumerate() {
        match places.iter_mut().find(|it| it.0 == position) {
            Some(place) => place.1.push(rank),
            None => places.push((position, vec![rank])),
        }
    }
    let text = |(position, ranks): &(&Option<String>, Vec<usize>)| match position {
        Some(position) => format!("{} {position}", ranks_text(ranks)),
        None => format!("{} gave no answer", ranks_text(ranks)),
    };
    places.iter().map(text).collect()
}

/// `rank 3`, `ranks 0, 2-3`; the ranks ascend.
pub fn ranks_text(ranks: &[usize]) -> String {
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        [one] => one.to_string(),
        [] => String::new(),
    };
    let runs: Vec<String> = ranks.chunk_by(|a, b| a + 1 == *b).map(run).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", runs.join(", "))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn the_first_failure_stays_and_everybody_hears_of_it_once() {
        let (fault, heard) = (Fault::default(), Arc::new(AtomicUsize::new(0)));
        let count = |by: usize| {
            let heard = heard.clone();
            move |_: &RunError| {
                heard.fetch_add(by, Ordering::Relaxed);
            }
        };
        fault.listen(count(1));
        assert_eq!(fault.get(), None);
        fault.raise(RunError::NoDriver);
        fault.raise(RunError::Stopped);
        assert_eq!(fault.get(), Some(RunError::NoDriver));
        fault.listen(count(10));
        assert_eq!(heard.load(Ordering::Relaxed), 11);
    }

    #[test]
    fn ranks_at_one_place_are_listed_together() {
        let at = |it: &str| Some(it.to_string());
        let positions = [at("at a"), at("at b"), at("at a"), at("at a"), None];
        let expect = ["ranks 0, 2-3 at a", "rank 1 at b", "rank 4 gave no answer"];
        assert_eq!(positions_text(&positions), expect);
    }
}
