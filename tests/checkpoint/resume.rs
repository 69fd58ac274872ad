//! Training that was stopped and resumed is training.

use std::path::Path;

use crate::harness::*;

/// Meshes with padding, with replicas, with both.
const MESHES: [&str; 7] = ["1", "2", "4", "8", "2x2", "4x2", "2x2x2"];

/// Relative, of losses after ten and more steps on different meshes: as in `tests/train.rs`.
const LOSS: f64 = 1e-5;

const SAVED: u64 = 10;
const STEPS: u64 = 20;

/// Saves at step 10 on `from`; loads on each of `to`.
#[track_caller]
fn check(test: &str, vocab: &str, from: &str, to: &[&str]) {
    let set = [("layers[0].vocab", vocab)];
    let folder = folder(test);
    let plan = compile(SMALL, from, &set);
    let saved = train(
        &plan,
        &runtime::TrainOptions {
            steps: Some(SAVED),
            save: saving(&folder, SAVED),
            ..runtime::TrainOptions::default()
        },
    );
    let expect = state(&saved.session);
    let report = checkpoint::verify::verify(&checkpoint::Checkpoint::open(&folder).unwrap());
    assert!(report.problems.is_empty() && report.unsummed_bytes == 0, "{:?}", report.problems);
    let straight = train_to(&plan, STEPS, None).losses;
    for mesh in to {
        let what = format!("vocab {vocab}, {from} to {mesh}");
        let plan = compile(SMALL, mesh, &set);
        // Nothing is left to train: what the session holds is what was loaded.
        let at_rest = train_to(&plan, SAVED, Some(&folder));
        let loaded = state(&at_rest.session);
        assert_eq!(loaded.len(), expect.len(), "{what}");
        for (name, bits) in &loaded {
            assert!(*bits == expect[name], "{what}: `{name}` is not what was saved");
        }
        let elements: usize = loaded.values().map(Vec::len).sum();
        let read = at_rest.loaded.expect("it was loaded").bytes;
        assert_eq!(read, elements as u64 * 4, "{what}: each byte is read once, by one rank");
        let resumed = train_to(&plan, STEPS, Some(&folder.join("step-10")));
        assert_eq!(resumed.warnings, [""; 0], "{what}");
        assert!(resumed.losses.keys().copied().eq(SAVED + 1..=STEPS), "{what}");
        for (step, &loss) in &resumed.losses {
            let expect = straight[step];
            if *mesh == from {
                assert_eq!(loss.to_bits(), expect.to_bits(), "{what}: step {step}");
            }
            let off = (f64::from(loss) / f64::from(expect) - 1.0).abs();
            assert!(off <= LOSS, "{what}: loss of step {step} is off by {off:e}");
        }
    }
}

#[test]
fn from_2x4_to_any_mesh() {
    check("from_2x4", "250", "2x4", &MESHES);
    check("from_2x4_to_itself", "250", "2x4", &["2x4"]);
}

#[test]
fn from_2x2x2_to_any_mesh() {
    check("from_2x2x2", "250", "2x2x2", &MESHES);
}

#[test]
fn a_vocabulary_of_2049() {
    check("vocab_2049", "2049", "2x4", &["1", "2x4", "4", "2x2x2"]);
    check("vocab_2049_hsdp", "2049", "2x2x2", &["4x2", "2x2x2"]);
}

/// Saved at step 3; the ten steps after it are those of a run without a stop.
#[track_caller]
fn check_recipe(test: &str, set: Set) {
    let folder = folder(test);
    let plan = compile(WIDE, "2x2", set);
    let options = runtime::TrainOptions {
        steps: Some(13),
        save: saving(&folder, 3),
        ..runtime::TrainOptions::default()
    };
    let straight = train(&plan, &options);
    let resumed = train_to(&plan, 13, Some(&folder.join("step-3")));
    assert_eq!(resumed.warnings, [""; 0], "{set:?}");
    assert!(resumed.losses.keys().copied().eq(4..=13), "{set:?}");
    for (step, loss) in &resumed.losses {
        assert_eq!(loss.to_bits(), straight.losses[step].to_bits(), "{set:?}: step {step}");
    }
    assert!(state(&resumed.session) == state(&straight.session), "{set:?}: final state");
}

#[test]
fn bf16() {
    check_recipe("bf16", &[("recipe", "Bf16")]);
    check_recipe("bf16_storage", &[("precision.storage", "bf16")]);
    let sgd = ("optimizer", "Sgd(momentum: 0.9)");
    check_recipe("bf16_micro", &[("micro_batches", "2"), ("batch", "Global(4)"), sgd]);
}

// C35, TransformerEngine#1860: histories and scales are tensors of fixed shapes, and come back.
#[test]
fn delayed_scaling() {
    check_recipe("delayed", &[("recipe", "DelayedScaling(amax_history_len: 4)")]);
}

#[test]
fn current_scaling() {
    check_recipe("current", &[("recipe", "Float8CurrentScaling()")]);
}

#[test]
fn block_scaling() {
    check_recipe("block", &[("recipe", "Float8BlockScaling()")]);
}

