//! `planc inspect`: which rank holds what, what is sent, what is in memory, which scales agree.

pub mod amax;
mod costs;
mod drawing;
mod tensors;

use std::path::{Path, PathBuf};

use ir::Digest;
use ir::model::{NamePattern, axes_text};
use ir::placement::{Axis, Mesh};
use ir::plan::Plan;
use serde::Serialize;

use crate::grid::Cuts;
use crate::input::PlanArgs;
use crate::output::{self, ForceArgs, Output};
use crate::page::page;
use crate::report::{Failure, Outcome, Ui, print_view};
use crate::table::{bytes, grouped};
use crate::target::{self, Prediction};
use crate::words::{digests_text, mesh_text, refinements};

use amax::{GemmView, amaxes, amaxes_text};
use costs::{CollectiveView, MemoryView, collectives, collectives_text};
use drawing::Style;
use tensors::{TensorView, tensors};

/// Ranks listed when none are chosen.
const LISTED_RANKS: u64 = 16;
/// Ranks listed at most when a coordinate leaves axes free.
const CHOSEN_RANKS: usize = 1024;

/// Shows a plan: placements, collectives, memory, amax groups.
///
/// Placements are those of the parameters, in PyTorch's notation (one entry for each axis of the mesh)
/// and in planc's (one entry for each dimension of the tensor, axes major to minor), with the
/// index ranges that each rank holds. Ranks that hold the same are on one line.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,
    /// Only ranks at these coordinates of the mesh, as in `dp=1,tp=3`; axes left out are free.
    #[arg(long, value_name = "AXIS=INDEX,..")]
    coord: Option<String>,
    /// Only tensors whose name fits; `*` stands for any text, `?` and `[qk]` for a character.
    #[arg(long, value_name = "GLOB")]
    param: Option<NamePattern>,
    /// Optimizer states and accumulators too.
    #[arg(long)]
    states: bool,
    /// Every collective of a step instead of placements.
    #[arg(long)]
    collectives: bool,
    /// What is in memory at its peak instead of placements.
    #[arg(long)]
    memory: bool,
    /// Over which ranks the scales of GEMMs on codes agree, and why, instead of placements.
    #[arg(long)]
    amax: bool,
    /// Writes all of it as one page for a browser, with predicted times; the page needs no network.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["coord", "param", "states", "collectives", "memory", "amax"])]
    html: Option<PathBuf>,
    #[command(flatten)]
    force: ForceArgs,
    /// The machine that times on the page are for: a100, b200, cpu, h100, h200 (the default), or a
    /// profile of your own (.ron).
    #[arg(long, value_name = "TARGET", requires = "html")]
    target: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let plan = args.plan.plan(ui)?;
    if let Some(path) = &args.html {
        return write_page(&plan, path, args, ui);
    }
    let view = View::of(&plan, args)?;
    print_view(ui, &view, |it| it.text(&plan, args, Style::of_stdout(ui)))
}

/// Writes the page and says where.
fn write_page(plan: &Plan, path: &Path, args: &Args, ui: &Ui) -> Outcome {
    let target = target::load(args.target.as_deref().unwrap_or("h200"))?;
    let force = args.force.force;
    let file = Output { flag: "--html", path, format: output::Format::Page, force };
    file.check([&*args.plan.input])?;
    // Says so if the machine cannot run it.
    Prediction::of(plan, &target)?;
    let page = page(plan, &target);
    file.write(&page)?;
    if ui.quiet {
        return Ok(());
    }
    let written = PageView {
        output: path.display().to_string(),
        bytes: page.len() as u64,
        target: target.name,
    };
    print_view(ui, &written, |it| {
        format!(
            "{} on {} -> {} ({}), times for {}\n",
            plan.name,
            mesh_text(&plan.mesh),
            it.output,
            bytes(it.bytes),
            it.target
        )
    })
}

/// What was written; its JSON form is what `--format json` prints.
#[derive(Debug, Serialize)]
struct PageView {
    output: String,
    bytes: u64,
    target: String,
}

/// All that was asked for; its JSON form is what `--format json` prints.
#[derive(Debug, Serialize)]
struct View {
    plan: String,
    /// The digest of its model; null of a plan that was written without one.
    model: Option<Digest>,
    /// The digest of the plan.
    digest: Digest,
    mesh: MeshView,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorView>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    collectives: Option<Vec<CollectiveView>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<MemoryView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    amax: Option<Vec<GemmView>>,
}

#[derive(Debug, Serialize)]
struct MeshView {
    ranks: u64,
    /// The user's axes.
    axes: Vec<AxisView>,
    /// Ranks of which the shards are listed.
    listed: Vec<u64>,
    #[serde(skip)]
    text: String,
}

#[derive(Debug, Serialize)]
struct AxisView {
    name: String,
    size: u32,
    /// The axes it was refined into, major to minor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<AxisView>,
}

impl Args {
    /// Returns true if the user chose no part of the plan.
    fn is_whole(&self) -> bool {
        let chosen = self.collectives || self.memory || self.amax;
        !chosen && self.coord.is_none() && self.param.is_none()
    }
}

