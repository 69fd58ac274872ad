//! Weights under foreign names, in and out, and whole states in one file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::hf::export::{self, Export};
use checkpoint::hf::import::{self, Import, Options, Written};
use checkpoint::hf::params::Param;
use checkpoint::hf::write::{Entry, SafetensorsFile, sort};
use checkpoint::hf::{Mismatch, TransferError};
use checkpoint::mapping::Mapping;
use checkpoint::rename::Renames;
use checkpoint::{Checkpoint, PathPart, StoredType, full};
use safetensors::SafeTensors;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
}

/// An empty folder of one test.
fn folder(test: &str) -> PathBuf {
    let res = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&res);
    fs::create_dir_all(&res).expect("the target folder is writable");
    res
}

/// A tensor of f32.
type Tensor = (&'static str, Vec<u64>, Vec<f32>);

fn write(path: &Path, tensors: &[(String, Vec<u64>, Vec<f32>)]) {
    let entry = |(key, shape, _): &(String, Vec<u64>, Vec<f32>)| Entry {
        key: key.clone(),
        dtype: StoredType::F32,
        shape: shape.clone(),
    };
    let mut entries: Vec<Entry> = tensors.iter().map(entry).collect();
    sort(&mut entries);
    let mut file = SafetensorsFile::create(path, &entries, &BTreeMap::new()).unwrap();
    for it in &entries {
        let values = &tensors.iter().find(|other| other.0 == it.key).expect("a tensor").2;
        let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_le_bytes()).collect();
        file.write(&bytes).unwrap();
    }
    file.finish().unwrap();
}

fn owned(tensors: &[Tensor]) -> Vec<(String, Vec<u64>, Vec<f32>)> {
    tensors.iter().map(|it| (it.0.to_string(), it.1.clone(), it.2.clone())).collect()
}

fn floats(source: &Checkpoint, key: &str) -> Vec<f32> {
    let bytes = source.read_all(key).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&it| f32::from_le_bytes(it)).collect()
}

fn param(name: &str, shape: &[u64]) -> Param {
    let (dtype, head_dim) = (StoredType::F32, None);
    Param { name: name.into(), aliases: Vec::new(), shape: shape.into(), dtype, head_dim }
}

static AS_THEY_ARE: Renames = Renames(Vec::new());

fn options(mapping: &Mapping) -> Options<'_> {
    Options {
        mapping,
        prefix: "",
        renames: &AS_THEY_ARE,
        saved_tp: None,
        cast: false,
        allow_missing: &[],
        allow_unexpected: &[],
    }
}

fn hf() -> Mapping {
    Mapping::built_in("hf").expect("it is built in")
}

/// The fused tensor of a TransformerEngine checkpoint whose row `r` is row `rows[r]` of its segments, one
/// after the other; imported, each segment is in order.
#[track_caller]
fn check_te(case: &str, mapping: &str, key: &str, params: &[Param], saved_tp: Option<u64>) {
    let bytes = fs::read(golden("hf/te_rows.safetensors")).expect("golden data");
    let file = SafeTensors::deserialize(&bytes).expect("golden data");
    let rows = file.tensor(&format!("layout_{case}/te_global_row_to_canonical"));
    let rows = rows.expect("golden data").data().as_chunks::<4>().0;
    let values: Vec<f32> = rows.iter().map(|&it| i32::from_le_bytes(it) as f32).collect();
    let folder = folder(&format!("te_{case}"));
    let n = values.len() as u64;
    write(&folder.join("te.safetensors"), &[(key.to_string(), vec![n, 1], values)]);
    let source = Checkpoint::open(&folder.join("te.safetensors")).unwrap();
    let mapping = Mapping::built_in(mapping).expect("it is built in");
    let options = Options { saved_tp, ..options(&mapping) };
    let import = import::plan(&source, None, params.to_vec(), &options).unwrap();
    import.write(&folder.join("ckpt")).unwrap();
    let found = Checkpoint::open(&folder.join("ckpt")).unwrap();
    let mut next = 0;
    for it in params {
        let expect: Vec<f32> = (next..next + it.shape[0]).map(|it| it as f32).collect();
        assert_eq!(floats(&found, &format!("model.{}", it.name)), expect, "{case}: {}", it.name);
        next += it.shape[0];
    }
    assert_eq!(next, n);
}

