//! Checkpoints that PyTorch wrote, against the tensors that it had in memory.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, PathPart};
use ir::placement::Chunk;
use safetensors::SafeTensors;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dcp").join(name)
}

/// Compares every tensor with `full.safetensors`.
#[track_caller]
fn check_tensors(found: &Checkpoint, name: &str) {
    let bytes = fs::read(golden(name).join("full.safetensors")).expect("golden data");
    let expect = SafeTensors::deserialize(&bytes).expect("golden data");
    let keys = |it: Vec<&str>| it.iter().map(|it| it.to_string()).collect::<Vec<String>>();
    let mut names = keys(expect.names().into_iter().collect());
    names.sort();
    assert_eq!(keys(found.tensors().map(|it| it.0).collect()), names, "{name}");
    for (key, tensor) in found.tensors() {
        let view = expect.tensor(key).expect("the names are the same");
        assert!(found.read_all(key).unwrap() == view.data(), "{name}: `{key}` differs");
        // What safetensors did not know is there as bytes, with a dim of them for a complex number.
        let stored = tensor.dtype.safetensors();
        if view.dtype().to_string() != "U8" || stored == Some("U8") {
            assert_eq!(Some(view.dtype().to_string().as_str()), stored, "{name}: `{key}`");
            let shape: Vec<u64> = view.shape().iter().map(|&it| it as u64).collect();
            assert_eq!(shape, tensor.shape, "{name}: `{key}`");
        }
    }
}

fn path(it: &[PathPart]) -> serde_json::Value {
    let part = |it: &PathPart| match it {
        PathPart::Key(it) => serde_json::Value::from(it.as_str()),
        PathPart::Index(it) => (*it).into(),
    };
    it.iter().map(part).collect()
}

#[test]
fn every_checkpoint_of_pytorch_is_read_bit_for_bit() {
    let mut n = 0;
    for entry in fs::read_dir(golden("")).expect("golden data") {
        let name = entry.expect("golden data").file_name().into_string().expect("plain names");
        let found =
            Checkpoint::open(&golden(&name).join("dcp")).unwrap_or_else(|it| panic!("{it}"));
        assert_eq!(found.problems(), [""; 0], "{name}");
        check_tensors(&found, &name);
        n += 1;
        let text = fs::read(golden(&name).join("info.json")).expect("golden data");
        let info: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&text).expect("JSON");
        let Some(values) = info.get("python_values").and_then(|it| it.as_object()) else {
            continue;
        };
        let keys: Vec<&str> = values.keys().map(String::as_str).collect();
        let mut found_keys: Vec<&str> = found.objects().collect();
        found_keys.sort_unstable();
        assert_eq!(found_keys, keys, "{name}");
        for (key, value) in values {
            // As Python's `repr` prints it.
            let found = found.object(key).unwrap().to_string();
            assert_eq!(Some(found.as_str()), value.as_str(), "{name}: `{key}`");
        }
        // Files of Hugging Face have names, and no paths.
        let has_paths = golden(&name).join("dcp/.metadata").exists();
        for (key, expect) in
            info["planner_data"].as_object().filter(|_| has_paths).into_iter().flatten()
        {
            let tensor = found.tensor(key).map(|it| &it.path);
            let stored = tensor.or_else(|| found.stored_object(key).map(|it| &it.path));
            assert_eq!(&path(stored.expect("a value")), expect, "{name}: `{key}`");
        }
    }
    assert_eq!(n, 18);
}

#[test]
fn shards_that_were_consolidated_are_a_checkpoint_too() {
    let found = Checkpoint::open(&golden("hf_consolidated_w2/dcp/sharded")).unwrap();
    check_tensors(&found, "hf_consolidated_w2");
}

#[test]
fn a_wrong_box_is_put_right_with_a_warning() {
    let found = Checkpoint::open(&golden("bad_torch_q1_dp4_tp2_rows17/dcp")).unwrap();
    let [warning] = found.warnings() else { panic!("{:?}", found.warnings()) };
    assert!(warning.starts_with("`w` [17, 1]: the index gives boxes"), "{warning}");
    assert!(warning.contains("over dp=4 of Shard(0) over tp=2"), "{warning}");
}

/// Every box of a matrix, against the same box of the whole.
#[test]
fn boxes_are_parts_of_the_whole() {
    for (name, key) in [
        ("tp2_dp2_uneven_vocab", "tok_embeddings.weight"),
        ("fmt_zstd_w2", "model.output.weight"),
        ("fmt_safetensors_w2", "model.output.weight"),
        ("single_mixed", "t.transposed"),
    ] {
        let found = Checkpoint::open(&golden(name).join("dcp")).unwrap();
        let key = found.tensors().map(|it| it.0).find(|it| it.ends_with(key)).expect("the key");
        let tensor = found.tensor(key).expect("the key");
        let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
        let all = found.read_all(key).unwrap();
        let unit = tensor.dtype.bytes();
        for row in 0..rows {
            for column in 0..columns {
                for (n_rows, n_columns) in
                    [(1, columns - column), (rows - row, 1), (rows - row, columns - column), (0, 1)]
                {
                    let offsets = [row, column];
                    let chunk = Chunk {
                        offsets: offsets[..].into(),
                        sizes: [n_rows, n_columns][..].into(),
                    };
                    let mut out = vec![0xaa; (n_rows * n_columns * unit) as usize];
                    found.read(key, &chunk, &mut out).unwrap();
                    let expect = (row..row + n_rows).flat_map(|it| {
                        let start = ((it * columns + column) * unit) as usize;
                        all[start..][..(n_columns * unit) as usize].to_vec()
                    });
                    assert!(out == expect.collect::<Vec<u8>>(), "{name}: {chunk:?}");
                }
            }
        }
    }
}
