//! `planc import hf`: published configs become models that compile and train.

use std::fs;

use serde_json::Value;

use crate::{Folder, workspace};

/// Imports a published config; the number of parameters is what `transformers` counts.
#[track_caller]
fn check(name: &str, parameters: u64) {
    let folder = Folder::new(&format!("import_{name}"), &[]);
    let config = workspace(&format!("tests/golden/hf/{name}.json"));
    let line = format!("import hf {} -o imported.ron --format json", config.display());
    let found: Value = serde_json::from_str(&folder.works(&line)).expect("JSON");
    assert_eq!(found["parameters"], parameters, "{name}");
    for mesh in ["1", "2x2"] {
        folder.works(&format!("compile imported.ron --mesh {mesh} -q -o {mesh}.plan"));
    }
}

#[test]
fn published_configs_become_models() {
    check("llama-2-7b", 6_738_415_616);
    check("llama-3-8b", 8_030_261_248);
    check("llama-3.2-1b", 1_235_814_400);
    check("mistral-7b-v0.1", 7_241_732_096);
    check("qwen2-0.5b", 494_032_768);
    check("qwen3-0.6b", 596_049_920);
    check("gpt2", 124_439_808);
    check("bert-base-uncased", 109_514_298);
}

/// Post-norm, attention to both sides, token types, a head with a bias over an uneven vocabulary: the
/// same losses on one rank and under FSDP x TP.
#[test]
fn bert_trains_alike_on_every_mesh() {
    let folder = Folder::new("import_bert_run", &[]);
    folder.write(
        "config.json",
        r#"{"model_type": "bert", "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 16,
            "pad_token_id": 0, "initializer_range": 0.1}"#,
    );
    let said = folder.works("import hf . -o bert.ron");
    assert!(said.contains("\nnote: `attention_probs_dropout_prob` is 0.1;"), "{said}");
    let losses = |mesh: &str| -> Vec<f64> {
        let line = "--set precision.compute=f32 --steps 8 --metrics out.jsonl -q";
        folder.works(&format!("run bert.ron --mesh {mesh} {line}"));
        let lines = folder.read("out.jsonl");
        let loss = |it: &str| {
            let line: Value = serde_json::from_str(it).expect("JSON");
            line["loss"].as_f64().expect("a loss")
        };
        lines.lines().map(loss).collect()
    };
    let whole = losses("1");
    assert_eq!(whole.len(), 8);
    for mesh in ["2x2", "1x4"] {
        for (loss, expect) in losses(mesh).iter().zip(&whole) {
            // f32 in another order of sums.
            assert!((loss - expect).abs() < 1e-4, "mesh {mesh}: {loss}, on one rank {expect}");
        }
    }
}

#[test]
fn without_an_output_the_model_is_printed() {
    let folder = Folder::new("import_print", &[]);
    let config = workspace("tests/golden/hf/gpt2.json");
    let text = folder.works(&format!("import hf {} --sequence 256", config.display()));
    assert!(text.starts_with("// Made by `planc import hf`"), "{text}");
    assert!(text.contains("sequence: 256,"), "{text}");
}

#[test]
fn a_window_that_matters_is_refused_where_it_is_written() {
    let folder = Folder::new("import_window", &[]);
    let config = workspace("tests/golden/hf/mistral-7b-v0.1.json");
    folder.write("config.json", fs::read(config).expect("a config"));
    let ran = folder.planc("import hf config.json --sequence 8192");
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr.contains("PL0782") && ran.stderr.contains("config.json:16"),
        "{}",
        ran.stderr
    );
    folder.works("import hf config.json --sequence 4096");
    let ran = folder.planc("import hf config.json -o model.ron");
    assert!(ran.stderr.contains("PL0613"), "a model is not written over: {}", ran.stderr);
}
