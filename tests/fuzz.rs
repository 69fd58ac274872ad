//! Seeds of the fuzz targets, through the very functions that the targets call (`tests::fuzz`).
//!
//! `tests/fuzz/seeds` holds files that reach different code, and every file on which a target once
//! failed. Whatever is in one, reading it ends, soon, and memory does not follow the numbers in it.

#[path = "../checkpoint/tests/memory/peak.rs"]
mod memory;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use memory::{alone, peak};

/// Limits for one seed. The largest seeds take 12 MB and 0.3 s on a laptop.
const BYTES: usize = 256 << 20;
const TIME: Duration = Duration::from_secs(20);

#[track_caller]
fn replay(target: &str, run: fn(&[u8])) {
    let _one = alone();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let entries = fs::read_dir(&folder).expect("the seeds are there");
    let mut paths: Vec<_> = entries.map(|it| it.expect("entries are readable").path()).collect();
    paths.sort();
    assert!(paths.len() >= 5, "{} has seeds", folder.display());
    let mut broken = Vec::new();
    for path in paths {
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        let bytes = fs::read(&path).expect("a seed is readable");
        let start = Instant::now();
        let (result, peak) = peak(|| std::panic::catch_unwind(|| run(&bytes)));
        if result.is_err() {
            broken.push(format!("{name} panics"));
        }
        if peak > BYTES || start.elapsed() > TIME {
            broken.push(format!("{name} takes {peak} bytes and {:?}", start.elapsed()));
        }
    }
    assert!(broken.is_empty(), "seeds of `{target}`:\n  {}", broken.join("\n  "));
}

#[test]
fn models_end_in_a_plan_or_an_error() {
    replay("model", tests::fuzz::model);
}

#[test]
fn plans_are_proved_or_refused() {
    replay("plan", tests::fuzz::plan);
}

#[test]
fn indices_are_read_as_written_or_refused() {
    replay("metadata", tests::fuzz::metadata);
}

#[test]
fn profiles_price_or_are_refused() {
    replay("profile", tests::fuzz::profile);
}

#[test]
fn frames_are_messages_or_refused() {
    replay("frames", tests::fuzz::frames);
}
