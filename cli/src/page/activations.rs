//! What the forward pass makes in a layer, and where it lives; layers that are alike are one.

use std::collections::BTreeMap;

use ir::plan::{Arena, Buffer, BufferData};
use maud::{Markup, html};

use super::params::drawing;
use super::phases::{Purpose, purposes};
use super::{Cx, breakable, byte_cell};
use crate::grid::Cuts;
use crate::table::grouped;
use crate::words::{fold, layer, numbers};

/// One activation of a layer, as all layers have it that are alike.
#[derive(Debug, Clone, PartialEq)]
struct Activation {
    name: String,
    buffer: Buffer,
    kept: bool,
}

/// The section.
pub fn section(cx: &Cx, cuts: &mut Cuts) -> Markup {
    let classes = classes(cx);
    html! {
        p { "What the forward pass makes, by layer and placement. What is kept is there until the backward pass has read it." }
        @for (i, (layers, members)) in classes.iter().enumerate() {
            details.layer open[i == 0] data-layers=(layers.len()) {
                summary {
                    @match layers.as_slice() {
                        [] => "outside of layers",
                        [one] => { "layer " (one) },
                        many => { "layers " (numbers(many)) ", " (grouped(many.len() as u64)) " that are alike" },
                    }
                }
                div.cards {
                    @for (j, (data, members)) in by_placement(cx, members).into_iter().enumerate() {
                        (card(cx, data, &members, &format!("a{i}-{j}"), cuts))
                    }
                }
            }
        }
    }
}

/// Layers that are alike, with their activations; what is in no layer comes last.
fn classes(cx: &Cx) -> Vec<(Vec<u64>, Vec<Activation>)> {
    let plan = cx.plan;
    let purposes = purposes(plan, &cx.phases);
    let mut layers: BTreeMap<Option<u64>, Vec<Activation>> = BTreeMap::new();
    for instruction in &plan.section(cx.phases.sections[0])[..cx.phases.backward] {
        for buffer in instruction.writes() {
            let data = &plan.buffers[buffer];
            let activation = matches!(purposes[buffer], Some(Purpose::Kept | Purpose::Forward));
            if !activation || data.role.arena() != Arena::Step || data.ty.shape.is_empty() {
                continue;
            }
            let layer = layer(&data.name);
            let name = if layer.is_some() { fold(&data.name) } else { data.name.clone() };
            let members = layers.entry(layer).or_default();
            let kept = purposes[buffer] == Some(Purpose::Kept);
            if members.iter().all(|it| it.buffer != buffer) {
                members.push(Activation { name, buffer, kept });
            }
        }
    }
    let alike = |a: &Activation, b: &Activation| {
        let (x, y) = (&plan.buffers[a.buffer], &plan.buffers[b.buffer]);
        a.name == b.name && a.kept == b.kept && x.ty == y.ty && x.sharding == y.sharding
    };
    let mut res: Vec<(Vec<u64>, Vec<Activation>)> = Vec::new();
    let outside = layers.remove(&None);
    for (layer, mut members) in layers {
        // The order in which streams issue them is no difference.
        members.sort_by(|a, b| a.name.cmp(&b.name));
        let same = |it: &[Activation]| {
            it.len() == members.len() && it.iter().zip(&members).all(|(a, b)| alike(a, b))
        };
        match res.iter_mut().find(|it| same(&it.1)) {
            Some(class) => class.0.extend(layer),
            None => res.push((layer.into_iter().collect(), members)),
        }
    }
    res.sort_by_key(|it| std::cmp::Reverse(it.0.len()));
    res.extend(outside.map(|it| (Vec::new(), it)));
    res
}

/// Activations of one shape and sharding together, those first that take most.
fn by_placement<'a>(cx: &Cx<'a>, members: &[Activation]) -> Vec<(&'a BufferData, Vec<Activation>)> {
    let mut res: Vec<(&BufferData, Vec<Activation>)> = Vec::new();
    for it in members {
        let data = &cx.plan.buffers[it.buffer];
        let same =
            |known: &BufferData| known.ty.shape == data.ty.shape && known.sharding == data.sharding;
        match res.iter_mut().find(|known| same(known.0)) {
            Some(known) => known.1.push(it.clone()),
            None => res.push((data, vec![it.clone()])),
        }
    }
    let bytes = |members: &[Activation]| -> u64 {
        members.iter().map(|it| cx.plan.local_bytes(it.buffer)).sum()
    };
    res.sort_by_key(|it| std::cmp::Reverse(bytes(&it.1)));
    res
}

fn card(cx: &Cx, data: &BufferData, members: &[Activation], id: &str, cuts: &mut Cuts) -> Markup {
    let mesh = &cx.plan.mesh;
    let local = data.sharding.local_shape(&data.ty.shape, mesh);
    let placement = mesh.in_user_axes(&data.sharding.display(mesh).to_string(), ".");
    html! {
        article.card data-placement=(placement) {
            h3 { code { (placement) } " of " (format!("{:?}", &data.ty.shape[..])) }
            p.note { "local " (format!("{:?}", &local[..])) }
            (drawing(cx, data, id, &placement, cuts))
            div.scroll {
                table {
                    thead { tr { th scope="col" { "tensor" } th scope="col" { "type" } th scope="col" { "kept" } th.number scope="col" { "bytes a rank" } } }
                    tbody {
                        @for it in members {
                            tr data-tensor=(it.name) {
                                th.name scope="row" { (breakable(it.name.rsplit_once("*.").map_or(it.name.as_str(), |it| it.1))) }
                                td { (cx.plan.buffers[it.buffer].ty.dtype.name()) }
                                td { @if it.kept { "kept" } }
                                (byte_cell(cx.plan.local_bytes(it.buffer)))
                            }
                        }
                    }
                }
            }
        }
    }
}
