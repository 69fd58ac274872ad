//! `Float8CurrentScaling`: one scale per tensor, from its own amax.
//!
//! The amax comes before the codes, so a tensor is read again for them; no state is kept.

use super::{Fp8Format, QuantSpec, RecipeDef, RecipeError, Role, Scaling, require};
use crate::ops::Number;

recipe! {
    /// See the [module docs](self).
    pub struct Float8CurrentScaling {
        /// Scales are rounded down to a power of two; false.
        pub use_power_2_scales: bool = false,
        /// An amax below this counts as this; 0. In TransformerEngine a field of `fp8_quant_fwd_inp` and its like.
        pub amax_epsilon: Number = Number(0.0),
        /// Formats of the codes; `Hybrid`.
        pub fp8_format: Fp8Format = Fp8Format::Hybrid,
    }
}

impl RecipeDef for Float8CurrentScaling {
    fn spec(&self, role: Role) -> Option<QuantSpec> {
        let (pow2, epsilon) = (self.use_power_2_scales, self.amax_epsilon);
        let scaling = Scaling::Current { pow2, epsilon };
        Some(QuantSpec { format: self.fp8_format.of(role), scaling })
    }

    fn check(&self) -> Result<(), RecipeError> {
        check_epsilon("amax_epsilon", self.amax_epsilon)
    }
}

/// Scales are computed in f32.
pub(super) fn check_epsilon(field: &str, epsilon: Number) -> Result<(), RecipeError> {
    let ok = (0.0..=f64::from(f32::MAX)).contains(&epsilon.0);
    require(ok, field, epsilon.0, "at least 0 and a finite f32")
}
