//! ir

pub mod placement;
