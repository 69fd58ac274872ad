//! `round-cuts`: FSDP cuts weights in blocks between blocks, where that costs less than it saves.
//!
//! A square of 128 x 128 numbers has one scale, so a weight is gathered as codes only if no cut goes through
//! a square. Of 14336 rows over dp=64:
//!
//! ```text
//!               rows of a rank                 gathered
//! [dp, _]       224                            numbers of the compute type, quantized behind the gather
//! [dp%128, _]   256 of 56 ranks, none of 8     codes and scales: half the bytes, and a seventh more for padding
//! ```
//!
//! What is compared is seconds of collectives, as in propagation but with padding: the gathers of a micro-batch, and
//! the reduction of the gradient. Few rows on many ranks are so left as they are. Tensor parallelism is never
//! rounded: its cuts are what ranks compute. Nor is what the user placed.

use ir::graph::{AfterForward, Cut, Param, Reduction};
use ir::placement::{CommCost, Sharding};
use ir::quant::blocks::FP8_BLOCK;
use ir::quant::{QuantSpec, Scaling};
use ir::{Graph, Phase};

use crate::quantize::{Gemms, block};
use crate::update::batch_axes;
use crate::{Pass, PassError};

/// Bytes of a code, with its share of the scale of a square.
const CODE_BYTES: f64 = 1.0 + 4.0 / (FP8_BLOCK * FP8_BLOCK) as f64;

/// See the [module docs](self).
pub struct RoundCuts;

impl Pass<Graph> for RoundCuts {
    fn name(&self) -> &'static str {
        "round-cuts"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Logical, Phase::Logical)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let gemms = Gemms::find(graph)?;
        for (index, spec) in gemms.weights.into_iter().enumerate() {
            let param = graph.params[index].clone();
            let in_blocks = |it: &QuantSpec| matches!(it.scaling, Scaling::Block { .. });
            let Some(spec) = spec.filter(|it| in_blocks(it) && !param.placed) else { continue };
            if let Some(rounded) = rounded(graph, &param, spec) {
                let cut = compared(graph, &param, rounded);
                if cut.is_rounded() {
                    store(graph, &param, &cut.rounded);
                }
                graph.cuts.push(cut);
            }
        }
        Ok(())
    }
}

/// The storage of a weight in whole blocks, if its cuts go through some and rounding would help.
fn rounded(graph: &Graph, param: &Param, spec: QuantSpec) -> Option<Sharding> {
    let (data, mesh) = (&graph.values[param.value], &graph.mesh);
    let stays_whole = |it: &Sharding| block::stays_whole(data, Some(it), mesh, spec);
    let storage = data.sharding.as_ref().filter(|it| !stays_whole(it))?;
    if data.ty.shape.iter().any(|it| !it.is_multiple_of(FP8_BLOCK)) {
        return None;
    }
    let mut res = storage.clone();
    for (layout, &size) in res.dims.iter_mut().zip(&data.ty.shape) {
        let rounded = layout.clone().in_granules(FP8_BLOCK as u32);
        if !rounded.divides(size, mesh) {
            *layout = rounded;
        }
    }
    stays_whole(&res).then_some(res)
}

/// What a micro-batch costs with and without. Pieces are sent as large as the largest.
fn compared(graph: &Graph, param: &Param, rounded: Sharding) -> Cut {
    let (data, mesh, cost) = (&graph.values[param.value], &graph.mesh, CommCost::default());
    let even = data.sharding.clone().expect("it is cut");
    let axes = even.sharded_axes().minus(graph.sharding(param.full).sharded_axes());
    let others = (mesh.set_size(axes) - 1) as f64;
    let gathers = match graph.scopes[param.scope].after_forward {
        AfterForward::Keep => 1.0,
        AfterForward::Drop | AfterForward::KeepPiece(_) => 2.0,
    };
    let reductions = match graph.training.reduce {
        _ if !param.trainable => 0.0,
        Reduction::EveryMicroBatch => 1.0,
        Reduction::LastMicroBatch => 1.0 / f64::from(graph.micro_batches),
    };
    // Replicas reduce their pieces among them once a step.
    let replicas = mesh.set_size(batch_axes(graph).minus(even.sharded_axes())) as f64;
    let replicated = if param.trainable { 2.0 * (replicas - 1.0) / replicas } else { 0.0 };
    let replicated = replicated / f64::from(graph.micro_batches);
    let seconds = |storage: &Sharding, gathered: f64| {
        let elements = storage.local_elements(&data.ty.shape, mesh) as f64;
        let sent = |bytes: f64| elements * bytes / cost.bandwidth;
        let moved = |bytes: f64| cost.latency + others * sent(bytes);
        let reduced = param.reduce_dtype.bytes() as f64;
        gathers * moved(gathered) + reductions * moved(reduced) + replicated * sent(reduced)
    };
    let numbers = graph.ty(param.compute).dtype.bytes() as f64;
    let seconds = [seconds(&even, numbers), seconds(&rounded, CODE_BYTES)];
    Cut { weight: data.name.clone(), even, rounded, seconds }
}

/// Stores the weight, what computes, and its gradient like that, unless it is reduced behind the last micro-batch, where
/// it lives is open. Other states do not exist yet.
fn store(graph: &mut Graph, param: &Param, rounded: &Sharding) {
    let states = [param.value, param.compute];
    let stored = graph.stores.iter().filter(|it| states.contains(&it.state)).map(|it| it.value);
    let grad = param.grad.filter(|&it| graph.values[it].pinned);
    let values: Vec<_> = states.into_iter().chain(grad).chain(stored).collect();
    for value in values {
        graph.values[value].sharding = Some(rounded.clone());
    }
}
