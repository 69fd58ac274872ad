//! What ranks tell each other besides data: an id to meet by, an algorithm, who failed.

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
    fn broadcast(&self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, RunError>;
    /// Ends all ranks, wherever they run; the first error is the one that they end with.
    fn fail(&self, error: RunError);
    /// The first failure, of any rank.
    fn fault(&self) -> Option<RunError>;
}
