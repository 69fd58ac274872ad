//! Current scaling: a scale from the amax of the tensor itself.

/// The scale of codes up to `max` for an amax. An amax below `epsilon` counts as that; 0, infinity and NaN
/// give 1, an overflow `overflow`. `pow2` rounds down to a power of two. TransformerEngine's
/// `compute_scale_from_amax`.
pub fn scale_from_amax(amax: f32, max: f32, pow2: bool, epsilon: f32, overflow: f32) -> f32 {
    let amax = if amax < epsilon { epsilon } else { amax };
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let scale = max / amax;
    let scale = if scale.is_infinite() { overflow } else { scale };
    if pow2 { f32::from_bits(scale.to_bits() & 0xff80_0000) } else { scale }
}
