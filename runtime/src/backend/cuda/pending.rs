//! What other branches bring: communicators.

use ir::plan::Buffer;

use crate::backend::cuda::driver::{CudaStream, DeviceMemory};
use crate::bind::CollectiveCall;
use crate::error::RunError;

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
