//! `update`: accumulates gradients over micro-batches, and adds the optimizer's step.
//!
//! Gradients are those of the *summed* loss, so that every token counts the same however tokens are
//! spread over ranks and micro-batches; one factor, clipping and the number of tokens in it, scales
//! all of them in the update. States are named as in PyTorch: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`.
//!
//! The update is applied only if the loss and the norm of all gradients are finite and a token counts
//! (`clip_scale`): otherwise optimizers leave weights and states as they are.

use ir::graph::{Def, Optimizer, Store};
use ir::ops::{Adam, AdamW, Add, Amaxes, Cast, ClipScale, Div, Reshard, Sgd, SumSquares};
use ir::placement::{AxisSet, ReduceOp, Sharding};
use ir::{BuildError, Builder, DType, Graph, Op, Phase, Section, TensorType, Value};

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct Update;

impl Pass<Graph> for Update {
    fn name(&self) -> &'static str {
        "update"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Logical, Phase::Logical)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let named = |name: &str| graph.results.iter().find(|it| it.0 == name).map(|it| it.1);
        let (Some(loss_sum), Some(count)) = (named("loss_sum"), named("loss_count")) else {
            return Ok(());
        };
        let mut builder = Builder::new(graph);
        emit(&mut builder, loss_sum, count).map_err(|it| PassError::Failed {
            code: "PL0302",
            message: it.to_string(),
            subject: Some(it.name),
        })
    }
}

fn emit(builder: &mut Builder<'_>, loss_sum: Value, count: Value) -> Result<(), BuildError> {
    builder.section = Section::Backward;
    let batch_axes = batch_axes(builder.graph);
    let loss_sum = accumulate(builder, loss_sum)?;
    let count = accumulate(builder, count)?;
    let trained: Vec<usize> = (0..builder.graph.params.len())
        .filter(|&it| builder.graph.params[it].grad.is_some())
        .collect();
    for &index in &trained {
        builder.scope = builder.graph.params[index].scope;
        gradient(builder, index, batch_axes)?;
    }
    builder.section = Section::Update;
    for &index in &trained {
        builder.scope = builder.graph.params[index].scope;
        store_gradient(builder, index)?;
    }
    builder.scope = builder.graph.scopes.keys().next().expect("a graph has a root scope");
    let loss = builder.op("loss", Div {}, &[loss_sum, count])?;
    let scalar = TensorType::scalar(DType::F32);
    let lr = builder.leaf("lr", scalar, Def::Input);
    builder.pin(lr, Sharding::replicated(0));
    builder.graph.results = vec![("loss".to_string(), loss)];
    if trained.is_empty() {
        return Ok(());
    }
    let mut squares = Vec::new();
    for &index in &trained {
        let grad = builder.graph.params[index].grad.expect("it is trained");
        let name =
            format!("{}.sumsq", builder.graph.values[builder.graph.params[index].value].name);
        squares.push(builder.op(&name, SumSquares {}, &[grad])?);
    }
    let total = builder.op("grad_sumsq", Add {}, &squares)?;
    let clip = ClipScale { max_norm: builder.graph.training.clip_norm.map(Into::into) };
    let names = ["grad_scale", "grad_norm", "applied"];
    let scaled = builder.ops(&names, clip, &[total, count, loss_sum])?;
    builder.graph.results.extend((1..3).map(|it| (names[it].to_string(), scaled[it])));
    for &index in &trained {
        builder.scope = builder.graph.params[index].scope;
        step(builder, index, [scaled[0], lr, scaled[2]])?;
    }
    Ok(())
}

/// The value that `Update` reads for `value` of a micro-batch: itself, or the sum over all of them.
fn accumulate(builder: &mut Builder<'_>, value: Value) -> Result<Value, BuildError> {
    if builder.graph.micro_batches == 1 {
        return Ok(value);
    }
    let name = format!("{}.acc", builder.graph.values[value].name);
    let ty = builder.graph.ty(value).clone();
    let state = builder.leaf(&name, ty, Def::Sum);
    builder.graph.values[state].like = Some(value);
    let sum = builder.op(&format!("{name}.next"), Add {}, &[state, value])?;
    builder.graph.stores.push(Store { state, value: sum, section: Section::Backward });
    Ok(state)
}

/// Makes a parameter's gradient f32 and sums it over micro-batches.
fn gradient(
    builder: &mut Builder<'_>,
    index: usize,
    batch_axes: AxisSet,
) -> Result<(), BuildError> {
    let param = builder.graph.params[index].clone();
    let Some(mut grad) = param.grad else { return Ok(()) };
    let name = format!("{}.grad.f32", builder.graph.values[param.value].name);
    reduce_replicas_last(builder.graph, grad, batch_axes);
    if builder.graph.ty(grad).dtype != DType::F32 {
        let narrow = builder.graph.values[grad].clone();
        grad = builder.op(&name, Cast { to: DType::F32 }, &[grad])?;
        if let (true, Some(sharding)) = (narrow.pinned, narrow.sharding) {
            builder.pin(grad, sharding);
        }
    }
    builder.graph.params[index].grad = Some(accumulate(builder, grad)?);
    Ok(())
}

