//! `planc ckpt import` and `export`: weights of Hugging Face and TransformerEngine, and whole states.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

use crate::{Folder, unwrapped, workspace};

fn golden(path: &str) -> PathBuf {
    workspace("tests/golden/hf").join(path)
}

/// Type, shape and bytes of the tensors in a file.
type Tensors = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

/// The tensors of a model's folder, by the index if it has one.
fn tensors(folder: &Path) -> Tensors {
    let mut res = Tensors::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("a file").path();
        if path.extension().is_some_and(|it| it == "safetensors") {
            let bytes = fs::read(&path).expect("a file");
            let file = SafeTensors::deserialize(&bytes).expect("safetensors reads it");
            res.extend(file.tensors().into_iter().map(|(key, it)| {
                (key, (it.dtype().to_string(), it.shape().to_vec(), it.data().to_vec()))
            }));
        }
    }
    res
}

fn losses(folder: &Folder, line: &str) -> Vec<f64> {
    // A run that goes on from a checkpoint adds to the file.
    let _ = fs::remove_file(folder.0.join("out.jsonl"));
    folder.works(&format!("{line} --metrics out.jsonl -q"));
    let loss = |it: &str| {
        let line: Value = serde_json::from_str(it).expect("JSON");
        line["loss"].as_f64().expect("a loss")
    };
    folder.read("out.jsonl").lines().map(loss).collect()
}

/// Imports config and weights, compares the loss on two meshes with what numpy computed from the stored
/// tensors, and exports them again; the folder is what was exported.
#[track_caller]
fn round_trip(name: &str, export: &str) -> (Folder, Tensors) {
    let folder = Folder::new(&format!("foreign_{name}"), &[]);
    let hf = golden(&format!("tiny-{name}"));
    let hf_text = hf.display();
    folder.works(&format!("import hf {hf_text} --batch 4 -o {name}.ron"));
    let said = folder.works(&format!("ckpt import hf {hf_text} --model {name}.ron -o ckpt"));
    assert!(said.contains(" -> ckpt/step-0: "), "{said}");
    assert!(said.contains(&format!("planc run {name}.ron --load ckpt --allow-missing")), "{said}");
    let text = fs::read_to_string(golden("losses.json")).expect("golden data");
    let text: Value = serde_json::from_str(&text).expect("JSON");
    let expect = text[name].as_f64().expect("a loss");
    let data = golden("tokens.safetensors");
    for mesh in ["1", "2x2"] {
        let line = format!(
            "run {name}.ron --mesh {mesh} --set precision.compute=f32 --steps 1 --load ckpt \
             --allow-missing optim.* --data {}",
            data.display()
        );
        let loss = losses(&folder, &line)[0];
        // f32 against float64, over layers of 16 features.
        assert!((loss - expect).abs() < 1e-5, "{name} on {mesh}: {loss}, numpy {expect}");
    }
    let again = folder.planc(&format!("import hf {hf_text} -o {name}.ron"));
    assert!(again.code == 1 && again.stderr.contains("`-o model.ron`"), "{}", again.stderr);
    folder.works(&format!("ckpt export hf ckpt -o out --config {hf_text} {export}"));
    let config: Value = serde_json::from_str(&folder.read("out/config.json")).expect("JSON");
    assert_eq!(config["tie_word_embeddings"], true);
    let found = tensors(&folder.0.join("out"));
    (folder, found)
}

#[test]
fn gpt2_is_unpacked_and_packed_again() {
    let (_, found) = round_trip("gpt2", "--max-shard-size 8KB");
    let mut expect = tensors(&golden("tiny-gpt2"));
    // The causal mask is no weight.
    expect.retain(|key, _| !key.ends_with(".attn.bias"));
    let expect: Tensors =
        expect.into_iter().map(|(key, it)| (format!("transformer.{key}"), it)).collect();
    assert!(found == expect, "{:?}", found.keys());
}

#[test]
fn bert_comes_in_under_its_old_names_and_leaves_under_its_new_ones() {
    let (_, found) = round_trip("bert", "");
    let mut expect = tensors(&golden("tiny-bert"));
    expect.retain(|key, _| !key.contains("pooler") && !key.contains("seq_relationship"));
    let renamed = |key: &str| {
        key.replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias")
    };
    let expect: Tensors = expect.into_iter().map(|(key, it)| (renamed(&key), it)).collect();
    assert!(found == expect, "{:?}", found.keys());
}

