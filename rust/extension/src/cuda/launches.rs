//! One step of a call on a device: a launch for each element type, over the chunks of its work list.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::driver::Stream;
use super::kernel::{Argument, Kernel, LaunchError};
use super::work_list::WorkList;
use Argument::{Double, Int32, Pointer};

/// What the last program of a sum does where more launches of the call follow: it leaves the stripes as they are.
const NOTHING: i32 = 0;

/// Addresses of `stripes`, `details`, `turns`, `scratch`, `output` and `result`, as kernels take them.
type Space = (u64, u64, u64, u64, u64, u64);

/// Launches that can be queued again and again, while the work lists stay where they are.
#[pyclass(frozen, module = "gradclip._core")]
pub struct Launches(Vec<Launch>);

struct Launch {
    kernel: Py<Kernel>,
    dtype: &'static str,
    segments: u64,
    owners: u64,
    chunks: i32,
    work: u32,
}

#[pymethods]
impl Launches {
    /// Launches over work lists: the kernel, how many blocks may take part in a chunk, the list, and its address on the
    /// device.
    #[new]
    fn new(lists: Vec<(Py<Kernel>, u32, PyRef<'_, WorkList>, u64)>) -> Self {
        let over = |(kernel, parts, list, address): (_, _, PyRef<'_, WorkList>, _)| {
            Launch::over(kernel, parts, &list, address)
        };
        Launches(lists.into_iter().map(over).collect())
    }

    /// A launch over no work list, which only ends a sum.
    #[staticmethod]
    fn over_nothing(kernel: Py<Kernel>) -> Self {
        Launches(vec![Launch { kernel, dtype: "", segments: 0, owners: 0, chunks: 0, work: 0 }])
    }

    /// Queues sums. After the last one `then` is done; `clip` is max_norm, eps and the loss scale.
    ///
    /// Raises `RuntimeError` if the driver refuses a launch; those before it run, and leave the workspace to nobody.
    fn sum(&self, py: Python<'_>, stream: u64, space: Space, then: i32, clip: (f64, f64, f64)) -> PyResult<()> {
        self.queue_sums(py, stream, space, then, &[Double(clip.0), Double(clip.1), Double(clip.2)])
    }

    /// Queues sums of powers, as `sum`; `power` is the kind, p, and the exponent and divisor of a scaled pass.
    fn powers(
        &self,
        py: Python<'_>,
        stream: u64,
        space: Space,
        then: i32,
        power: (i32, f64, i32, f64),
    ) -> PyResult<()> {
        let (kind, p, exponent, divisor) = power;
        self.queue_sums(py, stream, space, then, &[Int32(kind), Double(p), Int32(exponent), Double(divisor)])
    }

    /// Queues digests, which are added to the 64-bit integers of the tensors at `digests`.
    ///
    /// Raises `RuntimeError` if the driver refuses a launch; those before it run.
    fn digest(&self, py: Python<'_>, stream: u64, turns: u64, digests: u64) -> PyResult<()> {
        let queue = |launch: &Launch| launch.queue(stream, &[Pointer(digests), Pointer(turns), Int32(launch.chunks)]);
        let queued = py.detach(|| self.0.iter().try_for_each(queue));
        queued.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Queues the multiplication of all elements by the float64 at an address.
    ///
    /// Raises `RuntimeError` that names the element types that were not changed, and those that are.
    fn scale(&self, py: Python<'_>, stream: u64, turns: u64, factor: u64) -> PyResult<()> {
        self.queue_changes(py, stream, turns, |_| Pointer(factor))
    }

    /// Queues the limiting of all elements to [-limit, limit]; a limit for each element type. Raises as `scale`.
    fn clamp(&self, py: Python<'_>, stream: u64, turns: u64, limits: Vec<f64>) -> PyResult<()> {
        if limits.len() != self.0.len() {
            let (given, taken) = (limits.len(), self.0.len());
            return Err(PyValueError::new_err(format!("`limits` has {given} entries for {taken} element types")));
        }
        self.queue_changes(py, stream, turns, |place| Double(limits[place]))
    }
}

impl Launch {
    fn over(kernel: Py<Kernel>, parts: u32, list: &WorkList, address: u64) -> Self {
        let owners = address + list.owners_offset() as u64;
        let chunks = list.chunks();
        let work = chunks.unsigned_abs().saturating_mul(parts);
        Launch { kernel, dtype: list.dtype(), segments: address, owners, chunks, work }
    }

    /// Queues the kernel with its work list, and `others` after that.
    fn queue(&self, stream: u64, others: &[Argument]) -> Result<(), LaunchError> {
        let arguments = [&[Pointer(self.segments), Pointer(self.owners)], others].concat();
        // SAFETY: tables and workspaces are torch's memory, which its allocator keeps for what the stream has yet to
        // pass; the gradients are in use by the caller.
        unsafe { self.kernel.get().launch(Stream(stream), self.work, &arguments) }
    }
}

impl Launches {
    fn queue_sums(&self, py: Python<'_>, stream: u64, space: Space, then: i32, last: &[Argument]) -> PyResult<()> {
        let (stripes, details, turns, scratch, output, result) = space;
        let space = [stripes, details, turns, scratch, output, result].map(Pointer);
        let queue = |(place, launch): (usize, &Launch)| {
            let then = if place + 1 == self.0.len() { then } else { NOTHING };
            launch.queue(stream, &[&space[..], &[Int32(launch.chunks), Int32(then)], last].concat())
        };
        // A full queue makes the driver wait for the device, so not while other threads want Python.
        let queued = py.detach(|| self.0.iter().enumerate().try_for_each(queue));
        queued.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    fn queue_changes(
        &self,
        py: Python<'_>,
        stream: u64,
        turns: u64,
        number: impl Fn(usize) -> Argument + Sync,
    ) -> PyResult<()> {
        let queue = |(place, launch): (usize, &Launch)| {
            let queued = launch.queue(stream, &[number(place), Pointer(turns), Int32(launch.chunks)]);
            queued.map_err(|error| self.half_way(place, &error))
        };
        py.detach(|| self.0.iter().enumerate().try_for_each(queue)).map_err(PyRuntimeError::new_err)
    }

    /// What a launch that writes gradients and failed left behind: earlier ones cannot be undone.
    fn half_way(&self, failed: usize, error: &LaunchError) -> String {
        let done: Vec<_> = self.0[..failed].iter().map(|launch| launch.dtype).collect();
        let rest = if done.is_empty() { String::new() } else { format!(", those of {} were", done.join(", ")) };
        format!("gradients of {} were not changed{rest}: {error}", self.0[failed].dtype)
    }
}
