//! The GEMM for `quant_matmul`, or a slow kernel of our own where cuBLASLt takes no such codes. A bias that the
//! GEMM does not take is a kernel behind it.
//!
//! ```text
//! table       of our own kernel: where the scales of both operands are, see `pieces.rs`
//! workspace   behind that of the GEMM: scales in blocks, with rows as long as cuBLASLt wants them
//! ```

use ir::ops::{Gemm, Granule, QuantMatmul};
use ir::quant::blocks::FP8_BLOCK as SIDE;
use ir::{DType, Op};

use crate::cuda::add::bias;
use crate::cuda::launch::{
    BLOCK, arg, blocks, elements, index, index_arg, launch, null, program, result, size, typed,
};
use crate::cuda::matmul::{pointer, without_product};
use crate::cuda::pieces::{PieceDim, dims, words};
use crate::cuda::{
    Arg, Function, GEMM_WORKSPACE, GemmCall, Matrix, OpCall, Operand, Pointer, Program, Scale,
    ScaleOf, Scales, Unsupported, Work,
};

/// Rows of cuBLASLt's operands are multiples of so many codes.
const ALIGNMENT: usize = 16;
/// Rows of cuBLASLt's scales are multiples of so many numbers.
const SCALES: u64 = 4;
/// Multiplications that our own kernel is good for: some tens of milliseconds.
const OWN_MAX: u128 = 1 << 33;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::QuantMatmul(op) = call.op else {
        return Err(Unsupported::new(call, "it does not multiply codes"));
    };
    let (a, b) = (&call.args[0], &call.args[1]);
    let gemm = op.gemm(&a.shape, &b.shape);
    if gemm.k == 0 {
        let (c, bias) = addends(op, call);
        return Ok(program(without_product(call, c, bias, 0)));
    }
    if (a.dtype, b.dtype) == (DType::E5M2, DType::E5M2) {
        let why =
            "both operands are e5m2, and GPUs multiply that by e4m3 only; make one of them e4m3";
        return Err(Unsupported::new(call, why));
    }
    match refusal(op, call, &gemm) {
        None => Ok(library(op, call, &gemm)),
        Some(_) if gemm.m as u128 * gemm.n as u128 * gemm.k as u128 <= OWN_MAX => {
            Ok(own(op, call, &gemm))
        }
        Some(why) => Err(Unsupported::new(call, why)),
    }
}

/// Which operands are added to the product.
fn addends(op: &QuantMatmul, call: &OpCall<'_>) -> (Option<usize>, Option<usize>) {
    let operands: Vec<usize> = (0..call.args.len()).collect();
    op.addends(&operands)
}

/// Why cuBLASLt does not take it.
fn refusal(op: &QuantMatmul, call: &OpCall<'_>, gemm: &Gemm) -> Option<String> {
    for (what, size) in
        [("contracted size", gemm.k), ("second operand has rows, whose number", gemm.n)]
    {
        if !size.is_multiple_of(ALIGNMENT) {
            return Some(format!(
                "its {what} is {size} on this rank, and cuBLASLt wants a multiple of {ALIGNMENT}"
            ));
        }
    }
    let sides = [(&op.a, gemm.m, &call.args[2]), (&op.b, gemm.n, &call.args[3])];
    for (operand, (granule, rows, scale)) in sides.into_iter().enumerate() {
        let n = elements(scale);
        match granule {
            Granule::Tensor(_) if n != 1 => {
                return Some(format!(
                    "operand {operand} has {n} scales on this rank, and cuBLASLt takes one a tensor; \
                     shard what is in pieces over as many ranks"
                ));
            }
            Granule::Row if !(rows as u64).is_multiple_of(SCALES) => {
                return Some(format!(
                    "operand {operand} has {rows} rows on this rank, whose scales are no multiple of 16 \
                     bytes"
                ));
            }
            Granule::Tensor(_) | Granule::Row | Granule::Block => (),
        }
    }
    let blocks = op.a == Granule::Block && op.b == Granule::Block;
    blocks.then(|| "cuBLASLt takes blocks of one operand only, and rows of the other".to_string())
}

