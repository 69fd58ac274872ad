//! Kernels: fast ways to run an op, each checked against the op's reference.
//!
//! One file each. The CPU backend calls [`run_f32`], which knows the ops that have a kernel of their
//! own and runs the reference of the others. To add one: write the file, add an arm to [`run_f32`].

pub mod cuda;
mod matmul;
mod quant_matmul;
mod verify;

use ir::Op;
use ir::ops::{ActivationKind, LocalCx, View, ViewMut};

use matmul::add_f32;
pub use matmul::matmul_f32;
use quant_matmul::quant_matmul_f32;
pub use verify::{Proved, prove};

/// Runs an op on one rank's data, in f32; rounding to the result's dtype is the caller's.
pub fn run_f32(
    op: &Op,
    inputs: &[View<'_, f32>],
    results: &mut [ViewMut<'_, f32>],
    cx: &LocalCx<'_>,
) {
    match op {
        Op::Matmul(it) => {
            let gemm = it.gemm(inputs[0].shape, inputs[1].shape);
            let (own, sum) = results.split_at_mut(1);
            let out = &mut *own[0].data;
            matmul_f32(&gemm, inputs[0].data, inputs[1].data, out);
            let (c, bias) = it.addends(inputs);
            add_f32(gemm.n, out, c.map(|it| it.data), bias.map(|it| it.data));
            if let Some(sum) = sum.first_mut() {
                sum.data.copy_from_slice(out);
                out.iter_mut().for_each(|it| *it = ActivationKind::GeluTanh.apply(*it));
            }
        }
        Op::QuantMatmul(it) => quant_matmul_f32(it, inputs, results[0].data),
        Op::Fused(it) => {
            let cx = LocalCx { bounds: &[] };
            it.body.run(inputs, results, |op, inputs, results| run_f32(op, inputs, results, &cx));
        }
        // The reference is the definition of every op, and fast enough for most.
        _ => op.reference(inputs, results, cx),
    }
}
