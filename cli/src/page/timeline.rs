//! What a rank is predicted to do when: streams over a step, and where the compute stream waits.

use std::collections::BTreeMap;
use std::fmt::Write;

use ir::cost::Span;
use ir::ops::{Engine, Op};
use ir::placement::AxisSet;
use ir::plan::{Instruction, Plan, PlanSection, Role, Stream, StreamKind};
use maud::{Markup, PreEscaped, html};

use super::phases::{Phase, Phases, STEP};
use super::{Cx, count_cell, time_cell};
use crate::table::{grouped, seconds};
use crate::words::{fold, layer};

/// Columns of the overview: more than a screen shows.
const COLUMNS: usize = 640;
/// Heights of a lane, by how busy it is.
const LEVELS: usize = 4;

/// What a span is, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Gemm,
    Attention,
    Op,
    Optimizer,
    /// A collective over these axes.
    Comm(AxisSet),
}

/// A span that takes time.
struct Work<'a> {
    span: &'a Span,
    /// Seconds from the start of the step.
    start: f64,
    seconds: f64,
    /// The number of times it runs in a step.
    times: u64,
    instruction: &'a Instruction,
    phase: Phase,
    kind: Kind,
}

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let (works, all) = (works(cx, &cx.phases.sections), works(cx, STEP));
    let kinds = kinds(&all);
    let lanes = lanes(cx.plan, &works);
    let length = seconds_of_timeline(cx);
    if works.is_empty() || length <= 0.0 {
        return html! { p { "The plan has nothing that takes time." } };
    }
    let exposed: Vec<(f64, f64, String)> = exposed(cx);
    let longest =
        lanes.iter().map(|it| cx.plan.stream_title(*it).chars().count()).max().unwrap_or(0);
    html! {
        p {
            @if cx.plan.micro_batches > 1 { "The last micro-batch" } @else { "One micro-batch" }
            " and the update, as predicted for " (cx.target.name) ": "
            @for section in PlanSection::MICRO_BATCHES.into_iter().filter(|it| cx.plan.runs(*it) > 0) {
                @if cx.plan.runs(section) > 1 { (grouped(u64::from(cx.plan.runs(section)))) " × " }
                (seconds(cx.timeline.section_seconds(section))) " + "
            }
            (seconds(cx.timeline.section_seconds(PlanSection::Update))) " = "
            strong data-figure="timeline-step-seconds" data-value=(cx.timeline.step_seconds()) { (seconds(cx.timeline.step_seconds())) }
            ", of which the compute stream waits "
            strong.wait { (seconds(cx.timeline.exposed_seconds())) } " for communication."
        }
        figure.chart #timeline-chart data-seconds=(length) style=(format!("--names:{:.1}rem", (0.45 * longest as f64).clamp(6.0, 16.0))) {
            figcaption { "All of it; choose a stretch with the arrow keys, + and −, or by dragging" }
            div.overview tabindex="0" role="group" aria-label="Timeline of a step. Arrow keys move the stretch that is shown below, + and − make it shorter and longer." {
                div.phases {
                    @for phase in Phase::ALL {
                        @let (start, end) = phase_seconds(cx, &works, phase);
                        @if end > start {
                            span.phase.end[end - start < 0.1 * length] data-phase=(phase.name()) data-seconds=(end - start)
                                style=(format!("left:{:.2}%;width:{:.2}%", 100.0 * start / length, 100.0 * (end - start) / length)) {
                                span { (phase.name()) " " (seconds(end - start)) }
                            }
                        }
                    }
                }
                @for lane in &lanes {
                    div.lane {
                        span.lane-name title=(cx.plan.stream_title(*lane)) { (cx.plan.stream_title(*lane)) }
                        (overview(&works, *lane, &kinds, length))
                    }
                }
                div.lane {
                    span.lane-name { "waits" }
                    svg viewBox=(format!("0 0 {COLUMNS} 16")) preserveAspectRatio="none" aria-hidden="true" {
                        path.exposed d=(waits(&exposed, length)) {}
                    }
                }
                span.window hidden {}
            }
            div.detail tabindex="0" role="group" aria-label="A stretch of the timeline. Left and right go from span to span, up and down from stream to stream, + and − change how much is shown." {}
            p.readout aria-live="polite" {}
            ul.legend {
                @for (i, kind) in kinds.iter().enumerate() { li { span class=(format!("swatch t{}", color(&kinds, i))) {} (kind_name(cx, *kind)) } }
                li { span.swatch.exposed {} "the compute stream waits for communication" }
            }
            script type="application/json" { (PreEscaped(spans(cx, &works, &kinds, &lanes, &exposed))) }
        }
        div.side {
            (by_kind(cx, &all, &kinds))
            (waiting_for(cx))
        }
    }
}