/// Rows as TransformerEngine has them, from its own code: `tests/golden/hf/README.md`.
#[test]
fn fused_rows_of_transformer_engine_come_apart() {
    let prefix = "model.layers.0.";
    let named = |name: &str, rows: u64| param(&format!("{prefix}{name}"), &[rows, 1]);
    for tp in [1, 2, 4] {
        let params =
            [named("layernorm_mlp.fc1_gate_weight", 24), named("layernorm_mlp.fc1_weight", 24)];
        let key = "model.layers.0.layernorm_mlp.fc1_weight";
        check_te(&format!("fc1_gated_ffn24_tp{tp}"), "te", key, &params, Some(tp));
        let params = [named("mlp.gate_proj.weight", 24), named("mlp.up_proj.weight", 24)];
        check_te(&format!("fc1_gated_ffn24_tp{tp}"), "te", key, &params, Some(tp));
    }
    let qkv = |heads: u64, groups: u64| {
        let segment = |name: &str, n: u64| Param {
            head_dim: Some(4),
            ..named(&format!("self_attention.layernorm_qkv.{name}_weight"), n * 4)
        };
        [segment("query", heads), segment("key", groups), segment("value", groups)]
    };
    let key = "model.layers.0.self_attention.layernorm_qkv.weight";
    check_te("qkv_interleaved_h8_g8_tp1", "te", key, &qkv(8, 8), None);
    check_te("qkv_interleaved_h8_g2_tp1", "te", key, &qkv(8, 2), None);
    check_te("qkv_interleaved_h8_g2_tp2", "te", key, &qkv(8, 2), None);
    check_te("qkv_interleaved_h8_g4_tp4", "te", key, &qkv(8, 4), None);
    check_te("qkv_flat_h8_g4_tp4", "te-flat-qkv", key, &qkv(8, 4), Some(4));
}

/// What planc cannot know is asked for, not guessed; what has no counterpart needs no permission.
#[test]
fn rows_of_unknown_ranks_are_refused() {
    let folder = folder("te_unknown");
    let path = folder.join("te.safetensors");
    let tensors = [
        ("m.fc1_weight", vec![4, 1], vec![0.0; 4]),
        ("m.fc1_bias", vec![0], vec![]),
        ("m._extra_state", vec![0], vec![]),
    ];
    write(&path, &owned(&tensors));
    let source = Checkpoint::open(&path).unwrap();
    let te = Mapping::built_in("te").expect("it is built in");
    let gated = vec![param("m.fc1_gate_weight", &[2, 1]), param("m.fc1_weight", &[2, 1])];
    let error = import::plan(&source, None, gated.clone(), &options(&te)).unwrap_err();
    assert_eq!(error, TransferError::SavedTp { key: "m.fc1_weight".into() });
    let known = Options { saved_tp: Some(2), ..options(&te) };
    let import = import::plan(&source, None, gated.clone(), &known).unwrap();
    assert_eq!(import.ignored, ["m._extra_state", "m.fc1_bias"]);
    // Three ranks cannot have held equal parts of two rows.
    let error = import::plan(&source, None, gated, &Options { saved_tp: Some(3), ..known });
    assert!(error.unwrap_err().to_string().contains("is in 3 blocks"));
    // Without a gate there is no order.
    import::plan(&source, None, vec![param("m.fc1_weight", &[4, 1])], &options(&te)).unwrap();
}

