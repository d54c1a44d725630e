//! Segments -> chunks: the pieces of work of the engines.

use crate::dtype::DType;
use crate::layout::Layout;

/// A laid-out part of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position of the tensor in the planned list.
    pub tensor: u32,
    /// Element type.
    pub dtype: DType,
    /// Address of the first element.
    pub address: u64,
    /// The elements from there.
    pub layout: Layout,
}

/// What one engine task reads: `rows` runs of `row_length` elements, `row_stride` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Position of the tensor in the planned list.
    pub tensor: u32,
    /// Element type.
    pub dtype: DType,
    /// Address of the first element.
    pub address: u64,
    /// Number of runs, 1 and more.
    pub rows: u64,
    /// Elements of a run, 1 and more.
    pub row_length: u64,
    /// Elements from the start of one run to the next; `row_length` for a single run.
    pub row_stride: u64,
    /// How often each element counts in sums; 1 when scaling.
    pub weight: u64,
}

impl Chunk {
    /// Elements in memory.
    pub const fn elements(&self) -> u64 {
        self.rows * self.row_length
    }
}

impl Segment {
    /// The chunks of at most `chunk_elements` elements (0 is taken as 1), in the order of memory. Runs are cut at
    /// multiples of `chunk_elements` from their start, which keeps their alignment; short rows stay whole.
    pub fn chunks(self, chunk_elements: u64) -> impl ExactSizeIterator<Item = Chunk> + DoubleEndedIterator {
        let cut = self.cut(chunk_elements);
        // At least one element a chunk, below 2^56 elements: fits a 64-bit usize.
        (0..cut.count as usize).map(move |index| self.chunk(cut, index as u64))
    }

    /// How it is cut into chunks of at most `chunk_elements` elements (0 is taken as 1).
    pub fn cut(&self, chunk_elements: u64) -> Cut {
        Cut::new(self.layout, chunk_elements.max(1))
    }

    fn chunk(&self, cut: Cut, index: u64) -> Chunk {
        let layout = &self.layout;
        let row = index / cut.pieces * cut.rows;
        let column = index % cut.pieces * cut.row_length;
        let rows = cut.rows.min(layout.rows - row);
        let row_length = cut.row_length.min(layout.row_length - column);
        let offset = row * layout.row_stride + column;
        Chunk {
            tensor: self.tensor,
            dtype: self.dtype,
            address: self.address + offset * self.dtype.bytes() as u64,
            rows,
            row_length,
            row_stride: if rows == 1 { row_length } else { layout.row_stride },
            weight: layout.weight,
        }
    }
}

/// How a layout is cut: each row in `pieces` of `row_length`, or `rows` whole rows together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows of a chunk, at most.
    pub rows: u64,
    /// Elements of a row's piece, at most.
    pub row_length: u64,
    /// Pieces of a row.
    pub pieces: u64,
    /// Chunks in all.
    pub count: u64,
}

impl Cut {
    fn new(layout: Layout, chunk_elements: u64) -> Self {
        let row_length = layout.row_length.clamp(1, chunk_elements);
        let pieces = layout.row_length.div_ceil(row_length).max(1);
        let rows = if pieces == 1 { (chunk_elements / row_length).min(layout.rows).max(1) } else { 1 };
        Cut { rows, row_length, pieces, count: layout.rows.div_ceil(rows) * pieces }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offset in elements, rows, row length and row stride of each chunk of at most 64 elements.
    fn cuts(rows: u64, row_length: u64, row_stride: u64) -> Vec<[u64; 4]> {
        let layout = Layout { rows, row_length, row_stride, weight: 3 };
        let segment = Segment { tensor: 0, dtype: DType::F32, address: 256, layout };
        let flat = |chunk: Chunk| {
            assert_eq!(chunk.weight, 3);
            [(chunk.address - 256) / 4, chunk.rows, chunk.row_length, chunk.row_stride]
        };
        segment.chunks(64).map(flat).collect()
    }

    #[test]
    fn runs_are_cut_at_multiples_of_the_chunk() {
        assert_eq!(cuts(1, 64, 64), [[0, 1, 64, 64]]);
        assert_eq!(cuts(1, 130, 130), [[0, 1, 64, 64], [64, 1, 64, 64], [128, 1, 2, 2]]);
    }

    #[test]
    fn short_rows_stay_whole() {
        assert_eq!(cuts(5, 30, 100), [[0, 2, 30, 100], [200, 2, 30, 100], [400, 1, 30, 30]]);
        assert_eq!(cuts(70, 1, 2), [[0, 64, 1, 2], [128, 6, 1, 2]]);
    }

    #[test]
    fn long_rows_are_cut_within() {
        assert_eq!(cuts(2, 65, 100), [[0, 1, 64, 64], [64, 1, 1, 1], [100, 1, 64, 64], [164, 1, 1, 1]]);
    }

    #[test]
    fn nothing_gives_no_chunk() {
        assert_eq!(cuts(0, 0, 0), [[0; 4]; 0]);
    }

    #[test]
    fn elements_past_32_bits_are_counted_in_full() {
        let layout = Layout { rows: 1, row_length: (1 << 33) + 5, row_stride: (1 << 33) + 5, weight: 1 };
        let mut chunks = Segment { tensor: 0, dtype: DType::C128, address: 16, layout }.chunks(1 << 18);
        assert_eq!(chunks.len(), (1 << 15) + 1);
        let last = chunks.next_back().unwrap();
        assert_eq!((last.address, last.row_length), (16 + (16 << 33), 5));
    }
}
