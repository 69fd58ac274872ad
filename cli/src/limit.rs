//! `--mem-limit`: whether a rank's memory is enough, and if not, what takes it and what would take less.
//!
//! Every choice in the list was planned, and its figure comes from that plan. These plans are not proved and never
//! run. Planning stops as soon as a choice is known not to help.

use std::collections::BTreeMap;

use ir::cost::Target;
use ir::graph::Checkpoint;
use ir::model::MeshSpec;
use ir::model::modules::Module;
use ir::model::schema::ReshardAfterForward;
use ir::plan::{Plan, Role, memory_profile};
use serde_json::json;

use crate::report::{Failure, Outcome};
use crate::table::{Align, Table, bytes, elided, plural, seconds, wrapped};
use crate::target::{Needs, Prediction};
use crate::variants::{self, Variant};
use crate::words::{describe, fold};

/// How many tensors, and how many choices, are named.
const MAX_LINES: usize = 8;

/// Bytes that a rank may take.
#[derive(Debug, Clone, Copy)]
pub struct Limit<'a> {
    /// How many.
    pub bytes: u64,
    /// Where; what it takes beside the plan counts, too.
    pub target: Option<&'a Target>,
    /// Whether the user named the limit; else it is the target's memory.
    pub named: bool,
}

/// A choice that takes less memory.
struct Choice {
    /// What to add to the command line.
    flags: String,
    /// How many ranks that is for.
    ranks: u64,
    needs: Needs,
    seconds: Option<f64>,
}

/// An error if a plan takes more than the limit. `variant` is what was compiled, if it was a model.
pub fn check(plan: &Plan, limit: &Limit<'_>, variant: Option<&Variant>) -> Outcome {
    let needs = Needs::of(plan, limit.target);
    if needs.bytes() <= limit.bytes {
        return Ok(());
    }
    let beside = match needs.beside_bytes {
        0 => String::new(),
        it => format!(": {} planned, {} beside it", bytes(needs.planned_bytes), bytes(it)),
    };
    let limit_is = match limit.target {
        Some(target) if !limit.named => format!("{} has {}", target.name, bytes(limit.bytes)),
        _ => format!("the limit is {}", bytes(limit.bytes)),
    };
    let choices = variant.map_or(Vec::new(), |it| choices(it, plan, needs, limit));
    let tensors = tensors(plan);
    let mut message = format!("a rank needs {}, and {limit_is}{beside}\n", bytes(needs.bytes()));
    if let Some((section, index)) = memory_profile(plan).peak {
        let n = plan.section(section).len();
        let what = describe(plan, section, index);
        message +=
            &format!("The peak is {} {} of {n}, {what}. There then:\n", section.name(), index + 1);
    }
    let mut table = Table::new(2, &[Align::Right, Align::Left]);
    for (what, size, _) in tensors.iter().take(MAX_LINES) {
        table.row([bytes(*size), elided(what, 60)]);
    }
    message += &table.text();
    let details = json!({
        "needs": needs,
        "limit_bytes": limit.bytes,
        "peak": memory_profile(plan).peak.map(|(section, index)| json!({
            "section": section.name(), "instruction": index, "what": describe(plan, section, index),
        })),
        "tensors": tensors.iter().map(|(what, size, n)| json!({ "name": what, "tensors": n, "bytes": size })).collect::<Vec<_>>(),
        "choices": choices.iter().map(|it| json!({
            "flags": it.flags, "ranks": it.ranks, "needs": it.needs, "fits": it.needs.bytes() <= limit.bytes, "step_seconds": it.seconds,
        })).collect::<Vec<_>>(),
    });
    Err(Failure::new("PL0652", message.trim_end())
        .help(help(&choices, limit, plan.mesh.n_ranks()))
        .details(details))
}

