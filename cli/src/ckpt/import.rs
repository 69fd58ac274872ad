//! `planc ckpt import`: weights under foreign names, or a whole state in one file, as a checkpoint.

use std::path::{Path, PathBuf};

use checkpoint::hf::TransferError;
use checkpoint::hf::import::{self, Options};
use checkpoint::hf::params::params;
use checkpoint::mapping::Mapping;
use checkpoint::rename::{Rename, Renames};
use checkpoint::{Checkpoint, full};
use ir::model::NamePattern;
use serde_json::json;

use super::target;
use crate::controls::clean;
use crate::input::{self, File, Input, ModelArgs};
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{bytes, plural};
use crate::words::fold;

/// Makes a checkpoint of weights or of a state that another system saved.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    from: From,
}

#[derive(Debug, clap::Subcommand)]
enum From {
    Hf(Hf),
    Te(Te),
    Full(Full),
}

/// Imports the weights of a Hugging Face model.
///
/// Reads sharded and single safetensors. `planc run --load` trains on from the checkpoint.
#[derive(Debug, clap::Args)]
struct Hf {
    /// The model's folder, or a safetensors file.
    #[arg(value_name = "HF_DIR")]
    source: PathBuf,
    #[command(flatten)]
    common: Common,
    /// How keys become parameters: hf, te, te-flat-qkv, or a file (docs/checkpoints.md).
    #[arg(long, value_name = "NAME|FILE.ron", default_value = "hf")]
    map: String,
}

/// Imports weights under TransformerEngine's names.
///
/// Reads safetensors files and folders, and checkpoints of PyTorch. `_extra_state` and biases without
/// elements are left out; fused weights are cut into their segments.
#[derive(Debug, clap::Args)]
struct Te {
    /// A safetensors file, or a folder with such files or a checkpoint.
    #[arg(value_name = "FILE|DIR")]
    source: PathBuf,
    #[command(flatten)]
    common: Common,
    /// How keys become parameters: te, te-flat-qkv (qkv_weight_interleaved=False), or a file.
    #[arg(long, value_name = "NAME|FILE.ron", default_value = "te")]
    map: String,
    /// Ranks of the tensor-parallel group that saved the weights: the rows of a gated `fc1` are in
    /// their order.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    saved_tp: Option<u64>,
}

/// Imports a whole state from a safetensors file, as `planc ckpt export full` writes it.
#[derive(Debug, clap::Args)]
struct Full {
    /// The file.
    #[arg(value_name = "FILE.safetensors")]
    source: PathBuf,
    /// The folder of checkpoints to write into.
    #[arg(short, long, value_name = "CKPT")]
    output: PathBuf,
    /// Replace what is there, and let `latest` go back to an older step.
    #[arg(long)]
    force: bool,
}

/// What imports of weights have in common.
#[derive(Debug, clap::Args)]
struct Common {
    /// The model whose parameters they are.
    #[arg(long, value_name = "MODEL.ron")]
    model: PathBuf,
    /// Replaces a value of the model, as in `precision.storage=bf16`.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    overrides: Vec<String>,
    /// The folder of checkpoints to write into.
    #[arg(short, long, value_name = "CKPT")]
    output: PathBuf,
    /// Replace what is there, and let `latest` go back to an older step.
    #[arg(long)]
    force: bool,
    /// Only keys that start with this are read, without it.
    #[arg(long, value_name = "TEXT", default_value = "")]
    prefix: String,
    /// Renames keys before they are mapped, as in 'layers.*.wq.weight=model.layers.*.q.weight', or a file with a rule
    /// a line. Each `*` behind the `=` stands for what the one before it stood for; the first rule that fits holds.
    #[arg(long, value_name = "FROM=TO|FILE")]
    rename: Vec<String>,
    /// Values may be rounded to the type of the model's weights.
    #[arg(long)]
    cast: bool,
    /// Parameters that need not be there.
    #[arg(long, value_name = "GLOB")]
    allow_missing: Vec<NamePattern>,
    /// Tensors that may be there for nothing.
    #[arg(long, value_name = "GLOB")]
    allow_unexpected: Vec<NamePattern>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    match &args.from {
        From::Hf(it) => weights(&it.source, &it.common, &it.map, None, ui),
        From::Te(it) => weights(&it.source, &it.common, &it.map, it.saved_tp, ui),
        From::Full(it) => whole(it, ui),
    }
}

