//! `round_nvfp4`: a tensor rounded to what NVFP4 codes stand for.
//!
//! Where no hardware multiplies the codes, GEMMs multiply these numbers: a code, times the scale of its block
//! of 16, times the tensor's amax over the largest product of both. The last factor is any f32, so a result
//! in bf16 is rounded once more than the codes are.
//!
//! Blocks lie as those of [`RoundMx`](crate::ops::RoundMx). Stochastic rounding takes its bits from the seed,
//! the op's key and the element's *global* index, so that it is the same on any mesh.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::{
    Along, BoundAt, Bounds, Copies, Factors, LocalCx, OpDef, Origin, Quantizes, Real, Sample,
    ScaleFrom, StandsFor, TypeError, Types, Values, View, ViewMut, arity, floats, integers,
    is_default, pieces, scalar,
};
use crate::quant::Format;
use crate::quant::blocks::Blocks;
use crate::quant::nvfp4::{BLOCK, Level, encode_stochastic};
use crate::random::Stream;
use crate::types::TensorType;

/// See the [module docs](self). Operands: `x`, its amax (f32), and if rounding is stochastic the seed (an i32
/// scalar); the result has the type of `x`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct RoundNvFp4 {
    /// How blocks lie.
    #[serde(skip_serializing_if = "is_default")]
    pub along: Along,
    /// Dimensions of `x` in pieces that have amaxes of their own; no block is in two pieces.
    #[serde(skip_serializing_if = "is_default")]
    pub pieces: Vec<usize>,
    /// Rounds stochastically, with random bits of this key.
    #[serde(skip_serializing_if = "is_default")]
    pub stochastic: Option<u64>,
}

impl OpDef for RoundNvFp4 {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2 + usize::from(self.stochastic.is_some()))?;
        floats(inputs, 0)?;
        self.along.check(inputs, BLOCK as u64)?;
        floats(inputs, 1)?;
        if self.stochastic.is_some() {
            integers(inputs, 2)?;
            scalar(inputs, 2)?;
        }
        pieces::check(inputs[0], inputs[1], &self.pieces)?;
        for (dim, n) in self.pieces.iter().zip(&inputs[1].shape) {
            let size = inputs[0].shape[*dim] / n;
            let in_blocks = self.along.dims(inputs[0].ndim()).contains(dim);
            if in_blocks && !size.is_multiple_of(BLOCK as u64) {
                let of = BLOCK as u64;
                return Err(TypeError::Multiple { what: "a piece in blocks", size, of });
            }
        }
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let ndim = inputs[0].ndim();
        let (names, blocks) = (letters(0..ndim), self.along.dims(ndim));
        // Pieces, then blocks of one, then numbers of a block.
        let piece = |dim: usize| char::from_u32('α' as u32 + dim as u32).expect("of the ten first");
        let part = |dim: usize| {
            let name = &names[dim..=dim];
            let piece = self.pieces.contains(&dim).then(|| piece(dim).to_string());
            let block = blocks.contains(&dim).then(|| name.to_uppercase());
            format!("({}{}{name}) ", piece.unwrap_or_default(), block.unwrap_or_default())
        };
        let x: String = (0..ndim).map(part).collect();
        let amax: String = self.pieces.iter().map(|&it| piece(it)).collect();
        let whole: String = blocks.iter().map(|&it| names.as_bytes()[it] as char).collect();
        let mut sizes: Vec<(char, u64)> = whole.chars().map(|it| (it, BLOCK as u64)).collect();
        sizes.extend(amax.chars().zip(inputs[1].shape.iter().copied()));
        let seed = if self.stochastic.is_some() { "," } else { "" };
        let text = format!("{x}, {amax}{seed} -> {x}");
        Factors::with_sizes(&text, &sizes, inputs, results).whole(&whole)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let (x, amax) = (inputs[0], inputs[1]);
        let cols = x.last();
        let rows = x.data.len() / cols.max(1);
        let blocks = Blocks { rows, cols, block: self.along.block(BLOCK) };
        let per_row = blocks.grid()[1];
        let numbers: Vec<f32> = x.data.iter().map(|&it| it.to_f64() as f32).collect();
        let (mut factors, mut inverses) = (Vec::new(), Vec::new());
        for (at, block_amax) in blocks.amax(&numbers).into_iter().enumerate() {
            let [height, width] = blocks.block;
            let first = at / per_row * height * cols + at % per_row * width;
            let piece = pieces::position(x.shape, amax.shape, &self.pieces, first);
            let level = Level::new(amax.data[piece].to_f64() as f32);
            let scale = level.scale(block_amax);
            factors.push(level.factor(scale));
            inverses.push(level.scale_inv(scale));
        }
        let codes = match self.stochastic {
            None => blocks.quantize(&numbers, &factors, Format::E2M1),
            Some(key) => {
                let stream = Stream { seed: inputs[2].int(0) as u64, key };
                let byte = |i| (stream.word(global_index(x.shape, cx, i)) >> 24) as u8;
                let scaled = blocks.scaled(&numbers, &factors);
                scaled.iter().enumerate().map(|(i, &it)| encode_stochastic(it, byte(i))).collect()
            }
        };
        let rounded = blocks.dequantize(&codes, &inverses, Format::E2M1);
        for (out, it) in results[0].data.iter_mut().zip(rounded) {
            *out = T::from_f64(f64::from(it));
        }
    }

    fn bounds(&self, inputs: &[&TensorType]) -> Bounds {
        let dims = if self.stochastic.is_some() { inputs[0].ndim() } else { 0 };
        (0..dims).map(|dim| BoundAt::Input(0, dim)).collect()
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
            format: Format::E2M1,
            copies: Copies::Rows,
            scale: ScaleFrom::BlocksBelow(1),
        })
    }

    fn samples() -> Vec<Sample> {
        let sample = |op: RoundNvFp4, x: &[u64], amax: &[u64]| {
            Sample::floats(op, &[x, amax]).fill(1, Values::Positive)
        };
        let op = |along, pieces| RoundNvFp4 { along, pieces, stochastic: None };
        let random = RoundNvFp4 { along: Along::Rows, pieces: vec![], stochastic: Some(7) };
        let mut drawn = Sample::floats(random, &[&[2, 4, 64], &[], &[]]).fill(1, Values::Positive);
        drawn = drawn.fill(2, Values::Ids(1 << 24));
        vec![
            sample(op(Along::Rows, vec![0, 2]), &[4, 2, 64], &[2, 2]),
            sample(op(Along::Columns, vec![0]), &[2, 32, 6], &[2]),
            sample(op(Along::Square, vec![]), &[32, 64], &[]),
            drawn,
        ]
    }
}

/// Position in the global tensor of element `i` of one rank's.
fn global_index(shape: &[usize], cx: &LocalCx<'_>, i: usize) -> u64 {
    let (mut rest, mut stride, mut res) = (i, 1, 0);
    for (&size, bound) in shape.iter().zip(cx.bounds).rev() {
        res += (bound.start + (rest % size) as u64) * stride;
        rest /= size;
        stride *= bound.size;
    }
    res
}