/// Reduces what of a gradient was left to the end of the step, and lays it out like the master weight.
fn store_gradient(builder: &mut Builder<'_>, index: usize) -> Result<(), BuildError> {
    let param = builder.graph.params[index].clone();
    let Some(grad) = param.grad.filter(|_| builder.graph.micro_batches > 1) else { return Ok(()) };
    let name = format!("{}.grad", builder.graph.values[param.value].name);
    let grad = builder.op(&name, Reshard::default(), &[grad])?;
    if let Some(storage) = builder.graph.values[param.value].sharding.clone() {
        builder.pin(grad, storage);
    }
    builder.graph.params[index].grad = Some(grad);
    Ok(())
}

/// Axes over which the batch is sharded.
pub(crate) fn batch_axes(graph: &Graph) -> AxisSet {
    let inputs = graph.values.values().filter(|it| it.def == Def::Input);
    let layouts = inputs.filter_map(|it| it.sharding.as_ref()?.dims.first());
    layouts.fold(AxisSet::EMPTY, |axes, it| axes.union(it.axis_set()))
}

/// Leaves a gradient that is accumulated a sum over data-parallel axes on which the parameter is
/// replicated (HSDP): that reduction is needed once a step, in the update.
fn reduce_replicas_last(graph: &mut Graph, grad: Value, batch_axes: AxisSet) {
    if graph.micro_batches == 1 || !graph.values[grad].pinned {
        return;
    }
    if let Some(sharding) = &mut graph.values[grad].sharding {
        let replicas = batch_axes.minus(sharding.sharded_axes());
        if !replicas.is_empty() {
            *sharding = sharding.with_partial(ReduceOp::Sum, replicas);
        }
    }
}

/// Name of the state that counts a parameter's updates; the others are laid out like the parameter.
const STEP: &str = "step";

/// Adds the optimizer's ops for one parameter; `scalars` are grad_scale, lr and applied.
fn step(builder: &mut Builder<'_>, index: usize, scalars: [Value; 3]) -> Result<(), BuildError> {
    let param = builder.graph.params[index].clone();
    let weight = param.value;
    let grad = param.grad.expect("only trained parameters are stepped");
    let name = builder.graph.values[weight].name.clone();
    let decay = |it: f64| if param.decay { it.into() } else { 0.0.into() };
    let (op, suffixes): (Op, &[&str]) = match builder.graph.training.optimizer {
        Optimizer::AdamW { betas: (beta1, beta2), eps, weight_decay } => {
            let (beta1, beta2, eps) = (beta1.into(), beta2.into(), eps.into());
            let (weight_decay, amax) = (decay(weight_decay), Amaxes::default());
            let op = AdamW { beta1, beta2, eps, weight_decay, compute: None, amax };
            (op.into(), &["exp_avg", "exp_avg_sq", STEP])
        }
        Optimizer::Adam { betas: (beta1, beta2), eps, weight_decay } => {
            let (beta1, beta2, eps) = (beta1.into(), beta2.into(), eps.into());
            let (weight_decay, amax) = (decay(weight_decay), Amaxes::default());
            let op = Adam { beta1, beta2, eps, weight_decay, compute: None, amax };
            (op.into(), &["exp_avg", "exp_avg_sq", STEP])
        }
        Optimizer::Sgd { momentum, weight_decay } => {
            let op = Sgd { momentum: momentum.into(), weight_decay: decay(weight_decay) };
            (op.into(), if momentum == 0.0 { &[] } else { &["momentum_buffer"] })
        }
    };
    // The weight and its states, which the op replaces in this order.
    let mut updated = vec![weight];
    let mut names = vec![format!("{name}.next")];
    for suffix in suffixes {
        let (ty, sharding) = match *suffix {
            STEP => (TensorType::scalar(DType::F32), Some(Sharding::replicated(0))),
            _ => {
                let weight = &builder.graph.values[weight];
                (weight.ty.with_dtype(DType::F32), weight.sharding.clone())
            }
        };
        let state = builder.leaf(&format!("{name}.{suffix}"), ty, Def::State);
        if let Some(sharding) = sharding {
            builder.pin(state, sharding);
        }
        updated.push(state);
        names.push(format!("{name}.{suffix}.next"));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let operands = [updated.as_slice(), &[grad], &scalars].concat();
    let results = builder.ops(&names, op, &operands)?;
    let section = Section::Update;
    for (&state, &value) in updated.iter().zip(&results) {
        builder.graph.stores.push(Store { state, value, section });
    }
    if param.compute != weight {
        let to = builder.graph.ty(param.compute).dtype;
        let name = format!("{}.next", builder.graph.values[param.compute].name);
        let value = builder.op(&name, Cast { to }, &[results[0]])?;
        builder.graph.stores.push(Store { state: param.compute, value, section });
    }
    Ok(())
}
