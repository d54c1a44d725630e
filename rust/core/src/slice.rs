//! A range of a tensor's logical (row-major) elements -> a few layouts.

use std::ops::Range;

use smallvec::SmallVec;

use crate::lattice::{Dim, Dims};
use crate::layout::{Layout, Memory, Strided, TooManyDims};

/// A layout that starts `offset` elements after the tensor's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Elements from the tensor's first element to the layout's.
    pub offset: u64,
    /// The elements from there.
    pub layout: Layout,
}

/// The pieces of one slice; one for a contiguous tensor.
pub type Pieces = SmallVec<[Piece; 1]>;

/// Covers the logical elements `owned` (within the tensor's) by at most `2 * ndim - 1` boxes, each laid out. An address
/// that expanded dimensions repeat weighs as many times as its logical copies lie in the range.
pub fn pieces(tensor: &Strided, owned: Range<u64>) -> Result<Pieces, TooManyDims> {
    let mut pieces = Pieces::new();
    let mut at = owned.start;
    while at < owned.end {
        let (index, block) = widest_block(&tensor.logical, at, owned.end);
        let dims = &tensor.logical[index..];
        let count = blocks_until(owned.end, at, block, dims);
        pieces.push(piece(&tensor.logical, at, index, count)?);
        at += count * block;
    }
    Ok(pieces)
}

/// The outermost dimension one step of which starts at `at` and ends by `end`, and the elements of that step. Past the
/// last dimension (a single element) the step is one element.
fn widest_block(logical: &[Dim], at: u64, end: u64) -> (usize, u64) {
    let mut block: u64 = logical.iter().map(|dim| dim.size).product();
    for (index, dim) in logical.iter().enumerate() {
        block /= dim.size;
        if at.is_multiple_of(block) && at + block <= end {
            return (index, block);
        }
    }
    (logical.len(), 1)
}

/// How many steps of the first of `dims` fit before `end` and before its next wrap-around.
fn blocks_until(end: u64, at: u64, block: u64, dims: &[Dim]) -> u64 {
    let fitting = (end - at) / block;
    dims.first()
        .map_or(fitting, |dim| fitting.min(dim.size - at / block % dim.size))
}

/// `count` steps of dimension `index` from logical element `at`, with all of the dimensions inside it.
fn piece(logical: &[Dim], at: u64, index: usize, count: u64) -> Result<Piece, TooManyDims> {
    let mut dims: Dims = logical[index..].into();
    if let Some(first) = dims.first_mut() {
        first.size = count;
    }
    Ok(Piece {
        offset: offset_of(logical, at),
        layout: Memory::of(dims).layout()?,
    })
}

/// Offset in memory of logical element `at`.
fn offset_of(logical: &[Dim], mut at: u64) -> u64 {
    let mut offset = 0;
    for dim in logical.iter().rev() {
        offset += at % dim.size * dim.stride;
        at /= dim.size;
    }
    offset
}
