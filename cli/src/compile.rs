//! `planc compile`: from a model to a plan, with a summary of what it will hold, send and compute.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use codegen::Proved;
use ir::cost::{StepCost, Utilization};
use ir::graph::{Cut, Move};
use ir::meaning::Meaning;
use ir::placement::Mesh;
use ir::plan::{MemoryProfile, memory_profile};
use ir::summary::{CollectiveTotal, Summary};
use ir::{Digest, Phase};
use passes::{Dump, GRAPH_PASSES, Verification};
use serde_json::json;

use crate::diff::meaning_text;
use crate::input::{self, File, Input, ModelArgs};
use crate::limit::{self, Limit};
use crate::lint::{self, Finding, Lint};
use crate::moves;
use crate::output::{self, ForceArgs, Output};
use crate::report::{self, Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{Align, Table, bytes, elided, percent, plural, seconds, short, wrapped};
use crate::target::{self, Needs, Prediction};
use crate::words::{describe, mesh_text};

/// Compiles a model for a mesh.
///
/// Writes the plan into the current folder, named after the model, and prints what each rank will
/// hold, send and compute in a step. With `--emit` it prints the program of that phase instead.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model, or IR.
    #[arg(value_name = "MODEL.ron|GRAPH.ir")]
    input: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Where to write.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    force: ForceArgs,
    /// Print the program at the end of a phase, instead of a summary.
    #[arg(long, value_enum)]
    emit: Option<Emit>,
    /// Print the program after these passes, or after all of them, on stderr: as text, or with
    /// `--message-format json` as a note.
    #[arg(long, value_name = "PASS|all", value_delimiter = ',')]
    dump_ir_after: Vec<String>,
    /// Write dumps into this folder (`03-cse.ir`) instead of stderr.
    #[arg(long, value_name = "DIR", requires = "dump_ir_after")]
    dump_dir: Option<PathBuf>,
    /// Print the time of each pass.
    #[arg(long)]
    time_passes: bool,
    /// Predict a step on this machine, and check its memory: a100, b200, cpu, h100, h200, or a profile of
    /// your own (.ron).
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// Fail if a rank takes more, as in `140GiB`, and say what would take less.
    #[arg(long, value_name = "SIZE", value_parser = target::size)]
    mem_limit: Option<u64>,
    /// Make an error of a lint.
    #[arg(long, value_enum, value_name = "LINT")]
    deny: Vec<Lint>,
}