/// Seconds of what is drawn: the last micro-batch, and `update`.
fn seconds_of_timeline(cx: &Cx) -> f64 {
    cx.phases.sections.iter().map(|&it| cx.timeline.section_seconds(it)).sum()
}

/// Seconds from the start of the drawing to that of a section.
fn offset(cx: &Cx, section: PlanSection) -> f64 {
    let before = cx.phases.sections.iter().take_while(|it| **it != section);
    before.map(|&it| cx.timeline.section_seconds(it)).sum()
}

fn works<'a>(cx: &'a Cx, sections: &[PlanSection]) -> Vec<Work<'a>> {
    let mut res = Vec::new();
    for &section in sections {
        let phases = Phases::of(cx.plan, section);
        let times = u64::from(cx.plan.runs(section));
        for span in cx.timeline.section(section) {
            let instruction = &cx.plan.section(section)[span.index];
            let kind = match instruction {
                Instruction::Record { .. } | Instruction::Wait { .. } => continue,
                Instruction::Collective { kind, comm, .. } if !kind.is_local() => {
                    Kind::Comm(cx.plan.comms[*comm])
                }
                Instruction::Collective { .. } | Instruction::Copy { .. } => Kind::Op,
                Instruction::Compute { op, results, .. } => op_kind(cx.plan, op, results),
            };
            let phase = match section {
                PlanSection::Update => Phase::Update,
                PlanSection::Prepare
                | PlanSection::First
                | PlanSection::Step
                | PlanSection::Last => phases.at(span.index),
            };
            let start = offset(cx, section) + span.start;
            res.push(Work {
                span,
                start,
                seconds: span.end - span.start,
                times,
                instruction,
                phase,
                kind,
            });
        }
    }
    res
}

fn op_kind(plan: &Plan, op: &Op, results: &[ir::plan::Buffer]) -> Kind {
    match op.engine() {
        Engine::Gemm | Engine::Fp8Gemm { .. } => Kind::Gemm,
        Engine::Attention => Kind::Attention,
        Engine::Memory if results.iter().any(|it| plan.buffers[*it].role == Role::Param) => {
            Kind::Optimizer
        }
        Engine::Memory => Kind::Op,
    }
}

/// All kinds, in the order of the legend.
fn kinds(works: &[Work]) -> Vec<Kind> {
    let mut res: Vec<Kind> = works.iter().map(|it| it.kind).collect();
    res.sort();
    res.dedup();
    res
}

/// Sets of axes that have a colour of their own: ten hues, and a shade of each.
const AXES_COLORS: usize = 20;

/// The number of a kind's colour: four for ops, and those of collectives behind them.
fn color(kinds: &[Kind], index: usize) -> usize {
    match kinds[index] {
        Kind::Gemm => 0,
        Kind::Attention => 1,
        Kind::Op => 2,
        Kind::Optimizer => 3,
        Kind::Comm(_) => {
            let first = kinds.iter().position(|it| matches!(it, Kind::Comm(_))).unwrap_or(0);
            4 + (index - first) % AXES_COLORS
        }
    }
}

fn kind_name(cx: &Cx, kind: Kind) -> String {
    match kind {
        Kind::Gemm => "matrix products".to_string(),
        Kind::Attention => "attention".to_string(),
        Kind::Op => "other ops".to_string(),
        Kind::Optimizer => "optimizer".to_string(),
        Kind::Comm(axes) => format!("over {}", axes_name(cx, axes)),
    }
}

fn axes_name(cx: &Cx, axes: AxisSet) -> String {
    cx.plan.mesh.in_user_axes(&cx.plan.mesh.names(axes), ", ")
}

/// Streams that do something, the compute stream first.
fn lanes(plan: &Plan, works: &[Work]) -> Vec<Stream> {
    let busy = |it: &Stream| works.iter().any(|work| work.span.stream == *it);
    plan.streams.keys().filter(busy).collect()
}

/// When a phase starts and ends on the compute stream and all others.
fn phase_seconds(cx: &Cx, works: &[Work], phase: Phase) -> (f64, f64) {
    let update = offset(cx, PlanSection::Update);
    let of_compute = |it: &&Work| cx.plan.streams[it.span.stream].kind == StreamKind::Compute;
    let first = works.iter().filter(of_compute).find(|it| it.phase == Phase::Backward);
    let backward = first.map_or(update, |it| it.start);
    match phase {
        Phase::Forward => (0.0, backward),
        Phase::Backward => (backward, update),
        Phase::Update => (update, seconds_of_timeline(cx)),
    }
}

