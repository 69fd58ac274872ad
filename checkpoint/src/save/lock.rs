//! [`FolderLock`]: at most one run at a time saves into a folder of checkpoints.
//!
//! ```text
//! ckpt/.lock                 who saves here: run, user, host, process, and a heartbeat
//! ckpt/.lock.1f3a09c2        the right to change `.lock` while the run 1f3a09c2 has it, itself a lock
//! ckpt/.lock.77aa0b1c.new    a lock before it has its name
//! ```
//!
//! A lock is written under a name of its own, and linked to its place. A link fails if something has the name, on
//! NFS too, so that one of several runs gets it, and nobody reads half a lock.
//!
//! A run that ended without a word leaves its lock. On the machine where it ran, the process tells. Elsewhere the
//! lock is stale if its heartbeat stands still for [`STALE`], by the clock of the one that looks: clocks of two
//! machines are not compared. Whoever takes over first gets the right to, and only then replaces the lock, so that
//! of two runs that saw a stale lock none removes that of the other. A run that holds the lock looks again before
//! each rename and each removal ([`FolderLock::check`]).

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::disk;
use crate::error::{CheckpointError, LockHolder};

/// The time after which a lock whose heartbeat stands still is taken over.
pub const STALE: Duration = Duration::from_secs(60);
/// The time between two heartbeats.
const BEAT: Duration = Duration::from_secs(10);
/// The time between two looks at a heartbeat.
const LOOK: Duration = Duration::from_millis(500);

/// The file that names the run that saves into a folder.
const LOCK: &str = ".lock";
/// The most bytes of a lock that are read.
const MOST: u64 = 4096;
/// The run of a lock that cannot be read.
const UNKNOWN: &str = "unknown";

/// The lock of a folder of checkpoints, held by this run until it is dropped. See the [module docs](self).
#[derive(Debug)]
pub struct FolderLock {
    root: PathBuf,
    mine: Holder,
    heart: Option<Heart>,
}

/// A thread that writes heartbeats until its sender is dropped.
#[derive(Debug)]
struct Heart {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

/// The content of a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    run: String,
    user: String,
    uid: u32,
    host: String,
    /// The running system and its set of process ids: hosts of two containers may have one name, and a host that
    /// was started again has other processes.
    machine: String,
    pid: u32,
    /// The time at which the process started, in clock ticks since the system did.
    started: u64,
    /// The time of the last heartbeat, in seconds since 1970, of a width that does not change.
    beat: String,
}

/// The state of the process that holds a lock, as another one sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It saves.
    Alive,
    /// It does not come back.
    Dead,
    /// Another has the lock by now, or nobody.
    Changed,
}

/// Judges the holder of the lock at a path.
type Judge<'a> = dyn FnMut(&Path, &Holder) -> Result<Verdict, CheckpointError> + 'a;

impl FolderLock {
    /// Takes the lock of the folder `root`, which is made if it is not there, for the run `run`. `told` hears of a
    /// wait for another run, and of a lock that is taken over from another machine.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`] if a run that lives has it, or an error of the system.
    pub fn acquire(
        root: &Path,
        run: &str,
        told: &mut dyn FnMut(String),
    ) -> Result<FolderLock, CheckpointError> {
        let (mut res, file) =
            FolderLock::take(root, run, &mut |path, holder| judge(path, holder, STALE, told))?;
        res.heart = Some(
            Heart::start(file, res.mine.clone())
                .map_err(|it| CheckpointError::io("write", &res.path(), &it))?,
        );
        Ok(res)
    }

    /// Takes a lock that has no heartbeat, if `judge` finds that whoever has it is dead.
    fn take(
        root: &Path,
        run: &str,
        judge: &mut Judge<'_>,
    ) -> Result<(FolderLock, File), CheckpointError> {
        disk::create_folder(root).map_err(|it| CheckpointError::io("create", root, &it))?;
        let mine = Holder::this(run);
        let file = take(root, &root.join(LOCK), &mine, judge)?;
        let res = FolderLock { root: root.to_path_buf(), mine, heart: None };
        res.remove_leftovers()?;
        Ok((res, file))
    }

