//! MXFP8: blocks of 32 elements of FP8 with a scale that is a power of two.
//!
//! The scale is rounded up, so that the largest element of a block lies in the upper half of the format's
//! range and never beyond it. Both copies of an operand come from the high-precision source, and neither
//! is transposed. Source: `common/cast/mxfp8/quantize_mxfp8.cuh` of TransformerEngine 2.20.

use crate::quant::Format;

/// The stored scale of a block with this amax: a number of [`Format::E8M0`]. The factor to quantize by is
/// `1 / scale_inv`, which is exact.
pub fn scale_inv(amax: f32, format: Format) -> f32 {
    // The kernel's product with the rounded reciprocal; the quotient has the same scale for every f32.
    Format::E8M0.round(amax * (1.0 / format.max()))
}
