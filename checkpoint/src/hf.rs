//! Models and weights of Hugging Face and TransformerEngine.
//!
//! [`config`] makes a `model.ron` of a `config.json`. [`import`] reads weights under foreign names into a
//! checkpoint, [`export`] writes those of a checkpoint under foreign names, both by a
//! [`Mapping`](crate::mapping::Mapping). Tensors are moved in bands of rows, so that what is in memory is
//! the one tensor that is being made.

pub mod config;
pub mod convert;
pub mod error;
pub mod export;
pub mod fused;
pub mod import;
pub mod params;
pub mod write;

pub use error::{Mismatch, TransferError};
