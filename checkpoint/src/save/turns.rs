//! Two jobs on one folder. A test chooses, before each operation on the folder, which of them goes on, and may end
//! one for good.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

use super::folder::{Keep, StepFolder, checkpoints, newest, remove_leftovers, step_name};
use super::lock::FolderLock;
use super::shard::ShardFile;
use super::{Content, FileItem, Scalar};
use crate::archive::tensor_item_len;
use crate::metadata::{Encoding, Item, Metadata, PathPart, StoredChunk, StoredTensor};
use crate::verify::verify;
use crate::{Checkpoint, CheckpointError, StoredType};

thread_local! {
    static JOB: RefCell<Option<(Arc<Turns>, usize)>> = const { RefCell::new(None) };
}

/// Waits until this job has the turn; an error if it was ended. Code of no job goes on.
pub(crate) fn gate() -> io::Result<()> {
    match JOB.with_borrow(Clone::clone) {
        Some((turns, job)) => turns.pass(job),
        None => Ok(()),
    }
}

struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    random: Random,
    turn: usize,
    done: [bool; 2],
    /// Operations that each job may still do.
    left: [u64; 2],
    /// The number of turns, of 256, that a job keeps.
    stays: u64,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

impl Turns {
    fn pass(&self, job: usize) -> io::Result<()> {
        let mut state = self.state.lock().expect("no job panics here");
        for choose in [true, false] {
            while state.turn != job && !state.done[1 - job] {
                state = self.changed.wait(state).expect("no job panics here");
            }
            if state.left[job] == 0 {
                return Err(io::Error::other("the process was killed"));
            }
            if choose && state.random.below(256) >= state.stays {
                state.turn = 1 - job;
                self.changed.notify_all();
            }
        }
        state.left[job] -= 1;
        Ok(())
    }

    fn end(&self, job: usize) {
        self.state.lock().expect("no job panics here").done[job] = true;
        self.changed.notify_all();
    }
}

/// The actions of a job.
#[derive(Debug, Clone)]
struct Job {
    run: String,
    /// The step that it goes on from; the newest, if none is given.
    from: Option<u64>,
    keep: Option<u64>,
    /// True if it takes any other job for dead.
    takes_over: bool,
}

/// The outcome of a job.
#[derive(Debug, Clone)]
struct Came {
    /// The newest step when it got the lock.
    saw: u64,
    saved: Vec<u64>,
}

const STEPS: u64 = 2;

/// Runs a job; `got` hears when it has the lock.
fn run(root: &Path, job: &Job, came: &Mutex<Vec<(String, Came)>>) -> Result<(), CheckpointError> {
    let lock = FolderLock::acquire_if(root, &job.run, &mut |_| job.takes_over)?;
    remove_leftovers(&lock, None)?;
    let saw = checkpoints(root)?.last().copied().unwrap_or(0);
    let at = {
        let mut came = came.lock().expect("it is whole");
        came.push((job.run.clone(), Came { saw, saved: Vec::new() }));
        came.len() - 1
    };
    let from = job.from.unwrap_or(saw);
    let mut abandoned: Vec<u64> = checkpoints(root)?.into_iter().filter(|&it| it > from).collect();
    for step in from + 1..=from + STEPS {
        save(root, step, &lock, job.keep, &std::mem::take(&mut abandoned))?;
        came.lock().expect("it is whole")[at].1.saved.push(step);
    }
    Ok(())
}

/// Saves a checkpoint of one number.
fn save(
    root: &Path,
    step: u64,
    lock: &FolderLock,
    keep: Option<u64>,
    abandoned: &[u64],
) -> Result<(), CheckpointError> {
    let folder = StepFolder::new(root, step, lock.run());
    folder.create()?;
    folder.remove_leftovers(lock)?;
    let (key, dtype, bytes) = (KEY.to_string(), StoredType::I64, step.to_le_bytes().to_vec());
    let len = tensor_item_len(dtype, &[]);
    let content = Content::Scalar(Scalar { keys: Vec::new(), dtype, bytes });
    let mut file = ShardFile::create(&folder, 0)?;
    let item = FileItem { key: key.clone(), content, at: 0, len };
    file.write(&item, dtype, |_| Ok::<(), CheckpointError>(()))?;
    file.finish()?;
    let item = Item { file: 0, offset: 0, len, encoding: Encoding::Plain };
    let chunks = vec![StoredChunk { chunk: Default::default(), item }];
    let path = vec![PathPart::Key(key.clone())];
    let save_id = Some(folder.save_id());
    let files = vec![super::folder::file_name(0)];
    let mut index = Metadata { files, save_id, ..Metadata::default() };
    index.tensors.insert(key, StoredTensor { dtype, shape: Vec::new(), chunks, path });
    let mut bytes = Vec::new();
    index.write(&mut bytes).expect("memory takes what is written");
    let keep = keep.map(|newest| Keep { newest, good: None });
    folder.commit(lock, &bytes, keep, abandoned)?;
    Ok(())
}

