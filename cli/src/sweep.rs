//! `planc sweep`: a model on all sensible meshes of so many GPUs, each really compiled, with what a step is
//! predicted to take.

use std::collections::BTreeMap;
use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressStyle};
use ir::cost::Utilization;
use ir::model::{MeshSpec, Model, axes_text};
use ir::plan::{Plan, memory_profile};
use ir::summary::Summary;
use serde::Serialize;

use crate::input::{File, ModelArgs};
use crate::limit;
use crate::lint::{self, Finding};
use crate::report::{Failure, Format, Outcome, Ui, print_view};
use crate::table::{Align, Table, bytes, percent, plural, seconds, short, wrapped};
use crate::target::{self, Needs, Prediction};
use crate::variants::{self, Variant};
use crate::words::{describe, fold};

/// Compares the meshes that a model can have.
///
/// Compiles the model for every sensible mesh of so many GPUs and prints what a step is predicted to take,
/// fastest first, and those that do not fit last. Nothing is written.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model.
    #[arg(value_name = "MODEL.ron")]
    input: PathBuf,
    /// How many GPUs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    gpus: u32,
    /// Which: a100, b200, cpu, h100, h200, or a profile of your own (.ron).
    #[arg(long, value_name = "TARGET")]
    target: String,
    /// What a rank may take, as in `140GiB`; what the target has by default.
    #[arg(long, value_name = "SIZE", value_parser = target::size)]
    mem_limit: Option<u64>,
    /// Replaces a value of the model, as in `batch=PerReplica(1)`.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    overrides: Vec<String>,
    /// How many FSDP units ahead weights are gathered in the forward pass.
    #[arg(long, value_name = "UNITS")]
    prefetch_forward: Option<u16>,
    /// The same for weights that the backward pass gathers again.
    #[arg(long, value_name = "UNITS")]
    prefetch_backward: Option<u16>,
}

/// What was found.
#[derive(Debug, Serialize)]
struct Sweep {
    model: String,
    gpus: u32,
    limit_bytes: u64,
    /// The axes of a mesh that has so many.
    axes: BTreeMap<usize, Vec<String>>,
    /// Fastest first, then those that do not fit.
    meshes: Vec<Row>,
    refused: Vec<Refused>,
}

/// A mesh for which there is a plan.
#[derive(Debug, Serialize)]
struct Row {
    mesh: String,
    axes: String,
    fits: bool,
    global_batch: u64,
    #[serde(flatten)]
    prediction: Prediction,
    #[serde(flatten)]
    needs: Needs,
    /// Products that several ranks compute alike.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    repeated: Vec<Finding>,
    /// The parts of a rank's memory, if the mesh does not fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    too_large: Option<TooLarge>,
}

/// The parts of a rank's memory at its peak.
#[derive(Debug, Serialize)]
struct TooLarge {
    kept_bytes: u64,
    temporary_bytes: u64,
    scratch_bytes: u64,
    /// `step 411 of 3070, `matmul` making `h``; `None` if the plan computes nothing.
    peak: Option<String>,
    /// The peak without numbers, by which meshes are grouped.
    #[serde(skip)]
    kind: String,
    /// The largest tensors at the peak; repeated layers together.
    largest: Vec<Held>,
}

#[derive(Debug, Serialize)]
struct Held {
    name: String,
    bytes: u64,
}

/// A mesh for which there is none.
#[derive(Debug, Serialize)]
struct Refused {
    mesh: String,
    why: String,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let target = target::load(&args.target)?;
    let file = File::read(&args.input)?;
    if file.is_program() {
        let message = format!("`{}` is for one mesh already", args.input.display());
        return Err(
            Failure::new("PL0609", message).help("name the model that it was compiled from")
        );
    }
    let model_args = ModelArgs {
        mesh: None,
        overrides: args.overrides.clone(),
        prefetch_forward: args.prefetch_forward,
        prefetch_backward: args.prefetch_backward,
    };
    let (model, options) = (file.parsed(&model_args)?, model_args.options());
    let limit_bytes = args.mem_limit.unwrap_or(target.memory.0 as u64);
    let (meshes, refused) = variants::meshes(&model, args.gpus, target.ranks_per_node);
    let of = |mesh: &MeshSpec| {
        let variant =
            Variant { model: model.clone(), mesh: mesh.clone(), options: options.clone() };
        let plan = variant.price(u64::MAX).map_err(|why| (why, None))?;
        let plan = plan.expect("nothing is more than that");
        row(mesh, &plan, &target, limit_bytes).map_err(|it| (it.message.clone(), Some(it)))
    };
    let bar = bar(ui, meshes.len());
    let found = variants::in_parallel(&meshes, |mesh| {
        let found = of(mesh);
        bar.inc(1);
        found
    });
    bar.finish_and_clear();
    let refused = refused.into_iter().map(|(mesh, why)| Refused { mesh: mesh.to_string(), why });
    let mut res = Sweep {
        model: model.name.clone(),
        gpus: args.gpus,
        limit_bytes,
        axes: model.meshes.clone(),
        meshes: Vec::new(),
        refused: refused.collect(),
    };
    // A plan that the target cannot run.
    let mut cannot = None;
    for (mesh, found) in meshes.iter().zip(found) {
        match found {
            Ok(row) => res.meshes.push(row),
            Err((why, failure)) => {
                res.refused.push(Refused { mesh: mesh.to_string(), why });
                cannot = cannot.or(failure);
            }
        }
    }
    if res.meshes.is_empty() {
        let own = || file.own_failure(&model, &model_args);
        return Err(cannot.or_else(own).unwrap_or_else(|| nothing(&res, &model, args)));
    }
    // Where the batch grows with the mesh, steps do not do the same: tokens compare.
    let per_token = |it: &Row| 1.0 / it.prediction.tokens_per_second;
    res.meshes.sort_by(|a, b| {
        (!a.fits)
            .cmp(&!b.fits)
            .then(per_token(a).total_cmp(&per_token(b)))
            .then(a.mesh.cmp(&b.mesh))
    });
    print_view(ui, &res, |it| text(it, ui))
}

