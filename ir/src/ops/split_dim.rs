//! `split_dim`: one dimension becomes two, `(o i) -> o i`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, MergeDims, Op, OpDef, Real, Sample,
    TypeError, Types, View, ViewMut, arity, ndim_at_least,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SplitDim {
    /// The dimension to split.
    pub dim: usize,
    /// Size of the inner of the two.
    pub inner: u64,
}

impl OpDef for SplitDim {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        ndim_at_least(inputs, 0, self.dim.saturating_add(1), "more dims than `dim` says")?;
        let mut res = inputs[0].clone();
        let size = res.shape[self.dim];
        if self.inner == 0 || !size.is_multiple_of(self.inner) {
            return Err(TypeError::Multiple { what: "the split dim", size, of: self.inner });
        }
        res.shape[self.dim] = size / self.inner;
        res.shape.insert(self.dim + 1, self.inner);
        Ok(smallvec![res])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let n = inputs[0].ndim();
        let (before, after) = (letters(0..self.dim), letters(self.dim + 1..n));
        let text = format!("{before}(OI){after} -> {before}OI{after}");
        let sizes = [('O', results[0].shape[self.dim]), ('I', self.inner)];
        Factors::with_sizes(&text, &sizes, inputs, results).linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        results[0].data.copy_from_slice(inputs[0].data);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, MergeDims { dim: self.dim }, &[grad])?])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        Some(SplitDim { dim: self.dim, inner: results[0][self.dim + 1] }.into())
    }

    fn is_view(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(SplitDim { dim: 1, inner: 4 }, &[&[3, 8]]),
            Sample::floats(SplitDim { dim: 0, inner: 2 }, &[&[12, 4]]),
        ]
    }
}
