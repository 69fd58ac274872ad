//! `insert-collectives`: replaces each `reshard` by the cheapest sequence of collectives.
//!
//! ```text
//! %y = reshard %y.partial                  [dp, _, _] sum(tp) -> [dp, tp, _]
//! %y = reduce_scatter(tp) %y.partial
//! ```

use cranelift_entity::SecondaryMap;
use ir::graph::{Def, NewNode};
use ir::ops::{Collective, CollectiveKind};
use ir::placement::{self, CommCost, Step};
use ir::{Builder, Graph, Node, Op, Phase, Value};

use crate::{Pass, PassError};

/// Seconds of latency that a tensor adds to a call that is made anyway: enough to prefer one step to
/// two of the same bytes.
const BATCHED_LATENCY: f64 = 1e-9;

/// See the [module docs](self).
pub struct InsertCollectives;

impl Pass<Graph> for InsertCollectives {
    fn name(&self) -> &'static str {
        "insert-collectives"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Sharded, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let order = std::mem::take(&mut graph.order);
        let mut same: SecondaryMap<Value, Option<Value>> = SecondaryMap::new();
        let batched = batched(graph);
        let mut builder = Builder::new(graph);
        for node in order {
            for input in &mut builder.graph.nodes[node].inputs {
                *input = same[*input].unwrap_or(*input);
            }
            match builder.graph.nodes[node].op {
                Op::Reshard(_) => {
                    if let Some((result, source)) = lower(&mut builder, node, &batched)? {
                        same[result] = Some(source);
                    }
                }
                _ => builder.graph.order.push(node),
            }
        }
        graph.replace(&same);
        graph.phase = Phase::Explicit;
        Ok(())
    }
}

/// Weights and their gradients, which move in calls of a whole unit.
fn batched(graph: &Graph) -> SecondaryMap<Value, bool> {
    let mut weights: SecondaryMap<Value, bool> = SecondaryMap::new();
    for param in &graph.params {
        weights[param.compute] = true;
        weights[param.full] = true;
    }
    let mut res = weights.clone();
    for (value, data) in graph.values.iter() {
        res[value] |= data.pinned && data.like.is_some_and(|it| weights[it]);
    }
    for grad in graph.params.iter().filter_map(|it| it.grad) {
        res[grad] = true;
    }
    res
}

/// Emits the steps of a `reshard`; where there are none, says which value its result is.
fn lower(
    builder: &mut Builder<'_>,
    node: Node,
    batched: &SecondaryMap<Value, bool>,
) -> Result<Option<(Value, Value)>, PassError> {
    let graph = &*builder.graph;
    let (source, result) = (graph.nodes[node].inputs[0], graph.nodes[node].results[0]);
    let (section, scope) = (graph.nodes[node].section, graph.nodes[node].scope);
    let ty = graph.ty(result).clone();
    let (from, to) = (graph.sharding(source), graph.sharding(result));
    let mut cost = CommCost::default();
    if batched[result] {
        cost.latency = BATCHED_LATENCY;
    }
    let steps = placement::reshard(from, to, &ty.shape, ty.dtype.bytes(), &graph.mesh, &cost)
        .map_err(|it| PassError::Failed {
            code: "PL0401",
            message: format!("`{}`: {it}", graph.values[result].name),
            subject: Some(graph.values[result].name.clone()),
        })?;
    let Some((last, others)) = steps.split_last() else { return Ok(Some((result, source))) };
    let name = graph.values[result].name.clone();
    let mut value = source;
    for step in others {
        let name = builder.unique(&format!("{name}.{}", CollectiveKind::from(step.kind).name()));
        let results = [(name, ty.clone())];
        let op = collective(step);
        let new = builder.graph.add_node(NewNode {
            op,
            inputs: &[value],
            results: &results,
            section,
            scope,
        });
        value = builder.graph.nodes[new].results[0];
        builder.graph.values[value].sharding = Some(step.to.clone());
        builder.graph.order.push(new);
    }
    let op = collective(last);
    let new =
        builder.graph.add_node(NewNode { op, inputs: &[value], results: &[], section, scope });
    builder.graph.nodes[new].results.push(result);
    builder.graph.values[result].def = Def::Result { node: new, index: 0 };
    builder.graph.order.push(new);
    Ok(None)
}

fn collective(step: &Step) -> Op {
    Collective { kind: step.kind.into(), axes: step.kind.axes() }.into()
}
