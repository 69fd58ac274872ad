//! Where a checkpoint is written, and how it comes to be there as a whole or not at all.
//!
//! ```text
//! ckpt/.step-50.1f3a09c2.tmp/   what is being written, by the run 1f3a09c2
//!        __3_0.distcp           the file of rank 3
//!        __3_0.distcp.sums      there when that file is complete and on disk
//!        __3.failed             why it will not be
//!        .metadata              there when all files are
//! ckpt/step-50/                 the same folder, renamed
//! ckpt/latest                   `step-50`
//! ```
//!
//! Ranks need no connection but this file system. Rank 0 waits for the others, writes the index, renames
//! the folder, and only then points `latest` to it and removes older checkpoints. Whatever ends a run at
//! whatever point, `latest` names a complete checkpoint.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ir::random::stream_key;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::error::CheckpointError;

/// The index of a checkpoint.
pub const METADATA: &str = ".metadata";
/// The file that names the newest checkpoint of a run.
pub const LATEST: &str = "latest";

/// A name for a run that no other run has.
pub fn run_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_nanos());
    format!("{:08x}", stream_key(&format!("{now} {}", std::process::id())) as u32)
}

/// One checkpoint on its way into a folder.
#[derive(Debug, Clone)]
pub struct StepFolder {
    root: PathBuf,
    name: String,
    run: String,
}

/// What has become of a checkpoint that others write, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Ranks that are not done yet, at least one.
    Waiting(Vec<u64>),
    /// All have written what they hold.
    Complete,
    /// A rank has not, and says why.
    Failed {
        /// Which.
        rank: u64,
        /// Its error.
        why: String,
    },
}

/// The file of a rank.
pub fn file_name(rank: u64) -> String {
    format!("__{rank}_0.distcp")
}

/// `step-50`.
pub fn step_name(step: u64) -> String {
    format!("step-{step}")
}

/// The step of a folder's name.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    // `step-007` is nothing that planc made.
    (step_name(step) == name).then_some(step)
}

/// The steps of the checkpoints in a folder, ascending; none if there is no folder.
///
/// # Errors
/// If it cannot be read.
pub fn checkpoints(root: &Path) -> Result<Vec<u64>, CheckpointError> {
    if !root.exists() {
        return Ok(Vec::new());
    }
    let steps = names(root)?.into_iter().filter_map(|it| step_of(&it));
    let mut res: Vec<u64> =
        steps.filter(|&it| root.join(step_name(it)).join(METADATA).exists()).collect();
    res.sort_unstable();
    Ok(res)
}

/// What to go on from in a folder: itself if `latest` names a checkpoint, or the newest where a process
/// ended before it could say so.
///
/// # Errors
/// If it cannot be read.
pub fn newest(root: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    if root.join(LATEST).exists() {
        return Ok(Some(root.to_path_buf()));
    }
    Ok(checkpoints(root)?.last().map(|&it| root.join(step_name(it))))
}

/// Makes a folder of checkpoints, if need be, and finds out whether a rank can save into it.
///
/// # Errors
/// If it cannot: what cannot be is better known before the first step than after the last.
pub fn probe(root: &Path, run: &str, rank: u64) -> Result<(), CheckpointError> {
    fs::create_dir_all(root).map_err(|it| CheckpointError::io("create", root, &it))?;
    for name in [LATEST.to_string(), format!("{LATEST}.tmp")] {
        let path = root.join(name);
        if fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir()) {
            let (what, why) = ("write", "it is a folder".to_string());
            return Err(CheckpointError::Io { what, path, why });
        }
    }
    // By its name it is a leftover, should the process end here.
    let path = root.join(format!(".step-probe.{run}.{rank}.tmp"));
    let fail = |it: std::io::Error| CheckpointError::io("write", &path, &it);
    File::options().write(true).create_new(true).open(&path).map_err(fail)?;
    remove(&path)
}

