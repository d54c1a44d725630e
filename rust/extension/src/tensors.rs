//! Parameters -> gradients -> descriptors, without Python calls where the type is exactly torch's.

use std::ops::Range;

use gradclip_core::dtype::DType;
use gradclip_core::plan::Device;
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyString, PyType};
use rustc_hash::FxHashSet;

use crate::descriptors::{Descriptors, Seen};
use crate::dlpack::{Exchange, View};

/// Names of the parameters, for errors: given ones, or their positions.
pub struct Names(pub Option<Py<PyList>>);

impl Names {
    /// "`layers.0.weight`", or "parameter 3".
    pub fn of(&self, py: Python<'_>, position: usize) -> String {
        let name = self.0.as_ref().and_then(|names| names.bind(py).get_item(position).ok());
        match name.and_then(|name| name.extract::<String>().ok()) {
            Some(name) => format!("`{name}`"),
            None => format!("parameter {position}"),
        }
    }
}

/// One gradient of the list.
pub struct Gradient {
    /// Position of its parameter in the caller's list.
    pub position: usize,
    /// The tensor.
    pub tensor: Py<PyAny>,
    /// Whether it has memory to plan; torch operations handle the others.
    pub is_planned: bool,
}

/// The gradients of a list, and the descriptors of those that are planned.
pub type Read = (Vec<Gradient>, Descriptors);

/// The gradients of parameters, each parameter once, those without a gradient left out.
///
/// # Errors
/// `TypeError` naming the parameter for integer, boolean and other dtypes without a norm.
pub fn gradients_of(parameters: &Bound<'_, PyList>, attribute: &Bound<'_, PyString>, names: &Names) -> PyResult<Read> {
    let mut seen = FxHashSet::with_capacity_and_hasher(parameters.len(), Default::default());
    let mut reader = Reader::new(parameters.py())?;
    let mut gradients = Vec::with_capacity(parameters.len());
    for (position, parameter) in parameters.iter().enumerate() {
        if !seen.insert(parameter.as_ptr() as usize) {
            continue;
        }
        let gradient = parameter.getattr(attribute).map_err(|error| absent(error, attribute, position, names))?;
        if !gradient.is_none() {
            gradients.push(reader.read(position, gradient, None, names)?);
        }
    }
    Ok((gradients, reader.descriptors))
}

/// An attribute that is not there, in words; what an attribute's own code raised otherwise.
fn absent(error: PyErr, attribute: &Bound<'_, PyString>, position: usize, names: &Names) -> PyErr {
    let py = attribute.py();
    if !error.is_instance_of::<PyAttributeError>(py) {
        return error;
    }
    let told = PyAttributeError::new_err(format!(
        "{} has no attribute `{attribute}`; name the attribute that holds gradients by grad= (None in it is no gradient)",
        names.of(py, position)
    ));
    told.set_cause(py, Some(error));
    told
}

/// Raw tensors as gradients, each object once; `owned` are the logical elements that this rank counts of each.
///
/// # Errors
/// As [`gradients_of`].
pub fn gradients_from(
    tensors: &Bound<'_, PyList>,
    owned: Option<Vec<Option<(u64, u64)>>>,
    names: &Names,
) -> PyResult<Read> {
    let mut seen = FxHashSet::with_capacity_and_hasher(tensors.len(), Default::default());
    let mut reader = Reader::new(tensors.py())?;
    let mut gradients = Vec::with_capacity(tensors.len());
    for (position, tensor) in tensors.iter().enumerate() {
        if seen.insert(tensor.as_ptr() as usize) {
            let range = owned.as_ref().and_then(|owned| *owned.get(position)?).map(|(start, end)| start..end);
            gradients.push(reader.read(position, tensor, range, names)?);
        }
    }
    Ok((gradients, reader.descriptors))
}

struct Reader<'py> {
    exchange: Exchange,
    tensor: Bound<'py, PyType>,
    parameter: Bound<'py, PyType>,
    descriptors: Descriptors,
}

impl<'py> Reader<'py> {
    fn new(py: Python<'py>) -> PyResult<Self> {
        static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static PARAMETER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        Ok(Reader {
            exchange: Exchange::get(py)?,
            tensor: TENSOR.import(py, "torch", "Tensor")?.clone(),
            parameter: PARAMETER.import(py, "torch.nn", "Parameter")?.clone(),
            descriptors: Descriptors::default(),
        })
    }

    fn read(
        &mut self,
        position: usize,
        tensor: Bound<'py, PyAny>,
        owned: Option<Range<u64>>,
        names: &Names,
    ) -> PyResult<Gradient> {
        let is_planned = match self.is_exact(&tensor) {
            true => {
                let descriptors = &mut self.descriptors;
                let look = |view: View<'_>| dtype_of(&view).map(|dtype| push(descriptors, dtype, &view, owned));
                self.exchange.view(&tensor, look).unwrap_or(Ok(false))
            }
            false => Ok(false),
        };
        let is_planned = is_planned.map_err(|()| refused(&tensor, position, names))?;
        Ok(Gradient { position, tensor: tensor.unbind(), is_planned })
    }

    /// Subclasses may wrap memory that is elsewhere, and answer with a null pointer or with another tensor's.
    fn is_exact(&self, tensor: &Bound<'py, PyAny>) -> bool {
        let of = tensor.get_type();
        of.is(&self.tensor) || of.is(&self.parameter)
    }
}

/// Notes the memory of a tensor whose type the engines read; whether it has such a type.
fn push(descriptors: &mut Descriptors, dtype: Option<DType>, view: &View<'_>, owned: Option<Range<u64>>) -> bool {
    let Some(dtype) = dtype else { return false };
    descriptors.push(Seen {
        address: view.address,
        sizes: view.sizes,
        strides: view.strides,
        dtype,
        device: Device { kind: view.device_type, index: view.device_index },
        owned,
    });
    true
}

/// `Ok(None)` for float8 and the like, which torch operations handle; an error for dtypes without a norm.
fn dtype_of(view: &View<'_>) -> Result<Option<DType>, ()> {
    const INT: u8 = 0;
    const UINT: u8 = 1;
    const FLOAT: u8 = 2;
    const BFLOAT: u8 = 4;
    const COMPLEX: u8 = 5;
    const BOOL: u8 = 6;
    let dtype = match (view.code, view.bits) {
        (FLOAT, 16) => DType::F16,
        (BFLOAT, 16) => DType::Bf16,
        (FLOAT, 32) => DType::F32,
        (FLOAT, 64) => DType::F64,
        (COMPLEX, 64) => DType::C64,
        (COMPLEX, 128) => DType::C128,
        (INT | UINT | BOOL, _) => return Err(()),
        _ => return Ok(None),
    };
    Ok(Some(dtype))
}

fn refused(tensor: &Bound<'_, PyAny>, position: usize, names: &Names) -> PyErr {
    let py = tensor.py();
    let dtype = tensor.getattr(intern!(py, "dtype")).map_or_else(|_| "unknown".into(), |dtype| dtype.to_string());
    PyTypeError::new_err(format!(
        "gradient of {} is {dtype}; expected a floating or complex dtype, so convert it, for instance by `.float()`",
        names.of(py, position)
    ))
}
