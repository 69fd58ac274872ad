//! `watch`: 0 if all numbers of some tensors are finite, and NaN if one is not.
//!
//! A sum of such results over ranks is one again, so it is reduced as a sum, beside those of the loss and the norm.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Real, Sample, TypeError, Types, View, ViewMut, floats,
    same_shape,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: tensors of one shape, f32 or bf16; the result is an f32 scalar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Watch {}

impl OpDef for Watch {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let Some((first, rest)) = inputs.split_first() else {
            return Err(TypeError::Arity { expected: 1, found: 0 });
        };
        (0..inputs.len()).try_for_each(|it| floats(inputs, it))?;
        for other in rest {
            same_shape(first, other)?;
        }
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
        let finite = inputs.iter().all(|it| it.data.iter().all(|it| it.is_finite()));
        results[0].data[0] = T::from_f64(if finite { 0.0 } else { f64::NAN });
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(Watch {}, &[&[4, 6], &[4, 6]]),
            Sample::floats(Watch {}, &[&[], &[], &[]]),
        ]
    }
}
