//! Flags of `planc run` that save and load checkpoints, and what is said of them.

use std::path::PathBuf;

use checkpoint::save::folder::newest;
use ir::model::NamePattern;
use runtime::{Busy, LoadOptions, OnFailure, SaveOptions};

/// Checkpoints.
///
/// In the format of PyTorch's Distributed Checkpoint; docs/checkpoints.md says what is in them.
#[derive(Debug, clap::Args)]
pub struct CheckpointArgs {
    /// Save checkpoints here, each as step-N; the last step is always saved.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Save after every N-th step, too.
    #[arg(long, value_name = "N", requires = "save", value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
    /// Keep the newest N checkpoints, and remove older ones.
    #[arg(long, value_name = "N", requires = "save", value_parser = clap::value_parser!(u64).range(1..))]
    keep: Option<u64>,
    /// Copy the state, and write it while training goes on.
    #[arg(long, requires = "save")]
    async_save: bool,
    /// What a save does while the one before is still being written.
    #[arg(long, value_enum, value_name = "WHAT", requires = "async_save", default_value_t = BusyArg::Wait)]
    save_busy: BusyArg,
    /// What training does when a checkpoint cannot be written.
    #[arg(long, value_enum, value_name = "WHAT", requires = "save", default_value_t = FailedArg::Stop)]
    save_failed: FailedArg,
    /// Save into a folder with checkpoints of another run; they are removed once there is a new one.
    #[arg(long, requires = "save", conflicts_with = "resume")]
    overwrite: bool,
    /// Go on from a checkpoint: a step-N, or a folder with `latest`. Of planc or PyTorch, of any mesh.
    #[arg(long, value_name = "DIR", group = "from")]
    load: Option<PathBuf>,
    /// Go on from the newest checkpoint of --save, or start if there is none yet.
    #[arg(long, requires = "save", group = "from")]
    resume: bool,
    /// Go on with other data than the checkpoint's: that of --data, or generated tokens without it.
    #[arg(long, requires = "from")]
    change_data: bool,
    /// Keys that need not be in the checkpoint, as in `optim.*`.
    #[arg(long, value_name = "GLOB", requires = "from", num_args = 1..)]
    allow_missing: Vec<NamePattern>,
    /// Keys of the checkpoint that the model need not have.
    #[arg(long, value_name = "GLOB", requires = "from", num_args = 1..)]
    allow_unexpected: Vec<NamePattern>,
    /// Round floating-point numbers that are of another type.
    #[arg(long, requires = "from")]
    cast: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BusyArg {
    /// Waits for it.
    Wait,
    /// Is left out.
    Skip,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FailedArg {
    /// Ends.
    Stop,
    /// Goes on, with a warning.
    Continue,
}

impl CheckpointArgs {
    /// When and where to save.
    pub fn save(&self) -> Option<SaveOptions> {
        Some(SaveOptions {
            folder: self.save.clone()?,
            every: self.save_every,
            keep: self.keep,
            background: self.async_save,
            busy: match self.save_busy {
                BusyArg::Wait => Busy::Wait,
                BusyArg::Skip => Busy::Skip,
            },
            on_failure: match self.save_failed {
                FailedArg::Stop => OnFailure::Stop,
                FailedArg::Continue => OnFailure::Continue,
            },
            overwrite: self.overwrite,
        })
    }

    /// What to go on from.
    pub fn load(&self) -> Option<LoadOptions> {
        Some(LoadOptions {
            path: self.load.clone().or(self.save.clone().filter(|_| self.resume))?,
            allow_missing: self.allow_missing.clone(),
            allow_unexpected: self.allow_unexpected.clone(),
            cast: self.cast,
        })
    }

    /// Whether to start where there is no checkpoint yet.
    pub fn resume(&self) -> bool {
        self.resume
    }

    /// Returns true if the data may differ from the checkpoint's.
    pub fn change_data(&self) -> bool {
        self.change_data
    }

    /// Where weights come from, unless training starts.
    pub fn weights(&self) -> Option<PathBuf> {
        let load = self.load()?.path;
        (!self.resume || newest(&load).is_ok_and(|it| it.is_some())).then_some(load)
    }
}
