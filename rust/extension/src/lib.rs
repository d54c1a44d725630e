//! The Python extension `gradclip._core`: reads tensors and hands plans to the engines. No arithmetic here.

mod attribute;
mod cuda;
mod descriptors;
mod dlpack;
mod errors;
mod gradients;
mod kinds;
mod planned;
mod snapshot;
mod sums;
mod tensors;

use pyo3::prelude::*;

/// Exact gradient norms and clipping: the engines behind `gradclip`.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::cuda::{Kernel, Launches, WorkList, architecture, current_stream};
    #[pymodule_export]
    use crate::gradients::Gradients;
    #[pymodule_export]
    use crate::kinds::are_plain;
    #[pymodule_export]
    use crate::snapshot::is_current;
    #[pymodule_export]
    use crate::sums::{
        PowerScale, Sums, clip_outcome, coefficient, leading_norm_type, restore_mode, standard_mode, to_odd_float32,
    };

    use super::*;

    /// Whether the engines may run: `GRADCLIP_FUSED=0` leaves everything to torch operations.
    #[pyfunction]
    fn is_fused() -> bool {
        std::env::var_os("GRADCLIP_FUSED").is_none_or(|said| said != "0")
    }

    /// The instruction set that the CPU engine uses on this machine.
    #[pyfunction]
    fn instruction_set() -> &'static str {
        gradclip_core::cpu::detect().name()
    }

    /// Sets up what forks must not interrupt, and warns where a debug build would make every measurement wrong.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        gradclip_core::cpu::prepare();
        if cfg!(debug_assertions) {
            let warnings = module.py().import("warnings")?;
            warnings.call_method1("warn", ("gradclip was compiled without --release: it is slow",))?;
        }
        Ok(())
    }
}
