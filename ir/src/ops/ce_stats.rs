//! `ce_stats`: what the cross entropy needs of each token's logits: the sum of their exponentials
//! and the logit of the label. Second part of the cross entropy, see [`ce_max`](super::ce_max).
//!
//! ```text
//! sumexp[*] = sum(exp(logits[* v] - m))
//! target[*] = (1 - eps) * logits[label] + eps / V * sum(logits)          eps: label smoothing
//! ```
//!
//! Both are sums over the vocabulary, of which a rank may hold any contiguous part. A label outside
//! the vocabulary adds nothing to `target`: if it is the ignored one, `ce_loss` leaves the token out
//! of everything; any other is an error that the runtime reports before the step (report C25).

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    BoundAt, Bounds, CeStatsGrad, Factors, GradCx, GradError, Grads, LocalCx, LookUp, Number,
    Numbers, Op, OpDef, Real, Sample, TypeError, Types, Values, View, ViewMut, arity, floats,
    integers, is_default, leading, ndim_at_least, per_row, single,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `logits`, `labels`, `m`; results: `sumexp`, `target`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct CeStats {
    /// The part of the label that is spread over the whole vocabulary.
    #[serde(skip_serializing_if = "is_default")]
    pub label_smoothing: Number,
}

impl CeStats {
    /// Range of `label_smoothing`.
    pub const LABEL_SMOOTHING: RealRange = RealRange::Fraction;
}

impl OpDef for CeStats {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 3)?;
        floats(inputs, 0)?;
        integers(inputs, 1)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        per_row(inputs[0], inputs[1])?;
        per_row(inputs[0], inputs[2])?;
        single(inputs, 2)?;
        let res = TensorType { dtype: DType::F32, shape: leading(&inputs[0].shape) };
        Ok(smallvec![res.clone(), res])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("label_smoothing", self.label_smoothing, CeStats::LABEL_SMOOTHING)]
    }

    /// The exponentials of a padded row are not zero; those of padded columns are left out.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* v, *, * -> *, *", inputs, results).even("*")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let [logits, labels, max] = inputs else { unreachable!("three operands") };
        let [sumexp, target] = results else { unreachable!("two results") };
        let bound = cx.bounds[0];
        let eps = self.label_smoothing.0;
        let spread = eps / bound.size as f64;
        for (i, row) in logits.data.chunks_exact(logits.last().max(1)).enumerate() {
            let row = &row[..bound.extent as usize];
            let max = max.data[i];
            let sum: f64 = row.iter().map(|&it| (it - max).exp().to_f64()).sum();
            sumexp.data[i] = T::from_f64(sum);
            let label = bound.local(labels.int(i)).map_or(0.0, |it| row[it].to_f64());
            let all: f64 = if eps == 0.0 { 0.0 } else { row.iter().map(|&it| it.to_f64()).sum() };
            target.data[i] = T::from_f64((1.0 - eps) * label + spread * all);
        }
    }

    /// Returns no gradient for `m`: it cancels with the gradient from `ce_loss` for the same `m`, see
    /// [`ce_max`](super::ce_max).
    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let cancels = cx.grads[0].is_none_or(|it| {
            let of = cx.producer(it);
            of.is_some_and(|it| matches!(it.op, Op::CeLossGrad(_)) && it.inputs[0] == cx.results[0])
        });
        if cx.wanted[2] && !cancels {
            return Err(cx.shift_stays(2));
        }
        let (logits, labels, max) = (cx.inputs[0], cx.inputs[1], cx.inputs[2]);
        let (dsumexp, dtarget) = (cx.grad_or_zero(0)?, cx.grad_or_zero(1)?);
        let op = CeStatsGrad { label_smoothing: self.label_smoothing };
        let dlogits = cx.op(0, op, &[logits, labels, max, dsumexp, dtarget])?;
        Ok(smallvec![dlogits, None, None])
    }

    fn bounds(&self, inputs: &[&TensorType]) -> Bounds {
        smallvec![BoundAt::Input(0, inputs[0].ndim() - 1)]
    }

    fn constants(&self) -> &'static [usize] {
        &[2]
    }

    fn looks_up(&self, inputs: &[&TensorType]) -> Option<LookUp> {
        inputs[0].shape.last().map(|&size| LookUp { ids: 1, table: 0, size })
    }

    fn samples() -> Vec<Sample> {
        let smooth = CeStats { label_smoothing: 0.1.into() };
        vec![
            Sample::floats(CeStats::default(), &[&[2, 4, 6], &[2, 4], &[2, 4]])
                .fill(1, Values::Ids(6)),
            Sample::floats(smooth, &[&[4, 5], &[4], &[4]]).fill(1, Values::Ids(5)),
        ]
    }
}
