//! `embedding`: row `ids[i]` of a table for every id, `ids[*], table[v d] -> [* d]`.
//!
//! A rank that holds some rows of the table gives zeros for the ids of others, so a table sharded
//! by rows (evenly or not) makes a partial sum. Ids are global, and so is the index of the padding
//! row. That ids are below `v` is checked where data enters, before the step; here, an id that no
//! rank holds gives zeros on every mesh.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    BoundAt, Bounds, EmbeddingGrad, Factors, GradCx, GradError, Grads, LocalCx, LookUp, OpDef,
    Real, Sample, TypeError, Types, Values, View, ViewMut, arity, bytes_of, integers, ndim,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `ids`, `table`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Embedding {
    /// The row that gets no gradient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding_idx: Option<i64>,
}

/// A padding row is a row: its index is not negative.
pub(crate) fn check_padding_idx(padding_idx: Option<i64>) -> Result<(), TypeError> {
    match padding_idx.is_some_and(|it| it < 0) {
        true => Err(TypeError::Attribute { why: "padding_idx must be at least 0" }),
        false => Ok(()),
    }
}

impl OpDef for Embedding {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        integers(inputs, 0)?;
        check_padding_idx(self.padding_idx)?;
        ndim(inputs, 1, 2, "2 dims")?;
        let mut shape = inputs[0].shape.clone();
        shape.push(inputs[1].shape[1]);
        Ok(smallvec![TensorType { dtype: inputs[1].dtype, shape }])
    }

    /// A padded id is 0, and so would be a row of the table.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, v d -> * d", inputs, results).even("*")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let (ids, table) = (inputs[0], inputs[1]);
        let n = table.last();
        for (i, out) in results[0].data.chunks_exact_mut(n.max(1)).enumerate() {
            match cx.bounds[0].local(ids.int(i)) {
                Some(row) => out.copy_from_slice(&table.data[row * n..][..n]),
                None => out.fill(T::zero()),
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (ids, grad) = (cx.inputs[0], cx.grad(0));
        let vocab = cx.ty(cx.inputs[1]).shape[0];
        let op = EmbeddingGrad { vocab, padding_idx: self.padding_idx, out: None };
        Ok(smallvec![None, cx.op(1, op, &[ids, grad])?])
    }

    fn bounds(&self, _inputs: &[&TensorType]) -> Bounds {
        smallvec![BoundAt::Input(1, 0)]
    }

    fn bytes(&self, inputs: &[TensorType], results: &[TensorType]) -> u64 {
        // Rows of the table that are looked up, and where they go.
        2 * bytes_of(results) + bytes_of(&inputs[..1])
    }

    fn looks_up(&self, inputs: &[&TensorType]) -> Option<LookUp> {
        inputs[1].shape.first().map(|&size| LookUp { ids: 0, table: 1, size })
    }

    fn samples() -> Vec<Sample> {
        let padded = Embedding { padding_idx: Some(5) };
        vec![
            Sample::floats(Embedding::default(), &[&[2, 4], &[7, 6]]).fill(0, Values::Ids(7)),
            Sample::floats(padded, &[&[6], &[8, 3]]).fill(0, Values::Ids(8)),
        ]
    }
}
