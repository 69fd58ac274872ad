//! `sum_squares`: the sum of the squares of all elements, for the norm of gradients.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity, floats,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). The result is an f32 scalar; the reference sums in f64.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SumSquares {}

impl OpDef for SumSquares {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        Ok(smallvec![TensorType::scalar(DType::F32)])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* ->", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let squares = inputs[0].data.iter().map(|&it| it.to_f64() * it.to_f64());
        results[0].data[0] = T::from_f64(squares.sum());
    }

    fn by_products(&self) -> &'static [usize] {
        &[0]
    }

    fn batches_with(&self, _other: &Self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(SumSquares {}, &[&[4, 6]]),
            Sample::floats(SumSquares {}, &[&[5]]),
            Sample::floats(SumSquares {}, &[&[]]),
        ]
    }
}