/// Boxes between blocks are loaded like others, on a mesh that cuts them elsewhere and back.
#[test]
fn weights_cut_between_blocks() {
    check_recipe(
        "rounded_2x2",
        &ROUNDED.map(|it| if it.0.ends_with("ffn") { (it.0, "1280") } else { it }),
    );
    let plans = ["1", "2", "3"].map(|mesh| compile(WIDE, mesh, &ROUNDED));
    let folders = [folder("rounded_2"), folder("rounded_3")];
    let options = |from: &Path, load: Option<&Path>| runtime::TrainOptions {
        steps: Some(2),
        save: saving(from, 2),
        load: load.and_then(loading),
        ..runtime::TrainOptions::default()
    };
    let expect = state(&train(&plans[1], &options(&folders[0], None)).session);
    train(&plans[2], &options(&folders[1], Some(&folders[0])));
    for (plan, from) in [(&plans[0], &folders[0]), (&plans[1], &folders[1])] {
        let found = train_to(plan, 2, Some(from));
        assert!(state(&found.session) == expect, "{:?}", found.warnings);
    }
}

#[test]
fn mxfp8() {
    check_recipe("mxfp8", &[("recipe", "MXFP8BlockScaling(enable_2d_quantization: true)")]);
}

#[test]
fn nvfp4() {
    check_recipe("nvfp4", &[("recipe", "NVFP4BlockScaling()")]);
}

#[test]
fn custom_recipe() {
    let recipe = "Custom(weight: (format: E4M3, scaling: Delayed(history: 3)), \
                  input: (format: E4M3, scaling: Current(pow2: true)))";
    check_recipe("custom", &[("recipe", recipe)]);
}

/// Scales that another mesh varies over have another shape there: what was saved of those weights is made
/// again, and a warning says so. The master weights are the same bytes.
#[test]
fn scales_of_another_mesh_are_made_again() {
    let folder = folder("other_scales");
    let set = [("recipe", "Float8BlockScaling()")];
    let four = compile(WIDE, "2x2", &set);
    let options = runtime::TrainOptions {
        steps: Some(2),
        save: saving(&folder, 2),
        ..runtime::TrainOptions::default()
    };
    let saved = state(&train(&four, &options).session);
    let one = compile(WIDE, "1", &[("recipe", "DelayedScaling(amax_history_len: 4)")]);
    let loaded = train_to(&one, 2, Some(&folder));
    assert!(
        loaded.warnings[0].contains("are made again from the master weights"),
        "{:?}",
        loaded.warnings
    );
    let found = state(&loaded.session);
    let master = "layers.0.mlp.gate_proj.weight";
    assert!(found[master] == saved[master]);
    let fresh = runtime::Session::new(&one, &runtime::SessionOptions::default()).unwrap();
    for param in &one.params {
        let name = &one.buffers[param.buffer].name;
        let values: Vec<f32> = saved[name].iter().map(|&it| f32::from_bits(it)).collect();
        fresh.write(name, &values).unwrap();
    }
    fresh.prepare().unwrap();
    let codes = format!("{master}.compute");
    let expect = fresh.read(&codes).unwrap().data;
    assert!(expect.iter().map(|it| it.to_bits()).eq(found[&codes].iter().copied()));
}

/// What PyTorch does: bias correction counts from a parameter's own first update, and so moves each element by the learning
/// rate, whatever the gradient. By the step of the run, 3, it would be 0.64 of that.
#[test]
fn a_thawed_parameter_moves_as_in_its_first_step() {
    const LR: f32 = 1e-3;
    /// `g / (|g| + eps)` for gradients of 1e-5 and more with an `eps` of 1e-12, and roundings of weights near 0.1 (4e-9).
    const MOVE: f32 = 1e-4;
    let set = [
        ("optimizer", "AdamW(betas: (0.9, 0.999), eps: 1e-12, weight_decay: 0.0)"),
        ("schedule", "(lr: 1e-3)"),
    ];
    let frozen = [set[0], set[1], ("frozen", r#"["head.weight"]"#)];
    let (folder, after) = (folder("thawed"), self::folder("thawed_after"));
    let options = |save: &Path, every| runtime::TrainOptions {
        steps: Some(every),
        save: saving(save, every),
        ..runtime::TrainOptions::default()
    };
    train(&compile(SMALL, "2x2", &frozen), &options(&folder, 2));
    let allow_missing = vec!["optim.state.head.weight.*".parse().unwrap()];
    let load = loading(&folder).map(|it| runtime::LoadOptions { allow_missing, ..it });
    let thawed = compile(SMALL, "2", &set);
    train(&thawed, &runtime::TrainOptions { load, ..options(&after, 3) });
    let [before, after] = [folder.join("step-2"), after.join("step-3")]
        .map(|it| checkpoint::Checkpoint::open(&it).unwrap());
    let floats = |it: &checkpoint::Checkpoint, key: &str| -> Vec<f32> {
        let bytes = tensor(it, key);
        bytes.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect()
    };
    let key = "model.head.weight";
    let moved =
        floats(&before, key).into_iter().zip(floats(&after, key)).map(|(a, b)| (a - b).abs());
    let mut moved: Vec<f32> = moved.collect();
    moved.sort_by(f32::total_cmp);
    assert!(moved[moved.len() - 1] <= LR * (1.0 + MOVE), "{:?}", moved.last());
    // Gradients of words that do not occur are small, and none is 0.
    assert!(moved[moved.len() / 2] >= LR * (1.0 - MOVE), "{}", moved[moved.len() / 2]);
    let steps = |param: &str| floats(&after, &format!("optim.state.{param}.step"));
    assert_eq!((steps("head.weight"), steps("norm.weight")), (vec![1.0], vec![3.0]));
}
