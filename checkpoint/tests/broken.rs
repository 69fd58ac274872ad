//! What is wrong with a checkpoint is found and named, all of it; and nothing in a file does harm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use checkpoint::archive::{object_item, tensor_item};
use checkpoint::diff::{Change, diff};
use checkpoint::pickle::Value;
use checkpoint::sums::{self, Sum, crc32};
use checkpoint::verify::{Problem, verify};
use checkpoint::{
    Checkpoint, Encoding, Item, Metadata, PathPart, StoredChunk, StoredObject, StoredTensor,
    StoredType,
};
use ir::placement::Chunk;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/dcp");

fn golden(name: &str) -> PathBuf {
    Path::new(GOLDEN).join(name).join("dcp")
}

/// A folder of its own for one test.
fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("the target folder is writable");
    path
}

/// A copy of a golden checkpoint.
fn copied(test: &str, name: &str) -> PathBuf {
    let path = folder(test);
    for entry in fs::read_dir(golden(name)).expect("golden data") {
        let entry = entry.expect("golden data");
        fs::copy(entry.path(), path.join(entry.file_name()))
            .expect("the target folder is writable");
    }
    path
}

/// Rows of a matrix of 2 columns, of f32 counting from 0.
fn rows(start: u64, n: u64) -> Vec<u8> {
    (2 * start..2 * (start + n)).flat_map(|it| (it as f32).to_le_bytes()).collect()
}

/// Two files: `w` f32[6, 2] in two boxes of rows, `v`, the same again, `lr` 0.5; with checksums.
fn written(test: &str) -> PathBuf {
    let path = folder(test);
    let mut index = Metadata {
        files: vec!["__0_0.distcp".into(), "__1_0.distcp".into()],
        ..Metadata::default()
    };
    for key in ["v", "w"] {
        let tensor = StoredTensor {
            dtype: StoredType::F32,
            shape: vec![6, 2],
            chunks: Vec::new(),
            path: vec![PathPart::Key(key.into())],
        };
        index.tensors.insert(key.into(), tensor);
    }
    for file in 0..2u32 {
        let (mut bytes, mut all) = (Vec::new(), Vec::new());
        for (key, tensor) in &mut index.tensors {
            let (start, data) = (u64::from(file) * 3, rows(u64::from(file) * 3, 3));
            let (head, tail) = tensor_item(StoredType::F32, &[3, 2], crc32(&data));
            let (at, len) = (bytes.len() as u64, (head.len() + data.len() + tail.len()) as u64);
            let item = Item { file, offset: at, len, encoding: Encoding::Plain };
            let chunk = Chunk { offsets: [start, 0][..].into(), sizes: [3, 2][..].into() };
            tensor.chunks.push(StoredChunk { chunk, item });
            let item = [head, data, tail].concat();
            let (crc32, offsets, pieces) = (crc32(&item), Some(vec![start, 0]), Vec::new());
            all.push(Sum { key: key.clone(), offsets, at, len, crc32, pieces });
            bytes.extend(item);
        }
        if file == 0 {
            let item = object_item(&Value::Float(0.5));
            let (offset, len) = (bytes.len() as u64, item.len() as u64);
            let (key, crc32, pieces) = ("lr".to_string(), crc32(&item), Vec::new());
            all.push(Sum { key, offsets: None, at: offset, len, crc32, pieces });
            let item_at = Item { file, offset, len, encoding: Encoding::Plain };
            let object = StoredObject { item: item_at, path: vec![PathPart::Key("lr".into())] };
            index.objects.insert("lr".into(), object);
            bytes.extend(item);
        }
        let name = &index.files[file as usize];
        fs::write(path.join(name), bytes).unwrap();
        let mut text = Vec::new();
        sums::write(&all, &mut text).unwrap();
        fs::write(path.join(sums::file_name(name)), text).unwrap();
    }
    save(&index, &path);
    path
}

fn save(index: &Metadata, path: &Path) {
    let mut bytes = Vec::new();
    index.write(&mut bytes).unwrap();
    fs::write(path.join(".metadata"), bytes).unwrap();
}

fn index_of(path: &Path) -> Metadata {
    Metadata::read(&fs::read(path.join(".metadata")).unwrap()).unwrap()
}

fn without_sums(path: &Path) {
    for name in ["__0_0.distcp.sums", "__1_0.distcp.sums"] {
        fs::remove_file(path.join(name)).unwrap();
    }
}

fn edit(path: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path.join(name)).unwrap();
    change(&mut bytes);
    fs::write(path.join(name), bytes).unwrap();
}

fn problems(path: &Path) -> Vec<Problem> {
    verify(&Checkpoint::open(path).unwrap()).problems
}

