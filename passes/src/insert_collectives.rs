//! `insert-collectives`: replaces each `reshard` by the cheapest sequence of collectives.
//!
//! ```text
//! %y = reshard %y.partial                  [dp, _, _] sum(tp) -> [dp, tp, _]
//! %y = reduce_scatter(tp) %y.partial
//! ```

use std::collections::hash_map::Entry;

use cranelift_entity::SecondaryMap;
use ir::graph::{Def, NewNode};
use ir::ops::{Collective, CollectiveKind};
use ir::placement::{self, CommCost, Sharding, Step};
use ir::{Builder, Graph, Node, Op, Phase, TensorType, Value};
use rustc_hash::FxHashMap;

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
        // Layers are alike, and each way is searched for once.
        let mut ways = Ways::default();
        let mut builder = Builder::new(graph);
        for node in order {
            for input in &mut builder.graph.nodes[node].inputs {
                *input = same[*input].unwrap_or(*input);
            }
            match builder.graph.nodes[node].op {
                Op::Reshard(_) => {
                    if let Some((result, source)) = lower(&mut builder, &mut ways, node, &batched)?
                    {
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

/// The steps from one sharding of a type to another, by whether they are part of a batch.
type Ways = FxHashMap<(Sharding, Sharding, TensorType, bool), Vec<Step>>;

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
    ways: &mut Ways,
    node: Node,
    batched: &SecondaryMap<Value, bool>,
) -> Result<Option<(Value, Value)>, PassError> {
    let graph = &*builder.graph;
    let (source, result) = (graph.nodes[node].inputs[0], graph.nodes[node].results[0]);
    let (section, scope) = (graph.nodes[node].section, graph.nodes[node].scope);
    let ty = graph.ty(result).clone();
    let (from, to) = (graph.sharding(source).clone(), graph.sharding(result).clone());
    let steps = match ways.entry((from, to, ty.clone(), batched[result])) {
        Entry::Occupied(it) => it.into_mut(),
        Entry::Vacant(it) => {
            let (from, to, ty, batched) = it.key();
            let mut cost = CommCost::default();
            if *batched {
                cost.latency = BATCHED_LATENCY;
            }
            let bytes = ty.dtype.bytes();
            let steps = placement::reshard(from, to, &ty.shape, bytes, &graph.mesh, &cost)
                .map_err(|it| PassError::Failed {
                    code: "PL0401",
                    message: format!("`{}`: {it}", graph.values[result].name),
                    subject: Some(graph.values[result].name.clone()),
                })?;
            it.insert(steps)
        }
    };
    let Some((last, others)) = steps.split_last() else {
        return Ok(Some((result, source)));
    };
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
