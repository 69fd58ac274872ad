//! FSDP units: weights that one collective gathers together, and when.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

use ir::ops::CollectiveKind;
use ir::placement::AxisSet;
use ir::plan::{Buffer, Instruction};
use maud::{Markup, html};

use super::phases::{Phase, Phases, STEP, gradients, weights};
use super::{Cx, breakable, byte_cell, count_cell, time_cell, times};
use crate::table::bytes;
use crate::words::{fold, layer, numbers};

/// One unit, or several that are alike.
#[derive(Debug, Clone, PartialEq)]
struct Unit {
    params: Vec<Buffer>,
    axes: AxisSet,
    dtypes: BTreeSet<&'static str>,
    /// Bytes of the shards of a rank, and of what is gathered of them.
    shard: u64,
    full: u64,
    /// Gathers in the forward and in the backward pass.
    gathers: [u64; 2],
    /// Predicted seconds of one.
    seconds: f64,
    /// How its gradients are reduced.
    reduced: BTreeSet<(&'static str, AxisSet)>,
}

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let groups = groups(cx);
    if groups.is_empty() {
        return html! { p { "No weight is gathered: there is no FSDP, or its axes have one coordinate." } };
    }
    let axes = |it: AxisSet| cx.plan.mesh.in_user_axes(&cx.plan.mesh.names(it), ", ");
    let buffers = &cx.plan.buffers;
    html! {
        p { "What one all-gather puts together, straight into its buffers, before the unit is computed." }
        div.scroll {
            table.wraps #units-table {
                thead { tr {
                    th scope="col" { "unit" } th.number scope="col" { "tensors" } th scope="col" { "over" } th scope="col" { "gathered as" }
                    th.number scope="col" { "shard" } th.number scope="col" { "gathered" } th scope="col" { "in" }
                    th.number scope="col" { "a gather takes" } th scope="col" { "gradients" }
                } }
                tbody {
                    @for (name, unit, members) in &groups {
                        tr data-unit=(name) data-n=(members.len()) {
                            th.name scope="row" {
                                details {
                                    summary { (breakable(name)) (times(members.len())) }
                                    @if members.len() > 1 { p.note { "layers " (numbers(members)) } }
                                    ul { @for it in &unit.params { li { (if members.len() > 1 { fold(&buffers[*it].name) } else { buffers[*it].name.clone() }) " " (bytes(cx.plan.local_bytes(*it))) } } }
                                }
                            }
                            (count_cell(unit.params.len() as u64))
                            td { (axes(unit.axes)) }
                            td { (unit.dtypes.iter().copied().collect::<Vec<_>>().join(", ")) }
                            (byte_cell(unit.shard)) (byte_cell(unit.full))
                            td { @match unit.gathers {
                                [f, 0] => { (f) "\u{a0}×\u{a0}forward" },
                                [0, b] => { (b) "\u{a0}×\u{a0}backward" },
                                [f, b] => { (f) "\u{a0}×\u{a0}forward, " (b) "\u{a0}×\u{a0}backward" },
                            } }
                            (time_cell(unit.seconds))
                            td.why { @for (i, (kind, over)) in unit.reduced.iter().enumerate() {
                                @if i > 0 { ", " } code { (kind) } " over " (axes(*over))
                            } }
                        }
                    }
                }
            }
        }
    }
}

/// Units with a name, and the layers they are of; those that are alike are one.
fn groups(cx: &Cx) -> Vec<(String, Unit, Vec<u64>)> {
    let mut res: Vec<(String, Unit, Vec<u64>)> = Vec::new();
    for unit in units(cx) {
        let names: Vec<&str> =
            unit.params.iter().map(|it| cx.plan.buffers[*it].name.as_str()).collect();
        let name = common(&names);
        let number = layer(names[0]);
        let folded = fold(&name);
        let alike = |known: &Unit| {
            let same = |it: &Unit| {
                let params: Vec<String> =
                    it.params.iter().map(|it| fold(&cx.plan.buffers[*it].name)).collect();
                (
                    params,
                    it.axes,
                    it.dtypes.clone(),
                    it.shard,
                    it.full,
                    it.gathers,
                    it.reduced.clone(),
                )
            };
            same(known) == same(&unit)
        };
        match res.iter_mut().find(|it| it.0 == folded && alike(&it.1)) {
            Some(known) => known.2.extend(number),
            None => res.push((folded, unit, number.into_iter().collect())),
        }
    }
    // A unit that stands alone is called by its own name.
    for (name, unit, members) in &mut res {
        if members.len() <= 1 {
            let names: Vec<&str> =
                unit.params.iter().map(|it| cx.plan.buffers[*it].name.as_str()).collect();
            *name = common(&names);
        }
    }
    res
}

