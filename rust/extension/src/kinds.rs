//! Which objects are exactly tensors or parameters of torch.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple, PyType};

/// torch's own two tensor classes. Subclasses may wrap memory that is elsewhere, and answer with a null pointer or with
/// another tensor's.
pub struct Plain<'py> {
    tensor: Bound<'py, PyType>,
    parameter: Bound<'py, PyType>,
}

impl<'py> Plain<'py> {
    /// The classes of the torch that is loaded.
    ///
    /// # Errors
    /// If torch cannot be imported.
    pub fn new(py: Python<'py>) -> PyResult<Self> {
        static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static PARAMETER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        Ok(Plain {
            tensor: TENSOR.import(py, "torch", "Tensor")?.clone(),
            parameter: PARAMETER.import(py, "torch.nn", "Parameter")?.clone(),
        })
    }

    /// Whether an object is of one of them, and of no subclass.
    pub fn is(&self, object: &Bound<'_, PyAny>) -> bool {
        let of = object.get_type_ptr();
        of == self.tensor.as_type_ptr() || of == self.parameter.as_type_ptr()
    }

    /// What both classes alike define under a name.
    pub fn shared(&self, name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
        let of_tensor = self.tensor.getattr(name).ok()?;
        self.parameter.getattr(name).ok().filter(|of_parameter| of_parameter.is(&of_tensor))
    }
}

/// Whether all these objects are exactly tensors or parameters of torch.
#[pyfunction]
pub fn are_plain(objects: &Bound<'_, PyTuple>) -> PyResult<bool> {
    let plain = Plain::new(objects.py())?;
    Ok(objects.iter_borrowed().all(|object| plain.is(&object)))
}
