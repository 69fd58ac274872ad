//! GEMM in f32 by the `gemm` crate, on the calling thread: ranks are the parallelism, and the order
//! of each sum depends on sizes only, so results are bitwise reproducible.

// `gemm` takes raw pointers; the check in front of the call is all that it needs.
#![allow(unsafe_code)]

use gemm::Parallelism;
use ir::ops::Gemm;

/// `out[m, n] = a[m, k] * b[k, n]`, `out` row-major. What `out` held before does not matter.
///
/// # Panics
/// If an operand is shorter than its sizes and strides say, or `out` has not `m * n` elements.
pub fn matmul_f32(gemm: &Gemm, a: &[f32], b: &[f32], out: &mut [f32]) {
    let Gemm { m, n, k, a_strides, b_strides } = *gemm;
    assert_eq!(out.len(), m * n, "a result of {m} x {n}");
    if out.is_empty() {
        return;
    }
    if k == 0 {
        out.fill(0.0);
        return;
    }
    assert!(a.len() >= span([m, k], a_strides), "first operand of {gemm:?} has {}", a.len());
    assert!(b.len() >= span([k, n], b_strides), "second operand of {gemm:?} has {}", b.len());
    let stride = |it: usize| isize::try_from(it).expect("a stride within a slice fits isize");
    // SAFETY: `gemm` reads `a[i * a_strides[0] + p * a_strides[1]]`, `b` likewise, and writes
    // `out[i * n + j]`, for i < m, p < k, j < n. `span` is one more than the largest such index, and
    // the asserts above hold the slices to it. `out` is borrowed mutably, so it overlaps neither.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            false,
            a.as_ptr(),
            stride(a_strides[1]),
            stride(a_strides[0]),
            b.as_ptr(),
            stride(b_strides[1]),
            stride(b_strides[0]),
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// One more than the largest offset of a matrix; neither size is 0.
fn span(sizes: [usize; 2], strides: [usize; 2]) -> usize {
    let last = |i: usize| (sizes[i] - 1).checked_mul(strides[i]);
    let end = last(0).zip(last(1)).and_then(|(a, b)| a.checked_add(b)?.checked_add(1));
    end.expect("a matrix in memory has fewer elements than usize::MAX")
}

/// Adds `c`, element by element, and `bias`, to each row of `n`.
pub(crate) fn add_f32(n: usize, out: &mut [f32], c: Option<&[f32]>, bias: Option<&[f32]>) {
    if let Some(c) = c {
        out.iter_mut().zip(c).for_each(|(out, &c)| *out += c);
    }
    if let Some(bias) = bias {
        for row in out.chunks_exact_mut(n.max(1)) {
            row.iter_mut().zip(bias).for_each(|(out, &bias)| *out += bias);
        }
    }
}

#[cfg(test)]
mod tests {
    use ir::Op;
    use ir::ops::{LocalCx, Matmul, OpDef, Tensor};

    use super::*;

    /// Small integers: every sum is exact, so kernel and reference agree in every bit.
    fn tensor(shape: &[usize], seed: usize) -> Tensor<f32> {
        let mut res = Tensor::zeros(shape);
        let value = |i: usize| ((i * 7 + seed * 13 + i * i) % 17) as f32 - 8.0;
        res.data.iter_mut().enumerate().for_each(|(i, it)| *it = value(i));
        res
    }

    fn both(op: &Matmul, a: &Tensor<f32>, b: &Tensor<f32>) -> (Vec<f32>, Vec<f32>) {
        let gemm = op.gemm(&a.shape, &b.shape);
        let mut expect = Tensor::zeros(&[gemm.m, gemm.n]);
        let cx = LocalCx { bounds: &[] };
        op.reference(&[a.view(), b.view()], &mut [expect.view_mut()], &cx);
        let mut found = vec![f32::NAN; gemm.m * gemm.n];
        matmul_f32(&gemm, &a.data, &b.data, &mut found);
        (found, expect.data)
    }

    #[track_caller]
    fn check(op: Matmul, a: &[usize], b: &[usize]) {
        let (found, expect) = both(&op, &tensor(a, 1), &tensor(b, 2));
        assert_eq!(found, expect, "{op:?} of {a:?} and {b:?}");
    }

    #[test]
    fn equals_the_reference() {
        let fprop = || Matmul { transpose_b: true, ..Matmul::default() };
        let wgrad = || Matmul { transpose_a: true, ..Matmul::default() };
        for m in [1, 3, 65] {
            for n in [1, 5, 33] {
                for k in [1, 2, 70] {
                    check(fprop(), &[m, k], &[n, k]);
                    check(Matmul::default(), &[m, k], &[k, n]);
                    check(wgrad(), &[k, m], &[k, n]);
                }
            }
        }
        check(fprop(), &[2, 3, 4, 6], &[8, 6]);
        check(wgrad(), &[2, 3, 6], &[2, 3, 5]);
    }

    #[test]
    fn adds_what_the_reference_adds() {
        for (m, n, k) in [(3, 5, 7), (1, 4, 0), (4, 1, 2)] {
            for (accumulate, bias) in [(true, false), (false, true), (true, true)] {
                let op = Matmul { transpose_b: true, accumulate, bias, ..Matmul::default() };
                let mut inputs = vec![tensor(&[m, k], 1), tensor(&[n, k], 2)];
                inputs.extend(accumulate.then(|| tensor(&[m, n], 3)));
                inputs.extend(bias.then(|| tensor(&[n], 4)));
                let inputs: Vec<_> = inputs.iter().map(Tensor::view).collect();
                let (mut expect, cx) = (Tensor::zeros(&[m, n]), LocalCx { bounds: &[] });
                op.reference(&inputs, &mut [expect.view_mut()], &cx);
                let mut found = tensor(&[m, n], 5);
                crate::run_f32(&Op::from(op.clone()), &inputs, &mut [found.view_mut()], &cx);
                assert_eq!(found.data, expect.data, "{op:?} of {m} x {n} x {k}");
            }
        }
    }

    /// Both results, of a sum of small integers: equal in every bit.
    #[test]
    fn activates_as_the_reference_does() {
        for (m, n, k, bias) in [(3, 5, 7, true), (65, 33, 2, false), (2, 3, 0, true)] {
            let op = Matmul { transpose_b: true, gelu: true, bias, ..Matmul::default() };
            let mut inputs = vec![tensor(&[m, k], 1), tensor(&[n, k], 2)];
            inputs.extend(bias.then(|| tensor(&[n], 4)));
            let inputs: Vec<_> = inputs.iter().map(Tensor::view).collect();
            let cx = LocalCx { bounds: &[] };
            let both = |run: &dyn Fn(&mut [ir::ops::ViewMut<'_, f32>])| {
                let mut results = [tensor(&[m, n], 5), tensor(&[m, n], 6)];
                run(&mut results.each_mut().map(Tensor::view_mut));
                results.map(|it| it.data)
            };
            let expect = both(&|results| op.reference(&inputs, results, &cx));
            let found =
                both(&|results| crate::run_f32(&Op::from(op.clone()), &inputs, results, &cx));
            assert_eq!(found, expect, "{op:?} of {m} x {n} x {k}");
            assert_ne!(found[0], found[1]);
        }
    }

    /// An empty shard contributes nothing, whatever the result held before.
    #[test]
    fn a_sum_over_nothing_is_zero() {
        check(Matmul::default(), &[3, 0], &[0, 4]);
        check(Matmul::default(), &[0, 3], &[3, 4]);
        check(Matmul { transpose_a: true, ..Matmul::default() }, &[0, 3], &[0, 4]);
    }

    #[test]
    fn nan_and_infinity_are_kept() {
        let mut a = tensor(&[4, 40], 1);
        let b = tensor(&[40, 5], 2);
        a.data[3] = f32::NAN;
        a.data[45] = f32::INFINITY;
        let (found, expect) = both(&Matmul::default(), &a, &b);
        for (found, expect) in found.iter().zip(&expect) {
            assert!(found == expect || found.is_nan() && expect.is_nan(), "{found} {expect}");
        }
        assert!(expect[0].is_nan() && !expect[5].is_finite());
    }

    /// Zeros of one operand do not hide NaN of the other.
    #[test]
    fn zero_times_nan_is_nan() {
        let a = Tensor::zeros(&[2, 8]);
        let mut b = tensor(&[8, 3], 2);
        b.data[4] = f32::NAN;
        let (found, _) = both(&Matmul::default(), &a, &b);
        assert!(found[1].is_nan() && found[4].is_nan() && found[0] == 0.0);
    }
}
