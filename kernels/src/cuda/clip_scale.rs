//! Launches for `clip_scale` and `watch`.
//!
//! ```text
//! table   clip_scale    each scalar that is watched
//!         watch         each tensor, and its element type
//! ```

use ir::{DType, Op};

use crate::cuda::launch::{
    BLOCK, arg, double, elements, launch, need, null, program, result, size,
};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::ClipScale(it) = call.op else { return Err(Unsupported::new(call, "it has none")) };
    (0..call.args.len()).try_for_each(|index| need(call, index, DType::F32))?;
    let limit = double(it.max_norm.map_or(f64::NAN, |it| it.0));
    let table: Vec<Word> =
        (3..call.args.len()).map(|it| Word::Pointer(Pointer::Arg(it as u32))).collect();
    let watched = if table.is_empty() { null() } else { Arg::Pointer(Pointer::Table(0)) };
    let n_watched = Arg::I32(table.len() as i32);
    let scalars = vec![arg(0), arg(1), arg(2), result(0), result(1), result(2), limit];
    let args = [scalars, vec![watched, n_watched]].concat();
    Ok(Program { table, ..program([launch(function("clip_scale"), [1, 1, 1], 1, args)]) })
}

pub(super) fn watch(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let mut table = Vec::new();
    for (index, operand) in call.args.iter().enumerate() {
        let dtype = match operand.dtype {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::I32 | DType::E4M3 | DType::E5M2 => {
                return Err(Unsupported::new(call, "it reads f32 and bf16"));
            }
        };
        table.extend([Word::Pointer(Pointer::Arg(index as u32)), Word::Value(dtype)]);
    }
    let (n, n_tensors) = (elements(&call.args[0]), Arg::I32(call.args.len() as i32));
    let args = vec![result(0), Arg::Pointer(Pointer::Table(0)), n_tensors, size(n)];
    Ok(Program { table, ..program([launch(function("watch"), [1, 1, 1], BLOCK, args)]) })
}

fn function(entry: &'static str) -> Function {
    Function { source: "clip_scale.cu", defines: Vec::new(), entry }
}