/// Units in the order of their first gather.
fn units(cx: &Cx) -> Vec<Unit> {
    let plan = cx.plan;
    let (weights, gradients) = (weights(plan), gradients(plan));
    let section = plan.micro_batch(0);
    let phases = Phases::of(plan, section);
    let mut res: Vec<Unit> = Vec::new();
    let mut known: HashMap<(Vec<Buffer>, AxisSet), usize> = HashMap::new();
    for (index, instruction) in plan.section(section).iter().enumerate() {
        let Instruction::Collective { kind: CollectiveKind::AllGather, comm, parts, .. } =
            instruction
        else {
            continue;
        };
        let params: Option<Vec<Buffer>> = parts.iter().map(|it| weights[it.src]).collect();
        let Some(params) = params.filter(|it| !it.is_empty()) else { continue };
        let pass = usize::from(phases.at(index) != Phase::Forward);
        let axes = plan.comms[*comm];
        match known.entry((params.clone(), axes)) {
            Entry::Occupied(it) => {
                res[*it.get()].gathers[pass] += 1;
                continue;
            }
            Entry::Vacant(it) => it.insert(res.len()),
        };
        let mut gathers = [0, 0];
        gathers[pass] = 1;
        let span = cx.timeline.section(section).get(index);
        res.push(Unit {
            axes,
            dtypes: parts.iter().map(|it| plan.buffers[it.src].ty.dtype.name()).collect(),
            shard: parts.iter().map(|it| plan.local_bytes(it.src)).sum(),
            full: parts.iter().map(|it| plan.local_bytes(it.dst)).sum(),
            gathers,
            seconds: span.map_or(0.0, |it| it.end - it.start),
            reduced: BTreeSet::new(),
            params,
        });
    }
    // A part of a unit that is gathered again belongs to it.
    let mut all: Vec<Unit> = Vec::new();
    // Units that gather a weight, in their order.
    let mut units_of: HashMap<Buffer, Vec<usize>> = HashMap::new();
    for unit in res {
        let of = |param: &Buffer| units_of.get(param).map_or(&[][..], |it| &it[..]);
        let whole = of(&unit.params[0])
            .iter()
            .find(|it| {
                all[**it].axes == unit.axes
                    && unit.params.iter().all(|param| of(param).contains(it))
            })
            .copied();
        match whole {
            Some(whole) => all[whole].gathers[1] += unit.gathers[1],
            None => {
                for &param in &unit.params {
                    units_of.entry(param).or_default().push(all.len());
                }
                all.push(unit);
            }
        }
    }
    for (_, instruction) in plan.timeline(STEP) {
        let Instruction::Collective { kind, comm, parts, .. } = instruction else { continue };
        if kind.reduces().is_none() {
            continue;
        }
        for param in parts.iter().filter_map(|it| gradients[it.dst]) {
            for &unit in units_of.get(&param).into_iter().flatten() {
                all[unit].reduced.insert((kind.name(), plan.comms[*comm]));
            }
        }
    }
    all
}

/// The path that all names have in common, or the only name.
fn common(names: &[&str]) -> String {
    let Some((first, rest)) = names.split_first() else { return String::new() };
    if rest.is_empty() {
        return (*first).to_string();
    }
    let parts: Vec<&str> = first.split('.').collect();
    let shared = |n: usize| {
        let prefix = parts[..n].join(".") + ".";
        rest.iter().all(|it| it.starts_with(&prefix))
    };
    if let [second] = rest {
        return format!("{first} + {second}");
    }
    let n = (1..parts.len()).rev().find(|&it| shared(it)).unwrap_or(0);
    if n == 0 { format!("{first} and {} more", rest.len()) } else { parts[..n].join(".") }
}
