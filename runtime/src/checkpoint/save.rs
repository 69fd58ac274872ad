//! Saving a session.
//!
//! ```text
//! at once            every rank writes its file from its buffers; then all go on
//! in the background  every rank copies what it writes, and goes on; threads write the copies
//! ```
//!
//! Ranks of other processes are heard of through the file system only: see [`checkpoint::save::folder`].

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle, scope};
use std::time::{Duration, Instant};

use checkpoint::metadata::Metadata;
use checkpoint::save::folder::{probe, wait_for_commit, wait_for_ranks};
use checkpoint::save::{
    Content, FileItem, FolderLock, Keep, Position, Progress, ShardFile, StepFolder, file_items,
    metadata, run_id,
};
use checkpoint::{CheckpointError, StoredType};
use ir::checkpoint::{CheckpointLayout, Source};

use super::boxes::read_box;
use crate::comm::control::{Fault, lock};
use crate::error::RunError;
use crate::session::{Rank, Session};

/// When and where to save.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Where checkpoints go, each into a folder of its own.
    pub folder: PathBuf,
    /// Save after every so many steps; the last is saved in any case.
    pub every: Option<u64>,
    /// Keep this many checkpoints; all, if not given.
    pub keep: Option<u64>,
    /// Whether training goes on while files are written.
    pub background: bool,
    /// What happens when the one before is still being written.
    pub busy: Busy,
    /// What happens when a checkpoint cannot be written.
    pub on_failure: OnFailure,
    /// Whether checkpoints of another run that are there may go once there is a new one.
    pub overwrite: bool,
}

/// What a save does that meets the one before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Busy {
    /// It waits for it.
    #[default]
    Wait,
    /// It is left out. The last never is.
    Skip,
}

/// What a save that failed does to training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// It ends.
    #[default]
    Stop,
    /// It goes on, with a warning. After the last there is nothing to go on with.
    Continue,
}

/// A checkpoint that was saved.
#[derive(Debug, Clone, PartialEq)]
pub struct SaveReport {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes that ranks of this process wrote.
    pub bytes: u64,
    /// How long training waited.
    pub waited: Duration,
    /// How long it took.
    pub seconds: f64,
    /// Older checkpoints that were to go, and could not be removed.
    pub left: Vec<CheckpointError>,
}

/// What a save came to.
#[derive(Debug)]
pub(crate) enum Saved {
    /// A checkpoint.
    Done(SaveReport),
    /// One that could not be written, where training is to go on.
    Failed(RunError),
    /// None, since another is being written.
    Skipped(u64),
}

/// Saves checkpoints of one session.
pub(crate) struct Saver {
    options: SaveOptions,
    work: Work,
    pending: Option<JoinHandle<Written>>,
    /// The step of the checkpoint that was saved last, or that training goes on from.
    newest: Option<u64>,
    /// The step of the newest checkpoint that a finite step followed, which shows that its weights are finite.
    good: Option<u64>,
    /// Memory of copies that were written, to be used again.
    spare: Vec<Vec<u8>>,
    /// Whether the save that is under way, or was, is the last.
    is_last: bool,
}

/// What the thread that writes copies ends with: what has come of them, and their memory.
type Written = (Result<SaveReport, RunError>, Vec<Vec<u8>>);

/// What writing needs to know, besides what is written.
#[derive(Clone)]
struct Work {
    layout: Arc<CheckpointLayout>,
    folder: PathBuf,
    /// The lock of the folder, in the process of rank 0.
    lock: Option<Arc<FolderLock>>,
    keep: Option<Keep>,
    /// Steps of an abandoned history, which go once there is a new checkpoint.
    abandoned: Arc<Mutex<Vec<u64>>>,
    /// Tells this run from others that wrote into the folder.
    run: String,
    /// The ranks of this process.
    here: Arc<[u64]>,
    n_ranks: u64,
    fault: Arc<Fault>,
    /// How long ranks of other processes may take.
    limit: Duration,
}

/// How long ranks of other processes may take to write their part, from the last that did.
const LIMIT: Duration = Duration::from_secs(1800);

/// Where the parts of a copy lie.
struct Copied {
    items: Vec<FileItem>,
    bytes: Vec<u8>,
}

impl Saver {
    /// `run` is the same on all ranks, and differs between runs. The process of rank 0 has the lock of the folder.
    pub(crate) fn new(
        session: &Session,
        layout: Arc<CheckpointLayout>,
        (run, lock): (String, Option<FolderLock>),
        options: &SaveOptions,
        timeout: Option<Duration>,
    ) -> Result<Saver, RunError> {
        probe(&options.folder, &run, session.ranks_here()[0])?;
        let work = Work {
            folder: options.folder.clone(),
            lock: lock.map(Arc::new),
            keep: None,
            abandoned: Arc::default(),
            run,
            here: session.ranks_here().into(),
            n_ranks: layout.mesh.n_ranks(),
            layout,
            fault: session.fault(),
            limit: timeout.unwrap_or(LIMIT),
        };
        Ok(Saver {
            options: options.clone(),
            work,
            pending: None,
            newest: None,
            good: None,
            spare: Vec::new(),
            is_last: false,
        })
    }

