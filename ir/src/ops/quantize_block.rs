//! `quantize_block`: FP8 codes of a tensor, with an inverse scale for each block of it.
//!
//! ```text
//!            blocks of x[b s k]    codes      inverse scales
//! rows       1 x 128, along k      [b s k]    [k/128 b s]
//! columns    128 x 1, along s      [k b s]    [b s/128 k]
//! square     128 x 128             [b s k]    [b s/128 k/128]    as rows
//!                                  [k b s]    [k/128 b s/128]    as columns: the same codes
//! ```
//!
//! Scales are laid out as [`QuantMatmul`](crate::ops::QuantMatmul) reads them, by `Granule::Row` and
//! `Granule::Block`. A block is never cut, so no rank needs another's amax.

use serde::{Deserialize, Serialize};

use crate::ops::factors::letters;
use crate::ops::quantize::{last_first, transpose_into};
use crate::ops::{
    BoundAt, Bounds, Copies, Factors, LocalCx, OpDef, Origin, Quantizes, Real, Sample, ScaleFrom,
    Shape, StandsFor, TypeError, Types, View, ViewMut, arity, floats, is_default, ndim_at_least,
    pieces,
};
use crate::quant::ScaleRule;
use crate::quant::blocks::{Blocks, FP8_BLOCK as BLOCK};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Results: codes and inverse scales (f32) of each copy asked for, rows first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantizeBlock {
    /// FP8 type of the codes.
    pub to: DType,
    /// Element type of `x`; its largest number is the scale of a block for which none is large enough.
    pub from: DType,
    /// Blocks are 128 x 128.
    #[serde(default, skip_serializing_if = "is_default")]
    pub square: bool,
    /// Scales are rounded down to a power of two.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pow2: bool,
    /// Which copies.
    #[serde(default, skip_serializing_if = "is_default")]
    pub copies: Copies,
    /// Ranks may hold different numbers of squares of a matrix; the inverse scales of those that one lacks
    /// are 0. Of rows of squares only.
    #[serde(default, skip_serializing_if = "is_default")]
    pub uneven: bool,
}

impl QuantizeBlock {
    /// Dimensions of `x` that are cut into blocks.
    fn dims(&self, ndim: usize) -> Vec<usize> {
        let leading = self.square || self.copies.columns();
        let last = self.square || self.copies.rows();
        let leading = leading.then(|| ndim - 2);
        leading.into_iter().chain(last.then(|| ndim - 1)).collect()
    }

    /// How scales follow from amaxes; `to` is an FP8 type.
    pub fn rule(&self) -> ScaleRule {
        let overflow = match self.from {
            DType::Bf16 => f32::from_bits(0x7f7f_0000),
            DType::F32 | DType::I32 | DType::E4M3 | DType::E5M2 => f32::MAX,
        };
        let format = self.to.fp8().expect("`infer` wants codes");
        ScaleRule { format, pow2: self.pow2, eps: 0.0, overflow }
    }
}

