//! Handles of libraries: one for each device, for as long as something uses it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::backend::cuda::driver::Device;
use crate::error::RunError;

/// See the [module docs](self). For a `static`.
#[derive(Debug)]
pub(crate) struct PerDevice<T>(Mutex<BTreeMap<u32, Weak<T>>>);

impl<T> PerDevice<T> {
    pub(crate) const fn new() -> PerDevice<T> {
        PerDevice(Mutex::new(BTreeMap::new()))
    }

    /// The handle of `device`, whose context is current; made if nothing uses one.
    pub(crate) fn get(
        &self,
        device: Device,
        make: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<Arc<T>, RunError> {
        let mut handles = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = handles.get(&device.ordinal).and_then(Weak::upgrade) {
            return Ok(found);
        }
        let made = Arc::new(make()?);
        handles.insert(device.ordinal, Arc::downgrade(&made));
        Ok(made)
    }
}
