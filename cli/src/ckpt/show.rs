//! `planc ckpt show`: where each box of a tensor is stored, and its first values.

use checkpoint::{Checkpoint, StoredTensor};
use ir::placement::Chunk;
use serde::Serialize;

use crate::controls::clean;
use crate::report::{Outcome, Ui, print_view};
use crate::table::bytes;

use super::ls::ObjectView;
use super::{One, box_text, failure, open};

/// Shows boxes, files and first values of the tensors of a checkpoint, and its objects.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    checkpoint: One,
}

/// Elements of a tensor that are shown.
const SHOWN: u64 = 8;
/// Boxes of a tensor that are shown to people.
const SHOWN_BOXES: usize = 64;

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let One { path, keys } = &args.checkpoint;
    let checkpoint = open(path)?;
    keys.check(&checkpoint)?;
    let view = View::of(&checkpoint, |it| keys.fit(it))?;
    print_view(ui, &view, View::text)
}

#[derive(Debug, Serialize)]
struct View {
    path: String,
    tensors: Vec<TensorView>,
    objects: Vec<ObjectView>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct TensorView {
    key: String,
    /// Where it is in the nested dict that was saved.
    nested: Vec<String>,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    boxes: Vec<BoxView>,
    /// Its first values in row-major order; null for what JSON has no number.
    first: Vec<Option<f64>>,
    #[serde(skip)]
    first_text: String,
}

#[derive(Debug, Serialize)]
struct BoxView {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    file: String,
    at: u64,
    len: u64,
    #[serde(skip)]
    text: String,
}

impl View {
    fn of(checkpoint: &Checkpoint, fits: impl Fn(&str) -> bool) -> Outcome<View> {
        let tensors = checkpoint.tensors().filter(|it| fits(it.0));
        let objects = checkpoint.objects().filter(|it| fits(it));
        Ok(View {
            path: checkpoint.path().display().to_string(),
            tensors: tensors
                .map(|(key, it)| TensorView::of(checkpoint, key, it))
                .collect::<Outcome<_>>()?,
            objects: objects.map(|it| ObjectView::of(checkpoint, it)).collect(),
            warnings: checkpoint.warnings().to_vec(),
        })
    }

    fn text(&self) -> String {
        let mut res = String::new();
        for it in &self.tensors {
            res.push_str(&it.text());
        }
        for it in &self.objects {
            res.push_str(&format!("{}\n", it.text()));
        }
        for it in &self.warnings {
            res.push_str(&format!("warning: {}\n", clean(it)));
        }
        res
    }
}

impl TensorView {
    fn of(checkpoint: &Checkpoint, key: &str, tensor: &StoredTensor) -> Outcome<TensorView> {
        let boxes = tensor.chunks.iter().map(|it| BoxView {
            offsets: it.chunk.offsets.to_vec(),
            sizes: it.chunk.sizes.to_vec(),
            file: checkpoint.file_name(it.item.file).to_string(),
            at: it.item.offset,
            len: it.item.len,
            text: box_text(&it.chunk),
        });
        let values = first(checkpoint, key, tensor)?;
        let number = |it: &[f64; 2]| it[0].is_finite().then_some(it[0]);
        let text: Vec<String> = values.iter().map(|it| tensor_value(tensor, *it)).collect();
        let more = if tensor.n_elements() > values.len() as u64 { " .." } else { "" };
        Ok(TensorView {
            key: key.to_string(),
            nested: tensor.path.iter().map(ToString::to_string).collect(),
            dtype: tensor.dtype.torch(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes(),
            boxes: boxes.collect(),
            first: values.iter().map(number).collect(),
            first_text: format!("{}{more}", text.join(" ")),
        })
    }

    fn text(&self) -> String {
        let Self { key, dtype, shape, nested, .. } = self;
        let mut res = format!("{key}  {dtype}{shape:?}, {}\n", bytes(self.bytes));
        if !nested.is_empty() {
            res.push_str(&format!("  saved as  {}\n", nested.join(" > ")));
        }
        for it in self.boxes.iter().take(SHOWN_BOXES) {
            let BoxView { file, at, len, text, .. } = it;
            res.push_str(&format!("  box       {text} in {file}, bytes {at} to {}\n", at + len));
        }
        if self.boxes.len() > SHOWN_BOXES {
            let more = self.boxes.len() - SHOWN_BOXES;
            res.push_str(&format!("  box       {more} more; `--format json` lists all\n"));
        }
        if !self.first.is_empty() {
            res.push_str(&format!("  values    {}\n", self.first_text));
        }
        res.lines().map(|it| clean(it) + "\n").collect()
    }
}

/// The first elements: of the first row, if that has not enough.
fn first(checkpoint: &Checkpoint, key: &str, tensor: &StoredTensor) -> Outcome<Vec<[f64; 2]>> {
    let mut sizes: Vec<u64> = tensor.shape.iter().map(|&it| it.min(1)).collect();
    if let (Some(last), Some(size)) = (sizes.last_mut(), tensor.shape.last()) {
        *last = SHOWN.min(*size);
    }
    let unit = tensor.dtype.bytes();
    let mut out = vec![0; (sizes.iter().product::<u64>() * unit) as usize];
    let chunk = Chunk { offsets: vec![0; sizes.len()].into(), sizes: sizes.into() };
    checkpoint.read(key, &chunk, &mut out).map_err(|it| failure(&it))?;
    Ok(out.chunks(unit as usize).map(|it| tensor.dtype.numbers(it)).collect())
}

/// `0.5`, or `(0.5, 1)` for a complex number and two codes in a byte.
fn tensor_value(tensor: &StoredTensor, [a, b]: [f64; 2]) -> String {
    use checkpoint::StoredType as T;
    // What f32 holds is shown with the digits that f32 has.
    let text = |it: f64| match tensor.dtype {
        T::F64 | T::Complex128 | T::I64 | T::U64 => it.to_string(),
        _ => (it as f32).to_string(),
    };
    match tensor.dtype {
        T::Complex32 | T::Complex64 | T::Complex128 | T::E2M1x2 => {
            format!("({}, {})", text(a), text(b))
        }
        _ => text(a),
    }
}