/// What is found: code, file, key, byte, and words of the message.
#[track_caller]
fn check(path: &Path, expect: &[(&str, &str, &str, Option<u64>, &str)]) {
    let found = problems(path);
    let text = |it: &Option<String>| it.clone().unwrap_or_default();
    let fields = |it: &Problem| (it.code.to_string(), text(&it.file), text(&it.key), it.at);
    let expected: Vec<_> = expect
        .iter()
        .map(|it| (it.0.to_string(), it.1.to_string(), it.2.to_string(), it.3))
        .collect();
    assert_eq!(found.iter().map(fields).collect::<Vec<_>>(), expected, "{found:#?}");
    for (it, expect) in found.iter().zip(expect) {
        assert!(it.message.contains(expect.4), "{}", it.message);
    }
}

const FIRST: &str = "__0_0.distcp";
const SECOND: &str = "__1_0.distcp";

/// Items of `written`: their length, and where data are in each.
const ITEM: u64 = 768;
const DATA: u64 = 384;

#[test]
fn what_is_whole_has_no_problem() {
    let path = written("whole");
    check(&path, &[]);
    let found = Checkpoint::open(&path).unwrap();
    assert_eq!(found.read_all("w").unwrap(), rows(0, 6));
    assert_eq!(found.object("lr").unwrap(), Value::Float(0.5));
    without_sums(&path);
    check(&path, &[]);
    for entry in fs::read_dir(GOLDEN).expect("golden data") {
        let name = entry.expect("golden data").file_name().into_string().expect("plain names");
        let found = verify(&Checkpoint::open(&golden(&name)).unwrap());
        assert_eq!(found.problems, [], "{name}");
        let no_sums = name.starts_with("hf_") || name == "fmt_safetensors_w2";
        assert_eq!(found.unsummed_bytes > 0, no_sums, "{name}");
    }
}

// C49
#[test]
fn a_bit_that_flipped_is_found() {
    let path = written("flipped");
    let flip = |at: u64| move |it: &mut Vec<u8>| it[at as usize] ^= 4;
    // Data of `w` in the second file, and padding of `v` in the first.
    edit(&path, SECOND, flip(ITEM + DATA + 5));
    edit(&path, FIRST, flip(DATA - 3));
    check(
        &path,
        &[
            ("PL0706", FIRST, "v", Some(0), "the checksum of 768 bytes is"),
            ("PL0706", SECOND, "w", Some(ITEM), "the checksum of 768 bytes is"),
        ],
    );
    // The archive's own sums do not know the padding.
    without_sums(&path);
    let at = Some(ITEM + DATA);
    check(&path, &[("PL0706", SECOND, "w", at, "the checksum of 24 bytes is")]);
}

#[test]
fn what_pytorch_saved_has_checksums_too() {
    let path = copied("flipped_torch", "fsdp2_w2_adamw");
    let index = index_of(&path);
    let stored = &index.tensors["model.norm.weight"].chunks[1].item;
    let file = index.files[stored.file as usize].clone();
    edit(&path, &file, |it| it[stored.offset as usize + 704] ^= 1);
    let at = Some(stored.offset + 704);
    check(&path, &[("PL0706", &file, "model.norm.weight", at, "the checksum of 16 bytes is")]);
}

#[test]
fn a_file_that_is_cut_off_is_found() {
    let path = written("truncated");
    edit(&path, SECOND, |it| it.truncate(ITEM as usize + 9));
    check(
        &path,
        &[("PL0705", SECOND, "w", Some(ITEM), "the file ends at byte 777: it is cut off")],
    );
}

#[test]
fn a_file_that_is_cut_off_is_one_problem() {
    let path = written("truncated_early");
    edit(&path, FIRST, |it| it.truncate(9));
    let text = "the file ends at byte 9: it is cut off; and 2 more items";
    check(&path, &[("PL0705", FIRST, "v", Some(0), text)]);
}

/// Opening a pipe waits for ever, and `/dev/zero` has no end.
#[test]
fn only_regular_files_are_read() {
    let pipe = |path: &Path| {
        let _ = fs::remove_file(path);
        assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo runs").success());
    };
    let text = "it is no regular file";
    let path = written("pipes");
    pipe(&path.join(sums::file_name(FIRST)));
    check(&path, &[("PL0702", FIRST, "", None, text)]);
    let path = written("pipe_of_data");
    pipe(&path.join(SECOND));
    check(&path, &[("PL0702", SECOND, "v", Some(0), text)]);
    pipe(&path.join(".metadata"));
    for path in [&path, &path.join(SECOND), Path::new("/dev/zero")] {
        let error = Checkpoint::open(path).unwrap_err();
        assert!(error.code() == "PL0702" && error.to_string().contains(text), "{error}");
    }
}

