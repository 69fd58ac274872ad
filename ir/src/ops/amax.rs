//! `amax`: the largest magnitude of a tensor, or of each of its pieces.
//!
//! Numbers that are not one are ignored, as by the maximum of IEEE 754 and by TransformerEngine; of nothing it
//! is 0. It is one of the tensor's own numbers, so it has their type. Over axes that shard what is in one piece it
//! is a partial maximum: its amax group.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Real, Sample, Shape, StandsFor, TypeError, Types, View,
    ViewMut, arity, floats, is_default, pieces,
};
use crate::placement::ReduceOp;
use crate::types::TensorType;

/// See the [module docs](self). The result has the operand's type, and one dimension for each dimension in pieces.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Amax {
    /// Dimensions in pieces, and the number of pieces of each.
    #[serde(skip_serializing_if = "is_default")]
    pub pieces: Vec<(usize, u64)>,
}

impl Amax {
    fn dims(&self) -> Vec<usize> {
        self.pieces.iter().map(|it| it.0).collect()
    }

    /// The reference.
    pub(crate) fn of<T: Real>(&self, x: View<'_, T>, out: &mut ViewMut<'_, T>) {
        out.data.fill(T::zero());
        if let [out] = out.data {
            *out = x.data.iter().fold(T::zero(), |res, it| res.max(it.abs()));
            return;
        }
        let dims = self.dims();
        for (i, it) in x.data.iter().enumerate() {
            let slot = &mut out.data[pieces::position(x.shape, out.shape, &dims, i)];
            *slot = slot.max(it.abs());
        }
    }
}

impl OpDef for Amax {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        let shape: Shape = self.pieces.iter().map(|it| it.1).collect();
        let res = TensorType { dtype: inputs[0].dtype, shape };
        pieces::check(inputs[0], &res, &self.dims())?;
        Ok(smallvec![res])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let (names, dims) = (letters(0..inputs[0].ndim()), self.dims());
        let text =
            [pieces::notation(&names, &dims), pieces::scale_notation(&names, &dims)].join("->");
        let sizes = pieces::sizes(&names, &dims, &results[0].shape);
        Factors::with_sizes(&text, &sizes, inputs, results).reduce(0, ReduceOp::Max)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        self.of(inputs[0], &mut results[0]);
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let pieces = self.pieces.iter().zip(results[0]).map(|(it, &n)| (it.0, n)).collect();
        Some(Amax { pieces }.into())
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Scale
    }

    fn batches_with(&self, _other: &Self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::floats(Amax::default(), &[&[4, 6]]),
            Sample::floats(Amax { pieces: vec![(0, 4)] }, &[&[8, 2, 3]]),
            Sample::floats(Amax { pieces: vec![(0, 2), (2, 4)] }, &[&[4, 2, 8]]),
        ]
    }
}
