//! `scale`: a tensor times a number that is known when compiling.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, Number, Numbers, OpDef, Real, Sample,
    TypeError, Types, View, ViewMut, arity, floats,
};
use crate::range::{Ranged, RealRange};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Scale {
    /// The number.
    pub factor: Number,
}

impl OpDef for Scale {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("factor", self.factor, RealRange::Finite)]
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
        let factor = T::from_f64(self.factor.0);
        for (out, &x) in results[0].data.iter_mut().zip(inputs[0].data) {
            *out = factor * x;
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, self.clone(), &[grad])?])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn is_map(&self) -> bool {
        true
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        let op = Scale { factor: 0.125.into() };
        vec![Sample::floats(op.clone(), &[&[4, 6]]), Sample::floats(op, &[&[5]])]
    }
}