impl Args {
    fn program<'a>(&self, flag: &'a str, path: &'a Path) -> Output<'a> {
        Output { flag, path, format: output::Format::Program, force: self.force.force }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Emit {
    /// Global tensors; shardings only where the model fixes them.
    Logical,
    /// Every value has a sharding.
    Sharded,
    /// Every movement is a collective.
    Explicit,
    /// What one rank runs.
    Local,
    /// Instructions over memory.
    Plan,
    /// What the plan does, in a form that `planc diff` compares and that changes with it only.
    Meaning,
}

impl Emit {
    /// The last pass of the phase.
    fn last_pass(self) -> Option<&'static str> {
        let phase = match self {
            Emit::Logical => Phase::Logical,
            Emit::Sharded => Phase::Sharded,
            Emit::Explicit => Phase::Explicit,
            Emit::Local => Phase::Local,
            Emit::Plan | Emit::Meaning => return None,
        };
        GRAPH_PASSES.iter().rev().find(|it| it.phases().1 == phase).map(|it| it.name())
    }
}

/// What `codegen::compile` does after the passes over graphs.
const PLAN_PASSES: [&str; 3] = ["lower", "schedule-overlap", "plan-memory"];

/// A compiled model and what is to be said about it.
struct Compiled {
    plan: Proved,
    summary: Summary,
    memory: MemoryProfile,
    findings: Vec<Finding>,
    moves: Vec<Move>,
    /// What GEMMs make that a recipe wants quantized and that are not, and why.
    unquantized: Vec<(String, String)>,
    /// How FSDP cuts weights in blocks.
    cuts: Vec<Cut>,
    prediction: Option<Prediction>,
    /// The bytes that a rank needs and the bytes that it may take, if there is a limit.
    needs: Option<(Needs, u64)>,
    times: Times,
}

struct Times {
    elaborate: Duration,
    passes: Vec<(&'static str, Duration)>,
    total: Duration,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    check_passes(&args.dump_ir_after)?;
    let target = args.target.as_deref().map(target::load).transpose()?;
    let of_target = [Lint::TpAcrossNodes, Lint::LateReduction];
    if let Some(it) = of_target.iter().find(|it| args.deny.contains(it) && target.is_none()) {
        let message = format!("`--deny {}` has no machine to look at", it.name());
        return Err(Failure::new("PL0609", message).help("name one with `--target`"));
    }
    if args.emit.is_some() && ui.format == Format::Json {
        return Err(Failure::new("PL0609", "`--emit` prints a program, which has no JSON form")
            .help("leave out `--format json`, or leave out `--emit` for a summary in JSON"));
    }
    let file = File::read(&args.input)?;
    let start = Instant::now();
    let (graph, elaborate) = match file.input(&args.model)? {
        Input::Graph(graph, elaborate) => (*graph, elaborate),
        Input::Plan(_) => {
            let message =
                format!("`{}` is a plan, which is compiled already", args.input.display());
            return Err(Failure::new("PL0609", message).help("run it, or inspect it"));
        }
    };
    let output = args.output.clone().unwrap_or_else(|| default_output(&args.input));
    let file_out = args.program("-o", &output);
    if args.output.is_some() || args.emit.is_none() {
        file_out.check([&*args.input])?;
    }
    let emit_after = args.emit.and_then(Emit::last_pass);
    let mut options = file.options(&args.model);
    if !args.dump_ir_after.is_empty() {
        options.verification = Verification::EveryPass;
    }
    options.dump_after.extend(args.dump_ir_after.iter().cloned());
    options.dump_after.extend(emit_after.map(str::to_string));
    let result = codegen::compile(graph, &options);
    let total = start.elapsed();
    let dumps = match &result {
        Ok(compiled) => &compiled.dumps,
        Err(error) => &error.dumps,
    };
    dump(args, ui, dumps)?;
    let compiled = result.map_err(|it| file.pass_failure(&it.error))?;

    let summary = Summary::of(&compiled.plan);
    let mut findings = lint::findings(&compiled, &summary);
    if let Some(target) = target.as_ref().filter(|_| !file.is_program()) {
        findings.extend(lint::of_target(&file.parsed(&args.model)?, &compiled.plan.mesh, target));
        findings.extend(lint::of_reduction(&file.variant(&args.model)?, &compiled.plan, target));
    }
    // Otherwise they are part of the summary.
    if ui.message_format == Some(Format::Json) {
        for it in findings.iter().filter(|it| !args.deny.contains(&it.lint)) {
            report::print_aside(&report::warning(ui, Some(it.lint.name()), &it.message()));
        }
    }
    let codegen::Compiled { plan, times, dumps, moves, unquantized, cuts, .. } = compiled;
    let times = Times { elaborate, passes: times, total };
    if let Some(emit) = args.emit {
        let text = match emit_after {
            Some(pass) => dumps.iter().rev().find(|it| it.pass == pass),
            None => None,
        };
        let text = match (text, emit) {
            (Some(dump), _) => dump.text.clone(),
            (None, Emit::Plan) => ir::text::print_plan(&plan),
            (None, Emit::Meaning) => meaning_text(&Meaning::of(&plan))?,
            (None, _) => return Err(Failure::bug("the phase to emit was not reached")),
        };
        match &args.output {
            Some(_) => file_out.write(&text)?,
            None => print(&text),
        }
        if args.time_passes {
            let details = json!({ "time_ms": times.json() });
            report::print_aside(&report::note(ui, "times of passes", &details, &times.table()));
        }
        return deny(&args.deny, &findings);
    }

    deny(&args.deny, &findings)?;
    let prediction = target.as_ref().map(|it| Prediction::of(&plan, it)).transpose()?;
    let limit = args.mem_limit.or(target.as_ref().map(|it| it.memory.0 as u64));
    if let Some(bytes) = limit {
        let variant = (!file.is_program()).then(|| file.variant(&args.model)).transpose()?;
        let limit = Limit { bytes, target: target.as_ref(), named: args.mem_limit.is_some() };
        limit::check(&plan, &limit, variant.as_ref())?;
    }
    file_out.write(&ir::text::print_plan(&plan))?;
    let (summary, memory) = (in_users_words(summary, &plan.mesh), memory_profile(&plan));
    let needs = limit.map(|limit| (Needs::of(&plan, target.as_ref()), limit));
    let compiled = Compiled {
        plan,
        summary,
        memory,
        findings,
        moves,
        unquantized,
        cuts,
        prediction,
        needs,
        times,
    };
    match ui.format {
        Format::Json => print_json(&compiled.json(&output)),
        Format::Text if ui.quiet => Ok(()),
        Format::Text => {
            print(&compiled.text(&output));
            if ui.verbose {
                print(&moves::table(&compiled.moves, &compiled.plan.mesh));
                print(&moves::unquantized(&compiled.unquantized));
                print(&moves::cuts(&compiled.cuts, &compiled.plan.mesh));
            }
            if args.time_passes || ui.verbose {
                print(&format!("\n{}", compiled.times.table()));
            }
            Ok(())
        }
    }
}

/// The summary with the axes of the user's mesh, and one line for each kind of collective.
fn in_users_words(summary: Summary, mesh: &Mesh) -> Summary {
    let mut res = summary;
    res.amax_groups.iter_mut().for_each(|it| it.axes = mesh.in_user_axes(&it.axes, ", "));
    res.repeated.iter_mut().for_each(|it| it.axes = mesh.in_user_axes(&it.axes, ", "));
    for it in std::mem::take(&mut res.collectives) {
        let axes = mesh.in_user_axes(&it.axes, ", ");
        // Reductions of different operators are of one kind here.
        match res.collectives.iter_mut().find(|other| other.axes == axes && other.kind == it.kind) {
            Some(other) => {
                other.count += it.count;
                other.bytes += it.bytes;
                other.wire_bytes += it.wire_bytes;
            }
            None => res.collectives.push(CollectiveTotal { axes, ..it }),
        }
    }
    res
}

/// `models/a.ron` -> `a.plan`.
fn default_output(input: &Path) -> PathBuf {
    Path::new(input.file_stem().unwrap_or_default()).with_extension("plan")
}

fn pass_names() -> Vec<&'static str> {
    let graph = GRAPH_PASSES.iter().map(|it| it.name());
    graph.chain(PLAN_PASSES).collect()
}

fn check_passes(wanted: &[String]) -> Outcome {
    let known = pass_names();
    match wanted.iter().find(|it| *it != "all" && !known.contains(&it.as_str())) {
        None => Ok(()),
        Some(unknown) => Err(Failure::new("PL0606", format!("there is no pass `{unknown}`"))
            .help(format!("one of {}, or all", known.join(", ")))),
    }
}

/// Prints what was asked for with `--dump-ir-after`, also after an error.
fn dump(args: &Args, ui: &Ui, dumps: &[Dump]) -> Outcome {
    let asked = |pass: &str| args.dump_ir_after.iter().any(|it| it == pass || it == "all");
    if let Some(folder) = &args.dump_dir {
        std::fs::create_dir_all(folder).map_err(|it| {
            let why = input::reason(&it);
            Failure::new("PL0601", format!("cannot make `{}`: {why}", folder.display()))
        })?;
    }
    for (i, dump) in dumps.iter().filter(|it| asked(it.pass)).enumerate() {
        match &args.dump_dir {
            Some(folder) => {
                let name = format!("{:02}-{}.ir", i + 1, dump.pass);
                let path = folder.join(name);
                let file = args.program("--dump-dir", &path);
                file.check([&*args.input])?;
                file.write(&dump.text)?;
            }
            None => {
                let details = json!({ "pass": dump.pass, "ir": dump.text });
                let message = format!("the program after {}", dump.pass);
                report::print_aside(&report::note(ui, &message, &details, &dump.to_string()));
            }
        }
    }
    Ok(())
}

fn deny(denied: &[Lint], findings: &[Finding]) -> Outcome {
    match findings.iter().find(|it| denied.contains(&it.lint)) {
        None => Ok(()),
        Some(finding) => Err(Failure::new("PL0611", finding.text())
            .help(format!("it is an error because of `--deny {}`", finding.lint.name()))),
    }
}

impl Times {
    /// Time of each part, by name.
    fn parts(&self) -> Vec<(&'static str, Duration)> {
        let of = |wanted: &dyn Fn(&str) -> bool| -> Duration {
            self.passes.iter().filter(|it| wanted(it.0)).map(|it| it.1).sum()
        };
        let graph = |it: &str| GRAPH_PASSES.iter().any(|pass| pass.name() == it);
        vec![
            ("elaborate", self.elaborate),
            ("passes", of(&graph)),
            ("lower", of(&|it| it == PLAN_PASSES[0])),
            ("schedule", of(&|it| it == PLAN_PASSES[1])),
            ("memory", of(&|it| it == PLAN_PASSES[2])),
            ("prove", of(&|it| it == codegen::PROVE)),
        ]
    }

