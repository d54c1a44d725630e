//! A tensor's elements in the order of memory, each with its logical (row-major) index.

use smallvec::SmallVec;

use crate::descriptor::Descriptor;
use crate::layout::join_neighbours;

/// A dimension in memory and in the row-major order of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Number of indices.
    pub size: u64,
    /// Elements between neighbours in memory; 0 for an expanded dimension.
    pub stride: u64,
    /// Difference of the logical indices of neighbours.
    pub step: u64,
}

impl Axis {
    const SINGLE: Axis = Axis { size: 1, stride: 1, step: 1 };

    /// Whether neighbours are neighbours in memory and in the logical order alike.
    pub const fn is_contiguous(&self) -> bool {
        self.stride == 1 && self.step == 1
    }
}

/// Where a run begins: elements from the tensor's address, and the logical index there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Elements from the tensor's address.
    pub offset: u64,
    /// Logical index.
    pub index: u64,
}

/// All logical elements as runs along the dimension that is closest in memory; expanded dimensions repeat theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    /// The dimension that runs follow.
    pub inner: Axis,
    /// Number of runs; 0 without elements.
    pub count: u64,
    /// The other dimensions, closest in memory last.
    outer: SmallVec<[Axis; 4]>,
}

impl Runs {
    /// The runs of a descriptor that [`crate::plan::Plan::new`] accepted, whatever it owns.
    pub fn of(descriptor: &Descriptor) -> Self {
        if descriptor.sizes.contains(&0) {
            return Runs { inner: Axis::SINGLE, count: 0, outer: SmallVec::new() };
        }
        let mut step = 1;
        let mut axes: SmallVec<[Axis; 4]> = SmallVec::new();
        for dim in join_neighbours(&descriptor.sizes, &descriptor.strides).iter().rev() {
            axes.push(Axis { size: dim.size, stride: dim.stride, step });
            step *= dim.size;
        }
        // Expanded dimensions come outermost: what they repeat may still be in a cache.
        axes.sort_by_key(|axis| std::cmp::Reverse(axis.stride.wrapping_sub(1)));
        let inner = axes.pop().unwrap_or(Axis::SINGLE);
        Runs { inner, count: axes.iter().map(|axis| axis.size).product(), outer: axes }
    }

    /// Whether the elements lie in memory in their logical order, without gaps.
    pub fn are_contiguous(&self) -> bool {
        self.count == 0 || (self.count == 1 && self.inner.is_contiguous())
    }

    /// Logical elements.
    pub fn elements(&self) -> u64 {
        self.count * self.inner.size
    }

    /// Where run `number` begins.
    pub fn start(&self, mut number: u64) -> Start {
        let mut start = Start { offset: 0, index: 0 };
        for axis in self.outer.iter().rev() {
            let at = number % axis.size;
            number /= axis.size;
            start.offset += at * axis.stride;
            start.index += at * axis.step;
        }
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::Device;
    use crate::dtype::DType;

    fn runs(sizes: &[i64], strides: &[i64]) -> Runs {
        Runs::of(&Descriptor {
            address: 64,
            sizes: sizes.into(),
            strides: strides.into(),
            dtype: DType::F32,
            device: Device::CPU,
            owned: Some(0..0),
        })
    }

    /// (offset in memory, logical index) of all elements, in logical order.
    fn elements(runs: &Runs) -> Vec<(u64, u64)> {
        let element =
            |start: Start, at: u64| (start.offset + at * runs.inner.stride, start.index + at * runs.inner.step);
        let along = |run| (0..runs.inner.size).map(move |at| element(runs.start(run), at));
        let mut all: Vec<_> = (0..runs.count).flat_map(along).collect();
        all.sort_unstable_by_key(|&(_, index)| index);
        all
    }

    #[test]
    fn every_logical_element_comes_once() {
        for (sizes, strides) in [
            (&[][..], &[][..]),
            (&[7], &[1]),
            (&[5], &[3]),
            (&[4, 3], &[1, 4]),
            (&[2, 3, 4], &[1, 8, 2]),
            (&[3, 2, 2, 5], &[40, 0, 1, 7]),
            (&[4, 3], &[0, 0]),
            (&[1, 6, 1], &[-3, 2, 99]),
        ] {
            let mut expected = vec![0];
            for (&size, &stride) in sizes.iter().zip(strides) {
                let moved = |offset: &i64| (0..size).map(|at| offset + at * stride).collect::<Vec<_>>();
                expected = expected.iter().flat_map(moved).collect();
            }
            let expected: Vec<_> = expected.iter().map(|offset| *offset as u64).zip(0..).collect();
            assert_eq!(elements(&runs(sizes, strides)), expected, "{sizes:?} {strides:?}");
        }
    }

    #[test]
    fn runs_follow_the_closest_dimension() {
        let transposed = runs(&[4, 3], &[1, 4]);
        assert_eq!((transposed.inner, transposed.count), (Axis { size: 4, stride: 1, step: 3 }, 3));
        let expanded = runs(&[100, 3, 5], &[0, 7, 1]);
        assert_eq!((expanded.inner, expanded.count), (Axis { size: 5, stride: 1, step: 1 }, 300));
        assert_eq!(expanded.start(299), Start { offset: 14, index: 1495 });
    }

    #[test]
    fn contiguous_means_one_run_in_logical_order() {
        assert!(runs(&[2, 3, 4], &[12, 4, 1]).are_contiguous());
        assert!(runs(&[], &[]).are_contiguous());
        assert!(runs(&[3, 0], &[1, 1]).are_contiguous());
        assert!(!runs(&[3, 4], &[1, 3]).are_contiguous());
        assert!(!runs(&[3, 4], &[5, 1]).are_contiguous());
        assert!(!runs(&[3], &[0]).are_contiguous());
        assert!(!runs(&[3], &[2]).are_contiguous());
    }
}
