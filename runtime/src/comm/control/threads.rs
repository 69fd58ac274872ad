//! Control among ranks that are threads of this process.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Control, Fault, Wish, lock};
use crate::error::RunError;

/// One rank's end; see [`threads`].
#[derive(Debug)]
pub struct Threads {
    rank: u64,
    /// How many broadcasts this rank has been in.
    next: Mutex<u64>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    n_ranks: u64,
    fault: Arc<Fault>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Broadcasts that some rank has not read yet, each with how many.
    sent: VecDeque<(Vec<u8>, u64)>,
    /// The number of the first of them.
    first: u64,
    positions: Vec<Option<String>>,
}

/// The ends of `n_ranks` ranks, in rank order, which end together by `fault`.
pub fn threads(n_ranks: u64, fault: &Arc<Fault>) -> Vec<Arc<Threads>> {
    let state = State { sent: VecDeque::new(), first: 0, positions: vec![None; n_ranks as usize] };
    let shared = Arc::new(Shared {
        n_ranks,
        fault: fault.clone(),
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    let waiting = Arc::downgrade(&shared);
    fault.listen(move |_| {
        if let Some(shared) = waiting.upgrade() {
            // Whoever is about to wait has the lock, and waits before this wakes it.
            let _state = lock(&shared.state);
            shared.changed.notify_all();
        }
    });
    (0..n_ranks)
        .map(|rank| Arc::new(Threads { rank, next: Mutex::new(0), shared: shared.clone() }))
        .collect()
}

impl Control for Threads {
    fn rank(&self) -> u64 {
        self.rank
    }

    fn n_ranks(&self) -> u64 {
        self.shared.n_ranks
    }

    fn broadcast_after(
        &self,
        bytes: Option<Vec<u8>>,
        _work: Duration,
    ) -> Result<Vec<u8>, RunError> {
        assert_eq!(bytes.is_some(), self.rank == 0, "rank 0 gives, the others get");
        let shared = &*self.shared;
        let mut next = lock(&self.next);
        let mut state = lock(&shared.state);
        if let Some(bytes) = bytes {
            if shared.fault.get().is_some() {
                return Err(RunError::Stopped);
            }
            if shared.n_ranks > 1 {
                state.sent.push_back((bytes.clone(), shared.n_ranks - 1));
                shared.changed.notify_all();
            }
            return Ok(bytes);
        }
        loop {
            if shared.fault.get().is_some() {
                return Err(RunError::Stopped);
            }
            let index = (*next - state.first) as usize;
            if let Some((bytes, readers)) = state.sent.get_mut(index) {
                let bytes = bytes.clone();
                *readers -= 1;
                *next += 1;
                while state.sent.front().is_some_and(|it| it.1 == 0) {
                    state.sent.pop_front();
                    state.first += 1;
                }
                return Ok(bytes);
            }
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// One call is for all, which are in one process.
    fn agree(&self, _step: u64, wish: Option<Wish>) -> Result<Option<Wish>, RunError> {
        Ok(wish)
    }

    fn fail(&self, error: RunError) {
        self.shared.fault.raise(error);
    }

    fn fault(&self) -> Option<RunError> {
        self.shared.fault.get()
    }

    fn report(&self, position: String) {
        lock(&self.shared.state).positions[self.rank as usize].get_or_insert(position);
        self.shared.changed.notify_all();
    }

    fn positions(&self, limit: Duration) -> Vec<Option<String>> {
        let until = Instant::now() + limit;
        let mut state = lock(&self.shared.state);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.positions.iter().all(Option::is_some) {
                return state.positions.clone();
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::scope;

    use super::*;

    #[test]
    fn all_ranks_get_all_broadcasts_in_order() {
        let ends = threads(4, &Arc::default());
        scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    for i in 0..50u8 {
                        let bytes = (end.rank() == 0).then(|| vec![i, i]);
                        assert_eq!(end.broadcast(bytes), Ok(vec![i, i]));
                    }
                });
            }
        });
        assert!(lock(&ends[0].shared.state).sent.is_empty(), "what all have read is dropped");
    }

    #[test]
    fn a_failure_ends_those_that_wait() {
        let ends = threads(3, &Arc::default());
        scope(|scope| {
            let waiting: Vec<_> =
                ends[1..].iter().map(|it| scope.spawn(|| it.broadcast(None))).collect();
            ends[0].fail(RunError::NoDriver);
            for it in waiting {
                assert_eq!(it.join().expect("no panic"), Err(RunError::Stopped));
            }
        });
        assert_eq!(ends[2].fault(), Some(RunError::NoDriver));
        assert_eq!(ends[0].broadcast(Some(vec![])), Err(RunError::Stopped));
    }

    #[test]
    fn positions_wait_for_all_that_answer() {
        let ends = threads(2, &Arc::default());
        let positions = scope(|scope| {
            let waiting = scope.spawn(|| ends[0].positions(Duration::from_secs(60)));
            ends[0].report("a".to_string());
            ends[1].report("b".to_string());
            waiting.join().expect("no panic")
        });
        assert_eq!(positions, [Some("a".to_string()), Some("b".to_string())]);
        let ends = threads(2, &Arc::default());
        ends[0].report("a".to_string());
        assert_eq!(ends[0].positions(Duration::ZERO), [Some("a".to_string()), None]);
    }
}
