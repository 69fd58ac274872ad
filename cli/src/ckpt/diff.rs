//! `planc ckpt diff`: what two checkpoints do not have in common.

use std::path::PathBuf;

use checkpoint::diff::{Change, Diff, diff};
use serde::Serialize;

use crate::controls::clean;
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{grouped, plural};

use super::{Keys, failure, open};

/// Compares two checkpoints: keys, types, shapes, values, however each of them was cut.
///
/// Ends with exit code 1 if anything differs.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A checkpoint.
    first: PathBuf,
    /// Another one.
    second: PathBuf,
    #[command(flatten)]
    keys: Keys,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let (first, second) = (open(&args.first)?, open(&args.second)?);
    // A key of either will do.
    args.keys.check(&first).or_else(|_| args.keys.check(&second))?;
    let found = diff(&first, &second, |it| args.keys.fit(it)).map_err(|it| failure(&it))?;
    let names = [&first, &second].map(|it| it.path().display().to_string());
    let view = View::of(names, &found);
    match ui.format {
        Format::Json => print_json(&view)?,
        Format::Text => print(&view.text()),
    }
    if found.is_empty() {
        return Ok(());
    }
    let n = found.only_first.len() + found.only_second.len() + found.changed.len();
    let [a, b] = &view.paths;
    Err(Failure::new("PL0711", format!("`{a}` and `{b}` differ in {}", plural(n as u64, "key"))))
}

#[derive(Debug, Serialize)]
struct View {
    paths: [String; 2],
    same: u64,
    only_first: Vec<String>,
    only_second: Vec<String>,
    changed: Vec<ChangeView>,
}

#[derive(Debug, Serialize)]
struct ChangeView {
    key: String,
    /// `kind`, `shape`, `dtype`, `values` or `object`.
    what: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    second: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_differ: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_elements: Option<u64>,
    /// Null where it is infinite or no number.
    #[serde(skip_serializing_if = "Option::is_none")]
    largest: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Vec<u64>>,
    #[serde(skip)]
    text: String,
}

impl View {
    fn of(paths: [String; 2], diff: &Diff) -> View {
        View {
            paths,
            same: diff.n_same,
            only_first: diff.only_first.clone(),
            only_second: diff.only_second.clone(),
            changed: diff.changed.iter().map(|(key, it)| ChangeView::of(key, it)).collect(),
        }
    }

    fn text(&self) -> String {
        let [a, b] = &self.paths;
        let mut res = format!("{} the same\n", plural(self.same, "key"));
        for (path, keys) in [(a, &self.only_first), (b, &self.only_second)] {
            for key in keys {
                res.push_str(&format!("only in {path}: {}\n", clean(key)));
            }
        }
        for it in &self.changed {
            res.push_str(&format!("{}\n", clean(&format!("{}: {}", it.key, it.text))));
        }
        res
    }
}

impl ChangeView {
    fn of(key: &str, change: &Change) -> ChangeView {
        let mut res = ChangeView {
            key: key.to_string(),
            what: "kind",
            first: None,
            second: None,
            n_differ: None,
            n_elements: None,
            largest: None,
            at: None,
            text: "a tensor in one, an object in the other".to_string(),
        };
        let two = |a: String, b: String| (format!("{a} and {b}"), Some(a), Some(b));
        match change {
            Change::Kind => {}
            Change::Shape(a, b) => {
                res.what = "shape";
                (res.text, res.first, res.second) = two(format!("{a:?}"), format!("{b:?}"));
            }
            Change::Object(a, b) => {
                res.what = "object";
                (res.text, res.first, res.second) = two(a.clone(), b.clone());
            }
            Change::Values { dtypes: (a, b), n_differ, n_elements, largest, first } => {
                let types = two(a.to_string(), b.to_string());
                res.what = if a == b { "values" } else { "dtype" };
                res.text = match n_differ {
                    0 => "the same values".to_string(),
                    n => format!(
                        "{} of {} differ, by {largest} at most",
                        grouped(*n),
                        plural(*n_elements, "element")
                    ),
                };
                if let Some(at) = first {
                    res.text.push_str(&format!(", the first at {at:?}"));
                }
                if a != b {
                    res.text = format!("{}, {}", types.0, res.text);
                    (res.first, res.second) = (types.1, types.2);
                }
                res.n_differ = Some(*n_differ);
                res.n_elements = Some(*n_elements);
                res.largest = largest.is_finite().then_some(*largest);
                res.at = first.clone();
            }
        }
        res
    }
}