/// C13: a fused gate and up projection is cut segment by segment, whatever ranks saved it.
#[test]
fn segments_that_eight_ranks_saved_are_whole() {
    let (rows, columns, tp) = (16, 3, 8);
    let value = |segment: u64, row: u64, column: u64| (segment * 1000 + row * 10 + column) as f32;
    let segment = |segment: u64, rows: std::ops::Range<u64>| {
        rows.flat_map(move |row| (0..columns).map(move |column| value(segment, row, column)))
    };
    let each = rows / tp;
    let fused = (0..tp).flat_map(|it| {
        let part = it * each..(it + 1) * each;
        segment(0, part.clone()).chain(segment(1, part))
    });
    let folder = folder("te_eight");
    let tensor = ("l.layernorm_mlp.fc1_weight", vec![2 * rows, columns], fused.collect());
    write(&folder.join("te.safetensors"), &owned(&[tensor]));
    let source = Checkpoint::open(&folder).unwrap();
    let te = Mapping::built_in("te").expect("it is built in");
    let names = ["l.mlp.gate_proj.weight", "l.mlp.up_proj.weight"];
    let params = names.map(|it| param(it, &[rows, columns])).to_vec();
    let options = Options { saved_tp: Some(tp), ..options(&te) };
    let import = import::plan(&source, None, params, &options).unwrap();
    import.write(&folder.join("ckpt")).unwrap();
    let found = Checkpoint::open(&folder.join("ckpt")).unwrap();
    for (i, name) in names.iter().enumerate() {
        let expect: Vec<f32> = segment(i as u64, 0..rows).collect();
        assert_eq!(floats(&found, &format!("model.{name}")), expect, "{name}");
    }
}

/// A head that is tied to its embedding.
fn tied() -> Vec<Param> {
    let mut embedding = param("model.embed_tokens.weight", &[3, 2]);
    embedding.aliases.push("lm_head.weight".into());
    vec![embedding, param("model.norm.weight", &[2])]
}

const NORM: (&str, f32) = ("model.norm.weight", 9.0);

