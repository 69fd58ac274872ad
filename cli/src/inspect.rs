//! `planc inspect`: which rank holds what, what is sent, what is in memory.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ir::placement::{Mesh, Placement, PlacementError, Runs, Sharding};
use ir::plan::{Buffer, Plan, Role};
use serde::Serialize;

use crate::input::{self, ModelArgs};
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{Align, Table, bytes, elided, grouped, plural, wrapped};

/// Ranks listed when none are chosen.
const LISTED_RANKS: u64 = 16;

/// Shows a plan: placements, collectives, memory.
///
/// Placements are those of the parameters, in PyTorch's notation (one entry for each axis of the mesh)
/// and in planc's (one entry for each dimension of the tensor, axes major to minor), with the
/// index ranges that each rank holds. Ranks that hold the same are on one line.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A plan, or a model with `--mesh`.
    #[arg(value_name = "MODEL.plan|MODEL.ron")]
    input: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Only ranks at these coordinates of the mesh, as in `dp=1,tp=3`; axes left out are free.
    #[arg(long, value_name = "AXIS=INDEX,..")]
    coord: Option<String>,
    /// Only tensors whose name fits; `*` stands for any text.
    #[arg(long, value_name = "GLOB")]
    param: Option<String>,
    /// Optimizer states and accumulators too.
    #[arg(long)]
    states: bool,
    /// Every collective of a step instead of placements.
    #[arg(long)]
    collectives: bool,
    /// What is in memory at its peak instead of placements.
    #[arg(long)]
    memory: bool,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let plan = input::plan(&args.input, &args.model)?;
    let view = View::of(&plan, args)?;
    match ui.format {
        Format::Json => print_json(&view),
        Format::Text => {
            print(&view.text());
            Ok(())
        }
    }
}

/// All that was asked for; its JSON form is what `--format json` prints.
#[derive(Debug, Serialize)]
struct View {
    plan: String,
    mesh: MeshView,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorView>>,
}

#[derive(Debug, Serialize)]
struct MeshView {
    ranks: u64,
    /// The user's axes.
    axes: Vec<AxisView>,
    /// Ranks of which the shards are listed.
    listed: Vec<u64>,
    #[serde(skip)]
    refined: Vec<String>,
}

#[derive(Debug, Serialize)]
struct AxisView {
    name: String,
    size: u32,
    /// The axes it was refined into, major to minor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<AxisView>,
}

#[derive(Debug, Serialize)]
struct TensorView {
    name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    role: Role,
    dtype: &'static str,
    shape: Vec<u64>,
    /// The largest of all ranks.
    local_shape: Vec<u64>,
    local_bytes: u64,
    even: bool,
    /// PyTorch's notation, one entry for each axis of the user's mesh.
    torch: Option<Vec<String>>,
    #[serde(skip)]
    torch_short: Result<String, String>,
    planc: String,
    /// Axes along which every rank holds the same.
    copies_over: Vec<String>,
    shards: Vec<ShardView>,
}

/// Ranks that hold the same.
#[derive(Debug, Serialize)]
struct ShardView {
    ranks: Vec<u64>,
    /// Index ranges of each dimension, `[start, end]`; what is held is their product.
    dims: Vec<Vec<[u64; 2]>>,
}

impl View {
    fn of(plan: &Plan, args: &Args) -> Outcome<View> {
        let listed = ranks(&plan.mesh, args.coord.as_deref())?;
        let tensors = tensors(plan, args, &listed)?;
        Ok(View {
            plan: plan.name.clone(),
            mesh: MeshView::of(&plan.mesh, listed),
            tensors: Some(tensors),
        })
    }

    fn text(&self) -> String {
        let mut res = format!("{} on {}\n", self.plan, self.mesh.text());
        for tensor in self.tensors.iter().flatten() {
            res.push('\n');
            res.push_str(&tensor.text());
        }
        if (self.mesh.listed.len() as u64) < self.mesh.ranks && self.tensors.is_some() {
            res.push_str(&format!(
                "\nRanks listed: {} of {}; `--coord` chooses others.\n",
                self.mesh.listed.len(),
                grouped(self.mesh.ranks)
            ));
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
            refined: refinements(mesh),
        }
    }

    fn text(&self) -> String {
        let axes: Vec<String> =
            self.axes.iter().map(|it| format!("{}={}", it.name, it.size)).collect();
        let mut res = format!("{} ({})", axes.join(" x "), plural(self.ranks, "rank"));
        for it in &self.refined {
            res.push_str(&format!("\n{it}"));
        }
        res
    }
}

/// `dp=2 x tp=4 (8 ranks)`, in the user's axes.
pub fn mesh_text(mesh: &Mesh) -> String {
    let axes: Vec<String> =
        mesh.user_axes().iter().map(|(name, size)| format!("{name}={size}")).collect();
    format!("{} ({})", axes.join(" x "), plural(mesh.n_ranks(), "rank"))
}

