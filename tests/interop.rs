//! Stock PyTorch reads what planc saves, bit for bit, and goes on training from it.
//!
//! The scripts of `tests/torch` run under the Python of `tests/torch.sh`; without PyTorch these tests fail.
//! What they read is compared with what the session that saved holds, gathered: keys, types, shapes, bits.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ir::plan::Buffer;
use kernels::Proved;
use runtime::{LoadOptions, SaveOptions, Session, TrainOptions};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Steps before a checkpoint.
const STEPS: u64 = 2;

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn example(name: &str) -> String {
    fs::read_to_string(repo().join("examples").join(name)).unwrap()
}

fn compile(source: &str, mesh: &str, set: &[(&str, &str)]) -> Proved {
    let model = ir::model::parse_with(source, set).unwrap_or_else(|it| panic!("{it}"));
    let mesh = ir::model::MeshSpec::parse(mesh).unwrap();
    let graph = ir::model::elaborate(&model, &mesh).unwrap_or_else(|it| panic!("{it}"));
    codegen::compile(graph, &codegen::Options::default()).unwrap_or_else(|it| panic!("{it}")).plan
}

/// A Python that has PyTorch.
fn python() -> String {
    if let Ok(it) = std::env::var("PLANC_TORCH_PYTHON") {
        return it;
    }
    let made = Command::new(repo().join("tests/torch.sh")).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).unwrap().trim().to_string()
}

/// What a script of `tests/torch` prints.
#[track_caller]
fn torch(script: &str, args: &[&str]) -> String {
    let script = repo().join("tests/torch").join(script);
    let mut command = Command::new(python());
    command.args(["-W", "ignore"]).arg(&script).args(args).env("PYTHONDONTWRITEBYTECODE", "1");
    let done = command.output().unwrap();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{} {args:?}:\n{errors}", script.display());
    String::from_utf8(done.stdout).unwrap()
}

/// A checkpoint, and the session that saved it, as it was when it did.
struct Saved {
    session: Session,
    /// A folder of this test.
    root: PathBuf,
}

/// Trains for [`STEPS`] steps and saves.
#[track_caller]
fn save(test: &str, source: &str, mesh: &str, set: &[(&str, &str)]) -> Saved {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop").join(test);
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    let plan = compile(source, mesh, set);
    let save = SaveOptions { folder: root.join("ckpt"), ..SaveOptions::default() };
    let options = TrainOptions { steps: Some(STEPS), save: Some(save), ..TrainOptions::default() };
    let session = runtime::train(&plan, &options, |_| ()).unwrap_or_else(|it| panic!("{it}"));
    Saved { session, root }
}

/// A tensor: its type, its shape, its bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    let bytes = fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors.map(|(key, it)| (key, (it.dtype(), it.shape().to_vec(), it.data().to_vec()))).collect()
}

impl Saved {
    fn checkpoint(&self) -> String {
        self.root.join(format!("ckpt/step-{STEPS}")).display().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }

    /// A global tensor of f32, as planc itself has it.
    fn gathered(&self, buffer: Buffer) -> Tensor {
        let plan = self.session.plan();
        let tensor = self.session.read(&plan.buffers[buffer].name).unwrap();
        let bytes = tensor.data.iter().flat_map(|it| it.to_le_bytes()).collect();
        (Dtype::F32, tensor.shape.to_vec(), bytes)
    }

    /// All tensors that PyTorch must find, by its names for them.
    fn expected(&self) -> BTreeMap<String, Tensor> {
        let plan = self.session.plan();
        let scalar = |dtype, bytes: &[u8]| (dtype, Vec::new(), bytes.to_vec());
        let mut res = BTreeMap::new();
        for param in &plan.params {
            let name = &plan.buffers[param.buffer].name;
            for name in std::iter::once(name).chain(&param.aliases) {
                res.insert(format!("model.{name}"), self.gathered(param.buffer));
            }
            for state in ["exp_avg", "exp_avg_sq", "momentum_buffer"] {
                let Some(buffer) = plan.buffer(&format!("{name}.{state}")) else { continue };
                res.insert(format!("optim.state.{name}.{state}"), self.gathered(buffer));
                if state == "exp_avg" {
                    let step = scalar(Dtype::F32, &(STEPS as f32).to_le_bytes());
                    res.insert(format!("optim.state.{name}.step"), step);
                }
            }
        }
        let samples = STEPS * plan.run.global_batch;
        let numbers =
            [("step", STEPS), ("sample", samples), ("seed", plan.run.seed), ("finite", 1)];
        for (name, it) in numbers {
            res.insert(format!("planc.{name}"), scalar(Dtype::I64, &it.to_le_bytes()));
        }
        res
    }