#[track_caller]
fn tied_source(test: &str, names: &[(&'static str, f32)]) -> (PathBuf, Checkpoint) {
    let folder = folder(test);
    let tensor = |&(name, first): &(&'static str, f32)| match name {
        "model.norm.weight" => (name, vec![2], vec![first, 8.0]),
        _ => (name, vec![3, 2], vec![first, 1.0, 2.0, 3.0, 4.0, 5.0]),
    };
    let tensors: Vec<Tensor> = names.iter().map(tensor).collect();
    write(&folder.join("model.safetensors"), &owned(&tensors));
    let source = Checkpoint::open(&folder).unwrap();
    (folder, source)
}

/// C15: bytes once, under both names; a Hugging Face export has one of them.
#[test]
fn tied_weights_are_stored_once() {
    let mapping = hf();
    for (test, names) in [
        ("tied_embedding", vec![("model.embed_tokens.weight", 7.0), NORM]),
        ("tied_head", vec![("lm_head.weight", 7.0), NORM]),
        ("tied_both", vec![("model.embed_tokens.weight", 7.0), ("lm_head.weight", 7.0), NORM]),
    ] {
        let (folder, source) = tied_source(test, &names);
        let import = import::plan(&source, None, tied(), &options(&mapping)).unwrap();
        let written = import.write(&folder.join("ckpt")).unwrap();
        assert_eq!(written, Written { tensors: 2, bytes: 32 });
        let found = Checkpoint::open(&folder.join("ckpt")).unwrap();
        let place = |key: &str| found.tensor(key).expect(key).chunks[0].item;
        let (embedding, head) = ("model.model.embed_tokens.weight", "model.lm_head.weight");
        assert_eq!(place(embedding), place(head), "{test}");
        assert_eq!(floats(&found, head), [7.0, 1.0, 2.0, 3.0, 4.0, 5.0], "{test}");

        let export = plan_export(&found, &mapping, None, u64::MAX);
        assert!(export.tied);
        let out = folder.join("out");
        export.write(&out, None).unwrap();
        assert_eq!(keys(&out), ["model.embed_tokens.weight", "model.norm.weight"], "{test}");
    }
}

#[test]
fn tied_weights_that_differ_are_refused_and_nothing_is_left() {
    let mapping = hf();
    let names = [("model.embed_tokens.weight", 7.0), ("lm_head.weight", 6.0), NORM];
    let (folder, source) = tied_source("tied_differ", &names);
    let import = import::plan(&source, None, tied(), &options(&mapping)).unwrap();
    let error = import.write(&folder.join("ckpt")).unwrap_err();
    let expect = TransferError::Differ {
        param: "model.embed_tokens.weight".into(),
        first: "lm_head.weight".into(),
        second: "model.embed_tokens.weight".into(),
    };
    assert_eq!(error, expect);
    assert_eq!(fs::read_dir(folder.join("ckpt")).expect("a folder").count(), 0);
}

/// One report has all that is wrong.
#[test]
fn what_does_not_fit_is_listed_and_can_be_permitted() {
    let folder = folder("strict");
    let path = folder.join("model.safetensors");
    let entry =
        |key: &str, dtype, shape: &[u64]| Entry { key: key.into(), dtype, shape: shape.to_vec() };
    let mut entries = vec![
        entry("model.a.weight", StoredType::F64, &[2]),
        entry("model.b.weight", StoredType::Bf16, &[2]),
        entry("model.c.weight", StoredType::F32, &[3]),
        entry("model.d.weight", StoredType::I64, &[1]),
        entry("other.weight", StoredType::F32, &[1]),
    ];
    sort(&mut entries);
    let mut file = SafetensorsFile::create(&path, &entries, &BTreeMap::new()).unwrap();
    entries.iter().for_each(|it| file.write(&vec![0; it.bytes() as usize]).unwrap());
    file.finish().unwrap();
    let source = Checkpoint::open(&path).unwrap();
    let mapping = hf();
    let names = ["a", "b", "c", "d", "e"].map(|it| format!("model.{it}.weight"));
    let sizes = [2, 2, 2, 1, 2];
    let params: Vec<Param> =
        names.iter().zip(sizes).map(|(name, size)| param(name, &[size])).collect();
    let error = import::plan(&source, None, params.clone(), &options(&mapping)).unwrap_err();
    let expect = Mismatch {
        missing: vec!["model.e.weight".into()],
        unexpected: vec!["other.weight".into()],
        shapes: vec!["`model.c.weight` is [3] and must be [2]".into()],
        dtypes: vec![
            "`model.a.weight` is float64 and must be float32 (`--cast` rounds it)".into(),
            "`model.d.weight` is int64 and must be float32".into(),
        ],
    };
    assert_eq!(error, TransferError::Mismatch(Box::new(expect)));

    let params = vec![params[0].clone(), params[1].clone(), params[4].clone()];
    let allowed = Options {
        cast: true,
        allow_missing: &["*.e.*".parse().unwrap()],
        allow_unexpected: &["other*", "model.c*", "model.d*"].map(|it| it.parse().unwrap()),
        ..options(&mapping)
    };
    let import = import::plan(&source, None, params, &allowed).unwrap();
    assert_eq!(import.missing, ["model.e.weight"]);
    assert_eq!(import.ignored, ["model.c.weight", "model.d.weight", "other.weight"]);
}

/// An index that names more than its files have.
#[test]
fn a_model_with_a_missing_file_is_refused() {
    let (folder, source) = tied_source("incomplete", &[NORM]);
    assert_eq!(import::indexed(&folder, &source), Ok(None));
    let index =
        r#"{"metadata": {}, "weight_map": {"model.norm.weight": "a", "lm_head.weight": "b"}}"#;
    fs::write(folder.join("model.safetensors.index.json"), index).expect("it is writable");
    let error = import::indexed(&folder, &source).unwrap_err();
    assert!(
        matches!(&error, TransferError::Incomplete { keys, .. } if keys == &["lm_head.weight"])
    );
}

#[track_caller]
fn plan_export<'a>(
    source: &'a Checkpoint,
    mapping: &Mapping,
    dtype: Option<StoredType>,
    max_shard: u64,
) -> Export<'a> {
    export::plan(source, &export::Options { mapping, dtype, max_shard }).unwrap()
}

