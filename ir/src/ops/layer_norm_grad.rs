//! `layer_norm_grad`: gradients of `layer_norm`. See [`norm_grad`](super::norm_grad).

use crate::ops::norm_grad::NormGrad;

/// Gradients of a norm with mean and bias.
pub type LayerNormGrad = NormGrad<true>;
