//! Where a command may write a checkpoint, or what it makes of one: nothing is replaced unasked.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use checkpoint::folder_of;

use crate::report::{Failure, Outcome};

/// Refuses to write the checkpoint of a step into `root`, if that replaces one or points `latest` back.
pub fn check_step(root: &Path, step: u64, force: bool) -> Outcome {
    outside_checkpoint(root)?;
    let target = root.join(format!("step-{step}"));
    if force {
        return Ok(());
    }
    if target.symlink_metadata().is_ok() {
        return refused(format!("`{}` is there already", target.display()), FORCE);
    }
    // More than a name is no name.
    let mut text = String::new();
    let latest = root.join("latest");
    if latest.is_file() {
        let file = File::open(latest).map(|it| it.take(100));
        let _ = file.and_then(|mut it| it.read_to_string(&mut text));
    }
    match text.trim().strip_prefix("step-").and_then(|it| it.parse::<u64>().ok()) {
        Some(newest) if newest > step => refused(
            format!(
                "`latest` in `{}` would go back from step {newest} to step {step}",
                root.display()
            ),
            FORCE,
        ),
        _ => Ok(()),
    }
}

/// Refuses to write a file over another one, over what is no file, and into a checkpoint.
pub fn check_file(path: &Path, force: bool) -> Outcome {
    outside_checkpoint(folder_of(path))?;
    match fs::metadata(path) {
        Ok(it) if !it.is_file() => {
            refused(format!("`{}` is no regular file", path.display()), "name a new file")
        }
        Ok(_) if !force => refused(format!("`{}` is there already", path.display()), FORCE),
        _ => Ok(()),
    }
}

/// Refuses to write into a checkpoint.
pub fn outside_checkpoint(folder: &Path) -> Outcome {
    if !folder.join(".metadata").is_file() {
        return Ok(());
    }
    let message = format!("`{}` is a checkpoint, which nothing is written into", folder.display());
    refused(message, "name a place outside of it")
}

const FORCE: &str = "name another place, or replace it with `--force`";

fn refused(message: String, help: &str) -> Outcome {
    Err(Failure::new("PL0791", message).help(help))
}
