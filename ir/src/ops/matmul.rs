//! `matmul`: the three GEMMs of a linear layer, on row-major operands.
//!
//! ```text
//! fprop   transpose_b    x[* k]  w[n k]  -> y[* n]      PyTorch weights are [out, in]
//! dgrad                  dy[* n] w[n k]  -> dx[* k]
//! wgrad   transpose_a    dy[* n] x[* k]  -> dw[n k]     contracts all leading dimensions
//! ```
//!
//! With `accumulate` and `bias` the result is `a b + c + bias`, summed in f32 and rounded once:
//! what a GEMM does on the way out, and what `fuse` makes of sums.
//!
//! With `gelu` it is the `gelu_tanh` of that sum, and the sum itself is one more result: the backward
//! pass reads it.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationKind, Cast, Engine, Factors, GradCx, GradError, Grads, LocalCx, Op, OpDef, Real,
    Sample, TypeError, Types, View, ViewMut, arity, is_default, leading, ndim, same_shape,
    same_size,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `a`, `b`, then `c` of the result's type if it accumulates,
/// then `bias` (one number for each column of the result, of its element type) if there is one. At
/// most one operand is transposed. Results: the product with what is added to it; or, with `gelu`, the
/// activation of that, then that, both of one type.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Matmul {
    /// Contract the leading dimensions of both operands.
    #[serde(skip_serializing_if = "is_default")]
    pub transpose_a: bool,
    /// The second operand is `[n, k]`.
    #[serde(skip_serializing_if = "is_default")]
    pub transpose_b: bool,
    /// Element type of the result; that of the operands if absent. Sums are in f32 in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
    /// Adds to an operand of the result's type, possibly in place.
    #[serde(skip_serializing_if = "is_default")]
    pub accumulate: bool,
    /// Adds a vector to every row of the result.
    #[serde(skip_serializing_if = "is_default")]
    pub bias: bool,
    /// Applies [`ActivationKind::GeluTanh`] to the sum before it is rounded, and returns the sum, too.
    /// (A kernel may activate the rounded sum instead.) Not of a sum that accumulates.
    #[serde(skip_serializing_if = "is_default")]
    pub gelu: bool,
}

