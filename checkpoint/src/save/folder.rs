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
//! ckpt/.step-40.1f3a09c2.tmp.tmp   a checkpoint that is replaced or removed, and may still go back
//! ckpt/.step-40..1f3a09c2.gone     one that does not
//! ```
//!
//! Ranks need no connection but this file system. Rank 0 waits for the others, writes the index, renames
//! the folder, and only then points `latest` to it and removes older checkpoints. Whatever ends a run at
//! whatever point, the newest step that is there is complete, and is the one to go on from ([`newest`]).
//!
//! Rank 0 holds the [`FolderLock`] and asks it before each change. It may lose the lock between the question and
//! the change, if it stood still for long. So nothing is removed under the name at which another run may look for it:
//! what goes is renamed, and goes back if the lock is lost by then.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ir::random::stream_key;

use super::disk;
use super::lock::FolderLock;
use crate::error::CheckpointError;
use crate::map::{folder_of, open_regular};

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

/// The checkpoint to go on from in a folder: the newest step, which `latest` does not name yet if a process ended
/// before it could say so. Steps of a history that was given up go before `latest` moves. Where `latest` ends with a
/// newline, somebody chose it, and newer steps do not count.
///
/// # Errors
/// If the folder cannot be read.
pub fn newest(root: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let steps = checkpoints(root)?;
    let mut latest = String::new();
    // No name is longer. What cannot be read is no choice.
    let _ = open_regular(&root.join(LATEST)).map(|it| it.take(256).read_to_string(&mut latest));
    let chosen = latest.strip_suffix('\n').and_then(|it| step_of(it.trim_end()));
    match chosen.filter(|it| steps.contains(it)).or(steps.last().copied()) {
        Some(step) => Ok(Some(root.join(step_name(step)))),
        // That it names nothing is an error for who opens it.
        None if root.join(LATEST).exists() => Ok(Some(root.to_path_buf())),
        None => Ok(None),
    }
}

/// Makes a folder of checkpoints, if need be, and finds out whether a rank can save into it.
///
/// # Errors
/// If it cannot: what cannot be is better known before the first step than after the last.
pub fn probe(root: &Path, run: &str, rank: u64) -> Result<(), CheckpointError> {
    disk::create_folder(root).map_err(|it| CheckpointError::io("create", root, &it))?;
    let path = root.join(LATEST);
    if fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir()) {
        let (what, why) = ("write", "it is a folder".to_string());
        return Err(CheckpointError::Io { what, path, why });
    }
    // By its name it is a leftover, should the process end here.
    let path = root.join(format!(".step-probe.{run}.{rank}.tmp"));
    disk::create_new(&path).map_err(|it| CheckpointError::io("write", &path, &it))?;
    remove(&path)
}

/// Removes what saves that came to nothing left behind, of this run and of others, but not the folder `except`. A
/// checkpoint that was about to be replaced or removed goes back if there is no other of its step. `latest` names the
/// newest, also if a process ended before it could say so.
///
/// # Errors
/// If the lock is lost, or the system refuses.
pub fn remove_leftovers(lock: &FolderLock, except: Option<&Path>) -> Result<(), CheckpointError> {
    let root = lock.root();
    for name in names(root)? {
        let path = root.join(&name);
        if !name.starts_with(".step-") || except == Some(&path) {
            continue;
        }
        let step = name[1..].split('.').next().unwrap_or_default();
        let target = root.join(step);
        if name.ends_with(".gone") {
            lock.check()?;
            remove(&path)?;
        } else if name.ends_with(ASIDE)
            && step_of(step).is_some()
            && path.join(METADATA).exists()
            && !target.exists()
        {
            lock.check()?;
            match disk::rename(&path, &target) {
                // A run that was taken for dead has removed it.
                Err(it) if it.kind() != ErrorKind::NotFound => {
                    return Err(CheckpointError::io("rename", &path, &it));
                }
                _ => (),
            }
        } else if name.ends_with(".tmp") {
            discard(lock, &path)?;
        }
    }
    match (newest(root)?, checkpoints(root)?.last()) {
        // Else somebody chose an older one.
        (Some(path), Some(&step)) if path == root.join(step_name(step)) => {
            let name = step_name(step);
            let is_named =
                fs::read_to_string(root.join(LATEST)).is_ok_and(|it| it.trim_end() == name);
            if is_named { Ok(()) } else { point_latest(lock, &name) }
        }
        _ => Ok(()),
    }
}

