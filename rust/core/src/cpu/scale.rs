//! Writing gradients: scaling by a factor and clamping to a limit, in place.

use std::ops::Neg;

use half::{bf16, f16};
use rayon::prelude::*;

use super::block::BLOCK;
use super::float_mode::StandardMode;
use super::simd::{Kernel, Simd, dispatch};
use super::sum::elements;
use super::threads::Threads;
use super::vector::Vector;
use crate::dtype::DType;
use crate::exact::to_odd_float32;
use crate::plan::Chunk;

/// What happens to each element.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// x times the factor: float64 in float64, narrower types in float32, then rounded to the type.
    Times(f64),
    /// x limited to [-limit, limit], the limit rounded to the type; NaN stays.
    Limit(f64),
}

/// Multiplies every element by `factor`. A factor of 1 writes nothing.
///
/// # Safety
/// The memory that the chunks describe must be writable, used by nobody else meanwhile, and no element may lie in
/// two chunks.
pub unsafe fn scale(chunks: &[Chunk], factor: f64, simd: Simd, threads: Threads) {
    if factor != 1.0 {
        // SAFETY: the caller's contract is handed on.
        unsafe { change(chunks, Change::Times(factor), simd, threads) }
    }
}

/// Limits every element to [-`limit`, `limit`]. Chunks must not be complex.
///
/// # Safety
/// As [`scale`].
pub unsafe fn clamp(chunks: &[Chunk], limit: f64, simd: Simd, threads: Threads) {
    // SAFETY: the caller's contract is handed on.
    unsafe { change(chunks, Change::Limit(limit), simd, threads) }
}

/// # Safety
/// As [`scale`].
unsafe fn change(chunks: &[Chunk], change: Change, simd: Simd, threads: Threads) {
    let one = |chunk: &Chunk| {
        let _mode = StandardMode::enter();
        // SAFETY: the caller's contract is handed on; chunks are disjoint, so threads never meet.
        unsafe { change_chunk(chunk, change, simd) }
    };
    // Last chunk first: what the sums read last is still in the cache.
    threads.spread(elements(chunks), || chunks.par_iter().rev().for_each(one), || chunks.iter().rev().for_each(one));
}

/// # Safety
/// As [`scale`].
unsafe fn change_chunk(chunk: &Chunk, change: Change, simd: Simd) {
    // SAFETY: the chunk's dtype names what its address points at; the rest is the caller's contract.
    unsafe {
        match chunk.dtype {
            DType::F16 => change_rows(chunk, 1, |block| dispatch(simd, Half { block, change })),
            DType::Bf16 => change_rows(chunk, 1, |block| dispatch(simd, Narrow::<bf16> { block, change })),
            DType::F32 => change_rows(chunk, 1, |block| dispatch(simd, Narrow::<f32> { block, change })),
            DType::F64 => change_rows(chunk, 1, |block| dispatch(simd, Wide { block, change })),
            DType::C64 => change_rows(chunk, 2, |block| dispatch(simd, Narrow::<f32> { block, change })),
            DType::C128 => change_rows(chunk, 2, |block| dispatch(simd, Wide { block, change })),
        }
    }
}

/// Calls `visit` with blocks of a chunk whose elements hold `parts` numbers each.
///
/// # Safety
/// As [`scale`], and `T` must be the type of the chunk's numbers.
unsafe fn change_rows<T: Copy>(chunk: &Chunk, parts: u64, mut visit: impl FnMut(&mut [T])) {
    let start = chunk.address as *mut T;
    for row in 0..chunk.rows {
        // SAFETY: row < rows, so the pointer stays inside the chunk.
        let first = unsafe { start.add((row * chunk.row_stride * parts) as usize) };
        let length = (chunk.row_length * parts) as usize;
        if first.is_aligned() {
            // SAFETY: a whole row of the chunk, aligned, and ours alone by the caller's contract.
            let row = unsafe { std::slice::from_raw_parts_mut(first, length) };
            row.chunks_mut(BLOCK).for_each(&mut visit);
        } else {
            for column in 0..length {
                // SAFETY: column < length; unaligned reads and writes need no alignment.
                unsafe {
                    let mut one = [first.add(column).read_unaligned()];
                    visit(&mut one);
                    first.add(column).write_unaligned(one[0]);
                }
            }
        }
    }
}

/// A type that computes in float32.
trait ThroughFloat: Copy {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;

    /// A float64 rounded once.
    #[inline(always)]
    fn rounded(value: f64) -> Self {
        Self::narrow(to_odd_float32(value))
    }
}

impl ThroughFloat for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn rounded(value: f64) -> Self {
        value as f32
    }
}

impl ThroughFloat for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Ties to even; NaN becomes the quiet NaN that torch writes.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        bf16::from_bits(if value.is_nan() { 0x7FC0 } else { rounded as u16 })
    }
}

#[inline(always)]
fn limited<T: Copy + PartialOrd + Neg<Output = T>>(x: T, limit: T) -> T {
    if x > limit {
        limit
    } else if x < -limit {
        -limit
    } else {
        x
    }
}

struct Narrow<'a, T> {
    block: &'a mut [T],
    change: Change,
}

impl<T: ThroughFloat> Kernel for Narrow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        match self.change {
            Change::Times(factor) => {
                let factor = factor as f32;
                self.block.iter_mut().for_each(|x| *x = T::narrow(x.widen() * factor));
            }
            Change::Limit(limit) => {
                let limit = T::rounded(limit).widen();
                self.block.iter_mut().for_each(|x| *x = T::narrow(limited(x.widen(), limit)));
            }
        }
    }
}

/// float16 goes through float32 eight at a time, as the conversions are instructions of vectors.
struct Half<'a> {
    block: &'a mut [f16],
    change: Change,
}

impl Kernel for Half<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let (groups, rest) = self.block.as_chunks_mut::<8>();
        let mut padded = [f16::ZERO; 8];
        padded[..rest.len()].copy_from_slice(rest);
        for halves in groups.iter_mut().chain([&mut padded]) {
            let mut floats = V::widen_half(halves);
            match self.change {
                Change::Times(factor) => floats = floats.map(|x| x * factor as f32),
                Change::Limit(limit) => {
                    let limit = f16::from_f32(to_odd_float32(limit)).to_f32();
                    floats = floats.map(|x| limited(x, limit));
                }
            }
            *halves = V::narrow_half(&floats);
        }
        rest.copy_from_slice(&padded[..rest.len()]);
    }
}

struct Wide<'a> {
    block: &'a mut [f64],
    change: Change,
}

impl Kernel for Wide<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        match self.change {
            Change::Times(factor) => self.block.iter_mut().for_each(|x| *x *= factor),
            Change::Limit(limit) => self.block.iter_mut().for_each(|x| *x = limited(*x, limit)),
        }
    }
}
