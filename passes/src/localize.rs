//! `localize`: from the program over global tensors to the program that one rank runs.
//!
//! Types stay global: what a rank holds follows from the sharding of each value. What changes is
//! attributes that mention sizes (`embedding_grad`'s vocabulary, a `fill`'s shape). The verifier type-checks the
//! local program as such.

use ir::{Graph, Node, Op, Phase, Shape};
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
        for i in 0..graph.order.len() {
            let node = graph.order[i];
            if let Some(op) = local_op(graph, node) {
                graph.nodes[node].op = op;
            }
        }
        graph.phase = Phase::Local;
        Ok(())
    }
}

fn local_op(graph: &Graph, node: Node) -> Option<Op> {
    let data = &graph.nodes[node];
    let local_shape = |it| graph.sharding(it).local_shape(&graph.ty(it).shape, &graph.mesh);
    let shapes: SmallVec<[Shape; 2]> = data.results.iter().map(|&it| local_shape(it)).collect();
    let shapes: SmallVec<[&[u64]; 2]> = shapes.iter().map(|it| it.as_slice()).collect();
    data.op.localize(&shapes)
}
