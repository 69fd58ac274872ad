//! `NVFP4BlockScaling`: 4-bit codes, an E4M3 scale for each 1x16, and one f32 scale per tensor above those.
//!
//! The techniques are those of "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149): square
//! blocks of weights, random Hadamard transforms of what wgrad reads, stochastic rounding of gradients.

use super::{QuantSpec, RecipeDef, Role, Scaling};
use crate::quant::Format;

recipe! {
    /// See the [module docs](self).
    pub struct NVFP4BlockScaling {
        /// Inputs and gradients are not transformed for wgrad; false.
        pub disable_rht: bool = false,
        /// Gradients are rounded to nearest as well; false.
        pub disable_stochastic_rounding: bool = false,
        /// Weights have blocks of 1x16, not of 16x16; false.
        pub disable_2d_quantization: bool = false,
    }
}

impl RecipeDef for NVFP4BlockScaling {
    fn spec(&self, role: Role) -> Option<QuantSpec> {
        let scaling = Scaling::NvFp4 {
            two_dimensional: role == Role::Weight && !self.disable_2d_quantization,
            hadamard: role != Role::Weight && !self.disable_rht,
            stochastic: role == Role::Grad && !self.disable_stochastic_rounding,
        };
        Some(QuantSpec { format: Format::E2M1, scaling })
    }
}
