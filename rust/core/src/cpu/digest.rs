//! The digest of a tensor's bits and positions; `python/gradclip/reference/digest.py` defines it.

use rayon::prelude::*;

use super::simd::{Kernel, Simd, dispatch};
use super::threads::Threads;
use super::vector::Vector;
use crate::descriptor::Descriptor;
use crate::logical::{Axis, Runs};

/// Elements that one task reads, about.
const TASK: u64 = 64 * 1024;

const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const FIRST_FACTOR: u64 = 0xBF58_476D_1CE4_E5B9;
const SECOND_FACTOR: u64 = 0x94D0_49BB_1331_11EB;
const ROTATION: u32 = 27;

/// The weight of word `k`: odd, and as good as random.
#[inline(always)]
fn weight(k: u64) -> u64 {
    let mixed = mixed((k >> 1).wrapping_add(1).wrapping_mul(STEP));
    1 | if k & 1 == 0 { mixed } else { mixed.rotate_left(ROTATION) }
}

/// The finaliser of splitmix64 with shifts by 32.
#[inline(always)]
fn mixed(mut x: u64) -> u64 {
    x = (x ^ x >> 32).wrapping_mul(FIRST_FACTOR);
    x = (x ^ x >> 32).wrapping_mul(SECOND_FACTOR);
    x ^ x >> 32
}

/// The digests of whole tensors, whatever they own; `offset` is the logical index of their first elements.
///
/// # Safety
/// The plan accepted the descriptors as aligned memory on the CPU; it must be readable and must not be written meanwhile.
pub unsafe fn digest_each(descriptors: &[&Descriptor], offset: u64, simd: Simd, threads: Threads) -> Vec<u64> {
    let walks: Vec<Walk<'_>> = descriptors.iter().map(|descriptor| Walk::new(descriptor, offset, simd)).collect();
    // SAFETY: tasks are below the walk's number, and the rest is the caller's contract.
    let one = |walk: &Walk<'_>, task| unsafe { walk.task(task) };
    let alone = |walk: &Walk<'_>| (0..walk.tasks()).fold(0, |sum: u64, task| sum.wrapping_add(one(walk, task)));
    let parallel = |walk: &Walk<'_>| {
        let tasks = (0..walk.tasks()).into_par_iter().map(|task| one(walk, task));
        tasks.reduce(|| 0, u64::wrapping_add)
    };
    threads.spread(
        walks.iter().map(|walk| walk.runs.elements()).sum(),
        || walks.par_iter().map(parallel).collect(),
        || walks.iter().map(alone).collect(),
    )
}

/// The runs of one tensor, cut into tasks: long runs into pieces, short ones several together.
struct Walk<'a> {
    descriptor: &'a Descriptor,
    runs: Runs,
    offset: u64,
    /// Elements of a piece of a run.
    length: u64,
    /// Pieces of a run.
    pieces: u64,
    /// Runs of a task, where they are not cut.
    together: u64,
    simd: Simd,
}

impl<'a> Walk<'a> {
    fn new(descriptor: &'a Descriptor, offset: u64, simd: Simd) -> Self {
        let runs = Runs::of(descriptor);
        let length = runs.inner.size.min(TASK);
        let (pieces, together) = (runs.inner.size.div_ceil(length), TASK / length);
        Walk { descriptor, runs, offset, length, pieces, together, simd }
    }

    fn tasks(&self) -> u64 {
        if self.pieces > 1 { self.runs.count * self.pieces } else { self.runs.count.div_ceil(self.together) }
    }

    /// # Safety
    /// As [`digest_each`], and `task` is below `tasks`.
    unsafe fn task(&self, task: u64) -> u64 {
        if self.pieces > 1 {
            let from = task % self.pieces * self.length;
            let length = self.length.min(self.runs.inner.size - from);
            // SAFETY: the piece lies inside its run.
            return unsafe { self.piece(task / self.pieces, from, length) };
        }
        let first = task * self.together;
        let runs = first..self.runs.count.min(first + self.together);
        // SAFETY: these are whole runs.
        runs.fold(0, |sum, run| sum.wrapping_add(unsafe { self.piece(run, 0, self.length) }))
    }

