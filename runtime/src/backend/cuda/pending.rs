//! What other branches bring: libraries and communicators.

use ir::plan::Buffer;
use kernels::cuda::{AttentionCall, GemmCall, Pointer};

use crate::backend::cuda::driver::{CudaStream, Device, DeviceMemory};
use crate::bind::CollectiveCall;
use crate::error::RunError;

#[derive(Debug)]
pub struct Gemm;

impl Gemm {
    pub fn new(_: Device, _: &GemmCall, _: Option<Vec<u8>>) -> Result<Gemm, RunError> {
        Ok(Gemm)
    }
    pub fn run(
        &self,
        _: &dyn Fn(Pointer) -> u64,
        _: (u64, u64),
        _: &CudaStream,
    ) -> Result<(), RunError> {
        Ok(())
    }
}

#[derive(Debug)]
pub struct Attention;

impl Attention {
    pub fn new(_: Device, _: &AttentionCall) -> Result<Option<Attention>, RunError> {
        Ok(None)
    }
    pub fn run(&self, _: &dyn Fn(Pointer) -> u64, _: u64, _: &CudaStream) -> Result<(), RunError> {
        Ok(())
    }
}

#[derive(Debug)]
pub enum Comms {}

impl Comms {
    pub fn allocate(&self, _: u64) -> Result<DeviceMemory, RunError> {
        match *self {}
    }
    pub fn collective(
        &self,
        _: &CollectiveCall,
        _: &dyn Fn(Buffer) -> u64,
        _: (u64, u64),
        _: &CudaStream,
    ) -> Result<(), RunError> {
        match *self {}
    }
    pub fn abort(&self) {
        match *self {}
    }
}