    /// Compares what PyTorch read with [`Saved::expected`]. `planc.schedule` and `planc.state` may be there
    /// besides.
    #[track_caller]
    fn check(&self, found: &BTreeMap<String, Tensor>) {
        let expected = self.expected();
        for (key, (dtype, shape, bytes)) in &expected {
            let Some(found) = found.get(key) else { panic!("{key} is missing") };
            assert_eq!((&found.0, &found.1), (dtype, shape), "{key}");
            if found.2 != *bytes {
                let differ = found.2.chunks(4).zip(bytes.chunks(4)).position(|it| it.0 != it.1);
                panic!("{key} differs, first in element {} of {shape:?}", differ.unwrap());
            }
        }
        let own = |key: &str| key.starts_with("planc.schedule.") || key.starts_with("planc.state.");
        let other = |key: &&String| !expected.contains_key(*key) && !own(key);
        assert_eq!(found.keys().filter(other).collect::<Vec<_>>(), Vec::<&String>::new());
    }

    /// What one process reads into plain tensors; and the Python objects, as it prints them.
    #[track_caller]
    fn load_plain(&self) -> (BTreeMap<String, Tensor>, Value) {
        let out = self.path("plain.safetensors");
        let printed = torch("load_plain.py", &[&self.checkpoint(), &out]);
        (tensors(Path::new(&out)), serde_json::from_str(&printed).unwrap())
    }

    /// What the processes of a mesh read into DTensors.
    #[track_caller]
    fn load_dtensors(&self, mesh: &str, place: &[&str]) -> BTreeMap<String, Tensor> {
        let (out, checkpoint) = (self.path("dtensor.safetensors"), self.checkpoint());
        let mut args = vec![checkpoint.as_str(), "--mesh", mesh, "--out", &out];
        place.iter().for_each(|it| args.extend(["--place", it]));
        torch("load_dtensor.py", &args);
        tensors(Path::new(&out))
    }
}

/// A GPT-2 whose vocabulary divides by nothing, tied, with little else.
const GPT2: [(&str, &str); 7] = [
    ("sequence", "16"),
    ("layers[0].dim", "32"),
    ("layers[1].positions", "16"),
    ("layers[2].n", "1"),
    ("layers[2].body[0].attention.heads", "4"),
    ("layers[2].body[0].mlp.ffn", "64"),
    ("clip_norm", "None"),
];

#[test]
fn plain_tensors_are_those_of_the_session() {
    for mesh in ["2x4", "2x2x2"] {
        let saved = save(&format!("plain-{mesh}"), &example("llama-tiny.ron"), mesh, &[]);
        let (found, printed) = saved.load_plain();
        saved.check(&found);
        assert_eq!(printed["nested"], serde_json::json!(["model", "optim", "planc"]), "{mesh}");
    }
}

#[test]
fn dtensors_on_another_mesh_are_those_of_the_session() {
    let saved = save("dtensor", &example("llama-tiny.ron"), "2x4", &[]);
    // Columns over both axes; and rows as FSDP over TP holds them.
    let place = ["*_proj.weight*=S1,S0", "*=SS0/2,S0"];
    saved.check(&saved.load_dtensors("2x2", &place));
    // 3 divides none of the sizes.
    saved.check(&saved.load_dtensors("3", &["*=S0"]));
}

