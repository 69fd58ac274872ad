//! How much memory an export takes.

#[path = "memory/peak.rs"]
mod memory;

use std::fs;
use std::path::Path;

use checkpoint::full::Writer;
use checkpoint::hf::export::{self, Options};
use checkpoint::mapping::Mapping;
use checkpoint::{Checkpoint, CheckpointError, PathPart, StoredType};
use ir::placement::Chunk;
use memory::{alone, peak};

/// A side of the matrices, which have 64 MiB in f32.
const SIDE: u64 = 4096;
/// The memory of a band, of its conversion and its transpose, and of the buffer of the file.
const MOST: usize = 40 << 20;

/// Weights go out in bands, whether they are stored as they are or transposed, as GPT-2's.
#[test]
fn an_export_holds_bands_and_not_tensors() {
    let _one = alone();
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export_memory");
    let _ = fs::remove_dir_all(&root);
    let names = ["plain.weight", "transformer.h.0.mlp.c_fc.weight"];
    let mut out = Writer::create(&root.join("ckpt"), 0).unwrap();
    for name in names {
        let path = ["model", name].map(|it| PathPart::Key(it.to_string())).to_vec();
        let keys = [(format!("model.{name}"), path)];
        let rows = |put: &mut checkpoint::full::Put<'_>| {
            (0..SIDE).try_for_each(|row| {
                let row: Vec<u8> = (0..SIDE)
                    .flat_map(|it| ((row % 8 * 16 + it % 16) as f32).to_le_bytes())
                    .collect();
                put(&row)
            })
        };
        out.tensor::<CheckpointError>(&keys, StoredType::F32, &[SIDE, SIDE], rows).unwrap();
    }
    out.finish().unwrap();
    let source = Checkpoint::open(&root.join("ckpt")).unwrap();
    let mapping = Mapping::built_in("hf").unwrap();
    let options = Options { mapping: &mapping, dtype: Some(StoredType::Bf16), max_shard: u64::MAX };
    let export = export::plan(&source, &options).unwrap();
    let (written, bytes) = peak(|| export.write(&root.join("hf"), None).unwrap());
    assert_eq!((written.tensors, written.bytes), (2, 4 * SIDE * SIDE));
    assert!(bytes < MOST, "{bytes} bytes");
    let exported = Checkpoint::open(&root.join("hf")).unwrap();
    // Rows 3000 and 3001, from column 17 on: 3000 is 0 modulo 8, and 8 modulo 16.
    let chunk = Chunk { offsets: [3000, 17][..].into(), sizes: [2, 2][..].into() };
    for (name, expect) in [(names[0], [1.0, 2.0, 17.0, 18.0]), (names[1], [24.0, 40.0, 25.0, 41.0])]
    {
        let mut found = [0; 8];
        exported.read(name, &chunk, &mut found).unwrap();
        let found: Vec<f64> = found.chunks(2).map(|it| StoredType::Bf16.numbers(it)[0]).collect();
        assert_eq!(found, expect, "{name}");
    }
    fs::remove_dir_all(&root).unwrap();
}
