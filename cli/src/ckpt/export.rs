//! `planc ckpt export`: a checkpoint as a Hugging Face model, or as one safetensors file.

use std::path::{Path, PathBuf};

use checkpoint::hf::config::{self, Choices};
use checkpoint::hf::export::{self, Export, Options};
use checkpoint::hf::params::params;
use checkpoint::{Checkpoint, StoredType, full};
use ir::model::MeshSpec;
use serde_json::{Map, Value, json};

use super::import::{failure, listed, mapping, moved_text};
use super::target;
use crate::input::{self, File};
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{bytes, plural};

/// Writes a checkpoint as other systems read it.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    to: To,
}

#[derive(Debug, clap::Subcommand)]
enum To {
    Hf(Hf),
    Full(Full),
}

/// Exports the weights as a Hugging Face model: safetensors with an index.
///
/// Tied weights are stored once, as `transformers` stores them.
#[derive(Debug, clap::Args)]
struct Hf {
    /// The checkpoint: its folder, or one with a file `latest`.
    #[arg(value_name = "CKPT")]
    source: PathBuf,
    /// The folder to make.
    #[arg(short, long, value_name = "HF_DIR")]
    output: PathBuf,
    /// The most that a file may hold: 5GB, 500MB, 2GiB, or bytes.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    max_shard_size: u64,
    /// The type in which weights are stored; by default as they are in the checkpoint.
    #[arg(long, value_enum, value_name = "TYPE")]
    dtype: Option<Float>,
    /// The model's config: names and shapes must be those that it describes. It is written, too.
    #[arg(long, value_name = "config.json|DIR")]
    config: Option<PathBuf>,
    /// How parameters become keys: hf, or a file (docs/checkpoints.md).
    #[arg(long, value_name = "NAME|FILE.ron", default_value = "hf")]
    map: String,
}

/// Exports the whole state, optimizer and step included, into one safetensors file.
#[derive(Debug, clap::Args)]
struct Full {
    /// The checkpoint: its folder, or one with a file `latest`.
    #[arg(value_name = "CKPT")]
    source: PathBuf,
    /// Where to write.
    #[arg(short, long, value_name = "FILE.safetensors")]
    output: PathBuf,
    /// Replace a file that is there.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Float {
    F32,
    Bf16,
    F16,
}

/// `5GB` as `transformers` reads it: powers of 1000, and of 1024 with an `i`.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|it: char| !it.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1000,
        "MB" => 1000u64.pow(2),
        "GB" => 1000u64.pow(3),
        "TB" => 1000u64.pow(4),
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        "TIB" => 1 << 40,
        _ => return Err("a number and KB, MB, GB, KiB, MiB or GiB".into()),
    };
    let number: u64 = number.parse().map_err(|_| "it starts with a whole number".to_string())?;
    number.checked_mul(unit).filter(|&it| it > 0).ok_or_else(|| "too large, or 0".into())
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    match &args.to {
        To::Hf(it) => hf(it, ui),
        To::Full(it) => {
            let source = Checkpoint::open(&it.source).map_err(|it| failure(&it.into()))?;
            target::check_file(&it.output, it.force)?;
            let moved = full::export(&source, &it.output).map_err(|it| failure(&it))?;
            moved_text(source.path(), &it.output, &moved, ui)
        }
    }
}

fn hf(args: &Hf, ui: &Ui) -> Outcome {
    let mapping = mapping(&args.map)?;
    let source = Checkpoint::open(&args.source).map_err(|it| failure(&it.into()))?;
    let options = Options {
        mapping: &mapping,
        dtype: args.dtype.map(|it| match it {
            Float::F32 => StoredType::F32,
            Float::Bf16 => StoredType::Bf16,
            Float::F16 => StoredType::F16,
        }),
        max_shard: args.max_shard_size,
    };
    let export = export::plan(&source, &options).map_err(|it| failure(&it))?;
    let config = args.config.as_deref().map(|it| checked_config(it, &export)).transpose()?;
    if let Some(folder) = args.output.parent() {
        target::outside_checkpoint(folder)?;
    }
    let written = export.write(&args.output, config.as_ref()).map_err(|it| failure(&it))?;
    match ui.format {
        Format::Json => print_json(&json!({
            "output": args.output.display().to_string(),
            "tensors": written.tensors,
            "bytes": written.bytes,
            "files": written.files,
            "tie_word_embeddings": export.tied,
            "dropped": export.dropped,
            "left_out": export.left_out,
            "warnings": source.warnings(),
        })),
        Format::Text if ui.quiet => Ok(()),
        Format::Text => {
            print(&format!(
                "{} -> {}: {}, {} in {}\n",
                source.path().display(),
                args.output.display(),
                plural(written.tensors, "tensor"),
                bytes(written.bytes),
                plural(written.files, "file")
            ));
            for (alias, owner) in &export.dropped {
                print(&format!("tied: `{alias}` is `{owner}`, which is stored\n"));
            }
            print(&listed("left out", &export.left_out));
            source.warnings().iter().for_each(|it| print(&format!("warning: {it}\n")));
            Ok(())
        }
    }
}

/// A config, of whose model these are the weights.
fn checked_config(path: &Path, export: &Export<'_>) -> Outcome<Map<String, Value>> {
    let path = &if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let file = File::read(path)?;
    let choices = Choices { name: None, batch: 1, sequence: None };
    let imported = config::model_ron(&file.text, &choices)
        .map_err(|it| Failure::new(it.code(), it.to_string()).in_file(path))?;
    let built = |it: ir::model::ModelError| {
        let message = format!("the model that it describes cannot be built: {it}");
        Failure::new(it.code(), message).in_file(path)
    };
    let model = ir::model::parse(&imported.text).map_err(built)?;
    let mesh = MeshSpec::parse("1").map_err(built)?;
    let graph = ir::model::elaborate(&model, &mesh).map_err(built)?;
    export.check(&params(&graph)).map_err(|it| {
        failure(&it).in_file(path).help("give the config of the model whose checkpoint this is")
    })?;
    serde_json::from_str(&file.text).map_err(|it| {
        let why = input::reason(&it);
        Failure::new("PL0780", format!("this is no config: {why}")).in_file(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_powers_of_1000_or_1024() {
        assert_eq!(size("5GB"), Ok(5_000_000_000));
        assert_eq!(size("2GiB"), Ok(2 << 30));
        assert_eq!(size("300 kb"), Ok(300_000));
        assert_eq!(size("77"), Ok(77));
        for text in ["", "GB", "-1GB", "5XB", "0MB", "99999999999TB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
