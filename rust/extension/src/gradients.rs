//! `Gradients`: a list of gradients, read and planned, with the CPU engine behind it.

use std::sync::Arc;

use gradclip_core::cpu::{Pass, Threads, clamp, detect, digest_each, scale, sum, sum_each};
use gradclip_core::logical::Runs;
use gradclip_core::plan::{Chunk, Descriptor, Device, DevicePlan, Route, TensorPlan};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySequence, PyString, PyTuple};

use crate::cuda::{WorkList, digest_lists, segments_of, work_lists};
use crate::errors::plan_error;
use crate::planned::Planned;
use crate::sums::{PowerScale, Sums, kind};
use crate::tensors::{Names, Read, gradients_from, gradients_of};

/// Elements of a chunk on the CPU: enough to outweigh its limbs, few enough to balance threads.
const CPU_CHUNK: u64 = 64 * 1024;

/// One row of `Gradients.describe`.
type Row = (usize, &'static str, String, u64);

/// Gradients that were read, checked and planned; nothing was written. Memory is borrowed from the tensors, which
/// this object keeps alive.
#[pyclass(frozen, module = "gradclip._core")]
pub struct Gradients {
    tensors: Py<PyTuple>,
    positions: Vec<usize>,
    made: Arc<Planned>,
    /// For each planned tensor, its place in `tensors`.
    planned: Vec<usize>,
}

#[pymethods]
impl Gradients {
    /// The gradients that parameters hold in `attribute`: each parameter once, those without one left out.
    ///
    /// Raises `TypeError` for dtypes without a norm, `ValueError` for memory that overlaps.
    #[staticmethod]
    fn of(
        parameters: &Bound<'_, PyTuple>,
        attribute: &Bound<'_, PyString>,
        names: Option<Py<PyList>>,
    ) -> PyResult<Self> {
        let names = Names(names);
        Self::new(gradients_of(parameters, attribute, &names)?, parameters.py(), &names)
    }

    /// Raw tensors, each object once; `owned` gives the logical elements [start, end) that are counted of each.
    #[staticmethod]
    #[pyo3(signature = (tensors, names=None, owned=None))]
    fn from_tensors(
        tensors: &Bound<'_, PySequence>,
        names: Option<Py<PyList>>,
        owned: Option<Vec<Option<(u64, u64)>>>,
    ) -> PyResult<Self> {
        let names = Names(names);
        Self::new(gradients_from(&tensors.to_tuple()?, owned, &names)?, tensors.py(), &names)
    }

    fn __len__(&self) -> usize {
        self.positions.len()
    }

    /// All gradient tensors, in list order.
    #[getter]
    fn tensors(&self, py: Python<'_>) -> Py<PyTuple> {
        self.tensors.clone_ref(py)
    }

    /// For each gradient, the position of its parameter in the caller's list.
    #[getter]
    fn positions(&self) -> Vec<usize> {
        self.positions.clone()
    }

    /// Places in `tensors` of those that torch operations must handle.
    #[getter]
    fn foreign(&self) -> Vec<usize> {
        if self.planned.len() == self.positions.len() {
            return self.made.reference.clone();
        }
        let unplanned = (0..self.positions.len()).filter(|place| self.planned.binary_search(place).is_err());
        let mut places: Vec<usize> = unplanned.chain(self.made.reference.iter().map(|&at| self.planned[at])).collect();
        places.sort_unstable();
        places
    }

    /// Whether a planned gradient is float64 or complex128.
    #[getter]
    fn has_double(&self) -> bool {
        self.made.has_double
    }

    /// The place in `tensors` of the first planned gradient that is complex; None if none is.
    #[getter]
    fn first_complex(&self) -> Option<usize> {
        self.made.first_complex.map(|tensor| self.planned[tensor])
    }

    /// The CUDA devices with fused work, by index, in list order.
    #[getter]
    fn cuda_devices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let devices = self.made.plan.devices.iter().map(|device| device.device);
        PyTuple::new(py, devices.filter(|device| device.is_cuda()).map(|device| device.index).collect::<Vec<_>>())
    }

    /// Whether fused work lies on the CPU.
    #[getter]
    fn on_cpu(&self) -> bool {
        self.cpu().next().is_some()
    }

    /// Places in `tensors` of those whose fused work lies on a CUDA device.
    #[getter]
    fn cuda_places(&self) -> Vec<usize> {
        let planned = self.made.plan.tensors.iter().zip(&self.made.descriptors).zip(&self.planned);
        let is_fused = |tensor: &TensorPlan, on: &Descriptor| on.device.is_cuda() && tensor.route() == Route::Fused;
        planned.filter(|((tensor, on), _)| is_fused(tensor, on)).map(|(_, &place)| place).collect()
    }

    /// For each planned gradient, its place in `tensors`: what the tensor number in a work list stands for.
    #[getter]
    fn planned_places(&self) -> Vec<usize> {
        self.planned.clone()
    }

    /// What kernels on a CUDA device walk to sum (or, with `scales`, to write) gradients: a list an element type, where
    /// `reals` takes complex elements as two.
    fn work_lists(&self, device: i32, scales: bool, chunk: u64, reals: bool) -> PyResult<Vec<WorkList>> {
        let plan = self.made.plan.devices.iter().find(|plan| plan.device == Device::cuda(device));
        plan.map_or_else(|| Ok(Vec::new()), |plan| work_lists(segments_of(plan, scales), chunk, reals))
    }

    /// What kernels on a CUDA device walk to digest gradients that lie in memory in their logical order: a list for words
    /// of 16 bits, and one for words of 32.
    fn digest_lists(&self, device: i32, chunk: u64) -> PyResult<Vec<WorkList>> {
        let plan = self.made.plan.devices.iter().find(|plan| plan.device == Device::cuda(device));
        let is_contiguous = |tensor: u32| Runs::of(&self.made.descriptors[tensor as usize]).are_contiguous();
        plan.map_or_else(|| Ok(Vec::new()), |plan| digest_lists(&plan.scales, chunk, is_contiguous))
    }

    /// Places in `tensors` of those with fused work on a CUDA device that `digest_lists` leaves out.
    #[getter]
    fn permuted_cuda_places(&self) -> Vec<usize> {
        let mut places = self.cuda_places();
        places.retain(|place| {
            let tensor = self.planned.binary_search(place);
            tensor.is_ok_and(|tensor| !Runs::of(&self.made.descriptors[tensor]).are_contiguous())
        });
        places
    }

    /// A dictionary that belongs to the plan: what was prepared for it is found there at the next call.
    #[getter]
    fn kept<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.made.kept(py)
    }

    /// Sums of the gradients that the CPU engine handles, on at most `threads` threads.
    #[pyo3(signature = (norm_type, threads, scale=None))]
    fn sums(&self, py: Python<'_>, norm_type: f64, threads: usize, scale: Option<&PowerScale>) -> PyResult<Sums> {
        let pass = Pass { kind: kind(norm_type)?, scale: scale.map(|scale| scale.0), simd: detect() };
        Ok(Sums(py.detach(|| {
            let chunks = self.sum_chunks();
            // SAFETY: the chunks describe tensors that `self` keeps alive; users of torch do not write gradients
            // while they are clipped.
            unsafe { sum(&chunks, pass, Threads::new(threads)) }
        })))
    }

    /// Sums of each gradient apart, in list order; empty sums for those that the CPU engine does not handle.
    #[pyo3(signature = (norm_type, threads, scale=None))]
    fn sums_each(
        &self,
        py: Python<'_>,
        norm_type: f64,
        threads: usize,
        scale: Option<&PowerScale>,
    ) -> PyResult<Vec<Sums>> {
        let pass = Pass { kind: kind(norm_type)?, scale: scale.map(|scale| scale.0), simd: detect() };
        let planned = py.detach(|| {
            let chunks = self.sum_chunks();
            // SAFETY: as in `sums`.
            unsafe { sum_each(&chunks, self.planned.len(), pass, Threads::new(threads)) }
        });
        let mut each: Vec<Sums> = (0..self.positions.len()).map(|_| Sums(Default::default())).collect();
        for (sums, &place) in planned.into_iter().zip(&self.planned) {
            each[place].0 = sums;
        }
        Ok(each)
    }

    /// The digest of all elements of each gradient, in list order; 0 for those that the CPU engine does not handle.
    fn digests(&self, py: Python<'_>, threads: usize) -> Vec<u64> {
        let mut each = vec![0; self.positions.len()];
        let tensors = self.made.plan.tensors.iter().zip(&self.made.descriptors).zip(&self.planned);
        let is_handled = |tensor: &TensorPlan, on: &Descriptor| on.device.is_cpu() && tensor.route() == Route::Fused;
        let handled = tensors.filter(|((tensor, on), _)| is_handled(tensor, on));
        let (descriptors, places): (Vec<&Descriptor>, Vec<usize>) =
            handled.map(|((_, on), &place)| (on, place)).unzip();
        // SAFETY: as in `sums`.
        let found = py.detach(|| unsafe { digest_each(&descriptors, 0, detect(), Threads::new(threads)) });
        for (digest, place) in found.into_iter().zip(places) {
            each[place] = digest;
        }
        each
    }

    /// Multiplies the gradients that the CPU engine handles by `factor`; a factor of 1 writes nothing.
    fn scale(&self, py: Python<'_>, factor: f64, threads: usize) {
        if factor != 1.0 {
            // SAFETY: the plan refused tensors that overlap, `self` keeps them alive, and users of torch do not use
            // gradients while they are clipped.
            py.detach(|| unsafe { scale(&self.scale_chunks(), factor, detect(), Threads::new(threads)) });
        }
    }

    /// Limits the elements that the CPU engine handles to [-limit, limit].
    fn clamp(&self, py: Python<'_>, limit: f64, threads: usize) {
        // SAFETY: as in `scale`.
        py.detach(|| unsafe { clamp(&self.scale_chunks(), limit, detect(), Threads::new(threads)) });
    }

    /// For each planned gradient: its place in `tensors`, route, reason and number of CPU chunks.
    fn describe(&self) -> Vec<Row> {
        let mut chunks = vec![0; self.planned.len()];
        for chunk in self.made.plan.devices.iter().flat_map(|device| device.scale_chunks(CPU_CHUNK)) {
            chunks[chunk.tensor as usize] += 1;
        }
        let rows = self.made.plan.tensors.iter().zip(&self.planned).zip(chunks);
        rows.map(|((tensor, &place), chunks)| (place, route(tensor.route()), tensor.reason.to_string(), chunks))
            .collect()
    }
}

impl Gradients {
    fn new(read: Read<'_>, py: Python<'_>, names: &Names) -> PyResult<Self> {
        let Read { tensors, positions, planned, descriptors } = read;
        let name = |tensor: usize| names.of(py, positions[planned[tensor]]);
        let made = descriptors.planned().map_err(|error| plan_error(&error, name))?;
        Ok(Gradients { tensors: PyTuple::new(py, tensors)?.unbind(), positions, made, planned })
    }

    fn cpu(&self) -> impl Iterator<Item = &DevicePlan> {
        self.made.plan.devices.iter().filter(|device| device.device.is_cpu())
    }

    fn sum_chunks(&self) -> Vec<Chunk> {
        self.cpu().flat_map(|device| device.sum_chunks(CPU_CHUNK)).collect()
    }

    fn scale_chunks(&self) -> Vec<Chunk> {
        self.cpu().flat_map(|device| device.scale_chunks(CPU_CHUNK)).collect()
    }
}

fn route(route: Route) -> &'static str {
    match route {
        Route::Fused => "fused",
        Route::Reference => "reference",
    }
}