impl OpDef for Matmul {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2 + usize::from(self.accumulate) + usize::from(self.bias))?;
        let res = self.product(inputs[0], inputs[1])?;
        for operand in 2..inputs.len() {
            let (found, bias) = (inputs[operand], self.bias && operand == inputs.len() - 1);
            match bias {
                true => {
                    ndim(inputs, operand, 1, "1 dim")?;
                    same_size("columns and biases", res.shape[res.ndim() - 1], found.shape[0])?;
                }
                false => same_shape(&res, found)?,
            }
            if found.dtype != res.dtype {
                let expected = "that of the result";
                return Err(TypeError::DType { operand, found: found.dtype, expected });
            }
        }
        match (self.gelu, self.accumulate) {
            (false, _) => Ok(smallvec![res]),
            (true, false) => Ok(smallvec![res.clone(), res]),
            (true, true) => {
                Err(TypeError::Attribute { why: "a sum with gelu does not accumulate" })
            }
        }
    }

    /// `c` and the bias are added to the sum, so they are partial where it is. A padded row would
    /// become the bias. A partial sum is not activated.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let (product, res, columns) = match (self.transpose_a, self.transpose_b) {
            (true, _) => ("* n, * k", "n k", "k"),
            (false, true) => ("* k, n k", "* n", "n"),
            (false, false) => ("* k, k n", "* n", "n"),
        };
        let mut text = product.to_string();
        if self.accumulate {
            text = format!("{text}, {res}");
        }
        if self.bias {
            text = format!("{text}, {columns}");
        }
        let mut results_text = res.to_string();
        let contracted = if self.transpose_a { "*" } else { "k" };
        if self.gelu {
            results_text = format!("{res}, {res}");
        }
        let factors =
            Factors::new(&format!("{text} -> {results_text}"), inputs, results).add_from(2);
        let factors = if self.gelu { factors.whole(contracted) } else { factors };
        match (self.bias, self.transpose_a) {
            (true, true) => factors.even("n"),
            (true, false) => factors.even("*"),
            (false, _) => factors,
        }
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (a, b) = (inputs[0], inputs[1]);
        let gemm = self.gemm(a.shape, b.shape);
        let (c, bias) = self.addends(inputs);
        let (own, sum) = results.split_at_mut(1);
        let out = match sum.first_mut() {
            Some(sum) => &mut *sum.data,
            None => &mut *own[0].data,
        };
        for i in 0..gemm.m {
            for j in 0..gemm.n {
                let product: T = (0..gemm.k)
                    .map(|p| {
                        let x = a.data[i * gemm.a_strides[0] + p * gemm.a_strides[1]];
                        x * b.data[p * gemm.b_strides[0] + j * gemm.b_strides[1]]
                    })
                    .sum();
                let c = c.map_or(T::zero(), |it| it.data[i * gemm.n + j]);
                let bias = bias.map_or(T::zero(), |it| it.data[j]);
                out[i * gemm.n + j] = product + c + bias;
            }
        }
        if let Some(sum) = sum.first() {
            for (out, &x) in own[0].data.iter_mut().zip(&*sum.data) {
                *out = ActivationKind::GeluTanh.apply(x);
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (x, w, mut dy) = (cx.inputs[0], cx.inputs[1], cx.grad(0));
        // A GEMM has operands of one type, also where its result is wider.
        let to = cx.ty(x).dtype;
        if cx.ty(dy).dtype != to {
            let name = format!("{}.grad", cx.name());
            dy = cx.builder.op(&name, Cast { to }, &[dy])?;
        }
        let mut res: Grads = smallvec![None, None];
        if cx.wanted[0] {
            // Of `x^T w`: `w dy^T`.
            let transpose_b = self.transpose_a || !self.transpose_b;
            let dgrad = Matmul { transpose_b, ..Matmul::default() };
            let operands = if self.transpose_a { [w, dy] } else { [dy, w] };
            res[0] = cx.op(0, dgrad, &operands)?;
        }
        if cx.wanted[1] {
            // Of `x^T w`: `x dy`.
            let wgrad = Matmul { transpose_a: !self.transpose_a, ..Matmul::default() };
            let operands = if self.transpose_b { [dy, x] } else { [x, dy] };
            res[1] = cx.op(1, wgrad, &operands)?;
        }
        Ok(res)
    }

    fn flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        let shape = |it: &[u64]| -> Vec<usize> { it.iter().map(|&it| it as usize).collect() };
        self.gemm(&shape(inputs[0]), &shape(inputs[1])).flops()
    }

    fn is_fused(&self) -> bool {
        self.accumulate || self.bias || self.gelu
    }

    fn engine(&self) -> Engine {
        Engine::Gemm
    }

    fn samples() -> Vec<Sample> {
        let fprop = Matmul { transpose_b: true, ..Matmul::default() };
        let wgrad = Matmul { transpose_a: true, ..Matmul::default() };
        let added = |op: &Matmul| Matmul { accumulate: true, ..op.clone() };
        let both = Matmul { bias: true, ..added(&fprop) };
        let biased = Matmul { bias: true, ..Matmul::default() };
        let gelu = |op: &Matmul| Matmul { gelu: true, ..op.clone() };
        let mlp = Matmul { bias: true, ..gelu(&fprop) };
        vec![
            Sample::floats(mlp, &[&[2, 4, 8], &[16, 8], &[16]]),
            Sample::floats(gelu(&wgrad), &[&[2, 4, 6], &[2, 4, 3]]),
            Sample::floats(gelu(&biased), &[&[4, 6], &[6, 5], &[5]]),
            Sample::floats(added(&fprop), &[&[2, 4, 6], &[8, 6], &[2, 4, 8]]),
            Sample::floats(added(&wgrad), &[&[2, 4, 6], &[2, 4, 3], &[6, 3]]),
            Sample::floats(added(&Matmul::default()), &[&[4, 6], &[6, 5], &[4, 5]]),
            Sample::floats(both, &[&[2, 4, 6], &[8, 6], &[2, 4, 8], &[8]]),
            Sample::floats(biased, &[&[4, 6], &[6, 5], &[5]]),
            Sample::floats(fprop, &[&[2, 4, 6], &[8, 6]]),
            Sample::floats(Matmul::default(), &[&[4, 6], &[6, 5]]),
            Sample::floats(wgrad, &[&[2, 4, 6], &[2, 4, 3]]),
        ]
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.accumulate { &[(0, 2)] } else { &[] }
    }

    fn without(&self, operand: usize) -> Option<Op> {
        let plain = || Matmul { accumulate: false, ..self.clone() }.into();
        (self.accumulate && operand == 2).then(plain)
    }
}