/// 16-bit weights become f32 masters and are the same bits when they are exported.
#[test]
fn qwen3_round_trips_in_half_precision() {
    let (folder, found) = round_trip("qwen3", "--dtype f16");
    assert!(found == tensors(&golden("tiny-qwen3")), "{:?}", found.keys());
    let index: Value =
        serde_json::from_str(&folder.read("out/model.safetensors.index.json")).expect("JSON");
    assert_eq!(index["weight_map"].as_object().expect("a map").len(), found.len());
    let config: Value = serde_json::from_str(&folder.read("out/config.json")).expect("JSON");
    assert_eq!(config["torch_dtype"], "float16");
    let config = golden("tiny-bert").join("config.json");
    let ran = folder.planc(&format!("ckpt export hf ckpt -o other --config {}", config.display()));
    assert!(ran.code == 1 && ran.stderr.contains("PL0784"), "{}", ran.stderr);
    assert!(!folder.0.join("other").exists(), "nothing is written");
    // Another model's files are not mixed with these.
    let ran = folder.planc("ckpt export hf ckpt -o out");
    assert!(ran.code == 1 && ran.stderr.contains("PL0790"), "{}", ran.stderr);
}

/// A stack of two kinds of layers is two `Repeat`s, the second of which counts on.
#[test]
fn a_stack_in_two_repeats_keeps_the_numbers_of_hugging_face() {
    let folder = Folder::new("foreign_stack", &[]);
    let (hf, data) = (golden("tiny-qwen3"), golden("tokens.safetensors"));
    folder.works(&format!("import hf {} --batch 4 -o one.ron", hf.display()));
    let one = folder.read("one.ron");
    let (head, rest) = one.split_once("Repeat(n: 2, ").expect("a stack of two layers");
    let (body, tail) = rest.split_once("\n        ]),\n").expect("the end of the stack");
    let repeats = format!("Repeat(n: 1, {body}]),\nRepeat(n: 1, first: 1, {body}]),\n");
    fs::write(folder.0.join("two.ron"), [head, &repeats, tail].concat()).expect("a model");
    let loss = |name: &str| {
        folder.works(&format!("ckpt import hf {} --model {name}.ron -o {name}", hf.display()));
        let run = format!("run {name}.ron --mesh 2x2 --set precision.compute=f32 --steps 1");
        let load = format!("--load {name} --allow-missing optim.* --data {}", data.display());
        losses(&folder, &format!("{run} {load}"))
    };
    assert_eq!(loss("two"), loss("one"));
    folder.works(&format!("ckpt export hf two -o out --config {} --dtype f16", hf.display()));
    let found = tensors(&folder.0.join("out"));
    assert!(found == tensors(&hf), "{:?}", found.keys());
}

/// All that does not fit is in one report.
#[test]
fn weights_of_another_model_are_refused() {
    let folder = Folder::new("foreign_strict", &[]);
    let hf = golden("tiny-qwen3");
    let line = format!("ckpt import hf {} --model model.ron -o ckpt", hf.display());
    let ran = folder.planc(&line);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    for expect in [
        "PL0784",
        "missing: `lm_head.weight`",
        "unexpected: `model.layers.0.self_attn.q_norm.weight`",
        "`model.norm.weight` is [16] and must be [64]",
        "`--allow-missing GLOB`",
    ] {
        assert!(ran.stderr.contains(expect), "no `{expect}` in {}", ran.stderr);
    }
    assert!(!folder.0.join("ckpt").exists(), "nothing is written");
}

/// Steps, moments and hyper-parameters go through one file: training goes on with the same losses.
#[test]
fn a_whole_state_is_resumed_from_one_file() {
    let folder = Folder::new("foreign_full", &[]);
    folder.works("run model.ron --mesh 2x2 --steps 3 --save ckpt -q");
    folder.works("ckpt export full ckpt -o full.safetensors");
    let said = folder.works("ckpt import full full.safetensors -o copy");
    assert!(said.starts_with("full.safetensors -> copy/step-3: step 3, "), "{said}");
    let line = "run model.ron --mesh 2x2 --steps 5 --load";
    let expect = losses(&folder, &format!("{line} ckpt"));
    assert_eq!(losses(&folder, &format!("{line} copy")), expect);
    assert_eq!(expect.len(), 2);

    // A file of another import fits in all but that: it is no part of this one.
    folder.works("ckpt import full full.safetensors -o other");
    for name in ["__0_0.distcp", "__0_0.distcp.sums"] {
        let at = |of: &str| folder.0.join(of).join("step-3").join(name);
        std::fs::copy(at("other"), at("copy")).unwrap();
    }
    let ran = folder.planc("ckpt verify copy");
    assert!(ran.code == 1 && ran.stdout.contains("another save"), "{}{}", ran.stdout, ran.stderr);
}