/// Replaces the content of `latest`.
fn point_latest(lock: &FolderLock, content: &str) -> Result<(), CheckpointError> {
    let root = lock.root();
    let part = root.join(format!(".step-{LATEST}.{}.tmp", lock.run()));
    fill(&part, content.as_bytes())?;
    lock.check()?;
    rename(&part, &root.join(LATEST))?;
    sync_folder(root)
}

/// Renames what goes, so that nobody takes it for what it was, and removes it.
fn discard(lock: &FolderLock, path: &Path) -> Result<(), CheckpointError> {
    let name = path.file_name().expect("it is in a folder").to_string_lossy();
    let name = format!(".{}.{}.gone", name.trim_start_matches('.'), lock.run());
    let gone = lock.root().join(name);
    lock.check()?;
    match disk::rename(path, &gone) {
        // A run that was taken for dead has made it a checkpoint, or removed it.
        Err(it) if it.kind() == ErrorKind::NotFound => Ok(()),
        Err(it) => Err(CheckpointError::io("rename", path, &it)),
        Ok(()) => remove(&gone),
    }
}

/// The end of the name of a checkpoint that is aside, and may go back.
const ASIDE: &str = ".tmp.tmp";

/// The checkpoints that stay when there is a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// The number of the newest checkpoints, the new one included.
    pub newest: u64,
    /// The step of another checkpoint that stays.
    pub good: Option<u64>,
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
        disk::create_folder(&path).map_err(|it| CheckpointError::io("create", &path, &it))
    }

    /// Removes what other saves left behind; see [`remove_leftovers`].
    pub fn remove_leftovers(&self, lock: &FolderLock) -> Result<(), CheckpointError> {
        remove_leftovers(lock, Some(&self.temporary()))
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

    /// Makes what all have written a checkpoint: index, rename, `latest`. Then the checkpoints of the steps
    /// `abandoned` go, and all that `keep` does not name. Returns what could not be removed.
    ///
    /// # Errors
    /// If there is no checkpoint for it, or the lock is lost.
    pub fn commit(
        &self,
        lock: &FolderLock,
        metadata: &[u8],
        keep: Option<Keep>,
        abandoned: &[u64],
    ) -> Result<Vec<CheckpointError>, CheckpointError> {
        let (from, to) = (self.temporary(), self.target());
        let mut left = Vec::new();
        write_synced(&from.join(METADATA), metadata)?;
        lock.check()?;
        if to.exists() {
            if !to.join(METADATA).exists() {
                let (what, why) = ("replace", "it is no checkpoint".to_string());
                return Err(CheckpointError::Io { what, path: to, why });
            }
            // What was saved before is there until what replaces it is.
            let old = self.exchange(lock)?;
            sync_folder(&self.root)?;
            note(&mut left, discard(lock, &old))?;
        } else {
            rename(&from, &to)?;
        }
        sync_folder(&self.root)?;
        // Before `latest` moves: until then, the newest step is what a run goes on from.
        note(&mut left, self.remove_steps(lock, abandoned))?;
        let this = step_of(&self.name);
        // An import of an older step, or one that could not be removed.
        let is_newest = checkpoints(&self.root)?.last().copied() <= this;
        let latest = if is_newest { self.name.clone() } else { format!("{}\n", self.name) };
        point_latest(lock, &latest)?;
        if let Some(keep) = keep {
            note(&mut left, self.remove_older(lock, keep))?;
        }
        Ok(left)
    }

    /// Puts the folder where a checkpoint is, and says where that one is now.
    fn exchange(&self, lock: &FolderLock) -> Result<PathBuf, CheckpointError> {
        let (from, to) = (self.temporary(), self.target());
        if disk::exchange(&from, &to).is_ok() {
            return Ok(from);
        }
        // NFS cannot: the checkpoint is aside for a moment.
        let aside = self.aside(&self.name);
        self.put_aside(lock, &to, &aside)?;
        rename(&from, &to).inspect_err(|_| _ = rename(&aside, &to))?;
        Ok(aside)
    }

    /// The path of a checkpoint that is put aside and may go back.
    fn aside(&self, name: &str) -> PathBuf {
        self.root.join(format!(".{name}.{}{ASIDE}", self.run))
    }

    /// Renames a checkpoint, unless another run has got the lock and it may be of that.
    fn put_aside(
        &self,
        lock: &FolderLock,
        path: &Path,
        aside: &Path,
    ) -> Result<(), CheckpointError> {
        lock.check()?;
        rename(path, aside)?;
        lock.check().inspect_err(|_| _ = rename(aside, path))
    }

    /// Removes what was written so far.
    pub fn abandon(&self) {
        // If even that fails, the next run removes it.
        let _ = disk::remove(&self.temporary());
    }

    /// Removes all checkpoints but those to keep, of which this one is.
    fn remove_older(&self, lock: &FolderLock, keep: Keep) -> Result<(), CheckpointError> {
        let this = step_of(&self.name).expect("it is the name of a step");
        let mut steps = checkpoints(&self.root)?;
        steps.retain(|&it| it < this);
        steps.truncate((steps.len() + 1).saturating_sub(keep.newest.max(1) as usize));
        steps.retain(|&it| Some(it) != keep.good);
        self.remove_steps(lock, &steps)
    }

    /// Removes the checkpoints of other steps.
    fn remove_steps(&self, lock: &FolderLock, steps: &[u64]) -> Result<(), CheckpointError> {
        for name in steps.iter().map(|&it| step_name(it)).filter(|it| *it != self.name) {
            let (old, aside) = (self.root.join(&name), self.aside(&name));
            if old.join(METADATA).exists() {
                self.put_aside(lock, &old, &aside)?;
                discard(lock, &aside)?;
            }
        }
        Ok(())
    }
}

