//! `hadamard`: the random Hadamard transform of each 16 rows of a matrix, rounded to bf16.
//!
//! It is orthogonal, so it cancels in a GEMM that contracts the rows of two operands that went through it;
//! what it does for NVFP4 is in [`quant::nvfp4`](crate::quant::nvfp4). Rows are those of the dim before the
//! last.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::quantize::transpose_into;
use crate::ops::round_mx::block_factors;
use crate::ops::{
    Along, Factors, LocalCx, OpDef, Origin, Real, Sample, StandsFor, TypeError, Types, View,
    ViewMut, arity, floats,
};
use crate::quant::nvfp4::{BLOCK, hadamard_transformed};
use crate::types::TensorType;

/// See the [module docs](self). Operand: `x`; the result has its type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hadamard {}

impl OpDef for Hadamard {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        Along::Columns.check(inputs, BLOCK as u64)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        block_factors(Along::Columns, BLOCK as u64, inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let numbers: Vec<f32> = x.data.iter().map(|&it| it.to_f64() as f32).collect();
        let mut columns = vec![0.0; numbers.len()];
        transpose_into(&numbers, x.last(), &mut columns);
        let columns = hadamard_transformed(&columns);
        let columns: Vec<T> = columns.into_iter().map(|it| T::from_f64(f64::from(it))).collect();
        transpose_into(&columns, columns.len() / x.last().max(1), results[0].data);
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Operand
    }

    fn is_form(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![Sample::floats(Hadamard {}, &[&[2, 32, 6]])]
    }
}
