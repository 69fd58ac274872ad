//! What is in a checkpoint, and what is made of one that does not fit.

use checkpoint::pickle::Value;
use checkpoint::{Checkpoint, StoredType};
use runtime::error::LoadProblem;
use runtime::{LoadOptions, RunError, TrainOptions};

use crate::harness::*;

/// Trains a model for some steps and saves the last.
#[track_caller]
fn save(test: &str, source: &str, mesh: &str, set: Set, steps: u64) -> std::path::PathBuf {
    let folder = folder(test);
    let plan = compile(source, mesh, set);
    let save = saving(&folder, steps);
    train(&plan, &TrainOptions { steps: Some(steps), save, ..TrainOptions::default() });
    folder
}

#[track_caller]
fn problems(error: RunError) -> Vec<String> {
    match error {
        RunError::LoadMismatch { problems, .. } => {
            problems.iter().map(|it| it.to_string()).collect()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn keys_are_those_of_pytorch() {
    let folder = save("pytorch_keys", SMALL, "2x2", &[], 2);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let keys: Vec<&str> = checkpoint.tensors().map(|it| it.0).collect();
    for key in [
        "model.embed.weight",
        "optim.state.embed.weight.exp_avg",
        "optim.state.embed.weight.exp_avg_sq",
        "optim.state.embed.weight.step",
        "planc.finite",
        "planc.sample",
        "planc.schedule.lr",
        "planc.seed",
        "planc.step",
    ] {
        assert!(keys.contains(&key), "{key} is not in {keys:?}");
    }
    let n_params = keys.iter().filter(|it| it.starts_with("model.")).count();
    assert_eq!(keys.len(), 4 * n_params + 9);
    let step = checkpoint.tensor("optim.state.norm.weight.step").unwrap();
    assert_eq!((step.dtype, step.shape.len()), (StoredType::F32, 0));
    assert_eq!(tensor(&checkpoint, "optim.state.norm.weight.step"), 2f32.to_le_bytes());
    assert_eq!(tensor(&checkpoint, "planc.step"), 2i64.to_le_bytes());
    assert_eq!(tensor(&checkpoint, "planc.sample"), 16i64.to_le_bytes());
    let path: Vec<String> = step.path.iter().map(|it| it.to_string()).collect();
    assert_eq!(path, ["optim", "state", "norm.weight", "step"]);
}

/// A tied tensor is stored once, and has both names.
#[test]
fn tied_tensors_are_stored_once() {
    let set = [("tied", r#"[("head.weight", "embed.weight")]"#)];
    let folder = save("tied", SMALL, "2x2", &set, 1);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let chunks = |key: &str| &checkpoint.tensor(key).unwrap().chunks;
    assert_eq!(chunks("model.embed.weight"), chunks("model.head.weight"));
    assert!(checkpoint.tensor("optim.state.embed.weight.exp_avg").is_some());
    assert!(checkpoint.tensor("optim.state.head.weight.exp_avg").is_none());
    let plan = compile(SMALL, "4", &set);
    assert_eq!(train_to(&plan, 2, Some(&folder)).warnings, [""; 0]);
}

// C38, Megatron-LM PR#6271: what is missing and what is unexpected is one error that lists all of it.
#[test]
fn missing_and_unexpected_keys_are_listed() {
    let two = save("two_layers", SMALL, "2", &[], 1);
    let one = save("one_layer", SMALL, "2", &[("layers[1].n", "1")], 1);
    let plan = compile(SMALL, "1", &[]);
    let missing = problems(refused(&plan, loading(&one).unwrap()));
    // Nine parameters of a layer, each with two moments and a step.
    assert_eq!(missing.len(), 36, "{missing:?}");
    assert!(missing.iter().all(|it| it.starts_with("missing: `") && it.contains(".layers.1.")
        || it.starts_with("missing: `model.layers.1.")));
    let plan = compile(SMALL, "1", &[("layers[1].n", "1")]);
    let unexpected = problems(refused(&plan, loading(&two).unwrap()));
    // And their steps.
    assert_eq!(unexpected.len(), 36, "{unexpected:?}");
    assert!(unexpected.contains(&"unexpected: `model.layers.1.mlp.up_proj.weight`".to_string()));
    let allowed = LoadOptions {
        allow_unexpected: vec!["*.layers.1.*".parse().unwrap()],
        ..loading(&two).unwrap()
    };
    let plan_options =
        TrainOptions { steps: Some(2), load: Some(allowed), ..TrainOptions::default() };
    assert_eq!(train(&plan, &plan_options).losses.len(), 1);
}

/// Weights without an optimizer: its state is zero, and steps are those of the checkpoint.
#[test]
fn weights_alone_are_loaded_if_that_is_allowed() {
    let set = [("optimizer", "Sgd()")];
    let folder = save("weights_alone", SMALL, "2", &set, 1);
    let plan = compile(SMALL, "1", &[]);
    let all = problems(refused(&plan, loading(&folder).unwrap()));
    assert!(all.iter().all(|it| it.starts_with("missing: `optim.state.")), "{all:?}");
    let load = LoadOptions {
        allow_missing: vec!["optim.*".parse().unwrap()],
        ..loading(&folder).unwrap()
    };
    let options = TrainOptions { steps: Some(1), load: Some(load), ..TrainOptions::default() };
    let trained = train(&plan, &options);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let weights = trained.session.read("norm.weight").unwrap().data;
    let bytes: Vec<u8> = weights.iter().flat_map(|it| it.to_le_bytes()).collect();
    assert_eq!(bytes, tensor(&checkpoint, "model.norm.weight"));
    assert_eq!(trained.session.read("norm.weight.exp_avg").unwrap().data, [0.0; 16]);
}

#[test]
fn other_shapes_are_refused() {
    let folder = save("shapes", SMALL, "2", &[], 1);
    let plan = compile(SMALL, "2", &[("layers[0].vocab", "251")]);
    let found = problems(refused(&plan, loading(&folder).unwrap()));
    assert!(
        found.contains(&"shape: `model.embed.weight` is [250, 16] and must be [251, 16]".into())
    );
    assert_eq!(found.len(), 6, "two tensors with two moments each: {found:?}");
}

// C39, PyTorch casts silently, f32 to bf16 and even to int8.
#[test]
fn another_type_is_refused_unless_it_is_asked_for() {
    let folder = save("types", SMALL, "2", &[], 1);
    let plan = compile(SMALL, "2", &[("precision.storage", "bf16")]);
    let error = refused(&plan, loading(&folder).unwrap());
    let RunError::LoadMismatch { problems, .. } = &error else { panic!("{error}") };
    let expect = LoadProblem::Type {
        key: "model.norm.weight".to_string(),
        found: StoredType::F32,
        expected: StoredType::Bf16,
        can_cast: true,
    };
    assert!(problems.contains(&expect), "{problems:?}");
    let load = LoadOptions { cast: true, ..loading(&folder).unwrap() };
    let options = TrainOptions { steps: Some(1), load: Some(load), ..TrainOptions::default() };
    let loaded = train(&plan, &options);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let saved = tensor(&checkpoint, "model.head.weight");
    let saved = saved.as_chunks::<4>().0.iter().map(|&it| f32::from_le_bytes(it));
    let rounded: Vec<f32> = saved.map(|it| half::bf16::from_f32(it).to_f32()).collect();
    assert_eq!(loaded.session.read("head.weight").unwrap().data, rounded);
}

/// The plan's schedule and numbers are used, and the user is told what they were.
#[test]
fn another_schedule_is_a_warning_with_both_values() {
    let folder = save("schedule", SMALL, "2", &[], 1);
    let set = [("schedule.lr", "2e-3"), ("optimizer.weight_decay", "0.2")];
    let plan = compile(SMALL, "2", &set);
    let warnings = train_to(&plan, 2, Some(&folder)).warnings;
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert!(warnings[0].contains("another model saved this checkpoint"), "{warnings:?}");
    assert!(warnings[1].contains("lr was 0.001 and is 0.002"), "{warnings:?}");
    assert!(warnings[2].contains("weight_decay was 0.1 and is 0.2"), "{warnings:?}");
    assert!(warnings[2].contains(" and 15 more; the plan's is used"), "{warnings:?}");
}

/// The data goes on behind the last sample, also in batches of another size; the seed is the saved one.
#[test]
fn the_data_goes_on_where_it_was() {
    let folder = folder("data");
    let plan = compile(SMALL, "2", &[]);
    let save = saving(&folder, 3);
    let seed = Some(1234);
    train(&plan, &TrainOptions { steps: Some(3), save, seed, ..TrainOptions::default() });
    let resumed = compile(SMALL, "2", &[("batch", "Global(16)")]);
    let out = self::folder("data_resumed");
    let save = saving(&out, 1);
    let options =
        TrainOptions { steps: Some(4), save, load: loading(&folder), ..TrainOptions::default() };
    let trained = train(&resumed, &options);
    assert!(trained.warnings[0].contains("the next sample is 24"), "{:?}", trained.warnings);
    let checkpoint = Checkpoint::open(&out).unwrap();
    assert_eq!(tensor(&checkpoint, "planc.sample"), 48i64.to_le_bytes());
    assert_eq!(tensor(&checkpoint, "planc.seed"), 1234i64.to_le_bytes());
}

/// A number that no run writes is an error, and not a step after 2^64.
#[test]
fn a_step_that_cannot_be_is_refused() {
    let folder = save("bad_step", SMALL, "1", &[], 1);
    let item = Checkpoint::open(&folder).unwrap().tensor("planc.step").unwrap().chunks[0].item;
    let path = folder.join("step-1/__0_0.distcp");
    let mut bytes = std::fs::read(&path).unwrap();
    // With the checksum of what is there, as another program might write it.
    let number = (-1i64).to_le_bytes();
    let sum = checkpoint::sums::crc32(&number);
    let (head, tail) = checkpoint::archive::tensor_item(checkpoint::StoredType::I64, &[], sum);
    let start = item.offset as usize;
    bytes[start..start + item.len as usize].copy_from_slice(&[&head, &number[..], &tail].concat());
    std::fs::write(&path, bytes).unwrap();
    std::fs::remove_file(folder.join("step-1/__0_0.distcp.sums")).unwrap();
    let error = refused(&compile(SMALL, "1", &[]), loading(&folder).unwrap());
    assert_eq!(problems(error), ["`planc.step` is -1 and must be a count, from 0 to 2^53"]);
}

/// A part that the index lacks is found before anything is read.
#[test]
fn a_box_that_is_missing_is_found_first() {
    let folder = save("hole", SMALL, "2", &[], 1);
    let path = folder.join("step-1/.metadata");
    let mut index = checkpoint::Metadata::read(&std::fs::read(&path).unwrap()).unwrap();
    let key = "model.layers.0.mlp.up_proj.weight";
    assert!(index.tensors.get_mut(key).unwrap().chunks.pop().is_some());
    let mut bytes = Vec::new();
    index.write(&mut bytes).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let opened = runtime::Reshard::open(&compile(SMALL, "1", &[]), &loading(&folder).unwrap());
    let error = opened.err().unwrap();
    assert_eq!(error.code(), "PL0708", "{error}");
    assert!(error.to_string().contains(key), "{error}");
}

/// What PyTorch's `AdamW.state_dict()` has, by name and type.
#[test]
fn hyper_parameters_are_those_of_pytorch() {
    let folder = save("hyper", SMALL, "2", &[], 1);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let expect = [
        // That of the next step: the second of a warm-up over four.
        ("lr", Value::Float(1e-3 * 2.0 / 4.0)),
        ("betas", Value::Tuple(vec![Value::Float(0.9), Value::Float(0.95)])),
        ("eps", Value::Float(1e-8)),
        ("weight_decay", Value::Float(0.1)),
        ("amsgrad", Value::Bool(false)),
        ("maximize", Value::Bool(false)),
        ("foreach", Value::None),
        ("capturable", Value::Bool(false)),
        ("differentiable", Value::Bool(false)),
        ("fused", Value::None),
        ("decoupled_weight_decay", Value::Bool(true)),
    ];
    for (name, value) in expect {
        assert_eq!(group(&checkpoint, 0, name), value, "{name}");
    }
    assert_eq!(group(&checkpoint, 1, "weight_decay"), Value::Float(0.0));
}
