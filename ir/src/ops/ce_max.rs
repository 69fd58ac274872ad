//! `ce_max`: the largest logit of each token, `[* v] -> [*]`; first part of the cross entropy.
//!
//! ```text
//! m = ce_max(logits)                            max over v
//! sumexp, target = ce_stats(logits, labels, m)  sums over v
//! loss_sum, count = ce_loss(m, sumexp, target, labels)
//! ```
//!
//! Where the vocabulary is sharded, each part is a partial result, and what is exchanged are three
//! numbers per token. The loss `m + ln(sum(exp(logits - m))) - target` does not depend on `m`
//! (raising it by `e` adds `e` and takes `ln(exp(e))` away), so every part treats `m` as a constant:
//! the two gradients that it would get cancel exactly. If another op reads `m` or `sumexp`, the
//! gradients do not cancel, and autodiff reports an error.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    BoundAt, Bounds, Factors, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity,
    floats, leading, ndim_at_least,
};
use crate::placement::ReduceOp;
use crate::types::{DType, TensorType};

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CeMax {}

impl OpDef for CeMax {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        Ok(smallvec![TensorType { dtype: DType::F32, shape: leading(&inputs[0].shape) }])
    }

    /// A rank that holds no column gives minus infinity, also in a padded row.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* v -> *", inputs, results).even("*").reduce(0, ReduceOp::Max)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let n = cx.bounds[0].extent as usize;
        for (out, row) in results[0].data.iter_mut().zip(x.data.chunks_exact(x.last().max(1))) {
            *out = row[..n].iter().fold(T::neg_infinity(), |max, &it| max.max(it));
        }
    }

    fn bounds(&self, inputs: &[&TensorType]) -> Bounds {
        smallvec![BoundAt::Input(0, inputs[0].ndim() - 1)]
    }

    fn by_products(&self) -> &'static [usize] {
        &[0]
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(CeMax {}, &[&[2, 4, 6]]), Sample::floats(CeMax {}, &[&[4, 5]])]
    }
}
