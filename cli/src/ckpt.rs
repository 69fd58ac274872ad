//! `planc ckpt`: looks at checkpoints, those of PyTorch too, without a mesh or a plan; cuts them anew, and converts
//! them.

mod diff;
mod export;
mod import;
mod ls;
mod reshard;
mod show;
mod target;
mod verify;

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, CheckpointError};
use ir::model::NamePattern;

use crate::controls::clean;
use crate::report::{Failure, Outcome, Ui};

/// Lists, shows, checks, compares, reshards and converts checkpoints.
///
/// A checkpoint is a folder in the format of torch.distributed.checkpoint, as planc and PyTorch write it, a
/// folder whose file `latest` names one, a folder of safetensors files, or one such file.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Ls(ls::Args),
    Show(show::Args),
    Verify(verify::Args),
    Diff(diff::Args),
    Reshard(reshard::Args),
    Import(import::Args),
    Export(export::Args),
}

/// One checkpoint, and which of its keys are meant.
#[derive(Debug, clap::Args)]
struct One {
    /// The checkpoint.
    path: PathBuf,
    #[command(flatten)]
    keys: Keys,
}

/// Which keys are meant.
#[derive(Debug, clap::Args)]
struct Keys {
    /// Only keys that fit; `*` stands for any text, `?` and `[qk]` for a character.
    #[arg(long, value_name = "GLOB")]
    param: Option<NamePattern>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    match &args.command {
        Command::Ls(args) => ls::run(args, ui),
        Command::Show(args) => show::run(args, ui),
        Command::Verify(args) => verify::run(args, ui),
        Command::Diff(args) => diff::run(args, ui),
        Command::Reshard(args) => reshard::run(args, ui),
        Command::Import(args) => import::run(args, ui),
        Command::Export(args) => export::run(args, ui),
    }
}

impl Keys {
    fn fit(&self, key: &str) -> bool {
        self.param.as_ref().is_none_or(|it| it.matches(key))
    }

    /// An error, if a pattern fits nothing.
    fn check(&self, checkpoint: &Checkpoint) -> Outcome {
        let mut keys = checkpoint.tensors().map(|it| it.0).chain(checkpoint.objects());
        match &self.param {
            Some(pattern) if !keys.any(|it| pattern.matches(it)) => {
                let message = format!("no key is like `{pattern}`");
                Err(Failure::new("PL0707", message)
                    .in_file(checkpoint.path())
                    .help("`*` stands for any text, as in `*.q_proj.weight`; `planc ckpt ls` lists all keys"))
            }
            _ => Ok(()),
        }
    }
}

fn open(path: &Path) -> Outcome<Checkpoint> {
    Checkpoint::open(path).map_err(|it| failure(&it))
}

/// An error of a checkpoint as the user sees it.
pub fn failure(error: &CheckpointError) -> Box<Failure> {
    let text = clean(&error.to_string());
    let help = match error {
        CheckpointError::NoCheckpoint { .. } | CheckpointError::Io { what: "read", .. } => {
            "a checkpoint is a folder with `.metadata`, one whose `latest` names it, or safetensors files"
        }
        CheckpointError::Io { .. } => WRITING,
        CheckpointError::Index { .. } | CheckpointError::Item { .. } => {
            "`planc ckpt verify` lists all that is wrong; copy the checkpoint again, or use an older one"
        }
        CheckpointError::Refused { .. } => {
            "planc runs nothing that a file names; do not load this in Python unless you know who made it"
        }
        CheckpointError::Checksum { .. } => "copy the checkpoint again, or use an older one",
        CheckpointError::NoKey { .. } => "`planc ckpt ls` lists all keys",
        CheckpointError::Cover { .. } => {
            "a file of the checkpoint, or the index of a rank, is missing; `planc ckpt verify` says more"
        }
        CheckpointError::Outside { .. } => "`planc ckpt ls` lists all shapes",
        CheckpointError::Locked(_) | CheckpointError::LockLost { .. } => {
            // What would fix it is the last part of the message.
            let (what, fix) = text.rsplit_once("; ").unwrap_or((&text, ""));
            return Failure::new(error.code(), what).help(fix);
        }
    };
    Failure::new(error.code(), text).help(help)
}

/// The help for a file that cannot be written.
pub const WRITING: &str = "`df -h` and `df -i` show the space that is left, `ls -ld` who may write there; a quota, or \
                           a limit of `ulimit -f`, ends writing too";

/// `[0,3) x [0,2)`.
fn box_text(chunk: &ir::placement::Chunk) -> String {
    let dims = chunk.offsets.iter().zip(&chunk.sizes);
    let dims: Vec<String> = dims.map(|(at, size)| format!("[{at},{})", at + size)).collect();
    if dims.is_empty() { "the number".to_string() } else { dims.join(" x ") }
}
