//! Programs for `attention` and `attention_grad`: a library's where one takes the shape, with kernels
//! of our own behind it; those alone elsewhere.
//!
//! The workspace of the gradient starts with `delta`, f32 `[batch, s, heads]`, if our kernels run. A
//! library runs in their place, so all of it is free for one.

use ir::ops::Attention;
use ir::{DType, Op};
use smallvec::SmallVec;

use crate::cuda::launch::{BLOCK, arg, grid, launch, need, program, result, size, sized, typed};
use crate::cuda::{
    Arg, AttentionCall, AttentionShape, Function, OpCall, Operand, Pointer, Program, Unsupported,
    Work,
};

/// Rows and columns of a tile of scores; `TILE` of `attention.cu`.
const TILE: usize = 64;
/// The most features of a head that our kernels have registers for.
const MAX_D: usize = 256;
/// What a library may need for itself besides what its graph asks for.
const LIBRARY_OWN: u64 = 1 << 20;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let shape = match call.op {
        Op::Attention(it) => shape(call, it, false),
        Op::AttentionGrad(it) => shape(call, &it.forward(), true),
        _ => return Err(Unsupported::new(call, "it has none")),
    };
    let own = if shape.backward { backward(call, &shape)? } else { forward(call, &shape)? };
    if !library_takes(&shape) {
        return Ok(own);
    }
    let pointers = |n: usize, of: fn(u32) -> Pointer| (0..n as u32).map(of);
    let attention = AttentionCall {
        shape,
        args: pointers(call.args.len(), Pointer::Arg).collect(),
        results: pointers(call.results.len(), Pointer::Result).collect(),
        fallback: own.work.into_vec(),
        scratch: 0,
    };
    let workspace = own.workspace.max(library_scratch(&shape).end);
    Ok(Program { workspace, ..program([Work::Attention(attention)]) })
}

/// Whether a library is worth asking for a plan.
pub fn library_takes(shape: &AttentionShape) -> bool {
    let AttentionShape { dtype, batch, s, t, heads, d, .. } = *shape;
    dtype == DType::Bf16 && matches!(d, 64 | 128) && [batch, s, t, heads].iter().all(|&it| it > 0)
}

/// Where a library's attention has its scratch: bytes from [`AttentionCall::scratch`] on, multiples of
/// 256. The forward pass needs none but its plan's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LibraryScratch {
    /// For the gradient: a sum for each row, f32 `[batch, heads, s]`.
    pub sums: u64,
    /// For the gradient: `dq` in f32, `[batch, heads, s, d]`.
    pub dq: u64,
    /// What the plan asks for, up to `end`.
    pub own: u64,
    /// Bytes of all.
    pub end: u64,
}

/// See [`LibraryScratch`].
pub fn library_scratch(shape: &AttentionShape) -> LibraryScratch {
    let [batch, heads, s, t, d] =
        [shape.batch, shape.heads, shape.s, shape.t, shape.d].map(|it| it as u64);
    let rows = batch * heads * s * 4;
    // cuDNN's gradient keeps dk and dv of each query head in bf16, before it adds those of a group.
    let [sums, dq, heads_kv] = match shape.backward {
        false => [0; 3],
        true => [rows, rows * d, 2 * batch * heads * t * d * 2],
    };
    let dq_at = sums.next_multiple_of(256);
    let own = dq_at + dq.next_multiple_of(256);
    let end = own + heads_kv.next_multiple_of(256) + LIBRARY_OWN;
    LibraryScratch { sums: 0, dq: dq_at, own, end }
}

fn shape(call: &OpCall<'_>, op: &Attention, backward: bool) -> AttentionShape {
    let (q, k) = (&call.args[0], &call.args[1]);
    let d = op.head_dim as usize;
    let [s, features] = last_two(q);
    let [t, kv_features] = last_two(k);
    AttentionShape {
        backward,
        dtype: q.dtype,
        batch: q.shape[..q.shape.len() - 2].iter().product(),
        s,
        t,
        heads: features / d,
        kv_heads: kv_features / d,
        d,
        causal: op.causal,
        scale: op.score_scale() as f32,
    }
}

fn last_two(operand: &Operand) -> [usize; 2] {
    let n = operand.shape.len();
    [operand.shape[n - 2], operand.shape[n - 1]]
}

fn forward(call: &OpCall<'_>, shape: &AttentionShape) -> Result<Program, Unsupported> {
    check(call, shape, &[])?;
    let mut args: Vec<Arg> = (0..3).map(arg).chain((0..2).map(result)).collect();
    args.extend(sizes(shape));
    Ok(program(tiles(call, shape, "attention", [shape.s, shape.heads], args)?))
}

