//! The `planc` command. One file per subcommand; what is not presentation belongs to the libraries.
//!
//! stdout is what was asked for, stderr is what went wrong. Exit codes: 0, 1 (the user's input), 2
//! (usage, from clap), 101 (our bug); `diff --exit-code` has those of `diff`.

mod bench;
mod ckpt;
mod compile;
mod completions;
mod controls;
mod diff;
mod doctor;
mod explain;
mod grid;
mod import;
mod input;
mod inspect;
mod limit;
mod lint;
mod moves;
mod output;
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
    Diff(diff::Args),
    Ckpt(ckpt::Args),
    Import(import::Args),
    Bench(bench::Args),
    Doctor(doctor::Args),
    Explain(explain::Args),
    Completions(completions::Args),
    Man(completions::ManArgs),
}

fn main() -> ExitCode {
    report::install_panic_hook(report::Format::Text);
    let cli = Cli::try_parse().unwrap_or_else(|it| report::leave_with_usage(&it));
    report::install_panic_hook(cli.ui.messages());
    let result = match &cli.command {
        Command::Compile(args) => compile::run(args, &cli.ui),
        Command::Sweep(args) => sweep::run(args, &cli.ui),
        // It has those of signals.
        Command::Run(args) => match run::run(args, &cli.ui) {
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
        Command::Inspect(args) => inspect::run(args, &cli.ui),
        Command::Verify(args) => verify::run(args, &cli.ui),
        // It has exit codes of its own, those of `diff`.
        Command::Diff(args) => return diff::run(args, &cli.ui),
        Command::Ckpt(args) => ckpt::run(args, &cli.ui),
        Command::Import(args) => import::run(args, &cli.ui),
        Command::Bench(args) => bench::run(args, &cli.ui),
        Command::Doctor(args) => doctor::run(args, &cli.ui),
        Command::Explain(args) => explain::run(args, &cli.ui),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => completions::man(args),
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
