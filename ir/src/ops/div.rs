//! `div`: the quotient of two tensors of one shape, element by element.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, LocalCx, Mul, OpDef, Real, Sample, Scale, TypeError, Types,
    Values, View, ViewMut, arity, floats, same_type,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Div {}

impl OpDef for Div {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        floats(inputs, 0)?;
        same_type(inputs, 1)?;
        Ok(smallvec![inputs[0].clone()])
    }

    /// Padding would be 0 / 0.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, * -> *", inputs, results).even("*")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let operands = inputs[0].data.iter().zip(inputs[1].data);
        for (out, (&x, &y)) in results[0].data.iter_mut().zip(operands) {
            *out = x / y;
        }
    }

    /// `d(x / y) = dx / y - (x / y) dy / y`.
    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (y, out, grad) = (cx.inputs[1], cx.results[0], cx.grad(0));
        let quotient = cx.op(0, Div {}, &[grad, y])?;
        let mut res: Grads = smallvec![quotient, None];
        if let (true, Some(quotient)) = (cx.wanted[1], quotient) {
            let name = format!("{}.part", cx.grad_name(1));
            let product = cx.builder.op(&name, Mul {}, &[quotient, out])?;
            res[1] = cx.op(1, Scale { factor: (-1.0).into() }, &[product])?;
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
        vec![
            Sample::floats(Div {}, &[&[4, 6], &[4, 6]]).fill(1, Values::Positive),
            Sample::floats(Div {}, &[&[], &[]]).fill(1, Values::Positive),
        ]
    }
}