/// How many meshes are done, on stderr if that is a terminal.
fn bar(ui: &Ui, meshes: usize) -> ProgressBar {
    if ui.quiet || ui.messages() == Format::Json {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(meshes as u64);
    match ProgressStyle::with_template("{bar:24} {pos}/{len} meshes, {eta} left") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn row(mesh: &MeshSpec, plan: &Plan, target: &ir::cost::Target, limit: u64) -> Outcome<Row> {
    let needs = Needs::of(plan, Some(target));
    let fits = needs.bytes() <= limit;
    Ok(Row {
        mesh: mesh.to_string(),
        axes: axes_text(plan.mesh.user_axes(), ","),
        fits,
        too_large: (!fits).then(|| TooLarge::of(plan)),
        repeated: lint::repeated(&Summary::of(plan), &plan.mesh),
        global_batch: plan.run.global_batch,
        prediction: Prediction::of(plan, target)?,
        needs,
    })
}

/// The number of tensors that the sweep names at a peak.
const LARGEST: usize = 3;

impl TooLarge {
    fn of(plan: &Plan) -> TooLarge {
        let memory = memory_profile(plan);
        let what = memory.peak.map(|(section, index)| describe(plan, section, index));
        let peak = memory.peak.zip(what.as_ref()).map(|((section, index), what)| {
            let n = plan.section(section).len();
            format!("{} {} of {n}, {what}", section.name(), index + 1)
        });
        let largest = limit::tensors(plan).into_iter().take(LARGEST);
        TooLarge {
            kept_bytes: memory.persistent_bytes,
            temporary_bytes: memory.step_bytes,
            scratch_bytes: memory.workspace_bytes,
            peak,
            kind: fold(&what.unwrap_or_default()),
            largest: largest.map(|(name, bytes, _)| Held { name, bytes }).collect(),
        }
    }
}

/// Lists the memory of meshes that do not fit. Meshes with the same peak share an entry.
fn too_large(sweep: &Sweep, width: usize) -> String {
    let mut by_kind: Vec<(&str, Vec<(&Row, &TooLarge)>)> = Vec::new();
    for row in &sweep.meshes {
        let Some(it) = &row.too_large else { continue };
        match by_kind.iter_mut().find(|other| other.0 == it.kind) {
            Some(other) => other.1.push((row, it)),
            None => by_kind.push((&it.kind, vec![(row, it)])),
        }
    }
    let mut res = String::new();
    for (_, of_kind) in by_kind {
        let (row, it) = of_kind[0];
        let meshes: Vec<&str> = of_kind.iter().map(|it| it.0.mesh.as_str()).collect();
        let first = if of_kind.len() > 1 { "for the first, " } else { "" };
        let peak = it.peak.as_ref().map_or(String::new(), |it| format!(" at {it}"));
        let largest = it.largest.iter().map(|it| format!("{} {}", bytes(it.bytes), it.name));
        let text = format!(
            "{}: {first}{} kept, {} temporary{peak}, {} scratch, {} beside the plan; the largest then: {}",
            meshes.join(", "),
            bytes(it.kept_bytes),
            bytes(it.temporary_bytes),
            bytes(it.scratch_bytes),
            bytes(row.needs.beside_bytes),
            largest.collect::<Vec<_>>().join(", "),
        );
        for (i, line) in wrapped(&text, width).iter().enumerate() {
            res += &format!("{}{line}\n", if i == 0 { "  " } else { "    " });
        }
    }
    res
}

/// No mesh has a plan.
fn nothing(sweep: &Sweep, model: &Model, args: &Args) -> Box<Failure> {
    let gpus = plural(args.gpus.into(), "GPU");
    let mut message = format!("`{}` compiles for no mesh of {gpus}\n", model.name);
    message += &refusals(sweep, 72);
    let help = format!(
        "if it is the batch, `--set batch=PerReplica(1)` or `--set batch=Global({})`; `planc compile` with one of \
         the meshes says more",
        args.gpus
    );
    let details = serde_json::json!({ "refused": sweep.refused });
    Failure::new("PL0654", message.trim_end()).help(help).details(details)
}

fn text(sweep: &Sweep, ui: &Ui) -> String {
    let best = &sweep.meshes[0];
    let mut res = format!(
        "{} on {} ({}, {} a rank)\n\n",
        sweep.model,
        plural(sweep.gpus.into(), "GPU"),
        best.prediction.target,
        bytes(sweep.limit_bytes)
    );
    let right = Align::Right;
    let fp8 = sweep.meshes.iter().any(|it| it.prediction.cost.of_fp8_peak.is_some());
    let columns = [
        ("mesh", Align::Left, true),
        ("step", right, true),
        ("exposed", right, true),
        ("MFU", right, true),
        ("HFU", right, true),
        ("MFU FP8", right, fp8),
        ("HFU FP8", right, fp8),
        ("tokens/s a GPU", right, true),
        ("batch", right, true),
        ("needs", right, true),
        ("", Align::Left, true),
    ];
    let shown = || columns.iter().filter(|it| it.2);
    let aligns: Vec<Align> = shown().map(|it| it.1).collect();
    let mut table = Table::new(0, &aligns);
    table.row(shown().map(|it| it.0.to_string()));
    for it in &sweep.meshes {
        let cost = &it.prediction.cost;
        let of_fp8 = |of: fn(&Utilization) -> f64| {
            cost.of_fp8_peak.as_ref().map_or(String::new(), |it| percent(of(it)))
        };
        let cells = [
            it.mesh.clone(),
            seconds(cost.seconds),
            seconds(cost.exposed_seconds),
            percent(cost.of_bf16_peak.mfu),
            percent(cost.of_bf16_peak.hfu),
            of_fp8(|it| it.mfu),
            of_fp8(|it| it.hfu),
            short(it.prediction.tokens_per_second as u64),
            it.global_batch.to_string(),
            bytes(it.needs.bytes()),
            if it.fits { "" } else { "too large" }.to_string(),
        ];
        table.row(cells.into_iter().zip(&columns).filter(|it| it.1.2).map(|it| it.0));
    }
    res.push_str(&table.text());
    let said = sweep.meshes.iter().map(|it| &it.mesh);
    let refused = sweep.refused.iter().map(|it| &it.mesh);
    let meshes: Vec<&String> =
        if ui.quiet { said.collect() } else { said.chain(refused).collect() };
    let used = |n: usize| meshes.iter().any(|it| it.split('x').count() == n);
    let axes: Vec<String> =
        sweep.axes.iter().filter(|it| used(*it.0)).map(|it| it.1.join(" x ")).collect();
    res.push_str(&format!("\nSizes are those of {}.\n", axes.join(", of ")));
    if fp8 {
        res.push_str("MFU and HFU are of the bf16 peak, MFU FP8 and HFU FP8 of the FP8 peak.\n");
    }
    for line in wrapped(&format!("Basis: {}.", best.prediction.basis), 78) {
        res.push_str(&format!("{line}\n"));
    }
    let mut repeated = String::new();
    for row in &sweep.meshes {
        for it in &row.repeated {
            let text = format!("{}: {}", row.mesh, it.message());
            for (i, line) in wrapped(&text, 76).iter().enumerate() {
                repeated += &format!("{}{line}\n", if i == 0 { "  " } else { "    " });
            }
        }
    }
    if !repeated.is_empty() {
        res.push_str(&format!("\nRepeated work\n{repeated}"));
    }
    if sweep.meshes.iter().any(|it| !it.fits) {
        res.push_str(&format!(
            "\nToo large: a rank needs more than the {} that it may take\n",
            bytes(sweep.limit_bytes)
        ));
        res.push_str(&too_large(sweep, 76));
    }
    if !sweep.refused.is_empty() && !ui.quiet {
        res.push_str("\nNo plan for\n");
        res.push_str(&refusals(sweep, 76));
    }
    res
}

/// Meshes without a plan, those of one reason, but for its numbers, on one line.
fn refusals(sweep: &Sweep, width: usize) -> String {
    let kind = |why: &str| -> String {
        let letters = why.chars().filter(|it| !it.is_ascii_digit());
        letters.take_while(|it| *it != '(').collect()
    };
    let mut by_kind: Vec<(String, Vec<&Refused>)> = Vec::new();
    for it in &sweep.refused {
        let kind = kind(&it.why);
        match by_kind.iter_mut().find(|other| other.0 == kind) {
            Some(other) => other.1.push(it),
            None => by_kind.push((kind, vec![it])),
        }
    }
    let mut res = String::new();
    for (_, of_kind) in by_kind {
        let why = &of_kind[0].why;
        let first = if of_kind.iter().all(|it| it.why == *why) { "" } else { "for the first, " };
        let meshes: Vec<&str> = of_kind.iter().map(|it| it.mesh.as_str()).collect();
        let text = format!("{}: {first}{why}", meshes.join(", "));
        for (i, line) in wrapped(&text, width).iter().enumerate() {
            res += &format!("{}{line}\n", if i == 0 { "  " } else { "    " });
        }
    }
    res
}
