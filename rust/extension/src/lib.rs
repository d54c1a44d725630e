//! The Python extension `gradclip._core`: reads tensors and hands plans to the engines. No arithmetic here.

mod dlpack;
mod errors;
mod gradients;
mod sums;
mod tensors;

use pyo3::prelude::*;

/// Exact gradient norms and clipping: the engines behind `gradclip`.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::gradients::Gradients;
    #[pymodule_export]
    use crate::sums::{PowerScale, Sums, coefficient, leading_norm_type};

    use super::*;

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
            warnings.call_method1(
                "warn",
                ("gradclip was compiled without --release: it is slow",),
            )?;
        }
        Ok(())
    }
}
