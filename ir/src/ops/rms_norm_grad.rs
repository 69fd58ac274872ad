//! `rms_norm_grad`: gradients of `rms_norm`. See [`norm_grad`](super::norm_grad).

use crate::ops::norm_grad::NormGrad;

/// Gradients of a norm without mean and bias.
pub type RmsNormGrad = NormGrad<false>;
