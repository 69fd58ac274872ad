//! The `planc` command. One file per subcommand; what is not presentation belongs to the libraries.
//!
//! stdout is what was asked for, stderr is what went wrong. Exit codes: 0, 1 (the user's input), 2
//! (usage, from clap), 101 (our bug).

mod bench;
mod ckpt;
mod compile;
mod doctor;
mod explain;
mod glob;
mod grid;
mod import;
mod input;
mod inspect;
mod limit;
mod lint;
mod moves;
mod page;
mod place;
mod report;
mod run;
mod sweep;
mod table;
mod target;
mod variants;
mod verify;
mod words;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use report::Ui;
use runtime::backend::cuda::driver;

/// Compiles, runs and inspects sharded transformer training.
#[derive(Debug, Parser)]
#[command(name = "planc", version, propagate_version = true, max_term_width = 80)]
#[command(after_help = "Exit codes: 0 done, 1 an error in the input, 2 usage, 101 a bug in planc.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    ui: Ui,
}

#[derive(Debug, Subcommand)]
enum Command {
    Compile(compile::Args),
    Sweep(sweep::Args),
    Run(Box<run::Args>),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Ckpt(ckpt::Args),
    Import(import::Args),
    Bench(bench::Args),
    Doctor(doctor::Args),
    Explain(explain::Args),
}

fn main() -> ExitCode {
    report::install_panic_hook();
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Compile(args) => compile::run(args, &cli.ui),
        Command::Sweep(args) => sweep::run(args, &cli.ui),
        Command::Run(args) => run::run(args, &cli.ui),
        Command::Inspect(args) => inspect::run(args, &cli.ui),
        Command::Verify(args) => verify::run(args, &cli.ui),
        Command::Ckpt(args) => ckpt::run(args, &cli.ui),
        Command::Import(args) => import::run(args, &cli.ui),
        Command::Bench(args) => bench::run(args, &cli.ui),
        Command::Doctor(args) => doctor::run(args, &cli.ui),
        Command::Explain(args) => explain::run(args, &cli.ui),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let code = failure.report(&cli.ui);
            if runtime::session::is_stuck() {
                driver::leave(1);
            }
            code
        }
    }
}
