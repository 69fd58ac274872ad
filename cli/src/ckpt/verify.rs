//! `planc ckpt verify`: whether checkpoints are whole.

use std::path::PathBuf;

use checkpoint::Checkpoint;
use checkpoint::verify::{Report, unnamed_files, verify};
use serde::Serialize;

use crate::controls::clean;
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{bytes, plural};

use super::open;

/// Checks every byte of checkpoints: that boxes make up tensors, items are what the index says, and
/// checksums are right.
///
/// Ends with exit code 1 if one of them is not whole, after all problems of all are printed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoints.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let mut views = Vec::new();
    for path in &args.paths {
        let checkpoint = open(path)?;
        let view = View::of(&checkpoint, verify(&checkpoint));
        if ui.format == Format::Text {
            print(&view.text());
        }
        views.push(view);
    }
    if ui.format == Format::Json {
        print_json(&views)?;
    }
    let broken: Vec<&View> = views.iter().filter(|it| !it.whole).collect();
    let n: usize = broken.iter().map(|it| it.problems.len()).sum();
    match broken.as_slice() {
        [] => Ok(()),
        [one] => Err(not_whole(format!("`{}` has {}", one.path, plural(n as u64, "problem")))),
        many => Err(not_whole(format!(
            "{} checkpoints have {}",
            many.len(),
            plural(n as u64, "problem")
        ))),
    }
}

fn not_whole(message: String) -> Box<Failure> {
    Failure::new("PL0710", message).help(
        "copy the files that are named again, or use an older checkpoint; `planc explain` knows the codes",
    )
}

#[derive(Debug, Serialize)]
struct View {
    path: String,
    whole: bool,
    tensors: usize,
    objects: usize,
    files: usize,
    items: u64,
    bytes: u64,
    /// Bytes that no checksum is of.
    unsummed_bytes: u64,
    problems: Vec<ProblemView>,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ProblemView {
    code: &'static str,
    file: Option<String>,
    key: Option<String>,
    at: Option<u64>,
    message: String,
}

impl View {
    fn of(checkpoint: &Checkpoint, report: Report) -> View {
        let mut warnings = report.warnings;
        let unnamed = unnamed_files(checkpoint);
        if !unnamed.is_empty() {
            warnings.push(format!(
                "the index does not name {}, which another save may have left",
                unnamed.join(", ")
            ));
        }
        let problems: Vec<ProblemView> = report
            .problems
            .into_iter()
            .map(|it| ProblemView {
                code: it.code,
                file: it.file,
                key: it.key,
                at: it.at,
                message: it.message,
            })
            .collect();
        View {
            path: checkpoint.path().display().to_string(),
            whole: problems.is_empty(),
            tensors: checkpoint.tensors().count(),
            objects: checkpoint.objects().count(),
            files: checkpoint.files().len(),
            items: report.n_items,
            bytes: report.bytes,
            unsummed_bytes: report.unsummed_bytes,
            problems,
            warnings,
        }
    }

    fn text(&self) -> String {
        let state = match self.problems.len() {
            0 => "whole".to_string(),
            n => plural(n as u64, "problem"),
        };
        let mut res = format!(
            "{}: {state}; {}, {}, {} in {}\n",
            self.path,
            plural(self.tensors as u64, "tensor"),
            plural(self.objects as u64, "object"),
            bytes(self.bytes),
            plural(self.files as u64, "file"),
        );
        for it in &self.problems {
            res.push_str(&format!("  {}  {}\n", it.code, clean(&it.message)));
        }
        if self.unsummed_bytes > 0 {
            res.push_str(&format!(
                "  {} have no checksum: only their place, type and sizes were checked\n",
                bytes(self.unsummed_bytes)
            ));
        }
        for it in &self.warnings {
            res.push_str(&format!("  warning: {}\n", clean(it)));
        }
        res
    }
}