    fn json(&self) -> serde_json::Value {
        let ms = |it: &Duration| it.as_secs_f64() * 1e3;
        let by_name = |times: &[(&'static str, Duration)]| -> serde_json::Map<String, _> {
            times.iter().map(|it| (it.0.to_string(), json!(ms(&it.1)))).collect()
        };
        json!({
            "total": ms(&self.total),
            "parts": by_name(&self.parts()),
            "passes": by_name(&self.passes),
        })
    }

    fn table(&self) -> String {
        let mut table = Table::new(2, &[Align::Left, Align::Right]);
        table.row(["elaborate".to_string(), ms(self.elaborate)]);
        for (pass, time) in &self.passes {
            table.row([pass.to_string(), ms(*time)]);
        }
        table.row(["total".to_string(), ms(self.total)]);
        table.text()
    }
}

fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

impl Compiled {
    fn text(&self, output: &Path) -> String {
        let Compiled { plan, summary, memory, findings, times, .. } = self;
        let title = format!("{} on {}", plan.name, mesh_text(&plan.mesh));
        let mut res = format!("{title} -> {}\n\n", output.display());
        labelled(
            &mut res,
            "parameters",
            &format!(
                "{} in {}",
                short(summary.parameters),
                plural(plan.params.len() as u64, "tensor")
            ),
        );
        labelled(
            &mut res,
            "computes",
            &format!(
                "{}FLOP a step and rank (MFU counts {}FLOP)",
                short_unit(summary.flops),
                short_unit(summary.model_flops_of_rank(plan.mesh.n_ranks()) as u64)
            ),
        );
        labelled(
            &mut res,
            "memory",
            &format!(
                "{} a rank: {} kept, {} temporary at the peak, {} scratch on a GPU",
                bytes(memory.total_bytes()),
                bytes(memory.persistent_bytes),
                bytes(memory.step_bytes),
                bytes(memory.workspace_bytes)
            ),
        );
        if let Some((section, index)) = memory.peak {
            let n = plan.section(section).len();
            let what = describe(plan, section, index);
            labelled(
                &mut res,
                "peak",
                &format!("{} {} of {n}, {what}, with", section.name(), index + 1),
            );
            let mut table = Table::new(15, &[Align::Right, Align::Left]);
            for (buffer, size) in memory.largest.iter().take(4) {
                table.row([bytes(*size), elided(&plan.buffers[*buffer].name, 50)]);
            }
            res.push_str(&table.text());
        }
        if let Some(it) = &self.prediction {
            labelled(
                &mut res,
                "predicted",
                &format!(
                    "{} a step on {}: {}, {} exposed communication of {}, {} tokens/s a rank",
                    seconds(it.cost.seconds),
                    it.target,
                    utilization(&it.cost),
                    seconds(it.cost.exposed_seconds),
                    seconds(it.cost.communication_seconds),
                    short(it.tokens_per_second as u64)
                ),
            );
        }
        if let Some(it) = &self.prediction {
            labelled(&mut res, "basis", &it.basis);
        }
        if let Some((needs, limit)) = self.needs {
            labelled(
                &mut res,
                "needs",
                &format!(
                    "{} a rank, and may take {} (this decides whether it fits): {} planned as above, {} beside it",
                    bytes(needs.bytes()),
                    bytes(limit),
                    bytes(needs.planned_bytes),
                    bytes(needs.beside_bytes)
                ),
            );
        }
        res.push_str(&self.collectives());
        let groups: Vec<String> = summary
            .amax_groups
            .iter()
            .map(|it| match it.axes.as_str() {
                "" => format!("{} in none", plural(it.weights, "weight")),
                axes => format!("{} over {axes}", plural(it.weights, "weight")),
            })
            .collect();
        if !groups.is_empty() {
            labelled(&mut res, "amax groups", &groups.join("; "));
        }
        let parts: Vec<String> = times
            .parts()
            .iter()
            .map(|(name, time)| format!("{name} {:.1}", time.as_secs_f64() * 1e3))
            .collect();
        labelled(&mut res, "compiled in", &format!("{} ({})", ms(times.total), parts.join(", ")));
        for finding in findings {
            labelled(&mut res, "note", &finding.text());
        }
        res
    }

