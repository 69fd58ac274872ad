//! NVFP4: blocks of 16 elements of E2M1, scales of E4M3, and the tensor's amax as a second level.
//!
//! ```text
//! input    row copy 1 x 16; column copy after the Hadamard transform     round to nearest
//! weight   16 x 16                                                       round to nearest
//! grad     like input                                                    stochastic rounding
//! ```
//!
//! The transform spreads an outlier over the 16 rows that a wgrad sums anyway: both operands are
//! transformed, and the two cancel. Source: `common/cast/nvfp4/core_nvfp4.cuh`, `dequantize_nvfp4.cuh` there
//! and `pytorch/custom_recipes/quantization_ref_nvfp4.py` of TransformerEngine 2.20.

use crate::quant::Format;

/// Elements that share a scale, and that one Hadamard transform mixes.
pub const BLOCK: usize = 16;

/// The largest numbers of both levels, multiplied: what a tensor's amax is mapped to.
const RANGE: f32 = Format::E4M3.max() * Format::E2M1.max();

/// The outer level: the factor that brings a whole tensor into the range of the inner one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    amax: f32,
    encode: f32,
}

impl Level {
    /// Of a tensor with this amax; 1 if it is zero.
    pub fn new(amax: f32) -> Level {
        let encode = (RANGE / amax).min(f32::MAX);
        let encode = if amax == 0.0 || encode == 0.0 { 1.0 } else { encode };
        Level { amax, encode }
    }

    /// The stored scale of a block with this amax: a number of [`Format::E4M3`]. It is zero for a block far
    /// smaller than the tensor, which is then lost.
    pub fn scale(&self, block_amax: f32) -> f32 {
        let factor = self.encode * (1.0 / Format::E2M1.max());
        Format::E4M3.round((block_amax * factor).min(f32::MAX))
    }

    /// The factor to quantize the elements of a block by.
    pub fn factor(&self, scale: f32) -> f32 {
        (1.0 / (scale * (1.0 / self.encode))).min(f32::MAX)
    }

    /// The factor to dequantize the elements of a block by.
    pub fn scale_inv(&self, scale: f32) -> f32 {
        scale * self.amax * (1.0 / RANGE)
    }
}

/// The code of E2M1 next to `x`, away from zero with a probability of its distance to the one towards zero:
/// if it is at least `1 - byte / 256` steps. The software path of TransformerEngine; hardware uses its
/// random bits in another way.
pub fn encode_stochastic(x: f32, byte: u8) -> u8 {
    let abs = x.abs().min(Format::E2M1.max());
    // Steps of 1/2 up to 2, of 1 up to 4, then of 2; `code` is that of the number `abs - abs % step`.
    let (step, offset) = match abs {
        ..2.0 => (0.5, 0),
        ..4.0 => (1.0, 2),
        _ => (2.0, 4),
    };
    let steps = abs / step;
    let away = steps.fract() >= 1.0 - f32::from(byte) / 256.0;
    let code = steps as u8 + offset + u8::from(away);
    code | u8::from(x.is_sign_negative()) << 3
}

/// Signs of the random Hadamard transform, the same for all tensors so that they cancel in a GEMM.
const SIGNS: [f32; BLOCK] =
    [1., 1., 1., -1., 1., -1., -1., -1., -1., -1., -1., 1., -1., 1., -1., -1.];

/// Entry `[i][j]` of the transform: Sylvester's matrix with signed rows, divided by 4 to be orthogonal.
pub fn hadamard(i: usize, j: usize) -> f32 {
    let sign = if (i & j).count_ones().is_multiple_of(2) { 0.25 } else { -0.25 };
    SIGNS[i] * sign
}

/// Each 16 neighbours times the [`hadamard`] matrix, rounded to bf16. The sums are those of exact
/// arithmetic, rounded to f32. The length is a multiple of 16.
pub fn hadamard_transformed(x: &[f32]) -> Vec<f32> {
    assert!(x.len().is_multiple_of(BLOCK), "{} elements are not a multiple of {BLOCK}", x.len());
    let product = |tile: &[f32], j: usize| -> f64 {
        (0..BLOCK).map(|i| f64::from(tile[i]) * f64::from(hadamard(i, j))).sum()
    };
    let transformed = |tile| (0..BLOCK).map(move |j| round_bf16(product(tile, j) as f32));
    x.chunks_exact(BLOCK).flat_map(transformed).collect()
}

/// The nearest bf16, of two the even one.
fn round_bf16(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let odd = x.to_bits() >> 16 & 1;
    f32::from_bits((x.to_bits() + 0x7fff + odd) & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With amaxes for which it matters: `amax / 6 * encode` is nearer to 320, `encode / scale` ends in c.
    /// The values are those of exact rationals rounded after each operation.
    #[test]
    fn factors_are_multiplied_in_the_order_of_the_kernel() {
        let level = Level::new(3.25);
        assert_eq!(level.scale(2.4375), 352.0);
        assert_eq!(level.factor(352.0).to_bits(), 0x4016_60ab);
    }

    #[test]
    fn a_tiny_block_is_lost() {
        let level = Level::new(1.0);
        assert_eq!(level.scale(1e-6), 0.0);
        assert_eq!(level.factor(0.0), f32::MAX);
        assert_eq!(level.scale_inv(0.0), 0.0);
    }
}
