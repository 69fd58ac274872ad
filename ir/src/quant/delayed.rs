//! Delayed scaling: the scale of a step from the amaxes of the steps before.
//!
//! The rule is that of TransformerEngine's fused kernel, `kernel_bulk` of
//! `common/recipe/delayed_scaling.cu` (2.20). Its unfused Python variant divides differently, by up to one
//! ulp, and lets zero and NaN into the history.

use serde::{Deserialize, Serialize};

use crate::quant::Format;

/// Which amax of the history sets the scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AmaxAlgo {
    /// The largest.
    #[default]
    Max,
    /// The last.
    MostRecent,
}

/// How the state of a quantized tensor follows from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Delayed {
    /// What is scaled.
    pub format: Format,
    /// Powers of two to stay below the largest number of the format.
    pub margin: i32,
    /// See [`AmaxAlgo`].
    pub algo: AmaxAlgo,
}

impl Delayed {
    /// The scale of the next step. `history` holds the amaxes of the last steps: in place 0 that of the step
    /// that ends, then from the oldest to the newest. `reduced` is that amax over all ranks, or 0 to take
    /// the local one. The history moves on and place 0 becomes 0, ready for the next step.
    ///
    /// A step without an amax (its tensor was not used) changes nothing. An infinite amax stays in the
    /// history but keeps the scale, and so does NaN, which has no part in a maximum.
    pub fn update(&self, history: &mut [f32], reduced: f32, previous_scale: f32) -> f32 {
        let last = if reduced != 0.0 { reduced } else { history[0] };
        if last == 0.0 {
            return previous_scale;
        }
        history.rotate_left(1);
        *history.last_mut().expect("history[0] exists") = last;
        let amax = match self.algo {
            AmaxAlgo::Max => history.iter().copied().fold(0.0, f32::max),
            AmaxAlgo::MostRecent => last,
        };
        history[0] = 0.0;
        if !amax.is_finite() || amax <= 0.0 {
            return previous_scale;
        }
        let max = self.format.max() * 2f32.powi(-self.margin);
        (max / amax).min(f32::MAX)
    }
}
