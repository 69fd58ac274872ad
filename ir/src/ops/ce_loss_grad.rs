//! `ce_loss_grad`: gradients of `ce_loss`: `dloss / sumexp` and `-dloss` for tokens that count.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Real, Sample, TypeError, Types, Values, View, ViewMut, arity,
    integers, number, same_shape, single,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `sumexp`, `labels`, `dloss` (a scalar); results:
/// `dsumexp`, `dtarget`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CeLossGrad {
    /// Label of tokens that do not count.
    pub ignore_index: i64,
}

impl OpDef for CeLossGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 3)?;
        integers(inputs, 1)?;
        same_shape(inputs[0], inputs[1])?;
        number(inputs, 2)?;
        single(inputs, 0)?;
        Ok(smallvec![inputs[0].clone(), inputs[0].clone()])
    }

    /// A padded token would count.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, *, -> *, *", inputs, results).even("*")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [sumexp, labels, dloss] = inputs else { unreachable!("three operands") };
        let [dsumexp, dtarget] = results else { unreachable!("two results") };
        for i in 0..labels.data.len() {
            let counts = labels.int(i) != self.ignore_index;
            let dloss = if counts { dloss.data[0] } else { T::zero() };
            dsumexp.data[i] = if counts { dloss / sumexp.data[i] } else { T::zero() };
            dtarget.data[i] = -dloss;
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn first_gradients(&self) -> &'static [usize] {
        &[0, 1]
    }

    fn samples() -> Vec<Sample> {
        let sample = |ignore_index, shape| {
            Sample::floats(CeLossGrad { ignore_index }, &[shape, shape, &[]])
                .fill(0, Values::Positive)
                .fill(1, Values::Ids(3))
        };
        vec![sample(-100, &[2, 4]), sample(1, &[6])]
    }
}