/// TransformerEngine's fused QKV and gated fc1, as two ranks saved them, into a model under Llama's names;
/// keys that somebody renamed, by a mapping in a file.
#[test]
fn transformer_engine_comes_in() {
    let folder = Folder::new("foreign_te", &[]);
    // Llama's own weights, under TransformerEngine's names. The fused tensors are made here, by rows.
    folder.works("run model.ron --mesh 1 --steps 1 --save ckpt -q");
    folder.works("ckpt export hf ckpt -o hf");
    let mut source = tensors(&folder.0.join("hf"));
    let rows = |it: &(String, Vec<usize>, Vec<u8>), from: usize, n: usize| {
        let row = it.2.len() / it.1[0];
        it.2[from * row..(from + n) * row].to_vec()
    };
    let mut te = Tensors::new();
    for layer in 0..2 {
        let llama = format!("model.layers.{layer}.");
        let mut take = |name: &str| source.remove(&format!("{llama}{name}.weight")).expect(name);
        let [q, k, v] = ["q", "k", "v"].map(|it| take(&format!("self_attn.{it}_proj")));
        // 4 heads over 2 KV heads, of 16 features.
        let mut qkv = Vec::new();
        for group in 0..2 {
            qkv.extend(rows(&q, group * 32, 32));
            qkv.extend(rows(&k, group * 16, 16));
            qkv.extend(rows(&v, group * 16, 16));
        }
        let (gate, up) = (take("mlp.gate_proj"), take("mlp.up_proj"));
        let half = gate.1[0] / 2;
        let mut fc1 = Vec::new();
        for rank in 0..2 {
            fc1.extend(rows(&gate, rank * half, half));
            fc1.extend(rows(&up, rank * half, half));
        }
        let f32 = || "F32".to_string();
        let mut put = |name: &str, it| te.insert(format!("{llama}{name}"), it);
        put("self_attention.layernorm_qkv.weight", (f32(), vec![128, 64], qkv));
        put("layernorm_mlp.fc1_weight", (f32(), vec![4 * half, 64], fc1));
        put("self_attention.layernorm_qkv.layer_norm_weight", take("input_layernorm"));
        put("self_attention.proj.weight", take("self_attn.o_proj"));
        put("layernorm_mlp.layer_norm_weight", take("post_attention_layernorm"));
        put("layernorm_mlp.fc2_weight", take("mlp.down_proj"));
        put("layernorm_mlp.fc2_bias", (f32(), vec![0], vec![]));
        put("layernorm_mlp._extra_state", ("U8".to_string(), vec![0], vec![]));
    }
    te.extend(source);
    let save = |name: &str, tensors: &Tensors| {
        let view = |it: &(String, Vec<usize>, Vec<u8>)| {
            let dtype = if it.0 == "U8" { safetensors::Dtype::U8 } else { safetensors::Dtype::F32 };
            let (shape, data) = (it.1.clone(), it.2.clone());
            (dtype, shape, data)
        };
        let owned: Vec<_> = tensors.iter().map(|(key, it)| (key, view(it))).collect();
        let views = owned.iter().map(|(key, (dtype, shape, data))| {
            let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data);
            (key.as_str(), view.expect("a tensor"))
        });
        let bytes = safetensors::serialize(views, None).expect("a file");
        folder.write(name, bytes);
    };
    save("te.safetensors", &te);
    let ran = folder.planc("ckpt import te te.safetensors --model model.ron -o te");
    assert!(ran.code == 1 && ran.stderr.contains("--saved-tp"), "{}", ran.stderr);
    folder.works("ckpt import te te.safetensors --model model.ron -o te --saved-tp 2");
    folder.works("ckpt export hf te -o te_hf");
    let expect = tensors(&folder.0.join("hf"));
    assert!(tensors(&folder.0.join("te_hf")) == expect, "as it was before it was fused");

    let renamed: Tensors = expect
        .iter()
        .map(|(key, it)| (format!("net.{}", key.replace("mlp", "ff")), it.clone()))
        .collect();
    save("renamed.safetensors", &renamed);
    folder.write(
        "map.ron",
        "Mapping(rules: [Map(from: \"{path..}.ff.{rest..}\", to: [\"{path..}.mlp.{rest..}\"])])",
    );
    let line = "ckpt import hf renamed.safetensors --model model.ron -o renamed --map map.ron";
    let ran = folder.planc(line);
    assert!(ran.code == 1 && ran.stderr.contains("PL0784"), "{}", ran.stderr);
    folder.works(&format!("{line} --prefix net."));
    folder.works("ckpt export hf renamed -o renamed_hf");
    assert!(tensors(&folder.0.join("renamed_hf")) == expect, "as it was before it was renamed");
    folder.write("map.ron", "Mapping(rules: [Map(from: \"a.{n}\", to: [\"b\"])])");
    let ran = folder.planc(line);
    assert!(ran.code == 1 && ran.stderr.contains("PL0785"), "{}", ran.stderr);
}

