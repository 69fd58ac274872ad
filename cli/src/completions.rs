//! `planc completions` and `planc man`: what shells and `man` read, made from the command line itself.

use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::input::reason;
use crate::output::{ForceArgs, Format, Output};
use crate::report::{Failure, Outcome, print};

/// Prints completions for a shell.
///
/// Bash: `source <(planc completions bash)`. Zsh: `planc completions zsh > "${fpath[1]}/_planc"`. Fish:
/// `planc completions fish > ~/.config/fish/completions/planc.fish`. PowerShell:
/// `planc completions powershell | Out-String | Invoke-Expression`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes manual pages: one for each command into a folder, or that of planc to stdout.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Where to write `planc.1`, `planc-run.1`, ...; it is made if it is not there.
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
    #[command(flatten)]
    force: ForceArgs,
}

/// Runs `planc completions`.
pub fn run(args: &Args) -> Outcome {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "planc", &mut out);
    print(&String::from_utf8_lossy(&out));
    Ok(())
}

/// Runs `planc man`.
pub fn man(args: &ManArgs) -> Outcome {
    let Some(folder) = &args.folder else {
        let mut out = Vec::new();
        let written = clap_mangen::Man::new(Cli::command()).render(&mut out);
        written.map_err(|it| Failure::bug(format!("cannot make a manual page: {it}")))?;
        print(&String::from_utf8_lossy(&out));
        return Ok(());
    };
    let fail = |it: std::io::Error| {
        let why = reason(&it);
        Failure::new("PL0601", format!("cannot write pages into `{}`: {why}", folder.display()))
    };
    std::fs::create_dir_all(folder).map_err(fail)?;
    // Made beside the folder's files, so that each takes its place as a whole.
    let made = tempfile::tempdir_in(folder).map_err(fail)?;
    clap_mangen::generate_to(Cli::command(), &made).map_err(fail)?;
    let pages = std::fs::read_dir(&made).map_err(fail)?;
    let pages: Vec<PathBuf> =
        pages.map(|it| Ok(it.map_err(fail)?.path())).collect::<Outcome<_>>()?;
    let target = |page: &PathBuf| folder.join(page.file_name().unwrap_or_default());
    let force = args.force.force;
    pages.iter().try_for_each(|it| page(&target(it), force).check([]))?;
    for made in &pages {
        page(&target(made), force).write(&std::fs::read_to_string(made).map_err(fail)?)?;
    }
    Ok(())
}

fn page(path: &Path, force: bool) -> Output<'_> {
    Output { flag: "man", path, format: Format::Manual, force }
}