/// The keys of the model in a folder, sorted.
fn keys(folder: &Path) -> Vec<String> {
    let found = Checkpoint::open(folder).unwrap();
    found.tensors().map(|it| it.0.to_string()).collect()
}

/// C61: what PyTorch saved in pieces, with a vocabulary of 23 over 2x2, is whole in the export, and the
/// index has every tensor.
#[test]
fn an_export_has_every_row_and_an_index_of_all() {
    let source = golden("dcp/t215_tp2_dp2_uneven_vocab");
    let found = Checkpoint::open(&source.join("dcp")).unwrap();
    let bytes = fs::read(source.join("full.safetensors")).expect("golden data");
    let expect = SafeTensors::deserialize(&bytes).expect("golden data");
    let mapping = hf();
    for (max_shard, n_files) in [(u64::MAX, 1), (1500, 4), (1, 13)] {
        let out = folder("export_uneven").join("out");
        let written = plan_export(&found, &mapping, None, max_shard).write(&out, None).unwrap();
        let total: u64 = expect.tensors().iter().map(|it| it.1.data().len() as u64).sum();
        assert_eq!(written, export::Written { tensors: 13, bytes: total, files: n_files });
        let index = fs::read(out.join("model.safetensors.index.json")).expect("an index");
        let index: serde_json::Value = serde_json::from_slice(&index).expect("JSON");
        assert_eq!(index["metadata"]["total_size"], total);
        let map = index["weight_map"].as_object().expect("a map");
        assert_eq!(map.len(), 13);
        let mut seen = 0;
        for (i, name) in
            (1..=n_files).map(|i| (i, format!("model-{i:05}-of-{n_files:05}.safetensors")))
        {
            let name = if n_files == 1 { "model.safetensors".into() } else { name };
            let bytes = fs::read(out.join(&name)).unwrap_or_else(|_| panic!("file {i}: {name}"));
            let file = SafeTensors::deserialize(&bytes).expect("safetensors reads it");
            let size: usize = file.tensors().iter().map(|it| it.1.data().len()).sum();
            assert!(file.len() == 1 || size as u64 <= max_shard, "{name} is too large");
            for (key, tensor) in file.tensors() {
                assert_eq!(map[&key], name);
                let wanted = expect.tensor(&format!("model.{key}")).expect(&key);
                assert_eq!(
                    (tensor.shape(), tensor.data()),
                    (wanted.shape(), wanted.data()),
                    "{key}"
                );
                seen += 1;
            }
        }
        assert_eq!(seen, 13);
    }
}

#[test]
fn an_export_rounds_to_the_type_that_was_asked_for() {
    let found = Checkpoint::open(&golden("dcp/hsdp_r2_s2_llama/dcp")).unwrap();
    let out = folder("export_bf16").join("out");
    let mapping = hf();
    plan_export(&found, &mapping, Some(StoredType::Bf16), u64::MAX).write(&out, None).unwrap();
    let rounded = Checkpoint::open(&out).unwrap();
    for (key, tensor) in rounded.tensors() {
        assert_eq!(tensor.dtype, StoredType::Bf16, "{key}");
        let bytes = rounded.read_all(key).unwrap();
        let values = floats(&found, &format!("model.{key}"));
        for (it, value) in bytes.as_chunks::<2>().0.iter().zip(values) {
            let rounded = f32::from_bits(u32::from(u16::from_le_bytes(*it)) << 16);
            // Half a unit in the last of 8 bits.
            assert!((rounded - value).abs() <= value.abs() / 256.0, "{key}: {rounded} of {value}");
        }
    }
    // Files of another model are not mixed with these.
    let again = plan_export(&found, &mapping, None, u64::MAX).write(&out, None);
    assert_eq!(again, Err(TransferError::Occupied { path: out }));
}