/// Files, checkpoints and `latest` are replaced only with `--force`, and checkpoints are not written into.
#[test]
fn nothing_is_replaced_unasked() {
    let folder = Folder::new("foreign_replace", &[]);
    folder.works("run model.ron --mesh 1 --steps 2 --save ckpt -q");
    let refused = |line: &str, expect: &str| {
        let ran = folder.planc(line);
        assert_eq!(ran.code, 1, "planc {line}");
        let is_it = ran.stderr.contains("PL0791") && ran.stderr.contains(expect);
        assert!(is_it, "no `{expect}` in {}", ran.stderr);
    };
    folder.write("full.safetensors", "mine");
    refused("ckpt export full ckpt -o full.safetensors", "`full.safetensors` is there already");
    assert_eq!(folder.read("full.safetensors"), "mine");
    folder.works("ckpt export full ckpt -o full.safetensors --force");
    refused("ckpt export full ckpt -o ckpt --force", "`ckpt` is no regular file");
    refused("ckpt export full ckpt -o ckpt/step-2/a.safetensors", "`ckpt/step-2` is a checkpoint");
    refused("ckpt export hf ckpt -o ckpt/step-2/hf", "`ckpt/step-2` is a checkpoint");
    let import = "ckpt import full full.safetensors -o ckpt";
    refused(import, "`ckpt/step-2` is there already");
    folder.works(&format!("{import} --force"));
    let reshard = "ckpt reshard ckpt --plan model.ron --mesh 2 -o ckpt";
    refused(reshard, "`ckpt/step-2` is there already");
    folder.works(&format!("{reshard} --dry-run"));
    folder.works("ckpt export hf ckpt -o hf");
    let import = "ckpt import hf hf --model model.ron -o ckpt";
    refused(import, "`latest` in `ckpt` would go back from step 2 to step 0");
    assert_eq!(folder.read("ckpt/latest"), "step-2");
    folder.works(&format!("{import} --force"));
    // The newline says that it was chosen: a run goes on from there, though step 2 is newer.
    assert_eq!(folder.read("ckpt/latest"), "step-0\n");
    let run = "run model.ron --mesh 2 --steps 1 --save ckpt --resume --allow-missing optim.*";
    let resumed = folder.planc(run);
    assert!(resumed.stdout.contains("resumed from ckpt/step-0 at step 1"), "{}", resumed.stderr);
    assert_eq!(folder.read("ckpt/latest"), "step-1");
}