const KEY: &str = "planc.step";

/// The step that a checkpoint says it is of, if it is whole.
fn step_of(path: &Path) -> Result<u64, String> {
    let checkpoint = Checkpoint::open(path).map_err(|it| it.to_string())?;
    let problems = verify(&checkpoint).problems;
    match problems.first() {
        Some(it) => Err(it.message.clone()),
        None => {
            checkpoint.number(KEY).map_err(|it| it.to_string()).map(|it| it.unwrap_or(0.0) as u64)
        }
    }
}

fn empty(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/turns").join(name);
    _ = fs::remove_dir_all(&root);
    root
}

/// Runs two jobs, and checks that the last to hold the lock finds what it saved. Returns whether the second took
/// over from the first, or the other way round, while it lived.
fn check(seed: u64) -> bool {
    let mut random = Random(seed);
    let root = empty(&format!("{seed}"));
    {
        let lock = FolderLock::acquire_if(&root, "00000000", &mut |_| false).expect("it is new");
        (1..=3).for_each(|it| save(&root, it, &lock, None, &[]).expect("it saves"));
    }
    let mut job = |run: &str| Job {
        run: run.to_string(),
        from: [None, None, Some(1), Some(2)][random.below(4) as usize],
        keep: [None, Some(1), Some(2)][random.below(3) as usize],
        takes_over: random.below(4) > 0,
    };
    let jobs = [job("aaaaaaaa"), job("bbbbbbbb")];
    // Some jobs are killed on the way.
    let mut left = || if random.below(3) == 0 { random.below(120) } else { u64::MAX };
    let left = [left(), left()];
    let stays = [250, 200, 128, 20][random.below(4) as usize];
    let state = State { turn: random.below(2) as usize, done: [false; 2], left, stays, random };
    let turns = Arc::new(Turns { state: Mutex::new(state), changed: Condvar::new() });
    let came = Mutex::new(Vec::new());
    let ends: Vec<Result<(), CheckpointError>> = std::thread::scope(|scope| {
        let start = |i: usize| {
            let (turns, job, root, came) = (turns.clone(), &jobs[i], &root, &came);
            scope.spawn(move || {
                JOB.set(Some((turns.clone(), i)));
                let res = run(root, job, came);
                turns.end(i);
                res
            })
        };
        let threads = [start(0), start(1)];
        threads.map(|it| it.join().expect("a job ends in an error, not in a panic")).into()
    });
    let came = came.into_inner().expect("it is whole");
    let context = format!("seed {seed}: {jobs:?} killed after {left:?} came to {came:?}, {ends:?}");
    // A third job, as `--resume` starts it.
    let lock = FolderLock::acquire_if(&root, "cccccccc", &mut |_| true).expect("it takes over");
    remove_leftovers(&lock, None).expect("it may");
    for step in checkpoints(&root).expect("it is readable") {
        assert_eq!(step_of(&root.join(step_name(step))), Ok(step), "step {step}; {context}");
    }
    let found = newest(&root).expect("it is readable").expect("a checkpoint is left");
    let found = step_of(&found).unwrap_or_else(|it| panic!("{it}; {context}"));
    let least = match came.last() {
        None => 3,
        Some((run, last)) => {
            let from = jobs.iter().find(|it| it.run == *run).and_then(|it| it.from);
            last.saved.last().copied().or(from).unwrap_or(last.saw)
        }
    };
    assert!(found >= least, "step {found} is the newest, and {least} was saved; {context}");
    save(&root, found + 1, &lock, Some(1), &[]).expect("it saves");
    drop(lock);
    let names = fs::read_dir(&root).expect("readable").map(|it| it.expect("readable").file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, ["latest", &step_name(found + 1)], "{context}");
    fs::remove_dir_all(&root).expect("it was made here");
    ends.iter().any(|it| matches!(it, Err(CheckpointError::LockLost { .. })))
}

/// Schedulers start a job again while the old process still lives. Whoever does what when, and whoever is killed or
/// taken for dead: what the last job saved is there, all that is there is whole, and the next job goes on from it.
#[test]
fn two_jobs_on_one_folder_lose_nothing() {
    let lost = (0..500).filter(|&it| check(it)).count();
    assert!(lost > 100, "{lost} of 500 jobs lost the lock while they lived");
}
