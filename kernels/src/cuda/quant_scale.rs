//! Launches for scales of FP8 codes: `quant_scale`, `delayed_scale`, `delayed_update`; one for all tensors of
//! a batch.
//!
//! ```text
//! table   scales    amaxes or state, scale, inverse, elements, for each tensor
//!         updates   history, amax, scale, next history, next scale, length of the history
//! ```

use ir::quant::{AmaxAlgo, Format};
use ir::{DType, Op};

use crate::cuda::launch::{elements, grid, launch, program, typed};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// Threads of a block; `THREADS` of `quant_scale.cu`.
const BLOCK: u32 = 32;

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let largest = |format: Option<Format>| format.map_or(1.0, Format::max);
    let (entry, amax, numbers) = match call.op {
        Op::QuantScale(it) => {
            let (largest, epsilon) = (largest(it.to.fp8()), it.epsilon.0 as f32);
            let pow2 = Arg::I32(it.pow2.into());
            ("quant_scale", call.args[0].dtype, vec![Arg::F32(largest), Arg::F32(epsilon), pow2])
        }
        Op::DelayedScale(_) => ("delayed_scale", DType::F32, vec![]),
        Op::DelayedUpdate(it) => {
            // As the reference does: both are rounded before the amax divides them.
            let largest = largest(it.to.fp8()) * 2f32.powi(-it.margin);
            let most_recent = it.algo == AmaxAlgo::MostRecent;
            (
                "delayed_update",
                call.args[1].dtype,
                vec![Arg::F32(largest), Arg::I32(most_recent.into())],
            )
        }
        _ => return Err(Unsupported::new(call, "it makes no scale")),
    };
    let mut table = Vec::new();
    let (mut args, mut results) = (0, 0);
    for call in calls {
        let (n_args, n_results) = (call.args.len() as u32, call.results.len() as u32);
        table.extend((args..args + n_args).map(|it| Word::Pointer(Pointer::Arg(it))));
        table.extend((results..results + n_results).map(|it| Word::Pointer(Pointer::Result(it))));
        table.push(Word::Value(elements(&call.args[0])));
        args += n_args;
        results += n_results;
    }
    let function = Function { source: "quant_scale.cu", defines: vec![typed("AMAX", amax)], entry };
    let args = [vec![Arg::Pointer(Pointer::Table(0))], numbers].concat();
    let work = launch(function, grid(call, calls.len() as u64)?, BLOCK, args);
    Ok(Program { table, ..program([work]) })
}
