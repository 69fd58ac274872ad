//! Every parameter's placement as a picture; parameters of layers that are laid out alike are one.

use ir::placement::{Placement, Sharding};
use ir::plan::{Buffer, BufferData};
use maud::{Markup, html};

use super::phases::{STEP, weights};
use super::picture::{BANDS, picture};
use super::{Cx, breakable, times};
use crate::grid::{Band, Cuts, Grid, Room};
use crate::table::{bytes, grouped};
use crate::words::{fold, layer, numbers};

/// Parameters with the same name but for numbers, and the same layout.
struct Group<'a> {
    name: String,
    data: &'a BufferData,
    /// The layout that PyTorch labels.
    label: &'a Sharding,
    buffers: Vec<Buffer>,
    /// As modules read it, where that is another layout.
    read: Option<Buffer>,
}

/// The section.
pub fn section(cx: &Cx, cuts: &mut Cuts) -> Markup {
    let groups = groups(cx);
    html! {
        p {
            "Boxes of global indices and the ranks that hold them, to scale. Point at a box, or go from box to box with "
            "the arrow keys, to read rank, indices and bytes; other boxes of the same ranks are then outlined."
        }
        div.cards { @for (i, it) in groups.iter().enumerate() { (card(cx, it, &format!("p{i}"), cuts)) } }
    }
}

fn groups<'a>(cx: &Cx<'a>) -> Vec<Group<'a>> {
    let plan = cx.plan;
    let weights = weights(plan);
    // The first form of each weight that a module reads.
    let gathered = |param: Buffer| {
        let mut writes = plan.timeline(STEP).flat_map(|it| it.1.writes());
        writes.find(|&it| {
            let sharding = &plan.buffers[it].sharding;
            weights[it] == Some(param) && *sharding != plan.buffers[param].sharding
        })
    };
    let mut res: Vec<Group> = Vec::new();
    for param in &plan.params {
        let data = &plan.buffers[param.buffer];
        let (name, label) = (fold(&data.name), param.label.as_ref().unwrap_or(&data.sharding));
        let alike = |it: &Group| {
            it.name == name
                && it.data.ty == data.ty
                && it.data.sharding == data.sharding
                && it.label == label
        };
        match res.iter_mut().find(|it| alike(it)) {
            Some(group) => group.buffers.push(param.buffer),
            None => res.push(Group {
                name,
                data,
                label,
                buffers: vec![param.buffer],
                read: gathered(param.buffer),
            }),
        }
    }
    res
}

fn card(cx: &Cx, group: &Group, id: &str, cuts: &mut Cuts) -> Markup {
    let plan = cx.plan;
    let (mesh, data) = (&plan.mesh, group.data);
    let layers: Vec<u64> =
        group.buffers.iter().filter_map(|it| layer(&plan.buffers[*it].name)).collect();
    let name = if group.buffers.len() == 1 { data.name.clone() } else { group.name.clone() };
    let torch = group.label.to_torch(mesh).ok().map(|it| {
        let parts: Vec<String> = it.iter().map(Placement::to_string).collect();
        format!("[{}]", parts.join(", "))
    });
    let n = group.buffers.len() as u64;
    let local = plan.local_bytes(group.buffers[0]);
    let even = data.sharding.divides(&data.ty.shape, mesh);
    html! {
        article.card data-tensor=(name) data-n=(n) {
            h3 { (breakable(&name)) (times(group.buffers.len())) }
            dl {
                dt { "global" } dd { (data.ty.dtype.name()) (format!("{:?}", &data.ty.shape[..])) }
                dt { "placement" } dd { code { (mesh.in_user_axes(&data.sharding.display(mesh).to_string(), ".")) } }
                @if let Some(torch) = torch { dt { "PyTorch" } dd { code { (torch) } } }
                dt { "local" } dd data-local-bytes=(local) {
                    (format!("{:?}", &plan.local_shape(group.buffers[0])[..])) ", " (bytes(local))
                    @if !even { " on the fullest rank" }
                }
                @if n > 1 && layers.len() as u64 == n { dt { "layers" } dd { (numbers(&layers)) } }
                @if let Some(read) = group.read {
                    @let read = &plan.buffers[read];
                    dt { "read as" } dd { (read.ty.dtype.name()) " " code { (mesh.in_user_axes(&read.sharding.display(mesh).to_string(), ".")) } }
                }
            }
            (drawing(cx, data, id, &name, cuts))
        }
    }
}

/// The picture of a tensor's placement, what it leaves out, and a line to read a box in.
pub fn drawing(cx: &Cx, data: &BufferData, id: &str, name: &str, cuts: &mut Cuts) -> Markup {
    let mesh = &cx.plan.mesh;
    let (shape, element) = (&data.ty.shape[..], data.ty.dtype.bytes());
    let mut grid =
        |bands| Grid::of(&data.sharding, shape, element, mesh, cuts, Room { bands, chosen: &[] });
    let is_folded = |it: &Grid| it.bands[1].iter().any(|it| matches!(it, Band::Folded { .. }));
    let all = grid(BANDS[0]);
    let Some(grid) = (if all.as_ref().is_some_and(is_folded) { grid(BANDS[1]) } else { all })
    else {
        return html! { p.note { "Too many pieces to draw." } };
    };
    // Axes of a partial value hold summands, not copies.
    let copies = data.sharding.replicated_axes(mesh);
    html! {
        (picture(&grid, mesh, id, &format!("Which ranks hold which box of {name}")))
        p.readout aria-live="polite" {}
        p.note {
            @if mesh.set_size(copies) > 1 { "Copies over " (mesh.in_user_axes(&mesh.names(copies), ", ")) ". " }
            @if let Some((op, axes)) = &data.sharding.partial {
                "Partial over " (mesh.in_user_axes(&mesh.names(*axes), ", ")) ": the value is the " (op.noun())
                " of what these ranks hold. "
            }
            @if grid.n_empty > 0 { span data-empty=(grid.n_empty) { (grouped(grid.n_empty)) @if grid.n_empty == 1 { " rank holds" } @else { " ranks hold" } " nothing. " } }
            @for dim in &grid.others { "Dim " (dim) " is cut too: drawn is its first piece. " }
        }
    }
}
