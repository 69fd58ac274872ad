//! `delayed_scale`: the scale of a tensor under delayed scaling as its state holds it, and its inverse.
//!
//! States start as zeros and TransformerEngine's scales as ones, so a scale of 0 is 1.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Real, Sample, StandsFor, TypeError, Types, Values, View,
    ViewMut, arity, number,
};
use crate::types::TensorType;

/// See the [module docs](self). Operand: the state, an f32 scalar; results: the scale, its inverse.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DelayedScale {}

impl OpDef for DelayedScale {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        number(inputs, 0)?;
        Ok(smallvec![inputs[0].clone(), inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new(" -> , ", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let scale = inputs[0].data[0];
        let scale = if scale == T::zero() { T::one() } else { scale };
        results[0].data[0] = scale;
        results[1].data[0] = T::one() / scale;
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Scale
    }

    fn batches_with(&self, _other: &Self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(DelayedScale {}, &[&[]]).fill(0, Values::Positive)]
    }
}