    /// The checkpoints of these steps go once there is a new one.
    pub(crate) fn abandon(&mut self, steps: Vec<u64>) {
        self.work.abandoned = Arc::new(Mutex::new(steps));
    }

    /// The checkpoint that training goes on from.
    pub(crate) fn went_on_from(&mut self, step: u64) {
        self.newest = Some(step);
    }

    /// Notes that another step was done, whose loss and gradients were finite or not.
    pub(crate) fn followed_by(&mut self, finite: bool) {
        if finite {
            self.good = self.newest;
        }
    }

    /// Where the checkpoint of a step will be.
    pub(crate) fn target(&self, step: u64) -> PathBuf {
        StepFolder::new(&self.work.folder, step, &self.work.run).target()
    }

    /// Whether to save after this step.
    pub(crate) fn is_due(&self, step: u64, last: u64) -> bool {
        step == last || self.options.every.is_some_and(|it| step.is_multiple_of(it.max(1)))
    }

    /// Saves the state after a step, or has it saved. Calls `told` with what has come of it, and of those
    /// before it.
    pub(crate) fn save(
        &mut self,
        session: &Session,
        position: Position,
        is_last: bool,
        told: &mut dyn FnMut(Saved),
    ) -> Result<(), RunError> {
        if self.options.busy == Busy::Skip && !is_last && self.is_busy(session)? {
            told(Saved::Skipped(position.step));
            return Ok(());
        }
        let began = Instant::now();
        self.finish(told)?;
        self.is_last = is_last;
        // While steps are not finite, an older checkpoint may be the last that is of use.
        let newest = self.options.keep.filter(|_| position.finite);
        self.work.keep = newest.map(|newest| Keep { newest, good: self.good });
        self.newest = Some(position.step);
        let folder = StepFolder::new(&self.work.folder, position.step, &self.work.run);
        let started = self.work.start(&folder);
        if let Err(error) = started {
            let failed = self.work.conclude(&folder, &position, Err((self.work.here[0], error)));
            return self.tell(failed.map(|_| unreachable!("it failed")), told);
        }
        if !self.options.background {
            let written = self.work.write_at_once(session, &folder, position)?;
            let bytes = written.as_ref().map_or(0, |it| *it);
            let done = self.work.conclude(&folder, &position, written.map(|_| ()));
            let (path, waited) = (folder.target(), began.elapsed());
            let seconds = waited.as_secs_f64();
            let report = |left| SaveReport { path, bytes, waited, seconds, left };
            return self.tell(done.map(report), told);
        }
        let copies = self.copy(session, position)?;
        let (work, waited) = (self.work.clone(), began.elapsed());
        let write = move || {
            let bytes =
                copies.iter().filter_map(|it| it.items.last()).map(|it| it.at + it.len).sum();
            let written = work.write_copies(&folder, &copies);
            let done = work.conclude(&folder, &position, written);
            let seconds = began.elapsed().as_secs_f64();
            let report = |left| SaveReport { path: folder.target(), bytes, waited, seconds, left };
            (done.map(report), copies.into_iter().map(|it| it.bytes).collect())
        };
        let thread = Builder::new().name(format!("save {}", position.step)).spawn(write);
        let thread = thread.map_err(|it| RunError::write(&self.work.folder, &it))?;
        self.pending = Some(thread);
        Ok(())
    }

    /// Whether the save before is still under way, as rank 0 sees it: others hear a little later that it is
    /// over, and a file that some leave out would be waited for.
    fn is_busy(&self, session: &Session) -> Result<bool, RunError> {
        let busy = self.pending.as_ref().is_some_and(|it| !it.is_finished());
        if self.work.is_alone() {
            return Ok(busy);
        }
        let said = session.on_all(move |rank| {
            let first = rank.bound.rank == 0;
            rank.control.broadcast(first.then(|| vec![busy.into()]))
        })?;
        Ok(said[0] == [1])
    }

