//! `planc ckpt ls`: the keys of a checkpoint.

use std::fs;
use std::path::Path;

use checkpoint::Checkpoint;
use serde::Serialize;

use crate::controls::clean;
use crate::report::{Outcome, Ui, print_view};
use crate::table::{Align, Table, bytes, plural};

use super::{One, open};

/// Lists the tensors and objects of a checkpoint.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    checkpoint: One,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let One { path, keys } = &args.checkpoint;
    let checkpoint = open(path)?;
    keys.check(&checkpoint)?;
    let mut view = View::of(&checkpoint, |it| keys.fit(it));
    if checkpoint.path() != path {
        view.steps = steps(path, checkpoint.path());
    }
    print_view(ui, &view, View::text)
}

#[derive(Debug, Serialize)]
struct View {
    /// Those beside it, and itself, where `latest` chose it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    steps: Vec<StepView>,
    path: String,
    files: usize,
    tensors: Vec<TensorView>,
    objects: Vec<ObjectView>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct StepView {
    name: String,
    /// Of all its files.
    bytes: u64,
    latest: bool,
}

/// The checkpoints of a folder by their steps, if there are several; `latest` is the one that is listed.
fn steps(folder: &Path, latest: &Path) -> Vec<StepView> {
    let mut res: Vec<(u64, StepView)> = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, Ok(name)) = (entry.path(), entry.file_name().into_string()) else { continue };
        let step = name.strip_prefix("step-").and_then(|it| it.parse().ok());
        if let Some(step) = step.filter(|_| path.join(".metadata").is_file()) {
            let files = fs::read_dir(&path).into_iter().flatten().flatten();
            let bytes = files.filter_map(|it| Some(it.metadata().ok()?.len())).sum();
            res.push((step, StepView { name, bytes, latest: path == latest }));
        }
    }
    res.sort_by_key(|it| it.0);
    if res.len() > 1 { res.into_iter().map(|it| it.1).collect() } else { Vec::new() }
}

#[derive(Debug, Serialize)]
struct TensorView {
    key: String,
    dtype: &'static str,
    shape: Vec<u64>,
    boxes: usize,
    bytes: u64,
}

/// A Python object, as Python prints it.
#[derive(Debug, Serialize)]
pub struct ObjectView {
    key: String,
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ObjectView {
    /// The object of this key, or why it cannot be read.
    pub fn of(checkpoint: &Checkpoint, key: &str) -> ObjectView {
        let (value, error) = match checkpoint.object(key) {
            Ok(it) => (Some(it.to_string()), None),
            Err(it) => (None, Some(it.to_string())),
        };
        ObjectView { key: key.to_string(), value, error }
    }

    /// A line.
    pub fn text(&self) -> String {
        let unread = || format!("unread: {}", self.error.as_deref().unwrap_or_default());
        clean(&format!("{} = {}", self.key, self.value.clone().unwrap_or_else(unread)))
    }
}

impl View {
    fn of(checkpoint: &Checkpoint, fits: impl Fn(&str) -> bool) -> View {
        let tensors = checkpoint.tensors().filter(|it| fits(it.0)).map(|(key, it)| TensorView {
            key: key.to_string(),
            dtype: it.dtype.torch(),
            shape: it.shape.clone(),
            boxes: it.chunks.len(),
            bytes: it.bytes(),
        });
        let objects = checkpoint.objects().filter(|it| fits(it));
        View {
            steps: Vec::new(),
            path: checkpoint.path().display().to_string(),
            files: checkpoint.files().len(),
            tensors: tensors.collect(),
            objects: objects.map(|it| ObjectView::of(checkpoint, it)).collect(),
            warnings: checkpoint.warnings().to_vec(),
        }
    }

    fn text(&self) -> String {
        let size = self.tensors.iter().map(|it| it.bytes).sum();
        let mut steps = Table::new(0, &[Align::Left, Align::Right, Align::Left]);
        for it in &self.steps {
            let latest = if it.latest { "latest" } else { "" };
            steps.row([clean(&it.name), bytes(it.bytes), latest.to_string()]);
        }
        let mut res = steps.text();
        res.push_str(&format!(
            "{}: {} of {}, {} in {}\n",
            self.path,
            plural(self.tensors.len() as u64, "tensor"),
            bytes(size),
            plural(self.objects.len() as u64, "object"),
            plural(self.files as u64, "file"),
        ));
        let mut table =
            Table::new(2, &[Align::Left, Align::Left, Align::Right, Align::Right, Align::Left]);
        for it in &self.tensors {
            let boxes = if it.boxes == 1 { "box" } else { "boxes" };
            table.row([
                it.dtype.to_string(),
                format!("{:?}", it.shape),
                format!("{} {boxes}", it.boxes),
                bytes(it.bytes),
                clean(&it.key),
            ]);
        }
        res.push_str(&table.text());
        for it in &self.objects {
            res.push_str(&format!("  {}\n", it.text()));
        }
        for it in &self.warnings {
            res.push_str(&format!("warning: {}\n", clean(it)));
        }
        res
    }
}
