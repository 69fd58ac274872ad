//! `ce_loss`: the summed loss of all tokens that count, and their number. Last part of the cross
//! entropy, see [`ce_max`](super::ce_max).
//!
//! ```text
//! loss_sum = sum over tokens with label != ignore_index of m + ln(sumexp) - target
//! ```
//!
//! The mean is taken over the whole step, when all micro-batches and ranks have been counted.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    CeLossGrad, Factors, GradCx, GradError, Grads, LocalCx, Op, OpDef, Real, Sample, TypeError,
    Types, Values, View, ViewMut, arity, integers, same_shape, single,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `m`, `sumexp`, `target`, `labels`; results: `loss_sum`,
/// `count`, f32 scalars.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CeLoss {
    /// Label of tokens that do not count.
    pub ignore_index: i64,
}

impl OpDef for CeLoss {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 4)?;
        integers(inputs, 3)?;
        for operand in &inputs[1..] {
            same_shape(inputs[0], operand)?;
        }
        (0..3).try_for_each(|it| single(inputs, it))?;
        let scalar = TensorType::scalar(DType::F32);
        Ok(smallvec![scalar.clone(), scalar])
    }

    /// A padded token would count.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, *, *, * -> ,", inputs, results).even("*")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [max, sumexp, target, labels] = inputs else { unreachable!("four operands") };
        let (mut loss, mut count) = (0.0, 0.0);
        for i in 0..labels.data.len() {
            if labels.int(i) == self.ignore_index {
                continue;
            }
            let log = sumexp.data[i].to_f64().ln();
            loss += max.data[i].to_f64() + log - target.data[i].to_f64();
            count += 1.0;
        }
        results[0].data[0] = T::from_f64(loss);
        results[1].data[0] = T::from_f64(count);
    }

    /// Returns no gradient for `m`: it cancels with the gradient from `ce_stats` for the same `m`,
    /// see [`ce_max`](super::ce_max).
    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (dloss, sumexp, labels) = (cx.grad(0), cx.inputs[1], cx.inputs[3]);
        let stats = cx.producer(sumexp);
        let cancels =
            stats.is_some_and(|it| matches!(it.op, Op::CeStats(_)) && it.inputs[2] == cx.inputs[0]);
        if cx.wanted[0] && !cancels {
            return Err(cx.shift_stays(0));
        }
        let op = CeLossGrad { ignore_index: self.ignore_index };
        let res = cx.ops(&[1, 2], op, &[sumexp, labels, dloss])?;
        Ok(smallvec![None, Some(res[0]), Some(res[1]), None])
    }

    fn by_products(&self) -> &'static [usize] {
        &[1]
    }

    fn constants(&self) -> &'static [usize] {
        &[0]
    }

    fn samples() -> Vec<Sample> {
        let sample = |ignore_index, shape| {
            Sample::floats(CeLoss { ignore_index }, &[shape; 4])
                .fill(1, Values::Positive)
                .fill(3, Values::Ids(3))
        };
        vec![sample(-100, &[2, 4]), sample(1, &[6])]
    }
}
