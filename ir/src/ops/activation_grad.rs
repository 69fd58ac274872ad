//! `activation_grad`: a gradient times the slope of an activation, `dy, x -> dx`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationKind, Factors, LocalCx, OpDef, Origin, Real, Sample, TypeError, Types, View, ViewMut,
    arity, same_shape,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `dy`, `x`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ActivationGrad {
    /// The function.
    pub kind: ActivationKind,
}

impl ActivationGrad {
    /// That of a function, in the type of `x`.
    pub fn new(kind: ActivationKind) -> ActivationGrad {
        ActivationGrad { kind }
    }
}

impl OpDef for ActivationGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        same_shape(inputs[0], inputs[1])?;
        Ok(smallvec![inputs[1].clone()])
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
        for (out, (&dy, &x)) in results[0].data.iter_mut().zip(operands) {
            *out = dy * self.kind.slope(x);
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn is_map(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind| Sample::floats(ActivationGrad::new(kind), &[&[4, 5], &[4, 5]]);
        ActivationKind::ALL.map(sample).to_vec()
    }
}
