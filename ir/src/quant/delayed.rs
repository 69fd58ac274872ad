//! Delayed scaling: a scale from the amaxes of earlier steps.

use serde::{Deserialize, Serialize};

/// Which amax of a history makes the scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AmaxAlgo {
    /// The largest.
    #[default]
    Max,
    /// The latest.
    MostRecent,
}

/// Takes `amax` into `history` and returns the next scale: TransformerEngine's fused update
/// (`amax_and_scale_update_after_reduction`). `history[0]` is a slot that is free.
pub fn delayed_update(
    history: &mut [f32],
    amax: f32,
    previous: f32,
    max: f32,
    margin: i32,
    algo: AmaxAlgo,
) -> f32 {
    let last = if amax == 0.0 { history.first().copied().unwrap_or(0.0) } else { amax };
    let mut largest = 0f32;
    if last != 0.0 {
        history.rotate_left(1);
        if let Some(slot) = history.last_mut() {
            *slot = last;
        }
        largest = history.iter().fold(0.0, |res, &it| res.max(it));
        history[0] = 0.0;
    }
    let amax = match algo {
        AmaxAlgo::Max => largest,
        AmaxAlgo::MostRecent => last,
    };
    match amax.is_finite() && amax > 0.0 {
        true => (max * 2f32.powi(-margin) / amax).min(f32::MAX),
        false => previous,
    }
}
