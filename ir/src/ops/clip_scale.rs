//! `clip_scale`: the factor by which the optimizer multiplies gradients of the *summed* loss, and the decision whether
//! it applies them.
//!
//! The factor is one over the number of tokens, and smaller if the norm of the mean's gradient is over a limit.
//!
//! ```text
//! grad_norm = sqrt(sumsq) / n                                    n = max(count, 1)
//! scale = (1 / n) * min(1, max_norm / (grad_norm + 1e-6))        torch.nn.utils.clip_grad_norm_
//! applied = NaN if the loss, the norm or what is watched is not finite, else 0 if no token counts, else 1
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, Number, Numbers, OpDef, Real, Sample, TypeError, Types, Values, View,
    ViewMut, arity, number,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `sumsq`, `count`, the summed `loss`, and any number of others that are watched;
/// results: `scale`, `grad_norm`, `applied`; scalars.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ClipScale {
    /// The limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_norm: Option<Number>,
}

impl ClipScale {
    /// Range of `max_norm`.
    pub const MAX_NORM: RealRange = RealRange::Positive;
}

impl OpDef for ClipScale {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(&inputs[..inputs.len().min(3)], 3)?;
        (0..inputs.len()).try_for_each(|it| number(inputs, it))?;
        let res = TensorType::scalar(DType::F32);
        Ok(smallvec![res.clone(), res.clone(), res])
    }

    fn numbers(&self) -> Numbers {
        self.max_norm.iter().map(|&it| Ranged::new("max_norm", it, ClipScale::MAX_NORM)).collect()
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new(", , -> , , ", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let number = |it: usize| inputs[it].data[0].to_f64();
        let [sumsq, counted] = [0, 1].map(number);
        let count = counted.max(1.0);
        let norm = sumsq.sqrt() / count;
        let ratio = self.max_norm.map_or(1.0, |it| it.0 / (norm + 1e-6));
        // Written so that a norm that is no number gives a scale that is none.
        let clip = if ratio > 1.0 { 1.0 } else { ratio };
        results[0].data[0] = T::from_f64(clip / count);
        results[1].data[0] = T::from_f64(norm);
        let applied = match norm.is_finite() && (2..inputs.len()).all(|it| number(it).is_finite()) {
            true => f64::from(u8::from(counted > 0.0)),
            false => f64::NAN,
        };
        results[2].data[0] = T::from_f64(applied);
    }

    fn by_products(&self) -> &'static [usize] {
        &[0, 1, 2]
    }

    fn samples() -> Vec<Sample> {
        let sample = |max_norm: Option<f64>, count: Values| {
            Sample::floats(ClipScale { max_norm: max_norm.map(Number) }, &[&[], &[], &[]])
                .fill(0, Values::Positive)
                .fill(1, count)
        };
        vec![
            sample(None, Values::Positive),
            sample(Some(0.5), Values::Positive),
            sample(None, Values::Zero),
            Sample::floats(ClipScale::default(), &[&[][..]; 5])
                .fill(0, Values::Positive)
                .fill(1, Values::Positive),
        ]
    }
}
