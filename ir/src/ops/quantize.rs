//! `quantize`: FP8 codes of a tensor, `x * scale` rounded to nearest even and held to the largest number.
//!
//! ```text
//! rows      x[b s k]  ->  [b s k]     as fprop and dgrad read it
//! columns   x[b s k]  ->  [k b s]     as wgrad does: FP8 GEMMs of Hopper contract the last dims
//! ```

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::ops::factors::letters;
use crate::ops::{
    Factors, LocalCx, OpDef, Origin, Quantizes, Real, Sample, ScaleFrom, StandsFor, TypeError,
    Types, Values, View, ViewMut, arity, floats, is_default, ndim_at_least, pieces,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `x` and its scale, f32; results: the copies asked for, rows first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Quantize {
    /// FP8 type of the codes.
    pub to: DType,
    /// Which copies.
    #[serde(default, skip_serializing_if = "is_default")]
    pub copies: Copies,
    /// Dimensions of `x` in pieces that have scales of their own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pieces: Vec<usize>,
}

impl Quantize {
    /// Codes with one scale.
    pub fn new(to: DType, copies: Copies) -> Quantize {
        Quantize { to, copies, pieces: Vec::new() }
    }
}

/// Which copies of its codes a tensor has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Copies {
    /// The order of the tensor.
    #[default]
    Rows,
    /// The last dimension first.
    Columns,
    /// Rows, then columns.
    Both,
}

impl Copies {
    /// Whether there is a copy in the order of the tensor.
    pub fn rows(self) -> bool {
        self != Copies::Columns
    }

    /// Whether there is a copy with the last dimension first.
    pub fn columns(self) -> bool {
        self != Copies::Rows
    }
}

/// `x` with the last item first.
pub(crate) fn last_first<T: Copy>(x: &[T]) -> SmallVec<[T; 4]> {
    let (last, leading) = x.split_last().expect("a tensor of codes has dims");
    std::iter::once(last).chain(leading).copied().collect()
}

/// Writes row-major `x` of `columns` columns with columns first.
pub(crate) fn transpose_into<T: Copy>(x: &[T], columns: usize, out: &mut [T]) {
    let rows = x.len() / columns.max(1);
    for (i, row) in x.chunks_exact(columns.max(1)).enumerate() {
        for (j, &it) in row.iter().enumerate() {
            out[j * rows + i] = it;
        }
    }
}

impl OpDef for Quantize {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        floats(inputs, 0)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        if inputs[1].dtype != DType::F32 {
            let (operand, found, expected) = (1, inputs[1].dtype, "f32");
            return Err(TypeError::DType { operand, found, expected });
        }
        if !self.to.is_fp8() {
            return Err(TypeError::Attribute { why: "codes are e4m3 or e5m2" });
        }
        pieces::check(inputs[0], inputs[1], &self.pieces)?;
        let shape = &inputs[0].shape;
        let rows = self.copies.rows().then(|| TensorType::new(self.to, shape));
        let columns = self.copies.columns().then(|| TensorType::new(self.to, &last_first(shape)));
        Ok(rows.into_iter().chain(columns).collect())
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let (x, names) = (inputs[0], letters(0..inputs[0].ndim()));
        let rows = pieces::notation(&names, &self.pieces);
        let scale = pieces::scale_notation(&names, &self.pieces);
        let swapped: String = last_first(&names.chars().collect::<Vec<_>>()).into_iter().collect();
        let moved: Vec<usize> = self.pieces.iter().map(|&it| (it + 1) % x.ndim()).collect();
        let columns = pieces::notation(&swapped, &moved);
        let results_text = match self.copies {
            Copies::Rows => rows.clone(),
            Copies::Columns => columns,
            Copies::Both => format!("{rows}, {columns}"),
        };
        let sizes = pieces::sizes(&names, &self.pieces, &inputs[1].shape);
        let text = format!("{rows}, {scale} -> {results_text}");
        Factors::with_sizes(&text, &sizes, inputs, results)
    }

    /// Rounding happens where the caller stores the codes.
    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (x, scale) = (inputs[0], inputs[1]);
        let mut codes = vec![T::zero(); x.data.len()];
        match scale.data {
            &[scale] => codes.iter_mut().zip(x.data).for_each(|(out, &x)| *out = x * scale),
            scales => {
                for (i, (out, &x_i)) in codes.iter_mut().zip(x.data).enumerate() {
                    *out = x_i * scales[pieces::position(x.shape, scale.shape, &self.pieces, i)];
                }
            }
        }
        if self.copies.columns() {
            let out = results.last_mut().expect("there is a result for each copy");
            transpose_into(&codes, x.last(), out.data);
        }
        if self.copies.rows() {
            results[0].data.copy_from_slice(&codes);
        }
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Operand
    }

    fn batches_with(&self, other: &Self) -> bool {
        (self.to, self.copies) == (other.to, other.copies)
    }

    fn is_form(&self) -> bool {
        true
    }

    fn quantizes(&self) -> Option<Quantizes> {
        Some(Quantizes { format: self.to.fp8()?, copies: self.copies, scale: ScaleFrom::Operand })
    }

    fn samples() -> Vec<Sample> {
        let op = |copies, pieces| Quantize { pieces, ..Quantize::new(DType::E4M3, copies) };
        let sample = |op, x: &[u64], scale: &[u64]| {
            Sample::floats(op, &[x, scale]).fill(1, Values::Positive)
        };
        vec![
            sample(op(Copies::Rows, vec![]), &[4, 6], &[]),
            sample(op(Copies::Columns, vec![0]), &[4, 2, 6], &[4]),
            sample(op(Copies::Both, vec![0, 2]), &[4, 2, 8], &[2, 4]),
        ]
    }
}
