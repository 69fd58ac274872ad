//! Collectives by axes and kind: calls, bytes, predicted time.

use std::collections::BTreeMap;

use ir::plan::Instruction;
use ir::summary::CollectiveTotal;
use maud::{Markup, html};

use super::phases::STEP;
use super::{Cx, byte_cell, count_cell, time_cell};

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let seconds = seconds(cx);
    let all = totals(cx);
    if all.is_empty() {
        return html! { p { "Nothing is sent: one rank has everything." } };
    }
    let most = all.iter().map(|it| it.wire_bytes).max().unwrap_or(1).max(1);
    html! {
        p { "Of one rank in one step. An all-gather counts what it makes, the others what they take; sent is what a rank sends in a ring." }
        div.scroll {
            table #collectives-table {
                thead { tr {
                    th scope="col" { "over" } th scope="col" { "kind" } th.number scope="col" { "calls" }
                    th.number scope="col" { "bytes" } th.number scope="col" { "sent" } th.number scope="col" { "time" }
                    th.number scope="col" { "sent a second" } th scope="col" { span.hidden { "share of what is sent" } }
                } }
                tbody {
                    @for it in &all {
                        @let time = seconds.get(&(it.axes.clone(), it.kind)).copied().unwrap_or(0.0);
                        @let over = cx.plan.mesh.in_user_axes(&it.axes, ", ");
                        tr data-axes=(over) data-kind=(it.kind) {
                            th scope="row" { (over) }
                            td { code { (it.kind) } }
                            (count_cell(it.count)) (byte_cell(it.bytes)) (byte_cell(it.wire_bytes)) (time_cell(time))
                            td.number { @if time > 0.0 { (crate::table::bytes((it.wire_bytes as f64 / time) as u64)) "/s" } }
                            td.bar { span style=(format!("width:{:.1}%", 100.0 * it.wire_bytes as f64 / most as f64)) {} }
                        }
                    }
                }
                tfoot { tr data-axes="all" {
                    th scope="row" { "all" } td {}
                    (count_cell(all.iter().map(|it| it.count).sum()))
                    (byte_cell(all.iter().map(|it| it.bytes).sum()))
                    (byte_cell(cx.summary.wire_bytes()))
                    (time_cell(cx.cost.communication_seconds))
                    td {} td {}
                } }
            }
        }
    }
}

/// Those of one kind over the same axes together, whatever they reduce by.
fn totals(cx: &Cx) -> Vec<CollectiveTotal> {
    let mut res: Vec<CollectiveTotal> = Vec::new();
    for it in &cx.summary.collectives {
        match res.iter_mut().find(|known| known.axes == it.axes && known.kind == it.kind) {
            Some(known) => {
                known.count += it.count;
                known.bytes += it.bytes;
                known.wire_bytes += it.wire_bytes;
            }
            None => res.push(it.clone()),
        }
    }
    res
}

/// Predicted seconds of a step, by names of axes and kind.
fn seconds(cx: &Cx) -> BTreeMap<(String, &'static str), f64> {
    let mut res = BTreeMap::new();
    for &section in STEP {
        let times = f64::from(cx.plan.runs(section));
        for span in cx.timeline.section(section) {
            let instruction = &cx.plan.section(section)[span.index];
            let Instruction::Collective { kind, comm, .. } = instruction else { continue };
            if !kind.is_local() {
                let axes = cx.plan.mesh.names(cx.plan.comms[*comm]);
                *res.entry((axes, kind.name())).or_insert(0.0) += times * (span.end - span.start);
            }
        }
    }
    res
}
