//! Scales of whole tensors and of blocks of FP8: from the largest magnitude to the factor and its inverse.
//!
//! ```text
//! amax      = max |x|                      of the tensor, of a block, or reduced over ranks
//! scale     = largest number / amax        ScaleRule
//! code      = encode(x * scale)            the product rounded to f32 first
//! scale_inv = 1 / scale                    stored with the codes
//! x         ≈ decode(code) * scale_inv
//! ```
//!
//! Each step is a function of its own, because ranks exchange what lies between: a scale is right only if
//! its amax covers all elements that share it. Source: `compute_scale_from_amax` of TransformerEngine
//! (`common/recipe/recipe_common.cuh`), 2.20.

use crate::quant::Format;

/// The largest magnitude. NaN is ignored; 0 if there is nothing else.
pub fn amax(x: &[f32]) -> f32 {
    // Magnitudes are ordered like their bits, and integers, unlike floats, may be compared in any order:
    // the loop is vectorised.
    let bits = |it: &f32| if it.is_nan() { 0 } else { it.abs().to_bits() };
    f32::from_bits(x.iter().map(bits).fold(0, u32::max))
}

/// How a scale follows from an amax.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleRule {
    /// What is scaled: the largest element comes to lie at its largest number.
    pub format: Format,
    /// Round the scale down to a power of two, so that scaling loses nothing.
    pub pow2: bool,
    /// A smaller amax counts as this.
    pub eps: f32,
    /// The scale of an amax so small that the quotient overflows: the largest number of the element type
    /// for blocks, `f32::MAX` for whole tensors.
    pub overflow: f32,
}

impl ScaleRule {
    /// The rule of `Float8CurrentScaling`, and of master weights: any scale, no epsilon.
    pub fn tensor(format: Format) -> ScaleRule {
        ScaleRule { format, pow2: false, eps: 0.0, overflow: f32::MAX }
    }

    /// The factor for elements of at most `amax`. 1 if that is zero, infinite or NaN.
    pub fn scale(&self, amax: f32) -> f32 {
        let amax = if amax < self.eps { self.eps } else { amax };
        if amax == 0.0 || !amax.is_finite() {
            return 1.0;
        }
        let scale = self.format.max() / amax;
        let scale = if scale.is_infinite() { self.overflow } else { scale };
        match self.pow2 {
            true => f32::from_bits(scale.to_bits() & !((1 << 23) - 1)),
            false => scale,
        }
    }
}

/// Codes of `x` with one scale.
pub fn quantize(x: &[f32], scale: f32, format: Format) -> Vec<u8> {
    let scaled: Vec<f32> = x.iter().map(|it| it * scale).collect();
    let mut codes = vec![0; x.len()];
    format.encode_into(&scaled, &mut codes);
    codes
}

/// What [`quantize`] keeps of its argument. `scale_inv` is `1 / scale`.
pub fn dequantize(codes: &[u8], scale_inv: f32, format: Format) -> Vec<f32> {
    codes.iter().map(|&it| format.decode(it) * scale_inv).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_has_no_magnitude() {
        assert_eq!(amax(&[1.0, f32::NAN, -3.0]), 3.0);
        assert_eq!(amax(&[f32::NAN, -f32::NAN]), 0.0);
        assert_eq!(amax(&[f32::NAN, f32::NEG_INFINITY]), f32::INFINITY);
        assert_eq!(amax(&[]), 0.0);
    }

    #[test]
    fn a_scale_too_large_for_f32_is_the_largest_number_of_the_element_type() {
        let bf16_max = f32::from_bits(0x7f7f_0000);
        let rule = ScaleRule { overflow: bf16_max, ..ScaleRule::tensor(Format::E4M3) };
        assert_eq!(rule.scale(1e-37), bf16_max);
        assert_eq!(ScaleRule { pow2: true, ..rule }.scale(1e-37), 2f32.powi(127));
    }
}