/// A sentence for each axis that the compiler cut into parts.
fn refinements(mesh: &Mesh) -> Vec<String> {
    let mut res = Vec::new();
    for (name, size) in mesh.user_axes() {
        let parts: Vec<String> = mesh
            .axes
            .iter()
            .filter(|it| it.part_of.as_deref() == Some(name))
            .map(|it| format!("{}={}", it.name, it.size))
            .collect();
        if !parts.is_empty() {
            res.push(format!("{name}={size} is used as {}; ranks do not move", parts.join(" x ")));
        }
    }
    res
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
    Ok(ranks.take(64.max(LISTED_RANKS as usize)).collect())
}

fn parse_coord(user: &Mesh, text: &str) -> Outcome<Vec<(ir::placement::Axis, u32)>> {
    let mut res = Vec::new();
    for part in text.split(',') {
        let bad = || {
            Failure::new("PL0607", format!("`{part}` in `--coord` is no `axis=index`"))
                .help(format!("write the index of each axis that matters: `{}`", example(user)))
        };
        let (name, index) = part.split_once('=').ok_or_else(bad)?;
        let index: u32 = index.trim().parse().map_err(|_| bad())?;
        let name = name.trim();
        let axis = user.axis(name).ok_or_else(|| {
            let error: PlacementError = user.unknown(name);
            Failure::new("PL0607", format!("`--coord {text}`: {error}"))
        })?;
        let size = user.size(axis);
        if index >= size {
            return Err(Failure::new(
                "PL0607",
                format!("`--coord {text}`: axis `{name}` has size {size}, so its last index is {}", size - 1),
            ));
        }
        res.push((axis, index));
    }
    Ok(res)
}

fn example(mesh: &Mesh) -> String {
    let parts: Vec<String> =
        mesh.axes.iter().map(|it| format!("{}={}", it.name, it.size - 1)).collect();
    parts.join(",")
}

fn tensors(plan: &Plan, args: &Args, ranks: &[u64]) -> Outcome<Vec<TensorView>> {
    let params = plan.params.iter().map(|it| (it.buffer, it.aliases.as_slice()));
    let states = plan.buffers.iter().filter(|it| args.states && it.1.role == Role::State);
    let all = params.chain(states.map(|it| (it.0, [].as_slice())));
    let fits = |name: &str| args.param.as_ref().is_none_or(|it| glob(it, name));
    let res: Vec<TensorView> = all
        .filter(|(buffer, aliases)| {
            fits(&plan.buffers[*buffer].name) || aliases.iter().any(|it| fits(it))
        })
        .map(|(buffer, aliases)| TensorView::of(plan, buffer, aliases, ranks))
        .collect();
    match &args.param {
        Some(pattern) if res.is_empty() => {
            let message = format!("no tensor of `{}` has a name like `{pattern}`", plan.name);
            Err(Failure::new("PL0608", message).help(
                "`*` stands for any text, as in `*.q_proj.weight`; without `--param` all are listed",
            ))
        }
        _ => Ok(res),
    }
}

impl TensorView {
    fn of(plan: &Plan, buffer: Buffer, aliases: &[String], ranks: &[u64]) -> TensorView {
        let mesh = &plan.mesh;
        let data = &plan.buffers[buffer];
        let torch = data.sharding.to_torch(mesh);
        let names = |it: &Placement| it.to_string();
        TensorView {
            name: data.name.clone(),
            aliases: aliases.to_vec(),
            role: data.role,
            dtype: data.ty.dtype.name(),
            shape: data.ty.shape.to_vec(),
            local_shape: plan.local_shape(buffer).to_vec(),
            local_bytes: plan.local_bytes(buffer),
            even: data.sharding.divides(&data.ty.shape, mesh),
            torch: torch.as_ref().ok().map(|it| it.iter().map(names).collect()),
            torch_short: torch
                .map(|it| it.iter().map(Placement::short).collect::<Vec<_>>().join(", "))
                .map_err(|it| not_torch(&it)),
            planc: data.sharding.display(mesh).to_string(),
            copies_over: data
                .sharding
                .replicated_axes(mesh)
                .iter()
                .map(|it| mesh.name(it).to_string())
                .collect(),
            shards: shards(&data.sharding, &data.ty.shape, mesh, ranks),
        }
    }

    fn text(&self) -> String {
        let mut res = format!("{}  {}{:?}\n", self.name, self.dtype, self.shape);
        let mut line = |label: &str, text: &str| {
            for (i, part) in wrapped(text, 68).iter().enumerate() {
                let label = if i == 0 { label } else { "" };
                res.push_str(&format!("  {label:<8}{part}\n"));
            }
        };
        if !self.aliases.is_empty() {
            line("also", &self.aliases.join(", "));
        }
        match (&self.torch, &self.torch_short) {
            (Some(torch), Ok(short)) => {
                line("torch", &format!("[{}]  [{short}]", torch.join(", ")));
            }
            (_, Err(why)) | (None, Ok(why)) => line("torch", why),
        }
        let copies = match self.copies_over.as_slice() {
            [] => String::new(),
            axes => format!(", copies over {}", axes.join(", ")),
        };
        line("planc", &format!("{}{copies}", self.planc));
        let uneven = if self.even { "" } else { " on the fullest rank" };
        line("local", &format!("{:?}, {}{uneven}", self.local_shape, bytes(self.local_bytes)));
        let mut table = Table::new(2, &[Align::Left, Align::Left]);
        for shard in &self.shards {
            let label = if shard.ranks.len() == 1 { "rank" } else { "ranks" };
            table.row([format!("{label} {}", ranges(&shard.ranks)), shard.text()]);
        }
        res.push_str(&table.text());
        res
    }
}

