//! Files that somebody changed: whatever is in them, reading ends, with a result or an error.
//!
//! Every golden checkpoint, and one of planc's own, is changed in many ways, from a seed that a failure
//! prints; then everything that reads is called. What is checked is that nothing panics, that memory is
//! bounded (an allocator counts), and that time is. `PLANC_FUZZ=1000000` makes a million rounds.

#[path = "memory/peak.rs"]
mod memory;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use checkpoint::verify::verify;
use checkpoint::{Checkpoint, Metadata, archive, sums};
use ir::placement::Chunk;
use memory::{alone, peak};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut it = self.0;
        it = (it ^ (it >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        it = (it ^ (it >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        it ^ (it >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Opcodes and fields that mean something, where plain noise rarely hits.
const WORDS: &[&[u8]] = &[
    b"h\x00",
    b"h\x01",
    b"q\x00",
    b"\x94",
    b"(",
    b"t",
    b")",
    b"]",
    b"e",
    b"a",
    b"}",
    b"u",
    b"s",
    b"R",
    b"\x81",
    b"b",
    b"Q",
    b".",
    b"N",
    b"2",
    b"0",
    b"1",
    b"\x85",
    b"\x86",
    b"\x87",
    b"K\x00",
    b"K\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"J\xff\xff\xff\x7f",
    b"X\xff\xff\xff\xff",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
    b"j\xff\xff\xff\x7f",
    b"r\xff\xff\xff\x7f",
    b"cos\nsystem\n",
    b"PK\x01\x02",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"data.pkl",
    b"data/0",
    b"18446744073709551615",
    b"-1",
    b"{",
    b"[",
    b"\"",
];

/// Changes some bytes, in one to four ways.
fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len() + 1);
        let len = random.below(bytes.len() - at + 1).min(1 + random.below(64));
        match random.below(8) {
            0 => {
                if let Some(it) = bytes.get_mut(at) {
                    *it ^= 1 << random.below(8);
                }
            }
            1 => {
                if let Some(it) = bytes.get_mut(at) {
                    *it = random.next() as u8;
                }
            }
            2 => bytes.truncate(at),
            3 => {
                bytes.drain(at..at + len);
            }
            4 => {
                let copy = bytes[at..at + len].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            5 => {
                let word = WORDS[random.below(WORDS.len())];
                bytes.splice(at..at, word.iter().copied());
            }
            6 => {
                let word = WORDS[random.below(WORDS.len())];
                let end = bytes.len().min(at + word.len());
                bytes[at..end].copy_from_slice(&word[..end - at]);
            }
            _ => {
                let copy = bytes[at..at + len].to_vec();
                let to = random.below(bytes.len() - len + 1);
                bytes[to..to + len].copy_from_slice(&copy);
            }
        }
    }
}

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/dcp");

fn rounds(default: u64) -> u64 {
    std::env::var("PLANC_FUZZ").ok().and_then(|it| it.parse().ok()).unwrap_or(default)
}

/// Files of all golden checkpoints, with where each is.
fn files() -> Vec<(PathBuf, Vec<u8>)> {
    let mut folders = vec![PathBuf::from(GOLDEN)];
    let mut res = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("golden data") {
            let path = entry.expect("golden data").path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.parent().is_some_and(|it| it.ends_with("dcp")) => {
                    let bytes = fs::read(&path).expect("golden data");
                    res.push((path, bytes));
                }
                false => {}
            }
        }
    }
    res.sort();
    assert!(res.len() > 80, "these cannot be all");
    res
}

/// Runs one round with a limit on memory beyond what was there before, and on time.
#[track_caller]
fn bounded(limit: usize, seed: u64, round: impl FnOnce()) {
    let start = Instant::now();
    let ((), used) = peak(round);
    assert!(used <= limit, "seed {seed}: {used} bytes were allocated, {limit} are bearable");
    let time = start.elapsed();
    assert!(time < Duration::from_secs(60), "seed {seed}: it took {time:?}");
}

/// Parsers alone, thousands of cases in a second.
#[test]
fn parsers_survive_any_bytes() {
    let _one = alone();
    let files = files();
    let n_rounds = rounds(10_000);
    let mut n_read = 0;
    for seed in 0..n_rounds {
        let mut random = Random(seed);
        let (path, bytes) = &files[random.below(files.len())];
        let mut bytes = bytes.clone();
        // An item within a file: it starts where an archive does.
        if path.extension().is_some_and(|it| it == "distcp") && bytes.starts_with(b"PK") {
            let starts: Vec<usize> = (0..bytes.len() - 80)
                .filter(|&at| {
                    bytes[at..].starts_with(b"PK\x03\x04")
                        && bytes[at + 30..].starts_with(b"archive/data.pkl")
                })
                .collect();
            let which = random.below(starts.len());
            let end = starts.get(which + 1).copied().unwrap_or(bytes.len());
            bytes = bytes[starts[which]..end].to_vec();
        }
        change(&mut bytes, &mut random);
        // A node of a pickle is larger than its opcode: some hundred bytes for each, and no more.
        bounded((1 << 20) + bytes.len() * 400, seed, || {
            let index = Metadata::read(&bytes).is_ok();
            let tensor = archive::read_tensor(&bytes).is_ok();
            let object = archive::read_object(&bytes).is_ok();
            n_read += u64::from(index || tensor || object);
            _ = sums::read(&bytes);
        });
    }
    // Changes reach what is behind the first checks, and are seen there.
    assert!((n_rounds / 20..n_rounds * 9 / 10).contains(&n_read), "{n_read} of {n_rounds}");
}

/// Whole folders: one file is changed, or is not there, or is another.
#[test]
fn folders_survive_any_change() {
    let _one = alone();
    let files = files();
    // Of its own, for a long run beside others.
    let name = format!("fuzz-{}", std::process::id());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    for seed in 0..rounds(10_000) / 10 {
        let mut random = Random(seed);
        let folder = files[random.below(files.len())].0.parent().expect("it is in a folder");
        let mut here: Vec<(String, Vec<u8>)> = files
            .iter()
            .filter(|it| it.0.parent() == Some(folder))
            .map(|it| (it.0.file_name().unwrap().to_str().unwrap().to_string(), it.1.clone()))
            .collect();
        let which = random.below(here.len());
        match random.below(8) {
            0 => _ = here.remove(which),
            1 => {
                let other = here[random.below(here.len())].1.clone();
                here[which].1 = other;
            }
            2 | 3 => {
                let index = here.iter().position(|it| it.0 == ".metadata").unwrap_or(which);
                change(&mut here[index].1, &mut random);
            }
            _ => change(&mut here[which].1, &mut random),
        }
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("the target folder is writable");
        for (name, bytes) in &here {
            fs::write(path.join(name), bytes).expect("the target folder is writable");
        }
        let size: usize = here.iter().map(|it| it.1.len()).sum();
        bounded((8 << 20) + 400 * size, seed, || {
            let Ok(found) = Checkpoint::open(&path) else { return };
            verify(&found);
            for key in found.objects() {
                _ = found.object(key);
            }
            for (key, tensor) in found.tensors() {
                // What the index says is not there need not be asked for.
                if tensor.bytes() < 1 << 20 {
                    _ = found.read_all(key);
                }
                let sizes = tensor.shape.iter().map(|&it| it.min(2)).collect();
                let offsets = tensor.shape.iter().map(|&it| it - it.min(2)).collect();
                let chunk = Chunk { offsets, sizes };
                let n: u64 = chunk.sizes.iter().product();
                if n < 1 << 16 {
                    let mut out = vec![0; (n * tensor.dtype.bytes()) as usize];
                    _ = found.read(key, &chunk, &mut out);
                }
            }
        });
    }
    let _ = fs::remove_dir_all(&path);
}

/// Strings, tuples and lists that are shared and doubled: small files that stand for huge values.
#[test]
fn repetition_is_not_expanded() {
    let _one = alone();
    // t0 = (); t1 = (t0, t0); .. 60 times.
    let mut tuples = Vec::from(*b"\x80\x02)q\x00");
    for it in 0..60u8 {
        tuples.extend([b'0', b'h', it, b'h', it, 0x86, b'q', it + 1]);
    }
    tuples.push(b'.');
    // A list that contains itself.
    let cycle = b"\x80\x02]q\x00h\x00a.";
    // A string of 64 KiB, 64 Ki times.
    let mut text = Vec::from(*b"\x80\x02]q\x00(X\x00\x00\x01\x00");
    text.extend([b'a'; 1 << 16]);
    text.extend(b"q\x01");
    text.extend(b"h\x01".repeat(1 << 16));
    text.extend(b"e.");
    for pickle in [&tuples[..], cycle, &text] {
        let limit = (1 << 20) + 400 * pickle.len();
        bounded(limit, 0, || {
            let read =
                checkpoint::pickle::read::read(pickle, checkpoint::pickle::read::Kind::Object);
            let value = read.expect("it is well formed").value();
            assert!(value.is_err(), "it would be huge");
        });
    }
}
