//! `localize`: from the program over global tensors to the program that one rank runs.
//!
//! Types stay global: what a rank holds follows from the sharding of each value. What changes is
//! attributes that mention sizes (`embedding_grad`'s vocabulary, a `fill`'s shape), and the local
//! program is type-checked as such.

use ir::ops::Types;
use ir::{Graph, Node, Op, Phase, Shape, TensorType, Value};
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct Localize;

impl Pass<Graph> for Localize {
    fn name(&self) -> &'static str {
        "localize"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Local)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let mut broken = Vec::new();
        for i in 0..graph.order.len() {
            let node = graph.order[i];
            if let Op::Collective(_) = graph.nodes[node].op {
                continue;
            }
            if let Some(op) = local_op(graph, node) {
                graph.nodes[node].op = op;
            }
            broken.extend(check(graph, node));
        }
        graph.phase = Phase::Local;
        if broken.is_empty() { Ok(()) } else { Err(PassError::Broke { pass: self.name(), broken }) }
    }
}

fn local_op(graph: &Graph, node: Node) -> Option<Op> {
    let data = &graph.nodes[node];
    let shapes: SmallVec<[Shape; 2]> =
        data.results.iter().map(|&it| local_type(graph, it).shape).collect();
    let shapes: SmallVec<[&[u64]; 2]> = shapes.iter().map(|it| it.as_slice()).collect();
    data.op.localize(&shapes)
}

/// The type of what one rank holds of `value`, at most.
fn local_type(graph: &Graph, value: Value) -> TensorType {
    let ty = graph.ty(value);
    let shape = graph.sharding(value).local_shape(&ty.shape, &graph.mesh);
    TensorType { dtype: ty.dtype, shape }
}

/// Whether the op, on local operands, makes local results of the sizes that shardings say.
fn check(graph: &Graph, node: Node) -> Option<String> {
    let data = &graph.nodes[node];
    let inputs: SmallVec<[TensorType; 4]> =
        data.inputs.iter().map(|&it| local_type(graph, it)).collect();
    let inputs: SmallVec<[&TensorType; 4]> = inputs.iter().collect();
    let expected: Types = data.results.iter().map(|&it| local_type(graph, it)).collect();
    let name = || &graph.values[data.results[0]].name;
    match data.op.infer(&inputs) {
        Ok(types) if types == expected => None,
        Ok(types) => Some(format!(
            "`{}` ({}) makes {} on one rank, where its sharding says {}",
            name(),
            data.op.to_text(),
            types.iter().map(|it| it.to_string()).collect::<Vec<_>>().join(", "),
            expected.iter().map(|it| it.to_string()).collect::<Vec<_>>().join(", "),
        )),
        Err(error) => Some(format!("`{}` ({}) on one rank: {error}", name(), data.op.to_text())),
    }
}
