//! Launches for `rope`.

use ir::Op;

use crate::cuda::launch::{N_SMS, arg, elements, result, size, sized, typed, vector_length};
use crate::cuda::{Arg, Function, Launch, OpCall, Pointer, Program, Unsupported, Word, Work};

/// Threads of a block, about; and the most of one.
const BLOCK: u64 = 256;
const MAX_BLOCK: u64 = 1024;
/// Heads that a block turns at a time, if there are as many.
const LANES: u64 = 8;
/// Shared memory of a block.
const MAX_SHARED: u64 = 48 << 10;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::Rope(op) = call.op else {
        return Err(Unsupported::new(call, "it does not turn pairs of features"));
    };
    let x = &call.args[0];
    let half = op.head_dim / 2;
    let whole = vector_length(&[x]);
    let vector = if half.is_multiple_of(whole) { whole } else { 1 };
    let groups = half / vector;
    let [.., s, features] = x.shape.as_slice() else {
        return Err(Unsupported::new(call, "its operand has fewer than two dims"));
    };
    let (s, heads) = (*s as u64, *features as u64 / op.head_dim);
    // One head of one sequence is a row.
    let n_rows = elements(x) / s / op.head_dim;
    let lanes = n_rows.min(LANES).min((MAX_BLOCK / groups.max(1)).max(1));
    let positions = (BLOCK / (lanes * groups)).clamp(1, s);
    let (block, shared) = (positions * lanes * groups, positions * half * 8);
    if block > MAX_BLOCK || shared > MAX_SHARED {
        return Err(Unsupported::new(call, "a head of so many features does not fit a block"));
    }
    if i32::try_from(n_rows + 2 * LANES * u64::from(u16::MAX)).is_err() {
        return Err(Unsupported::new(call, "there are too many heads and sequences"));
    }
    let blocks = s.div_ceil(positions).min(1 << 30);
    // Where positions are few, sequences and heads are spread over blocks too.
    let shares = (8 * N_SMS / blocks).clamp(1, n_rows.div_ceil(2 * lanes)).min(u64::from(u16::MAX));
    let defines = vec![
        typed("X", x.dtype),
        sized("VECTOR", vector),
        sized("INTERLEAVED", u64::from(op.interleaved)),
    ];
    let args = vec![
        result(0),
        arg(0),
        Arg::Pointer(Pointer::Table(0)),
        size(s),
        size(call.bounds[0].start),
        Arg::I32(heads as i32),
        Arg::I32(n_rows as i32),
        Arg::I32(half as i32),
        Arg::I32(positions as i32),
        Arg::I32(lanes as i32),
        Arg::F32(if op.inverse { -1.0 } else { 1.0 }),
    ];
    let launch = Launch {
        function: Function { source: "rope.cu", defines, entry: "rope" },
        grid: [blocks as u32, shares as u32, 1],
        block: block as u32,
        shared: shared as u32,
        args,
    };
    let half_turns = |i: u64| op.frequency(i as usize) / std::f64::consts::PI;
    let table = (0..half).map(|i| Word::Value(half_turns(i).to_bits())).collect();
    Ok(Program { work: [Work::Launch(launch)].into_iter().collect(), workspace: 0, table })
}