/// How busy a stream is, column by column: a path for each kind.
fn overview(works: &[Work], lane: Stream, kinds: &[Kind], length: f64) -> Markup {
    let mut busy = vec![vec![0.0_f64; kinds.len()]; COLUMNS];
    let columns_of = COLUMNS as f64 / length;
    for work in works.iter().filter(|it| it.span.stream == lane) {
        let kind = kinds.binary_search(&work.kind).unwrap_or(0);
        let (start, end) = (work.start * columns_of, (work.start + work.seconds) * columns_of);
        for (column, busy) in busy.iter_mut().enumerate().skip(start as usize) {
            let overlap = end.min(column as f64 + 1.0) - start.max(column as f64);
            if overlap <= 0.0 {
                break;
            }
            busy[kind] += overlap;
        }
    }
    // What a column shows: the kind that takes most of it, as high as the lane is busy.
    let shown: Vec<Option<(usize, usize)>> = busy
        .iter()
        .map(|it| {
            let all: f64 = it.iter().sum();
            let most = (0..it.len()).max_by(|&a, &b| it[a].total_cmp(&it[b]))?;
            (all > 0.02).then(|| (most, ((all * LEVELS as f64).ceil() as usize).clamp(1, LEVELS)))
        })
        .collect();
    let mut paths = vec![String::new(); kinds.len()];
    let mut column = 0;
    while column < COLUMNS {
        let run = shown[column..].iter().take_while(|it| **it == shown[column]).count();
        if let Some((kind, level)) = shown[column] {
            let h = 16 * level / LEVELS;
            let _ = write!(paths[kind], "M{column} {}h{run}v{h}h-{run}z", 16 - h);
        }
        column += run;
    }
    html! {
        svg viewBox=(format!("0 0 {COLUMNS} 16")) preserveAspectRatio="none" aria-hidden="true" {
            @for (i, path) in paths.iter().enumerate() {
                @if !path.is_empty() { path class=(format!("t{}", color(kinds, i))) d=(path) {} }
            }
        }
    }
}

/// Start and seconds of each wait, and for what.
fn exposed(cx: &Cx) -> Vec<(f64, f64, String)> {
    let all = cx.timeline.exposed.iter().filter(|it| cx.phases.sections.contains(&it.section));
    all.map(|it| {
        let start = offset(cx, it.section) + it.start;
        (start, it.end - it.start, fold(&name(cx.plan, &cx.plan.section(it.section)[it.index])))
    })
    .collect()
}

fn waits(exposed: &[(f64, f64, String)], length: f64) -> String {
    let mut columns = vec![0.0_f64; COLUMNS];
    let scale = COLUMNS as f64 / length;
    for (start, seconds, _) in exposed {
        let (start, end) = (start * scale, (start + seconds) * scale);
        for (column, busy) in columns.iter_mut().enumerate().skip(start as usize) {
            let overlap = end.min(column as f64 + 1.0) - start.max(column as f64);
            if overlap <= 0.0 {
                break;
            }
            *busy += overlap;
        }
    }
    let mut res = String::new();
    for (column, busy) in columns.into_iter().enumerate().filter(|it| it.1 > 0.01) {
        let h = (busy * 16.0).ceil().clamp(1.0, 16.0);
        let _ = write!(res, "M{column} {}h1v{h}h-1z", 16.0 - h);
    }
    res
}

/// `matmul model.layers.3.mlp.up_proj`.
fn name(plan: &Plan, instruction: &Instruction) -> String {
    let what = instruction.name();
    let writes = instruction.writes();
    let first = writes.first().map_or("", |it| plan.buffers[*it].name.as_str());
    let more = if writes.len() > 1 { format!(" +{}", writes.len() - 1) } else { String::new() };
    format!("{what} {first}{more}")
}

/// All spans for the script, in units of 0.1 us: names once, each lane as gap, length, kind, name and layer
/// after each other.
fn spans(
    cx: &Cx,
    works: &[Work],
    kinds: &[Kind],
    lanes: &[Stream],
    exposed: &[(f64, f64, String)],
) -> String {
    let unit = |seconds: f64| (seconds * 1e7).round() as i64;
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    let mut number = |name: String| -> usize {
        let next = names.len();
        *names.entry(name.clone()).or_insert_with(|| {
            order.push(name);
            next
        })
    };
    let mut lists = Vec::new();
    for lane in lanes {
        let mut list = String::new();
        let mut at = 0;
        for work in works.iter().filter(|it| it.span.stream == *lane) {
            let full = name(cx.plan, work.instruction);
            let (start, end) = (unit(work.start), unit(work.start + work.seconds));
            let kind = kinds.binary_search(&work.kind).unwrap_or(0);
            let layer = layer(full.split(' ').nth(1).unwrap_or_default());
            let layer = layer.map_or(-1, |it| it as i64);
            let comma = if list.is_empty() { "" } else { "," };
            let number = number(fold_layer(&full));
            let color = color(kinds, kind);
            let _ = write!(list, "{comma}{},{},{color},{number},{layer}", start - at, end - start);
            at = end;
        }
        lists.push(format!(
            "{{\"name\":{},\"spans\":[{list}]}}",
            json(&cx.plan.stream_title(*lane))
        ));
    }
    let mut waits = String::new();
    let mut at = 0;
    for (start, seconds, what) in exposed {
        let comma = if waits.is_empty() { "" } else { "," };
        let _ = write!(
            waits,
            "{comma}{},{},{}",
            unit(*start) - at,
            unit(*seconds),
            number(what.clone())
        );
        at = unit(*start) + unit(*seconds);
    }
    let names: Vec<String> = order.iter().map(|it| json(it)).collect();
    let length = unit(seconds_of_timeline(cx));
    format!(
        "{{\"length\":{length},\"lanes\":[{}],\"waits\":[{waits}],\"names\":[{}]}}",
        lists.join(","),
        names.join(",")
    )
}

