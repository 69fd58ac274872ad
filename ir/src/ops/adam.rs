//! `adam`: one step of Adam in which weight decay is a part of the gradient, in PyTorch's
//! arithmetic. Otherwise as [`adamw`](super::adamw), with `g = g * scale + weight_decay * p`.

use serde::{Deserialize, Serialize};

use crate::ops::adamw::{
    adam_factors, adam_numbers, adam_reference, adam_samples, adam_trains, infer_adam,
};
use crate::ops::{
    Amaxes, Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample, Trains, TypeError,
    Types, View, ViewMut, is_default,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `p`, `m`, `v`, `t`, `g`, `scale`, `lr`, `applied`; results: `p`,
/// `m`, `v`, `t`, and `p` in the type `compute` if there is one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Adam {
    /// Decay rate of the first moment.
    pub beta1: Number,
    /// Decay rate of the second moment.
    pub beta2: Number,
    /// Added to the root of the second moment; not 0, or padding would not stay zero.
    pub eps: Number,
    /// Decay, as a gradient.
    #[serde(default, skip_serializing_if = "is_default")]
    pub weight_decay: Number,
    /// Also returns the new `p` in this type, for what computes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<DType>,
    /// Also returns the amax of the new `p`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

impl OpDef for Adam {
    const ORIGINS: &'static [Origin] = &[Origin::Update];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        infer_adam(inputs, self.compute, &self.amax)
    }

    fn numbers(&self) -> Numbers {
        adam_numbers([self.beta1, self.beta2, self.eps, self.weight_decay])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        adam_factors(inputs, results, &self.amax)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let decay = T::from_f64(self.weight_decay.0);
        let numbers = [self.beta1, self.beta2, self.eps];
        adam_reference(numbers, &self.amax, inputs, results, |step, [p, m, v, g]| {
            let (m, v, fall) = step.next(m, v, g * step.scale + decay * p);
            [p - fall, m, v]
        });
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 1), (2, 2), (3, 3)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(Adam { amax, ..self.clone() }.into())
    }

    fn trains(&self) -> Option<Trains> {
        adam_trains(false, [self.beta1, self.beta2, self.eps, self.weight_decay])
    }

    fn batches_with(&self, other: &Self) -> bool {
        *self == Adam { weight_decay: self.weight_decay, ..other.clone() }
    }

    fn casts_to(&self) -> Option<DType> {
        self.compute
    }

    fn samples() -> Vec<Sample> {
        adam_samples(|compute, amax| Adam {
            beta1: 0.9.into(),
            beta2: 0.95.into(),
            eps: 1e-8.into(),
            weight_decay: 0.1.into(),
            compute,
            amax,
        })
    }
}
