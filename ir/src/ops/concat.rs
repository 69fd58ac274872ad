//! `concat`: tensors one after the other along one dimension, which is whole.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, OpDef, Real, Sample, SliceDim, TypeError,
    Types, View, ViewMut, ndim_at_least, same_shape,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Concat {
    /// The dimension.
    pub dim: usize,
}

impl OpDef for Concat {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let Some((&first, rest)) = inputs.split_first() else {
            return Err(TypeError::Arity { expected: 1, found: 0 });
        };
        ndim_at_least(inputs, 0, self.dim.saturating_add(1), "more dims than `dim` says")?;
        let mut res = first.clone();
        for (i, &other) in rest.iter().enumerate() {
            ndim_at_least(inputs, i + 1, self.dim.saturating_add(1), "more dims than `dim` says")?;
            let mut aligned = other.clone();
            aligned.shape[self.dim] = first.shape[self.dim];
            same_shape(first, &aligned)?;
            res.shape[self.dim] += other.shape[self.dim];
        }
        Ok(smallvec![res])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let (before, after) = (letters(0..self.dim), letters(self.dim + 1..results[0].ndim()));
        // Each operand has its own size along the dimension, hence its own factor.
        let own: Vec<char> = ('α'..).take(inputs.len()).collect();
        let operands: Vec<String> = own.iter().map(|it| format!("{before}{it}{after}")).collect();
        let text = format!("{} -> {before}T{after}", operands.join(","));
        let whole: String = own.iter().chain(&['T']).collect();
        Factors::new(&text, inputs, results).whole(&whole).linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let out = &mut results[0];
        let row: usize = out.shape[self.dim..].iter().product();
        let mut first = 0;
        for x in inputs {
            let n: usize = x.shape[self.dim..].iter().product();
            let rows = out.data.chunks_exact_mut(row.max(1)).zip(x.data.chunks_exact(n.max(1)));
            for (out, x) in rows {
                out[first..][..n].copy_from_slice(x);
            }
            first += n;
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let grad = cx.grad(0);
        let mut res = Grads::new();
        let mut start = 0;
        for i in 0..cx.inputs.len() {
            let len = cx.ty(cx.inputs[i]).shape[self.dim];
            res.push(match cx.wanted[i] {
                true => cx.op(i, SliceDim { dim: self.dim, start, len }, &[grad])?,
                false => None,
            });
            start += len;
        }
        Ok(res)
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(Concat { dim: 1 }, &[&[4, 2, 2], &[4, 3, 2], &[4, 1, 2]]),
            Sample::floats(Concat { dim: 0 }, &[&[3, 5], &[3, 5]]),
        ]
    }
}