/// As [`fold`], of the name of a span.
fn fold_layer(name: &str) -> String {
    name.split(' ').map(fold).collect::<Vec<_>>().join(" ")
}

/// A string as JSON inside a `script`: no `<` can end that.
pub fn json(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default().replace('<', "\\u003c")
}

/// Where the time of a step goes.
fn by_kind(cx: &Cx, works: &[Work], kinds: &[Kind]) -> Markup {
    let step = cx.timeline.step_seconds();
    let of = |kind: Kind, phase: Phase| -> (u64, f64) {
        let its = works.iter().filter(|it| it.kind == kind && it.phase == phase);
        its.fold((0, 0.0), |(n, sum), it| (n + it.times, sum + it.times as f64 * it.seconds))
    };
    html! {
        div.scroll {
            table #time-by-kind {
                caption { "Seconds of a step, by what and when" }
                thead { tr {
                    th scope="col" { "what" } th.number scope="col" { "calls" }
                    @for phase in Phase::ALL { th.number scope="col" { (phase.name()) } }
                    th.number scope="col" { "all" } th.number scope="col" { "of the step" }
                } }
                tbody {
                    @for (i, kind) in kinds.iter().enumerate() {
                        @let parts = Phase::ALL.map(|it| of(*kind, it));
                        @let all: f64 = parts.iter().map(|it| it.1).sum();
                        tr {
                            th scope="row" { span class=(format!("swatch t{}", color(kinds, i))) {} (kind_name(cx, *kind)) }
                            (count_cell(parts.iter().map(|it| it.0).sum()))
                            @for (_, part) in parts { (time_cell(part)) }
                            (time_cell(all))
                            td.number { (format!("{:.1} %", 100.0 * all / step)) }
                        }
                    }
                }
            }
        }
    }
}

/// What the compute stream waits for, longest first.
fn waiting_for(cx: &Cx) -> Markup {
    let mut groups: BTreeMap<String, (u64, f64)> = BTreeMap::new();
    for it in cx.timeline.exposed.iter().filter(|it| STEP.contains(&it.section)) {
        let times = u64::from(cx.plan.runs(it.section));
        let name = fold_layer(&name(cx.plan, &cx.plan.section(it.section)[it.index]));
        let group = groups.entry(name).or_default();
        group.0 += times;
        group.1 += times as f64 * (it.end - it.start);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    html! {
        div.scroll {
            table #waits {
                caption { "What the compute stream waits for" }
                thead { tr { th scope="col" { "collective" } th.number scope="col" { "waits" } th.number scope="col" { "seconds" } } }
                tbody {
                    @if groups.is_empty() { tr { td colspan="3" { "nothing: all communication is hidden" } } }
                    @for (name, (n, seconds)) in groups.iter().take(10) {
                        tr { th.name scope="row" { (name) } (count_cell(*n)) (time_cell(*seconds)) }
                    }
                    @if groups.len() > 10 {
                        tr {
                            th scope="row" { (groups.len() - 10) " more" }
                            (count_cell(groups[10..].iter().map(|it| it.1.0).sum()))
                            (time_cell(groups[10..].iter().map(|it| it.1.1).sum()))
                        }
                    }
                }
                tfoot { tr { th scope="row" { "all" } (count_cell(groups.iter().map(|it| it.1.0).sum())) (time_cell(cx.timeline.exposed_seconds())) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_sets_of_axes_have_colours_of_their_own() {
        // All sets of five axes but the empty one are 31.
        let sets = (1..32).map(AxisSet);
        let kinds: Vec<Kind> =
            [Kind::Gemm, Kind::Op].into_iter().chain(sets.map(Kind::Comm)).collect();
        let colors: Vec<usize> = (0..kinds.len()).map(|it| color(&kinds, it)).collect();
        assert_eq!(colors[..22], [&[0, 2][..], &(4..24).collect::<Vec<_>>()].concat());
        assert_eq!(colors[22], 4);
        let css = include_str!("page.css");
        assert!(colors.iter().all(|it| css.contains(&format!(".t{it} {{"))), "{colors:?}");
    }
}