    /// As [`FolderLock::acquire`], where `is_dead` judges runs by their names.
    #[cfg(test)]
    pub(crate) fn acquire_if(
        root: &Path,
        run: &str,
        is_dead: &mut dyn FnMut(&str) -> bool,
    ) -> Result<FolderLock, CheckpointError> {
        let mut judge = |_: &Path, it: &Holder| {
            Ok(if is_dead(&it.run) { Verdict::Dead } else { Verdict::Alive })
        };
        Ok(FolderLock::take(root, run, &mut judge)?.0)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The run that holds it.
    pub fn run(&self) -> &str {
        &self.mine.run
    }

    fn path(&self) -> PathBuf {
        self.root.join(LOCK)
    }

    /// Returns an error unless this run still holds the lock.
    ///
    /// # Errors
    /// [`CheckpointError::LockLost`], or an error of the system.
    pub fn check(&self) -> Result<(), CheckpointError> {
        match read(&self.path())? {
            Some(it) if it.run == self.mine.run => Ok(()),
            other => Err(CheckpointError::LockLost {
                path: self.root.clone(),
                to: other.map(|it| it.said(&self.root)),
            }),
        }
    }

    /// Removes what takers of locks left that ended on the way. One that lives makes its part again.
    fn remove_leftovers(&self) -> Result<(), CheckpointError> {
        let fail = |it: io::Error| CheckpointError::io("read", &self.root, &it);
        for entry in fs::read_dir(&self.root).map_err(fail)? {
            let name = entry.map_err(fail)?.file_name();
            let name = name.to_string_lossy();
            // The right to take the lock from this run is no leftover.
            let of = name.strip_prefix(".lock.");
            if of.is_some_and(|it| !it.starts_with(&self.mine.run)) {
                let path = self.root.join(&*name);
                disk::remove(&path).map_err(|it| CheckpointError::io("remove", &path, &it))?;
            }
        }
        Ok(())
    }

    fn release(&self) -> Result<(), CheckpointError> {
        self.check()?;
        let (path, claim) = (self.path(), claim(&self.path(), &self.mine));
        // If another has the right to change the lock, it is taking over.
        if place(&self.root, &claim, &self.mine)?.is_none() {
            return Ok(());
        }
        self.check()?;
        let fail = |it: io::Error| CheckpointError::io("remove", &path, &it);
        disk::remove(&path).and_then(|()| disk::remove(&claim)).map_err(fail)
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if let Some(Heart { stop, thread }) = self.heart.take() {
            drop(stop);
            let _ = thread.join();
        }
        // A lock that stays is taken over, since this process ends.
        let _ = self.release();
    }
}

impl Heart {
    fn start(file: File, mut mine: Holder) -> io::Result<Heart> {
        let (stop, stopped) = channel();
        let beat = move || {
            while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                mine.beat = now();
                // Whether it arrives is seen when the lock is looked at, before anything is changed.
                let _ = file.write_all_at(&mine.text(), 0).and_then(|()| file.sync_all());
            }
        };
        let thread = Builder::new().name("heartbeat".into()).spawn(beat)?;
        Ok(Heart { stop, thread })
    }
}

/// Seconds since 1970, in 20 digits.
fn now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
    format!("{now:020}")
}

impl Holder {
    /// This process.
    fn this(run: &str) -> Holder {
        let line = |path: &str| fs::read_to_string(path).map(|it| it.trim().to_string());
        let boot = line("/proc/sys/kernel/random/boot_id");
        let ids = fs::read_link("/proc/self/ns/pid").map(|it| it.display().to_string());
        let machine = match (boot, ids) {
            (Ok(boot), Ok(ids)) => format!("{boot} {ids}"),
            // Without it, heartbeats alone count.
            _ => String::new(),
        };
        let uid = fs::metadata("/proc/self").map_or(u32::MAX, |it| it.uid());
        let user = ["USER", "LOGNAME"].into_iter().find_map(|it| std::env::var(it).ok());
        let pid = std::process::id();
        Holder {
            run: run.to_string(),
            user: user.unwrap_or_else(|| format!("uid {uid}")),
            uid,
            host: line("/proc/sys/kernel/hostname").unwrap_or_else(|_| "an unnamed host".into()),
            machine,
            pid,
            started: started(pid).unwrap_or(0),
            beat: now(),
        }
    }