/// What a file says is not printed without end.
#[test]
fn a_name_in_latest_is_quoted_in_part() {
    let path = folder("long_latest");
    fs::write(path.join("latest"), "x".repeat(1 << 20)).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains(&format!("names `{}..`", "x".repeat(100))), "{error}");
    let header = format!("{{\"w\": \"{}\"}}", "x".repeat(1 << 20));
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(path.join("a.safetensors"), bytes).unwrap();
    let error = Checkpoint::open(&path.join("a.safetensors")).unwrap_err().to_string();
    assert!(
        error.contains("byte 8: its header: invalid type") && error.chars().count() < 2000,
        "{error}"
    );
}

#[test]
fn files_that_are_no_checkpoint_are_named() {
    let path = folder("other_files");
    let check = |name: &str, content: &[u8], expect: &str| {
        fs::write(path.join(name), content).unwrap();
        let error = Checkpoint::open(&path.join(name)).unwrap_err();
        assert!(error.code() == "PL0701" && error.to_string().contains(expect), "{error}");
    };
    let (head, tail) = tensor_item(StoredType::F32, &[1], crc32(&[0; 4]));
    check("model.pt", &[head, vec![0; 4], tail].concat(), "one file of `torch.save`; in Python");
    check("llama.plan", b"plan 1", "it is a plan; checkpoints are");
    check("llama.ron", b"Model(name: \"a\")", "it is a model; checkpoints are");
}

#[test]
fn files_that_were_swapped_are_found() {
    let swap = |path: &Path, a: &str, b: &str| {
        let [first, second] = [a, b].map(|it| path.join(it));
        fs::rename(&first, path.join("tmp")).unwrap();
        fs::rename(&second, &first).unwrap();
        fs::rename(path.join("tmp"), &second).unwrap();
    };
    let path = written("swapped");
    swap(&path, FIRST, SECOND);
    let found = problems(&path);
    assert_eq!(found.len(), 5, "{found:#?}");
    assert!(found.iter().all(|it| it.code == "PL0706" || it.code == "PL0705"), "{found:#?}");
    // With its checksums, a file still says what it is of.
    swap(&path, &sums::file_name(FIRST), &sums::file_name(SECOND));
    let found = problems(&path);
    assert!(found[0].message.contains("has `v` [3, 0] of 768 bytes here"), "{found:#?}");
    assert_eq!(found.len(), 5, "{found:#?}");
}

#[test]
fn a_missing_file_is_named_once() {
    let path = written("missing");
    fs::remove_file(path.join(SECOND)).unwrap();
    let text = "it holds `v` at byte 0 and 1 more items";
    check(&path, &[("PL0702", SECOND, "v", Some(0), text)]);
}

#[test]
fn boxes_that_leave_a_hole_or_overlap_are_found() {
    let path = written("boxes");
    let mut index = index_of(&path);
    index.tensors.get_mut("v").unwrap().chunks.pop();
    index.tensors.get_mut("w").unwrap().chunks[1].chunk.offsets[0] = 2;
    save(&index, &path);
    without_sums(&path);
    check(
        &path,
        &[
            ("PL0708", "", "v", None, "element [3, 0] is in no box"),
            ("PL0708", "", "w", None, "element [2, 0] is in 2 boxes"),
        ],
    );
    let error = Checkpoint::open(&path).unwrap().read_all("v").unwrap_err();
    assert_eq!(error.code(), "PL0708");
}

#[test]
fn items_that_are_not_what_the_index_says_are_found() {
    let path = written("disagrees");
    let mut index = index_of(&path);
    index.tensors.get_mut("v").unwrap().dtype = StoredType::I32;
    let w = index.tensors.get_mut("w").unwrap();
    w.shape = vec![2, 6];
    w.chunks[0].chunk.sizes = [2, 3][..].into();
    (w.chunks[1].chunk.offsets, w.chunks[1].chunk.sizes) = ([0, 3][..].into(), [2, 3][..].into());
    save(&index, &path);
    without_sums(&path);
    let text = |it| format!("the item is float32[3, 2], and the index says {it}");
    let (v, w) = (&text("int32[3, 2]"), &text("float32[2, 3]"));
    check(
        &path,
        &[
            ("PL0705", FIRST, "v", Some(0), v),
            ("PL0705", FIRST, "w", Some(ITEM), w),
            ("PL0705", SECOND, "v", Some(0), v),
            ("PL0705", SECOND, "w", Some(ITEM), w),
        ],
    );
}

#[test]
fn keys_may_share_an_item() {
    let path = written("shared");
    let mut index = index_of(&path);
    let alias = index.tensors["w"].clone();
    index
        .tensors
        .insert("tied".into(), StoredTensor { path: vec![PathPart::Key("tied".into())], ..alias });
    save(&index, &path);
    check(&path, &[]);
    assert_eq!(verify(&Checkpoint::open(&path).unwrap()).n_items, 5);
}

