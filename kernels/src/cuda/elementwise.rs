//! Launches for ops that make each element of their results from one element of each operand:
//! `activation`, `cast`, `div`, `glu`, `mul`, `scale` and gradients.

use ir::ops::{ActivationKind, Sums};
use ir::{DType, Op};

use crate::cuda::amax;
use crate::cuda::fill::zeros;
use crate::cuda::launch::{
    BLOCK, N_SMS, arg, blocks, bytes, elements, launch, null, program, result, rows, size, sized,
    typed, vector_length,
};
use crate::cuda::sum_leading::Columns;
use crate::cuda::{Arg, Function, OpCall, Operand, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let x = |index: usize| call.args[index].dtype;
    let (source, entry, mut defines) = match call.op {
        Op::Activation(it) => ("activation.cu", "activation", activation_types(it.kind, x(0))),
        Op::ActivationGrad(it) => {
            let types = vec![typed("X", x(1)), typed("DY", x(0)), act(it.kind)];
            ("activation.cu", "activation_grad", types)
        }
        Op::Glu(it) => {
            let kind = act(it.kind.activation());
            let types = vec![typed("X", x(0)), typed("UP", x(1)), typed("DY", x(0)), kind];
            ("glu.cu", "glu", types)
        }
        Op::GluGrad(it) => {
            let kind = act(it.kind.activation());
            let types = vec![typed("X", x(1)), typed("UP", x(2)), typed("DY", x(0)), kind];
            let entry = if it.recompute { "glu_grad_recompute" } else { "glu_grad" };
            ("glu.cu", entry, types)
        }
        Op::Cast(_) if call.results[0].dtype == x(0) => return Ok(copy(call)),
        Op::Cast(_) => ("elementwise.cu", "cast", xy(call)),
        Op::Div(_) => ("elementwise.cu", "div", xy(call)),
        Op::Mul(_) => ("elementwise.cu", "mul", xy(call)),
        Op::Scale(_) => ("elementwise.cu", "scale", xy(call)),
        _ => return Err(Unsupported::new(call, "it is not elementwise")),
    };
    let (amaxes, codes) = (call.op.amaxes(), call.op.codes());
    let sums = call.op.sums();
    let before = sums.before(call.results);
    let own = amaxes.map_or(before, |it| it.own(before));
    let own_args = codes.map_or(call.args, |it| it.own(call.args));
    let mut args: Vec<Arg> = (0..own.len()).map(result).collect();
    if let (Some(amaxes), Some(codes)) = (amaxes, codes) {
        let places = amax::places(call, amaxes)?;
        let bits = places.iter().enumerate().map(|(i, it)| u64::from(it.is_some()) << i).sum();
        defines.push(sized("AMAX", bits));
        let made = |it: usize| own.get(it).unwrap_or(&own[0]).dtype;
        defines.extend((0..MOST_RESULTS).map(|it| typed(&format!("Y{it}"), made(it))));
        args.extend(places.iter().map(|it| it.map_or(null(), result)));
        args.extend(amax::scales(call, codes, own.len()));
    }
    let operands: Vec<&Operand> = own_args.iter().chain(own).collect();
    let unroll = unroll(own_args.len());
    defines.push(sized("UNROLL", unroll));
    let n = elements(&call.results[0]);
    let mut grid = grid(n, &operands, unroll);
    args.extend((0..own_args.len()).map(arg));
    if let Op::Scale(it) = call.op {
        args.push(Arg::F32(it.factor.0 as f32));
    }
    args.push(size(n));
    let parts = Parts::of(sums, &call.results[0], vector_length(&operands));
    if matches!(call.op, Op::ActivationGrad(_) | Op::GluGrad(_)) {
        args.push(parts.as_ref().map_or(null(), |_| Arg::Pointer(Pointer::Workspace(0))));
        let sizes = parts.as_ref().map_or([0; 3], |it| [it.rows, it.columns, it.rows_each]);
        args.extend(sizes.map(size));
    }
    if amaxes.is_some() {
        defines.extend(summed(sums, parts.as_ref().map_or(1, |it| it.vector)));
    }
    if let Some(it) = &parts {
        grid = it.grid();
    }
    let zeroed = amaxes.into_iter().flat_map(|it| amax::zeroed(call, it));
    let mut res = program(zeroed);
    if n > 0 {
        res.work.push(launch(Function { source, defines, entry }, grid, BLOCK, args));
    }
    for (at, &(of, dtype)) in (before.len()..).zip(&sums.of) {
        match &parts {
            Some(it) => it.sum(sums, of, Pointer::Result(at as u32), dtype, &mut res),
            None => res.work.push(zeros(at, &call.results[at])),
        }
    }
    Ok(res)
}

