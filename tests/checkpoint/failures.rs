//! Saves that cannot be, and what is left of them.

use std::fs;
use std::time::Duration;

use checkpoint::Checkpoint;
use checkpoint::save::folder::{wait_for_commit, wait_for_ranks};
use checkpoint::save::{FolderLock, Progress, StepFolder};
use runtime::{OnFailure, RunError, SaveOptions, TrainOptions};

use crate::harness::*;

fn options(steps: u64, save: SaveOptions) -> TrainOptions {
    TrainOptions { steps: Some(steps), save: Some(save), ..TrainOptions::default() }
}

#[test]
fn the_newest_are_kept() {
    let folder = folder("keep");
    let save = SaveOptions { keep: Some(2), ..saving(&folder, 1).unwrap() };
    train(&compile(SMALL, "2", &[]), &options(5, save));
    assert_eq!(names(&folder), ["latest", "step-4", "step-5"]);
    assert_eq!(fs::read_to_string(folder.join("latest")).unwrap(), "step-5");
}

#[test]
fn leftovers_of_runs_that_ended_are_removed() {
    let folder = folder("leftovers");
    fs::create_dir_all(folder.join(".step-7.0badcafe.tmp/__1_0.distcp")).unwrap();
    fs::create_dir(folder.join(".step-8.0badcafe.other")).unwrap();
    train(&compile(SMALL, "2", &[]), &options(1, saving(&folder, 1).unwrap()));
    assert_eq!(names(&folder), [".step-8.0badcafe.other", "latest", "step-1"]);
}

/// Where a file system cannot swap folders, a process may end while the checkpoint that it replaces is aside.
#[test]
fn a_checkpoint_that_was_aside_goes_back() {
    let root = folder("aside");
    for (step, aside) in [("step-7", ".step-7.0badcafe.tmp.tmp"), ("", ".step-8.0badcafe.tmp.tmp")]
    {
        fs::create_dir_all(root.join(aside)).unwrap();
        fs::write(root.join(aside).join(".metadata"), "before").unwrap();
        if !step.is_empty() {
            fs::create_dir(root.join(step)).unwrap();
            fs::write(root.join(step).join(".metadata"), "after").unwrap();
        }
    }
    let lock = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
    StepFolder::new(&root, 9, "c0ffee00").remove_leftovers(&lock).unwrap();
    drop(lock);
    assert_eq!(names(&root), ["latest", "step-7", "step-8"]);
    let index = |step: &str| fs::read_to_string(root.join(step).join(".metadata")).unwrap();
    assert_eq!([index("step-7"), index("step-8")], ["after", "before"]);
}

/// The same step again replaces what was there.
#[test]
fn a_step_is_saved_again() {
    let folder = folder("again");
    let plan = compile(SMALL, "2", &[]);
    train(&plan, &options(2, saving(&folder, 2).unwrap()));
    let first = files_of_any_run(&folder.join("step-2"));
    let save = SaveOptions { overwrite: true, ..saving(&folder, 2).unwrap() };
    let other = TrainOptions { seed: Some(9), ..options(2, save) };
    train(&plan, &other);
    let second = files_of_any_run(&folder.join("step-2"));
    assert!(first.keys().eq(second.keys()) && first != second);
    assert_eq!(names(&folder), ["latest", "step-2"]);
}

/// A file stands where the folder of checkpoints should be.
#[test]
fn a_folder_that_cannot_be_is_an_error_before_the_first_step() {
    let folder = folder("no_folder");
    fs::write(folder.join("file"), "").unwrap();
    let save = saving(&folder.join("file"), 1).unwrap();
    let error = try_train(&compile(SMALL, "2", &[]), &options(1, save)).err().unwrap();
    assert!(matches!(error, RunError::Checkpoint(_)), "{error}");
    assert!(error.to_string().contains("no_folder/file`"), "{error}");
}

