//! `ce_stats_grad`: gradient of `ce_stats` in the logits.
//!
//! ```text
//! dlogits = dsumexp * exp(logits - m) + dtarget * ((1 - eps) * [column is the label] + eps / V)
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    BoundAt, Bounds, CeStats, Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample,
    TypeError, Types, Values, View, ViewMut, arity, integers, is_default, ndim_at_least, per_row,
    single,
};
use crate::range::Ranged;
use crate::types::TensorType;

/// See the [module docs](self). Operands: `logits`, `labels`, `m`, `dsumexp`, `dtarget`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct CeStatsGrad {
    /// The part of the label that is spread over the whole vocabulary.
    #[serde(skip_serializing_if = "is_default")]
    pub label_smoothing: Number,
}

impl OpDef for CeStatsGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 5)?;
        integers(inputs, 1)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        for operand in &inputs[1..] {
            per_row(inputs[0], operand)?;
        }
        (2..5).try_for_each(|it| single(inputs, it))?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("label_smoothing", self.label_smoothing, CeStats::LABEL_SMOOTHING)]
    }

    /// Padded rows have zero gradients, padded columns are written as zero.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* v, *, *, *, * -> * v", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let [logits, labels, max, dsumexp, dtarget] = inputs else { unreachable!("five operands") };
        let bound = cx.bounds[0];
        let (n, extent) = (logits.last().max(1), bound.extent as usize);
        let eps = self.label_smoothing.0;
        let (picked, spread) = (T::from_f64(1.0 - eps), T::from_f64(eps / bound.size as f64));
        let rows = results[0].data.chunks_exact_mut(n).zip(logits.data.chunks_exact(n));
        for (i, (out, row)) in rows.enumerate() {
            let (max, dsumexp, dtarget) = (max.data[i], dsumexp.data[i], dtarget.data[i]);
            for (out, &x) in out[..extent].iter_mut().zip(row) {
                *out = dsumexp * (x - max).exp() + dtarget * spread;
            }
            out[extent..].fill(T::zero());
            if let Some(label) = bound.local(labels.int(i)) {
                out[label] += dtarget * picked;
            }
        }
    }

    fn bounds(&self, inputs: &[&TensorType]) -> Bounds {
        smallvec![BoundAt::Input(0, inputs[0].ndim() - 1)]
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn samples() -> Vec<Sample> {
        let smooth = CeStatsGrad { label_smoothing: 0.1.into() };
        vec![
            Sample::floats(
                CeStatsGrad::default(),
                &[&[2, 4, 6], &[2, 4], &[2, 4], &[2, 4], &[2, 4]],
            )
            .fill(1, Values::Ids(6)),
            Sample::floats(smooth, &[&[4, 5], &[4], &[4], &[4], &[4]]).fill(1, Values::Ids(5)),
        ]
    }
}