#[test]
fn differences_are_counted() {
    let (a, b) = (written("diff_a"), written("diff_b"));
    let all = |_: &str| true;
    let open = |it: &Path| Checkpoint::open(it).unwrap();
    assert!(diff(&open(&a), &open(&b), all).unwrap().is_empty());
    // Row 4 of `w`: 8 becomes 10.5, and the item has the checksum of that.
    without_sums(&b);
    let mut data = rows(3, 3);
    data[8..12].copy_from_slice(&10.5f32.to_le_bytes());
    let (head, tail) = tensor_item(StoredType::F32, &[3, 2], crc32(&data));
    let item = [head, data, tail].concat();
    edit(&b, SECOND, |it| it[ITEM as usize..][..item.len()].copy_from_slice(&item));
    let mut index = index_of(&b);
    let mut v = index.tensors.remove("v").unwrap();
    v.path.clear();
    index.tensors.insert("new".into(), v);
    save(&index, &b);
    let found = diff(&open(&a), &open(&b), all).unwrap();
    assert_eq!(
        (found.only_first, found.only_second),
        (vec!["v".to_string()], vec!["new".to_string()])
    );
    let values = Change::Values {
        dtypes: (StoredType::F32, StoredType::F32),
        n_differ: 1,
        n_elements: 12,
        largest: 2.5,
        first: Some(vec![4, 0]),
    };
    assert_eq!((found.n_same, found.changed), (1, vec![("w".to_string(), values)]));
    // However it was cut: two ranks and one.
    let found =
        diff(&open(&golden("t215_single_mixed")), &open(&golden("single_mixed")), all).unwrap();
    assert!(found.is_empty(), "{found:#?}");
}

/// One element with a stride of 0 stands for 2^34, of which a reader would make 64 GiB.
#[test]
fn an_item_that_repeats_elements_beyond_its_file_is_refused() {
    let path = folder("expand");
    let bytes = include_bytes!("cases/expand.distcp");
    fs::write(path.join(FIRST), bytes).unwrap();
    let mut index = Metadata { files: vec![FIRST.into()], ..Metadata::default() };
    let item = Item { file: 0, offset: 0, len: bytes.len() as u64, encoding: Encoding::Plain };
    let chunk = Chunk { offsets: [0][..].into(), sizes: [1 << 34][..].into() };
    let big = StoredTensor {
        dtype: StoredType::F32,
        shape: vec![1 << 34],
        chunks: vec![StoredChunk { chunk, item }],
        path: vec![PathPart::Key("big".into())],
    };
    index.tensors.insert("big".into(), big);
    save(&index, &path);
    let why = "are 68719476736 bytes, and the file has 1577: the item repeats elements";
    check(&path, &[("PL0705", FIRST, "big", Some(0), why)]);
    let opened = Checkpoint::open(&path).unwrap();
    let chunk = Chunk { offsets: [5][..].into(), sizes: [2][..].into() };
    let error = opened.read("big", &chunk, &mut [0; 8]).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    assert!(opened.read_all("big").unwrap_err().to_string().contains(why));
    let target = path.join("full.safetensors");
    assert!(checkpoint::full::export(&opened, &target).unwrap_err().to_string().contains(why));
    let left = fs::read_dir(&path).unwrap().count();
    assert_eq!(left, 2, "the index and the file: an export that fails leaves nothing");
}

#[test]
fn code_in_a_pickle_is_refused_by_name() {
    let path = written("code");
    let mut text = Vec::from(*b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touch\x85R.");
    fs::write(path.join(".metadata"), &text).unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert_eq!(error.code(), "PL0704");
    assert!(error.to_string().contains(".metadata`, byte 2: names `os.system`"), "{error}");
    // Protocol 4 takes both names from the stack.
    text = Vec::from(*b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.");
    fs::write(path.join(".metadata"), &text).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("names `builtins.eval`, which no index needs"), "{error}");

    // In an object, whose pickle is as long as the one that it replaces.
    let path = written("code_in_object");
    without_sums(&path);
    let at = index_of(&path).objects["lr"].item.offset as usize + 64;
    edit(&path, FIRST, |it| {
        assert_eq!(it[at..at + 3], [0x80, 2, b'G']);
        it[at..at + 12].copy_from_slice(b"\x80\x02cos\nfork\n.");
    });
    let error = Checkpoint::open(&path).unwrap().object("lr").unwrap_err();
    assert_eq!(error.code(), "PL0704");
    assert!(error.to_string().contains("`lr`, byte 1602: names `os.fork`"), "{error}");
    assert!(
        problems(&path).iter().any(|it| it.code == "PL0706" && it.key.as_deref() == Some("lr"))
    );
}
