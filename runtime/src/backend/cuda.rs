//! The CUDA backend: the plan on one GPU.

#![allow(unsafe_code)]

pub mod doctor;
pub mod driver;
pub mod library;