    /// A lock that somebody wrote; anything else is one of an unknown run.
    fn parse(text: &[u8]) -> Holder {
        let is_name = |it: &str| {
            !it.is_empty() && it.len() <= 64 && it.bytes().all(|it| it.is_ascii_alphanumeric())
        };
        let read = serde_json::from_slice(text).ok().filter(|it: &Holder| is_name(&it.run));
        read.unwrap_or_else(|| Holder {
            run: UNKNOWN.to_string(),
            user: UNKNOWN.to_string(),
            uid: u32::MAX,
            host: "an unknown host".to_string(),
            machine: String::new(),
            pid: 0,
            started: 0,
            beat: String::from_utf8_lossy(text).into_owned(),
        })
    }

    fn text(&self) -> Vec<u8> {
        let mut res = serde_json::to_vec(self).expect("text and numbers are JSON");
        res.push(b'\n');
        res
    }

    fn said(&self, root: &Path) -> Box<LockHolder> {
        let Holder { run, user, host, pid, .. } = self.clone();
        Box::new(LockHolder { path: root.to_path_buf(), run, user, host, pid })
    }

    /// Returns true if the process lives, and `None` if that cannot be seen from here.
    fn lives(&self) -> Option<bool> {
        let this = Holder::this("");
        // The system may hide the processes of other users.
        let is_here =
            !self.machine.is_empty() && (&self.machine, self.uid) == (&this.machine, this.uid);
        is_here.then(|| started(self.pid) == Some(self.started))
    }
}

/// The time at which a process started, in clock ticks since the system did; `None` if it has ended.
fn started(pid: u32) -> Option<u64> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name of the program in parentheses, and may have any character.
    let text = String::from_utf8_lossy(&text);
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // Zombies have ended, and wait for who started them.
    (!matches!(state, "Z" | "X")).then_some(())?;
    fields.nth(18)?.parse().ok()
}

/// Judges a lock: by the process if it is of this machine, else by the heartbeat.
fn judge(
    path: &Path,
    holder: &Holder,
    stale: Duration,
    told: &mut dyn FnMut(String),
) -> Result<Verdict, CheckpointError> {
    match holder.lives() {
        Some(true) => return Ok(Verdict::Alive),
        Some(false) => return Ok(Verdict::Dead),
        None => (),
    }
    let Some(root) = path.parent() else { return Ok(Verdict::Alive) };
    let said = holder.said(root);
    told(format!("{said}; waiting {} s for its next heartbeat", stale.as_secs()));
    let since = Instant::now();
    while since.elapsed() < stale {
        std::thread::sleep(LOOK.min(stale));
        match read(path)? {
            Some(it) if it == *holder => (),
            Some(it) if it.run == holder.run => return Ok(Verdict::Alive),
            Some(_) | None => return Ok(Verdict::Changed),
        }
    }
    told(format!(
        "{said}, whose heartbeat stood still for {} s: it is taken over",
        stale.as_secs()
    ));
    Ok(Verdict::Dead)
}

