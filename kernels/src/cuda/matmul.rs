//! The GEMM for `matmul`, or what is left of it where nothing is contracted. A `gelu` that the GEMM does
//! not take is a kernel behind it.

use ir::ops::{ActivationKind, Gemm};
use ir::{DType, Op};

use crate::cuda::add::bias;
use crate::cuda::elementwise::activation;
use crate::cuda::fill::zeros;
use crate::cuda::launch::{bytes, program};
use crate::cuda::{GEMM_WORKSPACE, GemmCall, Matrix, OpCall, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::Matmul(op) = call.op else {
        return Err(Unsupported::new(call, "it is not a matrix product"));
    };
    let ([a, b, ..], [out, ..]) = (call.args, call.results) else {
        return Err(Unsupported::new(call, "it does not have two operands and a result"));
    };
    if !(a.dtype.is_float() && b.dtype.is_float() && out.dtype.is_float()) {
        return Err(Unsupported::new(call, "matrices of integers are not multiplied"));
    }
    let gemm = op.gemm(&a.shape, &b.shape);
    let operands: Vec<usize> = (0..call.args.len()).collect();
    let (c, bias) = op.addends(&operands);
    let activated = |sum: Pointer| {
        op.gelu.then(|| activation(ActivationKind::GeluTanh, out, sum, Pointer::Result(0)))
    };
    if gemm.k == 0 {
        // The sum, where there are two results, is the second.
        let sum = call.results.len() - 1;
        let work = without_product(call, c, bias, sum);
        return Ok(program(work.into_iter().chain(activated(result(sum)))));
    }
    let a = Matrix { at: Pointer::Arg(0), dtype: a.dtype, transposed: op.transpose_a };
    let transposed_b = op.transpose_b && !op.transpose_a;
    let b = Matrix { at: Pointer::Arg(1), dtype: b.dtype, transposed: transposed_b };
    let fused = op.gelu && takes_gelu(&gemm, [a, b], out.dtype);
    let behind = if fused { None } else { activated(result(1)) };
    let res = GemmCall {
        m: gemm.m,
        n: gemm.n,
        k: gemm.k,
        a,
        b,
        scales: None,
        c: c.map(pointer),
        bias: bias.map(pointer),
        gelu: fused.then_some(result(1)),
        out: result(usize::from(behind.is_some())),
        out_dtype: out.dtype,
    };
    let work = std::iter::once(Work::Gemm(res)).chain(behind);
    Ok(Program { workspace: GEMM_WORKSPACE, ..program(work) })
}

pub(super) fn pointer(operand: usize) -> Pointer {
    Pointer::Arg(operand as u32)
}

fn result(index: usize) -> Pointer {
    Pointer::Result(index as u32)
}

/// Whether a GEMM activates on the way out. cuBLASLt wants rows of the sum to be multiples of 8
/// elements; those of operands are so for the kernels that have this epilogue.
fn takes_gelu(gemm: &Gemm, [a, b]: [Matrix; 2], out: DType) -> bool {
    let row_a = if a.transposed { gemm.m } else { gemm.k };
    let row_b = if b.transposed { gemm.k } else { gemm.n };
    let narrow = [a.dtype, b.dtype, out].iter().all(|&it| it == DType::Bf16);
    narrow && [row_a, row_b, gemm.n].iter().all(|it| it.is_multiple_of(8))
}

/// `c + bias`, of which either may be missing, as result `to`.
pub(super) fn without_product(
    call: &OpCall<'_>,
    c: Option<usize>,
    b: Option<usize>,
    to: usize,
) -> Vec<Work> {
    let out = &call.results[to];
    let start = match c {
        Some(c) => Work::Copy { from: pointer(c), to: result(to), bytes: bytes(out) },
        None => zeros(to, out),
    };
    let add = b.map(|it| bias([out, &call.args[it]], result(to), pointer(it), result(to)));
    std::iter::once(start).chain(add).collect()
}
