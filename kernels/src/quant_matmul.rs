//! `quant_matmul` on a CPU: a GEMM of codes for each range of the contraction whose scales are constant.

use ir::ops::{Gemm, QuantMatmul, View};

use crate::matmul::{add_f32, matmul_f32};

/// Results as [`QuantMatmul`]'s reference defines them; only the order of sums within a range differs.
pub fn quant_matmul_f32(op: &QuantMatmul, inputs: &[View<'_, f32>], out: &mut [f32]) {
    let (a, b) = (inputs[0], inputs[1]);
    let gemm = op.gemm(a.shape, b.shape);
    let shapes: Vec<&[usize]> = inputs.iter().map(|it| it.shape).collect();
    let segments = op.segments(&shapes).max(1);
    let k = gemm.k / segments;
    out.fill(0.0);
    if k > 0 && !out.is_empty() {
        let mut product = vec![0.0; out.len()];
        for segment in 0..segments {
            let start = segment * k;
            let part = Gemm { k, ..gemm };
            matmul_f32(&part, &a.data[start..], &b.data[start..], &mut product);
            let at = (segment, segments);
            let rows = op.inverse_scales(inputs, 0, gemm.m, at);
            let columns = op.inverse_scales(inputs, 1, gemm.n, at);
            let lines = out.chunks_exact_mut(gemm.n).zip(product.chunks_exact(gemm.n));
            for ((out, product), row) in lines.zip(rows) {
                for ((out, &x), &column) in out.iter_mut().zip(product).zip(&columns) {
                    *out += x * (row * column);
                }
            }
        }
    }
    let (c, bias) = op.addends(inputs);
    add_f32(gemm.n, out, c.map(|it| it.data), bias.map(|it| it.data));
}

#[cfg(test)]
mod tests {
    use ir::Op;
    use ir::ops::{LocalCx, OpDef, QuantMatmul, Tensor};

    use super::*;

    /// Sums of at most 256 products of numbers of order one, in another order: 256 * 2^-24, with the
    /// sums themselves of order sixteen.
    const TOLERANCE: f32 = 256.0 * 16.0 / (1 << 24) as f32;

    #[test]
    fn every_sample_agrees_with_the_reference() {
        for sample in QuantMatmul::samples() {
            let Op::QuantMatmul(op) = &sample.op else { panic!("a sample of another op") };
            let mut state = 1u32;
            let mut number = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            };
            let mut operands: Vec<Tensor<f32>> = Vec::new();
            for input in &sample.inputs {
                let shape: Vec<usize> = input.ty.shape.iter().map(|&it| it as usize).collect();
                let mut it = Tensor::zeros(&shape);
                it.data.iter_mut().for_each(|it| *it = number());
                operands.push(it);
            }
            let inputs: Vec<View<'_, f32>> = operands.iter().map(|it| it.view()).collect();
            let gemm = op.gemm(inputs[0].shape, inputs[1].shape);
            let mut expect = Tensor::zeros(&[gemm.m, gemm.n]);
            op.reference(&inputs, &mut [expect.view_mut()], &LocalCx { bounds: &[] });
            let mut found = vec![f32::NAN; gemm.m * gemm.n];
            quant_matmul_f32(op, &inputs, &mut found);
            for (a, b) in found.iter().zip(&expect.data) {
                assert!((a - b).abs() <= TOLERANCE, "{}: {a}, not {b}", sample.op.to_text());
            }
        }
    }
}
