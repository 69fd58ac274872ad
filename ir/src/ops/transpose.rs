//! `transpose`: dimensions in another order; dimension `i` of the result is `perm[i]` of the operand.

use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

use crate::ops::factors::letters;
use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, OpDef, Origin, Real, Sample, StandsFor,
    TypeError, Types, View, ViewMut, arity,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Transpose {
    /// Which dimension of the operand each dimension of the result is.
    pub perm: Vec<usize>,
}

impl OpDef for Transpose {
    const ORIGINS: &'static [Origin] = &[Origin::Model, Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        let x = inputs[0];
        let mut sorted = self.perm.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..x.ndim()) {
            return Err(TypeError::Attribute { why: "`perm` must name every dim once" });
        }
        let shape = self.perm.iter().map(|&it| x.shape[it]).collect();
        Ok(smallvec![TensorType { dtype: x.dtype, shape }])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let from = letters(0..inputs[0].ndim());
        let to: String = self.perm.iter().map(|&it| letters(it..it + 1)).collect();
        Factors::new(&format!("{from} -> {to}"), inputs, results).linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (x, out) = (inputs[0], &mut results[0]);
        // Stride in the operand of each dimension of the result.
        let strides: SmallVec<[usize; 4]> =
            self.perm.iter().map(|&it| x.shape[it + 1..].iter().product()).collect();
        let mut index: SmallVec<[usize; 4]> = smallvec![0; out.shape.len()];
        let mut at = 0;
        for out_element in out.data.iter_mut() {
            *out_element = x.data[at];
            for dim in (0..index.len()).rev() {
                index[dim] += 1;
                at += strides[dim];
                if index[dim] < out.shape[dim] {
                    break;
                }
                at -= index[dim] * strides[dim];
                index[dim] = 0;
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let mut perm = vec![0; self.perm.len()];
        self.perm.iter().enumerate().for_each(|(to, &from)| perm[from] = to);
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, Transpose { perm }, &[grad])?])
    }

    fn stands_for(&self, inputs: &[&TensorType]) -> StandsFor {
        match inputs[0].dtype.is_fp8() {
            true => StandsFor::Operand,
            false => StandsFor::Itself,
        }
    }

    fn is_form(&self) -> bool {
        true
    }

    fn permutation(&self) -> Option<&[usize]> {
        Some(&self.perm)
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(Transpose { perm: vec![1, 0] }, &[&[4, 5]]),
            Sample::floats(Transpose { perm: vec![0, 3, 1, 2] }, &[&[2, 3, 4, 2]]),
        ]
    }
}
