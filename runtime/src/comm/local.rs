//! Ranks as threads: every member of a group posts what it holds and gets what all posted.
//!
//! Data is shared, not sent: a post is one copy of the sources, and each member reads from it what it
//! wants. Nothing here depends on timing but who waits for whom. When a rank fails, everyone is woken,
//! so that no rank waits for one that is gone.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cranelift_entity::PrimaryMap;
use ir::plan::{Comm, Plan};

use super::{Carrier, Occasion, Post, Posts};
use crate::bind::Group;
use crate::comm::control::{Fault, lock};
use crate::error::RunError;

/// Where the ranks of a plan meet.
#[derive(Debug)]
pub struct World {
    /// For each communicator, its groups.
    meetings: PrimaryMap<Comm, Vec<Meeting>>,
}

#[derive(Debug)]
struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

/// One round after the other: all post, then all leave with the posts, then the next may begin.
#[derive(Debug)]
struct State {
    posted: Vec<Option<Post>>,
    occasion: Option<Occasion>,
    /// There from the last post until all have left.
    complete: Option<Posts>,
    left: usize,
    stopped: bool,
}

impl World {
    /// The meeting points of all groups of a plan, open until `fault` is raised.
    pub fn new(plan: &Plan, fault: &Fault) -> Arc<World> {
        let meetings = plan.comms.values().map(|&axes| {
            let size = plan.mesh.set_size(axes) as usize;
            let groups = plan.mesh.n_ranks() as usize / size;
            (0..groups).map(|_| Meeting::new(size)).collect()
        });
        let world = Arc::new(World { meetings: meetings.collect() });
        let stopped = Arc::downgrade(&world);
        fault.listen(move |_| {
            if let Some(world) = stopped.upgrade() {
                world.stop();
            }
        });
        world
    }

    fn stop(&self) {
        for meeting in self.meetings.values().flatten() {
            lock(&meeting.state).stopped = true;
            meeting.changed.notify_all();
        }
    }
}

impl Carrier for Arc<World> {
    fn exchange(
        &mut self,
        comm: Comm,
        group: &Group,
        occasion: Occasion,
        post: Post,
    ) -> Result<Posts, RunError> {
        self.meetings[comm][group.id].exchange(group.index, occasion, post)
    }
}

impl Meeting {
    fn new(size: usize) -> Meeting {
        let state = State {
            posted: vec![None; size],
            occasion: None,
            complete: None,
            left: 0,
            stopped: false,
        };
        Meeting { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn exchange(&self, member: usize, occasion: Occasion, post: Post) -> Result<Posts, RunError> {
        let mut state = self.wait_while(lock(&self.state), |it| it.complete.is_some())?;
        if let Some(other) = state.occasion.replace(occasion).filter(|&it| it != occasion) {
            return Err(RunError::Diverged {
                ours: occasion.to_string(),
                theirs: other.to_string(),
            });
        }
        state.posted[member] = Some(post);
        if state.posted.iter().all(Option::is_some) {
            state.complete = Some(state.posted.iter_mut().filter_map(Option::take).collect());
            self.changed.notify_all();
        }
        let mut state = self.wait_while(state, |it| it.complete.is_none())?;
        let posts = state.complete.clone().expect("waited for it");
        state.left += 1;
        if state.left == state.posted.len() {
            state.left = 0;
            state.occasion = None;
            state.complete = None;
            self.changed.notify_all();
        }
        Ok(posts)
    }

    fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, State>,
        mut condition: impl FnMut(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, RunError> {
        let waiting = self.changed.wait_while(state, |it| !it.stopped && condition(it));
        let state = waiting.unwrap_or_else(PoisonError::into_inner);
        if state.stopped { Err(RunError::Stopped) } else { Ok(state) }
    }
}
