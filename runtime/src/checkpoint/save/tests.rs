//! Ranks of two processes, which here are two threads that know nothing of each other but a folder.

use std::fs;

use checkpoint::Checkpoint;
use cranelift_entity::PrimaryMap;
use ir::placement::{Chunk, Mesh, Sharding};
use ir::plan::{BufferData, Plan, Role, StreamKind};
use ir::run::Run;
use ir::{DType, Phase, TensorType};
use kernels::Proved;

use super::*;
use crate::session::SessionOptions;

const POSITION: Position = Position { step: 2, sample: 16, seed: 0, finite: true };

/// Four ranks with ten numbers between them, and three that all have.
fn session() -> Session {
    let mesh = Mesh::new(&[("dp", 4)]);
    let mut plan = Plan {
        name: "states".to_string(),
        phase: Phase::Planned,
        micro_batches: 1,
        comms: PrimaryMap::new(),
        streams: PrimaryMap::new(),
        events: 0,
        buffers: PrimaryMap::new(),
        sections: Default::default(),
        persistent_bytes: 512,
        model: None,
        step_bytes: 0,
        params: Vec::new(),
        results: Vec::new(),
        run: Run::default(),
        mesh,
    };
    plan.streams.push(StreamKind::Compute.into());
    for (name, sharding, n, offset) in [("shared", "[dp]", 10, 0), ("whole", "[_]", 3, 256)] {
        plan.buffers.push(BufferData {
            name: name.to_string(),
            ty: TensorType::new(DType::F32, &[n]),
            sharding: Sharding::parse(sharding, &plan.mesh).expect("a sharding"),
            role: Role::State,
            offset: Some(offset),
        });
    }
    let session =
        Session::new(&Proved::unproved(plan), &SessionOptions::default()).expect("starts");
    let numbers: Vec<f32> = (0..10u8).map(f32::from).collect();
    session.write("shared", &numbers).expect("written");
    session.write("whole", &[7.0, 8.0, 9.0]).expect("written");
    session
}

/// Saves from two processes; `harm` may spoil the folder before they write.
fn save_from_two(test: &str, harm: impl Fn(&Path)) -> [Result<(), RunError>; 2] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/two_processes").join(test);
    let _ = fs::remove_dir_all(&root);
    let session = session();
    let layout = Arc::new(CheckpointLayout::of(session.plan()).expect("it can be saved"));
    let options = SaveOptions { folder: root, ..SaveOptions::default() };
    let run = "c0ffee00".to_string();
    let lock = FolderLock::acquire(&options.folder, &run, &mut |_| ()).expect("a folder");
    let mut saver =
        Saver::new(&session, layout, (run, Some(lock)), &options, None).expect("a folder");
    let copies = saver.copy(&session, POSITION).expect("copied");
    let folder = StepFolder::new(&options.folder, POSITION.step, &saver.work.run);
    folder.create().expect("a folder");
    harm(&folder.temporary());
    let process = |here: [u64; 2], copies: &[Copied]| {
        let lock = saver.work.lock.clone().filter(|_| here[0] == 0);
        let work = Work { here: here.into(), lock, fault: Arc::default(), ..saver.work.clone() };
        work.start(&folder)?;
        let written = work.write_copies(&folder, copies);
        work.conclude(&folder, &POSITION, written).map(|left| assert_eq!(left, []))
    };
    scope(|scope| {
        let second = scope.spawn(|| process([2, 3], &copies[2..]));
        let first = process([0, 1], &copies[..2]);
        [first, second.join().expect("it ends")]
    })
}

#[test]
fn two_processes_make_one_checkpoint() {
    assert_eq!(save_from_two("both", |_| ()), [Ok(()), Ok(())]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/two_processes/both");
    let checkpoint = Checkpoint::open(&root).expect("`latest` names it");
    let read = |key: &str, offset: u64, n: u64| -> Vec<f32> {
        let mut bytes = vec![0; 4 * n as usize];
        let chunk =
            Chunk { offsets: [offset].into_iter().collect(), sizes: [n].into_iter().collect() };
        checkpoint.read(key, &chunk, &mut bytes).expect("it is there");
        bytes.as_chunks::<4>().0.iter().map(|&it| f32::from_le_bytes(it)).collect()
    };
    assert_eq!(read("planc.state.shared", 2, 6), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_eq!(read("planc.state.whole", 0, 3), [7.0, 8.0, 9.0]);
}

/// A folder has the name of rank 3's file: both processes say so, and there is no checkpoint.
#[test]
fn both_hear_of_a_rank_that_cannot_write() {
    let results = save_from_two("one_fails", |temporary| {
        fs::create_dir(temporary.join("__3_0.distcp")).expect("it is empty");
    });
    for result in results {
        let error = result.expect_err("rank 3 fails");
        assert_eq!(error.code(), "PL0751");
        let text = error.to_string();
        assert!(text.contains("step-2` was not saved: rank 3: cannot write `"), "{text}");
        assert!(text.contains("__3_0.distcp`: Is a directory"), "{text}");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp/two_processes/one_fails");
    assert!(!root.join("step-2").exists() && !root.join("latest").exists());
}