/// PyTorch cannot save 50257 rows on 4 x 2 at all, and loses the last of 17 and of 9.
#[test]
fn uneven_rows_are_whole() {
    for rows in ["17", "9"] {
        let set = [("layers[0].vocab", rows)];
        let saved = save(&format!("rows-{rows}"), &example("mlp.ron"), "4x2", &set);
        saved.check(&saved.load_plain().0);
        saved.check(&saved.load_dtensors("2x2", &["*=S0,R"]));
    }
}

/// Norm weights and parameters of a Block, 7 and 5 rows over 2 x 2 and 2 x 4, some in strided shards and some of them empty.
#[test]
fn parameters_that_are_cut_unevenly_are_whole() {
    for mesh in ["2x2", "2x4"] {
        let source = include_str!("models/uneven.ron");
        let saved = save(&format!("uneven-{mesh}"), source, mesh, &[]);
        let (found, _) = saved.load_plain();
        assert_eq!(found["model.own.up"].1, [5, 7]);
        saved.check(&found);
        saved.check(&saved.load_dtensors("2x2", &["*.own.*=S0,R", "*=S0,S0"]));
    }
}

/// FP8: codes are of PyTorch's 8-bit types, scales and histories of amaxes are there, and all are what
/// the session computes with.
#[test]
fn fp8_state_is_that_of_the_session() {
    for (mesh, recipe) in [("2x4", "Float8CurrentScaling()"), ("2x2x2", "DelayedScaling()")] {
        let set = [("recipe", recipe)];
        let saved = save(&format!("fp8-{mesh}"), &example("llama-tiny-fp8.ron"), mesh, &set);
        let (found, _) = saved.load_plain();
        saved.check(&found);
        let states = found.iter().filter_map(|it| Some((it.0.strip_prefix("planc.state.")?, it.1)));
        let mut by_type: BTreeMap<Dtype, Vec<&str>> = BTreeMap::new();
        for (name, (dtype, shape, bytes)) in states {
            let expected = saved.session.read(name).unwrap();
            assert_eq!(*shape, expected.shape.to_vec(), "{name}");
            let values: Vec<f32> = match dtype {
                Dtype::F8_E4M3 => bytes.iter().map(|&it| e4m3(it)).collect(),
                _ => floats(&(*dtype, shape.clone(), bytes.clone())).map(|it| it as f32).collect(),
            };
            assert_eq!(values, expected.data, "{name}");
            by_type.entry(*dtype).or_default().push(name);
        }
        if recipe == "DelayedScaling()" {
            let histories = by_type[&Dtype::F32].iter().filter(|it| it.ends_with(".amax_history"));
            assert!(histories.count() > 28, "{by_type:?}");
        }
        // A weight of each of 7 GEMMs in 4 layers.
        assert!(by_type[&Dtype::F8_E4M3].len() >= 28, "{by_type:?}");
        if mesh == "2x4" {
            assert_eq!(found, saved.load_dtensors("2x2", &["*=S0,S1"]));
        }
    }
}

/// The value of a code of E4M3 without infinities: a sign, 4 bits of exponent less 7, 3 of mantissa.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => mantissa / 8.0 * 2.0_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// C15: both names of a tied pair, and its bytes once; the 50257 rows of GPT-2 on 4 x 2.
#[test]
fn tied_pair_has_both_names_and_is_stored_once() {
    let saved = save("tied", &example("gpt2-small.ron"), "4x2", &GPT2);
    let (found, _) = saved.load_plain();
    let names = ["model.lm_head.weight", "model.transformer.wte.weight"];
    assert_eq!(found[names[0]].1, [50257, 32]);
    saved.check(&found);
    let files = fs::read_dir(saved.checkpoint()).unwrap().map(|it| it.unwrap());
    let stored: u64 = files.map(|it| it.metadata().unwrap().len()).sum();
    let once = saved.session.plan().params.iter().map(|it| it.buffer);
    let once: usize = once.map(|it| 3 * saved.gathered(it).2.len()).sum();
    let table = found[names[0]].2.len();
    assert!(stored < (once + table / 2) as u64, "{stored} bytes for {once} of state");

    let printed = torch("fsdp_load.py", &[&saved.checkpoint(), "--ranks", "2"]);
    let printed: Value = serde_json::from_str(&printed).unwrap();
    let tensors = &printed["tensors"];
    assert_eq!(tensors[names[0]]["sha256"], tensors[names[1]]["sha256"]);
    assert_eq!(printed["tied"]["lm_head.weight"], "transformer.wte.weight");
}

