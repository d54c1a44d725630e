//! Descriptors -> a route for each tensor, and the segments of the fused ones by device.

use std::ops::Range;

use crate::lattice::Budget;
use crate::layout::{self, Layout, Memory, Strided, TooManyDims};
use crate::overlap::{self, Footprint, Span};
use crate::slice;

pub use crate::chunk::{Chunk, Segment};
pub use crate::descriptor::{Descriptor, Device};
pub use crate::plan_error::PlanError;
pub use crate::route::{Reason, Route};

/// What was decided for one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Why it goes its route.
    pub reason: Reason,
    /// Its logical elements.
    pub elements: u64,
}

impl TensorPlan {
    /// Who works on it.
    pub const fn route(&self) -> Route {
        self.reason.route()
    }
}

/// The fused work of one device, in list order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// The device.
    pub device: Device,
    /// What is summed: the owned elements, with their weights.
    pub sums: Vec<Segment>,
    /// What is scaled: every address once, weight 1.
    pub scales: Vec<Segment>,
}

impl DevicePlan {
    /// The chunks to sum, at most `chunk_elements` elements each.
    pub fn sum_chunks(&self, chunk_elements: u64) -> impl DoubleEndedIterator<Item = Chunk> + '_ {
        self.sums.iter().flat_map(move |segment| segment.chunks(chunk_elements))
    }

    /// The chunks to scale, at most `chunk_elements` elements each.
    pub fn scale_chunks(&self, chunk_elements: u64) -> impl DoubleEndedIterator<Item = Chunk> + '_ {
        self.scales.iter().flat_map(move |segment| segment.chunks(chunk_elements))
    }
}

/// The plan of a list of gradients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// One for each descriptor.
    pub tensors: Vec<TensorPlan>,
    /// One for each device with fused work, in the order of first appearance.
    pub devices: Vec<DevicePlan>,
}

impl Plan {
    /// Plans a list, each entry a tensor of its own (the caller drops repeated parameters).
    ///
    /// # Errors
    /// Anything that no engine may touch; the first such tensor in list order, then overlaps between tensors.
    pub fn new(descriptors: &[Descriptor]) -> Result<Self, PlanError> {
        let tensors = descriptors.len();
        if u32::try_from(tensors).is_err() {
            return Err(PlanError::TooManyTensors { tensors });
        }
        let mut planner = Planner::with_capacity(tensors);
        for (tensor, descriptor) in descriptors.iter().enumerate() {
            planner.add(tensor, descriptor)?;
        }
        planner.finish(descriptors)
    }
}

struct Planner {
    plan: Plan,
    spans: Vec<Span>,
    spaces: Vec<Device>,
    budget: Budget,
}

impl Planner {
    fn with_capacity(tensors: usize) -> Self {
        let plan = Plan { tensors: Vec::with_capacity(tensors), devices: Vec::new() };
        Planner { plan, spans: Vec::with_capacity(tensors), spaces: Vec::new(), budget: Budget::default() }
    }

    fn add(&mut self, tensor: usize, descriptor: &Descriptor) -> Result<(), PlanError> {
        let strided = Strided::new(&descriptor.sizes, &descriptor.strides, &mut self.budget)
            .map_err(|error| PlanError::Layout { tensor, error })?;
        let owned = owned_range(tensor, descriptor, &strided)?;
        let reason = self.route(tensor, descriptor, &strided, owned)?;
        self.plan.tensors.push(TensorPlan { reason, elements: strided.elements });
        Ok(())
    }

    /// Decides the route, and files the segments if it is the fused one.
    fn route(
        &mut self,
        tensor: usize,
        descriptor: &Descriptor,
        strided: &Strided,
        owned: Option<Range<u64>>,
    ) -> Result<Reason, PlanError> {
        if strided.elements == 0 {
            return Ok(Reason::Empty);
        }
        if !descriptor.device.is_fusible() {
            return Ok(Reason::Device { kind: descriptor.device.kind });
        }
        let span = self.span(tensor, descriptor, strided)?;
        self.spans.push(span);
        if !is_aligned(descriptor) {
            return Ok(Reason::Misaligned);
        }
        let layout = match strided.layout() {
            Ok(layout) => layout,
            Err(TooManyDims(dims)) => return Ok(Reason::Dims { dims }),
        };
        Ok(match self.file(tensor as u32, descriptor, strided, layout, owned) {
            Ok(()) => Reason::of_layout(&layout),
            Err(TooManyDims(dims)) => Reason::SliceDims { dims },
        })
    }