fn help(choices: &[Choice], limit: &Limit<'_>, ranks: u64) -> String {
    if choices.is_empty() {
        return "use more ranks, or a smaller batch or model".into();
    }
    let mut table = Table::new(1, &[Align::Right, Align::Left, Align::Right, Align::Left]);
    for it in choices.iter().take(MAX_LINES) {
        let fits = if it.needs.bytes() <= limit.bytes { "fits" } else { "" };
        let time = it.seconds.map(seconds).unwrap_or_default();
        let more = match it.ranks {
            n if n == ranks => String::new(),
            n => format!(" ({})", plural(n, "rank")),
        };
        let lines = wrapped(&format!("{}{more}", it.flags), 44);
        let mut lines = lines.into_iter();
        let first = lines.next().unwrap_or_default();
        table.row([bytes(it.needs.bytes()), fits.to_string(), time, first]);
        lines.for_each(|it| table.row([String::new(), String::new(), String::new(), it]));
    }
    let time = if limit.target.is_some() { " and the time of a step" } else { "" };
    let fits = choices.iter().any(|it| it.needs.bytes() <= limit.bytes);
    let none = if fits { "" } else { "; none of them fits" };
    format!("what would lower it, with what a rank then needs{time}{none}:\n{}", table.text())
}

/// What is in memory at the peak: what is kept by role, then tensors of the step's arena, repeated layers together;
/// largest first, with how many tensors each is.
pub fn tensors(plan: &Plan) -> Vec<(String, u64, usize)> {
    let mut res: BTreeMap<String, (u64, usize)> = BTreeMap::new();
    let mut add = |what: String, size: u64| {
        let entry = res.entry(what).or_default();
        *entry = (entry.0 + size, entry.1 + 1);
    };
    for (buffer, data) in &plan.buffers {
        let what = match data.role {
            Role::Param => "master weights",
            Role::State => "kept between steps: moments, weights to compute with",
            Role::Input => "inputs",
            Role::Carried | Role::Temp => continue,
        };
        add(what.to_string(), plan.local_bytes(buffer));
    }
    let live = memory_profile(plan).peak.map_or(Vec::new(), |at| plan.live_at(at));
    for buffer in live {
        add(fold(&plan.buffers[buffer].name), plan.local_bytes(buffer));
    }
    let mut res: Vec<_> = res.into_iter().map(|(what, (size, n))| (what, size, n)).collect();
    res.sort_by_key(|it| std::cmp::Reverse(it.1));
    for (what, _, n) in &mut res {
        if what.contains('*') {
            *what = format!("{what} ({})", plural(*n as u64, "tensor"));
        }
    }
    res
}

/// Choices that take less than `needs`: those that fit first, the fastest of them first; then the smallest.
fn choices(variant: &Variant, plan: &Plan, needs: Needs, limit: &Limit<'_>) -> Vec<Choice> {
    let compiled = |tried: &[(String, Variant)]| -> Vec<Choice> {
        let choice = |(flags, variant): &(String, Variant)| {
            let plan = variant.price(needs.bytes()).ok()??;
            let lower =
                Some(Needs::of(&plan, limit.target)).filter(|it| it.bytes() < needs.bytes());
            let (needs, ranks) = (lower?, plan.mesh.n_ranks());
            let seconds = limit.target.and_then(|it| Prediction::of(&plan, it).ok());
            let seconds = seconds.map(|it| it.cost.seconds);
            Some(Choice { flags: flags.clone(), ranks, needs, seconds })
        };
        variants::in_parallel(tried, choice).into_iter().flatten().collect()
    };
    let ranks = plan.mesh.n_ranks() as u32;
    let per_node = limit.target.map_or(ranks, |it| it.ranks_per_node);
    let meshes = variants::meshes(&variant.model, ranks, per_node).0;
    let meshes = meshes.into_iter().filter(|it| *it != variant.mesh).map(|mesh| {
        let flags = format!("--mesh {mesh}");
        let change: Change = Box::new(move |it| it.mesh = mesh.clone());
        (flags, change)
    });
    let changes: Vec<(String, Change)> = meshes.chain(changes(variant)).collect();
    let tried: Vec<_> = changes.iter().map(|it| changed(variant, &[it])).collect();
    let mut res = compiled(&tried);
    let fits = |it: &Choice| it.needs.bytes() <= limit.bytes;
    if !res.iter().any(fits) {
        let all = compiled(&together(variant, &changes, &res));
        // Where all changes together are not enough, no two are.
        if all.iter().any(fits) {
            let excess = needs.bytes() - limit.bytes;
            res.extend(compiled(&pairs(variant, &changes, &res, (needs, excess))));
        }
        let known: Vec<String> = res.iter().map(|it| it.flags.clone()).collect();
        res.extend(all.into_iter().filter(|it| !known.contains(&it.flags)));
    }
    for factor in [2, 4, 8] {
        if !res.iter().any(fits) {
            res.extend(compiled(on_more_ranks(variant, plan, factor).as_slice()));
        }
    }
    let time = |it: &Choice| if fits(it) { it.seconds.unwrap_or_default() } else { 0.0 };
    res.sort_by(|a, b| {
        (!fits(a))
            .cmp(&!fits(b))
            .then(time(a).total_cmp(&time(b)))
            .then(a.needs.bytes().cmp(&b.needs.bytes()))
    });
    res
}

