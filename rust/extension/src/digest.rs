//! The digest of memory in row-major order, for tensors that Python holds.

use std::slice;

use gradclip_core::cpu::Threads;
use gradclip_core::cpu::digest::{Word, digest as of_words};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The digest of `words` words of `bytes` bytes each (1, 2 or 4) from `address` on, of which the first has number `first`.
///
/// The caller holds the tensor that owns this memory, which is contiguous and on the CPU.
#[pyfunction]
pub fn digest(py: Python<'_>, address: usize, words: usize, bytes: usize, first: u64, threads: usize) -> PyResult<u64> {
    let threads = Threads::new(threads);
    if words == 0 {
        return Ok(0);
    }
    match bytes {
        1 => of(py, at::<u8>(address, words)?, first, threads),
        2 => of(py, at::<u16>(address, words)?, first, threads),
        4 => of(py, at::<u32>(address, words)?, first, threads),
        _ => Err(PyValueError::new_err(format!("`bytes` is {bytes}; expected 1, 2 or 4"))),
    }
}

fn of<W: Word>(py: Python<'_>, words: &[W], first: u64, threads: Threads) -> PyResult<u64> {
    Ok(py.detach(|| of_words(words, first, threads)))
}

/// The words at an address, for as long as the caller holds their tensor.
fn at<'a, W: Word>(address: usize, words: usize) -> PyResult<&'a [W]> {
    let pointer = address as *const W;
    if pointer.is_null() || !pointer.is_aligned() {
        let bytes = size_of::<W>();
        return Err(PyValueError::new_err(format!("`address` is {address}; expected a multiple of {bytes}, not 0")));
    }
    // SAFETY: the pointer is aligned and not null, and the caller of `digest` vouches for so many words of initialized
    // memory there, which it holds during the call.
    Ok(unsafe { slice::from_raw_parts(pointer, words) })
}
