//! The GEMM for `matmul`, or what is left of it where nothing is contracted.

use ir::Op;

use crate::cuda::add::bias;
use crate::cuda::fill::zeros;
use crate::cuda::launch::{bytes, program};
use crate::cuda::{GEMM_WORKSPACE, GemmCall, Matrix, OpCall, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::Matmul(op) = call.op else {
        return Err(Unsupported::new(call, "it is not a matrix product"));
    };
    let ([a, b, ..], [out]) = (call.args, call.results) else {
        return Err(Unsupported::new(call, "it does not have two operands and one result"));
    };
    if !(a.dtype.is_float() && b.dtype.is_float() && out.dtype.is_float()) {
        return Err(Unsupported::new(call, "matrices of integers are not multiplied"));
    }
    let gemm = op.gemm(&a.shape, &b.shape);
    let operands: Vec<usize> = (0..call.args.len()).collect();
    let (c, bias) = op.addends(&operands);
    if gemm.k == 0 {
        return Ok(program(without_product(call, c, bias)));
    }
    let transposed_b = op.transpose_b && !op.transpose_a;
    let res = GemmCall {
        m: gemm.m,
        n: gemm.n,
        k: gemm.k,
        a: Matrix { at: Pointer::Arg(0), dtype: a.dtype, transposed: op.transpose_a },
        b: Matrix { at: Pointer::Arg(1), dtype: b.dtype, transposed: transposed_b },
        c: c.map(pointer),
        bias: bias.map(pointer),
        out: Pointer::Result(0),
        out_dtype: out.dtype,
    };
    Ok(Program { workspace: GEMM_WORKSPACE, ..program([Work::Gemm(res)]) })
}

fn pointer(operand: usize) -> Pointer {
    Pointer::Arg(operand as u32)
}

/// `c + bias`, of which either may be missing.
fn without_product(call: &OpCall<'_>, c: Option<usize>, b: Option<usize>) -> Vec<Work> {
    let out = &call.results[0];
    let start = match c {
        Some(c) => Work::Copy { from: pointer(c), to: Pointer::Result(0), bytes: bytes(out) },
        None => zeros(0, out),
    };
    let add = b.map(|it| bias([out, &call.args[it]], Pointer::Result(0), pointer(it)));
    std::iter::once(start).chain(add).collect()
}
