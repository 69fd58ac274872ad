//! `slice_dim`: `len` entries of one dimension, from `start` on. The dimension is whole.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, OpDef, PadDim, Real, Sample, TypeError,
    Types, View, ViewMut, arity, bytes_of, ndim_at_least,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SliceDim {
    /// The dimension.
    pub dim: usize,
    /// The first entry kept.
    pub start: u64,
    /// How many are kept.
    pub len: u64,
}

/// Factors of an op that changes the size of dimension `dim` only, which is whole.
pub(crate) fn resized(dim: usize, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
    let (before, after) = (letters(0..dim), letters(dim + 1..inputs[0].ndim()));
    let text = format!("{before}F{after} -> {before}T{after}");
    Factors::new(&text, inputs, results).whole("FT").linear(Linear::Joint)
}

impl OpDef for SliceDim {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        ndim_at_least(inputs, 0, self.dim.saturating_add(1), "more dims than `dim` says")?;
        let mut res = inputs[0].clone();
        let end = self.start.checked_add(self.len);
        if end.is_none_or(|end| end > res.shape[self.dim]) {
            return Err(TypeError::Attribute { why: "the slice must end inside the dim" });
        }
        res.shape[self.dim] = self.len;
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
        let (from, to) = (x.shape[self.dim] * inner, self.len as usize * inner);
        let first = self.start as usize * inner;
        let rows =
            results[0].data.chunks_exact_mut(to.max(1)).zip(x.data.chunks_exact(from.max(1)));
        for (out, x) in rows {
            out.copy_from_slice(&x[first..][..to]);
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let size = cx.ty(cx.inputs[0]).shape[self.dim];
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, PadDim { dim: self.dim, start: self.start, size }, &[grad])?])
    }

    fn bytes(&self, _inputs: &[TensorType], results: &[TensorType]) -> u64 {
        2 * bytes_of(results)
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(SliceDim { dim: 1, start: 2, len: 3 }, &[&[4, 6, 2]]),
            Sample::floats(SliceDim { dim: 0, start: 0, len: 2 }, &[&[3, 5]]),
        ]
    }
}
