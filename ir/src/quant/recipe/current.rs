//! `Float8CurrentScaling`: one scale per tensor, from its own amax.
//!
//! The amax comes before the codes, so a tensor is read again for them; no state is kept.

use super::{Fp8Format, QuantSpec, RecipeDef, RecipeError, Role, Scaling, require};
use crate::ops::{Number, QuantScale};

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

pub(super) fn check_epsilon(field: &str, epsilon: Number) -> Result<(), RecipeError> {
    match QuantScale::EPSILON.missed_by(epsilon.0) {
        None => Ok(()),
        Some(expected) => require(false, field, epsilon.0, &expected),
    }
}
