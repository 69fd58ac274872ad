//! `dropout`: elements set to zero at random, the others scaled so that the mean stays.
//!
//! Whether an element stays depends on the seed, the op's key and the element's *global* index
//! alone (see [`crate::random`]), so the mask is the same on any mesh (report C57), and the
//! backward pass computes it again instead of keeping it.

use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

use crate::ops::{
    BoundAt, Bounds, Factors, GradCx, GradError, Grads, LocalCx, Number, Numbers, OpDef, Real,
    Sample, TypeError, Types, Values, View, ViewMut, arity, integers, scalar,
};
use crate::random::Stream;
use crate::range::{Ranged, RealRange};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `x`, `seed` (an i32 scalar of 0 .. 2^24, new in every
/// micro-batch).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dropout {
    /// Which part of the elements is dropped.
    pub rate: Number,
    /// Tells one dropout of the model from the others: [`stream_key`](crate::random::stream_key)
    /// of its name.
    pub key: u64,
}

impl Dropout {
    /// Range of the rate.
    pub const RATE: RealRange = RealRange::Fraction;
}

impl OpDef for Dropout {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        integers(inputs, 1)?;
        scalar(inputs, 1)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("rate", self.rate, Dropout::RATE)]
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, -> *", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let stream = Stream { seed: inputs[1].int(0) as u64, key: self.key };
        // An element stays if its 32 random bits are at least this.
        let threshold = (self.rate.0 * 2f64.powi(32)) as u64;
        let scale = T::from_f64(if self.rate.0 < 1.0 { 1.0 / (1.0 - self.rate.0) } else { 0.0 });
        let n = x.last().max(1);
        let mut strides: SmallVec<[u64; 4]> = smallvec![1; cx.bounds.len()];
        for dim in (1..cx.bounds.len()).rev() {
            strides[dim - 1] = strides[dim] * cx.bounds[dim].size;
        }
        let rows = results[0].data.chunks_exact_mut(n).zip(x.data.chunks_exact(n));
        for (row, (out, x)) in rows.enumerate() {
            let mut first = cx.bounds.last().map_or(0, |it| it.start);
            let mut rest = row;
            for dim in (0..cx.bounds.len().saturating_sub(1)).rev() {
                let size = inputs[0].shape[dim];
                first += (cx.bounds[dim].start + (rest % size) as u64) * strides[dim];
                rest /= size;
            }
            for (j, (out, &x)) in out.iter_mut().zip(x).enumerate() {
                let stays = u64::from(stream.word(first + j as u64)) >= threshold;
                *out = if stays { x * scale } else { T::zero() };
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (seed, grad) = (cx.inputs[1], cx.grad(0));
        Ok(smallvec![cx.op(0, self.clone(), &[grad, seed])?, None])
    }

    fn bounds(&self, inputs: &[&TensorType]) -> Bounds {
        (0..inputs[0].ndim()).map(|dim| BoundAt::Input(0, dim)).collect()
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn samples() -> Vec<Sample> {
        let op = |rate: f64| Dropout { rate: rate.into(), key: 11 };
        vec![
            Sample::floats(op(0.25), &[&[2, 4, 6], &[]]).fill(1, Values::Ids(1 << 24)),
            Sample::floats(op(0.5), &[&[5, 7], &[]]).fill(1, Values::Ids(1 << 24)),
        ]
    }
}
