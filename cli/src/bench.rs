//! `planc bench`: how fast a plan runs, where its time goes, and how much memory it takes.

use std::fmt::Write as _;

use ir::plan::Plan;
use ir::summary::Summary;
use runtime::bench::Kind;
use runtime::exec::MemoryUse;
use runtime::{BenchOptions, BenchReport};
use serde_json::json;

use crate::input::PlanArgs;
use crate::place::{self, PlaceArgs};
use crate::report::{Format, Outcome, Ui, print, print_json};
use crate::run::failure;
use crate::table::{Align, Table, bytes, grouped, plural};
use crate::words::mesh_text;

/// Times steps of a plan on generated tokens and random weights; a model is compiled first.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,
    #[command(flatten)]
    place: PlaceArgs,
    /// Steps to time, of which the median is reported.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before, which are not timed.
    #[arg(long, value_name = "N", default_value_t = 3)]
    warmup: u64,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let place = args.place.place(None, ui).map_err(|it| failure(&it, &args.plan.input))?;
    let plan = place::plan(&args.plan, &place, ui)?;
    let speaks = place.launch.is_first();
    let seed = plan.run.seed;
    let options = BenchOptions { warmup: args.warmup, steps: args.steps, seed, place };
    let report = runtime::bench(&plan, &options).map_err(|it| failure(&it, &args.plan.input))?;
    if !speaks {
        return Ok(());
    }
    let figures = Figures::of(&plan, &report);
    match ui.format {
        Format::Text => {
            print(&figures.text(&plan, &report));
            if ui.verbose {
                print(&instructions(&report));
            }
        }
        Format::Json => print_json(&figures.json(&plan, &report))?,
    }
    Ok(())
}

/// What the report says, in units of people.
struct Figures {
    median: f64,
    tokens_per_s: f64,
    /// TFLOP/s of one rank, as MFU counts.
    model_tflops: f64,
    /// TFLOP/s of one rank that its matrix products and attention do.
    executed_tflops: f64,
    /// The largest use of each kind over the ranks of this process.
    memory: MemoryUse,
}

impl Figures {
    fn of(plan: &Plan, report: &BenchReport) -> Figures {
        let summary = Summary::of(plan);
        let median = report.median();
        let rate = |flops: f64| flops / median / 1e12;
        let most = |of: fn(&MemoryUse) -> u64| report.memory.iter().map(of).max().unwrap_or(0);
        Figures {
            median,
            tokens_per_s: report.tokens as f64 / median,
            model_tflops: rate(summary.model_flops_of_rank(plan.mesh.n_ranks())),
            executed_tflops: rate(summary.flops as f64),
            memory: MemoryUse {
                arenas: most(|it| it.arenas),
                workspace: most(|it| it.workspace),
                other: most(|it| it.other),
                other_declared: most(|it| it.other_declared),
            },
        }
    }

    fn text(&self, plan: &Plan, report: &BenchReport) -> String {
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let of = |pick: fn(f64, f64) -> f64, start: f64| {
            report.seconds.iter().copied().fold(start, pick)
        };
        let ranks = plan.mesh.n_ranks();
        let mut res = format!("{} on {}\n\n", plan.name, mesh_text(&plan.mesh));
        let mut line = |name: &str, text: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(res, "{name:13}{text}");
        };
        line(
            "step",
            format!(
                "{}, median of {} ({} to {}); the first took {:.1} s",
                ms(self.median),
                report.seconds.len(),
                ms(of(f64::min, f64::INFINITY)),
                ms(of(f64::max, 0.0)),
                report.first
            ),
        );
        let per_rank = self.tokens_per_s / ranks as f64;
        line(
            "tokens/s",
            format!("{}, {} a rank", grouped(self.tokens_per_s as u64), grouped(per_rank as u64)),
        );
        line(
            "TFLOP/s",
            format!(
                "{:.1} a rank as MFU counts (attention not halved), {:.1} executed",
                self.model_tflops, self.executed_tflops
            ),
        );
        let memory = &self.memory;
        let measured = memory.bytes();
        let ranks_here = report.memory.len() as u64;
        line(
            "memory",
            format!("{} a rank, of {} here", bytes(measured), plural(ranks_here, "rank")),
        );
        let mut table = Table::new(13, &[Align::Right, Align::Left]);
        table.row([bytes(memory.arenas), "arenas, as planned".to_string()]);
        table.row([bytes(memory.workspace), "workspace, as planned".to_string()]);
        table.row([
            bytes(memory.other),
            format!("CUDA and libraries (declared: {})", bytes(memory.other_declared)),
        ]);
        res.push_str(&table.text());
        let timed: f64 =
            report.kinds.iter().filter(|it| *it.0 != Kind::Collectives).map(|it| it.1).sum();
        let _ = writeln!(res, "{:13}of one step in which every instruction is timed", "time");
        let mut table = Table::new(13, &[Align::Right, Align::Right, Align::Left]);
        for (kind, ms) in &report.kinds {
            let share = match kind {
                Kind::Collectives => String::new(),
                _ => format!("{:.1} %", 100.0 * ms / timed),
            };
            table.row([format!("{ms:.1} ms"), share, kind.name().to_string()]);
        }
        res.push_str(&table.text());
        res
    }

    fn json(&self, plan: &Plan, report: &BenchReport) -> serde_json::Value {
        let kinds: serde_json::Map<String, serde_json::Value> =
            report.kinds.iter().map(|it| (it.0.name().to_string(), json!(it.1))).collect();
        json!({
            "model": plan.name,
            "mesh": mesh_text(&plan.mesh),
            "ranks": plan.mesh.n_ranks(),
            "step_ms": self.median * 1e3,
            "steps_ms": report.seconds.iter().map(|it| it * 1e3).collect::<Vec<f64>>(),
            "first_s": report.first,
            "loss": report.loss,
            "tokens_per_s": self.tokens_per_s,
            "model_tflops": self.model_tflops,
            "executed_tflops": self.executed_tflops,
            "memory": {
                "arenas": self.memory.arenas,
                "planned_arenas": plan.persistent_bytes + plan.step_bytes,
                "workspace": self.memory.workspace,
                "other": self.memory.other,
                "other_declared": self.memory.other_declared,
            },
            "time_ms": kinds,
            "instructions_ms": report.instructions,
        })
    }
}

/// Every instruction with its times, the longest first.
fn instructions(report: &BenchReport) -> String {
    let mut order: Vec<_> = report.instructions.iter().collect();
    order.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let mut table = Table::new(2, &[Align::Right, Align::Right, Align::Left]);
    for (what, (count, ms)) in order {
        table.row([format!("{ms:.2} ms"), format!("{count} x"), what.clone()]);
    }
    table.text()
}
