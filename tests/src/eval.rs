//! Runs graphs and ops on global tensors, with the references of the ops.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{Def, Graph};
use ir::ops::{Add, GradCx, GradError, Op, Real, SampleInput, Tensor};
use ir::placement::Mesh;
use ir::{Builder, Section, TensorType, Value};
use smallvec::SmallVec;

/// The tensors of some values of a graph.
pub type Env<T> = BTreeMap<Value, Tensor<T>>;

/// A graph on a mesh of one rank.
pub fn empty_graph() -> Graph {
    Graph::new("test", Mesh::new(&[]))
}

/// Random content of an operand; other numbers for other seeds.
pub fn random<T: Real>(input: &SampleInput, seed: u64) -> Tensor<T> {
    input.tensor(seed)
}

/// A tensor of these elements.
pub fn tensor(shape: &[usize], data: &[f64]) -> Tensor<f64> {
    assert_eq!(shape.iter().product::<usize>(), data.len(), "elements for {shape:?}");
    Tensor { shape: SmallVec::from_slice(shape), data: data.to_vec() }
}

/// As [`ir::ops::apply`], of an op that takes these operands.
pub fn apply<T: Real>(op: &Op, inputs: &[Tensor<T>], types: &[&TensorType]) -> Vec<Tensor<T>> {
    ir::ops::apply(op, inputs, types).unwrap_or_else(|it| panic!("{}: {it}", op.to_text()))
}

/// Adds to `env`, which has the graph's leaves, what its nodes make of them.
pub fn eval<T: Real>(graph: &Graph, mut env: Env<T>) -> Env<T> {
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let inputs: Vec<Tensor<T>> = data.inputs.iter().map(|it| env[it].clone()).collect();
        let types: Vec<&TensorType> = data.inputs.iter().map(|&it| graph.ty(it)).collect();
        env.extend(data.results.iter().copied().zip(apply(&data.op, &inputs, &types)));
    }
    env
}

/// Appends the backward pass of the nodes so far. `seeds` are results with their gradients; what
/// comes back are the gradients of the values `of`.
pub fn backward(
    graph: &mut Graph,
    seeds: &[(Value, Value)],
    of: &[Value],
) -> Result<Vec<Option<Value>>, GradError> {
    let mut parts: BTreeMap<Value, Vec<Value>> = BTreeMap::new();
    for &(value, grad) in seeds {
        parts.entry(value).or_default().push(grad);
    }
    let forward = graph.order.clone();
    let mut wanted: BTreeSet<Value> = of.iter().copied().collect();
    for &node in &forward {
        let data = &graph.nodes[node];
        if data.inputs.iter().any(|it| wanted.contains(it)) {
            wanted.extend(data.results.iter().filter(|&&it| graph.ty(it).dtype.is_float()));
        }
    }
    let mut builder = Builder::new(graph);
    builder.section = Section::Backward;
    for &node in forward.iter().rev() {
        let data = builder.graph.nodes[node].clone();
        let grads: SmallVec<[Option<Value>; 2]> = data
            .results
            .iter()
            .map(|it| parts.get(it).map(|grads| sum(&mut builder, grads)))
            .collect();
        if grads.iter().all(Option::is_none) {
            continue;
        }
        let mut cx = GradCx {
            wanted: data.inputs.iter().map(|it| wanted.contains(it)).collect(),
            node,
            inputs: SmallVec::from_slice(&data.inputs),
            results: data.results.clone(),
            grads,
            builder: &mut builder,
        };
        for (&input, grad) in data.inputs.iter().zip(data.op.grad(&mut cx)?) {
            if let Some(grad) = grad {
                parts.entry(input).or_default().push(grad);
            }
        }
    }
    Ok(of.iter().map(|it| parts.get(it).map(|grads| sum(&mut builder, grads))).collect())
}

fn sum(builder: &mut Builder<'_>, grads: &[Value]) -> Value {
    match grads {
        [one] => *one,
        many => builder.op("grad", Add {}, many).expect("gradients have one shape"),
    }
}

/// Adds an input to a graph.
pub fn leaf(graph: &mut Graph, ty: &TensorType) -> Value {
    Builder::new(graph).leaf("leaf", ty.clone(), Def::Input)
}
