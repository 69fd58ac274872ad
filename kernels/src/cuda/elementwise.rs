//! Launches for ops that make each element of their results from one element of each operand:
//! `activation`, `cast`, `div`, `glu`, `mul`, `scale` and gradients.

use ir::ops::{ActivationKind, GluKind};
use ir::{DType, Op};

use crate::cuda::fill::zeros;
use crate::cuda::fused::{Core, Made, Map};
use crate::cuda::launch::{
    BLOCK, N_SMS, arg, blocks, bytes, elements, launch, null, program, result, rows, size, sized,
    typed, vector_length,
};
use crate::cuda::sum_leading::Columns;
use crate::cuda::{Arg, Function, OpCall, Operand, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let (entry, factor) = match call.op {
        Op::Cast(_) if call.results[0].dtype == call.args[0].dtype => return Ok(copy(call)),
        Op::Cast(_) => ("cast", None),
        Op::Div(_) => ("div", None),
        Op::Mul(_) => ("mul", None),
        Op::Scale(it) => ("scale", Some(it.factor.0 as f32)),
        _ => return Err(Unsupported::new(call, "it is not elementwise")),
    };
    let operands: Vec<&Operand> = call.args.iter().chain(call.results).collect();
    let (n, unroll) = (elements(&call.results[0]), unroll(call.args.len()));
    let mut defines = xy(call);
    defines.push(sized("UNROLL", unroll));
    let args = std::iter::once(result(0)).chain((0..call.args.len()).map(arg));
    let args = args.chain(factor.map(Arg::F32)).chain([size(n)]).collect();
    let function = Function { source: "elementwise.cu", defines, entry };
    let work = (n > 0).then(|| launch(function, grid(n, &operands, unroll), BLOCK, args));
    Ok(program(work))
}

/// An activation, a glu or a gradient of one, and what else is made of their results.
pub(super) fn map(call: &OpCall<'_>, map: &Map<'_>) -> Result<Program, Unsupported> {
    let own: Vec<&Operand> = map.made.iter().map(|it| &call.results[it.at]).collect();
    let own_args: Vec<&Operand> = map.args.iter().map(|&it| &call.args[it]).collect();
    let x = |index: usize| own_args[index].dtype;
    let glu = |kind: GluKind| act(kind.activation());
    let (source, entry, mut defines) = match map.core {
        Core::Activation(it) => ("activation.cu", "activation", activation_types(it.kind, x(0))),
        Core::ActivationGrad(it) => {
            let types = vec![typed("X", x(1)), typed("DY", x(0)), act(it.kind)];
            ("activation.cu", "activation_grad", types)
        }
        Core::Glu(it) => {
            let types = vec![typed("X", x(0)), typed("UP", x(1)), typed("DY", x(0)), glu(it.kind)];
            ("glu.cu", "glu", types)
        }
        Core::GluGrad(it) | Core::GluGradAndGlu(it) => {
            let types = vec![typed("X", x(1)), typed("UP", x(2)), typed("DY", x(0)), glu(it.kind)];
            let again = matches!(map.core, Core::GluGradAndGlu(_));
            ("glu.cu", if again { "glu_grad_recompute" } else { "glu_grad" }, types)
        }
    };
    let amaxes: Vec<usize> = map.made.iter().filter_map(|it| it.amax).collect();
    if amaxes.iter().any(|&it| elements(&call.results[it]) != 1) {
        return Err(Unsupported::new(call, "it takes one amax of a result"));
    }
    let bits = |f: fn(&Made) -> bool| {
        map.made.iter().enumerate().map(|(i, it)| u64::from(f(it)) << i).sum()
    };
    defines.push(sized("AMAX", bits(|it| it.amax.is_some())));
    let made = |it: usize| own.get(it).unwrap_or(&own[0]).dtype;
    defines.extend((0..MOST_RESULTS).map(|it| typed(&format!("Y{it}"), made(it))));
    let operands: Vec<&Operand> = own_args.iter().chain(&own).copied().collect();
    let (n, unroll) = (elements(own[0]), unroll(own_args.len()));
    defines.push(sized("UNROLL", unroll));
    let sums = bits(|it| it.sum.is_some());
    let parts = Parts::of(sums, own[0], vector_length(&operands));
    defines.extend(summed(sums, parts.as_ref().map_or(1, |it| it.vector)));

    let or_null = |it: Option<Arg>| it.unwrap_or(null());
    let mut args: Vec<Arg> = map.made.iter().map(|it| result(it.at)).collect();
    args.extend(map.made.iter().map(|it| or_null(it.amax.map(result))));
    args.extend(map.made.iter().map(|it| or_null(it.scale.map(arg))));
    args.extend(map.args.iter().copied().map(arg));
    args.push(size(n));
    if map.core.sums() {
        args.push(or_null(parts.as_ref().map(|_| Arg::Pointer(Pointer::Workspace(0)))));
        let sizes = parts.as_ref().map_or([0; 3], |it| [it.rows, it.columns, it.rows_each]);
        args.extend(sizes.map(size));
    }
    let grid = parts.as_ref().map_or_else(|| grid(n, &operands, unroll), Parts::grid);
    let mut res = program(amaxes.iter().map(|&it| zeros(it, &call.results[it])));
    if n > 0 {
        res.work.push(launch(Function { source, defines, entry }, grid, BLOCK, args));
    }
    for (index, at) in map.made.iter().filter_map(|it| it.sum).enumerate() {
        let sum = &call.results[at];
        match &parts {
            Some(it) => it.sum(index as u64, Pointer::Result(at as u32), sum.dtype, &mut res),
            None => res.work.push(zeros(at, sum)),
        }
    }
    Ok(res)
}

