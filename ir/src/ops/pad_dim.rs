//! `pad_dim`: the operand placed into zeros along one dimension: the gradient of `slice_dim`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::slice_dim::resized;
use crate::ops::{
    Factors, GradCx, GradError, Grads, LocalCx, OpDef, Real, Sample, SliceDim, TypeError, Types,
    View, ViewMut, arity, ndim_at_least,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PadDim {
    /// The dimension, which is whole.
    pub dim: usize,
    /// Where the operand starts in the result.
    pub start: u64,
    /// Size of the dimension in the result.
    pub size: u64,
}

impl OpDef for PadDim {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        ndim_at_least(inputs, 0, self.dim.saturating_add(1), "more dims than `dim` says")?;
        let mut res = inputs[0].clone();
        let end = self.start.checked_add(res.shape[self.dim]);
        if end.is_none_or(|end| end > self.size) {
            return Err(TypeError::Attribute { why: "the operand must end inside the padded dim" });
        }
        res.shape[self.dim] = self.size;
        Ok(smallvec![res])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        resized(self.dim, inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let inner: usize = x.shape[self.dim + 1..].iter().product();
        let (from, to) = (x.shape[self.dim] * inner, self.size as usize * inner);
        let first = self.start as usize * inner;
        results[0].data.fill(T::zero());
        let rows =
            results[0].data.chunks_exact_mut(to.max(1)).zip(x.data.chunks_exact(from.max(1)));
        for (out, x) in rows {
            out[first..][..from].copy_from_slice(x);
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let len = cx.ty(cx.inputs[0]).shape[self.dim];
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, SliceDim { dim: self.dim, start: self.start, len }, &[grad])?])
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(PadDim { dim: 1, start: 2, size: 6 }, &[&[4, 3, 2]]),
            Sample::floats(PadDim { dim: 0, start: 0, size: 3 }, &[&[2, 5]]),
        ]
    }
}
