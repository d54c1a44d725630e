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
    dims.first().map_or(fitting, |dim| fitting.min(dim.size - at / block % dim.size))
}

/// `count` steps of dimension `index` from logical element `at`, with all of the dimensions inside it.
fn piece(logical: &[Dim], at: u64, index: usize, count: u64) -> Result<Piece, TooManyDims> {
    let mut dims: Dims = logical[index..].into();
    if let Some(first) = dims.first_mut() {
        first.size = count;
    }
    Ok(Piece { offset: offset_of(logical, at), layout: Memory::of(dims).layout()? })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lattice::Budget;

    fn slice(sizes: &[i64], strides: &[i64], owned: Range<u64>) -> Vec<(u64, [u64; 4])> {
        let tensor = Strided::new(sizes, strides, &mut Budget::default()).unwrap();
        let flat = |piece: &Piece| {
            let Layout { rows, row_length, row_stride, weight } = piece.layout;
            (piece.offset, [rows, row_length, row_stride, weight])
        };
        pieces(&tensor, owned).unwrap().iter().map(flat).collect()
    }

    #[test]
    fn a_contiguous_tensor_gives_one_run() {
        assert_eq!(slice(&[4, 5, 6], &[30, 6, 1], 7..101), [(7, [1, 94, 94, 1])]);
        assert_eq!(slice(&[], &[], 0..1), [(0, [1, 1, 1, 1])]);
        assert_eq!(slice(&[4], &[1], 2..2), []);
    }

    #[test]
    fn a_transposed_matrix_gives_head_middle_and_tail() {
        let pieces = [(8, [1, 1, 1, 1]), (1, [3, 2, 4, 1]), (3, [2, 1, 4, 1])];
        assert_eq!(slice(&[4, 3], &[1, 4], 2..11), pieces);
    }

    #[test]
    fn an_expanded_matrix_weighs_the_copies_in_the_slice() {
        let pieces = [(1, [1, 2, 2, 1]), (0, [1, 3, 3, 2]), (0, [1, 2, 2, 1])];
        assert_eq!(slice(&[4, 3], &[0, 1], 1..11), pieces);
    }

    #[test]
    fn too_many_dimensions_are_counted() {
        let tensor = Strided::new(&[4, 4, 4], &[1, 4, 16], &mut Budget::default()).unwrap();
        assert_eq!(pieces(&tensor, 0..8), Err(TooManyDims(2)));
    }
}
