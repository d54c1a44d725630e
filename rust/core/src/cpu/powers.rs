//! Terms |x|^p of a block, for norm types whose terms are float64 powers.

use super::block::BLOCK;
use super::element::Element;
use super::simd::Kernel;
use super::vector::Vector;
use crate::exact::{DoubleDouble, Sums};
use crate::norm::{LARGEST_TERM, NormKind, SMALLEST_TERM, Scale};

/// Terms computed side by side.
const LANES: usize = 8;

/// Fills a buffer with the terms of a block; elements without a term give 0.
pub struct Powers<'a, T> {
    pub block: &'a [T],
    pub kind: NormKind,
    pub scale: Option<Scale>,
    pub terms: &'a mut [f64; BLOCK],
}

impl<T: Element> Kernel for Powers<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        for (&x, term) in self.block.iter().zip(self.terms.iter_mut()) {
            let magnitude = x.widen().abs();
            *term = self.scale.map_or(magnitude, |scale| scale.divide(magnitude));
        }
        let terms = &mut self.terms[..self.block.len().next_multiple_of(LANES)];
        match self.kind {
            NormKind::Power(p) => terms.as_chunks_mut().0.iter_mut().for_each(|lanes| integer_power(lanes, p)),
            _ => terms.iter_mut().for_each(|term| *term = term.powf(self.kind.p())),
        }
        for term in terms {
            let fits = (SMALLEST_TERM..=LARGEST_TERM).contains(term);
            *term = if fits { *term } else { 0.0 };
        }
    }
}

#[inline(always)]
fn integer_power(lanes: &mut [f64; LANES], p: u32) {
    let base = lanes.map(DoubleDouble::new);
    let mut power = base;
    for bit in (0..p.ilog2()).rev() {
        for lane in 0..LANES {
            power[lane] = power[lane].multiply(power[lane]);
        }
        if p >> bit & 1 == 1 {
            for lane in 0..LANES {
                power[lane] = power[lane].multiply(base[lane]);
            }
        }
    }
    for lane in 0..LANES {
        lanes[lane] = power[lane].hi + power[lane].lo;
    }
}

/// Counts what has no term: NaN, infinities, zeros (for p < 0), and in the first pass the misfits.
pub fn count_exceptions<T: Element>(block: &[T], terms: &[f64; BLOCK], kind: NormKind, first: bool, sums: &mut Sums) {
    for (&x, &term) in block.iter().zip(terms) {
        let value = x.widen();
        if !value.is_finite() {
            sums.count_non_finite(value);
        } else if value == 0.0 {
            sums.zeros += i64::from(kind.p() < 0.0);
        } else if term == 0.0 {
            sums.misfits += i64::from(first);
        }
    }
}
