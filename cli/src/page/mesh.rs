//! The mesh: its axes, which links they use, and where ranks are.

use ir::cost::Group;
use ir::model::axes_text;
use ir::placement::{Axis, AxisSet};
use maud::{Markup, html};

use super::Cx;
use super::picture::px;
use crate::table::{grouped, plural};
use crate::words::{mesh_text, refinements};

/// Rows and columns of ranks that are drawn at most.
const SHOWN: u64 = 16;

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let mesh = &cx.plan.mesh;
    let per_node = cx.target.ranks_per_node;
    let nodes = mesh.n_ranks().div_ceil(u64::from(per_node));
    let mut stride = mesh.n_ranks();
    html! {
        p {
            (mesh_text(mesh)) " on " (plural(nodes, "node")) " of " (per_node) ". "
            @for it in refinements(mesh) { (it) ". " }
        }
        div.side {
            div.scroll {
                table {
                    caption { "Axes, major to minor" }
                    thead { tr {
                        th scope="col" { "axis" } th.number scope="col" { "size" }
                        th.number scope="col" { "ranks apart" } th scope="col" { "links" }
                        th.number scope="col" { "parameters cut" } th.number scope="col" { "sent a step" }
                    } }
                    tbody {
                        @for (name, size) in mesh.user_axes() {
                            @let axes: AxisSet = mesh.axes_named(name).into_iter().collect();
                            @let group = Group::of(mesh, axes, per_node);
                            @let apart = { stride /= u64::from(size); stride };
                            tr data-axis=(name) {
                                th scope="row" { (name) }
                                td.number data-size=(size) { (grouped(u64::from(size))) }
                                td.number { (grouped(apart)) }
                                td { @if group.is_in_node() { "within a node" } @else {
                                    "across " (plural(group.nodes, "node")) } }
                                td.number { (grouped(cut_over(cx, axes))) }
                                (super::byte_cell(sent_over(cx, name)))
                            }
                        }
                    }
                }
            }
            (drawing(cx))
        }
    }
}

/// Parameters that an axis, or a part of it, cuts.
fn cut_over(cx: &Cx, axes: AxisSet) -> u64 {
    let cut = |it: &&ir::plan::PlanParam| {
        let sharded = cx.plan.buffers[it.buffer].sharding.sharded_axes();
        !sharded.intersect(axes).is_empty()
    };
    cx.plan.params.iter().filter(cut).count() as u64
}

/// Bytes that a rank sends in collectives over this axis alone.
fn sent_over(cx: &Cx, axis: &str) -> u64 {
    let over = |axes: &str| {
        let names = cx.plan.mesh.in_user_axes(axes, ", ");
        names.split(", ").all(|it| {
            it == axis || cx.plan.mesh.axes.iter().any(|a| a.name == it && a.user_name() == axis)
        })
    };
    let of_axis = cx.summary.collectives.iter().filter(|it| over(&it.axes));
    of_axis.map(|it| it.wire_bytes).sum()
}

/// Ranks as a grid: the last axis across, all others downwards.
fn drawing(cx: &Cx) -> Markup {
    let user = ir::placement::Mesh::new(&cx.plan.mesh.user_axes());
    let n_axes = user.axes.len();
    let columns = user.axes.last().map_or(1, |it| u64::from(it.size));
    let rows = user.n_ranks() / columns;
    let (down, across) = (shown(rows), shown(columns));
    let digits = user.n_ranks().saturating_sub(1).to_string().len() as f64;
    let (w, h, top) = ((digits * 5.8 + 9.0).max(30.0), 17.0, 16.0);
    let label = |rank: u64| {
        let coord = user.coord_of(rank);
        let axes = user.axes().take(n_axes.saturating_sub(1));
        axes_text(axes.map(|it: Axis| (user.name(it), coord[it.0 as usize])), " ")
    };
    let labels = down.iter().flatten().map(|it| label(it * columns).len());
    let left = labels.max().unwrap_or(0).max(if rows > SHOWN { 10 } else { 0 }) as f64 * 5.6 + 8.0;
    let last = user.axes.last().map_or("", |it| it.name.as_str());
    let per_node = u64::from(cx.target.ranks_per_node);
    let width = left + across.len() as f64 * w + 2.0;
    let height = top + down.len() as f64 * h + 2.0;
    let title = format!("Ranks of {}; a shade for each node", mesh_text(&cx.plan.mesh));
    html! {
        figure {
            svg.picture viewBox=(format!("0 0 {} {}", px(width), px(height))) width=(px(width)) height=(px(height))
                role="group" aria-label=(title) {
                @for (j, column) in across.iter().enumerate() {
                    text.axis x=(px(left + (j as f64 + 0.5) * w)) y="11" text-anchor="middle" {
                        @if let Some(it) = column { @if j == 0 { (last) "=" } (it) } @else { "…" }
                    }
                }
                @for (i, row) in down.iter().enumerate() {
                    @let y = top + i as f64 * h;
                    text.axis x=(px(left - 5.0)) y=(px(y + h / 2.0 + 3.0)) text-anchor="end" {
                        @if let Some(it) = row { (label(it * columns)) } @else { (grouped(rows - SHOWN + 1)) " more" }
                    }
                    @for (j, column) in across.iter().enumerate() {
                        @let x = left + j as f64 * w;
                        @if let (Some(row), Some(column)) = (row, column) {
                            @let rank = row * columns + column;
                            @let what = format!("rank {rank}: {}, {last}={column}, node {}", label(rank), rank / per_node);
                            g.cell tabindex=(if rank == 0 { "0" } else { "-1" }) role="img" aria-label=(what)
                                id=(format!("rank-{rank}")) data-row=(i) data-column=(j) data-rank=(rank)
                                data-node=(rank / per_node) {
                                rect class=(format!("k{}", rank / per_node % 8)) x=(px(x)) y=(px(y)) width=(px(w)) height=(px(h)) {}
                                text x=(px(x + w / 2.0)) y=(px(y + h / 2.0 + 3.2)) text-anchor="middle" { (rank) }
                            }
                        } @else {
                            rect.folded x=(px(x)) y=(px(y)) width=(px(w)) height=(px(h)) {}
                        }
                    }
                }
            }
            figcaption { "Ranks, a colour for each node." }
        }
    }
}

/// Numbers of rows or columns, with a gap where there are too many.
fn shown(n: u64) -> Vec<Option<u64>> {
    if n <= SHOWN {
        return (0..n).map(Some).collect();
    }
    let first = (0..SHOWN - 2).map(Some);
    first.chain([None, Some(n - 1)]).collect()
}
