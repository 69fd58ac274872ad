//! The CUDA backend: the plan on one GPU.

#![allow(unsafe_code)]

pub mod cache;
pub mod driver;
pub mod gemm;
mod handles;
pub mod library;