/// The flags of some changes, and the variant that has them all.
fn changed(variant: &Variant, changes: &[&(String, Change)]) -> (String, Variant) {
    let mut res = variant.clone();
    changes.iter().for_each(|it| (it.1)(&mut res));
    let flags: Vec<&str> = changes.iter().map(|it| it.0.as_str()).collect();
    (flags.join(" "), res)
}

/// The option that a change sets: two values of one option exclude each other.
fn option(flags: &str) -> String {
    match flags.starts_with("--mesh ") {
        true => "--mesh".to_string(),
        false => flags.split('=').next().unwrap_or_default().replace('\'', ""),
    }
}

/// All changes that helped at once, the last of each option, on this mesh and on the one that helped most.
fn together(
    variant: &Variant,
    changes: &[(String, Change)],
    helped: &[Choice],
) -> Vec<(String, Variant)> {
    let need = |it: &&(String, Change)| {
        helped.iter().find(|other| other.flags == it.0).map(|it| it.needs.bytes())
    };
    let (meshes, others): (Vec<_>, Vec<_>) =
        changes.iter().filter(|it| need(it).is_some()).partition(|it| option(&it.0) == "--mesh");
    let mut used: Vec<&(String, Change)> = Vec::new();
    for change in others {
        used.retain(|it| option(&it.0) != option(&change.0));
        used.push(change);
    }
    let mesh = meshes.into_iter().min_by_key(need);
    let on_mesh = mesh.map(|it| [&[it], &used[..]].concat());
    let several = [Some(used), on_mesh].into_iter().flatten().filter(|it| it.len() > 1);
    several.map(|it| changed(variant, &it)).collect()
}

/// The number of pairs that are planned. Planning each of all pairs would take seconds.
const MAX_PAIRS: usize = 6;

/// Pairs of changes that helped: those that save just enough, if what the two save adds up, and those that save most.
/// `needs` is what a rank needs without them, and by how much that is too much.
fn pairs(
    variant: &Variant,
    changes: &[(String, Change)],
    helped: &[Choice],
    (needs, excess): (Needs, u64),
) -> Vec<(String, Variant)> {
    let saving = |flags: &str| {
        let choice = helped.iter().find(|it| it.flags == flags)?;
        Some(needs.bytes() - choice.needs.bytes())
    };
    let saving: Vec<_> = changes.iter().filter_map(|it| Some((it, saving(&it.0)?))).collect();
    let mut all: Vec<(u64, [&(String, Change); 2])> = Vec::new();
    for (i, (a, saved)) in saving.iter().enumerate() {
        let others = saving[i + 1..].iter().filter(|it| option(&it.0.0) != option(&a.0));
        all.extend(others.map(|(b, more)| (saved + more, [*a, *b])));
    }
    all.sort_by_key(|it| it.0);
    let (too_little, enough) = all.split_at(all.partition_point(|it| it.0 < excess));
    let enough = match enough.len() {
        0..=MAX_PAIRS => enough.to_vec(),
        n => [&enough[..MAX_PAIRS / 2], &enough[n - MAX_PAIRS / 2..]].concat(),
    };
    // Savings may add up to more than their sum.
    let strongest = too_little.iter().rev().take(MAX_PAIRS - enough.len());
    enough.iter().chain(strongest).map(|it| changed(variant, &it.1)).collect()
}

