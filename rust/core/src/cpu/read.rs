//! Reading a chunk block by block: in place where its rows are long, gathered where they are short.

use super::block::BLOCK;
use super::element::Element;

/// Rows of at least this many elements are read in place; shorter ones would leave the lanes idle.
const LONG_ROW: u64 = 256;

/// `rows` runs of `length` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Rows<T> {
    pub start: *const T,
    pub rows: u64,
    pub length: u64,
    pub stride: u64,
}

impl<T: Element> Rows<T> {
    /// Calls `visit` with every element once, in blocks of at most [`BLOCK`].
    ///
    /// # Safety
    /// Every element must be readable; nobody writes to it meanwhile.
    pub unsafe fn for_each_block(self, mut visit: impl FnMut(&[T])) {
        if self.start.is_aligned() && (self.rows == 1 || self.length >= LONG_ROW) {
            for row in 0..self.rows {
                // SAFETY: row < rows, so the row lies inside what the caller vouches for; alignment was checked, and
                // the stride counts whole elements.
                let row = unsafe {
                    std::slice::from_raw_parts(self.start.add((row * self.stride) as usize), self.length as usize)
                };
                row.chunks(BLOCK).for_each(&mut visit);
            }
        } else {
            // SAFETY: the caller's contract is handed on.
            unsafe { self.for_each_gathered(visit) }
        }
    }

    /// # Safety
    /// As [`Rows::for_each_block`].
    unsafe fn for_each_gathered(self, mut visit: impl FnMut(&[T])) {
        let mut block = [T::ZERO; BLOCK];
        let mut filled = 0;
        for row in 0..self.rows {
            for column in 0..self.length {
                // SAFETY: row < rows and column < length; `read_unaligned` needs no alignment.
                block[filled] = unsafe { self.start.add((row * self.stride + column) as usize).read_unaligned() };
                filled += 1;
                if filled == BLOCK {
                    visit(&block);
                    filled = 0;
                }
            }
        }
        visit(&block[..filled]);
    }
}