/// C02, pytorch#167859: a strided shard that is several runs of rows, which DCP's own writer refuses.
#[test]
fn strided_shard_of_several_runs_is_read_as_a_plain_tensor() {
    for (mesh, rows) in [("2", "8"), ("2x2", "10"), ("2x2", "8")] {
        let source = format!(
            r#"Model(
                name: "strided",
                batch: Global(8),
                sequence: 4,
                optimizer: AdamW(),
                schedule: (lr: 1e-2),
                layers: [
                    Embedding(name: "embed", vocab: 16, dim: 8),
                    Residual(body: [
                        Block(
                            name: "own",
                            inputs: ["x"],
                            params: {{
                                "up.weight": (shape: [{rows}, 8], placements: {{"dp": StridedShard(0, 2)}}),
                                "down.weight": (shape: [8, {rows}], placements: {{"dp": StridedShard(1, 2)}}),
                            }},
                            ops: [
                                (op: "matmul(transpose_b:true)", inputs: ["x", "up.weight"], outputs: ["h"]),
                                (op: "matmul(transpose_b:true)", inputs: ["h", "down.weight"], outputs: ["y"]),
                            ],
                            outputs: ["y"],
                            placements: {{"y": Stream}},
                        ),
                    ]),
                    LmHead(name: "head"),
                    CrossEntropy(),
                ],
            )"#
        );
        let saved = save(&format!("strided-{mesh}-{rows}"), &source, mesh, &[]);
        let (found, _) = saved.load_plain();
        assert!(found.contains_key("optim.state.own.up.weight.exp_avg"));
        saved.check(&found);
    }
}