/// Gets the lock at `path`; its file.
fn take(
    root: &Path,
    path: &Path,
    mine: &Holder,
    judge: &mut Judge<'_>,
) -> Result<File, CheckpointError> {
    loop {
        if let Some(file) = place(root, path, mine)? {
            return Ok(file);
        }
        let Some(holder) = read(path)? else { continue };
        let locked = |it: &Holder| CheckpointError::Locked(it.said(root));
        match judge(path, &holder)? {
            Verdict::Alive => return Err(locked(&holder)),
            Verdict::Changed => continue,
            Verdict::Dead => (),
        }
        let claim = claim(path, &holder);
        let file = take(root, &claim, mine, judge)?;
        // Whoever has the right to change it is this run, so that the next line finds what this one does.
        if read(path)?.is_some_and(|it| it.run == holder.run) {
            match disk::rename(&claim, path) {
                // A run that took this one for dead has the right by now.
                Err(it) if it.kind() != ErrorKind::NotFound => {
                    return Err(CheckpointError::io("rename", &claim, &it));
                }
                _ => (),
            }
            match read(path)? {
                Some(it) if it.run == mine.run => return Ok(file),
                Some(it) => return Err(locked(&it)),
                None => continue,
            }
        }
        disk::remove(&claim).map_err(|it| CheckpointError::io("remove", &claim, &it))?;
    }
}

/// The name of the right to change the lock at `path` while `holder` has it.
fn claim(path: &Path, holder: &Holder) -> PathBuf {
    let mut res = path.as_os_str().to_owned();
    res.push(format!(".{}", holder.run));
    PathBuf::from(res)
}

/// Puts a lock at `path`, unless something is there.
fn place(root: &Path, path: &Path, mine: &Holder) -> Result<Option<File>, CheckpointError> {
    let fail = |it: io::Error| CheckpointError::io("write", path, &it);
    let part = root.join(format!("{LOCK}.{}.new", mine.run));
    disk::remove(&part).map_err(fail)?;
    let mut file = disk::create_new(&part).map_err(fail)?;
    disk::fill(&mut file, &mine.text()).map_err(fail)?;
    let linked = match disk::link(&part, path) {
        Ok(()) => Ok(true),
        // An answer that was lost on the way: the link was made, and asked for again.
        Err(it) if it.kind() == ErrorKind::AlreadyExists => {
            file.metadata().map(|it| it.nlink() == 2)
        }
        // Another run has just got the lock, and removed what it took for a leftover.
        Err(it) if it.kind() == ErrorKind::NotFound => Ok(false),
        Err(it) if matches!(it.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied) => {
            // A file system without links: who makes the file has it, and others may see it while it is empty.
            disk::remove(&part).map_err(fail)?;
            return match disk::create_new(path) {
                Ok(mut file) => disk::fill(&mut file, &mine.text()).map(|()| Some(file)),
                Err(it) if it.kind() == ErrorKind::AlreadyExists => Ok(None),
                Err(it) => Err(it),
            }
            .map_err(fail);
        }
        Err(it) => Err(it),
    };
    disk::remove(&part).map_err(fail)?;
    Ok(linked.map_err(fail)?.then_some(file))
}

