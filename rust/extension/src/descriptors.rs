//! Descriptors of a list as it is read, compared on the way with those of a plan that was made before.
//!
//! While they are the same nothing is copied: a step whose gradients lie where they lay before costs a comparison.

use std::ops::Range;
use std::sync::Arc;

use gradclip_core::dtype::DType;
use gradclip_core::plan::{Descriptor, Device, PlanError};

use crate::planned::Planned;

/// A descriptor whose sizes and strides are borrowed from torch.
pub struct Seen<'a> {
    pub address: u64,
    pub sizes: &'a [i64],
    pub strides: &'a [i64],
    pub dtype: DType,
    pub device: Device,
    pub owned: Option<Range<u64>>,
}

impl Seen<'_> {
    fn is(&self, known: &Descriptor) -> bool {
        self.address == known.address
            && are_same(self.sizes, &known.sizes)
            && are_same(self.strides, &known.strides)
            && self.dtype == known.dtype
            && self.device == known.device
            && self.owned == known.owned
    }

    /// Whether a plan is worth following: it begins with this.
    pub fn begins(&self, descriptors: &[Descriptor]) -> bool {
        descriptors.first().is_some_and(|known| self.is(known))
    }

    fn copied(self) -> Descriptor {
        Descriptor {
            address: self.address,
            sizes: self.sizes.into(),
            strides: self.strides.into(),
            dtype: self.dtype,
            device: self.device,
            owned: self.owned,
        }
    }
}

/// Equality of slices that are too short to be worth a call.
fn are_same(some: &[i64], others: &[i64]) -> bool {
    some.len() == others.len() && some.iter().zip(others).all(|(one, other)| one == other)
}

/// The descriptors seen so far.
#[derive(Default)]
pub struct Descriptors {
    /// The plan that they follow, while they do.
    followed: Option<Arc<Planned>>,
    /// How many of its descriptors were seen.
    count: usize,
    /// All of them, once they follow no plan.
    own: Vec<Descriptor>,
}

impl Descriptors {
    /// Takes the next one if it is the next one of a known plan, which has its memory once; whether it is.
    pub fn take_if_next(&mut self, seen: &Seen<'_>) -> bool {
        let has_memory = (seen.device.is_cpu() || seen.device.is_cuda()) && !seen.sizes.contains(&0);
        let follows = has_memory && self.is_next(seen);
        self.count += usize::from(follows);
        follows
    }

    /// Takes the next one, whatever it is.
    pub fn push(&mut self, seen: Seen<'_>) {
        if self.is_next(&seen) {
            self.count += 1;
            return;
        }
        if let Some(planned) = self.followed.take() {
            self.own = planned.descriptors[..self.count].to_vec();
        }
        self.own.push(seen.copied());
    }

    /// Whether this comes next in the plan that is followed, or begins one.
    fn is_next(&mut self, seen: &Seen<'_>) -> bool {
        if self.count == 0 && self.own.is_empty() {
            self.followed = Planned::beginning_with(seen);
        }
        let known = self.followed.as_ref().and_then(|planned| planned.descriptors.get(self.count));
        known.is_some_and(|known| seen.is(known))
    }

    /// The plan of all that were pushed.
    ///
    /// # Errors
    /// As `Plan::new`.
    pub fn planned(self) -> Result<Arc<Planned>, PlanError> {
        match self.followed {
            Some(planned) if planned.descriptors.len() == self.count => {
                planned.used();
                Ok(planned)
            }
            Some(planned) => Planned::of(planned.descriptors[..self.count].to_vec()),
            None => Planned::of(self.own),
        }
    }
}
