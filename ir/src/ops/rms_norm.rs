//! `rms_norm`: each row over its root mean square. See [`norm`](super::norm).

use crate::ops::norm::Norm;

/// A norm without mean and bias.
pub type RmsNorm = Norm<false>;
