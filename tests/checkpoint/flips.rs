//! Bits that flipped between saving and loading.

use std::fs;

use runtime::checkpoint::load::load;

use crate::harness::*;

/// Flips `n` bits, one after the other, in files of a checkpoint that was saved on the mesh `from`, and loads it on
/// `to`. Returns how often that was refused; else all that is loaded must be what was saved.
#[track_caller]
fn refused_flips(test: &str, set: Set, (from, to): (&str, &str), n: u64) -> u64 {
    let folder = folder(test);
    let options = runtime::TrainOptions {
        steps: Some(1),
        save: saving(&folder, 1),
        ..runtime::TrainOptions::default()
    };
    train(&compile(SMALL, from, set), &options);
    let folder = folder.join("step-1");
    let plan = compile(SMALL, to, set);
    let session = runtime::Session::new(&plan, &runtime::SessionOptions::default()).unwrap();
    let options = loading(&folder).unwrap();
    let whole = load(&session, &options).unwrap_or_else(|it| panic!("{it}"));
    let expect = state(&session);
    let files: Vec<(String, Vec<u8>)> = files(&folder).into_iter().collect();
    let bits: u64 = files.iter().map(|it| it.1.len() as u64 * 8).sum();
    // SplitMix64, from a seed.
    let mut random = 28u64;
    let mut refused = 0;
    for flip in 0..n {
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bit = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bit = (bit ^ (bit >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bit = (bit ^ (bit >> 31)) % bits;
        let (name, bytes) = files
            .iter()
            .find(|it| {
                let here = it.1.len() as u64 * 8;
                let found = bit < here;
                bit -= if found { 0 } else { here };
                found
            })
            .unwrap();
        let mut flipped = bytes.clone();
        flipped[(bit / 8) as usize] ^= 1 << (bit % 8);
        fs::write(folder.join(name), &flipped).unwrap();
        match load(&session, &options) {
            Err(_) => refused += 1,
            Ok(it) => {
                let what = format!("flip {flip}: bit {bit} of `{name}`");
                assert_eq!((it.step, it.seed), (whole.step, whole.seed), "{what}");
                assert!(state(&session) == expect, "{what} is loaded");
            }
        }
        fs::write(folder.join(name), bytes).unwrap();
    }
    refused
}

/// In items of one piece, and of several, each of which two ranks read a part of.
#[test]
fn of_1000_flipped_bits_none_is_loaded_on_another_mesh() {
    let small = refused_flips("flips_small", &[], ("2x2", "4"), 500);
    let large = refused_flips("flips_large", &[("layers[0].vocab", "40000")], ("1", "2"), 500);
    // The others are in the text of a file beside, or in fill between records.
    assert!(small > 400 && large > 450, "{small} and {large} of 500 are refused");
}
