//! Sizes and strides -> one run or rows of equal runs.

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
    pub const EMPTY: Layout = Layout { rows: 0, row_length: 0, row_stride: 0, weight: 1 };

    /// Elements in memory, each once.
    pub const fn elements(&self) -> u64 {
        self.rows * self.row_length
    }

    fn run(length: u64, weight: u64) -> Self {
        Layout { rows: 1, row_length: length, row_stride: length, weight }
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
    #[error("has interleaved strides that may overlap; replace it with a copy, for instance by `.contiguous()`")]
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
        let mut memory = Memory { dims: Dims::new(), weight: 1 };
        for dim in dims {
            match dim {
                Dim { stride: 0, size } => memory.weight *= size,
                Dim { size: 1, .. } => {}
                _ => memory.dims.push(dim),
            }
        }
        memory.dims.sort_unstable_by_key(|dim| dim.stride);
        memory.dims.dedup_by(|outer, inner| {
            let continues = inner.size * inner.stride == outer.stride;
            if continues {
                inner.size *= outer.size;
            }
            continues
        });
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
            _ => Err(TooManyDims(self.dims.len())),
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
    fn is_undone_below(&self, k: usize, reach: u64, budget: &mut Budget) -> Result<bool, Undecided> {
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
            Ok(false) => Ok(Strided { logical, memory, elements, last }),
            Ok(true) => Err(LayoutError::OverlapsItself),
            Err(Undecided) => Err(LayoutError::OverlapUndecided),
        }
    }

    fn empty() -> Self {
        let memory = Memory { dims: Dims::new(), weight: 1 };
        Strided { logical: Dims::new(), memory, elements: 0, last: 0 }
    }

    /// Where the elements stand, each address once.
    pub fn layout(&self) -> Result<Layout, TooManyDims> {
        if self.elements == 0 { Ok(Layout::EMPTY) } else { self.memory.layout() }
    }
}

fn check_signs(sizes: &[i64], strides: &[i64]) -> Result<(), LayoutError> {
    if sizes.len() != strides.len() {
        return Err(LayoutError::RankMismatch { sizes: sizes.len(), strides: strides.len() });
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
    let elements = sizes.iter().try_fold(1i64, |product, &size| product.checked_mul(size))?;
    Some(elements.unsigned_abs())
}

/// Logical dimensions without those of size 1, neighbours joined where one stride serves both. Sizes and strides are not
/// negative, except strides of single indices.
pub(crate) fn join_neighbours(sizes: &[i64], strides: &[i64]) -> Dims {
    let mut dims = Dims::new();
    for (size, stride) in sizes.iter().zip(strides).filter(|&(&size, _)| size != 1) {
        let dim = Dim { size: size.unsigned_abs(), stride: stride.unsigned_abs() };
        let span = dim.size.checked_mul(dim.stride);
        match dims.last_mut() {
            Some(outer) if span == Some(outer.stride) => {
                let size = outer.size.saturating_mul(dim.size);
                *outer = Dim { size, stride: dim.stride };
            }
            _ => dims.push(dim),
        }
    }
    dims
}

fn last_offset(dims: &[Dim]) -> Option<u64> {
    let add = |sum: u64, dim: &Dim| sum.checked_add((dim.size - 1).checked_mul(dim.stride)?);
    dims.iter().try_fold(0, add).filter(|&last| last < OFFSET_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(sizes: &[i64], strides: &[i64]) -> Result<Layout, TooManyDims> {
        Strided::new(sizes, strides, &mut Budget::default()).unwrap().layout()
    }

    fn refusal(sizes: &[i64], strides: &[i64]) -> LayoutError {
        Strided::new(sizes, strides, &mut Budget::default()).unwrap_err()
    }

    fn rows(rows: u64, row_length: u64, row_stride: u64) -> Result<Layout, TooManyDims> {
        Ok(Layout { rows, row_length, row_stride, weight: 1 })
    }

    #[test]
    fn dense_in_any_order_is_one_run() {
        assert_eq!(layout(&[], &[]), rows(1, 1, 1));
        assert_eq!(layout(&[2, 3, 4], &[12, 4, 1]), rows(1, 24, 24));
        assert_eq!(layout(&[2, 3, 4], &[1, 8, 2]), rows(1, 24, 24));
        // The stride of a single index says nothing.
        assert_eq!(layout(&[1, 5, 1], &[-7, 1, i64::MAX]), rows(1, 5, 5));
    }

    #[test]
    fn the_rest_is_rows() {
        assert_eq!(layout(&[5], &[3]), rows(5, 1, 3));
        assert_eq!(layout(&[2, 3, 4], &[30, 10, 1]), rows(6, 4, 10));
        assert_eq!(layout(&[4, 6], &[1, 9]), rows(6, 4, 9));
    }

    #[test]
    fn expanded_dimensions_become_a_weight() {
        let expanded = Layout { rows: 1, row_length: 3, row_stride: 3, weight: 35 };
        assert_eq!(layout(&[7, 3, 5], &[0, 1, 0]), Ok(expanded));
    }

    #[test]
    fn no_elements_no_rows() {
        assert_eq!(layout(&[3, 0, i64::MAX, i64::MAX], &[1, 1, 1, 1]), Ok(Layout::EMPTY));
    }

    #[test]
    fn more_dimensions_than_rows_have_are_counted() {
        assert_eq!(layout(&[2, 2, 2], &[100, 10, 1]), Err(TooManyDims(3)));
        assert_eq!(layout(&[2, 2], &[100, 10]), Err(TooManyDims(2)));
    }

    #[test]
    fn only_overlapping_strides_overlap() {
        // Interleaved, yet every address once: 0 3 6 9 and 2 later.
        assert_eq!(layout(&[2, 4], &[2, 3]), Err(TooManyDims(2)));
        assert_eq!(refusal(&[4, 4], &[2, 3]), LayoutError::OverlapsItself);
        assert_eq!(refusal(&[2, 4], &[3, 1]), LayoutError::OverlapsItself);
        assert_eq!(refusal(&[2, 2], &[5, 5]), LayoutError::OverlapsItself);
    }

    #[test]
    fn an_undecided_overlap_is_said_to_be_one() {
        let strides =
            [50_000_000_350_066, 55_000_006_172_055, 61_728_394_561_728, 67_283_945_617_000, 72_839_456_170_005];
        let error = Strided::new(&[150; 5], &strides, &mut Budget(100)).unwrap_err();
        assert_eq!(error, LayoutError::OverlapUndecided);
    }

    #[test]
    fn impossible_sizes_and_strides_are_refused() {
        assert_eq!(refusal(&[2, 3], &[1]), LayoutError::RankMismatch { sizes: 2, strides: 1 });
        assert_eq!(refusal(&[2, -3], &[1, 1]), LayoutError::NegativeSize { dim: 1, size: -3 });
        assert_eq!(refusal(&[2, 3], &[3, -1]), LayoutError::NegativeStride { dim: 1, stride: -1 });
        assert_eq!(refusal(&[i64::MAX, 2], &[0, 0]), LayoutError::TooLarge);
        assert_eq!(refusal(&[2], &[1 << 56]), LayoutError::TooLarge);
        assert_eq!(refusal(&[i64::MAX], &[i64::MAX]), LayoutError::TooLarge);
    }
}
