//! `embedding_grad`: adds each row of a gradient to the row of the table it came from,
//! `ids[*], dy[* d] -> [v d]`.
//!
//! Rows are added in the order of the ids, so the result is the same every time.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::embedding::check_padding_idx;
use crate::ops::{
    BoundAt, Bounds, Factors, LocalCx, Op, OpDef, Origin, Real, Sample, TypeError, Types, Values,
    View, ViewMut, arity, integers, ndim_at_least, per_row,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `ids`, `dy`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EmbeddingGrad {
    /// Rows of the table.
    pub vocab: u64,
    /// The row (by its global index) that gets no gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding_idx: Option<i64>,
    /// Element type of the result; that of `dy` if absent. Sums are in f32 in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

impl OpDef for EmbeddingGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        integers(inputs, 0)?;
        check_padding_idx(self.padding_idx)?;
        ndim_at_least(inputs, 1, 1, "at least 1 dim")?;
        let dy = inputs[1];
        per_row(dy, inputs[0])?;
        let dtype = self.out.unwrap_or(dy.dtype);
        Ok(smallvec![TensorType::new(dtype, &[self.vocab, dy.shape[dy.ndim() - 1]])])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, * d -> v d", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let (ids, dy) = (inputs[0], inputs[1]);
        let n = dy.last();
        let out = &mut *results[0].data;
        out.fill(T::zero());
        for (i, dy) in dy.data.chunks_exact(n.max(1)).enumerate() {
            let id = ids.int(i);
            if self.padding_idx == Some(id) {
                continue;
            }
            if let Some(row) = cx.bounds[0].local(id) {
                for (out, &dy) in out[row * n..][..n].iter_mut().zip(dy) {
                    *out += dy;
                }
            }
        }
    }

    fn bounds(&self, _inputs: &[&TensorType]) -> Bounds {
        smallvec![BoundAt::Result(0, 0)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        Some(EmbeddingGrad { vocab: results[0][0], ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let op = EmbeddingGrad { vocab: 7, padding_idx: None, out: None };
        let padded = EmbeddingGrad { vocab: 8, padding_idx: Some(5), out: None };
        vec![
            Sample::floats(op, &[&[2, 4], &[2, 4, 6]]).fill(0, Values::Ids(7)),
            Sample::floats(padded, &[&[6], &[6, 3]]).fill(0, Values::Ids(8)),
        ]
    }
}
