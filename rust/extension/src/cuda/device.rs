//! Devices as the driver knows them, and the streams that torch works on.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use gradclip_core::plan::Device;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::driver::{Context, Stream};
use crate::dlpack::Exchange;

/// The compute capability of a device as one number: 90 for 9.0.
///
/// Raises `RuntimeError` without a driver or such a device.
#[pyfunction]
pub fn architecture(device: i32) -> PyResult<u32> {
    Ok(context(device)?.architecture)
}

/// The primary context of a device.
///
/// # Errors
/// `RuntimeError` without a driver or such a device.
pub fn context(device: i32) -> PyResult<&'static Context> {
    static CONTEXTS: OnceLock<Mutex<HashMap<i32, &'static Context>>> = OnceLock::new();
    let mut contexts = CONTEXTS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = contexts.get(&device) {
        return Ok(context);
    }
    let context = Context::of_device(device).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    // Contexts are few and stay as long as the process, as the driver's own do.
    let context: &'static Context = Box::leak(Box::new(context));
    contexts.insert(device, context);
    Ok(context)
}

/// The stream that torch works on for a device: the driver's handle (0 is the default stream), and whether a CUDA graph
/// takes down what is queued.
///
/// Raises `RuntimeError` where torch has no such device, or while a capture forbids the default stream.
#[pyfunction]
pub fn current_stream(py: Python<'_>, device: i32) -> PyResult<(u64, bool)> {
    let unknown = || PyRuntimeError::new_err(format!("torch has no current stream for CUDA device {device}"));
    let handle = Exchange::get(py)?.current_stream(Device::cuda(device)).ok_or_else(unknown)?;
    let capturing = context(device)?.enter().and_then(|entered| entered.is_capturing(Stream(handle)));
    Ok((handle, capturing.map_err(|error| PyRuntimeError::new_err(error.to_string()))?))
}
