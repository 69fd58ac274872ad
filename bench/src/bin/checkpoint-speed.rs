//! One save or load of 1 GiB of f32 state on two CPU ranks, or the planning of a large one.
//!
//! `bench/checkpoint.py` runs it beside PyTorch:
//!
//! ```text
//! checkpoint-speed save FOLDER     saves FOLDER/step-1, prints seconds
//! checkpoint-speed load FOLDER     loads it
//! checkpoint-speed plan FOLDER     what each of 1024 ranks works out, and the index FOLDER/.metadata
//! ```

use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use bench::{compile, example_with};
use checkpoint::save::{Position, file_items, metadata};
use codegen::Proved;
use ir::checkpoint::CheckpointLayout;
use runtime::{Event, LoadOptions, SaveOptions, Session, SessionOptions, TrainOptions};

/// 89.48 M parameters with two moments: 1 GiB. Few tokens, so that the step before the save is short.
const MODEL: &str = r#"Model(
    name: "gibibyte",
    batch: Global(2),
    sequence: 8,
    optimizer: AdamW(),
    schedule: (lr: 1e-3),
    layers: [
        Embedding(name: "embed", vocab: 21373, dim: 768),
        Repeat(n: 8, prefix: "layers", body: [
            TransformerLayer(
                norm: RmsNorm(),
                attention: (heads: 12, rope: (theta: 10000)),
                mlp: (ffn: 2048, activation: swiglu),
                bias: false,
            ),
        ]),
        RmsNorm(name: "norm"),
        LmHead(name: "head"),
        CrossEntropy(),
    ],
)"#;
const MESH: &str = "2";

/// So many layers of Llama-3-8B have 300 parameters, 900 tensors with their moments.
const PLANNED: [(&str, &str); 2] = [("layers[1].n", "33"), ("batch", "Global(1024)")];
const PLANNED_MESH: &str = "1024";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["save", folder] => save(Path::new(folder)),
        ["load", folder] => load(Path::new(folder)),
        ["plan", folder] => plan(Path::new(folder)),
        _ => panic!("usage: checkpoint-speed save|load|plan FOLDER"),
    }
}

fn gibibyte() -> Proved {
    let model = ir::model::parse(MODEL).unwrap_or_else(|it| panic!("{it}"));
    compile(&model, MESH)
}

fn save(folder: &Path) {
    let save = SaveOptions { folder: folder.to_path_buf(), ..SaveOptions::default() };
    let options = TrainOptions { steps: Some(1), save: Some(save), ..TrainOptions::default() };
    let print = |event: Event<'_>| match event {
        Event::Saved(it) => println!("{}", it.seconds),
        Event::Data(_)
        | Event::Loaded(_)
        | Event::RolledBack(_)
        | Event::Step(_)
        | Event::Stopped(_) => (),
        Event::Warning(it) => panic!("{it}"),
    };
    runtime::train(&gibibyte(), &options, print).unwrap_or_else(|it| panic!("{it}"));
}

fn load(folder: &Path) {
    let session = Session::new(&gibibyte(), &SessionOptions::default());
    let session = session.unwrap_or_else(|it| panic!("{it}"));
    let options = LoadOptions { path: folder.to_path_buf(), ..LoadOptions::default() };
    let began = Instant::now();
    runtime::checkpoint::load::load(&session, &options).unwrap_or_else(|it| panic!("{it}"));
    println!("{}", began.elapsed().as_secs_f64());
}

fn plan(folder: &Path) {
    let plan = compile(&example_with("llama3-8b", &PLANNED), PLANNED_MESH);
    let position = Position { step: 1, sample: 8, seed: 0, finite: true };
    let mut slowest = 0.0_f64;
    let mesh = plan.mesh.clone();
    for rank in [0, 1, mesh.n_ranks() / 2, mesh.n_ranks() - 1] {
        let began = Instant::now();
        let layout = CheckpointLayout::of(&plan).unwrap_or_else(|it| panic!("{it}"));
        let items = file_items(&layout, &position, &mesh.coord_of(rank));
        slowest = slowest.max(began.elapsed().as_secs_f64());
        assert!(!items.is_empty());
    }
    println!(
        "{} tensors x {} ranks: {:.2} ms of planning a rank",
        3 * plan.params.len(),
        mesh.n_ranks(),
        slowest * 1e3
    );

    let layout = CheckpointLayout::of(&plan).unwrap_or_else(|it| panic!("{it}"));
    fs::create_dir_all(folder).expect("the folder can be made");
    let path = folder.join(".metadata");
    let began = Instant::now();
    let file = File::create(&path).expect("the index can be made");
    metadata(&layout, &position).write(&file).expect("the index can be written");
    file.sync_all().expect("the index can be written");
    let seconds = began.elapsed().as_secs_f64();
    let bytes = file.metadata().expect("it is there").len();
    println!(".metadata: {seconds:.2} s with fsync, {bytes} bytes");
}
