//! What users of other systems reported about checkpoints, each as a test with the right value.

use checkpoint::Checkpoint;
use checkpoint::pickle::Value;
use runtime::TrainOptions;

use crate::harness::*;

// C41, torchtitan#1136: the loss differs after a resume if the vocabulary is not divisible.
#[test]
fn a_vocabulary_that_is_not_divisible_resumes_bit_by_bit() {
    let folder = folder("c41");
    let plan = compile(SMALL, "4", &[("layers[0].vocab", "2049")]);
    let options =
        TrainOptions { steps: Some(20), save: saving(&folder, 10), ..TrainOptions::default() };
    let straight = train(&plan, &options);
    let resumed = train_to(&plan, 20, Some(&folder.join("step-10")));
    assert_eq!(resumed.losses.len(), 10);
    for (step, loss) in &resumed.losses {
        assert_eq!(loss.to_bits(), straight.losses[step].to_bits(), "step {step}");
    }
}

// C42, pytorch#192202: state of a parameter that is frozen now is dropped.
#[test]
fn state_of_frozen_parameters_is_kept() {
    let [first, second] = ["c42_first", "c42_second"].map(folder);
    let trained = compile(SMALL, "2x2", &[]);
    let options =
        TrainOptions { steps: Some(3), save: saving(&first, 3), ..TrainOptions::default() };
    let before = state(&train(&trained, &options).session);
    let frozen =
        compile(SMALL, "4", &[("frozen", r#"["*.up_proj.weight", "layers.0.*norm.weight"]"#)]);
    let options = TrainOptions {
        steps: Some(6),
        save: saving(&second, 3),
        load: loading(&first),
        ..TrainOptions::default()
    };
    let resumed = train(&frozen, &options);
    let [warning] = &resumed.warnings[..] else { panic!("{:?}", resumed.warnings) };
    assert!(warning.contains("another model saved this checkpoint"), "{warning}");
    let (a, b) = (Checkpoint::open(&first).unwrap(), Checkpoint::open(&second).unwrap());
    for what in ["exp_avg", "exp_avg_sq", "step"] {
        let key = format!("optim.state.layers.1.mlp.up_proj.weight.{what}");
        assert_eq!(tensor(&a, &key), tensor(&b, &key), "{key}");
        let key = format!("optim.state.layers.1.mlp.down_proj.weight.{what}");
        assert_ne!(tensor(&a, &key), tensor(&b, &key), "{key} is trained");
    }
    // Trained again, it goes on from there.
    let again = state(&train_to(&trained, 6, Some(&second)).session);
    for name in ["layers.0.mlp.up_proj.weight", "layers.0.input_layernorm.weight"] {
        for suffix in ["", ".exp_avg", ".exp_avg_sq"] {
            let name = format!("{name}{suffix}");
            assert!(again[&name] == before[&name], "{name}");
        }
    }
}

// C43, pytorch#143828: a second group loses its numbers, or a parameter its step.
#[test]
fn two_groups_come_back_by_name() {
    let [first, second] = ["c43_first", "c43_second"].map(folder);
    let plan = compile(SMALL, "2x2", &[]);
    let options =
        TrainOptions { steps: Some(1), save: saving(&first, 1), ..TrainOptions::default() };
    train(&plan, &options);
    let plan = compile(SMALL, "1", &[]);
    let load = loading(&first);
    let options =
        TrainOptions { steps: Some(2), save: saving(&second, 1), load, ..TrainOptions::default() };
    assert_eq!(train(&plan, &options).warnings, [""; 0]);
    for folder in [&first, &second] {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let decay = [0, 1].map(|it| group(&checkpoint, it, "weight_decay"));
        assert_eq!(decay, [Value::Float(0.1), Value::Float(0.0)]);
        let params = |index: u64| -> Vec<String> {
            let names = group(&checkpoint, index, "params");
            let names = names.as_list().unwrap().iter();
            names.map(|it| it.as_str().unwrap().to_string()).collect()
        };
        assert!(params(1).iter().all(|it| it.contains("norm")), "{:?}", params(1));
        assert_eq!((params(0).len(), params(1).len()), (16, 5));
        for name in params(0).iter().chain(&params(1)) {
            assert!(checkpoint.tensor(&format!("optim.state.{name}.step")).is_some(), "{name}");
        }
    }
}

/// Weights in bf16 and in f32 next to each other, in one unit of FSDP.
const MIXED: Set = &[
    ("precision.storage", "bf16"),
    ("precision.compute", "bf16"),
    ("parameters", r#"{"*norm.weight": (dtype: f32), "*.down_proj.weight": (dtype: f32)}"#),
];

// C44, Megatron-LM#5835: moments of another parameter in a group of several types; zeros after a reshard.
#[test]
fn moments_are_found_by_name_in_groups_of_several_types() {
    let folder = folder("c44");
    let plan = compile(SMALL, "4", MIXED);
    let options =
        TrainOptions { steps: Some(3), save: saving(&folder, 3), ..TrainOptions::default() };
    let saved = state(&train(&plan, &options).session);
    for mesh in ["2", "2x2", "1"] {
        let loaded = state(&train_to(&compile(SMALL, mesh, MIXED), 3, Some(&folder)).session);
        let moments: Vec<&String> = loaded.keys().filter(|it| it.contains(".exp_avg")).collect();
        assert_eq!(moments.len(), 2 * 21);
        for name in moments {
            assert!(loaded[name].iter().any(|&it| it != 0), "mesh {mesh}: {name} is zero");
            assert!(loaded[name] == saved[name], "mesh {mesh}: {name}");
        }
    }
}

// C46, pytorch#156784: a unit of FSDP cannot have parameters of several types.
#[test]
fn types_may_be_mixed_in_a_unit() {
    let folder = folder("c46");
    let plan = compile(SMALL, "2x2", &[MIXED, &[("schedule.lr", "1e-2")]].concat());
    let options =
        TrainOptions { steps: Some(8), save: saving(&folder, 4), ..TrainOptions::default() };
    let straight = train(&plan, &options);
    assert!(straight.losses[&8] < straight.losses[&1]);
    let checkpoint = Checkpoint::open(&folder.join("step-4")).unwrap();
    let dtype = |key: &str| checkpoint.tensor(key).unwrap().dtype.to_string();
    assert_eq!(dtype("model.layers.0.mlp.up_proj.weight"), "bfloat16");
    assert_eq!(dtype("model.layers.0.mlp.down_proj.weight"), "float32");
    let resumed = train_to(&plan, 8, Some(&folder.join("step-4")));
    assert_eq!(resumed.losses[&8].to_bits(), straight.losses[&8].to_bits());
}

// C48, torchtitan#930: a file that is written in the background has numbers of later steps. A hundred
// steps, each of which trains while the one before is written.
#[test]
fn what_is_saved_in_the_background_is_of_one_moment() {
    const REPEATS: u64 = 100;
    let [at_once, background] = ["c48_at_once", "c48_background"].map(folder);
    let plan = compile(SMALL, "2x2", &[("layers[1].n", "1")]);
    let run = |folder: &std::path::Path, background: bool| {
        let mut save = saving(folder, 1);
        save.as_mut().unwrap().background = background;
        train(&plan, &TrainOptions { steps: Some(REPEATS), save, ..TrainOptions::default() })
    };
    assert_eq!(run(&at_once, false).saved.len() as u64, REPEATS);
    assert_eq!(run(&background, true).saved.len() as u64, REPEATS);
    for step in 1..=REPEATS {
        let step = format!("step-{step}");
        let [a, b] = [&at_once, &background].map(|it| files_of_any_run(&it.join(&step)));
        // Four files with their checksums, and the index.
        assert_eq!(a.len(), 9, "{step}");
        assert!(a == b, "{step} differs");
    }
}