/// Sizes and strides of the plain GEMM `m k, k n -> m n` that a [`Matmul`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gemm {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Contracted size.
    pub k: usize,
    /// Strides of the first operand along `m` and `k`, in elements.
    pub a_strides: [usize; 2],
    /// Strides of the second operand along `k` and `n`, in elements.
    pub b_strides: [usize; 2],
}

impl Gemm {
    /// Floating point operations; a multiply-add counts two.
    pub fn flops(&self) -> u64 {
        (2 * self.m as u64 * self.n as u64).saturating_mul(self.k as u64)
    }
}

impl Matmul {
    /// Type of the product, or why there is none.
    fn product(&self, a: &TensorType, b: &TensorType) -> Result<TensorType, TypeError> {
        if a.ndim() < 2 {
            return Err(TypeError::Ndim {
                operand: 0,
                found: a.clone(),
                expected: "at least 2 dims",
            });
        }
        if b.dtype != a.dtype {
            let expected = "that of operand 0";
            return Err(TypeError::DType { operand: 1, found: b.dtype, expected });
        }
        let dtype = self.out.unwrap_or(a.dtype);
        if self.transpose_a {
            same_size("numbers of dims", a.ndim() as u64, b.ndim() as u64)?;
            for (&left, &right) in leading(&a.shape).iter().zip(&b.shape) {
                same_size("contracted sizes", left, right)?;
            }
            let last = |it: &TensorType| it.shape[it.ndim() - 1];
            return Ok(TensorType::new(dtype, &[last(a), last(b)]));
        }
        if b.ndim() != 2 {
            return Err(TypeError::Ndim { operand: 1, found: b.clone(), expected: "2 dims" });
        }
        let (k, n) =
            if self.transpose_b { (b.shape[1], b.shape[0]) } else { (b.shape[0], b.shape[1]) };
        same_size("contracted sizes", a.shape[a.ndim() - 1], k)?;
        let mut shape = leading(&a.shape);
        shape.push(n);
        Ok(TensorType { dtype, shape })
    }

    /// The operands that are added to the product.
    pub fn addends<T: Copy>(&self, operands: &[T]) -> (Option<T>, Option<T>) {
        let c = self.accumulate.then(|| operands[2]);
        (c, self.bias.then(|| operands[2 + usize::from(self.accumulate)]))
    }

    /// The GEMM on operands of these local shapes.
    pub fn gemm(&self, a: &[usize], b: &[usize]) -> Gemm {
        let (a_last, b_last) = (a[a.len() - 1], b[b.len() - 1]);
        let rows: usize = a[..a.len() - 1].iter().product();
        match (self.transpose_a, self.transpose_b) {
            (true, _) => Gemm {
                m: a_last,
                n: b_last,
                k: rows,
                a_strides: [1, a_last],
                b_strides: [b_last, 1],
            },
            (false, true) => {
                Gemm { m: rows, n: b[0], k: a_last, a_strides: [a_last, 1], b_strides: [1, b_last] }
            }
            (false, false) => Gemm {
                m: rows,
                n: b_last,
                k: a_last,
                a_strides: [a_last, 1],
                b_strides: [b_last, 1],
            },
        }
    }
}
