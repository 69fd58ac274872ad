//! `round_mx`: a tensor rounded to what MXFP8 codes stand for.
//!
//! Where no hardware multiplies the codes, GEMMs multiply these numbers. Each is a code of at most four bits
//! times a power of two, which bf16 holds.
//!
//! ```text
//! rows       blocks of 1 x 32 of x[b s k], along k     what fprop and dgrad read
//! columns    32 x 1, along s                           what wgrad reads, and dgrad of a weight
//! square     32 x 32                                   both
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Copies, Factors, LocalCx, OpDef, Origin, Quantizes, Real, Sample, ScaleFrom, StandsFor,
    TypeError, Types, View, ViewMut, arity, floats, is_default, ndim_at_least, pieces,
};
use crate::quant::blocks::Blocks;
use crate::quant::mx;
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operand: `x`; the result has its type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RoundMx {
    /// FP8 type of the codes.
    pub to: DType,
    /// How blocks lie.
    #[serde(default, skip_serializing_if = "is_default")]
    pub along: Along,
}

/// How the blocks of a tensor lie, by which of its last two dimensions they extend along.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Along {
    /// The last.
    #[default]
    Rows,
    /// The one before.
    Columns,
    /// Both.
    Square,
}

impl Along {
    /// Dimensions of a tensor of `ndim` that are cut into blocks.
    pub(crate) fn dims(self, ndim: usize) -> Vec<usize> {
        match self {
            Along::Rows => vec![ndim - 1],
            Along::Columns => vec![ndim - 2],
            Along::Square => vec![ndim - 2, ndim - 1],
        }
    }

    /// Rows and columns of a block of `side` numbers along a side.
    pub(crate) fn block(self, side: usize) -> [usize; 2] {
        match self {
            Along::Rows => [1, side],
            Along::Columns => [side, 1],
            Along::Square => [side, side],
        }
    }

    /// Checks that operand 0 falls into blocks.
    pub(crate) fn check(self, inputs: &[&TensorType], side: u64) -> Result<(), TypeError> {
        ndim_at_least(inputs, 0, 2, "at least 2 dims")?;
        for dim in self.dims(inputs[0].ndim()) {
            let size = inputs[0].shape[dim];
            if !size.is_multiple_of(side) {
                return Err(TypeError::Multiple { what: "a dim in blocks", size, of: side });
            }
        }
        Ok(())
    }
}

/// Factors of an op that makes blocks of operand 0, its only one, into blocks of its result.
pub(crate) fn block_factors(
    along: Along,
    side: u64,
    inputs: &[&TensorType],
    results: &[&TensorType],
) -> Factors {
    let (names, dims) = (letters(0..inputs[0].ndim()), along.dims(inputs[0].ndim()));
    let whole: String = dims.iter().map(|&it| names.as_bytes()[it] as char).collect();
    let sizes: Vec<(char, u64)> = whole.chars().map(|it| (it, side)).collect();
    let text = pieces::notation(&names, &dims);
    Factors::with_sizes(&format!("{text} -> {text}"), &sizes, inputs, results).whole(&whole)
}

/// Numbers along a side of a block.
const BLOCK: usize = 32;

impl OpDef for RoundMx {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        if !self.to.is_fp8() {
            return Err(TypeError::Attribute { why: "codes are e4m3 or e5m2" });
        }
        self.along.check(inputs, BLOCK as u64)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        block_factors(self.along, BLOCK as u64, inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let format = self.to.fp8().expect("`infer` wants codes");
        let cols = x.last();
        let rows = x.data.len() / cols.max(1);
        let blocks = Blocks { rows, cols, block: self.along.block(BLOCK) };
        let numbers: Vec<f32> = x.data.iter().map(|&it| it.to_f64() as f32).collect();
        let amaxes = blocks.amax(&numbers);
        let inverses: Vec<f32> = amaxes.into_iter().map(|it| mx::scale_inv(it, format)).collect();
        let scales: Vec<f32> = inverses.iter().map(|it| 1.0 / it).collect();
        let codes = blocks.quantize(&numbers, &scales, format);
        let rounded = blocks.dequantize(&codes, &inverses, format);
        for (out, it) in results[0].data.iter_mut().zip(rounded) {
            *out = T::from_f64(f64::from(it));
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Operand
    }

    fn is_form(&self) -> bool {
        true
    }

    fn quantizes(&self) -> Option<Quantizes> {
        Some(Quantizes {
            format: self.to.fp8()?,
            copies: Copies::Rows,
            scale: ScaleFrom::Blocks { uneven: false },
        })
    }

    fn samples() -> Vec<Sample> {
        let sample = |to, along, shape: &[u64]| Sample::floats(RoundMx { to, along }, &[shape]);
        vec![
            sample(DType::E4M3, Along::Rows, &[2, 3, 64]),
            sample(DType::E5M2, Along::Columns, &[2, 64, 6]),
            sample(DType::E4M3, Along::Square, &[64, 64]),
        ]
    }
}
