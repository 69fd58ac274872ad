//! How programs are spoken of: in the axes of the user's mesh, and in short.

use ir::Digest;
use ir::meaning;
use ir::model::axes_text;
use ir::placement::Mesh;
use ir::plan::{Plan, PlanSection};

use crate::table::plural;

/// `dp=2 x tp=4 (8 ranks)`, in the user's axes.
pub fn mesh_text(mesh: &Mesh) -> String {
    format!("{} ({})", axes_text(mesh.user_axes(), " x "), plural(mesh.n_ranks(), "rank"))
}

/// A sentence for each axis that the compiler cut into parts.
pub fn refinements(mesh: &Mesh) -> Vec<String> {
    let mut res = Vec::new();
    for (name, size) in mesh.user_axes() {
        let parts = mesh.axes.iter().filter(|it| it.part_of.as_deref() == Some(name));
        let parts = axes_text(parts.map(|it| (&it.name, it.size)), " x ");
        if !parts.is_empty() {
            res.push(format!("{name}={size} is used as {parts}; ranks do not move"));
        }
    }
    res
}

/// `model.layers.3.mlp.act` -> `model.layers.*.mlp.act`.
pub fn fold(name: &str) -> String {
    let part =
        |it: &str| if it.bytes().all(|it| it.is_ascii_digit()) { "*" } else { it }.to_string();
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The number of the layer that a name is of, if it is of one: 3 for `model.layers.3.mlp.act`.
pub fn layer(name: &str) -> Option<u64> {
    meaning::layer(name).map(|it| it.1)
}

/// `0-125`, `0, 5-7`.
pub fn numbers(numbers: &[u64]) -> String {
    let text = |(a, b): (u64, u64)| match b - a {
        0 => a.to_string(),
        1 => format!("{a}, {b}"),
        _ => format!("{a}-{b}"),
    };
    meaning::runs(numbers).map(text).collect::<Vec<_>>().join(", ")
}

/// `` `matmul` making `h` ``.
pub fn describe(plan: &Plan, section: PlanSection, index: usize) -> String {
    let Some(instruction) = plan.section(section).get(index) else { return String::new() };
    let what = instruction.name();
    match instruction.writes().first() {
        Some(&buffer) => format!("`{what}` making `{}`", plan.buffers[buffer].name),
        None => format!("`{what}`"),
    }
}

/// A line for the digest of a plan's model, if it has one, and a line for the plan's own.
pub fn digests_text(model: Option<Digest>, plan: Digest) -> String {
    let model = model.map_or(String::new(), |it| format!("model  {it}\n"));
    format!("{model}plan   {plan}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_a_number_inside_a_name() {
        assert_eq!(layer("model.layers.3.mlp.act"), Some(3));
        assert_eq!(layer("model.norm.grad.2"), None);
        assert_eq!(numbers(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7, 8");
    }

    #[test]
    fn parts_of_an_axis_are_called_by_its_name() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]).refine("tp", 2, "tp_kv", "tp_rep").unwrap();
        let check = |text: &str, separator: &str, expect: &str| {
            assert_eq!(mesh.in_user_axes(text, separator), expect);
        };
        check("dp, tp_kv, tp_rep", ", ", "dp, tp");
        check("[tp_kv.tp_rep.dp, _]", ".", "[tp.dp, _]");
        check("[tp_kv.dp, _]", ".", "[tp_kv.dp, _]");
        assert_eq!(mesh_text(&mesh), "dp=2 x tp=4 (8 ranks)");
        assert_eq!(refinements(&mesh), ["tp=4 is used as tp_kv=2 x tp_rep=2; ranks do not move"]);
    }
}
