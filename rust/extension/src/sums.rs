//! `Sums`: what a pass over gradients leaves behind, as a Python object.

use gradclip_core::cpu::float_mode::{self, in_standard_mode};
use gradclip_core::exact::{self, SUMS_LENGTH, Sums as CoreSums};
use gradclip_core::finish;
use gradclip_core::norm::{NormKind, Scale};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::norm_error;

/// The exact sums of a set of gradients: integers, so that merging has no order.
#[pyclass(frozen, module = "gradclip._core")]
pub struct Sums(pub CoreSums);

#[pymethods]
impl Sums {
    /// The sums of nothing.
    #[new]
    fn new() -> Self {
        Sums(CoreSums::default())
    }

    /// The sums behind 144 integers, as `to_list` gives them or as their sum over ranks or devices.
    #[staticmethod]
    fn from_list(values: Vec<i64>) -> PyResult<Self> {
        let length = values.len();
        let vector: [i64; SUMS_LENGTH] = values.try_into().map_err(|_| {
            PyValueError::new_err(format!("`values` has {length} integers; expected {SUMS_LENGTH}, as `to_list` gives"))
        })?;
        Ok(Sums(CoreSums::from_vector(&vector)))
    }

    /// 136 limbs with carries propagated, then the counts of NaN, +Inf, -Inf, zeros and misfits, and the extreme key.
    fn to_list(&self) -> Vec<i64> {
        self.0.to_vector().into()
    }

    /// The sums of both sets.
    fn merged(&self, other: &Sums) -> Sums {
        let mut sums = self.0.clone();
        sums.merge(&other.0);
        Sums(sums)
    }

    /// The total norm in float64; None when terms left float64's range and `scale` must be found first.
    #[pyo3(signature = (norm_type, scale=None))]
    fn total(&self, norm_type: f64, scale: Option<&PowerScale>) -> PyResult<Option<f64>> {
        Ok(finish::total(&self.0, kind(norm_type)?, scale.map(|scale| scale.0)))
    }

    /// The scale for a second pass of `norm_type`, from a pass with `leading_norm_type(norm_type)`.
    fn scale(&self, norm_type: f64) -> PyResult<PowerScale> {
        Ok(PowerScale(finish::scale_from(&self.0, kind(norm_type)?)))
    }
}

/// What magnitudes are divided by before they are raised to p.
#[pyclass(frozen, module = "gradclip._core")]
pub struct PowerScale(pub Scale);

#[pymethods]
impl PowerScale {
    /// The power of two; None when the scale is `divisor`.
    #[getter]
    fn exponent(&self) -> Option<i32> {
        match self.0 {
            Scale::Exponent(exponent) => Some(exponent),
            Scale::Divisor(_) => None,
        }
    }

    /// The divisor itself, for very large |p|; None when the scale is a power of two.
    #[getter]
    fn divisor(&self) -> Option<f64> {
        match self.0 {
            Scale::Exponent(_) => None,
            Scale::Divisor(divisor) => Some(divisor),
        }
    }
}

/// The norm type whose extreme magnitude scales the powers of `norm_type`: inf, or -inf for negative ones.
#[pyfunction]
pub fn leading_norm_type(norm_type: f64) -> PyResult<f64> {
    Ok(kind(norm_type)?.leading().p())
}

/// (total, coefficient, factor) of a clip from the exact total of the gradients: the total divided by the loss scale,
/// min(1, max_norm / (total + eps)), and what the gradients are multiplied by. p = 0 counts, and has no scale.
#[pyfunction]
pub fn clip_outcome(
    exact_total: f64,
    norm_type: f64,
    max_norm: f64,
    eps: f64,
    scale: f64,
) -> PyResult<(f64, f64, f64)> {
    let outcome = finish::outcome(exact_total, kind(norm_type)?, max_norm, eps, scale);
    Ok((outcome.total, outcome.coefficient, outcome.factor))
}

/// A float64 rounded to odd in float32: rounding that to a narrower type gives what one rounding would.
#[pyfunction]
pub fn to_odd_float32(value: f64) -> f32 {
    in_standard_mode(value, exact::to_odd_float32)
}

/// Puts this thread into the default floating-point mode (to nearest, subnormals kept); the mode before, for
/// `restore_mode`.
#[pyfunction]
pub fn standard_mode() -> u64 {
    float_mode::enter()
}

/// Puts back what `standard_mode` gave.
#[pyfunction]
pub fn restore_mode(mode: u64) {
    float_mode::restore(mode);
}

/// min(1, max_norm / (total + eps)) in float64; 1 for an infinite `max_norm`, NaN for a NaN total.
#[pyfunction]
pub fn coefficient(total: f64, max_norm: f64, eps: f64) -> f64 {
    finish::coefficient(total, max_norm, eps)
}

/// The kind of a norm type, or `ValueError`.
pub fn kind(norm_type: f64) -> PyResult<NormKind> {
    NormKind::new(norm_type).map_err(norm_error)
}