    /// Waits for what is being written.
    pub(crate) fn finish(&mut self, told: &mut dyn FnMut(Saved)) -> Result<(), RunError> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        let (done, spare) = pending.join().unwrap_or_else(|_| {
            let message = "writing a checkpoint".to_string();
            (Err(RunError::Panic { message }), Vec::new())
        });
        self.spare = spare;
        self.tell(done, told)
    }

    /// As [`Saver::finish`], if that takes no time.
    pub(crate) fn poll(&mut self, told: &mut dyn FnMut(Saved)) -> Result<(), RunError> {
        match self.pending.as_ref().is_some_and(JoinHandle::is_finished) {
            true => self.finish(told),
            false => Ok(()),
        }
    }

    fn tell(
        &self,
        done: Result<SaveReport, RunError>,
        told: &mut dyn FnMut(Saved),
    ) -> Result<(), RunError> {
        match (done, self.options.on_failure) {
            (Ok(report), _) => told(Saved::Done(report)),
            (Err(error), OnFailure::Continue) if !self.is_last && !is_lost(&error) => {
                told(Saved::Failed(error));
            }
            (Err(error), _) => return Err(error),
        }
        Ok(())
    }

    /// Copies what the ranks here write, as it is at this moment.
    fn copy(&mut self, session: &Session, position: Position) -> Result<Vec<Copied>, RunError> {
        let layout = self.work.layout.clone();
        let mut spare: Vec<Vec<u8>> = std::mem::take(&mut self.spare);
        spare.resize_with(self.work.here.len(), Vec::new);
        let first = self.work.here[0];
        let spare: Vec<_> = spare.into_iter().map(Mutex::new).collect();
        session.on_all(move |rank| {
            let items = file_items(&layout, &position, &rank.bound.coord);
            let index = rank.bound.rank.saturating_sub(first) as usize;
            let mut bytes = std::mem::take(&mut *lock(&spare[index]));
            bytes.clear();
            let len: u64 = items.iter().map(|it| data_of(&layout, it).1).sum();
            // No more than that: it is kept for the next save.
            bytes.reserve_exact(len as usize);
            for item in &items {
                rank.read_item(&layout, item, &mut |these| -> Result<(), RunError> {
                    bytes.extend_from_slice(these);
                    Ok(())
                })?;
            }
            Ok(Copied { items, bytes })
        })
    }
}

/// Saves the state of a session at once, with all ranks in this process.
pub fn save(session: &Session, folder: &Path, position: Position) -> Result<SaveReport, RunError> {
    let layout = Arc::new(CheckpointLayout::to_save(session.plan())?);
    let options = SaveOptions { folder: folder.to_path_buf(), ..SaveOptions::default() };
    let run = run_id();
    let lock = FolderLock::acquire(folder, &run, &mut |_| ())?;
    let mut saver = Saver::new(session, layout, (run, Some(lock)), &options, None)?;
    let mut res = None;
    saver.save(session, position, true, &mut |it| res = Some(it))?;
    match res {
        Some(Saved::Done(report)) => Ok(report),
        _ => unreachable!("a failure is an error by default, and nothing else is being written"),
    }
}

impl Drop for Saver {
    /// What is being written is not worth less because training has failed.
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            // Whoever drops it has another error to report.
            let _ = pending.join();
        }
    }
}

impl Work {
    fn is_first(&self) -> bool {
        self.here[0] == 0
    }

    /// Whether all ranks are in this process.
    fn is_alone(&self) -> bool {
        self.here.len() as u64 == self.n_ranks
    }

    fn start(&self, folder: &StepFolder) -> Result<(), CheckpointError> {
        folder.create()?;
        match &self.lock {
            Some(lock) => folder.remove_leftovers(lock),
            None => Ok(()),
        }
    }

    /// Every rank writes its file; the bytes of all here, or the first failure.
    fn write_at_once(
        &self,
        session: &Session,
        folder: &StepFolder,
        position: Position,
    ) -> Result<Result<u64, (u64, CheckpointError)>, RunError> {
        let (layout, folder) = (self.layout.clone(), folder.clone());
        let done = session.on_all(move |rank| {
            let number = rank.bound.rank;
            match rank.write_file(&layout, &position, &folder) {
                Ok(bytes) => Ok(Ok(bytes)),
                // A file that cannot be written is no failure of the rank.
                Err(RunError::Checkpoint(error)) => Ok(Err((number, *error))),
                Err(error) => Err(error),
            }
        })?;
        Ok(done.into_iter().sum())
    }

