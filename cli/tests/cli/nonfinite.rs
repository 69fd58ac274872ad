//! Steps whose loss or gradients are not finite: skipped, traced to an instruction, and never what a folder of
//! checkpoints is left with.

use serde_json::{Value, json};

use crate::Folder;

/// Of 32 words; nothing normalizes what its embedding gives.
const MODEL: &str = r#"Model(
    name: "blowup",
    batch: Global(4),
    sequence: 8,
    optimizer: AdamW(weight_decay: 0.1),
    schedule: (lr: 0.01),
    clip_norm: 1.0,
    init: Normal(std: 0.3),
    layers: [
        Embedding(name: "embed", vocab: 32, dim: 16),
        Linear(name: "up", out_features: 16),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

/// A safetensors file of f32 tensors.
fn safetensors(tensors: &[(&str, &[usize], Vec<f32>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|it| it.to_le_bytes()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.to_string(), entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// `model.ron`; `weights.safetensors`, of which the embedding of word 31 overflows; and `data.bin`, in which only the third
/// batch has that word.
pub fn folder(test: &str) -> Folder {
    let folder = Folder::new(test, &[]);
    folder.write("model.ron", MODEL);
    let small =
        |n: usize| (0..n).map(|it| ((it * 37 % 19) as f32 - 9.0) / 30.0).collect::<Vec<f32>>();
    let mut embed = small(32 * 16);
    embed[31 * 16..].fill(1e38);
    folder.write(
        "weights.safetensors",
        safetensors(&[
            ("embed.weight", &[32, 16], embed),
            ("up.weight", &[16, 16], small(256)),
            ("up.bias", &[16], small(16)),
            ("head.weight", &[32, 16], small(512)),
        ]),
    );
    folder.write("data.bin", data(8, Some(3)));
    folder
}

/// Words for so many steps, of which only the batch of step `bad` has word 31.
pub fn data(steps: u64, bad: Option<u64>) -> Vec<u8> {
    const BATCH: u64 = 4 * 8;
    let bad = bad.map(|it| (it - 1) * BATCH + 6);
    let word = |at: u64| if bad == Some(at) { 31 } else { (at * 11 % 31) as u16 };
    (0..steps * BATCH + 4).flat_map(|it| word(it).to_le_bytes()).collect()
}

/// Lines of `--metrics`.
fn metrics(folder: &Folder, name: &str) -> Vec<Value> {
    folder.read(name).lines().map(|it| serde_json::from_str(it).expect("JSON")).collect()
}

#[test]
fn a_step_that_is_not_finite_is_skipped() {
    for mesh in ["1", "2x2"] {
        let folder = folder(&format!("nonfinite_skip_{mesh}"));
        let run = format!("run model.ron --mesh {mesh} --data data.bin --steps 6");
        let save = "--weights weights.safetensors --save ckpt --save-every 1 --metrics m.jsonl";
        let ran = folder.planc(&format!("{run} {save}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let text = ran.stderr.replace('\n', " ");
        assert!(text.contains("step 3 is skipped: the loss or the norm"), "{text}");
        assert!(text.contains("step 3 is not finite: rank 0"), "{text}");
        assert!(text.contains("is the first result that is not finite"), "{text}");
        assert!(ran.stdout.contains("; 1 step skipped: 1 not finite"), "{}", ran.stdout);
        let lines = metrics(&folder, "m.jsonl");
        let skipped: Vec<&Value> = lines.iter().map(|it| &it["skipped"]).collect();
        let null = Value::Null;
        assert_eq!(skipped, [&null, &null, &json!("nonfinite"), &null, &null, &null]);
        assert!(lines[3]["loss"].is_f64(), "{}", lines[3]);
        // Weights, moments and Adam's steps are those of step 2; where the run is, is not.
        let diff = folder.planc("ckpt diff ckpt/step-2 ckpt/step-3");
        let differs =
            diff.stdout.lines().filter(|it| it.contains("model.") || it.contains("optim."));
        assert_eq!(differs.collect::<Vec<_>>(), [""; 0]);
        assert!(diff.stdout.contains("planc.step"), "{}", diff.stdout);
        for (step, finite) in [(2, 1), (3, 0), (4, 1)] {
            let shown = folder.works(&format!("ckpt show ckpt/step-{step} --param planc.finite"));
            assert!(shown.contains(&finite.to_string()), "{shown}");
        }
        // From either side of the step, a run goes on as the one that was not interrupted.
        for from in [2, 3] {
            let more =
                format!("--load ckpt/step-{from} --save again --overwrite --metrics again.jsonl");
            let ran = folder.planc(&format!("{run} {more}"));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            let again = metrics(&folder, "again.jsonl");
            let loss = |it: &Value| it["loss"].clone();
            let again: Vec<Value> = again.iter().map(loss).collect();
            let straight: Vec<Value> = lines[from..].iter().map(loss).collect();
            assert_eq!(again, straight, "from step {from}");
            folder.works("ckpt diff ckpt/step-6 again/step-6");
            std::fs::remove_file(folder.0.join("again.jsonl")).expect("planc wrote it");
        }
    }
}

#[test]
fn a_run_can_stop_at_a_step_that_is_not_finite() {
    let folder = folder("nonfinite_stop");
    let run = "run model.ron --mesh 2 --data data.bin --weights weights.safetensors --steps 6";
    let ran = folder.planc(&format!("{run} --on-nonfinite stop --format json"));
    assert_eq!(ran.code, 1);
    let report: Value =
        serde_json::from_str(ran.stderr.lines().last().expect("a report")).expect("JSON");
    assert_eq!(report["code"], "PL0517");
    let message = report["message"].as_str().expect("text");
    assert!(message.contains("is not finite in step 3"), "{message}");
}

/// A learning rate of 1e38 makes weights infinite in an update whose gradients are finite; the step behind it shows it.
#[test]
fn the_last_good_checkpoint_outlives_infinite_weights() {
    let folder = folder("nonfinite_keep");
    let set = "--set optimizer=Sgd() --set clip_norm=1e30";
    let save = "--save ckpt --save-every 1 --keep 2";
    folder.works(&format!("run model.ron --mesh 2 --steps 4 {set} {save} -q"));
    let wild =
        format!("run model.ron --mesh 2 --steps 40 {set} --set schedule.lr=1e38 {save} --resume");
    let reason = |text: &str| -> String {
        text.replace(['\n', '|'], " ").split_whitespace().collect::<Vec<_>>().join(" ")
    };
    // Again from the newest checkpoint, as a scheduler would: it ends again, and removes nothing.
    for last in ["step 16, the last of 11 such steps in a row", "step 26, the last of 11"] {
        let ran = folder.planc(&wild);
        assert_eq!(ran.code, 1, "{}", ran.stdout);
        assert!(reason(&ran.stderr).contains(last), "{}", ran.stderr);
        assert!(ran.stderr.contains("PL0517"), "{}", ran.stderr);
        assert!(folder.0.join("ckpt/step-4/.metadata").exists());
    }
    let ran = folder.planc(&format!("run model.ron --mesh 1 --steps 6 {set} --load ckpt/step-4"));
    assert_eq!((ran.code, ran.stdout.contains("skipped")), (0, false), "{}", ran.stderr);
}
