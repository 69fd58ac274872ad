//! Flags of `planc run` that save and load checkpoints, and what is said of them.

use std::path::PathBuf;

use checkpoint::save::folder::newest;
use runtime::{Busy, LoadOptions, LoadReport, OnFailure, SaveOptions, SaveReport};
use serde_json::{Value, json};

use crate::table::bytes;

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
    /// Keys that need not be in the checkpoint, as in `optim.*`.
    #[arg(long, value_name = "GLOB", requires = "from", num_args = 1..)]
    allow_missing: Vec<String>,
    /// Keys of the checkpoint that the model need not have.
    #[arg(long, value_name = "GLOB", requires = "from", num_args = 1..)]
    allow_unexpected: Vec<String>,
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

    /// Where weights come from, unless training starts.
    pub fn weights(&self) -> Option<PathBuf> {
        let load = self.load()?.path;
        (!self.resume || newest(&load).is_ok_and(|it| it.is_some())).then_some(load)
    }
}

/// `resumed from ckpt/step-50 at step 51; read 1.40 MiB in 0.02 s, with 64.0 KiB of memory besides`.
pub fn loaded_text(report: &LoadReport) -> String {
    format!(
        "resumed from {} at step {}; read {} in {:.2} s, with {} of memory besides\n",
        report.path.display(),
        report.step + 1,
        bytes(report.bytes),
        report.seconds,
        bytes(report.extra_memory),
    )
}

/// The same for programs.
pub fn loaded_json(report: &LoadReport) -> Value {
    json!({ "loaded": {
        "path": report.path.display().to_string(),
        "step": report.step,
        "seed": report.seed,
        "bytes": report.bytes,
        "extra_memory": report.extra_memory,
        "seconds": report.seconds,
    } })
}

/// `saved ckpt/step-50: 1.40 MiB in 0.03 s`.
pub fn saved_text(report: &SaveReport) -> String {
    let waited = report.waited.as_secs_f64();
    let waited = match waited < report.seconds {
        true => format!(", of which training waited {waited:.2} s"),
        false => String::new(),
    };
    let (path, n) = (report.path.display(), bytes(report.bytes));
    format!("saved {path}: {n} in {:.2} s{waited}\n", report.seconds)
}

/// The same for programs.
pub fn saved_json(report: &SaveReport) -> Value {
    json!({ "saved": {
        "path": report.path.display().to_string(),
        "bytes": report.bytes,
        "seconds": report.seconds,
        "waited": report.waited.as_secs_f64(),
    } })
}
