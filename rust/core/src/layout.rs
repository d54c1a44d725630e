//! Sizes and strides -> one run or rows of equal runs.

use smallvec::SmallVec;
use thiserror::Error;

use crate::lattice::{self, Budget, Dim, Dims, Undecided};

/// Offsets stay below this many elements (an exbibyte of the widest type): no sum or product of theirs overflows.
pub const OFFSET_LIMIT: u64 = 1 << 56;

/// `rows` runs of `row_length` neighbouring elements, `row_stride` elements apart, each of them counted `weight` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of runs; 0 without elements.
    pub rows: u64,
    /// Elements of a run.
    pub row_length: u64,
    /// Elements from the start of one run to the next; `row_length` for a single run.
    pub row_stride: u64,
    /// How many logical elements stand on each address (the product of the expanded sizes).
    pub weight: u64,
}

impl Layout {
    /// The layout of no elements.
    pub const EMPTY: Layout = Layout {
        rows: 0,
        row_length: 0,
        row_stride: 0,
        weight: 1,
    };

    /// Elements in memory, each once.
    pub const fn elements(&self) -> u64 {
        self.rows * self.row_length
    }

    fn run(length: u64, weight: u64) -> Self {
        Layout {
            rows: 1,
            row_length: length,
            row_stride: length,
            weight,
        }
    }
}

/// Strides that no engine can address, or must not.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Unequal numbers of sizes and strides.
    #[error("has {sizes} sizes but {strides} strides; pass a strided tensor")]
    RankMismatch {
        /// Number of sizes.
        sizes: usize,
        /// Number of strides.
        strides: usize,
    },
    /// A size below zero.
    #[error("has size {size} in dimension {dim}; sizes are 0 or more")]
    NegativeSize {
        /// The dimension.
        dim: usize,
        /// Its size.
        size: i64,
    },
    /// A stride below zero in a dimension with more than one index.
    #[error("has stride {stride} in dimension {dim}; pass a contiguous copy")]
    NegativeStride {
        /// The dimension.
        dim: usize,
        /// Its stride.
        stride: i64,
    },
    /// More elements, or a larger stretch of memory, than any machine holds.
    #[error("spans more elements than can be addressed; check its sizes and strides")]
    TooLarge,
    /// Two indices that differ in a dimension of non-zero stride stand on one address.
    #[error("overlaps itself in memory; replace it with a copy, for instance by `.contiguous()`")]
    OverlapsItself,
    /// Interleaved strides for which the search ended without an answer.
    #[error(
        "has interleaved strides that may overlap; replace it with a copy, for instance by `.contiguous()`"
    )]
    OverlapUndecided,
}

/// More strided dimensions than a [`Layout`] has, counting the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyDims(pub usize);

/// Dimensions in the order of memory, smallest stride first, and how often each address counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Coalesced dimensions of two indices and more, strides above 0.
    pub dims: Dims,
    /// Product of the expanded sizes.
    pub weight: u64,
}

impl Memory {
    /// Takes the expanded dimensions out, sorts by stride, and joins what continues without a gap.
    pub fn of(dims: impl IntoIterator<Item = Dim>) -> Self {
        let (expanded, mut strided): (SmallVec<[Dim; 4]>, Dims) =
            dims.into_iter().partition(|dim| dim.stride == 0);
        strided.sort_unstable_by_key(|dim| dim.stride);
        let mut memory = Memory {
            dims: Dims::new(),
            weight: expanded.iter().map(|dim| dim.size).product(),
        };
        for dim in strided {
            match memory.dims.last_mut() {
                Some(inner) if inner.size * inner.stride == dim.stride => inner.size *= dim.size,
                _ if dim.size > 1 => memory.dims.push(dim),
                _ => {}
            }
        }
        memory
    }

    /// Runs or rows, or the number of dimensions that is too many.
    pub fn layout(&self) -> Result<Layout, TooManyDims> {
        let rows_of = |length, rows: Dim| Layout {
            rows: rows.size,
            row_length: length,
            row_stride: rows.stride,
            weight: self.weight,
        };
        match self.dims.as_slice() {
            [] => Ok(Layout::run(1, self.weight)),
            [run] if run.stride == 1 => Ok(Layout::run(run.size, self.weight)),
            [rows] => Ok(rows_of(1, *rows)),
            [run, rows] if run.stride == 1 => Ok(rows_of(run.size, *rows)),
            [inner, ..] => Err(TooManyDims(
                self.dims.len() + usize::from(inner.stride != 1),
            )),
        }
    }

