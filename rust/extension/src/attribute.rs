//! The attribute of a parameter that holds its gradient.

use pyo3::exceptions::PyAttributeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::kinds::Plain;

/// An attribute by name; where torch's own classes define it, it is read without a look-up for each parameter.
pub struct Attribute<'py> {
    name: Bound<'py, PyString>,
    plain: Plain<'py>,
    defined: Option<Getter<'py>>,
}

/// A data descriptor: what a class says of an attribute goes before what an object holds.
struct Getter<'py> {
    descriptor: Bound<'py, PyAny>,
    get: ffi::descrgetfunc,
}

impl<'py> Attribute<'py> {
    /// The attribute called `name`.
    ///
    /// # Errors
    /// If torch cannot be imported.
    pub fn new(name: &Bound<'py, PyString>) -> PyResult<Self> {
        let plain = Plain::new(name.py())?;
        let defined = plain.shared(name).and_then(Getter::new);
        Ok(Attribute { name: name.clone(), plain, defined })
    }

    /// Whether torch's own classes define it.
    pub fn is_torchs(&self) -> bool {
        self.defined.is_some()
    }

    /// What a parameter holds in it.
    ///
    /// # Errors
    /// What the attribute's own code raises; `AttributeError` in words, with `parameter` as the object's name, if there
    /// is no such attribute.
    pub fn of(&self, object: &Bound<'py, PyAny>, parameter: impl Fn() -> String) -> PyResult<Bound<'py, PyAny>> {
        match &self.defined {
            Some(getter) if self.plain.is(object) => getter.of(object),
            _ => object.getattr(&self.name).map_err(|error| self.absent(error, &parameter())),
        }
    }

    fn absent(&self, error: PyErr, parameter: &str) -> PyErr {
        let py = self.name.py();
        if !error.is_instance_of::<PyAttributeError>(py) {
            return error;
        }
        let told = PyAttributeError::new_err(format!(
            "{parameter} has no attribute `{}`; name the attribute that holds gradients by grad= (None in it is no gradient)",
            self.name
        ));
        told.set_cause(py, Some(error));
        told
    }
}

impl<'py> Getter<'py> {
    fn new(descriptor: Bound<'py, PyAny>) -> Option<Self> {
        let of = descriptor.get_type().as_type_ptr();
        // SAFETY: a live type object; the slots are those of the stable ABI.
        let (get, set) =
            unsafe { (ffi::PyType_GetSlot(of, ffi::Py_tp_descr_get), ffi::PyType_GetSlot(of, ffi::Py_tp_descr_set)) };
        if get.is_null() || set.is_null() {
            return None;
        }
        // SAFETY: what Python keeps in this slot is such a function.
        let get = unsafe { std::mem::transmute::<*mut std::ffi::c_void, ffi::descrgetfunc>(get) };
        Some(Getter { descriptor, get })
    }

    fn of(&self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = object.py();
        let of = object.get_type_ptr().cast();
        // SAFETY: the slot of the descriptor's type, called as attribute access calls it; it returns a new reference.
        unsafe { Bound::from_owned_ptr_or_err(py, (self.get)(self.descriptor.as_ptr(), object.as_ptr(), of)) }
    }
}
