//! Which rank holds what of which tensor.

use std::collections::BTreeMap;

use ir::model::NamePattern;
use ir::placement::{AxisSet, Mesh, Placement, PlacementError, Runs, Sharding};
use ir::plan::{Buffer, Plan, Role};
use serde::Serialize;

use super::drawing::{Style, Subject, drawing};
use crate::grid::Cuts;
use crate::report::{Failure, Outcome};
use crate::table::{Align, Table, bytes, elided, wrapped};
use crate::words::numbers;

/// One tensor; its JSON form is part of `--format json`.
#[derive(Debug, Serialize)]
pub struct TensorView {
    #[serde(skip)]
    buffer: Buffer,
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
    /// How modules read it, if it is gathered for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    gathered: Option<GatheredView>,
}

/// A parameter as modules read it.
#[derive(Debug, Serialize)]
struct GatheredView {
    planc: String,
    local_shape: Vec<u64>,
    copies_over: Vec<String>,
    /// Ranks that hold the same, of those listed.
    replicas: Vec<Vec<u64>>,
}

/// Ranks that hold the same.
#[derive(Debug, Serialize)]
struct ShardView {
    ranks: Vec<u64>,
    /// Index ranges of each dimension, `[start, end]`; what is held is their product.
    dims: Vec<Vec<[u64; 2]>>,
}

/// Parameters whose name fits `pattern`, and states too if asked for.
pub fn tensors(
    plan: &Plan,
    pattern: Option<&NamePattern>,
    with_states: bool,
    ranks: &[u64],
) -> Outcome<Vec<TensorView>> {
    let params = plan.params.iter().map(|it| (it.buffer, it.aliases.as_slice()));
    let states = plan.buffers.iter().filter(|it| with_states && it.1.role == Role::State);
    let all = params.chain(states.map(|it| (it.0, [].as_slice())));
    let labels = plan.labels();
    let fits = |name: &str| pattern.is_none_or(|it| it.matches(name));
    let res: Vec<TensorView> = all
        .filter(|(buffer, aliases)| {
            fits(&plan.buffers[*buffer].name) || aliases.iter().any(|it| fits(it))
        })
        .map(|(buffer, aliases)| TensorView::of(plan, buffer, labels[buffer], aliases, ranks))
        .collect();
    match pattern {
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
    /// Who holds which box of it, drawn.
    pub fn drawing(&self, plan: &Plan, cuts: &mut Cuts, chosen: &[u64], style: Style) -> String {
        let data = &plan.buffers[self.buffer];
        let subject = Subject {
            sharding: &data.sharding,
            shape: &data.ty.shape,
            element: data.ty.dtype.bytes(),
        };
        drawing(&subject, &plan.mesh, cuts, chosen, style)
    }

    fn of(
        plan: &Plan,
        buffer: Buffer,
        label: Option<&Sharding>,
        aliases: &[String],
        ranks: &[u64],
    ) -> TensorView {
        let mesh = &plan.mesh;
        let data = &plan.buffers[buffer];
        let torch = label.unwrap_or(&data.sharding).to_torch(mesh);
        TensorView {
            buffer,
            name: data.name.clone(),
            aliases: aliases.to_vec(),
            role: data.role,
            dtype: data.ty.dtype.name(),
            shape: data.ty.shape.to_vec(),
            local_shape: plan.local_shape(buffer).to_vec(),
            local_bytes: plan.local_bytes(buffer),
            even: data.sharding.divides(&data.ty.shape, mesh),
            torch: torch.as_ref().ok().map(|it| it.iter().map(Placement::to_string).collect()),
            torch_short: torch
                .map(|it| it.iter().map(|it| format!("{it:#}")).collect::<Vec<_>>().join(", "))
                .map_err(|it| not_torch(&it)),
            planc: layout(&data.sharding, mesh),
            copies_over: names(mesh, data.sharding.replicated_axes(mesh)),
            shards: shards(&data.sharding, &data.ty.shape, mesh, ranks),
            gathered: GatheredView::of(plan, &data.name, ranks),
        }
    }

    /// A paragraph, with the drawing of who holds what if there is one.
    pub fn text(&self, drawing: Option<&str>) -> String {
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
                line("torch", &format!("[{}] or [{short}]", torch.join(", ")));
            }
            (_, Err(why)) | (None, Ok(why)) => line("torch", why),
        }
        line("planc", &format!("{}{}", self.planc, copies(&self.copies_over)));
        let uneven = if self.even { "" } else { " on the fullest rank" };
        line("local", &format!("{:?}, {}{uneven}", self.local_shape, bytes(self.local_bytes)));
        let mut table = Table::new(2, &[Align::Left, Align::Left]);
        for shard in &self.shards {
            let label = if shard.ranks.len() == 1 { "rank" } else { "ranks" };
            table.row([format!("{label} {}", ranges(&shard.ranks)), shard.text()]);
        }
        res.push_str(&table.text());
        res.push_str(drawing.unwrap_or_default());
        if let Some(gathered) = &self.gathered {
            for (i, part) in wrapped(&gathered.text(), 64).iter().enumerate() {
                let label = if i == 0 { "read as" } else { "" };
                res.push_str(&format!("  {label:<8}{part}\n"));
            }
        }
        res
    }
}

impl GatheredView {
    fn of(plan: &Plan, param: &str, ranks: &[u64]) -> Option<GatheredView> {
        let buffer = plan.buffer(&format!("{param}.full"))?;
        let (data, mesh) = (&plan.buffers[buffer], &plan.mesh);
        let shards = shards(&data.sharding, &data.ty.shape, mesh, ranks);
        Some(GatheredView {
            planc: layout(&data.sharding, mesh),
            local_shape: plan.local_shape(buffer).to_vec(),
            copies_over: names(mesh, data.sharding.replicated_axes(mesh)),
            replicas: shards.into_iter().map(|it| it.ranks).collect(),
        })
    }

    fn text(&self) -> String {
        let groups: Vec<String> = self.replicas.iter().map(|it| ranges(it)).collect();
        let same = match self.replicas.iter().all(|it| it.len() == 1) {
            true => String::new(),
            false => format!("; the same on ranks {}", groups.join(" | ")),
        };
        format!("{} {:?}{}{same}", self.planc, self.local_shape, copies(&self.copies_over))
    }
}

/// In the user's axes, where all parts of one are together.
fn layout(sharding: &Sharding, mesh: &Mesh) -> String {
    mesh.in_user_axes(&sharding.display(mesh).to_string(), ".")
}

fn names(mesh: &Mesh, axes: AxisSet) -> Vec<String> {
    match mesh.in_user_axes(&mesh.names(axes), ", ").as_str() {
        "" => Vec::new(),
        text => text.split(", ").map(str::to_string).collect(),
    }
}

fn copies(axes: &[String]) -> String {
    match axes {
        [] => String::new(),
        axes => format!(", copies over {}", axes.join(", ")),
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
            format!(
                "none: it is cut over `{part}`, a part of `{axis}`, for which PyTorch has no word"
            )
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
pub fn ranges(ranks: &[u64]) -> String {
    elided(&numbers(ranks), 30)
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
        check_shards(
            "[tp]",
            &[3],
            &[("0, 4", "[0,1)"), ("1, 5", "[1,2)"), ("2, 6", "[2,3)"), ("3, 7", "nothing")],
        );
    }
}
