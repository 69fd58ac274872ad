//! Optimizer state, and what of a plan's state a checkpoint has and who writes it.

use std::collections::HashMap;

use ir::checkpoint::{CheckpointLayout, Kind, Optimizer};
use ir::plan::Role;
use maud::{Markup, html};

use super::{Cx, byte_cell, count_cell};
use crate::table::grouped;

/// Ranks whose files are measured.
const MEASURED: u64 = 16;

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let layout = match CheckpointLayout::of(cx.plan) {
        Ok(it) => it,
        Err(error) => {
            return html! { p { "This plan's state cannot be saved: " (error.to_string()) } };
        }
    };
    html! {
        div.side { (optimizers(cx, &layout)) (entries(cx, &layout)) }
        (files(cx, &layout))
    }
}

/// Parameters that are trained alike, and what that takes.
fn optimizers(cx: &Cx, layout: &CheckpointLayout) -> Markup {
    if layout.groups.is_empty() {
        return html! { p { "Nothing is trained." } };
    }
    let mut states: HashMap<&str, u64> = HashMap::new();
    for it in &layout.entries {
        if let Kind::Optimizer { param, .. } = &it.kind {
            let elements = it.sharding.local_elements(&it.ty.shape, &layout.mesh);
            *states.entry(param).or_default() += elements * it.ty.dtype.bytes();
        }
    }
    let states_of = |param: &str| states.get(param).copied().unwrap_or(0);
    let kept: u64 = cx
        .plan
        .buffers
        .iter()
        .filter(|it| it.1.role == Role::State)
        .map(|it| cx.plan.local_bytes(it.0))
        .sum();
    let n: usize = layout.groups.iter().map(|it| it.params.len()).sum();
    html! {
        div.scroll {
            table #optimizer-table {
                caption { "Parameters that are trained alike" }
                thead { tr {
                    th scope="col" { "optimizer" } th.number scope="col" { "tensors" } th.number scope="col" { "states of a rank" }
                } }
                tbody {
                    @for group in &layout.groups {
                        tr {
                            th scope="row" { (optimizer(group.optimizer)) }
                            (count_cell(group.params.len() as u64))
                            (byte_cell(group.params.iter().map(|it| states_of(it)).sum()))
                        }
                    }
                }
                tfoot { tr {
                    th scope="row" { "all states, those for computing included" } (count_cell(n as u64)) (byte_cell(kept))
                } }
            }
        }
    }
}

fn optimizer(it: Optimizer) -> String {
    match it {
        Optimizer::Adam { decoupled, betas: (beta1, beta2), eps, weight_decay } => {
            let name = if decoupled { "AdamW" } else { "Adam" };
            format!("{name}, betas {beta1}, {beta2}, eps {eps:e}, decay {weight_decay}")
        }
        Optimizer::Sgd { momentum, weight_decay } => {
            format!("SGD, momentum {momentum}, decay {weight_decay}")
        }
    }
}

/// What is saved, by kind.
fn entries(cx: &Cx, layout: &CheckpointLayout) -> Markup {
    let prefix = |it: &Kind| match it {
        Kind::Param => "model",
        Kind::Optimizer { .. } => "optim",
        Kind::State { .. } | Kind::Kept => "planc",
    };
    let kinds = [
        ("model", "model.<param>"),
        ("optim", "optim.state.<param>.<state>"),
        ("planc", "planc.state.<buffer>"),
    ];
    let bytes = |it: &ir::checkpoint::Entry| it.ty.n_elements() * it.ty.dtype.bytes();
    html! {
        div.scroll {
            table #checkpoint-table {
                caption { "A checkpoint, in PyTorch's format" }
                thead { tr {
                    th scope="col" { "keys" } th.number scope="col" { "tensors" } th.number scope="col" { "bytes" }
                    th.number scope="col" { "held by a rank" }
                } }
                tbody {
                    @for (key, name) in kinds {
                        @let of: Vec<_> = layout.entries.iter().filter(|it| prefix(&it.kind) == key).collect();
                        tr data-kind=(key) {
                            th scope="row" { code { (name) } }
                            (count_cell(of.len() as u64))
                            (byte_cell(of.iter().map(|it| bytes(it)).sum()))
                            (byte_cell(of.iter().map(|it| it.sharding.local_elements(&it.ty.shape, &cx.plan.mesh) * it.ty.dtype.bytes()).sum()))
                        }
                    }
                }
                tfoot { tr data-kind="all" {
                    th scope="row" { "all" } (count_cell(layout.entries.len() as u64))
                    (byte_cell(layout.entries.iter().map(bytes).sum())) td {}
                } }
            }
        }
    }
}

/// What the first ranks write: copies are shared out.
fn files(cx: &Cx, layout: &CheckpointLayout) -> Markup {
    let mesh = &cx.plan.mesh;
    let n = mesh.n_ranks().min(MEASURED);
    let written: Vec<u64> = (0..n)
        .map(|rank| {
            let coord = mesh.coord_of(rank);
            let of = |it: &ir::checkpoint::Entry| -> u64 {
                let chunks = it.chunks_written(mesh, &coord);
                let elements: u64 = chunks.iter().map(|it| it.sizes.iter().product::<u64>()).sum();
                elements * it.ty.dtype.bytes()
            };
            layout.entries.iter().map(of).sum()
        })
        .collect();
    let most = written.iter().copied().max().unwrap_or(0).max(1);
    html! {
        h3 { "Files" }
        p {
            "One for each of " (grouped(mesh.n_ranks())) " ranks; of several that hold the same, one writes it."
            @if n < mesh.n_ranks() { " The first " (n) ":" }
        }
        div.scroll {
            table.files #files-table {
                thead { tr { th scope="col" { "rank" } th.number scope="col" { "writes" } th scope="col" { span.hidden { "beside the others" } } } }
                tbody {
                    @for (rank, bytes) in written.iter().enumerate() {
                        tr data-rank=(rank) {
                            th scope="row" { (rank) } (byte_cell(*bytes))
                            td.bar { span style=(format!("width:{:.1}%", 100.0 * *bytes as f64 / most as f64)) {} }
                        }
                    }
                }
            }
        }
    }
}