/// The lock at `path`; `None` if there is none.
fn read(path: &Path) -> Result<Option<Holder>, CheckpointError> {
    let mut text = Vec::new();
    let read = disk::gate()
        .and_then(|()| File::open(path))
        .and_then(|it| it.take(MOST).read_to_end(&mut text));
    match read {
        Ok(_) => Ok(Some(Holder::parse(&text))),
        Err(it) if it.kind() == ErrorKind::NotFound => Ok(None),
        Err(it) => Err(CheckpointError::io("read", path, &it)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(test: &str) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/lock").join(test);
        _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).expect("a folder");
        root
    }

    fn names(root: &Path) -> Vec<String> {
        let entries = fs::read_dir(root).expect("it is there");
        let name = |it: io::Result<fs::DirEntry>| it.expect("readable").file_name();
        let mut res: Vec<String> =
            entries.map(|it| name(it).into_string().expect("text")).collect();
        res.sort();
        res
    }

    /// A lock that a process wrote, changed in some fields.
    fn write(root: &Path, change: impl FnOnce(&mut Holder)) {
        let mut holder = Holder::this("0badcafe");
        change(&mut holder);
        fs::write(root.join(LOCK), holder.text()).expect("it is writable");
    }

    fn acquire(root: &Path, stale: Duration) -> (Result<FolderLock, CheckpointError>, Vec<String>) {
        let mut said = Vec::new();
        let mut judge = |path: &Path, it: &Holder| judge(path, it, stale, &mut |it| said.push(it));
        let res = FolderLock::take(root, "c0ffee00", &mut judge).map(|it| it.0);
        (res, said)
    }

    #[test]
    fn the_second_run_is_refused_by_name_until_the_first_ends() {
        let root = folder("second");
        let first = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
        assert_eq!(names(&root), [LOCK]);
        let error = FolderLock::acquire(&root, "0badcafe", &mut |_| ()).unwrap_err();
        assert_eq!(error.code(), "PL0712");
        let this = Holder::this("");
        let who = format!("run c0ffee00 of {}, process {} on {}", this.user, this.pid, this.host);
        assert!(error.to_string().contains(&who), "{error}");
        first.check().unwrap();
        drop(first);
        assert_eq!(names(&root), [""; 0]);
        FolderLock::acquire(&root, "0badcafe", &mut |_| ()).unwrap();
    }

    /// A process of this machine that has ended, or whose number another process has by now.
    #[test]
    fn a_dead_process_of_this_machine_is_replaced_at_once_and_silently() {
        let root = folder("dead");
        let cases: [fn(&mut Holder); 2] = [|it| it.pid = 1 << 30, |it| it.started += 1];
        for change in cases {
            write(&root, change);
            let (lock, said) = acquire(&root, Duration::MAX);
            lock.unwrap().check().unwrap();
            assert_eq!((said, names(&root)), (vec![], vec![]));
        }
    }

    /// Nothing is known of its processes: the heartbeat decides, by the clock of who looks.
    #[test]
    fn another_machine_is_judged_by_its_heartbeat() {
        let root = folder("elsewhere");
        let elsewhere = |it: &mut Holder| it.machine = "another".into();
        write(&root, elsewhere);
        let (lock, said) = acquire(&root, Duration::ZERO);
        lock.unwrap().check().unwrap();
        assert!(said[0].contains("waiting 0 s") && said[1].contains("stood still"), "{said:?}");
        write(&root, elsewhere);
        let beat = std::thread::spawn({
            let root = root.clone();
            move || {
                // Not before it was looked at once.
                std::thread::sleep(LOOK / 2);
                write(&root, |it| (it.machine, it.beat) = ("another".into(), "9".repeat(20)));
            }
        });
        let (lock, _) = acquire(&root, Duration::from_secs(3600));
        assert_eq!(lock.unwrap_err().code(), "PL0712");
        beat.join().unwrap();
    }

    #[test]
    fn what_is_no_lock_is_stale_in_time() {
        let root = folder("garbage");
        for text in ["", "{}", "{\"run\":\"../x\"}"] {
            fs::write(root.join(LOCK), text).unwrap();
            acquire(&root, Duration::ZERO).0.unwrap();
            assert_eq!(names(&root), [""; 0]);
        }
    }

    /// A run that was taken for dead holds nothing, and removes nothing of its successor.
    #[test]
    fn a_run_that_was_replaced_hears_of_it() {
        let root = folder("replaced");
        let first = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
        let second = FolderLock::acquire_if(&root, "0badcafe", &mut |_| true).unwrap();
        let error = first.check().unwrap_err();
        assert_eq!(error.code(), "PL0713");
        assert!(error.to_string().contains("run 0badcafe of "), "{error}");
        drop(first);
        second.check().unwrap();
    }

    /// A taker that ended with the right to take over leaves it to the next.
    #[test]
    fn a_taker_that_ended_is_replaced_too() {
        let root = folder("taker");
        write(&root, |it| it.pid = 1 << 30);
        let mut taker = Holder::this("deadbeef");
        taker.pid = 1 << 30;
        fs::write(root.join(".lock.0badcafe"), taker.text()).unwrap();
        fs::write(root.join(".lock.deadbeef.new"), "").unwrap();
        acquire(&root, Duration::MAX).0.unwrap().check().unwrap();
        assert_eq!(names(&root), [""; 0]);
    }
}
