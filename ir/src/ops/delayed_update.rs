//! `delayed_update`: takes an amax into the history of a tensor under delayed scaling, and makes its next
//! scale.
//!
//! The arithmetic of TransformerEngine's fused update (`quant::delayed`): an amax of 0 changes nothing.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Real, Sample, StandsFor, TypeError, Types, Values, View,
    ViewMut, arity, floats, is_default, ndim, number, scalar, single,
};
use crate::quant::{AmaxAlgo, Delayed};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: the history (f32, oldest first behind a slot that is free), the amax
/// since the last update (f32 or bf16), the scale's state; results: the next history, the next scale.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DelayedUpdate {
    /// FP8 type of the codes.
    pub to: DType,
    /// Scales are 2^margin below what the amax asks for.
    #[serde(default, skip_serializing_if = "is_default")]
    pub margin: i32,
    /// Which amax of the history counts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub algo: AmaxAlgo,
}

impl OpDef for DelayedUpdate {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 3)?;
        ndim(inputs, 0, 1, "1 dim")?;
        if inputs[0].shape[0] == 0 {
            return Err(TypeError::Attribute { why: "a history has at least one amax" });
        }
        scalar(inputs, 1)?;
        floats(inputs, 1)?;
        number(inputs, 2)?;
        single(inputs, 0)?;
        if !(-64..=64).contains(&self.margin) {
            return Err(TypeError::Attribute { why: "a margin is at most 64" });
        }
        if !self.to.is_fp8() {
            return Err(TypeError::Attribute { why: "codes are e4m3 or e5m2" });
        }
        Ok(smallvec![inputs[0].clone(), inputs[2].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("h, , -> h, ", inputs, results).whole("h")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let mut history: Vec<f32> = inputs[0].data.iter().map(|&it| it.to_f64() as f32).collect();
        let number = |i: usize| inputs[i].data[0].to_f64() as f32;
        let previous = if number(2) == 0.0 { 1.0 } else { number(2) };
        let format = self.to.fp8().expect("`infer` wants codes");
        let rule = Delayed { format, margin: self.margin, algo: self.algo };
        let scale = rule.update(&mut history, number(1), previous);
        for (out, it) in results[0].data.iter_mut().zip(history) {
            *out = T::from_f64(f64::from(it));
        }
        results[1].data[0] = T::from_f64(f64::from(scale));
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 2)]
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Scale
    }

    fn batches_with(&self, other: &Self) -> bool {
        self == other
    }

    fn history(&self) -> Option<usize> {
        Some(1)
    }

    fn samples() -> Vec<Sample> {
        let op = |algo| DelayedUpdate { to: DType::E4M3, margin: 0, algo };
        let sample = |algo| {
            let res = Sample::floats(op(algo), &[&[4], &[], &[]]);
            (0..3).fold(res, |res, i| res.fill(i, Values::Positive))
        };
        vec![sample(AmaxAlgo::Max), sample(AmaxAlgo::MostRecent)]
    }
}
