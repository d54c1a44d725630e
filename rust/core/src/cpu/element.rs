//! What the kernels need to know of an element type.

use half::{bf16, f16};

use super::vector::{GROUP, Vector};

/// A real element type that widens to float64 exactly.
pub trait Element: Copy + Send + Sync + 'static {
    /// Bits after the leading one of a normal number.
    const FRACTION_BITS: i32;
    /// Exponent of the smallest normal number.
    const SMALLEST_NORMAL: i32;
    /// Whether the square of an element is exact in float64.
    const SQUARE_IS_EXACT: bool;
    /// Zero, for padding.
    const ZERO: Self;
    /// The magnitude as an integer: ordered as the magnitudes are.
    type Bits: Copy + Ord;
    /// Bits of zero.
    const LOWEST: Self::Bits;
    /// Bits of NaN, all ones but for the sign.
    const HIGHEST: Self::Bits;
    /// Bits of infinity: everything from there on is not finite.
    const INFINITY: Self::Bits;

    /// Widens a group of elements from memory to vectors, in whatever order.
    ///
    /// # Safety
    /// `GROUP * V::WIDTH` elements must be readable.
    unsafe fn load<V: Vector>(from: *const Self) -> [V; GROUP];

    /// The element as float64.
    fn widen(self) -> f64;

    /// The bits of |self|.
    fn magnitude_bits(self) -> Self::Bits;

    /// The magnitude of bits.
    fn from_magnitude_bits(bits: Self::Bits) -> Self;
}

macro_rules! element {
    ($type:ty, $bits:ty, fraction: $fraction:expr, smallest: $smallest:expr, exact: $exact:expr, $load:ident, $widen:expr) => {
        impl Element for $type {
            const FRACTION_BITS: i32 = $fraction;
            const SMALLEST_NORMAL: i32 = $smallest;
            const SQUARE_IS_EXACT: bool = $exact;
            const ZERO: Self = <$type>::from_bits(0);
            type Bits = $bits;
            const LOWEST: $bits = 0;
            const HIGHEST: $bits = <$bits>::MAX >> 1;
            const INFINITY: $bits = <$type>::INFINITY.to_bits();

            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> [V; GROUP] {
                // SAFETY: the caller's contract.
                unsafe { V::$load(from) }
            }

            #[inline(always)]
            fn widen(self) -> f64 {
                $widen(self)
            }

            #[inline(always)]
            fn magnitude_bits(self) -> $bits {
                self.to_bits() & Self::HIGHEST
            }

            #[inline(always)]
            fn from_magnitude_bits(bits: $bits) -> Self {
                <$type>::from_bits(bits)
            }
        }
    };
}

element!(f16, u16, fraction: 10, smallest: -14, exact: true, load_f16, f16::to_f64);
element!(bf16, u16, fraction: 7, smallest: -126, exact: true, load_bf16, |x: bf16| {
    f64::from(f32::from_bits(u32::from(x.to_bits()) << 16))
});
element!(f32, u32, fraction: 23, smallest: -126, exact: true, load_f32, f64::from);
element!(f64, u64, fraction: 52, smallest: -1022, exact: false, load_f64, |x| x);
