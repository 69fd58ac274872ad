//! `mul`: the product of two tensors of one shape, element by element.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, LocalCx, OpDef, Real, Sample, TypeError, Types, View,
    ViewMut, arity, same_type,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mul {}

impl OpDef for Mul {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        same_type(inputs, 1)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, * -> *", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let operands = inputs[0].data.iter().zip(inputs[1].data);
        for (out, (&x, &y)) in results[0].data.iter_mut().zip(operands) {
            *out = x * y;
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (x, y, grad) = (cx.inputs[0], cx.inputs[1], cx.grad(0));
        let mut res: Grads = smallvec![None, None];
        if cx.wanted[0] {
            res[0] = cx.op(0, Mul {}, &[grad, y])?;
        }
        if cx.wanted[1] {
            res[1] = cx.op(1, Mul {}, &[grad, x])?;
        }
        Ok(res)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn is_map(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(Mul {}, &[&[4, 6], &[4, 6]]), Sample::floats(Mul {}, &[&[5], &[5]])]
    }
}