impl View {
    fn of(plan: &Plan, args: &Args) -> Outcome<View> {
        let listed = ranks(&plan.mesh, args.coord.as_deref())?;
        let wants_tensors = !(args.collectives || args.memory || args.amax) || args.param.is_some();
        let tensors = match wants_tensors {
            true => Some(tensors(plan, args.param.as_ref(), args.states, &listed)?),
            false => None,
        };
        Ok(View {
            plan: plan.name.clone(),
            model: plan.model,
            digest: Digest::of_plan(plan),
            mesh: MeshView::of(&plan.mesh, listed),
            tensors,
            collectives: args.collectives.then(|| collectives(plan)),
            memory: args.memory.then(|| MemoryView::of(plan)),
            amax: args.amax.then(|| amaxes(plan)),
        })
    }

    fn text(&self, plan: &Plan, args: &Args, style: Style) -> String {
        let mut res = format!("{} on {}\n", self.plan, self.mesh.text);
        if args.is_whole() {
            res.push_str(&digests_text(self.model, self.digest));
        }
        let chosen = if args.coord.is_some() { &self.mesh.listed[..] } else { &[] };
        let mut cuts = Cuts::default();
        for tensor in self.tensors.iter().flatten() {
            // Of all tensors, drawings would be too much to read.
            let drawn = args.param.is_some();
            let drawing = drawn.then(|| tensor.drawing(plan, &mut cuts, chosen, style));
            res.push('\n');
            res.push_str(&tensor.text(drawing.as_deref()));
        }
        let listed = self.mesh.listed.len() as u64;
        if args.coord.is_none() && listed < self.mesh.ranks && self.tensors.is_some() {
            let ranks = grouped(self.mesh.ranks);
            res.push_str(&format!(
                "\nRanks 0-{} of {ranks}; `--coord` chooses others.\n",
                listed - 1
            ));
        }
        if let Some(collectives) = &self.collectives {
            res.push_str(&collectives_text(collectives));
        }
        if let Some(memory) = &self.memory {
            res.push_str(&memory.text());
        }
        if let Some(amaxes) = &self.amax {
            res.push_str(&amaxes_text(amaxes));
        }
        res
    }
}

impl MeshView {
    fn of(mesh: &Mesh, listed: Vec<u64>) -> MeshView {
        let part = |name: &str| -> Vec<AxisView> {
            let parts = mesh.axes.iter().filter(|it| it.part_of.as_deref() == Some(name));
            parts
                .map(|it| AxisView { name: it.name.clone(), size: it.size, parts: Vec::new() })
                .collect()
        };
        let axes = mesh.user_axes().into_iter().map(|(name, size)| AxisView {
            name: name.to_string(),
            size,
            parts: part(name),
        });
        MeshView {
            ranks: mesh.n_ranks(),
            axes: axes.collect(),
            listed,
            text: [vec![mesh_text(mesh)], refinements(mesh)].concat().join("\n"),
        }
    }
}

/// The ranks at `coord`, or the first few.
fn ranks(mesh: &Mesh, coord: Option<&str>) -> Outcome<Vec<u64>> {
    let Some(coord) = coord else { return Ok((0..mesh.n_ranks().min(LISTED_RANKS)).collect()) };
    let user = Mesh::new(&mesh.user_axes());
    let wanted = parse_coord(&user, coord)?;
    // Refining is row-major, so a rank of the user's mesh is the same rank here. Free axes are
    // walked by their own group, not by looking at every rank of the mesh.
    let mut base: Vec<u32> = vec![0; user.axes.len()];
    let mut free = user.all();
    for &(axis, index) in &wanted {
        base[axis.0 as usize] = index;
        free = free.without(axis);
    }
    let ranks = user.group_of(free, &base).map(|it| user.rank_of(&it));
    Ok(ranks.take(CHOSEN_RANKS).collect())
}

fn parse_coord(user: &Mesh, text: &str) -> Outcome<Vec<(Axis, u32)>> {
    let mut res: Vec<(Axis, u32)> = Vec::new();
    for part in text.split(',') {
        let bad = || {
            Failure::new("PL0607", format!("`{part}` in `--coord` is no `axis=index`"))
                .help(format!("write the index of each axis that matters: `{}`", example(user)))
        };
        let (name, index) = part.split_once('=').ok_or_else(bad)?;
        let index: u32 = index.trim().parse().map_err(|_| bad())?;
        let name = name.trim();
        let axis = user.axis(name).ok_or_else(|| {
            Failure::new("PL0607", format!("`--coord {text}`: {}", user.unknown(name)))
        })?;
        let size = user.size(axis);
        if index >= size {
            return Err(Failure::new(
                "PL0607",
                format!(
                    "`--coord {text}`: axis `{name}` has size {size}, so its last index is {}",
                    size - 1
                ),
            ));
        }
        if res.iter().any(|it| it.0 == axis) {
            let message = format!("`--coord {text}` gives axis `{name}` more than once");
            return Err(Failure::new("PL0607", message).help("leave all but one index of it out"));
        }
        res.push((axis, index));
    }
    Ok(res)
}

fn example(mesh: &Mesh) -> String {
    axes_text(mesh.axes.iter().map(|it| (&it.name, it.size - 1)), ",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(coord: &str, expect: &[u64]) {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]).refine("tp", 2, "tp_kv", "tp_rep").unwrap();
        assert_eq!(ranks(&mesh, Some(coord)).unwrap(), expect);
    }

    #[test]
    fn coordinates_are_those_of_the_users_mesh() {
        check("dp=1,tp=3", &[7]);
        check("tp=2", &[2, 6]);
        check("dp=1", &[4, 5, 6, 7]);
    }
}