/// So many times as many ranks, all of them along the first axis that FSDP shards over, or else the first axis.
fn on_more_ranks(variant: &Variant, plan: &Plan, factor: u32) -> Option<(String, Variant)> {
    let mut axes: Vec<(String, u32)> =
        plan.mesh.user_axes().iter().map(|it| (it.0.to_string(), it.1)).collect();
    let fsdp = axes.iter().position(|it| variants::is_fsdp(&variant.model, &it.0)).unwrap_or(0);
    let size = &mut axes.get_mut(fsdp)?.1;
    *size = size.checked_mul(factor)?;
    let mesh = MeshSpec::Named(axes);
    Some((format!("--mesh {mesh}"), Variant { mesh, ..variant.clone() }))
}

type Change = Box<dyn Fn(&mut Variant)>;

/// What can be chosen otherwise for less memory, with the flags for it.
fn changes(variant: &Variant) -> Vec<(String, Change)> {
    let model = &variant.model;
    let mut res: Vec<(String, Change)> = Vec::new();
    let mut add = |flags: String, change: Change| res.push((flags, change));
    if model.checkpoint == Checkpoint::None {
        let graph = ir::model::elaborate(&variant.model, &variant.mesh).ok();
        let has = |op: &&str| {
            graph.iter().flat_map(|it| it.nodes.values()).any(|it| it.op.kind().name() == *op)
        };
        let ops: Vec<String> =
            ["glu", "activation"].iter().filter(|it| has(it)).map(|it| it.to_string()).collect();
        if !ops.is_empty() {
            add(
                format!("--set 'checkpoint=Recompute({})'", format!("{ops:?}").replace(", ", ",")),
                Box::new(move |it| it.model.checkpoint = Checkpoint::Recompute(ops.clone())),
            );
        }
    }
    if model.checkpoint != Checkpoint::Full {
        add("--set checkpoint=Full".into(), Box::new(|it| it.model.checkpoint = Checkpoint::Full));
    }
    for factor in [2, 4, 8] {
        let n = model.micro_batches.saturating_mul(factor);
        add(format!("--set micro_batches={n}"), Box::new(move |it| it.model.micro_batches = n));
    }
    let schedule = &variant.options.schedule;
    if schedule.prefetch_forward > 0 || schedule.prefetch_backward > 0 {
        add(
            "--prefetch-forward 0 --prefetch-backward 0".into(),
            Box::new(|it| {
                it.options.schedule.prefetch_forward = 0;
                it.options.schedule.prefetch_backward = 0;
            }),
        );
    }
    if model.fsdp.reshard_after_forward != ReshardAfterForward::Flag(true) {
        add(
            "--set fsdp.reshard_after_forward=true".into(),
            Box::new(|it| it.model.fsdp.reshard_after_forward = ReshardAfterForward::Flag(true)),
        );
    }
    if !model.fsdp.reshard_root {
        add(
            "--set fsdp.reshard_root=true".into(),
            Box::new(|it| it.model.fsdp.reshard_root = true),
        );
    }
    let head =
        model.layers.iter().position(|it| matches!(it, Module::LmHead(it) if it.chunks == 1));
    if let Some(at) = head {
        add(
            format!("--set layers[{at}].chunks=8"),
            Box::new(move |it| {
                if let Module::LmHead(head) = &mut it.model.layers[at] {
                    head.chunks = 8;
                }
            }),
        );
    }
    res
}
