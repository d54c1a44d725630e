//! Largest and smallest magnitudes, and counts of non-zero elements.

use super::element::Element;
use super::simd::Kernel;
use super::vector::Vector;
use crate::exact::Sums;
use crate::finish::extreme_key;
use crate::norm::NormKind;

/// The smallest magnitude of a block, zeros included, as bits.
pub struct Smallest<'a, T>(pub &'a [T]);

impl<T: Element> Kernel for Smallest<'_, T> {
    type Output = T::Bits;

    #[inline(always)]
    fn run<V: Vector>(self) -> T::Bits {
        const WIDTH: usize = 32;
        let mut smallest = [T::HIGHEST; WIDTH];
        let (groups, rest) = self.0.as_chunks::<WIDTH>();
        for group in groups {
            for lane in 0..WIDTH {
                smallest[lane] = smallest[lane].min(group[lane].magnitude_bits());
            }
        }
        let rest = rest.iter().map(|x| x.magnitude_bits());
        smallest.into_iter().chain(rest).fold(T::HIGHEST, Ord::min)
    }
}

/// The number of non-zero elements of a block.
pub struct NonZeros<'a, T>(pub &'a [T]);

impl<T: Element> Kernel for NonZeros<'_, T> {
    type Output = usize;

    #[inline(always)]
    fn run<V: Vector>(self) -> usize {
        self.0.iter().filter(|x| x.magnitude_bits() != T::LOWEST).count()
    }
}

/// Takes the elements of a block with non-finite ones in it, one by one.
pub fn add_each<T: Element>(block: &[T], kind: NormKind, sums: &mut Sums) {
    for &x in block {
        let value = x.widen();
        if !value.is_finite() {
            sums.count_non_finite(value);
        }
        match kind {
            NormKind::Max | NormKind::Min if !value.is_nan() => {
                sums.extreme = sums.extreme.max(extreme_key(value.abs(), kind));
            }
            NormKind::Count if value != 0.0 => sums.limbs.deposit(1, 0),
            _ => {}
        }
    }
}