fn backward(call: &OpCall<'_>, shape: &AttentionShape) -> Result<Program, Unsupported> {
    check(call, shape, &[3, 5])?;
    need(call, 4, DType::F32)?;
    let (q_tiles, kv_tiles) = ([shape.s, shape.heads], [shape.t, shape.kv_heads]);
    let delta = Arg::Pointer(Pointer::Workspace(0));
    let n = (shape.batch * shape.s * shape.heads) as u64;
    let mut work: SmallVec<[Work; 2]> = SmallVec::new();
    if n > 0 {
        let blocks = grid(call, n.div_ceil(u64::from(BLOCK / 32)))?;
        let args = vec![arg(3), arg(5), delta, size(n)];
        work.push(launch(function(shape, "attention_delta"), blocks, BLOCK, args));
    }
    let operands = [arg(0), arg(1), arg(2), arg(4), arg(5), delta];
    for (entry, counted, results) in
        [("attention_grad_q", q_tiles, 0..1), ("attention_grad_kv", kv_tiles, 1..3)]
    {
        let args = operands.into_iter().chain(results.map(result)).chain(sizes(shape)).collect();
        work.extend(tiles(call, shape, entry, counted, args)?);
    }
    // Never empty, so that the pointer to it is one.
    let workspace = (n.max(1) * 4).next_multiple_of(256);
    Ok(Program { workspace, ..program(work) })
}

/// What our kernels ask of the operands; `same` are those that must be of the queries' type, besides
/// keys and values.
fn check(call: &OpCall<'_>, shape: &AttentionShape, same: &[usize]) -> Result<(), Unsupported> {
    for &index in [1, 2].iter().chain(same) {
        need(call, index, shape.dtype)?;
    }
    match shape.d <= MAX_D {
        true => Ok(()),
        false => {
            let why = format!("heads of {} features are more than its kernel's {MAX_D}", shape.d);
            Err(Unsupported::new(call, why))
        }
    }
}

/// A block for each tile of `n` rows, head and sequence; nothing where there is none.
fn tiles(
    call: &OpCall<'_>,
    shape: &AttentionShape,
    entry: &'static str,
    [n, heads]: [usize; 2],
    args: Vec<Arg>,
) -> Result<Option<Work>, Unsupported> {
    let blocks = n.div_ceil(TILE) * heads * shape.batch;
    if blocks == 0 {
        return Ok(None);
    }
    Ok(Some(launch(function(shape, entry), grid(call, blocks as u64)?, BLOCK, args)))
}

fn function(shape: &AttentionShape, entry: &'static str) -> Function {
    let defines = vec![typed("X", shape.dtype), sized("D", shape.d as u64)];
    Function { source: "attention.cu", defines, entry }
}

fn sizes(shape: &AttentionShape) -> [Arg; 6] {
    [
        size(shape.s as u64),
        size(shape.t as u64),
        Arg::I32(shape.heads as i32),
        Arg::I32(shape.kv_heads as i32),
        Arg::I32(i32::from(shape.causal)),
        Arg::F32(shape.scale),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape {
        backward: true,
        dtype: DType::Bf16,
        batch: 3,
        s: 33,
        t: 77,
        heads: 8,
        kv_heads: 2,
        d: 64,
        causal: false,
        scale: 0.125,
    };

    /// What cuDNN 9.19 asks for: 256 bytes, and for the gradient what is written here beside the shape.
    #[test]
    fn a_library_has_the_scratch_that_its_plans_ask_for() {
        let room = |shape: &AttentionShape| {
            let it = library_scratch(shape);
            it.end - it.own
        };
        assert!(room(&AttentionShape { backward: false, ..SHAPE }) >= 256);
        for (batch, heads, t, d, needed) in [
            (1, 32, 8192, 128, 134_217_984),
            (2, 32, 8192, 128, 268_435_712),
            (3, 4, 77, 128, 473_344),
            (2, 8, 1024, 128, 8_388_864),
            (2, 8, 77, 64, 315_648),
        ] {
            let shape = AttentionShape { batch, heads, t, d, ..SHAPE };
            assert!((needed..needed + (2 << 20)).contains(&room(&shape)), "{shape:?}");
        }
    }

    #[test]
    fn parts_of_the_scratch_do_not_overlap() {
        let it = library_scratch(&SHAPE);
        let rows = 3 * 8 * 33 * 4;
        assert!(it.sums + rows <= it.dq);
        assert!(it.dq + rows * 64 <= it.own);
        assert!(it.own < it.end);
        assert!([it.sums, it.dq, it.own, it.end].iter().all(|it| it % 256 == 0));
    }
}