    /// The bytes that the tensor spans.
    fn span(&mut self, tensor: usize, descriptor: &Descriptor, strided: &Strided) -> Result<Span, PlanError> {
        let address = descriptor.address;
        if address == 0 {
            return Err(PlanError::NullPointer { tensor });
        }
        let extent = (strided.last + 1) * descriptor.dtype.bytes() as u64;
        let end = address.checked_add(extent).ok_or(PlanError::AddressOverflow { tensor, address })?;
        let space = position_or_push(&mut self.spaces, |space| *space == descriptor.device, || descriptor.device);
        Ok(Span { space: space as u32, tensor: tensor as u32, start: address, end })
    }

    /// Files the segments of a fused tensor under its device.
    fn file(
        &mut self,
        tensor: u32,
        descriptor: &Descriptor,
        strided: &Strided,
        layout: Layout,
        owned: Option<Range<u64>>,
    ) -> Result<(), TooManyDims> {
        let segment = Segment { tensor, dtype: descriptor.dtype, address: descriptor.address, layout };
        let pieces = owned.map(|owned| slice::pieces(strided, owned)).transpose()?;
        let device = self.device_plan(descriptor.device);
        match pieces {
            None => device.sums.push(segment),
            Some(pieces) => device.sums.extend(pieces.iter().map(|piece| part(&segment, piece))),
        }
        device.scales.push(Segment { layout: Layout { weight: 1, ..layout }, ..segment });
        Ok(())
    }

    fn device_plan(&mut self, device: Device) -> &mut DevicePlan {
        let Plan { tensors, devices } = &mut self.plan;
        // The first device usually has them all.
        let capacity = if devices.is_empty() { tensors.capacity() } else { 0 };
        let segments = || Vec::with_capacity(capacity);
        let new = || DevicePlan { device, sums: segments(), scales: segments() };
        let position = position_or_push(devices, |plan| plan.device == device, new);
        &mut devices[position]
    }

    /// Checks the tensors against each other.
    fn finish(mut self, descriptors: &[Descriptor]) -> Result<Plan, PlanError> {
        let footprint = |tensor: u32| footprint(&descriptors[tensor as usize]);
        overlap::check(&mut self.spans, footprint, &mut self.budget)?;
        Ok(self.plan)
    }
}

/// The owned elements, checked; `None` if these are all.
fn owned_range(tensor: usize, descriptor: &Descriptor, strided: &Strided) -> Result<Option<Range<u64>>, PlanError> {
    let elements = strided.elements;
    match descriptor.owned.clone() {
        Some(owned) if owned.start > owned.end || owned.end > elements => {
            Err(PlanError::OwnedRange { tensor, owned, elements })
        }
        owned => Ok(owned.filter(|owned| *owned != (0..elements))),
    }
}

/// A complex number is aligned as its parts.
fn is_aligned(descriptor: &Descriptor) -> bool {
    let parts = if descriptor.dtype.is_complex() { 2 } else { 1 };
    descriptor.address.is_multiple_of((descriptor.dtype.bytes() / parts) as u64)
}

fn part(whole: &Segment, piece: &slice::Piece) -> Segment {
    let address = whole.address + piece.offset * whole.dtype.bytes() as u64;
    Segment { address, layout: piece.layout, ..*whole }
}

/// The footprint of a tensor that [`Strided::new`] has accepted.
fn footprint(descriptor: &Descriptor) -> Footprint {
    let memory = Memory::of(layout::join_neighbours(&descriptor.sizes, &descriptor.strides));
    Footprint::new(descriptor.address, descriptor.dtype.bytes() as u64, &memory)
}

fn position_or_push<T>(items: &mut Vec<T>, is_wanted: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> usize {
    items.iter().position(is_wanted).unwrap_or_else(|| {
        items.push(new());
        items.len() - 1
    })
}
