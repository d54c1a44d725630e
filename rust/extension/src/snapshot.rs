//! Whether dictionaries still hold what a snapshot of them lists: a Module is followed without being listed.

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Whether dictionaries hold the same values under the same keys, in the same order, as a snapshot lists.
///
/// A snapshot is flat: a dictionary, its keys and values in turn, the next dictionary, and so on. Objects are compared
/// by identity; the snapshot keeps them alive, so that no identity is used again. No key may be a dictionary.
#[pyfunction]
pub fn is_current(snapshot: &Bound<'_, PyTuple>) -> bool {
    let mut listed = snapshot.iter_borrowed();
    while let Some(item) = listed.next() {
        let Ok(dict) = item.cast::<PyDict>() else { return false };
        let mut is_next = |object| listed.next().is_some_and(|item| item.as_ptr() == object);
        if !all_pointers(&dict, |key, value| is_next(key) && is_next(value)) {
            return false;
        }
    }
    true
}

/// Whether a condition holds for all keys and values of a dictionary; it may compare them, but not use them.
fn all_pointers(
    dict: &Bound<'_, PyDict>,
    mut holds: impl FnMut(*mut ffi::PyObject, *mut ffi::PyObject) -> bool,
) -> bool {
    let (mut position, mut key, mut value) = (0, ptr::null_mut(), ptr::null_mut());
    // SAFETY: a live dictionary that does not change: this thread holds the interpreter, and no Python code runs here.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &raw mut position, &raw mut key, &raw mut value) } != 0 {
        if !holds(key, value) {
            return false;
        }
    }
    true
}