    /// Whether two different indices stand on one address: for some dimension k, a step of 1 and more in it is undone by
    /// steps in dimensions of smaller stride.
    fn overlaps_itself(&self, budget: &mut Budget) -> Result<bool, Undecided> {
        let mut reach = 0;
        for (k, dim) in self.dims.iter().enumerate() {
            let nested = dim.stride > reach;
            reach += (dim.size - 1) * dim.stride;
            if !nested && self.is_undone_below(k, reach, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// With differences d of indices: `stride_k * d_k = Σ_j stride_j * d_j` for j < k, d_k >= 1, |d_j| < size_j. Counted
    /// from their ends, all unknowns start at 0 and the sum is `reach`, the extent of the dimensions up to k.
    fn is_undone_below(
        &self,
        k: usize,
        reach: u64,
        budget: &mut Budget,
    ) -> Result<bool, Undecided> {
        let mut dims: Dims = self.dims[..=k].into();
        for dim in &mut dims[..k] {
            dim.size = 2 * dim.size - 1;
        }
        dims[k].size -= 1;
        lattice::contains(dims, i128::from(reach), budget)
    }
}

/// A checked strided tensor: its dimensions in logical order and in memory order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Logical dimensions, outermost first, without those of size 1, neighbours joined where one stride serves both.
    pub logical: Dims,
    /// The same elements in the order of memory.
    pub memory: Memory,
    /// Logical elements.
    pub elements: u64,
    /// Offset, in elements, of the last element in memory.
    pub last: u64,
}

impl Strided {
    /// Checks sizes and strides (in elements), self-overlap included.
    pub fn new(sizes: &[i64], strides: &[i64], budget: &mut Budget) -> Result<Self, LayoutError> {
        check_signs(sizes, strides)?;
        if sizes.contains(&0) {
            return Ok(Strided::empty());
        }
        let logical = join_neighbours(sizes, strides);
        let elements = count(sizes).ok_or(LayoutError::TooLarge)?;
        let last = last_offset(&logical).ok_or(LayoutError::TooLarge)?;
        let memory = Memory::of(logical.iter().copied());
        match memory.overlaps_itself(budget) {
            Ok(false) => Ok(Strided {
                logical,
                memory,
                elements,
                last,
            }),
            Ok(true) => Err(LayoutError::OverlapsItself),
            Err(Undecided) => Err(LayoutError::OverlapUndecided),
        }
    }

    fn empty() -> Self {
        let memory = Memory {
            dims: Dims::new(),
            weight: 1,
        };
        Strided {
            logical: Dims::new(),
            memory,
            elements: 0,
            last: 0,
        }
    }

    /// Where the elements stand, each address once.
    pub fn layout(&self) -> Result<Layout, TooManyDims> {
        if self.elements == 0 {
            Ok(Layout::EMPTY)
        } else {
            self.memory.layout()
        }
    }
}

fn check_signs(sizes: &[i64], strides: &[i64]) -> Result<(), LayoutError> {
    if sizes.len() != strides.len() {
        return Err(LayoutError::RankMismatch {
            sizes: sizes.len(),
            strides: strides.len(),
        });
    }
    for (dim, (&size, &stride)) in sizes.iter().zip(strides).enumerate() {
        if size < 0 {
            return Err(LayoutError::NegativeSize { dim, size });
        }
        if stride < 0 && size > 1 {
            return Err(LayoutError::NegativeStride { dim, stride });
        }
    }
    Ok(())
}

/// Elements of a tensor, if they can be counted in an `i64`.
fn count(sizes: &[i64]) -> Option<u64> {
    let elements = sizes
        .iter()
        .try_fold(1i64, |product, &size| product.checked_mul(size))?;
    Some(elements.unsigned_abs())
}

/// Logical dimensions without those of size 1, neighbours joined where one stride serves both. Sizes and strides are not
/// negative, except strides of single indices.
pub(crate) fn join_neighbours(sizes: &[i64], strides: &[i64]) -> Dims {
    let mut dims = Dims::new();
    for (size, stride) in sizes.iter().zip(strides).filter(|&(&size, _)| size != 1) {
        let dim = Dim {
            size: size.unsigned_abs(),
            stride: stride.unsigned_abs(),
        };
        let span = dim.size.checked_mul(dim.stride);
        match dims.last_mut() {
            Some(outer) if span == Some(outer.stride) => {
                let size = outer.size.saturating_mul(dim.size);
                *outer = Dim {
                    size,
                    stride: dim.stride,
                };
            }
            _ => dims.push(dim),
        }
    }
    dims
}

fn last_offset(dims: &[Dim]) -> Option<u64> {
    let add = |sum: u64, dim: &Dim| sum.checked_add((dim.size - 1).checked_mul(dim.stride)?);
    dims.iter()
        .try_fold(0, add)
        .filter(|&last| last < OFFSET_LIMIT)
}
