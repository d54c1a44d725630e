//! The digest of memory in row-major order, for tensors that Python holds.

use std::slice;

use gradclip_core::cpu::Threads;
use gradclip_core::cpu::digest as core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The digest of `words` words of `bytes` bytes each (1, 2 or 4) from `address` on, of which the first has number `first`.
///
/// The caller holds the tensor that owns this memory, which is contiguous and on the CPU.
#[pyfunction]
pub fn digest(py: Python<'_>, address: usize, words: usize, bytes: usize, first: u64, threads: usize) -> PyResult<u64> {
    if words == 0 {
        return Ok(0);
    }
    if address == 0 || address % bytes.max(1) != 0 {
        return Err(PyValueError::new_err(format!("`address` is {address}; expected a multiple of {bytes}, not 0")));
    }
    let threads = Threads::new(threads);
    match bytes {
        // SAFETY: the caller vouches for `words` words of initialized memory there, which outlive the call.
        1 => {
            Ok(py
                .detach(|| core::digest(unsafe { slice::from_raw_parts(address as *const u8, words) }, first, threads)))
        }
        // SAFETY: as above; the address was checked to be a multiple of two.
        2 => {
            Ok(py.detach(|| {
                core::digest(unsafe { slice::from_raw_parts(address as *const u16, words) }, first, threads)
            }))
        }
        // SAFETY: as above; the address was checked to be a multiple of four.
        4 => {
            Ok(py.detach(|| {
                core::digest(unsafe { slice::from_raw_parts(address as *const u32, words) }, first, threads)
            }))
        }
        _ => Err(PyValueError::new_err(format!("`bytes` is {bytes}; expected 1, 2 or 4"))),
    }
}
