//! `quant_scale`: the scale of FP8 codes from the amax of what they stand for, and its inverse.
//!
//! TransformerEngine's current scaling: `scale = max / amax`, where an amax of 0, infinity or NaN gives a scale
//! of 1 and one that overflows the largest finite one. Codes are `x * scale`, and `x` is a code times the
//! inverse.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample, StandsFor, TypeError, Types,
    Values, View, ViewMut, arity, floats, is_default,
};
use crate::quant::ScaleRule;
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Results: the scale and its inverse, f32 of the operand's shape, whatever its type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantScale {
    /// FP8 type of the codes.
    pub to: DType,
    /// Rounds scales down to a power of two.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pow2: bool,
    /// An amax below this counts as this.
    #[serde(default, skip_serializing_if = "is_default")]
    pub epsilon: Number,
}

impl QuantScale {
    /// Range of `epsilon`.
    pub const EPSILON: RealRange = RealRange::NotNegative;
}

impl OpDef for QuantScale {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        if !self.to.is_fp8() {
            return Err(TypeError::Attribute { why: "codes are e4m3 or e5m2" });
        }
        let res = inputs[0].with_dtype(DType::F32);
        Ok(smallvec![res.clone(), res])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("epsilon", self.epsilon, QuantScale::EPSILON)]
    }

    /// Padding would become 1.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* -> *, *", inputs, results).even("*")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let format = self.to.fp8().expect("`infer` wants codes");
        let (pow2, eps) = (self.pow2, self.epsilon.0 as f32);
        let rule = ScaleRule { pow2, eps, ..ScaleRule::tensor(format) };
        for (i, &amax) in inputs[0].data.iter().enumerate() {
            let scale = rule.scale(amax.to_f64() as f32);
            results[0].data[i] = T::from_f64(f64::from(scale));
            results[1].data[i] = T::from_f64(f64::from(1.0 / scale));
        }
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Scale
    }

    fn batches_with(&self, other: &Self) -> bool {
        self == other
    }

    fn samples() -> Vec<Sample> {
        let e4m3 = QuantScale { to: DType::E4M3, pow2: false, epsilon: Number::default() };
        let pow2 = QuantScale { to: DType::E5M2, pow2: true, epsilon: Number(0.75) };
        vec![
            Sample::floats(e4m3, &[&[]]).fill(0, Values::Positive),
            Sample::floats(pow2, &[&[4]]).fill(0, Values::Positive),
        ]
    }
}
