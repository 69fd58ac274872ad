//! Saving and loading: what is in a checkpoint, and that training goes on from one as if nothing had
//! happened.

#[path = "checkpoint/failures.rs"]
mod failures;
#[path = "checkpoint/flips.rs"]
mod flips;
#[path = "checkpoint/harness.rs"]
mod harness;
#[path = "checkpoint/keys.rs"]
mod keys;
#[path = "checkpoint/layout.rs"]
mod layout;
#[path = "checkpoint/pytorch.rs"]
mod pytorch;
#[path = "checkpoint/reports.rs"]
mod reports;
#[path = "checkpoint/resume.rs"]
mod resume;
#[path = "checkpoint/uneven.rs"]
mod uneven;
