//! Memory over a step: what is live at each instruction, and what the peak is made of.

use std::collections::BTreeMap;

use cranelift_entity::SecondaryMap;
use ir::plan::{Buffer, Plan, PlanSection, Role};
use maud::{Markup, PreEscaped, html};

use super::phases::{Phase, Purpose, purposes};
use super::{Cx, byte_cell, count_cell, times};
use crate::table::{bytes, grouped};
use crate::words::{describe, fold};

/// Points of the curve: more than a screen shows.
const COLUMNS: usize = 480;
/// Rows of the table of the peak that are seen at once.
const ROWS: usize = 10;

type Purposes = SecondaryMap<Buffer, Option<Purpose>>;

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let plan = cx.plan;
    let purposes = purposes(plan, &cx.phases);
    let of_role = |role: Role| -> (u64, u64) {
        let of_role = plan.buffers.iter().filter(|it| it.1.role == role);
        of_role.fold((0, 0), |(n, sum), it| (n + 1, sum + plan.local_bytes(it.0)))
    };
    html! {
        div.side {
            div.scroll {
                table {
                    caption { "Bytes of a rank" }
                    thead { tr {
                        th scope="col" { "what" } th.number scope="col" { "tensors" } th.number scope="col" { "bytes" }
                    } }
                    tbody {
                        @for (role, name) in [(Role::Param, "master weights"), (Role::State, "states"), (Role::Input, "inputs")] {
                            @let (n, bytes) = of_role(role);
                            tr data-role=(role.name()) {
                                th scope="row" { span.swatch.persistent {} (name) }
                                (count_cell(n)) (byte_cell(bytes))
                            }
                        }
                        tr data-role="step" {
                            th scope="row" { "arena of a step" } td {} (byte_cell(cx.memory.step_bytes))
                        }
                        tr data-role="workspace" {
                            th scope="row" { span.swatch.scratch {} "scratch on a GPU" } td {} (byte_cell(cx.memory.workspace_bytes))
                        }
                    }
                    tfoot { tr data-role="total" {
                        th scope="row" { "planned" } td {} (byte_cell(cx.memory.total_bytes()))
                    } tr data-role="beside" {
                        th scope="row" { "taken beside it: context, modules, NCCL" } td {} (byte_cell(cx.needs.beside_bytes))
                    } tr data-role="needs" {
                        th scope="row" { "what a rank needs, which is compared with" } td {} (byte_cell(cx.needs.bytes()))
                    } tr data-role="room" {
                        th scope="row" { "what a rank of " (cx.target.name) " has" } td {} (byte_cell(cx.target.memory.0 as u64))
                    } }
                }
            }
            (peak_by_purpose(cx, &purposes))
        }
        (chart(cx, &purposes))
        (peak(cx, &purposes))
    }
}

/// Where the peak is, counted through `step` and `update`, if it is there.
fn peak_index(cx: &Cx) -> Option<usize> {
    let (section, index) = cx.memory.peak?;
    let before = cx.phases.sections.iter().position(|it| *it == section)?;
    Some(index + if before > 0 { cx.phases.n_step } else { 0 })
}

/// Live bytes of each purpose at each instruction.
fn curves(cx: &Cx, purposes: &Purposes) -> Vec<(Purpose, Vec<u64>)> {
    let of = |purpose| cx.plan.live_bytes(&cx.phases.sections, |it| purposes[it] == Some(purpose));
    Purpose::ALL.into_iter().map(|it| (it, of(it))).collect()
}

fn peak_by_purpose(cx: &Cx, purposes: &Purposes) -> Markup {
    let Some(peak) = peak_index(cx) else { return html! {} };
    html! {
        div.scroll {
            table {
                caption { "The peak, by purpose" }
                thead { tr {
                    th scope="col" { "live at the peak" } th.number scope="col" { "bytes" } th.number scope="col" { "share" }
                } }
                tbody {
                    @for (purpose, curve) in curves(cx, purposes) {
                        @let live = curve[peak];
                        tr data-purpose=(purpose.key()) {
                            th scope="row" { span class=(format!("swatch m-{}", purpose.key())) {} (purpose.name()) }
                            (byte_cell(live))
                            td.number { (format!("{:.1} %", 100.0 * live as f64 / cx.memory.live_bytes.max(1) as f64)) }
                        }
                    }
                }
                tfoot { tr data-purpose="all" {
                    th scope="row" { "all" } (byte_cell(cx.memory.live_bytes)) td {}
                } }
            }
        }
    }
}

