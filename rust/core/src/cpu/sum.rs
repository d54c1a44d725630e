//! Sums over chunks.

use half::{bf16, f16};
use rayon::prelude::*;

use super::block::{BLOCK, Measure, Span};
use super::element::Element;
use super::extremes::{NonZeros, Smallest, add_each};
use super::float_mode::StandardMode;
use super::magnitude::complex_magnitude;
use super::powers::{Powers, count_exceptions};
use super::read::Rows;
use super::simd::{Simd, dispatch};
use super::threads::Threads;
use super::window::{Terms, Windowed};
use crate::dtype::DType;
use crate::exact::{Limbs, Sums};
use crate::finish::{COUNT_PLACE, extreme_key};
use crate::norm::{NormKind, Scale};
use crate::plan::Chunk;

/// What a pass adds up.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// The norm kind.
    pub kind: NormKind,
    /// What magnitudes are divided by first; only for powers, in the second pass.
    pub scale: Option<Scale>,
    /// The instruction set, from [`super::detect`].
    pub simd: Simd,
}

/// The sums of all chunks together.
///
/// # Safety
/// The memory that the chunks describe must be readable and must not be written meanwhile.
pub unsafe fn sum(chunks: &[Chunk], pass: Pass, threads: Threads) -> Sums {
    let one = |mut sums: Sums, chunk: &Chunk| {
        let _mode = StandardMode::enter();
        // SAFETY: the caller's contract is handed on.
        unsafe { add_chunk(chunk, pass, &mut sums) };
        sums
    };
    threads.spread(
        elements(chunks),
        || chunks.par_iter().fold(Sums::default, one).reduce(Sums::default, merged),
        || chunks.iter().fold(Sums::default(), one),
    )
}

/// The sums of each of `tensors` tensors, by the chunks' tensor index.
///
/// # Safety
/// As [`sum`].
pub unsafe fn sum_each(chunks: &[Chunk], tensors: usize, pass: Pass, threads: Threads) -> Vec<Sums> {
    let groups: Vec<&[Chunk]> = chunks.chunk_by(|a, b| a.tensor == b.tensor).collect();
    let one = |group: &&[Chunk]| {
        // SAFETY: the caller's contract is handed on.
        let sums = unsafe { sum(group, pass, threads) };
        (group[0].tensor as usize, sums)
    };
    let parts: Vec<(usize, Sums)> =
        threads.spread(elements(chunks), || groups.par_iter().map(one).collect(), || groups.iter().map(one).collect());
    let mut each = vec![Sums::default(); tensors];
    for (tensor, sums) in parts {
        each[tensor].merge(&sums);
    }
    each
}

/// Number of elements that chunks hold.
pub fn elements(chunks: &[Chunk]) -> u64 {
    chunks.iter().map(Chunk::elements).sum()
}

fn merged(mut a: Sums, b: Sums) -> Sums {
    a.merge(&b);
    a
}

/// # Safety
/// As [`sum`].
unsafe fn add_chunk(chunk: &Chunk, pass: Pass, sums: &mut Sums) {
    if chunk.weight != 1 {
        let once = Chunk { weight: 1, ..*chunk };
        let mut part = Sums::default();
        // SAFETY: the same memory.
        unsafe { add_chunk(&once, pass, &mut part) };
        return sums.merge_weighted(&part, chunk.weight);
    }
    // SAFETY: the chunk's dtype names what its address points at; the rest is the caller's contract.
    unsafe {
        match chunk.dtype {
            DType::F16 => rows::<f16>(chunk, 1).for_each_block(|block| add_block(block, pass, sums)),
            DType::Bf16 => rows::<bf16>(chunk, 1).for_each_block(|block| add_block(block, pass, sums)),
            DType::F32 => rows::<f32>(chunk, 1).for_each_block(|block| add_block(block, pass, sums)),
            DType::F64 => rows::<f64>(chunk, 1).for_each_block(|block| add_block(block, pass, sums)),
            DType::C64 => rows::<f32>(chunk, 2).for_each_block(|block| add_complex(block, pass, sums)),
            DType::C128 => rows::<f64>(chunk, 2).for_each_block(|block| add_complex(block, pass, sums)),
        }
    }
}

/// The rows of a chunk, of elements that hold `parts` numbers each.
fn rows<T>(chunk: &Chunk, parts: u64) -> Rows<T> {
    Rows {
        start: chunk.address as *const T,
        rows: chunk.rows,
        length: chunk.row_length * parts,
        stride: chunk.row_stride * parts,
    }
}

/// Squares of complex elements are those of their parts; other kinds take |z|.
fn add_complex<T: Element>(block: &[T], pass: Pass, sums: &mut Sums) {
    if pass.kind == NormKind::Squares {
        return add_block(block, pass, sums);
    }
    let mut magnitudes = [0.0; BLOCK / 2];
    let pairs = block.as_chunks::<2>().0;
    for (magnitude, &[real, imaginary]) in magnitudes.iter_mut().zip(pairs) {
        *magnitude = complex_magnitude(real, imaginary);
    }
    add_block(&magnitudes[..pairs.len()], pass, sums);
}

