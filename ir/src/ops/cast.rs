//! `cast`: the same numbers in another element type, rounded to nearest even.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, Linear, LocalCx, OpDef, Real, Sample, TypeError, Types,
    View, ViewMut, arity,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cast {
    /// Element type of the result.
    pub to: DType,
}

impl OpDef for Cast {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        if !self.to.is_float() && inputs[0].dtype.is_float() {
            return Err(TypeError::Attribute { why: "real numbers do not become integers" });
        }
        Ok(smallvec![inputs[0].with_dtype(self.to)])
    }

    /// Widening is exact, hence linear; narrowing rounds, so the sum comes first.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let widens = self.to.bytes() >= inputs[0].dtype.bytes();
        let linear = if widens { Linear::Joint } else { Linear::No };
        Factors::new("* -> *", inputs, results).linear(linear)
    }

    /// Rounding happens where the caller stores the result.
    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        results[0].data.copy_from_slice(inputs[0].data);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let to = cx.ty(cx.inputs[0]).dtype;
        let grad = cx.grad(0);
        Ok(smallvec![cx.op(0, Cast { to }, &[grad])?])
    }

    fn is_map(&self) -> bool {
        true
    }

    fn casts_to(&self) -> Option<DType> {
        Some(self.to)
    }

    fn is_form(&self) -> bool {
        true
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(Cast { to: DType::F32 }, &[&[4, 6]])]
    }
}