/// Training may go on, and the checkpoint before is as it was.
#[test]
fn a_failed_save_stops_training_or_does_not() {
    let folder = folder("failed");
    let plan = compile(SMALL, "2", &[]);
    train(&plan, &options(1, saving(&folder, 1).unwrap()));
    let before = files(&folder.join("step-1"));
    // Something else has the name that a checkpoint is to have.
    fs::write(folder.join("step-2"), "").unwrap();
    for (on_failure, background) in [
        (OnFailure::Stop, false),
        (OnFailure::Stop, true),
        (OnFailure::Continue, false),
        (OnFailure::Continue, true),
    ] {
        let save = SaveOptions { on_failure, background, ..saving(&folder, 2).unwrap() };
        let load = loading(&folder.join("step-1"));
        let result = try_train(&plan, &TrainOptions { load, ..options(3, save) });
        match (on_failure, result) {
            (OnFailure::Stop, Err(error)) => {
                assert_eq!(error.code(), "PL0751", "{error}");
                assert!(error.to_string().contains("failed/step-2`"), "{error}");
                assert!(Checkpoint::open(&folder).is_ok());
            }
            (OnFailure::Continue, Ok(trained)) => {
                assert_eq!(trained.warnings.len(), 1, "{:?}", trained.warnings);
                assert!(trained.warnings[0].contains("was not saved"), "{:?}", trained.warnings);
                assert_eq!(trained.saved.len(), 1, "step 3 is saved");
            }
            (_, Ok(_)) => panic!("it stops"),
            (_, Err(error)) => panic!("{error}"),
        }
        assert!(files(&folder.join("step-1")) == before);
    }
}

fn never() -> Option<String> {
    None
}

/// A process that ended between the rename and `latest`.
#[test]
fn the_newest_step_is_what_a_run_goes_on_from() {
    let folder = folder("between");
    let plan = compile(SMALL, "2", &[]);
    train(&plan, &options(3, saving(&folder, 1).unwrap()));
    fs::write(folder.join("latest"), "step-2").unwrap();
    fs::create_dir(folder.join(".step-4.0badcafe.tmp")).unwrap();
    let load = loading(&folder);
    let again = TrainOptions { load, resume: true, ..options(3, saving(&folder, 1).unwrap()) };
    let resumed = train(&plan, &again);
    assert_eq!(resumed.loaded.unwrap().step, 3);
    // There was nothing to train and nothing to save, and the leftovers are gone.
    assert_eq!(names(&folder), ["latest", "step-1", "step-2", "step-3"]);
}

/// Ranks of several processes hear of each other through the folder alone.
#[test]
fn ranks_of_other_processes_are_waited_for() {
    let root = folder("processes");
    let folder = StepFolder::new(&root, 4, "c0ffee00");
    folder.create().unwrap();
    let done = |rank: u64| {
        fs::write(folder.temporary().join(format!("__{rank}_0.distcp.sums")), "").unwrap();
    };
    done(0);
    let limit = Duration::from_millis(1);
    let waiting = wait_for_ranks(&folder, 3, limit, &never);
    assert_eq!(waiting, Err(Progress::Waiting(vec![1, 2])));
    let gone = || Some("rank 2 (node1) ended without a word".to_string());
    let ended = wait_for_ranks(&folder, 3, Duration::MAX, &gone);
    assert_eq!(ended, Err(Progress::Failed { rank: 0, why: gone().unwrap() }));
    folder.fail(2, "no space left on `x`");
    let failed = Progress::Failed { rank: 2, why: "no space left on `x`".to_string() };
    assert_eq!(wait_for_ranks(&folder, 3, Duration::MAX, &never), Err(failed.clone()));
    assert_eq!(wait_for_commit(&folder, 3, Duration::MAX, &never), Err(failed));
}

#[test]
fn the_others_go_on_when_rank_0_has_committed() {
    let root = folder("commit");
    let lock = FolderLock::acquire(&root, "c0ffee00", &mut |_| ()).unwrap();
    let folder = StepFolder::new(&root, 4, "c0ffee00");
    folder.create().unwrap();
    assert_eq!(folder.outcome(1), None);
    fs::write(folder.temporary().join("__0_0.distcp.sums"), "").unwrap();
    wait_for_ranks(&folder, 1, Duration::MAX, &never).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| wait_for_commit(&folder, 1, Duration::MAX, &never));
        assert_eq!(folder.commit(&lock, b"index", None, &[]), Ok(vec![]));
        assert_eq!(other.join().unwrap(), Ok(()));
    });
    drop(lock);
    assert_eq!(names(&root), ["latest", "step-4"]);
    let abandoned = StepFolder::new(&root, 5, "c0ffee00");
    abandoned.create().unwrap();
    abandoned.abandon();
    let outcome = wait_for_commit(&abandoned, 1, Duration::MAX, &never);
    assert!(matches!(outcome, Err(Progress::Failed { rank: 0, .. })), "{outcome:?}");
}
