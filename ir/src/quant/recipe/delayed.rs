//! `DelayedScaling`: one scale per tensor, from the amaxes of earlier micro-batches.
//!
//! The scale does not wait for the amax, but is one behind: what grows suddenly saturates. Histories and scales are state of the plan.

use super::{Fp8Format, QuantSpec, RecipeDef, RecipeError, Role, Scaling, require};
use crate::quant::AmaxAlgo;

recipe! {
    /// See the [module docs](self).
    pub struct DelayedScaling {
        /// Scales are 2^margin below what the amax asks for, which leaves room for growth; 0.
        pub margin: i32 = 0,
        /// Formats of the codes; `Hybrid`.
        pub fp8_format: Fp8Format = Fp8Format::Hybrid,
        /// Amaxes that are kept for each tensor; 1024.
        pub amax_history_len: u32 = history(),
        /// Which of them makes the scale; `Max`.
        pub amax_compute_algo: AmaxAlgo = AmaxAlgo::Max,
    }
}

/// Amaxes that are kept by default.
pub(super) fn history() -> u32 {
    1024
}

pub(super) fn is_history(it: &u32) -> bool {
    *it == history()
}

impl RecipeDef for DelayedScaling {
    fn spec(&self, role: Role) -> Option<QuantSpec> {
        let scaling = Scaling::Delayed {
            margin: self.margin,
            history: self.amax_history_len,
            algo: self.amax_compute_algo,
        };
        Some(QuantSpec { format: self.fp8_format.of(role), scaling })
    }

    fn check(&self) -> Result<(), RecipeError> {
        check_margin("margin", self.margin)?;
        check_history("amax_history_len", self.amax_history_len)
    }
}

/// A negative margin would saturate the largest elements of every tensor. The largest number of E4M3 is
/// 2^17.8 times its smallest, so that more than 17 binary orders below it not even the amax is left.
pub(super) fn check_margin(field: &str, margin: i32) -> Result<(), RecipeError> {
    require((0..=17).contains(&margin), field, margin, "from 0 to 17")
}

/// The latest amax needs a place.
pub(super) fn check_history(field: &str, history: u32) -> Result<(), RecipeError> {
    require(history > 0, field, history, "at least 1")
}
