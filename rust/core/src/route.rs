//! Who works on a tensor, and why.

use std::fmt;

use crate::layout::Layout;

/// Who works on a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The fused engines: the tensor's chunks are in the plan.
    Fused,
    /// Torch operations, slice by slice: the plan holds no chunk of it.
    Reference,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::Fused => "fused",
            Route::Reference => "reference",
        })
    }
}

/// Why a tensor goes its route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No elements.
    Empty,
    /// One run, in whatever order of dimensions.
    Dense,
    /// Rows of one length and distance.
    Rows {
        /// Number of rows.
        rows: u64,
    },
    /// Expanded dimensions: each address is read once, and weighs their size.
    Expanded {
        /// Logical elements an address.
        weight: u64,
    },
    /// A device without a fused engine.
    Device {
        /// The DLPack device type.
        kind: i32,
    },
    /// More strided dimensions than rows have.
    Dims {
        /// How many.
        dims: usize,
    },
    /// An owned slice that is strided in more dimensions than rows have.
    SliceDims {
        /// How many.
        dims: usize,
    },
    /// An address that is no multiple of the element's alignment.
    Misaligned,
}

impl Reason {
    /// The route that this is a reason for.
    pub const fn route(self) -> Route {
        match self {
            Reason::Empty | Reason::Dense | Reason::Rows { .. } | Reason::Expanded { .. } => Route::Fused,
            Reason::Device { .. } | Reason::Dims { .. } | Reason::SliceDims { .. } | Reason::Misaligned => {
                Route::Reference
            }
        }
    }

    /// The reason for fusing a tensor of this layout.
    pub(crate) fn of_layout(layout: &Layout) -> Self {
        match *layout {
            Layout { rows: 0, .. } => Reason::Empty,
            Layout { weight: 2.., .. } => Reason::Expanded { weight: layout.weight },
            Layout { rows: 1, .. } => Reason::Dense,
            Layout { rows, .. } => Reason::Rows { rows },
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Empty => write!(f, "no elements"),
            Reason::Dense => write!(f, "dense"),
            Reason::Rows { rows } => write!(f, "{rows} rows"),
            Reason::Expanded { weight } => {
                write!(f, "expanded, each address counts {weight} times")
            }
            Reason::Device { kind } => write!(f, "no fused engine for DLPack device type {kind}"),
            Reason::Dims { dims } => write!(f, "strided in {dims} dimensions"),
            Reason::SliceDims { dims } => write!(f, "owned slice strided in {dims} dimensions"),
            Reason::Misaligned => write!(f, "address not aligned to the element type"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_read_as_words() {
        let words = [
            (Reason::Empty, "fused: no elements"),
            (Reason::Dense, "fused: dense"),
            (Reason::Rows { rows: 3 }, "fused: 3 rows"),
            (Reason::Expanded { weight: 4 }, "fused: expanded, each address counts 4 times"),
            (Reason::Device { kind: 8 }, "reference: no fused engine for DLPack device type 8"),
            (Reason::Dims { dims: 3 }, "reference: strided in 3 dimensions"),
            (Reason::SliceDims { dims: 3 }, "reference: owned slice strided in 3 dimensions"),
            (Reason::Misaligned, "reference: address not aligned to the element type"),
        ];
        for (reason, expected) in words {
            assert_eq!(format!("{}: {reason}", reason.route()), expected);
        }
    }
}
