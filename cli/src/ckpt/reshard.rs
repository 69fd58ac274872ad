//! `planc ckpt reshard`: a checkpoint, as the ranks of another plan would have saved it.

use std::path::PathBuf;

use ir::model::NamePattern;
use runtime::checkpoint::RankReads;
use runtime::{LoadOptions, Reshard};
use serde::Serialize;

use crate::controls::clean;
use crate::input::{ModelArgs, plan};
use crate::report::{Failure, Outcome, Ui, print_aside, print_view, warning};
use crate::run::failure;
use crate::table::{Align, Table, bytes, plural};
use crate::words::mesh_text;

use super::target;

/// Ranks that are listed, unless in JSON.
const LISTED: usize = 64;

/// Writes a checkpoint anew, cut as another plan cuts it.
///
/// No rank runs, and no GPU is needed. Runs can load any checkpoint on any mesh as well: this is for programs
/// that cannot, and for shards that each node finds in a file of its own. Keys, shapes and types must be
/// the plan's, as with `planc run --load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint.
    path: PathBuf,
    /// The plan, or a model with `--mesh`.
    #[arg(long, value_name = "MODEL.plan|MODEL.ron")]
    plan: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Say who would read how much of which file, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Where to write: `step-N` and `latest` in this folder.
    #[arg(long, short, value_name = "DIR", required_unless_present = "dry_run")]
    output: Option<PathBuf>,
    /// Replace what is there, and let `latest` go back to an older step.
    #[arg(long)]
    force: bool,
    /// Keys that need not be in the checkpoint, as in `optim.*`.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    allow_missing: Vec<NamePattern>,
    /// Keys of the checkpoint that the plan need not have.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    allow_unexpected: Vec<NamePattern>,
    /// Round floating-point numbers that are of another type.
    #[arg(long)]
    cast: bool,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let plan = plan(&args.plan, &args.model, ui)?;
    let options = LoadOptions {
        path: args.path.clone(),
        allow_missing: args.allow_missing.clone(),
        allow_unexpected: args.allow_unexpected.clone(),
        cast: args.cast,
    };
    let reshard = Reshard::open(&plan, &options).map_err(|it| failure(&it, &args.path))?;
    for it in reshard.warnings() {
        print_aside(&warning(ui, None, &clean(it)));
    }
    let mut view = View::of(&reshard, mesh_text(&plan.mesh));
    if view.total_bytes != view.unique_bytes {
        return Err(Failure::bug(format!(
            "{} bytes would be read, and there are {}",
            view.total_bytes, view.unique_bytes
        )));
    }
    if let (false, Some(output)) = (args.dry_run, &args.output) {
        target::check_step(output, reshard.step(), args.force)?;
        let report = reshard.write(output).map_err(|it| failure(&it, output))?;
        view.written = Some(Written {
            path: report.path.display().to_string(),
            bytes: report.bytes,
            memory: report.memory,
            seconds: report.seconds,
        });
    }
    print_view(ui, &view, View::text)
}

#[derive(Debug, Serialize)]
struct View {
    mesh: String,
    step: u64,
    ranks: Vec<RankView>,
    /// What all ranks read.
    total_bytes: u64,
    /// What there is to read: every tensor once.
    unique_bytes: u64,
    left_out: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<Written>,
}

#[derive(Debug, Serialize)]
struct RankView {
    rank: u64,
    bytes: u64,
    files: Vec<(String, u64)>,
}

#[derive(Debug, Serialize)]
struct Written {
    path: String,
    bytes: u64,
    memory: u64,
    seconds: f64,
}

impl View {
    fn of(reshard: &Reshard, mesh: String) -> View {
        let rank = |RankReads { rank, files }: RankReads| RankView {
            rank,
            bytes: files.values().sum(),
            files: files.into_iter().collect(),
        };
        let ranks: Vec<RankView> = reshard.reads().into_iter().map(rank).collect();
        View {
            mesh,
            step: reshard.step(),
            total_bytes: ranks.iter().map(|it| it.bytes).sum(),
            unique_bytes: reshard.unique_bytes(),
            ranks,
            left_out: reshard.left_out.clone(),
            written: None,
        }
    }

    fn text(&self) -> String {
        let mut res = format!("step {} for {}\n", self.step, self.mesh);
        let mut table = Table::new(2, &[Align::Right, Align::Right, Align::Left]);
        for it in self.ranks.iter().take(LISTED) {
            let files =
                it.files.iter().map(|(name, n)| format!("{} of {}", bytes(*n), clean(name)));
            let files = files.collect::<Vec<String>>().join(", ");
            table.row([format!("rank {}", it.rank), bytes(it.bytes), files]);
        }
        res.push_str(&table.text());
        if let Some(more) = self.ranks.len().checked_sub(LISTED).filter(|&it| it > 0) {
            let more = plural(more as u64, "more rank");
            res.push_str(&format!("  {more}; `--format json` lists them\n"));
        }
        let (least, most) = self
            .ranks
            .iter()
            .fold((u64::MAX, 0), |(least, most), it| (least.min(it.bytes), most.max(it.bytes)));
        res.push_str(&format!(
            "reads {} in all, every byte once; a rank {} to {}\n",
            bytes(self.total_bytes),
            bytes(least),
            bytes(most),
        ));
        if let Some(first) = self.left_out.first() {
            let n = plural(self.left_out.len() as u64, "key");
            res.push_str(&format!("leaves out {n} that the checkpoint has not, like `{first}`\n"));
        }
        if let Some(it) = &self.written {
            res.push_str(&format!(
                "wrote {} to {} in {:.2} s, with {} of memory\n",
                bytes(it.bytes),
                it.path,
                it.seconds,
                bytes(it.memory),
            ));
        }
        res
    }
}
