//! The Python extension `gradclip._core`: reads tensors and hands plans to the engines. No arithmetic here.

mod attribute;
mod cuda;
mod descriptors;
mod dlpack;
mod errors;
mod gradients;
mod kinds;
mod planned;
mod sums;
mod tensors;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// DLPack's device type.
const CUDA: i32 = 2;

/// Exact gradient norms and clipping: the engines behind `gradclip`.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::cuda::{Kernel, WorkList, architecture};
    #[pymodule_export]
    use crate::gradients::Gradients;
    #[pymodule_export]
    use crate::kinds::are_plain;
    #[pymodule_export]
    use crate::sums::{PowerScale, Sums, coefficient, leading_norm_type, unscaled};

    use super::*;

    /// The driver's handle of the stream that torch works on for a CUDA device; 0 is the default stream.
    #[pyfunction]
    fn current_stream(py: Python<'_>, device: i32) -> PyResult<u64> {
        let stream = crate::dlpack::Exchange::get(py)?.current_stream(CUDA, device);
        stream.ok_or_else(|| PyRuntimeError::new_err(format!("torch has no current stream for CUDA device {device}")))
    }

    /// The instruction set that the CPU engine uses on this machine.
    #[pyfunction]
    fn instruction_set() -> &'static str {
        gradclip_core::cpu::detect().name()
    }

    /// Warns where a debug build would make every measurement wrong.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        if cfg!(debug_assertions) {
            let warnings = module.py().import("warnings")?;
            warnings.call_method1("warn", ("gradclip was compiled without --release: it is slow",))?;
        }
        Ok(())
    }
}
