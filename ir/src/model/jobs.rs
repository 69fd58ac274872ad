//! Every axis of a mesh has a job: it cuts data, weights or activations. Ranks along an axis that cuts nothing
//! would all compute the same, so such an axis is an error, unless the model lists it in `replicas`.
//!
//! The check reads the shardings that elaboration pins. Propagation starts from them alone, so it never uses an
//! axis that none of them has.

use super::error::{At, ModelError, Problem};
use super::layout::Layout;
use crate::Graph;
use crate::placement::AxisSet;

/// Checks the axes of the elaborated `graph`.
pub(super) fn check(graph: &Graph, layout: &Layout) -> Result<(), ModelError> {
    let mesh = &graph.mesh;
    let pinned = graph.values.values().filter_map(|it| it.sharding.as_ref());
    let used = pinned
        .fold(AxisSet::EMPTY, |used, it| used.union(it.sharded_axes()).union(it.partial_axes()));
    for (axis, size) in mesh.user_axes() {
        let replicates = layout.replicas.iter().any(|it| it == axis);
        let has_job = mesh.axes_named(axis).iter().any(|it| used.contains(*it));
        let axis = axis.to_string();
        match (replicates, has_job) {
            (true, true) => {
                let (first, second) = ("an axis of replicas", "one that cuts tensors");
                let at = At::Path("replicas".to_string());
                return Err(Problem::AxisTwice { axis, first, second }.at(at));
            }
            (false, false) if size > 1 => {
                return Err(Problem::IdleAxis { axis, size }.at(At::Mesh));
            }
            _ => {}
        }
    }
    Ok(())
}

/// A hint for an axis that no mesh of the model has: the axis of the model that has its job, and fields that together
/// give the job to an axis of this name.
pub(super) fn hint_unknown(axis: &str, known: &[String]) -> Option<String> {
    let (usual, fields) = match axis {
        "data" | "fsdp" => (
            &["dp", "dp_shard"][..],
            format!(
                "meshes: {{1: [\"{axis}\"], 2: [\"{axis}\", \"tp\"]}}, data_parallel: [\"{axis}\"], fsdp: \
                 (axes: [\"{axis}\"]), tp_mesh: \"tp\""
            ),
        ),
        "tensor" | "model" => (
            &["tp"][..],
            format!("meshes: {{1: [\"dp\"], 2: [\"dp\", \"{axis}\"]}}, tp_mesh: \"{axis}\""),
        ),
        _ => return hint(axis),
    };
    let usual: Vec<String> = usual
        .iter()
        .filter(|it| known.iter().any(|other| other == *it))
        .map(|it| format!("`{it}`"))
        .collect();
    let call = match usual.as_slice() {
        [] => String::new(),
        usual => format!("call the axis {}, or ", usual.join(" or ")),
    };
    Some(format!("{call}write all of `{fields}`"))
}

/// A hint on how planc does the job that an axis of this name has in other systems.
pub(super) fn hint(axis: &str) -> Option<String> {
    let data = |fields: &str| {
        format!("call the axis `dp` (or `dp_replicate` and `dp_shard`), or write `{fields}`")
    };
    Some(match axis {
        "data" => data("data_parallel: [\"data\"]"),
        "fsdp" => data("data_parallel: [\"fsdp\"], fsdp: (axes: [\"fsdp\"])"),
        "tensor" | "model" => {
            format!("call the axis `tp`, or write `tp_mesh: \"{axis}\"`")
        }
        "sequence" => {
            "planc cuts sequences over the tensor-parallel axis, which is `tp` or `tp_mesh`, \
                       with `sequence_parallel: true`"
                .to_string()
        }
        "context" | "cp" => "planc has no context parallelism; `sequence_parallel: true` cuts the \
                             sequences of activations between layers over the tensor-parallel axis"
            .to_string(),
        "pipeline" | "pp" => "planc has no pipeline parallelism".to_string(),
        "expert" | "ep" => "planc has no expert parallelism".to_string(),
        _ => return None,
    })
}
