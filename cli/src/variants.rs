//! A model compiled in several ways, to compare: other meshes, other choices. In parallel.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ir::cost::Group;
use ir::model::{MeshSpec, Model};
use ir::placement::Mesh;
use ir::plan::Plan;

/// What is compiled.
#[derive(Debug, Clone)]
pub struct Variant {
    /// The model, with what was replaced in it.
    pub model: Model,
    /// On which mesh.
    pub mesh: MeshSpec,
    /// How.
    pub options: codegen::Options,
}

impl Variant {
    /// The plan, for its figures alone, or why there is none, in a line. `None` if a rank is sure to need more than
    /// `most` bytes.
    pub fn price(&self, most: u64) -> Result<Option<Plan>, String> {
        let graph = ir::model::elaborate(&self.model, &self.mesh).map_err(|it| it.to_string())?;
        codegen::price(graph, &self.options, most).map_err(|it| it.to_string())
    }
}

/// What `of` makes of each item, in their order, on as many threads as there are processors.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::with_capacity(items.len()));
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { break };
            let result = of(item);
            results.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|it| it.0);
    results.into_iter().map(|it| it.1).collect()
}

/// Meshes of so many ranks that a model can have, with the fewest axes first, and those that make no sense, with
/// why. Of meshes that differ only by axes of size 1 and by names of FSDP's axes there is one.
pub fn meshes(
    model: &Model,
    ranks: u32,
    ranks_per_node: u32,
) -> (Vec<MeshSpec>, Vec<(MeshSpec, String)>) {
    let (mut sensible, mut refused) = (Vec::new(), Vec::new());
    let mut seen: Vec<Vec<(Use, u32)>> = Vec::new();
    for (&n, names) in &model.meshes {
        for sizes in factors(ranks, n) {
            let axes = names.iter().map(String::as_str).zip(sizes.iter().copied());
            let uses = axes.clone().map(|(axis, size)| (Use::of(model, axis), size));
            let uses: Vec<(Use, u32)> = uses.filter(|it| it.1 > 1).collect();
            if seen.contains(&uses) {
                continue;
            }
            seen.push(uses);
            let axes: Vec<(&str, u32)> = axes.collect();
            let why = replicates(model, &axes)
                .or_else(|| tp_across_nodes(model, &Mesh::new(&axes), ranks_per_node));
            let mesh = MeshSpec::Sizes(sizes);
            match why {
                Some(why) => refused.push((mesh, why)),
                None => sensible.push(mesh),
            }
        }
    }
    (sensible, refused)
}

/// The reason against a mesh of these axes and sizes if its ranks do the same work.
fn replicates(model: &Model, axes: &[(&str, u32)]) -> Option<String> {
    let (name, size) =
        axes.iter().find(|it| it.1 > 1 && model.replicas.iter().any(|r| r == it.0))?;
    Some(format!("{size} ranks of `{name}` would do the same work, as `replicas` says"))
}

/// What is wrong with a mesh of these axes and sizes if its tensor parallelism leaves a node.
pub fn tp_across_nodes(model: &Model, mesh: &Mesh, ranks_per_node: u32) -> Option<String> {
    let (name, tp) = mesh.user_axes().into_iter().find(|it| Use::of(model, it.0) == Use::Tp)?;
    if tp > ranks_per_node {
        return Some(format!("{tp} tensor-parallel ranks are more than a node's {ranks_per_node}"));
    }
    let nodes = Group::of(mesh, mesh.axis_set(&[name]).ok()?, ranks_per_node).nodes;
    (nodes > 1).then(|| {
        format!(
            "{tp} tensor-parallel ranks are on {nodes} nodes of {ranks_per_node}; make `{name}` the \
             last axis, of a size that divides a node's"
        )
    })
}

/// Whether FSDP shards over an axis.
pub fn is_fsdp(model: &Model, axis: &str) -> bool {
    match &model.fsdp.axes {
        Some(axes) => axes.iter().any(|it| it == axis),
        None => matches!(axis, "dp" | "dp_shard"),
    }
}

/// What an axis of a mesh is for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Use {
    Tp,
    Fsdp,
    Other(String),
}

impl Use {
    fn of(model: &Model, axis: &str) -> Use {
        match axis {
            _ if axis == model.tp_mesh.as_deref().unwrap_or("tp") => Use::Tp,
            _ if is_fsdp(model, axis) => Use::Fsdp,
            _ => Use::Other(axis.to_string()),
        }
    }
}

/// All ways to write a number as a product of `n` factors, in order.
fn factors(of: u32, n: usize) -> Vec<Vec<u32>> {
    if n <= 1 {
        return if n == 1 { vec![vec![of]] } else { Vec::new() };
    }
    let divisors = (1..=of).filter(|it| of.is_multiple_of(*it));
    let with = |first: u32| {
        factors(of / first, n - 1).into_iter().map(move |rest| [&[first][..], &rest].concat())
    };
    divisors.flat_map(with).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ranks: u32, meshes: &str, expect: &str, refused: &str) {
        let model =
            format!("Model(name: \"m\", batch: Global(1), sequence: 8, {meshes} layers: [])");
        let model = ir::model::parse(&model).unwrap();
        let text =
            |it: &[MeshSpec]| it.iter().map(MeshSpec::to_string).collect::<Vec<_>>().join(" ");
        let (found, no) = super::meshes(&model, ranks, 8);
        assert_eq!(text(&found), expect);
        assert_eq!(text(&no.into_iter().map(|it| it.0).collect::<Vec<_>>()), refused);
    }

    #[test]
    fn meshes_are_listed_once() {
        check(1, "", "1", "");
        check(8, "", "8 1x8 2x4 4x2 2x1x4 2x2x2 2x4x1 4x1x2 4x2x1 8x1x1", "");
        check(16, "meshes: {2: [\"dp\", \"tp\"]},", "2x8 4x4 8x2 16x1", "1x16");
        check(7, "meshes: {1: [\"tp\"]},", "7", "");
        let spare = "meshes: {2: [\"dp\", \"spare\"]}, replicas: [\"spare\"],";
        check(4, spare, "4x1", "1x4 2x2");
    }

    #[test]
    fn results_keep_the_order_of_items() {
        let items: Vec<u64> = (0..100).collect();
        assert_eq!(
            in_parallel(&items, |it| it * it),
            items.iter().map(|it| it * it).collect::<Vec<_>>()
        );
        assert_eq!(in_parallel(&[] as &[u64], |it| *it), Vec::<u64>::new());
    }
}
