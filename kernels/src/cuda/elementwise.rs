//! Launches for ops that make each element of their results from one element of each operand:
//! `activation`, `cast`, `div`, `glu`, `mul`, `scale` and gradients.

use ir::ops::ActivationKind;
use ir::{DType, Op};

use crate::cuda::amax;
use crate::cuda::launch::{
    BLOCK, arg, blocks, bytes, elements, launch, null, program, result, size, sized, typed,
    vector_length,
};
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
    let own = amaxes.map_or(call.results, |it| it.own(call.results));
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
    let grid = grid(n, &operands, unroll);
    args.extend((0..own_args.len()).map(arg));
    if let Op::Scale(it) = call.op {
        args.push(Arg::F32(it.factor.0 as f32));
    }
    args.push(size(n));
    let work = launch(Function { source, defines, entry }, grid, BLOCK, args);
    let zeroed = amaxes.into_iter().flat_map(|it| amax::zeroed(call, it));
    Ok(program(zeroed.chain([work])))
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
    defines.extend([sized("AMAX", 0), typed("Y0", x.dtype), sized("UNROLL", unroll)]);
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
