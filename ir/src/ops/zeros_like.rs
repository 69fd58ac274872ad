//! `zeros_like`: zeros laid out like the operand, which is not read: how an accumulator starts again.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, Linear, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity, bytes_of,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ZerosLike {}

impl OpDef for ZerosLike {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        Ok(smallvec![inputs[0].clone()])
    }

    /// The zeros of a partial sum are a partial sum of zero.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* -> *", inputs, results).linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        _inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        results[0].data.fill(T::zero());
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn by_products(&self) -> &'static [usize] {
        &[0]
    }

    fn bytes(&self, _inputs: &[TensorType], results: &[TensorType]) -> u64 {
        bytes_of(results)
    }

    fn is_zero(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(ZerosLike {}, &[&[4, 6]])]
    }
}
