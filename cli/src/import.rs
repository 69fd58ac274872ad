//! `planc import`: models of other systems as `model.ron`.

use std::path::PathBuf;

use checkpoint::hf::config::{self, Choices, ConfigError};
use ir::model::MeshSpec;
use serde_json::json;

use crate::input::File;
use crate::output::{self, ForceArgs, Output};
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{plural, short};

/// Makes a model of another system's description of one.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    from: From,
}

#[derive(Debug, clap::Subcommand)]
enum From {
    Hf(Hf),
}

/// Makes a model.ron of a Hugging Face config.json.
///
/// Reads llama, mistral, qwen2, qwen3, gpt2 and bert. What a config does not say, such as batch and
/// schedule, is chosen and marked in the text. A field that nobody knows is an error.
#[derive(Debug, clap::Args)]
struct Hf {
    /// The config, or the folder that has it.
    #[arg(value_name = "config.json|DIR")]
    config: PathBuf,
    /// Where to write; stdout by default.
    #[arg(short, long, value_name = "MODEL.ron")]
    output: Option<PathBuf>,
    #[command(flatten)]
    force: ForceArgs,
    /// Sequences of a step.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Tokens of a sequence; by default as many as the model takes, up to 4096.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    sequence: Option<u64>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let From::Hf(args) = &args.from;
    let path = match args.config.is_dir() {
        true => args.config.join("config.json"),
        false => args.config.clone(),
    };
    let file = File::read(&path)?;
    let name = args.output.as_ref().and_then(|it| it.file_stem()?.to_str());
    let choices = Choices { name, batch: args.batch, sequence: args.sequence };
    let imported = config::model_ron(&file.text, &choices).map_err(|it| failure(&it, &file))?;
    let Some(output) = &args.output else {
        print(&imported.text);
        return Ok(());
    };
    // Sizes that no config should have, such as heads that do not divide.
    let bug_or_sizes = |it: ir::model::ModelError| {
        let message = format!("the model that it describes cannot be built: {it}");
        Failure::new(it.code(), message).in_file(&path)
    };
    let model = ir::model::parse(&imported.text).map_err(bug_or_sizes)?;
    let mesh = MeshSpec::parse("1").map_err(bug_or_sizes)?;
    let graph = ir::model::elaborate(&model, &mesh).map_err(bug_or_sizes)?;
    let force = args.force.force;
    let file_out = Output { flag: "-o", path: output, format: output::Format::Model, force };
    let help = "name another file, as in `-o model.ron`, or add `--force` if this one may go";
    file_out.check([&*path]).map_err(|it| it.help(help))?;
    file_out.write(&imported.text)?;
    let tensors = graph.params.len() as u64;
    let parameters: u64 = graph.params.iter().map(|it| graph.ty(it.value).n_elements()).sum();
    match ui.format {
        Format::Json => print_json(&json!({
            "name": model.name,
            "output": output.display().to_string(),
            "parameters": parameters,
            "parameter_tensors": tensors,
            "notes": imported.notes,
        })),
        Format::Text if ui.quiet => Ok(()),
        Format::Text => {
            print(&format!(
                "{} -> {}: {} parameters in {}\n",
                model.name,
                output.display(),
                short(parameters),
                plural(tensors, "tensor")
            ));
            imported.notes.iter().for_each(|it| print(&format!("note: {it}\n")));
            Ok(())
        }
    }
}

fn failure(error: &ConfigError, file: &File<'_>) -> Box<Failure> {
    let failure = Failure::new(error.code(), error.to_string());
    match error {
        ConfigError::NotJson(_) => failure.in_file(file.path),
        ConfigError::Field { field, .. } | ConfigError::Unsupported { field, .. } => {
            pointed(failure, field, file)
        }
        ConfigError::ModelType(_) => pointed(failure, "model_type", file),
        ConfigError::Unknown(_) => failure.in_file(file.path).help(
            "if a field changes nothing of what is computed, remove it from a copy of the config",
        ),
    }
}

/// Points at a field of the config.
fn pointed(failure: Box<Failure>, field: &str, file: &File<'_>) -> Box<Failure> {
    let last = format!("\"{}\"", field.rsplit('.').next().unwrap_or(field));
    match file.text.find(&last) {
        Some(start) => failure.at(file.path, &file.text, start..start + last.len()),
        None => failure.in_file(file.path),
    }
}