/// Live bytes over the instructions of `step` and `update`.
fn chart(cx: &Cx, purposes: &Purposes) -> Markup {
    let n = cx.phases.n;
    if n == 0 {
        return html! { p { "The plan has no instructions." } };
    }
    let curves = curves(cx, purposes);
    let total: Vec<u64> =
        (0..n).map(|it| curves.iter().map(|(_, curve)| curve[it]).sum()).collect();
    let columns = n.min(COLUMNS);
    // Of each column the instruction at which most is live, so that no peak is lost.
    let at: Vec<usize> = (0..columns)
        .map(|it| {
            let range = it * n / columns..(it + 1) * n / columns;
            range.max_by_key(|&it| (total[it], std::cmp::Reverse(it))).unwrap_or(0)
        })
        .collect();
    let persistent = cx.memory.persistent_bytes;
    let scratch = cx.memory.workspace_bytes;
    let top = persistent + cx.memory.live_bytes + scratch;
    let scale = |bytes: u64| 200.0 * (1.0 - bytes as f64 / top.max(1) as f64);
    let mut below = vec![persistent; columns];
    let mut areas =
        vec![("persistent", "weights, states, inputs", band(&vec![0; columns], &below, scale))];
    for (purpose, curve) in &curves {
        let above: Vec<u64> = below.iter().zip(&at).map(|(base, &it)| base + curve[it]).collect();
        areas.push((purpose.key(), purpose.name(), band(&below, &above, scale)));
        below = above;
    }
    let above: Vec<u64> = below.iter().map(|it| it + scratch).collect();
    areas.push(("scratch", "scratch on a GPU", band(&below, &above, scale)));
    let points: Vec<String> = at.iter().map(|&it| point(cx, it, &curves)).collect();
    let peak = peak_index(cx);
    let percent = |it: usize| 100.0 * it as f64 / n as f64;
    let legend = areas.iter().rev().map(|it| (it.0, it.1));
    html! {
        figure.chart #memory-chart {
            figcaption { "Live bytes of a rank over the " (grouped(n as u64)) " instructions of a step and its update" }
            div.plot tabindex="0" role="group" aria-label="Live bytes over instructions. Arrow keys move along, Home and End jump, P is the peak."
                data-columns=(columns) data-peak=[peak.and_then(|peak| at.iter().position(|&it| it == peak))]
                data-live-bytes=(cx.memory.live_bytes) data-persistent-bytes=(persistent) {
                svg viewBox=(format!("0 0 {columns} 200")) preserveAspectRatio="none" aria-hidden="true" {
                    @for (key, _, path) in &areas { path class=(format!("m-{key}")) d=(path) {} }
                }
                @for phase in Phase::ALL {
                    @let (start, end) = cx.phases.range(phase);
                    @if end > start {
                        span.phase.end[10 * (end - start) < n] style=(format!("left:{:.2}%;width:{:.2}%", percent(start), percent(end - start)))
                            data-phase=(phase.name()) data-start=(start) data-end=(end) { span { (phase.name()) } }
                    }
                }
                @for tick in ticks(top) {
                    span.tick style=(format!("bottom:{:.2}%", 100.0 * tick as f64 / top as f64)) { (bytes(tick)) }
                }
                @if let Some(peak) = peak { span.peak style=(format!("left:{:.2}%", percent(peak))) { span { "peak" } } }
                span.cursor hidden {}
            }
            p.readout aria-live="polite" {
                @if let Some((section, index)) = cx.memory.peak {
                    "Peak: " (bytes(cx.memory.live_bytes)) " live at " (section.name()) " " (grouped(index as u64 + 1)) ", "
                    (what(cx.plan, section, index))
                }
            }
            ul.legend { @for (key, name) in legend { li { span class=(format!("swatch m-{key}")) {} (name) } } }
            script type="application/json" { (PreEscaped(format!("[{}]", points.join(",")))) }
        }
    }
}

/// The area between two lines.
fn band(below: &[u64], above: &[u64], scale: impl Fn(u64) -> f64) -> String {
    use std::fmt::Write;
    let mut res = String::from("M0 ");
    let mut last = None;
    let mut line = |res: &mut String, x: usize, y: f64, first: bool| {
        let y = (y * 10.0).round() / 10.0;
        if first {
            let _ = write!(res, "{y}");
        } else if last != Some(y) {
            let _ = write!(res, "H{x}V{y}");
        }
        last = Some(y);
    };
    let n = above.len();
    for (x, &it) in above.iter().enumerate() {
        line(&mut res, x, scale(it), x == 0);
    }
    res.push_str(&format!("H{n}"));
    for (x, &it) in below.iter().enumerate().rev() {
        line(&mut res, x + 1, scale(it), false);
    }
    res + "H0Z"
}