fn weights(path: &Path, common: &Common, map: &str, saved_tp: Option<u64>, ui: &Ui) -> Outcome {
    let mapping = mapping(map)?;
    let file = File::read(&common.model)?;
    let model = ModelArgs {
        mesh: Some("1".into()),
        overrides: common.overrides.clone(),
        ..ModelArgs::default()
    };
    let Input::Graph(graph, _) = file.input(&model)? else {
        let message = format!("`{}` is a plan, which does not name heads", common.model.display());
        return Err(
            Failure::new("PL0609", message).help("give the model that it was compiled from")
        );
    };
    let renames = renames(&common.rename)?;
    let source = Checkpoint::open(path).map_err(|it| failure(&it.into()))?;
    let fits = |rule: &Rename| {
        let mut keys = source.tensors().filter_map(|it| it.0.strip_prefix(&common.prefix));
        keys.any(|it| rule.matches(it))
    };
    if let Some(rule) = renames.0.iter().find(|it| !fits(it)) {
        let message = format!("no key is like the left side of `--rename {}`", rule.as_str());
        let help = "`*` stands for any text; `planc ckpt ls` lists all keys";
        return Err(Failure::new("PL0707", message).in_file(path).help(help));
    }
    let keys = import::indexed(path, &source).map_err(|it| failure(&it))?;
    let options = Options {
        mapping: &mapping,
        prefix: &common.prefix,
        renames: &renames,
        saved_tp,
        cast: common.cast,
        allow_missing: &common.allow_missing,
        allow_unexpected: &common.allow_unexpected,
    };
    let import = import::plan(&source, keys.as_ref(), params(&graph), &options)
        .map_err(|it| failure(&it))?;
    target::check_step(&common.output, 0, common.force)?;
    let written = import.write(&common.output).map_err(|it| failure(&it))?;
    let target = common.output.join("step-0");
    match ui.format {
        Format::Json => print_json(&json!({
            "output": target.display().to_string(),
            "tensors": written.tensors,
            "bytes": written.bytes,
            "ignored": import.ignored,
            "missing": import.missing,
            "warnings": source.warnings(),
        })),
        Format::Text if ui.quiet => Ok(()),
        Format::Text => {
            print(&format!(
                "{} -> {}: {}, {}\n",
                path.display(),
                target.display(),
                plural(written.tensors, "tensor"),
                bytes(written.bytes)
            ));
            print(&listed("left out", &import.ignored));
            print(&listed("missing", &import.missing));
            print(&format!(
                "it has no state of an optimizer: planc run {} --load {} --allow-missing 'optim.*'\n",
                common.model.display(),
                common.output.display()
            ));
            source.warnings().iter().for_each(|it| print(&format!("warning: {it}\n")));
            Ok(())
        }
    }
}

fn whole(args: &Full, ui: &Ui) -> Outcome {
    let source = Checkpoint::open(&args.source).map_err(|it| failure(&it.into()))?;
    let step = full::step(&source).map_err(|it| failure(&it.into()))?;
    target::check_step(&args.output, step, args.force)?;
    let moved = full::import(&args.source, &args.output).map_err(|it| failure(&it))?;
    let target = args.output.join(format!("step-{}", moved.step));
    moved_text(&args.source, &target, &moved, ui)
}

/// What moving a whole state came to.
pub fn moved_text(from: &Path, to: &Path, moved: &full::Moved, ui: &Ui) -> Outcome {
    match ui.format {
        Format::Json => print_json(&json!({
            "output": to.display().to_string(),
            "tensors": moved.tensors,
            "bytes": moved.bytes,
            "objects": moved.objects,
            "step": moved.step,
        })),
        Format::Text if ui.quiet => Ok(()),
        Format::Text => {
            print(&format!(
                "{} -> {}: step {}, {}, {}, {}\n",
                from.display(),
                to.display(),
                moved.step,
                plural(moved.tensors, "tensor"),
                bytes(moved.bytes),
                plural(moved.objects, "object")
            ));
            Ok(())
        }
    }
}

/// Names that differ in numbers only are one, with a `*` for the numbers.
pub fn listed(what: &str, names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let mut folded: Vec<String> = names.iter().map(|it| clean(&fold(it))).collect();
    folded.sort();
    folded.dedup();
    format!("{what}: {} ({})\n", plural(names.len() as u64, "tensor"), folded.join(", "))
}

/// The rules of `--rename`: each is one, or a file of them.
fn renames(said: &[String]) -> Outcome<Renames> {
    let mut res = Vec::new();
    let parse = |text: &str| {
        text.parse::<Rename>().map_err(|it| {
            let help =
                "write it as 'layers.*.attention.wq.weight=model.layers.*.self_attn.q_proj.weight'";
            Failure::new("PL0785", format!("--rename: {it}")).help(help)
        })
    };
    for it in said {
        if it.contains('=') {
            res.push(parse(it)?);
            continue;
        }
        let expected = "give FROM=TO, or a file with such a rule a line";
        let text = input::text(Path::new(it), expected).map_err(|it| it.help(expected))?;
        let lines = text.lines().map(str::trim).filter(|it| !it.is_empty() && !it.starts_with('#'));
        for line in lines {
            res.push(parse(line)?);
        }
    }
    Ok(Renames(res))
}

/// A built-in mapping, or one in a file.
pub fn mapping(name: &str) -> Outcome<Mapping> {
    if let Some(it) = Mapping::built_in(name) {
        return Ok(it);
    }
    let path = Path::new(name);
    let expected = format!("give a file, or one of {}", Mapping::BUILT_IN.join(", "));
    let text = input::text(path, &expected).map_err(|it| it.help(expected))?;
    Mapping::parse(&text).map_err(|it| {
        Failure::new("PL0785", it.to_string())
            .in_file(path)
            .help("docs/checkpoints.md describes mappings")
    })
}

/// An error of moving weights, as the user sees it.
pub fn failure(error: &TransferError) -> Box<Failure> {
    // A line for each thing that is wrong.
    let lines: Vec<String> = error.to_string().lines().map(clean).collect();
    let failure = Failure::new(error.code(), lines.join("\n"));
    match error {
        TransferError::Checkpoint(it) => super::failure(it),
        TransferError::Mismatch(it) => {
            let mut help = Vec::new();
            if !it.missing.is_empty() {
                help.push("`--allow-missing GLOB` does without parameters");
            }
            if !it.unexpected.is_empty() {
                help.push("`--allow-unexpected GLOB` leaves tensors out");
                help.push("`--rename FROM=TO`, `--prefix` and `--map` say how keys are to be read");
            }
            if help.is_empty() { failure } else { failure.help(help.join("; ")) }
        }
        _ => failure,
    }
}
