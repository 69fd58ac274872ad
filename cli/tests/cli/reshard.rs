//! `planc ckpt reshard`: checkpoints cut anew for another plan.

use serde_json::Value;

use crate::Folder;

#[test]
fn a_checkpoint_is_cut_for_another_mesh() {
    let folder = Folder::new("reshard", &[]);
    folder.works("run model.ron --mesh 2x2 --steps 3 --quiet --save here");
    for mesh in ["1", "8", "2x2x2", "4x2", "1x4"] {
        let line = format!("ckpt reshard here --plan model.ron --mesh {mesh} --format json");
        let read =
            |line: &str| -> Value { serde_json::from_str(&folder.works(line)).expect("JSON") };
        let dry = read(&format!("{line} --dry-run"));
        let ranks = dry["ranks"].as_array().expect("a list");
        let bytes: u64 = ranks.iter().map(|it| it["bytes"].as_u64().expect("bytes")).sum();
        // Weights and both moments, and the steps of 21 parameters, each byte once, whoever holds copies.
        assert_eq!(bytes, (119_104 * 3 + 21) * 4, "{mesh}");
        assert_eq!(dry["unique_bytes"].as_u64(), Some(bytes), "{mesh}");
        let most = ranks.iter().filter_map(|it| it["bytes"].as_u64()).max();
        assert!(most.expect("a rank") <= bytes.div_ceil(ranks.len() as u64) * 11 / 10, "{mesh}");
        assert!(!folder.0.join(mesh).exists(), "a dry run writes nothing");
        let wet = read(&format!("{line} -o {mesh}"));
        assert_eq!(wet["ranks"], dry["ranks"]);
        assert!(wet["written"]["memory"].as_u64() < Some(1 << 20), "{wet}");
        folder.works(&format!("ckpt verify {mesh}"));
        folder.works(&format!("ckpt diff here {mesh}"));
        let files = std::fs::read_dir(folder.0.join(mesh).join("step-3")).expect("a folder");
        let files = files.filter_map(|it| it.ok()?.file_name().into_string().ok());
        assert_eq!(files.filter(|it| it.ends_with(".distcp")).count(), ranks.len(), "{mesh}");
    }
    // What loads the one loads the other.
    let losses = |from: &str| {
        let line = format!(
            "run model.ron --mesh 4x2 --steps 5 --quiet --load {from} --metrics {from}.jsonl"
        );
        folder.works(&line);
        folder.read(&format!("{from}.jsonl"))
    };
    let loss = |text: String| -> Vec<f64> {
        let lines = text.lines().map(|it| serde_json::from_str::<Value>(it).expect("JSON"));
        lines.map(|it| it["loss"].as_f64().expect("a loss")).collect()
    };
    let expect = loss(losses("here"));
    assert_eq!(expect.len(), 2);
    assert_eq!(loss(losses("4x2")), expect);
}

#[test]
fn another_model_is_refused() {
    let folder = Folder::new("reshard_other", &[]);
    folder.works("run model.ron --mesh 1 --steps 1 --quiet --save here");
    let line = "ckpt reshard here --plan model.ron --mesh 2 --set layers[0].vocab=128 -o out";
    let ran = folder.planc(line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("model.embed_tokens.weight"), "{}", ran.stderr);
    assert!(!folder.0.join("out").exists());
}