/// What the read-out says at an instruction: its number, what it does, bytes by purpose.
fn point(cx: &Cx, index: usize, curves: &[(Purpose, Vec<u64>)]) -> String {
    let (section, at) = place(cx, index);
    let what = format!(
        "{} {}: {}",
        section.name(),
        grouped(at as u64 + 1),
        describe(cx.plan, section, at)
    );
    let live: Vec<String> = curves.iter().map(|it| it.1[index].to_string()).collect();
    format!("[{},{}]", super::timeline::json(&what), live.join(","))
}

/// What an instruction does.
fn what(plan: &Plan, section: PlanSection, index: usize) -> String {
    describe(plan, section, index).replace('`', "")
}

fn place(cx: &Cx, index: usize) -> (PlanSection, usize) {
    match index.checked_sub(cx.phases.n_step) {
        None => (cx.phases.sections[0], index),
        Some(it) => (cx.phases.sections[1], it),
    }
}

/// Round numbers of bytes below `top`.
fn ticks(top: u64) -> Vec<u64> {
    let step = (0..63).map(|it| 1_u64 << it).find(|it| top / it <= 5).unwrap_or(1);
    (1..=top / step).map(|it| it * step).filter(|it| *it as f64 <= 0.97 * top as f64).collect()
}

/// What is live at the peak, tensors of layers together.
fn peak(cx: &Cx, purposes: &Purposes) -> Markup {
    let Some((section, at)) = cx.memory.peak.filter(|it| cx.phases.sections.contains(&it.0)) else {
        return html! {};
    };
    let plan = cx.plan;
    let mut groups: BTreeMap<KindKey, (Vec<Buffer>, u64)> = BTreeMap::new();
    let spans = plan.spans(&cx.phases.sections);
    for buffer in plan.live_at((section, at)) {
        let (Some((first, last)), Some(purpose)) = (spans[buffer], purposes[buffer]) else {
            continue;
        };
        let last = cx.phases.at(last.min(cx.phases.n - 1));
        let key = (fold(&plan.buffers[buffer].name), purpose, cx.phases.at(first), last);
        let group = groups.entry(key).or_default();
        group.0.push(buffer);
        group.1 += plan.local_bytes(buffer);
    }
    let mut groups: Vec<Kind> = groups.into_iter().collect();
    groups.sort_by_key(|it| std::cmp::Reverse(it.1.1));
    let (shown, rest) = groups.split_at(groups.len().min(ROWS));
    html! {
        h3 { "The peak, by tensor" }
        p {
            "At " (section.name()) " " (grouped(at as u64 + 1)) " of " (grouped(plan.section(section).len() as u64)) ", "
            (what(plan, section, at)) ", " (bytes(cx.memory.live_bytes)) " of temporaries are live; the arena has "
            (bytes(cx.memory.step_bytes)) "."
        }
        (tensors(plan, "peak-tensors", shown, rest))
        @if !rest.is_empty() {
            details {
                summary { (grouped(rest.len() as u64)) " more kinds of tensors" }
                (tensors(plan, "peak-more", rest, &[]))
            }
        }
    }
}

/// Tensors with one name but for numbers, purpose, and where they are made and last used; who they are, and
/// their bytes.
type Kind = (KindKey, (Vec<Buffer>, u64));
type KindKey = (String, Purpose, Phase, Phase);

/// A table of tensors, with those that are listed elsewhere in its last row.
fn tensors(plan: &Plan, id: &str, shown: &[Kind], rest: &[Kind]) -> Markup {
    html! {
        div.scroll {
            table id=(id) {
                thead { tr {
                    th scope="col" { "tensor" } th scope="col" { "purpose" } th scope="col" { "made in" }
                    th scope="col" { "last used in" } th.number scope="col" { "tensors" } th.number scope="col" { "bytes" }
                } }
                tbody {
                    @for ((name, purpose, made, used), (buffers, bytes)) in shown {
                        @let name = if let [one] = buffers[..] { &plan.buffers[one].name } else { name };
                        tr {
                            th.name scope="row" { span class=(format!("swatch m-{}", purpose.key())) {} (name) (times(buffers.len())) }
                            td { (purpose.name()) } td { (made.name()) } td { (used.name()) }
                            (count_cell(buffers.len() as u64)) (byte_cell(*bytes))
                        }
                    }
                    @if !rest.is_empty() {
                        tr { th scope="row" { "all others" } td {} td {} td {}
                            (count_cell(rest.iter().map(|it| it.1.0.len() as u64).sum()))
                            (byte_cell(rest.iter().map(|it| it.1.1).sum())) }
                    }
                }
            }
        }
    }
}
