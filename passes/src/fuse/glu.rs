//! A `glu` that the backward pass computes again: its gradient reads the same operands, and gives it.
//!
//! ```text
//! %dy = matmul %dz, %w                     %dy = matmul %dz, %w
//! %y = glu %gate, %up                      %dgate, %dup, %y = @glu_grad+glu %dy, %gate, %up
//! %dw = matmul(transpose_a:true) %dz, %y   %dw = matmul(transpose_a:true) %dz, %y
//! %dgate, %dup = glu_grad %dy, %gate, %up
//! ```
//!
//! What needs `%y`, directly or not, moves behind the gradient; so the gradient must not need it.

use ir::ops::{Body, GluKind};
use ir::{Graph, Node, Op, Section, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Joined;

/// The order in which each `glu` of the backward pass that can be is made by its gradient.
pub(super) fn with_gradients(
    graph: &mut Graph,
    order: Vec<Node>,
    bodies: &mut FxHashSet<Body>,
) -> Vec<Node> {
    let mut glus: FxHashMap<(GluKind, Value, Value), Node> = FxHashMap::default();
    let mut res = Vec::with_capacity(order.len());
    for node in order {
        let data = &graph.nodes[node];
        match (&data.op, &data.inputs[..]) {
            (Op::Glu(it), &[gate, up]) if data.section == Section::Backward => {
                glus.insert((it.kind, gate, up), node);
            }
            (Op::GluGrad(it), &[_, gate, up]) => {
                if let Some(&glu) = glus.get(&(it.kind, gate, up))
                    && let Some(moved) = make_moved(graph, &mut res, [glu, node], bodies)
                {
                    res.push(node);
                    res.extend(moved);
                    continue;
                }
            }
            _ => (),
        }
        res.push(node);
    }
    res
}

/// Lets `grad`, which comes next, make what `glu` makes; takes out of the order before it what must
/// come behind it. `None`, and nothing is done, if that is not possible.
fn make_moved(
    graph: &mut Graph,
    before: &mut Vec<Node>,
    [glu, grad]: [Node; 2],
    bodies: &mut FxHashSet<Body>,
) -> Option<Vec<Node>> {
    let y = graph.nodes[glu].results[0];
    if !is_alike(graph, y, grad) {
        return None;
    }
    let at = before.iter().rposition(|&it| it == glu)?;
    let mut needs: FxHashSet<Value> = [y].into_iter().collect();
    let (moved, stays): (Vec<Node>, Vec<Node>) = before[at + 1..].iter().partition(|&&it| {
        let data = &graph.nodes[it];
        let moves = data.inputs.iter().any(|it| needs.contains(it));
        if moves {
            needs.extend(&data.results);
        }
        moves
    });
    if graph.nodes[grad].inputs.iter().any(|it| needs.contains(it)) {
        return None;
    }
    let joined = Joined::of(graph, grad)?.then(graph, glu)?;
    let op = joined.op(bodies)?;
    before.truncate(at);
    before.extend(stays);
    graph.set_op(grad, op, &joined.inputs, &joined.results);
    Some(moved)
}

/// Whether `y` has the type and the sharding of all that `grad` reads.
fn is_alike(graph: &Graph, y: Value, grad: Node) -> bool {
    let mut inputs = graph.nodes[grad].inputs.iter();
    inputs.all(|&it| graph.ty(it) == graph.ty(y) && graph.sharding(it) == graph.sharding(y))
}
