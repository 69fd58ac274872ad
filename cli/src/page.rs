//! `planc inspect --html`: all that can be said about a plan on one page, which needs no network and nothing
//! beside it.
//!
//! Every figure is computed from the plan and a hardware profile, and is text of the page or an attribute
//! `data-..`: the script moves focus, fills read-outs and draws a stretch of the timeline, and knows nothing
//! about plans. Layers that are alike are one entry.

mod activations;
mod amax;
mod checkpoint;
mod collectives;
mod memory;
mod mesh;
mod params;
mod phases;
mod picture;
mod timeline;
mod units;

use ir::cost::{StepCost, Target, Timeline, Utilization};
use ir::plan::{MemoryProfile, Plan, memory_profile};
use ir::summary::Summary;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::grid::Cuts;
use crate::lint;
use crate::table::{bytes, grouped, percent, seconds, short};
use crate::target::{Needs, basis};
use crate::words::mesh_text;
use phases::Phases;

/// What sections are made of.
struct Cx<'a> {
    plan: &'a Plan,
    target: &'a Target,
    timeline: Timeline,
    cost: StepCost,
    summary: Summary,
    memory: MemoryProfile,
    /// What a rank needs of the target's memory.
    needs: Needs,
    phases: Phases,
}

/// A section: the id of its heading, the heading, and what is below it.
struct Section {
    id: &'static str,
    title: &'static str,
    body: Markup,
}

/// The page.
pub fn page(plan: &Plan, target: &Target) -> String {
    let timeline = Timeline::predict(plan, target);
    let cx = Cx {
        plan,
        target,
        cost: timeline.step_cost(plan, target),
        timeline,
        summary: Summary::of(plan),
        memory: memory_profile(plan),
        needs: Needs::of(plan, Some(target)),
        phases: Phases::of(plan, plan.last_micro_batch()),
    };
    let mut cuts = Cuts::default();
    let section = |id, title, body| Section { id, title, body };
    let sections = [
        section("mesh", "Mesh", mesh::section(&cx)),
        section("memory", "Memory", memory::section(&cx)),
        section("timeline", "Timeline", timeline::section(&cx)),
        section("collectives", "Collectives", collectives::section(&cx)),
        section("parameters", "Parameters", params::section(&cx, &mut cuts)),
        section("activations", "Activations", activations::section(&cx, &mut cuts)),
        section("units", "FSDP units", units::section(&cx)),
        section("amax", "Amax groups", amax::section(&cx)),
        section("state", "Optimizer state and checkpoint", checkpoint::section(&cx)),
    ];
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta http-equiv="Content-Security-Policy"
                    content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";
                link rel="icon" href="data:,";
                title { (plan.name) " on " (mesh_text(&plan.mesh)) " · planc" }
                style { (PreEscaped(include_str!("page/page.css"))) }
            }
            body {
                a.skip href="#main" { "Skip to the report" }
                nav aria-label="Sections" {
                    strong { (plan.name) }
                    ol { @for it in &sections { li { a href=(format!("#{}", it.id)) { (it.title) } } } }
                }
                main #main tabindex="-1" {
                    (header(&cx))
                    @for it in &sections {
                        section aria-labelledby=(it.id) {
                            h2 #(it.id) { (it.title) }
                            (it.body)
                        }
                    }
                    footer {
                        "planc " (env!("CARGO_PKG_VERSION")) ". Times are predicted for " (target.machine)
                        "; bytes are those of the plan."
                    }
                }
                script { (PreEscaped(include_str!("page/page.js"))) }
            }
        }
    }
    .into_string()
}

