//! `cross_entropy`: the loss of tokens and its gradient in the logits, in one go: all parts of the
//! cross entropy (see [`ce_max`](super::ce_max)) and of its gradient, where the summed loss is what is
//! differentiated.
//!
//! ```text
//! m = ce_max logits
//! sumexp, target = ce_stats logits, labels, m
//! loss_sum, count = ce_loss m, sumexp, target, labels
//! dsumexp, dtarget = ce_loss_grad sumexp, labels, 1
//! dlogits = ce_stats_grad logits, labels, m, dsumexp, dtarget
//! ```
//!
//! The gradient takes the place of the logits, so that they are in memory once. `fuse` makes it, after
//! gradients. A token's whole vocabulary must be on one rank: where it is not, numbers are exchanged
//! between the parts.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    CeLoss, CeLossGrad, CeMax, CeStats, CeStatsGrad, Factors, LocalBound, LocalCx, LookUp, Number,
    Numbers, OpDef, Real, Sample, Tensor, TypeError, Types, Values, View, ViewMut, arity, floats,
    integers, is_default, ndim_at_least, per_row,
};
use crate::range::Ranged;
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `logits`, `labels`; results: `loss_sum` and `count`, f32
/// scalars, and `dlogits`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CrossEntropy {
    /// Label of tokens that do not count.
    pub ignore_index: i64,
    /// The part of the label that is spread over the whole vocabulary.
    #[serde(default, skip_serializing_if = "is_default")]
    pub label_smoothing: Number,
}

impl OpDef for CrossEntropy {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        floats(inputs, 0)?;
        integers(inputs, 1)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        per_row(inputs[0], inputs[1])?;
        let scalar = TensorType::scalar(DType::F32);
        Ok(smallvec![scalar.clone(), scalar, inputs[0].clone()])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("label_smoothing", self.label_smoothing, CeStats::LABEL_SMOOTHING)]
    }

    /// A padded token would count.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* v, * -> , , * v", inputs, results).even("*").whole("v")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let &[logits, labels] = inputs else { unreachable!("two operands") };
        let CrossEntropy { ignore_index, label_smoothing } = *self;
        let size = logits.last() as u64;
        let cx = &LocalCx { bounds: &[LocalBound { start: 0, extent: size, size }] };
        let per_token = || Tensor::<T>::zeros(labels.shape);
        let [mut m, mut sumexp, mut target] = [per_token(), per_token(), per_token()];
        let [mut dsumexp, mut dtarget] = [per_token(), per_token()];
        let dloss = View { shape: &[], data: &[T::one()] };

        CeMax {}.reference(&[logits], &mut [m.view_mut()], cx);
        let stats = &mut [sumexp.view_mut(), target.view_mut()];
        CeStats { label_smoothing }.reference(&[logits, labels, m.view()], stats, cx);
        let parts = [m.view(), sumexp.view(), target.view(), labels];
        CeLoss { ignore_index }.reference(&parts, &mut results[..2], cx);
        let grads = &mut [dsumexp.view_mut(), dtarget.view_mut()];
        CeLossGrad { ignore_index }.reference(&[sumexp.view(), labels, dloss], grads, cx);
        let parts = [logits, labels, m.view(), dsumexp.view(), dtarget.view()];
        CeStatsGrad { label_smoothing }.reference(&parts, &mut results[2..], cx);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(2, 0)]
    }

    fn first_gradients(&self) -> &'static [usize] {
        &[2]
    }

    fn is_fused(&self) -> bool {
        true
    }

    fn looks_up(&self, inputs: &[&TensorType]) -> Option<LookUp> {
        inputs[0].shape.last().map(|&size| LookUp { ids: 1, table: 0, size })
    }

    fn samples() -> Vec<Sample> {
        let sample = |ignore_index, eps: f64, shape: &[u64]| {
            let op = CrossEntropy { ignore_index, label_smoothing: eps.into() };
            let (v, rows) = shape.split_last().expect("logits have a vocabulary");
            Sample::floats(op, &[shape, rows]).fill(1, Values::Ids(*v as u32))
        };
        vec![sample(-100, 0.0, &[2, 4, 6]), sample(1, 0.1, &[6, 5])]
    }
}
