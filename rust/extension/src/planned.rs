//! Plans that were made before: a training step's gradients rarely change their memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gradclip_core::plan::{Descriptor, Plan, PlanError, Route};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::descriptors::Seen;

/// How many plans are remembered: a few models or optimisers in turn.
const KEPT: usize = 8;

static RECENT: Mutex<VecDeque<Arc<Planned>>> = Mutex::new(VecDeque::new());

/// A plan with what it was made from.
pub struct Planned {
    pub descriptors: Vec<Descriptor>,
    pub plan: Plan,
    /// Tensors that torch operations must handle.
    pub reference: Vec<usize>,
    /// Whether a tensor is float64 or complex128.
    pub has_double: bool,
    /// The first tensor that is complex.
    pub first_complex: Option<usize>,
    kept: PyOnceLock<Py<PyDict>>,
}

impl Planned {
    /// The plan of these descriptors, made anew only if none of the last ones is for the same.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn of(descriptors: Vec<Descriptor>) -> Result<Arc<Self>, PlanError> {
        if let Some(known) = known(&descriptors) {
            return Ok(known);
        }
        let planned = Arc::new(Self::new(descriptors)?);
        let mut recent = locked(&RECENT);
        recent.push_front(planned.clone());
        let kept = recent.len().min(KEPT);
        let forgotten = recent.split_off(kept);
        drop(recent);
        drop(forgotten); // what Python prepared for it may run code of any kind, so not under the lock
        Ok(planned)
    }

    /// Makes a plan the most recent one.
    pub fn used(self: &Arc<Self>) {
        let mut recent = locked(&RECENT);
        if let Some(place) = recent.iter().position(|planned| Arc::ptr_eq(planned, self)) {
            to_front(&mut recent, place);
        }
    }

    /// A recent plan whose list begins with this gradient.
    pub fn beginning_with(seen: &Seen<'_>) -> Option<Arc<Self>> {
        locked(&RECENT).iter().find(|planned| seen.begins(&planned.descriptors)).cloned()
    }

    fn new(descriptors: Vec<Descriptor>) -> Result<Self, PlanError> {
        let plan = Plan::new(&descriptors)?;
        let is_reference = |&tensor: &usize| plan.tensors[tensor].route() == Route::Reference;
        Ok(Planned {
            reference: (0..descriptors.len()).filter(is_reference).collect(),
            has_double: descriptors.iter().any(|descriptor| descriptor.dtype.is_double()),
            first_complex: descriptors.iter().position(|descriptor| descriptor.dtype.is_complex()),
            descriptors,
            plan,
            kept: PyOnceLock::new(),
        })
    }

    /// What Python prepared for this plan.
    pub fn kept<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.kept.get_or_init(py, || PyDict::new(py).unbind()).bind(py).clone()
    }
}

/// A plan for the same descriptors, which becomes the most recent one.
fn known(descriptors: &[Descriptor]) -> Option<Arc<Planned>> {
    let mut recent = locked(&RECENT);
    let place = recent.iter().position(|planned| planned.descriptors == descriptors)?;
    to_front(&mut recent, place);
    recent.front().cloned()
}

fn to_front(recent: &mut VecDeque<Arc<Planned>>, place: usize) {
    if let Some(planned) = recent.remove(place) {
        recent.push_front(planned);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