fn header(cx: &Cx) -> Markup {
    let Cx { plan, target, summary, cost, .. } = cx;
    let run = &plan.run;
    let tokens = run.global_batch * run.sequence;
    let rate = if cost.seconds > 0.0 { tokens as f64 / cost.seconds } else { 0.0 };
    let share = |part: f64| if cost.seconds > 0.0 { 100.0 * part / cost.seconds } else { 0.0 };
    let compute = cost.seconds - cost.exposed_seconds;
    let Utilization { mfu, hfu } = cost.of_bf16_peak;
    html! {
        header {
            h1 { (plan.name) }
            p.lead {
                (mesh_text(&plan.mesh)) ", " (grouped(tokens)) " tokens a step"
                @if plan.micro_batches > 1 { " in " (plan.micro_batches) " micro-batches" }
                ", predicted for " (target.name)
            }
            dl.tiles {
                (tile("Parameters", &short(summary.parameters), "parameters", &summary.parameters.to_string(),
                    &format!("in {} tensors", grouped(plan.params.len() as u64))))
                (tile("Memory a rank", &bytes(cx.needs.bytes()), "memory", &cx.needs.bytes().to_string(),
                    &format!("needed, of {} on {}", bytes(target.memory.0 as u64), target.name)))
                (tile("Step", &seconds(cost.seconds), "step-seconds", &cost.seconds.to_string(),
                    &format!("{} tokens/s", short(rate as u64))))
                div {
                    dt { "Model FLOPs utilization" }
                    dd.figure data-figure="mfu" data-value=(mfu) { (percent(mfu)) }
                    dd {
                        "of the bf16 peak; HFU " span data-figure="hfu" data-value=(hfu) { (percent(hfu)) }
                        @if let Some(it) = &cost.of_fp8_peak {
                            "; of the FP8 peak " span data-figure="mfu-fp8" data-value=(it.mfu) { (percent(it.mfu)) }
                            ", HFU " span data-figure="hfu-fp8" data-value=(it.hfu) { (percent(it.hfu)) }
                        }
                    }
                }
                (tile("Waiting", &format!("{:.1} %", share(cost.exposed_seconds)),
                    "exposed-seconds", &cost.exposed_seconds.to_string(),
                    &format!("{} for communication", seconds(cost.exposed_seconds))))
                (tile("Sent by a rank", &bytes(summary.wire_bytes()), "wire-bytes",
                    &summary.wire_bytes().to_string(),
                    &format!("{} calls", grouped(summary.collectives.iter().map(|it| it.count).sum()))))
            }
            p.note data-basis { "Basis of the prediction: " (basis(target, plan.mesh.n_ranks())) "." }
            @for it in lint::repeated(summary, &plan.mesh) {
                p.note data-lint=(it.lint.name()) { (it.message()) "." }
            }
            div.split role="img" aria-label=(format!("Of a step, {:.1} % computes and {:.1} % waits for communication",
                share(compute), share(cost.exposed_seconds))) {
                span.computes style=(format!("flex:{:.4}", share(compute))) {}
                span.waits style=(format!("flex:{:.4}", share(cost.exposed_seconds))) {}
            }
        }
    }
}

/// A figure that matters, with its exact value.
fn tile(title: &str, value: &str, key: &str, exact: &str, more: &str) -> Markup {
    html! {
        div {
            dt { (title) }
            dd.figure data-figure=(key) data-value=(exact) { (value) }
            dd { (more) }
        }
    }
}

/// `n` with its exact value for who reads the page by program.
fn byte_cell(n: u64) -> Markup {
    html! { td.number data-bytes=(n) { (bytes(n)) } }
}

/// The same for seconds.
fn time_cell(it: f64) -> Markup {
    html! { td.number data-seconds=(it) { (seconds(it)) } }
}

/// A count.
fn count_cell(n: u64) -> Markup {
    html! { td.number data-count=(n) { (grouped(n)) } }
}

/// A dotted name, which may go on in the next line behind each dot.
fn breakable(name: &str) -> Markup {
    html! { @for part in name.split_inclusive('.') { (part) wbr; } }
}

/// `×126`, if there are several.
fn times(n: usize) -> Markup {
    html! { @if n > 1 { span.times title=(format!("{n} that are alike")) { "×" (grouped(n as u64)) } } }
}
