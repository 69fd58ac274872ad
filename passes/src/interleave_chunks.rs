//! `interleave-chunks`: a loss that is taken in chunks has the logits of one chunk in memory at a time.
//!
//! The gradients of a chunk's logits are read as soon as they are there: what the backward pass makes of
//! them and of the forward pass alone moves in front of the next chunk. The chunk that comes first in the
//! backward pass, the last one, comes first in the forward pass too, so sums over chunks keep their order.
//!
//! ```text
//! forward:   %a.logits = matmul %a.x, %w             forward:   %b.logits = matmul %b.x, %w
//!            %b.logits = matmul %b.x, %w                        %b.dlogits = cross_entropy %b.logits
//!            %a.dlogits = cross_entropy %a.logits               %b.dx = matmul %b.dlogits, %w
//!            %b.dlogits = cross_entropy %b.logits               %a.logits = matmul %a.x, %w
//! backward:  %b.dx = matmul %b.dlogits, %w                      %a.dlogits = cross_entropy %a.logits
//!            %a.dx = matmul %a.dlogits, %w           backward:  %a.dx = matmul %a.dlogits, %w
//! ```
//!
//! A program with one loss, or with two of the same logits, stays as it is.

use cranelift_entity::SecondaryMap;
use ir::{Graph, Node, Op, Phase, Section, Value};

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct InterleaveChunks;

impl Pass<Graph> for InterleaveChunks {
    fn name(&self) -> &'static str {
        "interleave-chunks"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let losses: Vec<Node> = graph
            .order
            .iter()
            .copied()
            .filter(|&it| matches!(graph.nodes[it].op, Op::CeLoss(_) | Op::CrossEntropy(_)))
            .filter(|&it| graph.nodes[it].section == Section::Forward)
            .collect();
        let [first, others @ ..] = &losses[..] else { return Ok(()) };
        let mut all: Vec<Option<Value>> = losses.iter().map(|&it| logits(graph, it)).collect();
        all.sort();
        all.dedup();
        if others.is_empty() || all.len() < losses.len() || all.contains(&None) {
            return Ok(());
        }
        let of_losses = of_losses(graph);
        let mut walk =
            Walk { res: Vec::with_capacity(graph.order.len()), done: SecondaryMap::new() };
        walk.done.resize(graph.nodes.len());
        walk.take(graph, |it| graph.nodes[it].section == Section::Prepare);
        for &loss in others.iter().rev() {
            walk.take_with_operands(graph, loss);
            let mut moved = SecondaryMap::new();
            for &node in &graph.order {
                let ready = |it: &Value| graph.producer(*it).is_none_or(|it| walk.done[it]);
                let inputs = &graph.nodes[node].inputs;
                if of_losses[node] && !walk.done[node] && inputs.iter().all(ready) {
                    walk.push(node);
                    moved[node] = true;
                }
            }
            for node in moved.keys().filter(|&it| moved[it]) {
                graph.nodes[node].section = Section::Forward;
            }
        }
        walk.take_with_operands(graph, *first);
        walk.take(graph, |it| graph.nodes[it].section == Section::Forward);
        walk.take(graph, |_| true);
        graph.order = walk.res;
        Ok(())
    }
}

/// What a loss is of, behind the statistics that a collective may have completed.
fn logits(graph: &Graph, loss: Node) -> Option<Value> {
    let data = &graph.nodes[loss];
    if let Op::CrossEntropy(_) = data.op {
        return data.inputs.first().copied();
    }
    let mut value = data.inputs[1];
    loop {
        let maker = &graph.nodes[graph.producer(value)?];
        match (&maker.op, &maker.inputs[..]) {
            (Op::CeStats(_), &[logits, ..]) => return Some(logits),
            (Op::Collective(_), &[before]) => value = before,
            _ => return None,
        }
    }
}

/// A new order, as far as it is made.
struct Walk {
    res: Vec<Node>,
    done: SecondaryMap<Node, bool>,
}

impl Walk {
    fn push(&mut self, node: Node) {
        self.done[node] = true;
        self.res.push(node);
    }

    /// All of these that are still to come, in the order that they have.
    fn take(&mut self, graph: &Graph, wanted: impl Fn(Node) -> bool) {
        for &node in graph.order.iter().filter(|&&it| wanted(it)) {
            if !self.done[node] {
                self.push(node);
            }
        }
    }

    /// `node`, behind all that it needs.
    fn take_with_operands(&mut self, graph: &Graph, node: Node) {
        let mut needed: SecondaryMap<Node, bool> = SecondaryMap::new();
        let mut stack = vec![node];
        while let Some(node) = stack.pop() {
            if !self.done[node] && !std::mem::replace(&mut needed[node], true) {
                let makers = graph.nodes[node].inputs.iter().filter_map(|&it| graph.producer(it));
                stack.extend(makers);
            }
        }
        self.take(graph, |it| needed[it]);
    }
}

/// Nodes of the backward pass that read, directly or not, what a loss makes for it, and the constant with
/// which that starts.
fn of_losses(graph: &Graph) -> SecondaryMap<Node, bool> {
    let mut res = SecondaryMap::new();
    let mut values: SecondaryMap<Value, bool> = SecondaryMap::new();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        match (&data.op, &data.inputs[..], &data.results[..]) {
            (Op::CrossEntropy(_), _, &[_, _, dlogits]) => values[dlogits] = true,
            (Op::CeLossGrad(_), &[_, _, dloss], _) => {
                values[dloss] = true;
                if let Some(seed) = graph.producer(dloss) {
                    res[seed] = graph.nodes[seed].section == Section::Backward;
                }
            }
            _ => (),
        }
        if data.section == Section::Backward && data.inputs.iter().any(|&it| values[it]) {
            res[node] = true;
            data.results.iter().for_each(|&it| values[it] = true);
        }
    }
    res
}
