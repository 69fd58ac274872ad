//! `layer_norm`: each row minus its mean, over its deviation. See [`norm`](super::norm).

use crate::ops::norm::Norm;

/// A norm with mean and bias.
pub type LayerNorm = Norm<true>;
