//! `sum_leading`: the sum over all dimensions but the last, `[* n] -> [n]`: the gradient of a bias.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, Linear, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity,
    ndim_at_least,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct SumLeading {
    /// Element type of the result; that of the operand if absent. Sums are in f32 in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

/// The sum of rows of the length of `out`.
pub(crate) fn sum_rows<T: Real>(x: &[T], out: &mut [T]) {
    out.fill(T::zero());
    for row in x.chunks_exact(out.len().max(1)) {
        for (out, &x) in out.iter_mut().zip(row) {
            *out += x;
        }
    }
}

impl OpDef for SumLeading {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        let x = inputs[0];
        Ok(smallvec![TensorType::new(self.out.unwrap_or(x.dtype), &x.shape[x.ndim() - 1..])])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* n -> n", inputs, results).linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        sum_rows(inputs[0].data, results[0].data);
    }

    fn by_products(&self) -> &'static [usize] {
        &[0]
    }

    fn samples() -> Vec<Sample> {
        let op = SumLeading::default();
        vec![Sample::floats(op.clone(), &[&[2, 4, 6]]), Sample::floats(op, &[&[3, 5]])]
    }
}