/// Macros for sums of columns, of the results that `bits` say.
fn summed(bits: u64, vector: u64) -> [String; 3] {
    [sized("SUM", bits), sized("VECTOR", vector), sized("WARPS", u64::from(BLOCK / 32))]
}

/// Sums of columns, which blocks leave in parts: each of a few rows, in a workspace of `[results, parts, columns]`.
struct Parts {
    rows: u64,
    columns: u64,
    rows_each: u64,
    /// Columns of a thread.
    vector: u64,
    n_sums: u64,
}

/// About how many rows a part has at least.
const PART: u64 = 64;

impl Parts {
    /// Parts for the sums of those results like `own` that `bits` say; `None` if there are none, or nothing to sum.
    fn of(bits: u64, own: &Operand, vector: u64) -> Option<Parts> {
        if bits == 0 || elements(own) == 0 {
            return None;
        }
        let (rows, columns) = rows(own);
        let vector = if columns.is_multiple_of(vector) { vector } else { 1 };
        let n_tiles = columns.div_ceil(32 * vector);
        let n_parts = (8 * N_SMS).div_ceil(n_tiles).clamp(1, rows.div_ceil(PART));
        let (rows_each, n_sums) = (rows.div_ceil(n_parts), bits.count_ones().into());
        Some(Parts { rows, columns, rows_each, vector, n_sums })
    }

    fn n_parts(&self) -> u64 {
        self.rows.div_ceil(self.rows_each)
    }

    fn grid(&self) -> [u32; 3] {
        [self.columns.div_ceil(32 * self.vector) as u32, self.n_parts() as u32, 1]
    }

    /// Adds the work that writes the sums number `index` to `to`.
    fn sum(&self, index: u64, to: Pointer, dtype: DType, program: &mut Program) {
        let elements = self.n_parts() * self.columns;
        let at = Pointer::Workspace(4 * elements * index);
        let all = 4 * elements * self.n_sums;
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
    defines.extend([sized("UNROLL", unroll)].into_iter().chain(summed(0, 1)));
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
