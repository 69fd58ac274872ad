//! Launches for `embedding` and `embedding_grad`.

use ir::{DType, Op};

use crate::cuda::launch::{
    BLOCK, arg, bytes, elements, grid, launch, need, program, result, size, sized, typed,
    vector_length,
};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    need(call, 0, DType::I32)?;
    match call.op {
        Op::Embedding(_) => gather(call),
        Op::EmbeddingGrad(it) => scatter(call, it.padding_idx),
        _ => Err(Unsupported::new(call, "it has none")),
    }
}

/// A block for each id copies its row.
fn gather(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let (table, bound) = (&call.args[1], call.bounds[0]);
    let row = table.shape[1] as u64 * table.dtype.bytes();
    let (unit, unit_bytes) = match (row % 16, table.dtype.bytes()) {
        (0, _) => ("uint4", 16),
        (_, 2) => ("u16", 2),
        (_, bytes) => ("u32", bytes),
    };
    let n = row / unit_bytes;
    let block = n.next_multiple_of(32).clamp(32, u64::from(BLOCK)) as u32;
    let function = Function {
        source: "embedding.cu",
        defines: vec![format!("UNIT={unit}")],
        entry: "embedding",
    };
    let args = vec![arg(0), arg(1), result(0), size(n), size(bound.start), size(bound.extent)];
    Ok(program([launch(function, grid(call, elements(&call.args[0]))?, block, args)]))
}

/// Zeros, the first and last position of each row's id, then the sums of the rows that have one.
fn scatter(call: &OpCall<'_>, padding_idx: Option<i64>) -> Result<Program, Unsupported> {
    let (dy, out, bound) = (&call.args[1], &call.results[0], call.bounds[0]);
    let zero = Work::Fill { to: Pointer::Result(0), bytes: bytes(out), value: 0 };
    let n = elements(&call.args[0]);
    if n == 0 || bound.extent == 0 {
        return Ok(program([zero]));
    }
    let d = out.shape[1] as u64;
    let vector = vector_length(&[dy]);
    let width = if d.is_multiple_of(vector) { vector } else { 1 };
    let defines = vec![typed("X", dy.dtype), typed("OUT", out.dtype), sized("WIDTH", width)];
    let function =
        |entry| Function { source: "embedding_grad.cu", defines: defines.clone(), entry };
    let ends = Arg::Pointer(Pointer::Workspace(0));
    // No id is this: ids are 32 bits.
    let padding = Arg::I64(padding_idx.unwrap_or(i64::MIN));
    let held = [size(bound.start), size(bound.extent), padding];

    let workspace = (bound.extent * 8).next_multiple_of(256);
    let clear = Work::Fill { to: Pointer::Workspace(0), bytes: bound.extent * 8, value: 0xff };
    let mut args = vec![arg(0), ends, size(n)];
    args.extend(held);
    let of_ids = grid(call, n.div_ceil(u64::from(BLOCK)))?;
    let find = launch(function("embedding_grad_ends"), of_ids, BLOCK, args);
    let mut args = vec![arg(0), arg(1), ends, result(0), size(d)];
    args.extend(held);
    let [positions, ..] = grid(call, n)?;
    let tiles = d.div_ceil(u64::from(BLOCK) * width);
    if tiles > 65535 {
        return Err(Unsupported::new(call, format!("rows of {d} are too long for its kernel")));
    }
    let sum = launch(function("embedding_grad"), [positions, tiles as u32, 1], BLOCK, args);
    Ok(Program { workspace, ..program([zero, clear, find, sum]) })
}
