//! Launches for `embedding` and its gradient.

use crate::cuda::{OpCall, Program, Unsupported};

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    Err(Unsupported::new(&calls[0], "it has none"))
}