impl ShardView {
    fn text(&self) -> String {
        if self.dims.iter().any(Vec::is_empty) {
            return "nothing".to_string();
        }
        let runs = |runs: &Vec<[u64; 2]>| -> String {
            let runs: Vec<String> = runs.iter().map(|[a, b]| format!("[{a},{b})")).collect();
            runs.join("+")
        };
        match self.dims.as_slice() {
            [] => "the number".to_string(),
            dims => dims.iter().map(runs).collect::<Vec<String>>().join(" x "),
        }
    }
}

fn not_torch(error: &PlacementError) -> String {
    match error {
        PlacementError::PartOfAxis { part, axis, .. } => {
            format!("none: it is cut over `{part}`, a part of `{axis}`, for which PyTorch has no word")
        }
        other => format!("none: {other}"),
    }
}

/// What each of `ranks` holds, those that hold the same together, in the order of the first rank.
fn shards(sharding: &Sharding, shape: &[u64], mesh: &Mesh, ranks: &[u64]) -> Vec<ShardView> {
    let mut by_content: BTreeMap<Vec<Runs>, Vec<u64>> = BTreeMap::new();
    for &rank in ranks {
        let coord = mesh.coord_of(rank);
        let dims = sharding.dims.iter().zip(shape);
        let held = dims.map(|(dim, &size)| dim.runs(size, mesh, &coord)).collect();
        by_content.entry(held).or_default().push(rank);
    }
    let ends = |runs: &Runs| runs.iter().map(|&(start, len)| [start, start + len]).collect();
    let mut res: Vec<ShardView> = by_content
        .into_iter()
        .map(|(dims, ranks)| ShardView { ranks, dims: dims.iter().map(ends).collect() })
        .collect();
    res.sort_by_key(|it| it.ranks[0]);
    res
}

/// `0-3, 8`.
fn ranges(ranks: &[u64]) -> String {
    let mut res: Vec<(u64, u64)> = Vec::new();
    for &rank in ranks {
        match res.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => res.push((rank, rank)),
        }
    }
    let text = |&(a, b): &(u64, u64)| match b - a {
        0 => a.to_string(),
        1 => format!("{a}, {b}"),
        _ => format!("{a}-{b}"),
    };
    let res: Vec<String> = res.iter().map(text).collect();
    elided(&res.join(", "), 30)
}

/// Whether all of `text` fits `pattern`, in which `*` stands for any text.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text
            .strip_prefix(head)
            .is_some_and(|rest| {
                (0..=rest.len()).filter(|&it| rest.is_char_boundary(it)).any(|it| glob(tail, &rest[it..]))
            }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        Mesh::new(&[("dp", 2), ("tp", 4)]).refine("tp", 2, "tp_kv", "tp_rep").unwrap()
    }

    #[track_caller]
    fn check_shards(sharding: &str, shape: &[u64], expect: &[(&str, &str)]) {
        let sharding = Sharding::parse(sharding, &mesh()).unwrap();
        let found = shards(&sharding, shape, &mesh(), &(0..8).collect::<Vec<u64>>());
        let found: Vec<(String, String)> =
            found.iter().map(|it| (ranges(&it.ranks), it.text())).collect();
        let expect: Vec<(String, String)> =
            expect.iter().map(|it| (it.0.to_string(), it.1.to_string())).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn replicated_kv_heads_share_a_line() {
        check_shards(
            "[tp_kv.dp, _]",
            &[32, 64],
            &[
                ("0, 1", "[0,8) x [0,64)"),
                ("2, 3", "[16,24) x [0,64)"),
                ("4, 5", "[8,16) x [0,64)"),
                ("6, 7", "[24,32) x [0,64)"),
            ],
        );
    }

    #[test]
    fn strided_shards_have_several_ranges() {
        check_shards("[x2.dp]", &[6], &[("0-3", "[0,2)+[3,5)"), ("4-7", "[2,3)+[5,6)")]);
    }

    #[test]
    fn empty_shards_are_shown() {
        check_shards("[tp]", &[3], &[
            ("0, 4", "[0,1)"),
            ("1, 5", "[1,2)"),
            ("2, 6", "[2,3)"),
            ("3, 7", "nothing"),
        ]);
    }

    #[track_caller]
    fn check_coord(coord: &str, expect: &[u64]) {
        assert_eq!(ranks(&mesh(), Some(coord)).unwrap(), expect);
    }

    #[test]
    fn coordinates_are_those_of_the_users_mesh() {
        check_coord("dp=1,tp=3", &[7]);
        check_coord("tp=2", &[2, 6]);
        check_coord("dp=1", &[4, 5, 6, 7]);
    }
}
