//! `merge_dims`: two neighbouring dimensions become one, `o i -> (o i)`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, OpDef, Real, Sample, SplitDim, TypeError,
    Types, View, ViewMut, arity, ndim_at_least,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MergeDims {
    /// The outer of the two dimensions.
    pub dim: usize,
}

impl OpDef for MergeDims {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        ndim_at_least(inputs, 0, self.dim.saturating_add(2), "a dim after `dim`")?;
        let mut res = inputs[0].clone();
        let inner = res.shape.remove(self.dim + 1);
        res.shape[self.dim] *= inner;
        Ok(smallvec![res])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let n = inputs[0].ndim();
        let (before, after) = (letters(0..self.dim), letters(self.dim + 2..n));
        let text = format!("{before}OI{after} -> {before}(OI){after}");
        Factors::new(&text, inputs, results).linear(Linear::Joint)
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
        let inner = cx.ty(cx.inputs[0]).shape[self.dim + 1];
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, SplitDim { dim: self.dim, inner }, &[grad])?])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn is_view(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(MergeDims { dim: 1 }, &[&[3, 2, 4]]),
            Sample::floats(MergeDims { dim: 0 }, &[&[6, 2, 4]]),
        ]
    }
}
