//! Core errors as Python exceptions.

use gradclip_core::norm::NormError;
use gradclip_core::plan::PlanError;
use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

/// A list that has no plan: `ValueError`, with tensors named by `name`.
pub fn plan_error(error: &PlanError, name: impl Fn(usize) -> String) -> PyErr {
    PyValueError::new_err(error.message(name))
}

/// A norm type that is none: `ValueError`.
pub fn norm_error(error: NormError) -> PyErr {
    PyValueError::new_err(error.to_string())
}
