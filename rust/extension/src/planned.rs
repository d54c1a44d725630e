//! Plans that were made before: a training step's gradients rarely change their memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gradclip_core::plan::{Descriptor, Device, Plan, PlanError};
use pyo3::prelude::*;

use crate::cuda::{WorkList, segments_of, work_lists};
use crate::descriptors::Seen;

/// How many plans are remembered: a few models or optimisers in turn.
const KEPT: usize = 8;

static RECENT: Mutex<VecDeque<Arc<Planned>>> = Mutex::new(VecDeque::new());

/// A plan with what it was made from, and the work lists that were made of it.
pub struct Planned {
    pub descriptors: Vec<Descriptor>,
    pub plan: Plan,
    lists: Mutex<Vec<(ListKind, Vec<Py<WorkList>>)>>,
}

/// What distinguishes work lists of one plan.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ListKind {
    /// Index of the CUDA device.
    pub device: i32,
    /// Whether gradients are written, not summed.
    pub scales: bool,
    /// Elements of a chunk at most.
    pub chunk: u64,
    /// Whether complex elements are taken as two reals.
    pub reals: bool,
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
        let plan = Plan::new(&descriptors)?;
        let planned = Arc::new(Planned { descriptors, plan, lists: Mutex::default() });
        let mut recent = locked(&RECENT);
        recent.push_front(planned.clone());
        recent.truncate(KEPT);
        Ok(planned)
    }

    /// The most recent plan whose list begins with this gradient.
    pub fn beginning_with(seen: &Seen<'_>) -> Option<Arc<Self>> {
        locked(&RECENT).iter().find(|planned| seen.begins(&planned.descriptors)).cloned()
    }

    /// The work lists of a device, one an element type; the same objects at each call, and for sums and scales where
    /// these walk the same.
    ///
    /// # Errors
    /// As [`work_lists`].
    pub fn work_lists(&self, py: Python<'_>, kind: ListKind) -> PyResult<Vec<Py<WorkList>>> {
        let clone = |lists: &[Py<WorkList>]| lists.iter().map(|list| list.clone_ref(py)).collect();
        if let Some((_, lists)) = locked(&self.lists).iter().find(|(known, _)| *known == kind) {
            return Ok(clone(lists));
        }
        let Some(device) = self.plan.devices.iter().find(|plan| plan.device == Device::cuda(kind.device)) else {
            return Ok(Vec::new());
        };
        let made = work_lists(segments_of(device, kind.scales), kind.chunk, kind.reals)?;
        let mut kept = locked(&self.lists);
        let shared = |list: WorkList| {
            let same = kept.iter().flat_map(|(_, lists)| lists).find(|known| known.get().same_as(&list));
            same.map_or_else(|| Py::new(py, list), |known| Ok(known.clone_ref(py)))
        };
        let made = made.into_iter().map(shared).collect::<PyResult<Vec<_>>>()?;
        let lists = clone(&made);
        kept.push((kind, made));
        Ok(lists)
    }
}

/// A plan for the same descriptors, which becomes the most recent one.
fn known(descriptors: &[Descriptor]) -> Option<Arc<Planned>> {
    let mut recent = locked(&RECENT);
    let place = recent.iter().position(|planned| planned.descriptors == descriptors)?;
    let planned = recent.remove(place)?;
    recent.push_front(planned.clone());
    Some(planned)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