fn library(op: &QuantMatmul, call: &OpCall<'_>, gemm: &Gemm) -> Program {
    let mut workspace = GEMM_WORKSPACE;
    let mut work: Vec<Work> = Vec::new();
    let mut scale = |operand: usize, granule: &Granule| {
        let given = &call.args[operand];
        let at = Pointer::Arg(operand as u32);
        match granule {
            Granule::Tensor(_) => Scale { at, of: ScaleOf::Tensor },
            Granule::Row => Scale { at, of: ScaleOf::Row },
            Granule::Block => {
                let (rows, row) = (given.shape[0] as u64, given.shape[1] as u64);
                let pitch = row.next_multiple_of(SCALES);
                if row == pitch {
                    return Scale { at, of: ScaleOf::Block };
                }
                let to = Pointer::Workspace(workspace);
                workspace += (rows * pitch * 4).next_multiple_of(256);
                work.push(widened([to, at], rows, row, pitch));
                Scale { at: to, of: ScaleOf::Block }
            }
        }
    };
    let (a_scale, b_scale) = (scale(2, &op.a), scale(3, &op.b));
    let tensors = [&a_scale, &b_scale].iter().all(|it| it.of == ScaleOf::Tensor);
    let matrix = |operand: usize, transposed| {
        let dtype = call.args[operand].dtype;
        Matrix { at: Pointer::Arg(operand as u32), dtype, transposed }
    };
    // What is in blocks has no fast sums.
    let scales = Scales { a: a_scale, b: b_scale, fast: op.fast && tensors };
    let (c, added) = addends(op, call);
    // Next to codes cuBLASLt takes no bias in f32. What is f32 is not rounded before the bias comes, either.
    let fused = op.out == DType::Bf16;
    work.push(Work::Gemm(GemmCall {
        m: gemm.m,
        n: gemm.n,
        k: gemm.k,
        a: matrix(0, false),
        b: matrix(1, true),
        scales: Some(scales),
        c: c.map(pointer),
        bias: added.filter(|_| fused).map(pointer),
        gelu: None,
        out: Pointer::Result(0),
        out_dtype: op.out,
    }));
    let (out, to) = (&call.results[0], Pointer::Result(0));
    let behind = added.filter(|_| !fused);
    work.extend(behind.map(|it| bias([out, &call.args[it]], to, pointer(it), to)));
    Program { workspace, ..program(work) }
}

/// Copies rows of f32 to longer ones.
fn widened([to, from]: [Pointer; 2], rows: u64, row: u64, pitch: u64) -> Work {
    let n = rows * pitch;
    let function = Function {
        source: "copy.cu",
        defines: vec!["V=u32".to_string(), index(n)],
        entry: "pad_rows",
    };
    let mut args = vec![Arg::Pointer(to), Arg::Pointer(from)];
    args.extend([row, 0, pitch, n].map(|it| index_arg(n, it)));
    launch(function, [blocks(n, BLOCK.into()), 1, 1], BLOCK, args)
}

fn own(op: &QuantMatmul, call: &OpCall<'_>, gemm: &Gemm) -> Program {
    let Gemm { m, n, k, .. } = *gemm;
    let shapes: Vec<&[usize]> = call.args.iter().map(|it| it.shape.as_slice()).collect();
    let n_segments = op.segments(&shapes) as u64;
    let (a_scale, b_scale) = (&call.args[2], &call.args[3]);
    let a_dims = places(&op.a, &call.args[0], a_scale, [m, k]);
    let b_dims = places(&op.b, &call.args[1], b_scale, [n, k]);
    let dtype = |operand: usize| call.args[operand].dtype;
    let defines = vec![typed("A", dtype(0)), typed("B", dtype(1)), typed("OUT", op.out)];
    let function = Function { source: "quant_matmul.cu", defines, entry: "quant_matmul" };
    let mut args = vec![result(0), arg(0), arg(1), arg(2), arg(3)];
    let (c, bias) = addends(op, call);
    args.extend([c, bias].map(|it| it.map_or_else(null, arg)));
    args.push(Arg::Pointer(Pointer::Table(0)));
    args.extend([&a_dims, &b_dims].map(|it| Arg::I32(it.len() as i32)));
    args.extend([m as u64, n as u64, k as u64, k as u64 / n_segments].map(size));
    let grid = [blocks(m as u64 * n as u64, BLOCK.into()), 1, 1];
    let work = launch(function, grid, BLOCK, args);
    Program { table: words(&a_dims).chain(words(&b_dims)).collect(), ..program([work]) }
}

/// Where the scale of an element of `x`, which is a matrix of these sizes, is.
fn places(granule: &Granule, x: &Operand, scale: &Operand, [rows, k]: [usize; 2]) -> Vec<PieceDim> {
    let (rows, k) = (rows as u64, k as u64);
    let along = |stride: u64, size: u64, part: u64| PieceDim { stride, size, part, n: size / part };
    match granule {
        Granule::Tensor(in_pieces) => dims(&x.shape, &scale.shape, in_pieces),
        Granule::Row => vec![along(1, k, SIDE), along(k, rows, 1)],
        Granule::Block => vec![along(k, rows, SIDE), along(1, k, SIDE)],
    }
}