    /// # Safety
    /// As [`digest_each`], and run `run` has elements `from..from + length`.
    unsafe fn piece(&self, run: u64, from: u64, length: u64) -> u64 {
        let (start, inner) = (self.runs.start(run), self.runs.inner);
        let bytes = self.descriptor.dtype.bytes() as u64;
        let address = self.descriptor.address + (start.offset + from * inner.stride) * bytes;
        let index = self.offset.wrapping_add(start.index + from * inner.step);
        // SAFETY: the plan found these elements inside of the tensor; a word needs no more alignment than they have.
        unsafe {
            match bytes {
                2 => self.words(address as *const u16, index, 1, length),
                _ => self.words(address as *const u32, index, bytes / 4, length),
            }
        }
    }

    /// Digests `length` elements along the runs, of `parts` words each, the first one with logical index `index`.
    ///
    /// # Safety
    /// These words are aligned and readable; nobody writes to them meanwhile.
    unsafe fn words<W: Word>(&self, start: *const W, index: u64, parts: u64, length: u64) -> u64 {
        let Axis { stride, step, .. } = self.runs.inner;
        if self.runs.inner.is_contiguous() {
            // SAFETY: neighbours in logical order are neighbours in memory; the rest is the caller's contract.
            let words = unsafe { std::slice::from_raw_parts(start, (length * parts) as usize) };
            return dispatch(self.simd, Digest { words, first: index.wrapping_mul(parts) });
        }
        let mut sum = 0u64;
        for element in 0..length {
            let first = index.wrapping_add(element * step).wrapping_mul(parts);
            for part in 0..parts {
                // SAFETY: element < length and part < parts.
                let word = unsafe { start.add((element * stride * parts + part) as usize).read() };
                sum = sum.wrapping_add(term(word, first.wrapping_add(part)));
            }
        }
        sum
    }
}

/// Up to 32 bits of an element.
trait Word: Copy + Into<u64> {}

impl Word for u16 {}
impl Word for u32 {}

/// What word `k` adds to a digest.
#[inline(always)]
fn term(word: impl Word, k: u64) -> u64 {
    weight(k).wrapping_mul(word.into())
}

/// The digest of words that are numbered from `first` on.
struct Digest<'a, W> {
    words: &'a [W],
    first: u64,
}

impl<W: Word> Kernel for Digest<'_, W> {
    type Output = u64;

    #[inline(always)]
    fn run<V: Vector>(self) -> u64 {
        /// Pairs of words that are taken side by side; a pair shares what is mixed.
        const LANES: usize = 16;
        let (head, body) = self.words.split_at(self.words.len().min((self.first & 1) as usize));
        let (groups, tail) = body.as_chunks::<{ 2 * LANES }>();
        let first = self.first.wrapping_add(head.len() as u64);
        let pair = |at: u64| (first >> 1).wrapping_add(at + 1).wrapping_mul(STEP);
        let mut inputs: [u64; LANES] = std::array::from_fn(|lane| pair(lane as u64));
        let mut sums = [0u64; LANES];
        for group in groups {
            for lane in 0..LANES {
                let mixed = mixed(inputs[lane]);
                let even = (mixed | 1).wrapping_mul(group[2 * lane].into());
                let odd = (mixed.rotate_left(ROTATION) | 1).wrapping_mul(group[2 * lane + 1].into());
                sums[lane] = sums[lane].wrapping_add(even).wrapping_add(odd);
                inputs[lane] = inputs[lane].wrapping_add(STEP.wrapping_mul(LANES as u64));
            }
        }
        let after = first.wrapping_add((body.len() - tail.len()) as u64);
        let ends = head.iter().zip(self.first..).chain(tail.iter().zip(after..));
        ends.map(|(&word, k)| term(word, k)).chain(sums).fold(0, u64::wrapping_add)
    }
}
