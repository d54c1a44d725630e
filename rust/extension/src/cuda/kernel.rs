//! A kernel, loaded on a device and launched with the parameters that its image declares.

use std::ffi::{CString, c_void};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use thiserror::Error;

use super::device::context;
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
    Double,
}

impl Type {
    /// The type in a C declaration such as `int32_t chunks`.
    fn of(declaration: &str) -> Option<Self> {
        match declaration.rsplit_once(' ')?.0 {
            "void*" => Some(Type::Pointer),
            "int32_t" => Some(Type::Int32),
            "double" => Some(Type::Double),
            _ => None,
        }
    }
}

/// What is passed for a parameter.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// An address on the device; 0 where there is none.
    Pointer(u64),
    /// A 32-bit integer.
    Int32(i32),
    /// A float64.
    Double(f64),
}

impl Argument {
    fn is_of(self, parameter: Type) -> bool {
        parameter
            == match self {
                Argument::Pointer(_) => Type::Pointer,
                Argument::Int32(_) => Type::Int32,
                Argument::Double(_) => Type::Double,
            }
    }

    /// The bytes that the driver reads it from.
    fn bytes(self) -> [u8; 8] {
        match self {
            Argument::Pointer(address) => address.to_ne_bytes(),
            Argument::Double(value) => value.to_ne_bytes(),
            Argument::Int32(value) => {
                let [a, b, c, d] = value.to_ne_bytes();
                [a, b, c, d, 0, 0, 0, 0]
            }
        }
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
        let refused = |source| LaunchError::Refused { kernel: symbol.into(), source };
        let function = function.map_err(|error| PyRuntimeError::new_err(refused(error).to_string()))?;
        Ok(Kernel { context, function, parameters, threads, shared, most_blocks, name: symbol.into() })
    }
}

impl Kernel {
    /// Queues the kernel on a stream for so many pieces of work; nulls are passed for the parameters that are left.
    ///
    /// # Errors
    /// The driver refuses, or the arguments are not what the image declares. Nothing runs then.
    ///
    /// # Safety
    /// What addresses point at must stay valid until the stream has passed the kernel.
    pub unsafe fn launch(&self, stream: Stream, work: u32, arguments: &[Argument]) -> Result<(), LaunchError> {
        let fits = |(argument, &parameter): (&Argument, &Type)| argument.is_of(parameter);
        if arguments.len() > self.parameters.len() || !arguments.iter().zip(&self.parameters).all(fits) {
            return Err(LaunchError::Arguments { kernel: self.name.clone() });
        }
        let mut values = vec![[0; 8]; self.parameters.len()];
        for (value, argument) in values.iter_mut().zip(arguments) {
            *value = argument.bytes();
        }
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let launch = Launch { grid: work.clamp(1, self.most_blocks), threads: self.threads, shared: self.shared };
        let launched = self.context.enter().and_then(|entered| {
            // SAFETY: the values are packed as the image declares them, which was checked above and whose order
            // manifest.py checked; the memory behind addresses is the caller's contract.
            unsafe { entered.launch(self.function, launch, stream, &mut pointers) }
        });
        launched.map_err(|source| LaunchError::Refused { kernel: self.name.clone(), source })
    }
}

/// Why a kernel did not start.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The driver refused.
    #[error("kernel `{kernel}` did not start: {source}")]
    Refused {
        /// The kernel.
        kernel: String,
        /// What the driver says.
        source: DriverError,
    },
    /// Not the parameters that this version passes.
    #[error("kernel `{kernel}` declares other parameters than are passed; reinstall gradclip")]
    Arguments {
        /// The kernel.
        kernel: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_have_types() {
        assert_eq!(Type::of("void* segments"), Some(Type::Pointer));
        assert_eq!(Type::of("int32_t chunks"), Some(Type::Int32));
        assert_eq!(Type::of("double eps"), Some(Type::Double));
        assert_eq!(Type::of("int64_t n"), None);
        assert_eq!(Type::of("half x"), None);
        assert_eq!(Type::of("nothing"), None);
    }

    #[test]
    fn arguments_are_of_one_type_and_in_the_machine_s_bytes() {
        for (argument, declared) in [
            (Argument::Pointer(7), Type::Pointer),
            (Argument::Int32(7), Type::Int32),
            (Argument::Double(7.0), Type::Double),
        ] {
            let all = [Type::Pointer, Type::Int32, Type::Double];
            assert_eq!(all.map(|parameter| argument.is_of(parameter)), all.map(|parameter| parameter == declared));
        }
        assert_eq!(Argument::Int32(-2).bytes()[..4], (-2i32).to_ne_bytes());
        assert_eq!(Argument::Double(0.5).bytes(), 0.5f64.to_ne_bytes());
    }
}
