//! `adamw`: one step of Adam with decoupled weight decay. See [`adam`](super::adam).

use crate::ops::adam::AdamStep;

/// A step of Adam with decoupled weight decay.
pub type AdamW = AdamStep<true>;