/// Macros for sums of columns.
fn summed(sums: &Sums, vector: u64) -> [String; 3] {
    let bits = sums.of.iter().map(|it| 1 << it.0).sum();
    [sized("SUM", bits), sized("VECTOR", vector), sized("WARPS", u64::from(BLOCK / 32))]
}

/// Sums of columns, which blocks leave in parts: each of a few rows, in a workspace of `[results, parts, columns]`.
struct Parts {
    rows: u64,
    columns: u64,
    rows_each: u64,
    /// Columns of a thread.
    vector: u64,
}

/// About how many rows a part has at least.
const PART: u64 = 64;

impl Parts {
    /// Of results like `own`; `None` if there are no sums, or nothing to sum.
    fn of(sums: &Sums, own: &Operand, vector: u64) -> Option<Parts> {
        if sums.is_none() || elements(own) == 0 {
            return None;
        }
        let (rows, columns) = rows(own);
        let vector = if columns.is_multiple_of(vector) { vector } else { 1 };
        let n_tiles = columns.div_ceil(32 * vector);
        let n_parts = (8 * N_SMS).div_ceil(n_tiles).clamp(1, rows.div_ceil(PART));
        Some(Parts { rows, columns, rows_each: rows.div_ceil(n_parts), vector })
    }

    fn n_parts(&self) -> u64 {
        self.rows.div_ceil(self.rows_each)
    }

    fn grid(&self) -> [u32; 3] {
        [self.columns.div_ceil(32 * self.vector) as u32, self.n_parts() as u32, 1]
    }

    /// Adds the work that writes the sums of result `of` to `to`.
    fn sum(&self, sums: &Sums, of: usize, to: Pointer, dtype: DType, program: &mut Program) {
        let elements = self.n_parts() * self.columns;
        let index = sums.of.iter().filter(|it| it.0 < of).count() as u64;
        let at = Pointer::Workspace(4 * elements * index);
        let all = 4 * elements * sums.of.len() as u64;
        program.workspace = program.workspace.max(all.next_multiple_of(256));
        Columns { at, dtype: DType::F32, rows: self.n_parts(), columns: self.columns }
            .sum(to, dtype, program);
    }
}

fn activation_types(kind: ActivationKind, x: DType) -> Vec<String> {
    vec![typed("X", x), typed("DY", x), act(kind)]
}

/// Results of the functions of a source, which name the types of all.
const MOST_RESULTS: usize = 3;

/// The function `kind` of each element of `x`, which is at `from`.
pub(super) fn activation(kind: ActivationKind, x: &Operand, from: Pointer, to: Pointer) -> Work {
    let unroll = unroll(1);
    let mut defines = activation_types(kind, x.dtype);
    defines.extend([sized("AMAX", 0), typed("Y0", x.dtype)]);
    defines.extend([sized("UNROLL", unroll)].into_iter().chain(summed(&Sums::default(), 1)));
    let function = Function { source: "activation.cu", defines, entry: "activation" };
    let n = elements(x);
    let args = vec![Arg::Pointer(to), null(), null(), Arg::Pointer(from), size(n)];
    launch(function, grid(n, &[x], unroll), BLOCK, args)
}

/// What a multiprocessor must have in flight is reached with few tensors only by more of each.
fn unroll(n_operands: usize) -> u64 {
    if n_operands == 1 { 4 } else { 2 }
}

fn grid(n: u64, operands: &[&Operand], unroll: u64) -> [u32; 3] {
    [blocks(n, u64::from(BLOCK) * vector_length(operands) * unroll), 1, 1]
}

/// Operand 0 as it is, as the result.
pub(super) fn copy(call: &OpCall<'_>) -> Program {
    let bytes = bytes(&call.results[0]);
    program([Work::Copy { from: Pointer::Arg(0), to: Pointer::Result(0), bytes }])
}

fn xy(call: &OpCall<'_>) -> Vec<String> {
    vec![typed("X", call.args[0].dtype), typed("Y", call.results[0].dtype)]
}

/// The macro that names the function of `activation.cuh`.
fn act(kind: ActivationKind) -> String {
    let name = match kind {
        ActivationKind::Gelu => "gelu",
        ActivationKind::GeluTanh => "gelu_tanh",
        ActivationKind::Relu => "relu",
        ActivationKind::Silu => "silu",
        ActivationKind::Srelu => "srelu",
    };
    format!("ACT={name}")
}