/// Every command that reads such a file refuses what the library of that name refuses.
#[test]
fn safetensors_that_are_none_are_refused_everywhere() {
    let folder = Folder::new("no_safetensors", &[]);
    let entry = |name: &str, start: u64| {
        let end = start + 8;
        format!("\"{name}\":{{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[{start},{end}]}}")
    };
    for (entries, bytes, why) in [
        (
            vec![entry("a", 0), entry("b", 4)],
            12,
            ["`b` in its header", "invalid offset for tensor `b`"],
        ),
        (
            vec![entry("a", 0), entry("b", 12)],
            20,
            ["`b` in its header", "invalid offset for tensor `b`"],
        ),
        (vec![entry("a", 0)], 12, ["it is cut off, or bytes follow", "file not fully covered"]),
        (
            vec![entry("a", 0), entry("b", 8)],
            15,
            ["it is cut off, or bytes follow", "file not fully covered"],
        ),
        (vec![entry("a", 0), entry("a", 0)], 8, ["are called `a`"; 2]),
    ] {
        let header = format!("{{{}}}", entries.join(","));
        let file =
            [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; bytes]].concat();
        folder.write("x.safetensors", file);
        for command in [
            "ckpt ls x.safetensors",
            "ckpt verify x.safetensors",
            "ckpt import hf x.safetensors --model model.ron -o ckpt",
            "ckpt import full x.safetensors -o ckpt",
            "run model.ron --mesh 1 --steps 1 --load x.safetensors",
            "run model.ron --mesh 1 --steps 1 --weights x.safetensors",
        ] {
            let ran = folder.planc(command);
            let text = unwrapped(&format!("{}{}", ran.stdout, ran.stderr));
            assert_eq!(ran.code, 1, "{command}: {text}");
            assert!(why.iter().any(|it| text.contains(it)), "{command}: {text}");
        }
        assert!(!folder.0.join("ckpt").exists());
    }
}

/// `model.state_dict()` has bare names, and torchtitan other ones: `run --load` says how they come in.
#[test]
fn foreign_names_are_pointed_to_the_import_that_renames_them() {
    let folder = Folder::new("foreign_names", &[]);
    folder.works("run model.ron --mesh 2 --steps 1 --save ckpt -q");
    folder.works("ckpt export hf ckpt -o hf");
    let foreign = folder.planc("run model.ron --mesh 2 --load hf");
    let text = unwrapped(&foreign.stderr);
    for part in [
        "no tensor has the name of a parameter: they are called like `lm_head.weight`",
        "help: make a checkpoint of its weights with `planc ckpt import hf hf --model MODEL.ron -o DIR`",
        "`--rename FROM=TO`",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // torchtitan's names, by the very rules that come in again the other way round.
    let rules = "# torchtitan\n\
        tok_embeddings.*=model.embed_tokens.*\n\
        layers.*.attention.wo.*=model.layers.*.self_attn.o_proj.*\n\
        \n\
        output.*=lm_head.*\n";
    folder.write("titan.txt", rules);
    let keys: Vec<String> = folder
        .works("ckpt ls hf --format json")
        .split('"')
        .filter(|it| it.ends_with(".weight"))
        .map(str::to_string)
        .collect();
    assert!(keys.iter().any(|it| it == "model.layers.0.self_attn.o_proj.weight"), "{keys:?}");
    let bytes = fs::read(folder.0.join("hf/model.safetensors")).expect("it was written");
    let len = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + len]).expect("JSON");
    let header = header
        .replace("model.embed_tokens.", "tok_embeddings.")
        .replace("model.layers.", "layers.")
        .replace(".self_attn.o_proj.", ".attention.wo.")
        .replace("lm_head.", "output.");
    let file =
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + len..]].concat();
    folder.write("titan.safetensors", file);
    let import = "ckpt import hf titan.safetensors --model model.ron -o back";
    let refused = folder.planc(import);
    assert_eq!(refused.code, 1);
    assert!(unwrapped(&refused.stderr).contains("`--rename FROM=TO`"), "{}", refused.stderr);
    let typo = folder.planc(&format!("{import} --rename titan.txt --rename tok_embedings.*=x.*"));
    assert_eq!(typo.code, 1);
    let why = "no key is like the left side of `--rename tok_embedings.*=x.*`";
    assert!(unwrapped(&typo.stderr).contains(why), "{}", typo.stderr);
    folder.works(&format!("{import} --rename titan.txt --rename layers.*=model.layers.*"));
    let same = folder.planc("ckpt diff ckpt back --param model.*");
    assert_eq!(same.code, 0, "{}", same.stdout);
    let wrong = folder.planc(&format!("{import} --rename a.*=b"));
    assert_eq!(wrong.code, 1);
    assert!(
        unwrapped(&wrong.stderr).contains("`a.*=b` has 1 `*` before the `=` and 0 behind it"),
        "{}",
        wrong.stderr
    );
    // The file `latest` is no checkpoint.
    let named = folder.planc("ckpt export hf ckpt/latest -o out");
    assert_eq!(named.code, 1);
    let text = unwrapped(&named.stderr);
    assert!(
        text.contains("names the newest checkpoint of a folder; name the folder, `ckpt`"),
        "{text}"
    );
}
