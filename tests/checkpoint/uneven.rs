//! Parameters that a mesh cuts unevenly, saved on one mesh and loaded on others.

use checkpoint::Checkpoint;
use runtime::TrainOptions;

use crate::harness::*;

const FFN: &str = include_str!("../models/ffn_uneven.ron");
const UNEVEN: &str = include_str!("../models/uneven.ron");

/// Steps before a checkpoint.
const SAVED: u64 = 3;

/// Saves on each mesh and loads on each: every parameter and every moment has the bits that were saved.
#[track_caller]
fn check(test: &str, source: &str, set: Set, meshes: &[&str]) {
    for from in meshes {
        let folder = folder(&format!("{test}_{from}"));
        let save = saving(&folder, SAVED);
        let plan = compile(source, from, set);
        let saved = train(&plan, &TrainOptions { steps: Some(SAVED), save, ..Default::default() });
        let expect = state(&saved.session);
        let initial = train_to(&plan, 0, None);
        assert_ne!(state(&initial.session), expect, "{from}: it trains");
        let report = checkpoint::verify::verify(&Checkpoint::open(&folder).unwrap());
        assert!(report.problems.is_empty() && report.unsummed_bytes == 0, "{:?}", report.problems);
        for mesh in meshes {
            let what = format!("{test}, {from} to {mesh}");
            let loaded = train_to(&compile(source, mesh, set), SAVED, Some(&folder));
            let found = state(&loaded.session);
            assert!(found.keys().eq(expect.keys()), "{what}");
            for (name, bits) in &found {
                assert!(*bits == expect[name], "{what}: `{name}` is not what was saved");
            }
        }
    }
}

#[test]
fn an_ffn_that_tp_does_not_divide_moves_between_meshes() {
    check("ffn_uneven", FFN, &[], &["1", "2", "1x2", "2x2", "1x4"]);
}

#[test]
fn norm_weights_and_parameters_of_a_block_that_are_cut_unevenly_move_between_meshes() {
    check("uneven", UNEVEN, &[], &["1", "4", "2x2", "3x2", "2x4"]);
}
