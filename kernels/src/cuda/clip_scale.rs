//! Launch for `clip_scale`.

use ir::{DType, Op};

use crate::cuda::launch::{arg, double, launch, need, program, result};
use crate::cuda::{Function, OpCall, Program, Unsupported};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::ClipScale(it) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    (0..3).try_for_each(|index| need(call, index, DType::F32))?;
    let function = Function { source: "clip_scale.cu", defines: Vec::new(), entry: "clip_scale" };
    let limit = double(it.max_norm.map_or(f64::NAN, |it| it.0));
    let args = vec![arg(0), arg(1), arg(2), result(0), result(1), result(2), limit];
    Ok(program([launch(function, [1, 1, 1], 1, args)]))
}
