//! Parameters -> gradients -> descriptors, without Python calls where the type is exactly torch's.

use std::ops::Range;

use gradclip_core::dtype::DType;
use gradclip_core::plan::Device;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use rustc_hash::FxHashSet;

use crate::attribute::Attribute;
use crate::descriptors::{Descriptors, Seen};
use crate::dlpack::{Exchange, View};
use crate::kinds::Plain;

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

/// The gradients of a list.
pub struct Read<'py> {
    /// The tensors.
    pub tensors: Vec<Bound<'py, PyAny>>,
    /// For each tensor, the position of its parameter in the caller's list.
    pub positions: Vec<usize>,
    /// Places in `tensors` of those that have memory to plan; torch operations handle the others.
    pub planned: Vec<usize>,
    /// The descriptors of those that are planned.
    pub descriptors: Descriptors,
}

/// The gradients of parameters, each parameter once, those without a gradient left out.
///
/// # Errors
/// `TypeError` naming the parameter for integer, boolean and other dtypes without a norm.
pub fn gradients_of<'py>(
    parameters: &Bound<'py, PyTuple>,
    attribute: &Bound<'py, PyString>,
    names: &Names,
) -> PyResult<Read<'py>> {
    let py = parameters.py();
    let attribute = Attribute::new(attribute)?;
    let gradient = |position, parameter: &Bound<'py, PyAny>| attribute.of(parameter, || names.of(py, position));
    read(parameters, names, attribute.is_torchs(), gradient, |_| None)
}

/// Raw tensors as gradients, each object once; `owned` are the logical elements that this rank counts of each.
///
/// # Errors
/// As [`gradients_of`].
pub fn gradients_from<'py>(
    tensors: &Bound<'py, PyTuple>,
    owned: Option<Vec<Option<(u64, u64)>>>,
    names: &Names,
) -> PyResult<Read<'py>> {
    let range = |position| owned.as_ref().and_then(|owned| *owned.get(position)?).map(|(start, end)| start..end);
    read(tensors, names, true, |_, tensor| Ok(tensor.clone()), range)
}

/// What `gradient` finds for each object of a list; objects that are listed twice count once.
///
/// `is_steady`: torch's own objects give the same memory each time they are asked.
fn read<'py>(
    objects: &Bound<'py, PyTuple>,
    names: &Names,
    is_steady: bool,
    gradient: impl Fn(usize, &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    owned: impl Fn(usize) -> Option<Range<u64>>,
) -> PyResult<Read<'py>> {
    let mut reader = Reader::new(objects.py(), objects.len())?;
    let mut met = Met::default();
    for (position, object) in objects.iter_borrowed().enumerate() {
        if met.has(&object) {
            continue;
        }
        let tensor = gradient(position, &object)?;
        if tensor.is_none() {
            continue;
        }
        let may_follow = met.none_twice && is_steady && reader.plain.is(&object);
        let known = if may_follow { reader.take_if_next(&tensor, owned(position)) } else { Some(false) };
        if known == Some(true) {
            reader.push(position, tensor, true);
        } else if met.is_first(objects, position, &object) {
            let is_planned = match known {
                None => Ok(false),
                Some(_) => reader.describe(&tensor, owned(position)),
            };
            let is_planned = is_planned.map_err(|()| refused(&tensor, position, names))?;
            reader.push(position, tensor, is_planned);
        }
    }
    Ok(reader.read)
}

/// The objects of a list that were read.
///
/// While gradients lie where those of a known plan lie no object can come twice, as no plan has memory twice; only from
/// then on they are written down.
struct Met {
    none_twice: bool,
    addresses: FxHashSet<usize>,
}

impl Default for Met {
    fn default() -> Self {
        Met { none_twice: true, addresses: FxHashSet::default() }
    }
}

impl Met {
    fn has(&self, object: &Bound<'_, PyAny>) -> bool {
        !self.none_twice && self.addresses.contains(&(object.as_ptr() as usize))
    }

    /// Notes an object and all before it; whether it is none of those.
    fn is_first(&mut self, objects: &Bound<'_, PyTuple>, position: usize, object: &Bound<'_, PyAny>) -> bool {
        if self.none_twice {
            self.addresses.extend(objects.iter_borrowed().take(position).map(|before| before.as_ptr() as usize));
            self.none_twice = false;
        }
        self.addresses.insert(object.as_ptr() as usize)
    }
}

struct Reader<'py> {
    exchange: Exchange,
    plain: Plain<'py>,
    read: Read<'py>,
}

impl<'py> Reader<'py> {
    fn new(py: Python<'py>, count: usize) -> PyResult<Self> {
        let read = Read {
            tensors: Vec::with_capacity(count),
            positions: Vec::with_capacity(count),
            planned: Vec::with_capacity(count),
            descriptors: Descriptors::default(),
        };
        Ok(Reader { exchange: Exchange::get(py)?, plain: Plain::new(py)?, read })
    }

    fn push(&mut self, position: usize, tensor: Bound<'py, PyAny>, is_planned: bool) {
        if is_planned {
            self.read.planned.push(self.read.tensors.len());
        }
        self.read.positions.push(position);
        self.read.tensors.push(tensor);
    }

    /// Takes a tensor if it is the next one of the plan that all before it followed; whether it is. `None` for one without
    /// memory to plan.
    fn take_if_next(&mut self, tensor: &Bound<'py, PyAny>, owned: Option<Range<u64>>) -> Option<bool> {
        let look = |view: View<'_>, descriptors: &mut Descriptors| {
            let dtype = dtype_of(&view).ok().flatten();
            dtype.is_some_and(|dtype| descriptors.take_if_next(&seen(dtype, &view, owned)))
        };
        self.view(tensor, look)
    }

    /// Notes the memory of a tensor; whether it has any that is planned. An error for dtypes without a norm.
    fn describe(&mut self, tensor: &Bound<'py, PyAny>, owned: Option<Range<u64>>) -> Result<bool, ()> {
        let look = |view: View<'_>, descriptors: &mut Descriptors| {
            let dtype = dtype_of(&view)?;
            Ok(dtype.map(|dtype| descriptors.push(seen(dtype, &view, owned))).is_some())
        };
        self.view(tensor, look).unwrap_or(Ok(false))
    }

    /// Shows `look` what torch says of a tensor; `None` where it has no memory that the engines may read.
    fn view<R>(&mut self, tensor: &Bound<'py, PyAny>, look: impl FnOnce(View<'_>, &mut Descriptors) -> R) -> Option<R> {
        let descriptors = &mut self.read.descriptors;
        self.plain.is(tensor).then(|| self.exchange.view(tensor, |view| look(view, descriptors))).flatten()
    }
}

fn seen<'a>(dtype: DType, view: &View<'a>, owned: Option<Range<u64>>) -> Seen<'a> {
    Seen {
        address: view.address,
        sizes: view.sizes,
        strides: view.strides,
        dtype,
        device: Device { kind: view.device_type, index: view.device_index },
        owned,
    }
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