impl OpDef for QuantizeBlock {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        let x = inputs[0];
        if x.dtype != self.from {
            return Err(TypeError::DType {
                operand: 0,
                found: x.dtype,
                expected: "that of `from`",
            });
        }
        if !self.to.is_fp8() {
            return Err(TypeError::Attribute { why: "codes are e4m3 or e5m2" });
        }
        ndim_at_least(inputs, 0, 2, "at least 2 dims")?;
        if self.uneven && (!self.square || self.copies != Copies::Rows || x.ndim() != 2) {
            return Err(TypeError::Attribute {
                why: "only rows of squares of a matrix are uneven",
            });
        }
        for dim in self.dims(x.ndim()) {
            let size = x.shape[dim];
            if !size.is_multiple_of(BLOCK) {
                return Err(TypeError::Multiple { what: "a dim in blocks", size, of: BLOCK });
            }
        }
        let over = |dims: &[usize]| -> Shape {
            let size = |i| if dims.contains(&i) { x.shape[i] / BLOCK } else { x.shape[i] };
            (0..x.ndim()).map(size).collect()
        };
        let (leading, last) = (x.ndim() - 2, x.ndim() - 1);
        let scales = |shape: Shape| TensorType { dtype: DType::F32, shape };
        let mut res = Types::new();
        if self.copies.rows() {
            res.push(TensorType::new(self.to, &x.shape));
            res.push(scales(match self.square {
                true => over(&[leading, last]),
                false => last_first(&over(&[last])),
            }));
        }
        if self.copies.columns() {
            res.push(TensorType::new(self.to, &last_first(&x.shape)));
            res.push(scales(match self.square {
                true => last_first(&over(&[leading, last])),
                false => over(&[leading]),
            }));
        }
        Ok(res)
    }

    /// Padding would have a scale of 1, so every cut is even where bounds are not known.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let ndim = inputs[0].ndim();
        let (names, dims) = (letters(0..ndim), self.dims(ndim));
        // Each dim as it is, `(A a)` if it is in blocks, and with the blocks of `over` only, `A`.
        let part = |i: usize, over: &[usize]| {
            let name = &names[i..=i];
            match (over.contains(&i), dims.contains(&i)) {
                (true, _) => name.to_uppercase(),
                (false, in_blocks) => pieces::notation(name, if in_blocks { &[0] } else { &[] }),
            }
        };
        let text = |over: &[usize], columns: bool| {
            let parts: Vec<String> = (0..ndim).map(|it| part(it, over)).collect();
            let mut parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            if columns {
                parts.rotate_right(1);
            }
            parts.join(" ")
        };
        let (leading, last) = (ndim - 2, ndim - 1);
        let mut copies = Vec::new();
        if self.copies.rows() {
            copies.push(text(&[], false));
            copies.push(match self.square {
                true => text(&[leading, last], false),
                false => text(&[last], true),
            });
        }
        if self.copies.columns() {
            copies.push(text(&[], true));
            copies.push(match self.square {
                true => text(&[leading, last], true),
                false => text(&[leading], false),
            });
        }
        let sizes: Vec<(char, u64)> =
            dims.iter().map(|&it| (names.as_bytes()[it] as char, BLOCK)).collect();
        let whole: String = sizes.iter().map(|it| it.0).collect();
        let text = format!("{} -> {}", text(&[], false), copies.join(", "));
        let all = names.clone() + &names.to_uppercase();
        let factors = Factors::with_sizes(&text, &sizes, inputs, results).whole(&whole);
        if self.uneven { factors } else { factors.even(&all) }
    }

    /// Rounding happens where the caller stores the codes.
    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let cols = x.last();
        let rows = x.data.len() / cols.max(1);
        let numbers: Vec<f32> = x.data.iter().map(|&it| it.to_f64() as f32).collect();
        let quantized = |block: [usize; 2]| {
            let blocks = Blocks { rows, cols, block };
            let rule = self.rule();
            let scales: Vec<f32> =
                blocks.amax(&numbers).into_iter().map(|it| rule.scale(it)).collect();
            let wide = |it: &f32| T::from_f64(f64::from(*it));
            let codes: Vec<T> = blocks.scaled(&numbers, &scales).iter().map(wide).collect();
            let per_row = blocks.grid()[1];
            let held = |i: usize| {
                let place = [i / per_row, i % per_row].map(|it| it as u64 * BLOCK);
                cx.bounds.iter().zip(place).all(|(bound, at)| at < bound.extent)
            };
            let inverse =
                |(i, it): (usize, &f32)| if held(i) { wide(&(1.0 / it)) } else { T::zero() };
            let inverses: Vec<T> = scales.iter().enumerate().map(inverse).collect();
            (codes, inverses, per_row)
        };
        let side = BLOCK as usize;
        let (row_block, column_block) = match self.square {
            true => ([side, side], [side, side]),
            false => ([1, side], [side, 1]),
        };
        let mut results = results.iter_mut();
        let mut next = || &mut *results.next().expect("there are two for each copy").data;
        if self.copies.rows() {
            let (codes, inverses, per_row) = quantized(row_block);
            next().copy_from_slice(&codes);
            match self.square {
                true => next().copy_from_slice(&inverses),
                false => transpose_into(&inverses, per_row, next()),
            }
        }
        if self.copies.columns() {
            let (codes, inverses, per_row) = quantized(column_block);
            transpose_into(&codes, cols, next());
            match self.square {
                true => transpose_into(&inverses, per_row, next()),
                false => next().copy_from_slice(&inverses),
            }
        }
    }

    fn bounds(&self, _inputs: &[&TensorType]) -> Bounds {
        (0..if self.uneven { 2 } else { 0 }).map(|dim| BoundAt::Input(0, dim)).collect()
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Operand
    }

    fn batches_with(&self, other: &Self) -> bool {
        self == other
    }

    fn is_form(&self) -> bool {
        true
    }

    fn quantizes(&self) -> Option<Quantizes> {
        Some(Quantizes {
            format: self.to.fp8()?,
            copies: self.copies,
            scale: ScaleFrom::Blocks { uneven: self.uneven },
        })
    }

    fn samples() -> Vec<Sample> {
        let op = |square, pow2, copies| {
            let (to, from, uneven) = (DType::E4M3, DType::F32, false);
            QuantizeBlock { to, from, square, pow2, copies, uneven }
        };
        let sample = |square, pow2, copies, shape: &[u64]| {
            Sample::floats(op(square, pow2, copies), &[shape])
        };
        let uneven = QuantizeBlock { uneven: true, ..op(true, true, Copies::Rows) };
        vec![
            sample(false, true, Copies::Rows, &[2, 4, 256]),
            sample(false, false, Copies::Columns, &[2, 256, 4]),
            sample(false, true, Copies::Both, &[2, 128, 256]),
            sample(true, true, Copies::Rows, &[256, 256]),
            sample(true, false, Copies::Both, &[2, 128, 256]),
            Sample::floats(uneven, &[&[384, 256]]),
        ]
    }
}
