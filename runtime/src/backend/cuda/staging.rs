//! Copies between the host and the device through pinned memory: two halves in turns, so that one is
//! filled while the other travels.

use crate::backend::cuda::driver::{CudaEvent, CudaStream, HostMemory};
use crate::error::RunError;

/// The most that one half holds.
const HALF_MAX: usize = 64 << 20;
/// The least, so that small copies do not make it grow again and again.
const HALF_MIN: usize = 64 << 10;

/// See the [module docs](self).
#[derive(Debug)]
pub struct Staging {
    stream: CudaStream,
    halves: [Half; 2],
}

#[derive(Debug)]
struct Half {
    memory: HostMemory,
    /// Reached when its last copy is done.
    done: CudaEvent,
}

impl Staging {
    /// Small halves, which grow when they are needed.
    pub fn new() -> Result<Staging, RunError> {
        let half = || -> Result<Half, RunError> {
            Ok(Half { memory: HostMemory::new(HALF_MIN)?, done: CudaEvent::new()? })
        };
        Ok(Staging { stream: CudaStream::new()?, halves: [half()?, half()?] })
    }

    /// Copies to the device, and waits.
    pub fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), RunError> {
        self.grow(bytes.len())?;
        let mut at = to;
        for (i, chunk) in bytes.chunks(self.halves[0].memory.len()).enumerate() {
            let half = &mut self.halves[i % 2];
            half.done.synchronize()?;
            half.memory.bytes_mut()[..chunk.len()].copy_from_slice(chunk);
            half.memory.upload(at, chunk.len(), &self.stream)?;
            half.done.record(&self.stream)?;
            at += chunk.len() as u64;
        }
        self.stream.synchronize()
    }

    /// Copies from the device, and waits.
    pub fn read(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), RunError> {
        self.grow(bytes.len())?;
        let size = self.halves[0].memory.len();
        let mut at = from;
        let mut arriving: Option<(usize, &mut [u8])> = None;
        for (i, chunk) in bytes.chunks_mut(size).enumerate() {
            let half = &mut self.halves[i % 2];
            half.memory.download(at, chunk.len(), &self.stream)?;
            half.done.record(&self.stream)?;
            at += chunk.len() as u64;
            if let Some((half, chunk)) = arriving.replace((i % 2, chunk)) {
                self.halves[half].take(chunk)?;
            }
        }
        match arriving {
            Some((half, chunk)) => self.halves[half].take(chunk),
            None => Ok(()),
        }
    }

    /// Makes the halves as large as copies of `bytes` bytes can use. Nothing is under way.
    fn grow(&mut self, bytes: usize) -> Result<(), RunError> {
        let wanted = bytes.clamp(HALF_MIN, HALF_MAX);
        if self.halves[0].memory.len() < wanted {
            // Powers of two, so that a series of growing tensors makes few allocations.
            let size = wanted.next_power_of_two();
            for half in &mut self.halves {
                half.memory = HostMemory::new(size)?;
            }
        }
        Ok(())
    }
}

impl Half {
    /// Waits for its copy and takes it.
    fn take(&self, to: &mut [u8]) -> Result<(), RunError> {
        self.done.synchronize()?;
        to.copy_from_slice(&self.memory.bytes()[..to.len()]);
        Ok(())
    }
}