/// Names and shapes are those of the model, or all that differ are listed.
#[test]
fn an_export_is_compared_with_a_model() {
    let mapping = hf();
    let (folder, source) = tied_source("export_check", &[("model.embed_tokens.weight", 7.0), NORM]);
    let import: Import<'_> = import::plan(&source, None, tied(), &options(&mapping)).unwrap();
    import.write(&folder.join("ckpt")).unwrap();
    let found = Checkpoint::open(&folder.join("ckpt")).unwrap();
    let export = plan_export(&found, &mapping, None, u64::MAX);
    assert_eq!(export.check(&tied()), Ok(()));
    let other = [param("model.norm.weight", &[3]), param("model.bias", &[2])];
    let expect = Mismatch {
        missing: vec!["model.bias".into()],
        unexpected: vec!["lm_head.weight".into(), "model.embed_tokens.weight".into()],
        shapes: vec!["`model.norm.weight` is [2] and must be [3]".into()],
        dtypes: vec![],
    };
    assert_eq!(export.check(&other), Err(TransferError::Mismatch(Box::new(expect))));
}

/// A state of PyTorch with an optimizer goes into one file and comes back: bytes, Python values and the
/// places of both in nested dicts.
#[test]
fn a_whole_state_goes_through_one_file() {
    for name in ["tp2_dp2_adamw", "t215_tp2_dp2_uneven_vocab", "fsdp2_w4_uneven_empty"] {
        let folder = folder(&format!("full_{name}"));
        let source = Checkpoint::open(&golden(&format!("dcp/{name}/dcp"))).unwrap();
        let file = folder.join("full.safetensors");
        let out = full::export(&source, &file).unwrap();
        let back = full::import(&file, &folder.join("ckpt")).unwrap();
        assert_eq!(out, back, "{name}");
        let found = Checkpoint::open(&folder.join("ckpt")).unwrap();
        assert_eq!(found.tensors().count(), source.tensors().count(), "{name}");
        for (key, tensor) in source.tensors() {
            let copy = found.tensor(key).unwrap_or_else(|| panic!("{name}: no `{key}`"));
            assert_eq!((copy.dtype, &copy.shape), (tensor.dtype, &tensor.shape), "{name}: {key}");
            assert_eq!(copy.path, tensor.path, "{name}: {key}");
            assert!(found.read_all(key).unwrap() == source.read_all(key).unwrap(), "{name}: {key}");
        }
        assert!(found.objects().eq(source.objects()), "{name}");
        for key in source.objects() {
            assert_eq!(found.object(key).unwrap(), source.object(key).unwrap(), "{name}: {key}");
            let path = |it: &Checkpoint| it.stored_object(key).expect(key).path.clone();
            assert_eq!(path(&found), path(&source), "{name}: {key}");
        }
    }
}

#[test]
fn what_safetensors_cannot_hold_is_said() {
    let folder = folder("full_mixed");
    let source = Checkpoint::open(&golden("dcp/single_mixed/dcp")).unwrap();
    let error = full::export(&source, &folder.join("full.safetensors")).unwrap_err();
    assert_eq!(error.code(), "PL0789");
    assert!(!folder.join("full.safetensors").exists());
}

/// `dcp.save(model.state_dict())` has no outer key `model`, and `dcp.save({"model": .., "ema": ..})` has.
#[test]
fn a_flat_state_dict_keeps_its_names() {
    let export = |test: &str, paths: &[&[&str]]| {
        let root = folder(test);
        let mut out = full::Writer::create(&root, 1).unwrap();
        for path in paths {
            let parts = path.iter().map(|it| PathPart::Key(it.to_string())).collect();
            out.tensor(&[(path.join("."), parts)], StoredType::F32, &[1], |put| put(&[0; 4]))
                .unwrap();
        }
        out.finish().unwrap();
        let source = Checkpoint::open(&root).unwrap();
        let mapping = Mapping::built_in("hf").unwrap();
        let options = export::Options { mapping: &mapping, dtype: None, max_shard: 1 << 20 };
        let export = export::plan(&source, &options).unwrap();
        export.write(&root.join("hf"), None).unwrap();
        let hf = Checkpoint::open(&root.join("hf")).unwrap();
        let keys: Vec<String> = hf.tensors().map(|it| it.0.to_string()).collect();
        (keys, export.left_out)
    };
    let flat: [&[&str]; 2] = [&["lm_head.weight"], &["model.norm.weight"]];
    assert_eq!(
        export("flat", &flat),
        (vec!["lm_head.weight".to_string(), "model.norm.weight".to_string()], vec![])
    );
    // Nothing else tells that `model.` belongs to the name.
    assert_eq!(export("flat_tied", &flat[1..]).0, ["model.norm.weight"]);
    let nested: [&[&str]; 3] =
        [&["model", "norm.weight"], &["ema", "norm.weight"], &["optim", "state", "a", "exp_avg"]];
    assert_eq!(
        export("nested", &nested),
        (vec!["norm.weight".to_string()], vec!["ema.norm.weight".to_string()])
    );
}

