//! `planc diff`: what two plans do differently, whatever their text looks like.

mod view;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ir::meaning::{Meaning, Record, diff};

use crate::input::{File, ModelArgs, plan_in};
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};

use view::View;

/// Compares what two plans do: placements, numerics, collectives, memory, schedule.
///
/// Each may be a plan, a model with --mesh, or what `compile --emit meaning` wrote. With one file it is
/// compared with itself under other options, as in `planc diff model.ron --mesh 2x4 --to-mesh 4x2`.
///
/// Numbers of buffers, events and streams, names of temporaries and the order in which independent
/// instructions are listed are no difference. Repeated layers are said once.
#[derive(Debug, clap::Args)]
#[command(after_help = "With --exit-code: 0 the same, 1 different, 2 an error.")]
pub struct Args {
    /// A plan, a model, or the meaning of a plan.
    #[arg(value_name = "FIRST")]
    first: PathBuf,
    /// Another; by default the same file.
    #[arg(value_name = "SECOND")]
    second: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    to: ToArgs,
    /// Exit with 1 if there is a difference.
    #[arg(long)]
    exit_code: bool,
}

/// Options of the second model, where they differ from those of the first.
#[derive(Debug, Clone, clap::Args)]
struct ToArgs {
    /// The mesh of the second model, if it is another.
    #[arg(long, value_name = "MESH")]
    to_mesh: Option<String>,
    /// Replaces a value of the second model, after --set.
    #[arg(long, value_name = "PATH=VALUE")]
    to_set: Vec<String>,
    /// How far ahead the second gathers weights in the forward pass.
    #[arg(long, value_name = "UNITS")]
    to_prefetch_forward: Option<u16>,
    /// The same in the backward pass.
    #[arg(long, value_name = "UNITS")]
    to_prefetch_backward: Option<u16>,
}

impl ToArgs {
    fn model(&self, first: &ModelArgs) -> ModelArgs {
        let mut res = first.clone();
        res.mesh = self.to_mesh.clone().or(res.mesh);
        res.overrides.extend(self.to_set.iter().cloned());
        res.prefetch_forward = self.to_prefetch_forward.or(res.prefetch_forward);
        res.prefetch_backward = self.to_prefetch_backward.or(res.prefetch_backward);
        res
    }

    fn is_empty(&self) -> bool {
        let prefetch = self.to_prefetch_forward.or(self.to_prefetch_backward);
        self.to_mesh.is_none() && self.to_set.is_empty() && prefetch.is_none()
    }
}

/// Runs the command; its exit code.
pub fn run(args: &Args, ui: &Ui) -> ExitCode {
    match compare(args, ui) {
        Ok(same) => ExitCode::from(u8::from(args.exit_code && !same)),
        Err(failure) => {
            let code = failure.report(ui);
            // 1 says that there is a difference.
            if args.exit_code && !failure.is_bug { ExitCode::from(2) } else { code }
        }
    }
}

/// Prints what differs; whether nothing does.
fn compare(args: &Args, ui: &Ui) -> Outcome<bool> {
    if args.second.is_none() && args.to.is_empty() {
        let message = format!("`{}` is compared with nothing", args.first.display());
        return Err(Failure::new("PL0609", message).help(
            "name a second file, or give other options for the same, as in `--to-mesh 4x2`",
        ));
    }
    let second = args.second.as_ref().unwrap_or(&args.first);
    let to = args.to.model(&args.model);
    let (a, b) = (meaning(&args.first, &args.model, ui)?, meaning(second, &to, ui)?);
    let sources = [source(&args.first, &args.model), source(second, &to)];
    let view = View::of(&a, &b, diff(&a, &b), sources);
    match ui.format {
        Format::Json => print_json(&view)?,
        Format::Text if ui.quiet => (),
        Format::Text => print(&view.text(ui)),
    }
    Ok(view.same)
}

/// A file and the options that it was compiled with, but for the mesh.
fn source(path: &Path, model: &ModelArgs) -> String {
    let mut res = path.display().to_string();
    model.overrides.iter().for_each(|it| res += &format!(" --set {it}"));
    let prefetch = [
        ("--prefetch-forward", model.prefetch_forward),
        ("--prefetch-backward", model.prefetch_backward),
    ];
    for (flag, value) in prefetch {
        res += &value.map_or(String::new(), |it| format!(" {flag} {it}"));
    }
    res
}

/// What a file means.
fn meaning(path: &Path, model: &ModelArgs, ui: &Ui) -> Outcome<Meaning> {
    let file = File::read(path)?;
    if !file.text.trim_start().starts_with('{') {
        let plan = plan_in(&file, model, ui)?;
        return Ok(Meaning::of(&plan));
    }
    parse(&file.text).map_err(|(line, why)| {
        let start: usize = file.text.split_inclusive('\n').take(line).map(str::len).sum();
        let len = file.text[start..].lines().next().map_or(0, str::len);
        Failure::new("PL0603", format!("this is not the meaning of a plan: {why}"))
            .at(path, &file.text, start..start + len.min(1))
            .help("write it again with `planc compile MODEL --mesh MESH --emit meaning -o FILE`")
    })
}

/// One record a line; an error with the line, from 0.
fn parse(text: &str) -> Result<Meaning, (usize, String)> {
    let lines = text.lines().enumerate().filter(|it| !it.1.trim().is_empty());
    let record = |(i, line): (usize, &str)| {
        serde_json::from_str::<Record>(line).map_err(|it| (i, it.to_string()))
    };
    let records: Vec<Record> = lines.map(record).collect::<Result<_, _>>()?;
    Meaning::from_records(records)
        .ok_or((0, "its first line, and no other, must be that of a program".to_string()))
}

/// The text of a meaning: one record a line, so that a change of one thing is a change of one line.
pub fn meaning_text(meaning: &Meaning) -> Outcome<String> {
    let mut res = String::new();
    for record in meaning.records() {
        let line = serde_json::to_string(&record)
            .map_err(|it| Failure::bug(format!("cannot write JSON: {it}")))?;
        res.push_str(&line);
        res.push('\n');
    }
    Ok(res)
}