/// The keys are those of a real FSDP2 job, and what it then holds is what was saved.
#[test]
fn fsdp_job_takes_model_and_optimizer() {
    let saved = save("fsdp", &example("llama-tiny.ron"), "2x4", &[("schedule.warmup", "10")]);
    let out = saved.path("fsdp.safetensors");
    let printed = torch("fsdp_load.py", &[&saved.checkpoint(), "--ranks", "2", "--out", &out]);
    let mut found = tensors(Path::new(&out));
    // A job in PyTorch has no use for these.
    found.extend(saved.expected().into_iter().filter(|it| it.0.starts_with("planc.")));
    saved.check(&found);

    let printed: Value = serde_json::from_str(&printed).unwrap();
    let groups = printed["param_groups"].as_array().unwrap();
    let mut params: Vec<&str> = Vec::new();
    for group in groups {
        let names: Vec<_> =
            group["params"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
        // Weights of norms do not decay.
        let decay = if names.iter().any(|it| it.contains("norm")) { 0.0 } else { 0.1 };
        assert_eq!(group["weight_decay"], decay, "{names:?}");
        // That of the step that comes.
        assert_eq!(group["lr"], saved.session.plan().run.schedule.at(STEPS));
        assert_eq!(
            (&group["betas"], &group["eps"]),
            (&serde_json::json!([0.9, 0.95]), &serde_json::json!(1e-8))
        );
        params.extend(names);
    }
    params.sort_unstable();
    let plan = saved.session.plan();
    let mut expected: Vec<&str> =
        plan.params.iter().map(|it| plan.buffers[it.buffer].name.as_str()).collect();
    expected.sort_unstable();
    assert_eq!(params, expected);
}

/// From planc to an FSDP2 job of PyTorch, which saves it its own way, and back: no bit is lost.
#[test]
fn run_goes_on_after_a_stay_in_torch() {
    let (source, set) = (example("llama-tiny.ron"), [("schedule.warmup", "10")]);
    let saved = save("stay", &source, "2x4", &set);
    let theirs = saved.path("torch");
    torch("fsdp_load.py", &[&saved.checkpoint(), "--ranks", "2", "--save", &theirs]);
    let plan = compile(&source, "2x4", &set);
    let one_more = TrainOptions { steps: Some(STEPS + 1), ..TrainOptions::default() };
    let load = LoadOptions { path: theirs.into(), ..LoadOptions::default() };
    let resumed = TrainOptions { load: Some(load), ..one_more.clone() };
    let [expected, found] = [one_more, resumed].map(|options| {
        let session = runtime::train(&plan, &options, |_| ()).unwrap_or_else(|it| panic!("{it}"));
        Saved { session, root: saved.root.clone() }.expected()
    });
    assert_ne!(expected, saved.expected());
    for (key, expected) in &expected {
        assert!(found[key] == *expected, "{key} differs");
    }
}

/// Relative to the learning rate. The gradient is taken from moments before and after, by which it is off by
/// some 13 roundings of f32 (6e-8) of the largest gradient of three steps; with that the second moment
/// is off by 29 of its own size, its root by half of that, and both moments are rounded some five times on
/// either side. An update is at most 1.8 learning rates in step 3: about 50 roundings.
const UPDATE: f64 = 50.0 * 6e-8;
/// Relative to a weight: it is rounded after decay and after the update, on either side.
const WEIGHT: f64 = 4.0 * 6e-8;

#[test]
fn torch_makes_the_same_next_step() {
    let set = [("schedule.warmup", "10"), ("optimizer.betas", "(0.9, 0.95)")];
    let saved = save("adamw", &example("llama-tiny.ron"), "2x4", &set);
    let before = saved.expected();
    // The same run again, one step longer.
    let plan = compile(&example("llama-tiny.ron"), "2x4", &set);
    let options = TrainOptions { steps: Some(STEPS + 1), ..TrainOptions::default() };
    let longer = runtime::train(&plan, &options, |_| ()).unwrap();
    let longer = Saved { session: longer, root: saved.root.clone() };
    let after = longer.expected();

    let names: Vec<&str> = before.keys().filter_map(|it| it.strip_prefix("model.")).collect();
    let gradients: BTreeMap<&str, Tensor> = names
        .iter()
        .map(|name| {
            let key = format!("optim.state.{name}.exp_avg");
            let (was, is) = (floats(&before[&key]), floats(&after[&key]));
            let gradient = was.zip(is).map(|(was, is)| (is - 0.9 * was) / (1.0 - 0.9));
            let bytes = gradient.flat_map(|it| (it as f32).to_le_bytes()).collect();
            (*name, (Dtype::F32, before[&key].1.clone(), bytes))
        })
        .collect();
    let views = gradients.iter().map(|(name, (dtype, shape, bytes))| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let (given, out) = (saved.path("gradients.safetensors"), saved.path("stepped.safetensors"));
    safetensors::serialize_to_file(views, None, Path::new(&given)).unwrap();
    torch("adamw_step.py", &[&saved.checkpoint(), &given, &out]);

    let lr = plan.run.schedule.at(STEPS);
    let stepped = tensors(Path::new(&out));
    assert_eq!(stepped.len(), names.len());
    for (name, found) in &stepped {
        let key = format!("model.{name}");
        let mut moved = 0.0_f64;
        let weights = floats(&before[&key]).zip(floats(&after[&key])).zip(floats(found));
        for (i, ((was, expected), found)) in weights.enumerate() {
            let off = (found - expected).abs();
            assert!(
                off <= lr * UPDATE + expected.abs() * WEIGHT,
                "{name}[{i}]: {found}, not {expected}"
            );
            moved = moved.max((expected - was).abs());
        }
        assert!(moved > 0.1 * lr, "{name} moved by {moved:e} only");
    }
}

/// The elements of a tensor of f32.
fn floats(tensor: &Tensor) -> impl Iterator<Item = f64> {
    assert_eq!(tensor.0, Dtype::F32);
    tensor.2.chunks_exact(4).map(|it| f64::from(f32::from_le_bytes(it.try_into().unwrap())))
}