/// What is left of an export that was interrupted looks like no model, and is replaced by the next one.
#[test]
fn an_export_is_there_when_it_is_whole() {
    let root = folder("interrupted");
    let values = vec![0.0; 256];
    let path = root.join("a.safetensors");
    write(&path, &owned(&[("planc.step", vec![], vec![1.0]), ("model.w", vec![256], values)]));
    let source = Checkpoint::open(&path).unwrap();
    let mapping = Mapping::built_in("hf").unwrap();
    let options = export::Options { mapping: &mapping, dtype: None, max_shard: 1 << 20 };
    let export = export::plan(&source, &options).unwrap();
    let part = root.join(".hf.tmp");
    fs::create_dir(&part).unwrap();
    fs::write(part.join("model-00001-of-00002.safetensors"), "").unwrap();
    export.write(&root.join("hf"), None).unwrap();
    assert!(!part.exists());
    let names = |path: &Path| {
        let names = fs::read_dir(path).unwrap().map(|it| it.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let expect = ["model.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(&root.join("hf")), expect.map(Into::into).into());
    // A folder that is there may be a mount.
    fs::create_dir_all(root.join("mount/.tmp")).unwrap();
    fs::write(root.join("mount/.tmp/model-00001-of-00002.safetensors"), "").unwrap();
    assert_eq!(Checkpoint::open(&root.join("mount")).unwrap_err().code(), "PL0701");
    export.write(&root.join("mount"), None).unwrap();
    assert_eq!(names(&root.join("mount")), expect.map(Into::into).into());
}

/// What loading would refuse is not imported as step 0, or as step 2^64 - 1.
#[test]
fn a_step_that_is_no_count_is_refused() {
    let root = folder("bad_steps");
    let path = root.join("full.safetensors");
    let check = |key: &str, dtype, shape: &[u64], bytes: &[u8], expect: Result<u64, &str>| {
        let entry = Entry { key: key.into(), dtype, shape: shape.into() };
        let mut file = SafetensorsFile::create(&path, &[entry], &BTreeMap::new()).unwrap();
        file.write(bytes).unwrap();
        file.finish().unwrap();
        match (full::import(&path, &root.join("ckpt")), expect) {
            (Ok(it), Ok(step)) => assert_eq!(it.step, step),
            (Err(it), Err(expect)) => {
                assert_eq!(it.code(), "PL0705");
                let text = it.to_string();
                assert!(text.contains(key) && text.ends_with(expect), "{text}");
                assert!(!root.join("ckpt").exists(), "nothing is written");
            }
            (found, expect) => panic!("{key}: {found:?}, expected {expect:?}"),
        }
    };
    let i64 = StoredType::I64;
    check("planc.step", i64, &[], &(-1i64).to_le_bytes(), Err("and is -1"));
    check("planc.sample", i64, &[], &(-5i64).to_le_bytes(), Err("and is -5"));
    check("planc.step", StoredType::F64, &[], &f64::NAN.to_le_bytes(), Err("and is NaN"));
    check("planc.step", i64, &[2], &[0; 16], Err("and is int64[2]"));
    check("planc.seed", StoredType::Bool, &[], &[1], Err("and is bool[]"));
    check("planc.seed", i64, &[], &(-1i64).to_le_bytes(), Ok(0));
    check("planc.step", i64, &[], &7i64.to_le_bytes(), Ok(7));
}