    fn collectives(&self) -> String {
        let cell = |it: &str| it.to_string();
        let mut table = Table::new(
            0,
            &[Align::Left, Align::Left, Align::Left, Align::Right, Align::Right, Align::Right],
        );
        table.row([
            cell("collectives"),
            cell("over"),
            cell("kind"),
            cell("calls"),
            cell("bytes"),
            cell("sent"),
        ]);
        for it in &self.summary.collectives {
            table.row([
                String::new(),
                it.axes.clone(),
                cell(it.kind),
                it.count.to_string(),
                bytes(it.bytes),
                bytes(it.wire_bytes),
            ]);
        }
        let calls: u64 = self.summary.collectives.iter().map(|it| it.count).sum();
        table.row([
            String::new(),
            cell("all"),
            String::new(),
            calls.to_string(),
            String::new(),
            bytes(self.summary.wire_bytes()),
        ]);
        table.text()
    }

    fn json(&self, output: &Path) -> serde_json::Value {
        let Compiled { plan, summary, memory, findings, moves, unquantized, cuts, .. } = self;
        let (prediction, needs, times) = (&self.prediction, self.needs, &self.times);
        let unquantized: Vec<_> =
            unquantized.iter().map(|(gemm, why)| json!({ "gemm": gemm, "why": why })).collect();
        let axes: Vec<_> = plan
            .mesh
            .user_axes()
            .iter()
            .map(|(name, size)| json!({ "name": name, "size": size }))
            .collect();
        let largest: Vec<_> = memory
            .largest
            .iter()
            .map(|(buffer, size)| json!({ "name": plan.buffers[*buffer].name, "bytes": size }))
            .collect();
        let peak = memory.peak.map(|(section, index)| {
            json!({
                "section": section.name(),
                "instruction": index,
                "of": plan.section(section).len(),
                "what": describe(plan, section, index),
                "live_bytes": memory.live_bytes,
                "largest": largest,
            })
        });
        json!({
            "name": plan.name,
            "model": plan.model,
            "digest": Digest::of_plan(plan),
            "output": output.display().to_string(),
            "mesh": { "axes": axes, "ranks": plan.mesh.n_ranks() },
            "micro_batches": plan.micro_batches,
            "parameter_tensors": plan.params.len(),
            "summary": summary,
            "memory": { "total_bytes": memory.total_bytes(), "peak": peak },
            "prediction": prediction,
            "needs": needs.map(|(it, limit)| json!({
                "planned_bytes": it.planned_bytes,
                "beside_bytes": it.beside_bytes,
                "needs_bytes": it.bytes(),
                "limit_bytes": limit,
            })),
            "lints": findings,
            "moves": moves::json(moves, &plan.mesh),
            "unquantized": unquantized,
            "cuts": moves::cuts_json(cuts, &plan.mesh),
            "time_ms": times.json(),
        })
    }
}

/// A label in its column, then text that is broken into lines.
fn labelled(res: &mut String, label: &str, text: &str) {
    for (i, part) in wrapped(text, 64).iter().enumerate() {
        let label = if i == 0 { label } else { "" };
        res.push_str(&format!("{label:<13}{part}\n"));
    }
}

/// `65.1 % MFU, 61.0 % HFU`, of both peaks if the plan multiplies in FP8.
fn utilization(cost: &StepCost) -> String {
    let text = |it: &Utilization| format!("{} MFU, {} HFU", percent(it.mfu), percent(it.hfu));
    let of_bf16 = text(&cost.of_bf16_peak);
    match &cost.of_fp8_peak {
        None => of_bf16,
        Some(of_fp8) => format!("{of_bf16} of the bf16 peak ({} of the FP8 peak)", text(of_fp8)),
    }
}

/// `1.2 G`, with the space that a unit needs after it.
fn short_unit(n: u64) -> String {
    let text = short(n);
    if text.ends_with(|it: char| it.is_ascii_digit()) { format!("{text} ") } else { text }
}