    fn write_copies(
        &self,
        folder: &StepFolder,
        copies: &[Copied],
    ) -> Result<(), (u64, CheckpointError)> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks: Vec<(u64, &Copied)> = self.here.iter().copied().zip(copies).collect();
        let share = ranks.len().div_ceil(cores);
        scope(|scope| {
            let threads: Vec<_> = ranks
                .chunks(share)
                .map(|ranks| {
                    scope.spawn(move || {
                        ranks.iter().try_for_each(|&(rank, copied)| {
                            write_copy(&self.layout, folder, rank, copied).map_err(|it| (rank, it))
                        })
                    })
                })
                .collect();
            let joined = threads.into_iter().map(|it| it.join().expect("it does not panic"));
            joined.collect()
        })
    }

    /// Makes it a checkpoint, or says why it is none. Returns what could not be removed.
    fn conclude(
        &self,
        folder: &StepFolder,
        position: &Position,
        written: Result<(), (u64, CheckpointError)>,
    ) -> Result<Vec<CheckpointError>, RunError> {
        let failed = |rank: u64, why: String| {
            if self.is_alone() {
                folder.abandon();
            } else {
                folder.fail(rank, &why);
            }
            Err(RunError::NotSaved { path: folder.target(), rank, why })
        };
        let failed_by = |rank: u64, error: CheckpointError| {
            let res = failed(rank, error.to_string());
            // Whoever has lost the folder stops, whatever failed saves are to do.
            if let CheckpointError::LockLost { .. } = error { Err(error.into()) } else { res }
        };
        if let Err((rank, error)) = written {
            return failed_by(rank, error);
        }
        let ended = || self.fault.get().map(|it| it.to_string());
        let waited = match self.is_first() {
            true => wait_for_ranks(folder, self.n_ranks, self.limit, &ended),
            false => wait_for_commit(folder, self.n_ranks, self.limit, &ended),
        };
        match waited {
            Ok(()) if self.is_first() => (),
            Ok(()) => return Ok(Vec::new()),
            Err(Progress::Failed { rank, why }) => return failed(rank, why),
            Err(Progress::Waiting(ranks)) => {
                let why = format!("has written nothing for {} s", self.limit.as_secs());
                return failed(ranks.first().copied().unwrap_or(0), why);
            }
            Err(Progress::Complete) => unreachable!("that is no error"),
        }
        let mut index = Vec::new();
        let made = Metadata { save_id: Some(folder.save_id()), ..metadata(&self.layout, position) }
            .write(&mut index);
        let made = made.map_err(|it| CheckpointError::io("write", &folder.target(), &it));
        let held = self.lock.as_ref().expect("rank 0 has the lock of the folder");
        let abandoned = lock(&self.abandoned).clone();
        let committed = made.and_then(|()| folder.commit(held, &index, self.keep, &abandoned));
        if committed.is_ok() {
            lock(&self.abandoned).clear();
        }
        committed.or_else(|it| failed_by(0, it))
    }
}

/// Returns true if another run has the folder by now.
fn is_lost(error: &RunError) -> bool {
    matches!(error, RunError::Checkpoint(it) if matches!(**it, CheckpointError::LockLost { .. }))
}

fn write_copy(
    layout: &CheckpointLayout,
    folder: &StepFolder,
    rank: u64,
    copied: &Copied,
) -> Result<(), CheckpointError> {
    let mut file = ShardFile::create(folder, rank)?;
    let mut rest = &copied.bytes[..];
    for item in &copied.items {
        let (dtype, len) = data_of(layout, item);
        let (data, after) = rest.split_at(len as usize);
        rest = after;
        file.write(item, dtype, |write| write(data))?;
    }
    file.finish()
}

/// Type and bytes of what of an item comes from a rank's memory.
fn data_of(layout: &CheckpointLayout, item: &FileItem) -> (StoredType, u64) {
    match &item.content {
        Content::Object(_) | Content::Scalar(_) => (StoredType::F32, 0),
        Content::Shard { entry, local } => {
            let dtype = layout.entries[*entry].ty.dtype;
            (dtype.into(), local.chunk.sizes.iter().product::<u64>() * dtype.bytes())
        }
    }
}

impl Rank {
    /// Writes this rank's file; its bytes.
    fn write_file(
        &mut self,
        layout: &CheckpointLayout,
        position: &Position,
        folder: &StepFolder,
    ) -> Result<u64, RunError> {
        let items = file_items(layout, position, &self.bound.coord);
        let mut file = ShardFile::create(folder, self.bound.rank)?;
        for item in &items {
            let (dtype, _) = data_of(layout, item);
            file.write(item, dtype, |write| {
                self.read_item(layout, item, &mut |bytes| write(bytes).map_err(RunError::from))
            })?;
        }
        file.finish()?;
        Ok(items.last().map_or(0, |it| it.at + it.len))
    }

    /// Gives what of an item comes from this rank's memory.
    fn read_item<E: From<RunError>>(
        &self,
        layout: &CheckpointLayout,
        item: &FileItem,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Content::Shard { entry, local } = &item.content else { return Ok(()) };
        match layout.entries[*entry].source {
            Source::Buffer(buffer) => {
                let mut staging = Vec::new();
                let bound = (buffer, &self.bound.buffers[buffer]);
                read_box(&*self.backend, bound, local, &mut staging, sink)
            }
            Source::Kept(index) => {
                let kept = self.kept[index].iter().find(|it| it.0 == local.chunk);
                sink(&kept.expect("what is written was kept").1)
            }
        }
    }
}

#[cfg(test)]
mod tests;
