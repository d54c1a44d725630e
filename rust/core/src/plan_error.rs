//! Gradients that are refused, before anything is written.

use std::ops::Range;

use thiserror::Error;

use crate::layout::LayoutError;
use crate::overlap::Conflict;

/// Why a list of gradients has no plan. Tensors are given by their position in the list.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{}", self.message(|tensor| format!("parameter {tensor}")))]
pub enum PlanError {
    /// Sizes and strides that cannot be addressed, or overlap themselves.
    Layout {
        /// The tensor.
        tensor: usize,
        /// What is wrong with them.
        error: LayoutError,
    },
    /// Elements, but a null pointer: a wrapper subclass or a fake tensor, whose memory is elsewhere or nowhere.
    NullPointer {
        /// The tensor.
        tensor: usize,
    },
    /// Memory that does not fit into the address space.
    AddressOverflow {
        /// The tensor.
        tensor: usize,
        /// Address of its first element.
        address: u64,
    },
    /// An owned range that is reversed or ends past the tensor.
    OwnedRange {
        /// The tensor.
        tensor: usize,
        /// The range.
        owned: Range<u64>,
        /// Elements of the tensor.
        elements: u64,
    },
    /// Two tensors have a byte in common.
    Overlap {
        /// The earlier tensor.
        first: usize,
        /// The later tensor.
        second: usize,
    },
    /// Two interleaved tensors for which the search ended without an answer.
    OverlapUndecided {
        /// The earlier tensor.
        first: usize,
        /// The later tensor.
        second: usize,
    },
    /// More tensors than 32 bits count.
    TooManyTensors {
        /// How many.
        tensors: usize,
    },
}

impl PlanError {
    /// The message, with tensors named by `name`, which completes "gradient of ...".
    pub fn message(&self, name: impl Fn(usize) -> String) -> String {
        match self {
            PlanError::Layout { tensor, error } => format!("gradient of {} {error}", name(*tensor)),
            PlanError::NullPointer { tensor } => format!(
                "gradient of {} has elements but no memory; pass a plain tensor: the local part of a wrapper, or `.clone()`",
                name(*tensor)
            ),
            PlanError::AddressOverflow { tensor, address } => format!(
                "gradient of {} at address {address:#x} does not fit into memory; check its sizes and strides",
                name(*tensor)
            ),
            PlanError::OwnedRange { tensor, owned, elements } => format!(
                "owned elements {}..{} of the gradient of {} are no range of its {elements} elements; \
                 pass start <= end <= {elements}",
                owned.start,
                owned.end,
                name(*tensor)
            ),
            PlanError::Overlap { first, second } => format!(
                "gradients of {} and {} share memory; give one of them memory of its own, for instance by `.clone()`",
                name(*first),
                name(*second)
            ),
            PlanError::OverlapUndecided { first, second } => format!(
                "gradients of {} and {} are interleaved and may share memory; give one of them memory of its own, \
                 for instance by `.clone()`",
                name(*first),
                name(*second)
            ),
            PlanError::TooManyTensors { tensors } => {
                format!("{tensors} gradients are more than one plan takes; pass at most {}", u32::MAX)
            }
        }
    }
}

impl From<Conflict> for PlanError {
    fn from(conflict: Conflict) -> Self {
        let (first, second) = (conflict.first as usize, conflict.second as usize);
        if conflict.certain {
            PlanError::Overlap { first, second }
        } else {
            PlanError::OverlapUndecided { first, second }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_names_the_tensor_and_the_remedy() {
        let name = |tensor| format!("`layer.{tensor}`");
        let layout = |error| PlanError::Layout { tensor: 3, error }.message(name);
        let messages = [
            layout(LayoutError::RankMismatch { sizes: 2, strides: 1 }),
            layout(LayoutError::NegativeSize { dim: 1, size: -4 }),
            layout(LayoutError::NegativeStride { dim: 0, stride: -2 }),
            layout(LayoutError::TooLarge),
            layout(LayoutError::OverlapsItself),
            layout(LayoutError::OverlapUndecided),
            PlanError::NullPointer { tensor: 3 }.message(name),
            PlanError::AddressOverflow { tensor: 3, address: u64::MAX }.message(name),
            PlanError::OwnedRange { tensor: 3, owned: 5..9, elements: 8 }.message(name),
            PlanError::Overlap { first: 3, second: 5 }.message(name),
            PlanError::OverlapUndecided { first: 3, second: 5 }.message(name),
            PlanError::TooManyTensors { tensors: 1 << 32 }.message(name),
        ];
        let expected = [
            "gradient of `layer.3` has 2 sizes but 1 strides; pass a strided tensor",
            "gradient of `layer.3` has size -4 in dimension 1; sizes are 0 or more",
            "gradient of `layer.3` has stride -2 in dimension 0; pass a contiguous copy",
            "gradient of `layer.3` spans more elements than can be addressed; check its sizes and strides",
            "gradient of `layer.3` overlaps itself in memory; replace it with a copy, for instance by `.contiguous()`",
            "gradient of `layer.3` has interleaved strides that may overlap; replace it with a copy, for instance by \
             `.contiguous()`",
            "gradient of `layer.3` has elements but no memory; pass a plain tensor: the local part of a wrapper, or `.clone()`",
            "gradient of `layer.3` at address 0xffffffffffffffff does not fit into memory; check its sizes and strides",
            "owned elements 5..9 of the gradient of `layer.3` are no range of its 8 elements; pass start <= end <= 8",
            "gradients of `layer.3` and `layer.5` share memory; give one of them memory of its own, for instance by \
             `.clone()`",
            "gradients of `layer.3` and `layer.5` are interleaved and may share memory; give one of them memory of its \
             own, for instance by `.clone()`",
            "4294967296 gradients are more than one plan takes; pass at most 4294967295",
        ];
        assert_eq!(messages, expected);
    }

    #[test]
    fn without_names_positions_are_shown() {
        let error = PlanError::Layout { tensor: 7, error: LayoutError::OverlapsItself };
        assert!(error.to_string().starts_with("gradient of parameter 7 overlaps itself"));
    }
}
