//! Trains small models with and without a stop in between, and reads what was saved.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use checkpoint::pickle::Value;
use kernels::Proved;
use runtime::{Event, LoadOptions, LoadReport, RunError, SaveOptions, Session, TrainOptions};

pub use tests::state;

/// A Llama of two layers. Few of its sizes are divisible by more than two, and half of its parameters do
/// not decay.
pub const SMALL: &str = r#"Model(
    name: "small",
    batch: Global(8),
    sequence: 8,
    sequence_parallel: true,
    init: Normal(std: 0.1),
    optimizer: AdamW(betas: (0.9, 0.95), weight_decay: 0.1),
    schedule: (lr: 1e-3, warmup: 4, decay: Cosine(until: 30, min: 1e-4)),
    layers: [
        Embedding(name: "embed", vocab: 250, dim: 16),
        Repeat(n: 2, prefix: "layers", body: [
            TransformerLayer(
                norm: RmsNorm(eps: 1e-5),
                attention: (heads: 4, kv_heads: 2, rope: (theta: 10000)),
                mlp: (ffn: 28, activation: swiglu),
                bias: false,
            ),
        ]),
        RmsNorm(name: "norm", eps: 1e-5),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

/// A Llama of one layer with dims that all recipes take.
pub const WIDE: &str = r#"Model(
    name: "wide",
    batch: Global(2),
    sequence: 128,
    sequence_parallel: true,
    precision: (compute: bf16),
    optimizer: AdamW(betas: (0.9, 0.95), weight_decay: 0.1),
    schedule: (lr: 1e-3),
    layers: [
        Embedding(name: "embed", vocab: 64, dim: 256),
        Repeat(n: 1, prefix: "layers", body: [
            TransformerLayer(
                norm: RmsNorm(eps: 1e-5),
                attention: (heads: 2, rope: (theta: 10000)),
                mlp: (ffn: 256, activation: swiglu),
                bias: false,
            ),
        ]),
        RmsNorm(name: "norm", eps: 1e-5),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;

/// Of [`WIDE`], with which FSDP cuts `gate_proj` and `up_proj` between blocks, on two ranks and on three.
pub const ROUNDED: [(&str, &str); 3] = [
    ("recipe", "Float8BlockScaling()"),
    ("batch", "Global(6)"),
    ("layers[1].body[0].mlp.ffn", "640"),
];

/// `--set` options.
pub type Set<'a> = &'a [(&'a str, &'a str)];

#[track_caller]
pub fn compile(source: &str, mesh: &str, set: Set) -> Proved {
    let model = ir::model::parse_with(source, set).unwrap();
    let mesh = ir::model::MeshSpec::parse(mesh).unwrap();
    let graph = ir::model::elaborate(&model, &mesh).unwrap();
    codegen::compile(graph, &codegen::Options::default()).unwrap().plan
}

/// A folder of its own for one test, empty.
pub fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoint").join(test);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Saves into a folder after every `every`-th step.
pub fn saving(folder: &Path, every: u64) -> Option<SaveOptions> {
    Some(SaveOptions { folder: folder.to_path_buf(), every: Some(every), ..SaveOptions::default() })
}

/// Loads what is there, strictly.
pub fn loading(path: &Path) -> Option<LoadOptions> {
    Some(LoadOptions { path: path.to_path_buf(), ..LoadOptions::default() })
}

/// What training came to.
pub struct Trained {
    pub session: Session,
    /// By step, from 1.
    pub losses: BTreeMap<u64, f32>,
    /// In order.
    pub warnings: Vec<String>,
    /// What was said of each checkpoint that was saved.
    pub saved: Vec<PathBuf>,
    /// What was said of the one that was loaded.
    pub loaded: Option<LoadReport>,
}

pub fn try_train(plan: &Proved, options: &TrainOptions) -> Result<Trained, RunError> {
    let (mut losses, mut warnings, mut saved) = (BTreeMap::new(), Vec::new(), Vec::new());
    let mut loaded = None;
    let session = runtime::train(plan, options, |event| match event {
        Event::Step(it) => {
            losses.insert(it.step, it.loss.unwrap());
        }
        Event::Warning(it) => warnings.push(it.to_string()),
        Event::Saved(it) => saved.push(it.path.clone()),
        Event::Loaded(it) => loaded = Some(it.clone()),
        Event::Data(_) | Event::RolledBack(_) | Event::Stopped(_) => (),
    })?;
    Ok(Trained { session, losses, warnings, saved, loaded })
}

#[track_caller]
pub fn train(plan: &Proved, options: &TrainOptions) -> Trained {
    try_train(plan, options).unwrap_or_else(|it| panic!("{it}"))
}

/// Trains up to a step, from the beginning or from a checkpoint.
#[track_caller]
pub fn train_to(plan: &Proved, steps: u64, load: Option<&Path>) -> Trained {
    let load = load.and_then(loading);
    train(plan, &TrainOptions { steps: Some(steps), load, ..TrainOptions::default() })
}

/// The error of loading, without its code.
#[track_caller]
pub fn refused(plan: &Proved, load: LoadOptions) -> RunError {
    let options = TrainOptions { load: Some(load), ..TrainOptions::default() };
    match try_train(plan, &options) {
        Ok(_) => panic!("it loads"),
        Err(error) => error,
    }
}

/// The bytes of a tensor of a checkpoint.
#[track_caller]
pub fn tensor(checkpoint: &Checkpoint, key: &str) -> Vec<u8> {
    checkpoint.read_all(key).unwrap_or_else(|it| panic!("{it}"))
}

/// A hyper-parameter of a group.
#[track_caller]
pub fn group(checkpoint: &Checkpoint, index: u64, name: &str) -> Value {
    checkpoint.object(&format!("optim.param_groups.{index}.{name}")).unwrap()
}

/// All files of a folder, by name.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|it| it.unwrap());
    let file =
        |it: fs::DirEntry| (it.file_name().into_string().unwrap(), fs::read(it.path()).unwrap());
    entries.filter(|it| it.path().is_file()).map(file).collect()
}

/// All files of a checkpoint, by name, without the name of the run that saved it.
pub fn files_of_any_run(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut res = files(folder);
    let first = res["__0_0.distcp.sums"].split(|&it| it == b'\n').next().unwrap();
    let save: serde_json::Value = serde_json::from_slice(first).unwrap();
    let save = save["save"].as_str().unwrap().as_bytes().to_vec();
    for bytes in res.values_mut() {
        let at = bytes.windows(save.len()).position(|it| it == save);
        at.into_iter().for_each(|it| drop(bytes.drain(it..it + save.len())));
    }
    res
}

/// Names in a folder, in order.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut res: Vec<String> =
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    res.sort();
    res
}
