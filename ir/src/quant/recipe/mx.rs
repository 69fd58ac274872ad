//! `MXFP8BlockScaling`: an E8M0 scale, a power of two, for each 1x32.
//!
//! No amax crosses a rank: a block is never split.

use super::{Fp8Format, QuantSpec, RecipeDef, Role, Scaling};

recipe! {
    /// See the [module docs](self).
    pub struct MXFP8BlockScaling {
        /// Formats of the codes; `E4M3`.
        pub fp8_format: Fp8Format = Fp8Format::E4M3,
        /// A weight has a scale for each 32x32, so that dgrad and fprop read the same codes; false.
        pub enable_2d_quantization: bool = false,
    }
}

impl RecipeDef for MXFP8BlockScaling {
    fn spec(&self, role: Role) -> Option<QuantSpec> {
        let two_dimensional = role == Role::Weight && self.enable_2d_quantization;
        let scaling = Scaling::Mx { two_dimensional };
        Some(QuantSpec { format: self.fp8_format.of(role), scaling })
    }
}