impl StepFolder {
    /// The checkpoint of a step in `root`, written by the run `run`.
    pub fn new(root: &Path, step: u64, run: &str) -> StepFolder {
        StepFolder { root: root.to_path_buf(), name: step_name(step), run: run.to_string() }
    }

    /// Where it is written.
    pub fn temporary(&self) -> PathBuf {
        self.root.join(format!(".{}.{}.tmp", self.name, self.run))
    }

    /// Where it will be.
    pub fn target(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    /// What tells this save from all others; in the index, and beside each file.
    pub fn save_id(&self) -> String {
        format!("{}.{}", self.name, self.run)
    }

    /// Makes the folder, which other ranks may have done.
    pub fn create(&self) -> Result<(), CheckpointError> {
        let path = self.temporary();
        fs::create_dir_all(&path).map_err(|it| CheckpointError::io("create", &path, &it))
    }

    /// Removes what saves that came to nothing left behind, of this run and of others; but a checkpoint that
    /// was aside when its process ended goes back.
    pub fn remove_leftovers(&self) -> Result<(), CheckpointError> {
        for name in names(&self.root)? {
            let path = self.root.join(&name);
            let Some(inner) = name.strip_prefix('.').and_then(|it| it.strip_suffix(".tmp")) else {
                continue;
            };
            let step = inner.split('.').next().unwrap_or_default();
            let target = self.root.join(step);
            if inner.ends_with(".tmp") && step_of(step).is_some() && !target.exists() {
                fs::rename(&path, &target)
                    .map_err(|it| CheckpointError::io("rename", &path, &it))?;
            } else if inner.starts_with("step-") && path != self.temporary() {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Says that this rank's part will not come.
    pub fn fail(&self, rank: u64, why: &str) {
        let (path, part) = (self.failure(rank), self.temporary().join(format!(".{rank}.tmp")));
        // Where nothing can be written, the others stop waiting by the clock.
        let _ = fs::write(&part, why).and_then(|()| fs::rename(&part, path));
    }

    fn failure(&self, rank: u64) -> PathBuf {
        self.temporary().join(format!("__{rank}.failed"))
    }

    /// How far `n_ranks` ranks have come.
    pub fn progress(&self, n_ranks: u64) -> Result<Progress, CheckpointError> {
        let there: BTreeSet<String> = names(&self.temporary())?.into_iter().collect();
        if let Some(rank) = (0..n_ranks).find(|it| there.contains(&format!("__{it}.failed"))) {
            let why = fs::read_to_string(self.failure(rank)).unwrap_or_default();
            return Ok(Progress::Failed { rank, why });
        }
        let missing = |rank: &u64| !there.contains(&format!("{}.sums", file_name(*rank)));
        let missing: Vec<u64> = (0..n_ranks).filter(missing).collect();
        Ok(if missing.is_empty() { Progress::Complete } else { Progress::Waiting(missing) })
    }

    /// Whether rank 0 has made it a checkpoint; `None` while it may still do so.
    pub fn outcome(&self, n_ranks: u64) -> Option<Result<(), Progress>> {
        if self.target().join(METADATA).exists() && !self.temporary().exists() {
            return Some(Ok(()));
        }
        match self.progress(n_ranks) {
            Ok(it @ Progress::Failed { .. }) => Some(Err(it)),
            Ok(_) => None,
            // It may just have been renamed.
            Err(_) if self.target().join(METADATA).exists() => Some(Ok(())),
            Err(_) => {
                let why = "rank 0 has given it up, and says why".to_string();
                Some(Err(Progress::Failed { rank: 0, why }))
            }
        }
    }

    /// Makes what all have written a checkpoint: index, rename, `latest`; then removes all but the newest
    /// `keep`.
    pub fn commit(&self, metadata: &[u8], keep: Option<u64>) -> Result<(), CheckpointError> {
        let (from, to) = (self.temporary(), self.target());
        write_synced(&from.join(METADATA), metadata)?;
        if to.exists() {
            if !to.join(METADATA).exists() {
                let (what, why) = ("replace", "it is no checkpoint".to_string());
                return Err(CheckpointError::Io { what, path: to, why });
            }
            // What was saved before is there until what replaces it is.
            exchange(&from, &to)?;
            sync_folder(&self.root)?;
            remove(&from)?;
        } else {
            fs::rename(&from, &to).map_err(|it| CheckpointError::io("rename", &from, &it))?;
        }
        sync_folder(&self.root)?;
        write_synced(&self.root.join(LATEST), self.name.as_bytes())?;
        match keep {
            Some(keep) => self.remove_older(keep.max(1)),
            None => Ok(()),
        }
    }

    /// Removes what was written so far.
    pub fn abandon(&self) {
        // If even that fails, the next run's first save removes it.
        let _ = fs::remove_dir_all(self.temporary());
    }

    /// Removes all checkpoints but the newest `keep`, of which this one is.
    fn remove_older(&self, keep: u64) -> Result<(), CheckpointError> {
        let this = step_of(&self.name).expect("it is the name of a step");
        let mut steps = checkpoints(&self.root)?;
        steps.retain(|&it| it < this);
        steps.truncate((steps.len() + 1).saturating_sub(keep as usize));
        self.remove_steps(&steps)
    }

    /// Removes the checkpoints of other steps.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remove_steps(&self, steps: &[u64]) -> Result<(), CheckpointError> {
        for name in steps.iter().map(|&it| step_name(it)).filter(|it| *it != self.name) {
            let old = self.root.join(&name);
            if old.join(METADATA).exists() {
                // Under a name that says that it is incomplete.
                let away = self.root.join(format!(".{name}.{}.tmp", self.run));
                fs::rename(&old, &away).map_err(|it| CheckpointError::io("rename", &old, &it))?;
                remove(&away)?;
            }
        }
        Ok(())
    }
}

/// Waits until all ranks have written their parts, `limit` at most without any new one. `ended` gives a
/// reason to stop earlier.
pub fn wait_for_ranks(
    folder: &StepFolder,
    n_ranks: u64,
    limit: Duration,
    ended: &dyn Fn() -> Option<String>,
) -> Result<(), Progress> {
    let (mut last, mut since) = (u64::MAX, Instant::now());
    let mut pause = Duration::from_millis(1);
    loop {
        let failed = |why: String| Progress::Failed { rank: 0, why };
        let waiting = match folder.progress(n_ranks).map_err(|it| failed(it.to_string()))? {
            Progress::Complete => return Ok(()),
            Progress::Waiting(it) => it,
            it @ Progress::Failed { .. } => return Err(it),
        };
        if let Some(why) = ended() {
            return Err(failed(why));
        }
        if (waiting.len() as u64) < last {
            (last, since) = (waiting.len() as u64, Instant::now());
        }
        if since.elapsed() > limit {
            return Err(Progress::Waiting(waiting));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

/// As [`wait_for_ranks`], for ranks that wait for rank 0, which itself waits for others.
pub fn wait_for_commit(
    folder: &StepFolder,
    n_ranks: u64,
    limit: Duration,
    ended: &dyn Fn() -> Option<String>,
) -> Result<(), Progress> {
    let (mut last, mut since) = (usize::MAX, Instant::now());
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(it) = folder.outcome(n_ranks) {
            return it;
        }
        let waiting = match folder.progress(n_ranks) {
            Ok(Progress::Waiting(it)) => it.len(),
            _ => 0,
        };
        if waiting < last {
            (last, since) = (waiting, Instant::now());
        }
        if let Some(why) = ended() {
            return Err(Progress::Failed { rank: 0, why });
        }
        if since.elapsed() > limit {
            return Err(Progress::Waiting(vec![0]));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

/// A file with its final content or not at all, on disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut part = path.as_os_str().to_owned();
    part.push(".tmp");
    let part = PathBuf::from(part);
    let fail = |it: std::io::Error| CheckpointError::io("write", path, &it);
    // A link of that name may lead anywhere.
    remove(&part)?;
    let mut file = File::options().write(true).create_new(true).open(&part).map_err(fail)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(fail)?;
    fs::rename(&part, path).map_err(fail)?;
    sync_folder(path.parent().expect("a file is in a folder"))
}

fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    let synced = File::open(path).and_then(|it| it.sync_all());
    synced.map_err(|it| CheckpointError::io("write", path, &it))
}

/// Swaps two folders in one step, where the file system can. Else (NFS) `b` is aside for a moment, under a name that
/// [`StepFolder::remove_leftovers`] knows.
fn exchange(a: &Path, b: &Path) -> Result<(), CheckpointError> {
    if renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).is_ok() {
        return Ok(());
    }
    let mut aside = a.as_os_str().to_owned();
    aside.push(".tmp");
    let aside = PathBuf::from(aside);
    let rename = |from: &Path, to: &Path| {
        fs::rename(from, to).map_err(|it| CheckpointError::io("rename", from, &it))
    };
    rename(b, &aside)?;
    rename(a, b).inspect_err(|_| _ = rename(&aside, b))?;
    rename(&aside, a)
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let fail = |it: std::io::Error| CheckpointError::io("read", folder, &it);
    let entries = fs::read_dir(folder).map_err(fail)?;
    let names = entries.map(|it| Ok(it.map_err(fail)?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

/// Removes a folder with all that is in it, a file, or a link.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    let is_folder = fs::symlink_metadata(path).is_ok_and(|it| it.is_dir());
    match if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) } {
        Err(it) if it.kind() != ErrorKind::NotFound => {
            Err(CheckpointError::io("remove", path, &it))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(test: &str) -> PathBuf {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/save_folder").join(test);
        _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).expect("a folder");
        root
    }

    fn listed(root: &Path) -> Vec<String> {
        let mut res = names(root).expect("it is there");
        res.sort();
        res
    }

    /// What has no index, or a name that planc does not give, neither counts nor goes.
    #[test]
    fn only_checkpoints_count_as_kept() {
        let root = folder("keep");
        for name in ["step-1", "step-2", "step-03", "step-10"] {
            fs::create_dir(root.join(name)).unwrap();
            fs::write(root.join(name).join(METADATA), "").unwrap();
        }
        fs::create_dir(root.join("step-4")).unwrap();
        fs::write(root.join(".step-5.0badcafe.tmp"), "a file").unwrap();
        assert_eq!(checkpoints(&root).unwrap(), [1, 2, 10]);
        let new = StepFolder::new(&root, 11, "c0ffee00");
        new.create().unwrap();
        new.remove_leftovers().unwrap();
        new.commit(b"", Some(2)).unwrap();
        assert_eq!(listed(&root), ["latest", "step-03", "step-10", "step-11", "step-4"]);
    }

    #[test]
    fn a_link_is_not_followed() {
        let root = folder("link");
        fs::write(root.join("other"), "as it was").unwrap();
        std::os::unix::fs::symlink("other", root.join("latest.tmp")).unwrap();
        write_synced(&root.join(LATEST), b"step-1").unwrap();
        assert_eq!(fs::read_to_string(root.join("other")).unwrap(), "as it was");
        assert_eq!(fs::read_to_string(root.join(LATEST)).unwrap(), "step-1");
        assert_eq!(listed(&root), ["latest", "other"]);
    }

    #[test]
    fn what_cannot_be_saved_into_is_known_before() {
        let root = folder("probe");
        probe(&root, "c0ffee00", 0).unwrap();
        assert!(listed(&root).is_empty());
        fs::create_dir(root.join("latest.tmp")).unwrap();
        let error = probe(&root, "c0ffee00", 0).unwrap_err().to_string();
        assert!(error.contains("probe/latest.tmp`: it is a folder"), "{error}");
        fs::write(root.join("file"), "").unwrap();
        assert!(probe(&root.join("file"), "c0ffee00", 0).is_err());
    }
}