fn add_block<T: Element>(block: &[T], pass: Pass, sums: &mut Sums) {
    if block.is_empty() {
        return;
    }
    match pass.kind {
        NormKind::Power(_) | NormKind::Real(_) => return add_powers(block, pass, sums),
        NormKind::Tiny(p) => return add_tiny(block, p, sums),
        NormKind::Min => return add_smallest(block, pass, sums),
        _ => {}
    }
    let span = dispatch(pass.simd, Measure(block));
    if !span.is_finite() {
        return add_irregular(block, pass.kind, sums);
    }
    match pass.kind {
        NormKind::Count => sums.limbs.deposit(dispatch(pass.simd, NonZeros(block)) as i128, 0),
        NormKind::Max => sums.extreme = sums.extreme.max(extreme_key(span.largest(), NormKind::Max)),
        _ if span.is_zero() => {}
        NormKind::Sum => add_magnitudes(block, &span, pass.simd, &mut sums.limbs),
        _ => add_squares(block, &span, pass.simd, &mut sums.limbs),
    }
}

fn add_smallest<T: Element>(block: &[T], pass: Pass, sums: &mut Sums) {
    let smallest = dispatch(pass.simd, Smallest(block));
    let finite = dispatch(pass.simd, Measure(block)).is_finite();
    if finite {
        let smallest = T::from_magnitude_bits(smallest).widen();
        sums.extreme = sums.extreme.max(extreme_key(smallest, NormKind::Min));
    } else {
        add_each(block, NormKind::Min, sums);
    }
}

fn add_powers<T: Element>(block: &[T], pass: Pass, sums: &mut Sums) {
    let mut terms = [0.0; BLOCK];
    dispatch(pass.simd, Powers { block, kind: pass.kind, scale: pass.scale, terms: &mut terms });
    count_exceptions(block, &terms, pass.kind, pass.scale.is_none(), sums);
    let terms = &terms[..block.len()];
    let span = dispatch(pass.simd, Measure(terms));
    if !span.is_zero() {
        add_magnitudes(terms, &span, pass.simd, &mut sums.limbs);
    }
}

/// Magnitudes, and above them how many are not zero: the sums of a tiny p. See `finish`.
fn add_tiny<T: Element>(block: &[T], p: f64, sums: &mut Sums) {
    let mut count = 0;
    for value in block.iter().map(|x| x.widen()) {
        if !value.is_finite() {
            sums.count_non_finite(value);
        } else if value == 0.0 {
            sums.zeros += i64::from(p < 0.0);
        } else {
            count += 1;
        }
    }
    deposit_each(block, 1, &mut sums.limbs);
    sums.limbs.deposit(count, COUNT_PLACE);
}

fn add_magnitudes<T: Element>(block: &[T], span: &Span<T>, simd: Simd, limbs: &mut Limbs) {
    let terms = Terms { top: span.top_exponent() + 1, unit: span.unit_exponent() };
    add_windowed::<T, false>(block, terms, 1, simd, limbs);
}

fn add_squares<T: Element>(block: &[T], span: &Span<T>, simd: Simd, limbs: &mut Limbs) {
    let terms = Terms { top: 2 * (span.top_exponent() + 1), unit: 2 * span.unit_exponent() };
    let parts = if T::SQUARE_IS_EXACT { 1 } else { 2 };
    add_windowed::<T, true>(block, terms, parts, simd, limbs);
}

/// Adds terms with as many grids as they need; element by element where that is more than the kernels have.
fn add_windowed<T: Element, const SQUARES: bool>(
    block: &[T],
    terms: Terms,
    parts: usize,
    simd: Simd,
    limbs: &mut Limbs,
) {
    let levels = terms.levels(block.len(), parts, simd.width());
    match if terms.fit() { levels } else { usize::MAX } {
        1 => dispatch(simd, Windowed::<T, 1, SQUARES> { block, terms, limbs }),
        2 => dispatch(simd, Windowed::<T, 2, SQUARES> { block, terms, limbs }),
        3 => dispatch(simd, Windowed::<T, 3, SQUARES> { block, terms, limbs }),
        4 | 5 => dispatch(simd, Windowed::<T, 5, SQUARES> { block, terms, limbs }),
        6..9 => dispatch(simd, Windowed::<T, 8, SQUARES> { block, terms, limbs }),
        _ => deposit_each(block, if SQUARES { 2 } else { 1 }, limbs),
    }
}

/// A block with NaN or infinities in it.
fn add_irregular<T: Element>(block: &[T], kind: NormKind, sums: &mut Sums) {
    add_each(block, kind, sums);
    match kind {
        NormKind::Sum => deposit_each(block, 1, &mut sums.limbs),
        NormKind::Squares => deposit_each(block, 2, &mut sums.limbs),
        _ => {}
    }
}

/// Adds |x|^`power` (1 or 2) of every finite element as an integer: exact for any span.
fn deposit_each<T: Element>(block: &[T], power: u32, limbs: &mut Limbs) {
    const FRACTION_BITS: i32 = f64::MANTISSA_DIGITS as i32 - 1;
    for bits in block.iter().map(|x| x.widen().abs().to_bits()) {
        let biased = (bits >> FRACTION_BITS) as i32;
        let fraction = bits & ((1 << FRACTION_BITS) - 1);
        let whole = i128::from(if biased == 0 { fraction } else { fraction | 1 << FRACTION_BITS });
        let exponent = biased.max(1) - 1023 - FRACTION_BITS;
        if biased != 0x7FF {
            limbs.deposit(whole.pow(power), exponent * power as i32);
        }
    }
}
