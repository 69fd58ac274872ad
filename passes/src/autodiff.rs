//! `autodiff`: adds the backward pass of the summed loss, on global tensors.
//!
//! No collective exists yet and none needs a gradient: where a gradient is a sum over ranks, its
//! sharding will say so. The result is [`Param::grad`] of every trained parameter, laid out like the
//! parameter's storage, or like the gathered weight where reduction waits for the last micro-batch.

use cranelift_entity::SecondaryMap;
use ir::graph::{Param, Reduction};
use ir::ops::{Add, Fill, GradCx, GradError};
use ir::{Builder, DType, Graph, Phase, Section, TensorType, Value};
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct Autodiff;

impl Pass<Graph> for Autodiff {
    fn name(&self) -> &'static str {
        "autodiff"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Logical, Phase::Logical)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let Some(loss) = result(graph, "loss_sum") else { return Ok(()) };
        let wanted = wanted(graph);
        let mut grads = Gradients { parts: SecondaryMap::new() };
        let forward = graph.order.clone();
        let leaves: Vec<Option<Value>> = graph.params.iter().map(|it| leaf(graph, it)).collect();
        let mut builder = Builder::new(graph);
        builder.section = Section::Backward;
        let one = Fill::new(1.0, &TensorType::scalar(DType::F32));
        grads.parts[loss]
            .push(builder.op("loss_sum.grad", one, &[]).map_err(GradError::from).map_err(failed)?);
        for &node in forward.iter().rev() {
            let data = builder.graph.nodes[node].clone();
            if data.section != Section::Forward || !data.inputs.iter().any(|&it| wanted[it]) {
                continue;
            }
            builder.scope = data.scope;
            let mut results = SmallVec::new();
            for &result in &data.results {
                results.push(grads.sum(&mut builder, result)?);
            }
            if results.iter().all(Option::is_none) {
                continue;
            }
            let mut cx = GradCx {
                builder: &mut builder,
                node,
                inputs: SmallVec::from_slice(&data.inputs),
                results: data.results.clone(),
                grads: results,
                wanted: data.inputs.iter().map(|&it| wanted[it]).collect(),
            };
            let res = data.op.grad(&mut cx).map_err(failed)?;
            for (&input, grad) in data.inputs.iter().zip(res) {
                if let (true, Some(grad)) = (wanted[input], grad) {
                    builder.graph.values[grad].like.get_or_insert(input);
                    grads.parts[input].push(grad);
                }
            }
        }
        for (index, leaf) in leaves.into_iter().enumerate() {
            let Some(leaf) = leaf else { continue };
            builder.scope = builder.graph.params[index].scope;
            let grad = grads.sum(&mut builder, leaf)?;
            if grad.is_none() {
                return Err(unused(builder.graph, index));
            }
            builder.graph.params[index].grad = grad;
        }
        Ok(())
    }
}

/// Contributions to the gradient of each value.
struct Gradients {
    parts: SecondaryMap<Value, SmallVec<[Value; 2]>>,
}

impl Gradients {
    /// The gradient of `value`: the sum of its contributions; `None` if there are none.
    fn sum(&mut self, builder: &mut Builder<'_>, value: Value) -> Result<Option<Value>, PassError> {
        let parts = std::mem::take(&mut self.parts[value]);
        let res = match parts.as_slice() {
            [] => return Ok(None),
            [one] => *one,
            many => {
                let name = format!("{}.grad", builder.graph.values[value].name);
                let sum =
                    builder.op(&name, Add {}, many).map_err(GradError::from).map_err(failed)?;
                builder.graph.values[sum].like = Some(value);
                sum
            }
        };
        self.parts[value].push(res);
        Ok(Some(res))
    }
}

/// The value whose gradient a parameter's optimizer reads; `None` for a frozen parameter.
fn leaf(graph: &Graph, param: &Param) -> Option<Value> {
    let last = graph.micro_batches > 1 && graph.training.reduce == Reduction::LastMicroBatch;
    param.trainable.then_some(if last { param.full } else { param.compute })
}

/// Values that depend on a trained parameter.
fn wanted(graph: &Graph) -> SecondaryMap<Value, bool> {
    let mut res = SecondaryMap::new();
    for param in graph.params.iter() {
        if let Some(leaf) = leaf(graph, param) {
            res[leaf] = true;
        }
    }
    for &node in &graph.order {
        let data = &graph.nodes[node];
        if data.section == Section::Forward && data.inputs.iter().any(|&it| res[it]) {
            for &result in &data.results {
                res[result] |= graph.ty(result).dtype.is_float();
            }
        }
    }
    res
}

/// A named result of the graph.
fn result(graph: &Graph, name: &str) -> Option<Value> {
    graph.results.iter().find(|it| it.0 == name).map(|it| it.1)
}

/// The error of a trained parameter without a gradient.
fn unused(graph: &Graph, index: usize) -> PassError {
    let name = graph.values[graph.params[index].value].name.clone();
    let message = format!(
        "`{name}` is trained, and the loss does not depend on it; remove it, or freeze it \
         (`frozen: [\"{name}\"]`)"
    );
    PassError::Failed { code: "PL0305", message, subject: Some(name) }
}

fn failed(error: GradError) -> PassError {
    let subject = match &error {
        GradError::NotDifferentiable { name, .. } | GradError::ShiftStays { name, .. } => {
            Some(name.clone())
        }
        GradError::Build(it) => Some(it.name.clone()),
    };
    PassError::Failed { code: "PL0301", message: error.to_string(), subject }
}
