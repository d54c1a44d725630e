//! A block of elements that fits the first-level cache, and the span of its magnitudes.

use super::element::Element;
use super::simd::Kernel;
use super::vector::Vector;
use crate::norm::exponent_of;

/// Elements of one block: 8 KiB of float32, and few enough additions a lane that bfloat16 needs one grid.
pub const BLOCK: usize = 2048;

/// The largest and the smallest non-zero magnitude of a block, as bits.
#[derive(Clone, Copy, Debug)]
pub struct Span<T: Element> {
    largest: T::Bits,
    smallest: T::Bits,
}

impl<T: Element> Span<T> {
    /// Whether every element is zero.
    pub fn is_zero(&self) -> bool {
        self.largest == T::LOWEST
    }

    /// Whether no element is NaN or infinite.
    pub fn is_finite(&self) -> bool {
        self.largest < T::INFINITY
    }

    /// The largest magnitude.
    pub fn largest(&self) -> f64 {
        T::from_magnitude_bits(self.largest).widen()
    }

    /// The exponent e of the largest magnitude: it is below 2^(e + 1).
    pub fn top_exponent(&self) -> i32 {
        exponent_of(self.largest())
    }

    /// The exponent of a unit that divides every element.
    pub fn unit_exponent(&self) -> i32 {
        let exponent = exponent_of(T::from_magnitude_bits(self.smallest).widen());
        exponent.max(T::SMALLEST_NORMAL) - T::FRACTION_BITS
    }
}

/// Finds the span of a block.
pub struct Measure<'a, T>(pub &'a [T]);

impl<T: Element> Kernel for Measure<'_, T> {
    type Output = Span<T>;

    #[inline(always)]
    fn run<V: Vector>(self) -> Span<T> {
        /// Magnitudes looked at side by side: one AVX-512 vector of the narrowest type.
        const WIDTH: usize = 32;
        let mut largest = [T::LOWEST; WIDTH];
        let mut smallest = [T::HIGHEST; WIDTH];
        let (groups, rest) = self.0.as_chunks::<WIDTH>();
        let mut look = |group: &[T; WIDTH]| {
            for lane in 0..WIDTH {
                let bits = group[lane].magnitude_bits();
                largest[lane] = largest[lane].max(bits);
                let non_zero = if bits == T::LOWEST { T::HIGHEST } else { bits };
                smallest[lane] = smallest[lane].min(non_zero);
            }
        };
        groups.iter().for_each(&mut look);
        let mut padded = [T::ZERO; WIDTH];
        padded[..rest.len()].copy_from_slice(rest);
        look(&padded);
        Span {
            largest: largest.into_iter().fold(T::LOWEST, Ord::max),
            smallest: smallest.into_iter().fold(T::HIGHEST, Ord::min),
        }
    }
}
