//! `add`: the sum of any number of tensors of one shape.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, Op, OpDef, Real, Sample, TypeError, Types,
    View, ViewMut, same_shape,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Add {}

impl OpDef for Add {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let Some((first, rest)) = inputs.split_first() else {
            return Err(TypeError::Arity { expected: 1, found: 0 });
        };
        if first.dtype.is_fp8() {
            let (operand, found) = (0, first.dtype);
            return Err(TypeError::DType { operand, found, expected: "f32, bf16 or i32" });
        }
        for other in rest {
            same_shape(first, other)?;
        }
        Ok(smallvec![(*first).clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* -> *", inputs, results).linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        for (i, out) in results[0].data.iter_mut().enumerate() {
            *out = inputs.iter().map(|it| it.data[i]).sum();
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let grad = cx.grad(0);
        Ok(cx.wanted.iter().map(|&wanted| wanted.then_some(grad)).collect())
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn without(&self, _operand: usize) -> Option<Op> {
        Some(self.clone().into())
    }

    fn is_map(&self) -> bool {
        true
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(Add {}, &[&[4, 6], &[4, 6]]),
            Sample::floats(Add {}, &[&[8], &[8], &[8]]),
        ]
    }
}
