//! Whether gradients share memory.

use smallvec::SmallVec;

use crate::lattice::{self, Budget, Dim, Dims, Undecided};
use crate::layout::Memory;

/// The bytes between a tensor's first and last element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Tensors of different spaces (devices) never share memory.
    pub space: u32,
    /// Position of the tensor in the planned list.
    pub tensor: u32,
    /// Address of the first byte.
    pub start: u64,
    /// Address past the last byte.
    pub end: u64,
}

/// The bytes of one tensor, gaps left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Address of the first byte.
    pub start: u64,
    /// Dimensions in bytes, in the order of memory, expanded ones left out.
    pub dims: Dims,
}

/// Two tensors of a list that share memory, or may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Position of the earlier tensor.
    pub first: u32,
    /// Position of the later tensor.
    pub second: u32,
    /// Whether they certainly share a byte; otherwise the search ended without an answer.
    pub certain: bool,
}

impl Footprint {
    /// The bytes of a tensor of elements of `bytes` bytes.
    pub fn new(start: u64, bytes: u64, memory: &Memory) -> Self {
        let element = Dim { size: bytes, stride: 1 };
        let in_bytes = |dim: &Dim| Dim { size: dim.size, stride: dim.stride * bytes };
        let dims = memory.dims.iter().map(in_bytes);
        Footprint { start, dims: Memory::of(std::iter::once(element).chain(dims)).dims }
    }

    /// Whether the two have a byte in common.
    ///
    /// `start + Σ s_i x_i = other.start + Σ t_j y_j`; counted from their ends, the y change sign, and one set made of all
    /// dimensions has to contain the distance of the starts plus the other's extent.
    pub fn meets(&self, other: &Footprint, budget: &mut Budget) -> Result<bool, Undecided> {
        let distance = i128::from(other.start) - i128::from(self.start);
        let dims = self.dims.iter().chain(&other.dims).copied().collect();
        lattice::contains(dims, distance + i128::from(other.extent()), budget)
    }

    fn extent(&self) -> u64 {
        self.dims.iter().map(|dim| (dim.size - 1) * dim.stride).sum()
    }

    /// Row length and distance of rows, for a footprint of rows.
    fn rows(&self) -> Option<(u64, u64)> {
        match self.dims.as_slice() {
            [run, rows] if run.stride == 1 => Some((run.size, rows.stride)),
            _ => None,
        }
    }
}

/// Finds two tensors of a list that share memory. Sorts `spans`; asks for the footprints only of tensors whose spans
/// intersect.
pub fn check(spans: &mut [Span], footprint: impl Fn(u32) -> Footprint, budget: &mut Budget) -> Result<(), Conflict> {
    spans.sort_unstable_by_key(|span| (span.space, span.start));
    let mut first = 0;
    let mut reach = 0;
    for index in 0..spans.len() {
        let span = spans[index];
        if span.space != spans[first].space || span.start >= reach {
            check_cluster(&spans[first..index], &footprint, budget)?;
            (first, reach) = (index, 0);
        }
        reach = span.end.max(reach);
    }
    check_cluster(&spans[first..], &footprint, budget)
}

/// Checks spans, sorted by start, of which each meets the union of those before it.
fn check_cluster(spans: &[Span], footprint: impl Fn(u32) -> Footprint, budget: &mut Budget) -> Result<(), Conflict> {
    if spans.len() < 2 {
        return Ok(());
    }
    let footprints: Vec<Footprint> = spans.iter().map(|span| footprint(span.tensor)).collect();
    if are_separate_columns(&footprints) {
        return Ok(());
    }
    for (index, span) in spans.iter().enumerate() {
        let later = (index + 1..spans.len()).take_while(|&later| spans[later].start < span.end);
        for later in later {
            let verdict = footprints[index].meets(&footprints[later], budget);
            if verdict != Ok(false) {
                return Err(conflict(span.tensor, spans[later].tensor, verdict.is_ok()));
            }
        }
    }
    Ok(())
}

fn conflict(one: u32, other: u32, certain: bool) -> Conflict {
    Conflict { first: one.min(other), second: one.max(other), certain }
}

/// Whether all are rows of one stride, in column ranges of their own: the many slices of one matrix, without looking at
/// pairs. `false` decides nothing.
fn are_separate_columns(footprints: &[Footprint]) -> bool {
    let Some((_, pitch)) = footprints[0].rows() else {
        return false;
    };
    let column = |footprint: &Footprint| match footprint.rows() {
        Some((length, stride)) if stride == pitch => Some((footprint.start % pitch, length)),
        _ => None,
    };
    let Some(mut columns) = footprints.iter().map(column).collect::<Option<SmallVec<[_; 16]>>>() else {
        return false;
    };
    columns.sort_unstable();
    let wrapped = (columns[0].0 + pitch, columns[0].1);
    let next = columns[1..].iter().chain(std::iter::once(&wrapped));
    columns.iter().zip(next).all(|(column, next)| column.0 + column.1 <= next.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footprint(start: u64, bytes: u64, dims: &[(u64, u64)]) -> Footprint {
        let dims = dims.iter().map(|&(size, stride)| Dim { size, stride });
        Footprint::new(start, bytes, &Memory::of(dims))
    }

    #[test]
    fn rows_by_the_billion_are_decided_without_a_walk() {
        let rows = |start, stride| footprint(start, 4, &[(1 << 32, stride)]);
        let meet = |one: Footprint, other| one.meets(&other, &mut Budget(0));
        // Distances without a common factor reach every byte in the end, those of equal rows never.
        assert_eq!(meet(rows(4096, 1_000_003), rows(4097, 1_000_006)), Ok(true));
        assert_eq!(meet(rows(4096, 1_000_006), rows(4_004_097, 1_000_006)), Ok(false));
        assert_eq!(meet(rows(4096, 1_000_000), rows(4_004_100, 3_000_000)), Ok(false));
        assert_eq!(meet(rows(4096, 1_000_000), rows(4_004_099, 3_000_000)), Ok(true));
    }

    #[test]
    fn an_undecided_pair_is_a_conflict_that_is_not_certain() {
        let dims = [(40, 1_000_003), (40, 1_100_009), (40, 1_210_001)];
        let list = [footprint(64, 4, &dims), footprint(71, 4, &dims)];
        let span = |tensor| Span { space: 0, tensor, start: 64 + 7 * u64::from(tensor), end: 200_000_000 };
        let verdict = check(&mut [span(1), span(0)], |tensor| list[tensor as usize].clone(), &mut Budget(3));
        assert_eq!(verdict, Err(Conflict { first: 0, second: 1, certain: false }));
    }

    #[test]
    fn columns_of_a_matrix_are_seen_to_be_separate() {
        let column = |start, width| footprint(start, 4, &[(width, 1), (8, 16)]);
        assert!(are_separate_columns(&[column(64, 3), column(76, 10), column(116, 3)]));
        assert!(!are_separate_columns(&[column(64, 4), column(76, 10)]));
        assert!(!are_separate_columns(&[column(64, 3), column(76, 14)]));
    }
}
