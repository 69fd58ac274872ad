//! Over which ranks the scales of GEMMs agree, and why; layers folded.

use maud::{Markup, html};

use super::{Cx, breakable, times};
use crate::inspect::amax::{amaxes, folded};
use crate::table::grouped;

/// The section.
pub fn section(cx: &Cx) -> Markup {
    let groups = folded(&amaxes(cx.plan));
    if groups.is_empty() {
        return html! { p { "No GEMM multiplies codes: no module has a recipe." } };
    }
    html! {
        p { "Each operand of a GEMM on codes: over which ranks the amax behind its scale is reduced, and why." }
        div.scroll {
            table.wraps #amax-table {
                thead { tr {
                    th scope="col" { "GEMM" } th scope="col" { span.hidden { "operand" } } th scope="col" { "tensor" }
                    th scope="col" { "scaling" } th scope="col" { "amax over" } th.number scope="col" { "ranks" }
                    th scope="col" { "varies over" } th scope="col" { "why" }
                } }
                @for (count, gemm) in &groups {
                    tbody {
                        @for (i, it) in gemm.operands.iter().enumerate() {
                            tr data-gemm=(gemm.gemm) data-pass=(gemm.role) data-operand=(it.role)
                                data-axes=(it.group.as_ref().map_or("", |it| it.axes.as_str()))
                                data-ranks=(it.group.as_ref().map_or(1, |it| it.ranks)) data-n=(count) {
                                @if i == 0 {
                                    th.name scope="rowgroup" rowspan=(gemm.operands.len()) { (breakable(&gemm.gemm)) " " em { (gemm.role) } (times(*count as usize)) }
                                }
                                td { (it.role) }
                                td.name { (breakable(&it.tensor)) }
                                td { (format!("{:?}", it.format)) ", " (it.scaling) }
                                @match &it.group {
                                    Some(group) => { td { (group.axes) } td.number { (grouped(group.ranks)) } },
                                    None => { td { "no axis" } td.number { "1" } },
                                }
                                td { (it.varies) }
                                td.why { (it.reason) }
                            }
                        }
                    }
                }
            }
        }
    }
}