/// Keeps what could not be removed, which is no reason to stop. That the lock is lost is one.
fn note(
    left: &mut Vec<CheckpointError>,
    done: Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    match done {
        Err(it @ CheckpointError::LockLost { .. }) => return Err(it),
        it => left.extend(it.err()),
    }
    Ok(())
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

/// Writes a file that has its final content or is not there, on disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut part = path.as_os_str().to_owned();
    part.push(".tmp");
    let part = PathBuf::from(part);
    fill(&part, bytes)?;
    let folder = folder_of(path);
    let fail = |it: io::Error| CheckpointError::io("write", folder, &it);
    // Opened before: once the last file of a checkpoint has its name, another process may rename the folder.
    let opened = File::open(folder).map_err(fail)?;
    rename(&part, path).inspect_err(|_| _ = remove(&part))?;
    disk::sync(&opened).map_err(fail)
}

/// Writes a new file, on disk.
fn fill(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    // A link of that name may lead anywhere.
    remove(path)?;
    let written = disk::create_new(path).and_then(|mut it| disk::fill(&mut it, bytes));
    written.map_err(|it| {
        let _ = disk::remove(path);
        CheckpointError::io("write", path, &it)
    })
}

/// Puts the name of a file or a folder on disk.
pub(crate) fn sync_folder_of(path: &Path) -> Result<(), CheckpointError> {
    sync_folder(folder_of(path))
}

pub(crate) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    let synced = File::open(path).and_then(|it| disk::sync(&it));
    synced.map_err(|it| CheckpointError::io("write", path, &it))
}

fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    disk::rename(from, to).map_err(|it| CheckpointError::io("rename", from, &it))
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let fail = |it: io::Error| CheckpointError::io("read", folder, &it);
    let entries = fs::read_dir(folder).map_err(fail)?;
    let names = entries.map(|it| Ok(it.map_err(fail)?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

/// Removes a folder with all that is in it, a file, or a link.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    disk::remove(path).map_err(|it| CheckpointError::io("remove", path, &it))
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
        let lock = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
        let new = StepFolder::new(&root, 11, "c0ffee00");
        new.create().unwrap();
        new.remove_leftovers(&lock).unwrap();
        assert_eq!(new.commit(&lock, b"", Some(Keep { newest: 2, good: None }), &[]), Ok(vec![]));
        drop(lock);
        assert_eq!(listed(&root), ["latest", "step-03", "step-10", "step-11", "step-4"]);
    }

    /// Something is where the old checkpoint goes before it is removed.
    #[test]
    fn a_checkpoint_is_saved_though_an_older_one_stays() {
        let root = folder("stays");
        let lock = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
        let save = |step: u64| {
            let new = StepFolder::new(&root, step, "c0ffee00");
            new.create().unwrap();
            new.commit(&lock, b"", Some(Keep { newest: 1, good: None }), &[])
        };
        assert_eq!(save(1), Ok(vec![]));
        fs::create_dir_all(root.join(".step-1.c0ffee00.tmp.tmp/in the way")).unwrap();
        let left = save(2).unwrap();
        assert_eq!(left.len(), 1);
        assert!(left[0].to_string().starts_with("cannot rename `"), "{}", left[0]);
        assert_eq!(fs::read_to_string(root.join(LATEST)).unwrap(), "step-2");
    }

    /// What a process leaves that ended between the rename and `latest`, and what a folder says that has none.
    #[test]
    fn the_newest_step_counts_and_not_what_latest_says() {
        let root = folder("newest");
        assert_eq!(newest(&root), Ok(None));
        fs::write(root.join(LATEST), "step-1").unwrap();
        assert_eq!(newest(&root), Ok(Some(root.clone())));
        for name in ["step-1", "step-2"] {
            fs::create_dir(root.join(name)).unwrap();
            fs::write(root.join(name).join(METADATA), "").unwrap();
        }
        assert_eq!(newest(&root), Ok(Some(root.join("step-2"))));
        // Chosen by hand, and by whoever saves an older step beside newer ones.
        fs::write(root.join(LATEST), "step-1\n").unwrap();
        assert_eq!(newest(&root), Ok(Some(root.join("step-1"))));
        let lock = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
        let older = StepFolder::new(&root, 0, "c0ffee00");
        older.create().unwrap();
        assert_eq!(older.commit(&lock, b"", None, &[]), Ok(vec![]));
        assert_eq!(newest(&root), Ok(Some(root.join("step-0"))));
        fs::write(root.join(LATEST), "step-7\n").unwrap();
        assert_eq!(newest(&root), Ok(Some(root.join("step-2"))));
        // Whoever has the lock corrects what nobody chose.
        let latest = |before: &str| {
            fs::write(root.join(LATEST), before).unwrap();
            remove_leftovers(&lock, None).unwrap();
            fs::read_to_string(root.join(LATEST)).unwrap()
        };
        for (before, after) in
            [("step-1", "step-2"), ("step-7\n", "step-2"), ("step-1\n", "step-1\n")]
        {
            assert_eq!(latest(before), after);
        }
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
        fs::create_dir(root.join("latest")).unwrap();
        let error = probe(&root, "c0ffee00", 0).unwrap_err().to_string();
        assert!(error.contains("probe/latest`: it is a folder"), "{error}");
        fs::write(root.join("file"), "").unwrap();
        assert!(probe(&root.join("file"), "c0ffee00", 0).is_err());
    }
}
