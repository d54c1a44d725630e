//! A kernel, loaded on a device and launched with the parameters that its image declares.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::driver::{Context, DriverError, Function, Launch, Stream};

/// A compiled kernel on one device.
#[pyclass(frozen, module = "gradclip._core")]
pub struct Kernel {
    context: &'static Context,
    function: Function,
    parameters: Vec<Type>,
    threads: u32,
    shared: u32,
    most_blocks: u32,
    name: String,
}

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Pointer,
    Int32,
    Int64,
    Double,
}

impl Type {
    /// The type in a C declaration such as `int32_t chunks`.
    fn of(declaration: &str) -> Option<Self> {
        match declaration.rsplit_once(' ')?.0 {
            "void*" => Some(Type::Pointer),
            "int32_t" => Some(Type::Int32),
            "int64_t" => Some(Type::Int64),
            "double" => Some(Type::Double),
            _ => None,
        }
    }

    /// An argument in the bytes that the driver reads it from.
    fn pack(self, value: &Bound<'_, PyAny>) -> PyResult<[u8; 8]> {
        let mut bytes = [0; 8];
        match self {
            Type::Pointer => bytes = value.extract::<u64>()?.to_ne_bytes(),
            Type::Int32 => bytes[..4].copy_from_slice(&value.extract::<i32>()?.to_ne_bytes()),
            Type::Int64 => bytes = value.extract::<i64>()?.to_ne_bytes(),
            Type::Double => bytes = value.extract::<f64>()?.to_ne_bytes(),
        }
        Ok(bytes)
    }
}

#[pymethods]
impl Kernel {
    /// Loads an image on a device. `parameters` are C declarations in order; `programs` is how many blocks a
    /// multiprocessor gets at most.
    ///
    /// Raises `RuntimeError` if the driver is missing or refuses the image, `ValueError` for a declaration of a type
    /// that is not passed here.
    #[new]
    #[pyo3(signature = (device, symbol, code, *, threads, shared, programs, parameters))]
    fn new(
        device: i32,
        symbol: &str,
        code: &[u8],
        threads: u32,
        shared: u32,
        programs: u32,
        parameters: Vec<String>,
    ) -> PyResult<Self> {
        let context = context(device)?;
        let unknown = |declaration: &String| {
            PyValueError::new_err(format!("parameter `{declaration}` of kernel `{symbol}` has an unknown type"))
        };
        let parameters = parameters
            .iter()
            .map(|declaration| Type::of(declaration).ok_or_else(|| unknown(declaration)))
            .collect::<PyResult<Vec<_>>>()?;
        let entry = CString::new(symbol)?;
        let function = context.enter().and_then(|entered| entered.load(code, &entry, shared));
        let most_blocks = context.multiprocessors.saturating_mul(programs);
        let function = function.map_err(|error| failed(symbol, &error))?;
        Ok(Kernel { context, function, parameters, threads, shared, most_blocks, name: symbol.into() })
    }

    /// Queues the kernel on a stream (the driver's handle) for `work` pieces of work; `arguments` are numbers and
    /// addresses, and zeros are passed for the parameters that are left.
    ///
    /// Raises `RuntimeError` if the driver refuses, `ValueError` for too many arguments. Nothing runs then.
    fn launch(&self, stream: u64, work: u32, arguments: &Bound<'_, PyTuple>) -> PyResult<()> {
        if arguments.len() > self.parameters.len() {
            let (given, taken) = (arguments.len(), self.parameters.len());
            return Err(PyValueError::new_err(format!("kernel `{}` takes {taken} arguments, not {given}", self.name)));
        }
        let mut values = vec![[0; 8]; self.parameters.len()];
        for ((value, argument), parameter) in values.iter_mut().zip(arguments.iter_borrowed()).zip(&self.parameters) {
            *value = parameter.pack(&argument)?;
        }
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let launch = Launch { grid: work.clamp(1, self.most_blocks), threads: self.threads, shared: self.shared };
        let entered = self.context.enter().map_err(|error| failed(&self.name, &error))?;
        // SAFETY: the image's own declarations say how the values are packed, and images.py checked them against
        // what callers pass; callers keep the memory behind addresses until the stream has passed the kernel.
        let status = unsafe { entered.launch(self.function, launch, Stream(stream), &mut pointers) };
        status.map_err(|error| failed(&self.name, &error))
    }
}

/// The compute capability of a device as one number: 90 for 9.0.
///
/// Raises `RuntimeError` without a driver or such a device.
#[pyfunction]
pub fn architecture(device: i32) -> PyResult<u32> {
    Ok(context(device)?.architecture)
}

fn context(device: i32) -> PyResult<&'static Context> {
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

fn failed(kernel: &str, error: &DriverError) -> PyErr {
    PyRuntimeError::new_err(format!("kernel `{kernel}` did not start: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_have_types() {
        assert_eq!(Type::of("void* segments"), Some(Type::Pointer));
        assert_eq!(Type::of("int32_t chunks"), Some(Type::Int32));
        assert_eq!(Type::of("double eps"), Some(Type::Double));
        assert_eq!(Type::of("int64_t n"), Some(Type::Int64));
        assert_eq!(Type::of("half x"), None);
        assert_eq!(Type::of("nothing"), None);
    }
}
