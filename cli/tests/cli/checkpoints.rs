//! `planc ckpt` on checkpoints that PyTorch wrote.

use std::fs;

use serde_json::Value;

use crate::{Folder, workspace};

/// A folder in which `NAME` is the checkpoint of that golden case.
fn folder(test: &str, names: &[&str]) -> Folder {
    let folder = Folder::new(test, &[]);
    for name in names {
        let (from, to) =
            (workspace("tests/golden/dcp").join(name).join("dcp"), folder.0.join(name));
        fs::create_dir_all(&to).expect("the target folder is writable");
        for entry in fs::read_dir(from).expect("golden data") {
            let entry = entry.expect("golden data");
            fs::copy(entry.path(), to.join(entry.file_name())).expect("it is writable");
        }
    }
    folder
}

#[track_caller]
fn check(name: &str, folder: &Folder, line: &str, code: i32) {
    let ran = folder.planc(line);
    assert_eq!(ran.code, code, "planc {line}: {}", ran.stderr);
    let text = [format!("$ planc {line}\n"), ran.stdout, ran.stderr].concat();
    insta::assert_snapshot!(name, text);
}

#[test]
fn keys_are_listed() {
    let folder = folder("ckpt_ls", &["single_mixed", "hf_sharded_w2"]);
    check("ckpt_ls", &folder, "ckpt ls single_mixed", 0);
    check("ckpt_ls_param", &folder, "ckpt ls single_mixed --param t.*8*", 0);
    check("ckpt_ls_nothing", &folder, "ckpt ls single_mixed --param model.*", 1);
    check("ckpt_ls_hf", &folder, "ckpt ls hf_sharded_w2", 0);
    let found: Value =
        serde_json::from_str(&folder.works("ckpt ls single_mixed --format json")).expect("JSON");
    assert_eq!(found["tensors"].as_array().map(Vec::len), Some(24));
    assert_eq!(found["objects"][0]["key"], "5");
    assert_eq!(found["objects"][0]["value"], "'int key'");
}

#[test]
fn boxes_and_values_are_shown() {
    let folder = folder("ckpt_show", &["tp2_dp2_uneven_vocab", "single_mixed"]);
    check("ckpt_show", &folder, "ckpt show tp2_dp2_uneven_vocab --param *embeddings*", 0);
    check("ckpt_show_types", &folder, "ckpt show single_mixed --param t.*[pcs][862c]*", 0);
}

#[test]
fn damage_is_found() {
    let folder = folder("ckpt_verify", &["fsdp2_w2_adamw", "fmt_threads2_w2", "hf_sharded_w2"]);
    let line = "ckpt verify fsdp2_w2_adamw fmt_threads2_w2 hf_sharded_w2";
    check("ckpt_verify_whole", &folder, line, 0);
    let path = folder.0.join("fsdp2_w2_adamw/__1_0.distcp");
    let mut bytes = fs::read(&path).expect("a copy");
    bytes[704] ^= 1;
    bytes.truncate(bytes.len() - 100);
    fs::write(&path, bytes).expect("a copy");
    fs::remove_file(folder.0.join("fmt_threads2_w2/__0_1.distcp")).expect("a copy");
    folder.write("fmt_threads2_w2/__7_0.distcp", "");
    check("ckpt_verify_broken", &folder, line, 1);
    let ran = folder.planc("ckpt verify fsdp2_w2_adamw --format json");
    let found: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert_eq!((ran.code, &found[0]["whole"]), (1, &Value::Bool(false)));
    assert_eq!(found[0]["problems"][0]["file"], "__1_0.distcp");
    assert_eq!(found[0]["problems"][0]["at"], 704);
    assert_eq!(found[0]["problems"][0]["code"], "PL0706");
}

/// Where there is no mesh, no plan and no GPU.
// C63
#[test]
fn what_eight_ranks_saved_is_listed_anywhere() {
    let folder = Folder::new("ckpt_ls_steps", &[]);
    folder.works("run model.ron --mesh 2x4 --steps 2 --save ckpt --save-every 1 -q");
    let said = folder.works("ckpt ls ckpt");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("step-1 ") && !lines[0].ends_with("latest"), "{said}");
    assert!(lines[1].starts_with("step-2 ") && lines[1].ends_with("  latest"), "{said}");
    assert!(lines[2].starts_with("ckpt/step-2: ") && lines[2].ends_with("8 files"), "{said}");
    let embedding = lines.iter().find(|it| it.ends_with(" model.model.embed_tokens.weight"));
    assert!(embedding.is_some_and(|it| it.contains("float32")), "{said}");
    assert!(folder.works("ckpt ls ckpt/step-1").starts_with("ckpt/step-1: "));
}

/// The case of pytorch/pytorch#168134: all is there, and PyTorch reads it wrong.
#[test]
fn wrong_boxes_are_a_warning() {
    let folder = folder("ckpt_wrong_boxes", &["bad_torch_q1_dp4_tp2_rows17"]);
    check("ckpt_wrong_boxes", &folder, "ckpt verify bad_torch_q1_dp4_tp2_rows17", 0);
}

#[test]
fn checkpoints_are_compared() {
    let folder = folder(
        "ckpt_diff",
        &["fsdp2_w2_adamw", "fsdp2_w4_adamw", "tp2_dp2_adamw", "hsdp_r2_s2_adamw"],
    );
    check("ckpt_diff", &folder, "ckpt diff fsdp2_w2_adamw fsdp2_w4_adamw", 1);
    check("ckpt_diff_same", &folder, "ckpt diff fsdp2_w2_adamw fsdp2_w2_adamw", 0);
    let ran = folder.planc("ckpt diff fsdp2_w4_adamw hsdp_r2_s2_adamw --format json");
    let found: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert_eq!(ran.code == 0, found["changed"].as_array().is_some_and(Vec::is_empty));
}

#[test]
fn what_cannot_be_opened_is_reported() {
    let folder = folder("ckpt_bad", &["fsdp2_w2_adamw"]);
    check("ckpt_none", &folder, "ckpt ls nothing", 1);
    check("ckpt_no_index", &folder, "ckpt ls .", 1);
    folder.write("fsdp2_w2_adamw/.metadata", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.");
    check("ckpt_code", &folder, "ckpt ls fsdp2_w2_adamw", 1);
}
