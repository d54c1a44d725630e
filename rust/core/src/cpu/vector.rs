//! Vectors of float64, one type for each instruction set.
//!
//! Arrays of numbers would do for the compiler's vectoriser, were it not for loops whose state fills the registers:
//! it tears those apart. So the sums are written over these few operations.

use half::{bf16, f16};

/// Vectors that are loaded and added together: enough independent additions to hide their latency.
pub const GROUP: usize = 4;

/// Lanes of float64 that move together.
pub trait Vector: Copy {
    /// Number of lanes.
    const WIDTH: usize;

    /// The same value in every lane.
    fn splat(value: f64) -> Self;

    /// self + other.
    fn add(self, other: Self) -> Self;

    /// self - other.
    fn sub(self, other: Self) -> Self;

    /// |self|.
    fn abs(self) -> Self;

    /// self², rounded.
    fn square(self) -> Self;

    /// self² + addend, where self² is exact in float64: so it does not matter whether it is fused.
    fn square_plus(self, addend: Self) -> Self;

    /// self² - rounded in one rounding: exact when `rounded` is self² rounded.
    fn square_rest(self, rounded: Self) -> Self;

    /// The sum over lanes of (bits of a lane - bits of `start`), as integers.
    fn units_above(self, start: f64) -> i64;

    /// float16 as float32.
    #[inline(always)]
    fn widen_half(halves: &[f16; 8]) -> [f32; 8] {
        halves.map(f16::to_f32)
    }

    /// float32 rounded to float16, ties to even.
    #[inline(always)]
    fn narrow_half(floats: &[f32; 8]) -> [f16; 8] {
        floats.map(f16::from_f32)
    }

    /// Asks for the cache line of an address, which need not be readable.
    fn prefetch(address: *const u8);

    /// Widens a group of float64 from memory, in whatever order.
    ///
    /// # Safety
    /// `GROUP * WIDTH` elements must be readable.
    unsafe fn load_f64(from: *const f64) -> [Self; GROUP];

    /// Widens a group of float32 from memory.
    ///
    /// # Safety
    /// As [`Vector::load_f64`].
    unsafe fn load_f32(from: *const f32) -> [Self; GROUP];

    /// Widens a group of bfloat16 from memory.
    ///
    /// # Safety
    /// As [`Vector::load_f64`].
    unsafe fn load_bf16(from: *const bf16) -> [Self; GROUP];

    /// Widens a group of float16 from memory.
    ///
    /// # Safety
    /// As [`Vector::load_f64`].
    unsafe fn load_f16(from: *const f16) -> [Self; GROUP];
}

/// What every target can do; on Arm the compiler makes NEON of it, with fused multiply-adds.
#[derive(Clone, Copy)]
pub struct Pair([f64; 2]);

impl Pair {
    #[inline(always)]
    unsafe fn load<T: Copy>(from: *const T, widen: impl Fn(T) -> f64) -> [Self; GROUP] {
        // SAFETY: the caller vouches for the elements of the group.
        let at = |place| widen(unsafe { from.add(place).read() });
        std::array::from_fn(|column| Pair([at(2 * column), at(2 * column + 1)]))
    }

    #[inline(always)]
    fn zip(self, other: Self, operation: impl Fn(f64, f64) -> f64) -> Self {
        Pair([operation(self.0[0], other.0[0]), operation(self.0[1], other.0[1])])
    }
}

impl Vector for Pair {
    const WIDTH: usize = 2;

    #[inline(always)]
    fn splat(value: f64) -> Self {
        Pair([value; 2])
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Pair(self.0.map(f64::abs))
    }

    #[inline(always)]
    fn square(self) -> Self {
        self.zip(self, |a, b| a * b)
    }

    #[inline(always)]
    fn square_plus(self, addend: Self) -> Self {
        self.square().add(addend)
    }

    #[inline(always)]
    fn square_rest(self, rounded: Self) -> Self {
        self.zip(rounded, |a, b| a.mul_add(a, -b))
    }

    #[inline(always)]
    fn units_above(self, start: f64) -> i64 {
        self.0.iter().map(|lane| lane.to_bits().wrapping_sub(start.to_bits()) as i64).sum()
    }

    #[inline(always)]
    fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn load_f64(from: *const f64) -> [Self; GROUP] {
        // SAFETY: the caller's contract.
        unsafe { Pair::load(from, |x| x) }
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> [Self; GROUP] {
        // SAFETY: the caller's contract.
        unsafe { Pair::load(from, f64::from) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [Self; GROUP] {
        // SAFETY: the caller's contract.
        unsafe { Pair::load(from, bf16::to_f64) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> [Self; GROUP] {
        // SAFETY: the caller's contract.
        unsafe { Pair::load(from, f16::to_f64) }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{GROUP, Vector};

    /// The upper bfloat16 of a word is the word as float32, once the lower one is masked off.
    const UPPER: i32 = 0xFFFF_0000_u32 as i32;

    /// Four lanes; made only inside functions compiled for AVX2, FMA and F16C.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256d);

    /// Eight lanes; made only inside functions compiled for AVX-512.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512d);

    /// Implements [`Vector`] by one intrinsic an operation.
    macro_rules! vector {
        ($type:ident, $width:literal, $splat:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident, $fms:ident, $widen:ident: $half:ty,
         abs: $abs:expr, units: $units:expr, f64: $f64:expr, f32: $f32:expr, bf16: $bf16:expr, f16: $f16:expr) => {
            impl Vector for $type {
                const WIDTH: usize = $width;

                #[inline(always)]
                fn splat(value: f64) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $splat(value) })
                }

                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $add(self.0, other.0) })
                }

                #[inline(always)]
                fn sub(self, other: Self) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $sub(self.0, other.0) })
                }

                #[inline(always)]
                fn abs(self) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $abs(self.0) })
                }

                #[inline(always)]
                fn square(self) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $mul(self.0, self.0) })
                }

                #[inline(always)]
                fn square_plus(self, addend: Self) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $fma(self.0, self.0, addend.0) })
                }

                #[inline(always)]
                fn square_rest(self, rounded: Self) -> Self {
                    // SAFETY: the instruction set is there, see the type.
                    $type(unsafe { $fms(self.0, self.0, rounded.0) })
                }

                #[inline(always)]
                fn units_above(self, start: f64) -> i64 {
                    // SAFETY: the instruction set is there, see the type.
                    unsafe { $units(self.0, start.to_bits() as i64) }
                }

                #[inline(always)]
                fn prefetch(address: *const u8) {
                    // SAFETY: a prefetch of any address is harmless.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
                }

                #[inline(always)]
                fn widen_half(halves: &[f16; 8]) -> [f32; 8] {
                    let mut floats = [0.0; 8];
                    // SAFETY: both arrays hold what is read and written; the instruction set is there, see the type.
                    unsafe {
                        let bits = _mm_loadu_si128(halves.as_ptr().cast());
                        _mm256_storeu_ps(floats.as_mut_ptr(), _mm256_cvtph_ps(bits));
                    }
                    floats
                }

                #[inline(always)]
                fn narrow_half(floats: &[f32; 8]) -> [f16; 8] {
                    let mut halves = [f16::ZERO; 8];
                    // SAFETY: both arrays hold what is read and written; the instruction set is there, see the type.
                    unsafe {
                        let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(floats.as_ptr()));
                        _mm_storeu_si128(halves.as_mut_ptr().cast(), bits);
                    }
                    halves
                }

                #[inline(always)]
                unsafe fn load_f64(from: *const f64) -> [Self; GROUP] {
                    // SAFETY: the caller's contract; the instruction set is there, see the type.
                    std::array::from_fn(|column| $type(unsafe { $f64(from.add(column * $width)) }))
                }

                #[inline(always)]
                unsafe fn load_f32(from: *const f32) -> [Self; GROUP] {
                    // SAFETY: the caller's contract; the instruction set is there, see the type.
                    std::array::from_fn(|column| $type(unsafe { $f32(from.add(column * $width)) }))
                }

                #[inline(always)]
                unsafe fn load_bf16(from: *const bf16) -> [Self; GROUP] {
                    // SAFETY: the caller's contract; the instruction set is there, see the type.
                    let words: [$half; GROUP] = unsafe { $bf16(from) };
                    // SAFETY: as above.
                    words.map(|floats| $type(unsafe { $widen(floats) }))
                }

                #[inline(always)]
                unsafe fn load_f16(from: *const f16) -> [Self; GROUP] {
                    // SAFETY: the caller's contract; the instruction set is there, see the type.
                    std::array::from_fn(|column| $type(unsafe { $f16(from.add(column * $width)) }))
                }
            }
        };
    }

    vector!(Avx2, 4, _mm256_set1_pd, _mm256_add_pd, _mm256_sub_pd, _mm256_mul_pd, _mm256_fmadd_pd, _mm256_fmsub_pd, _mm256_cvtps_pd: __m128,
        abs: |x| _mm256_andnot_pd(_mm256_set1_pd(-0.0), x),
        units: |x, start| {
            let units = _mm256_sub_epi64(_mm256_castpd_si256(x), _mm256_set1_epi64x(start));
            let halves = _mm_add_epi64(_mm256_castsi256_si128(units), _mm256_extracti128_si256::<1>(units));
            _mm_cvtsi128_si64(halves) + _mm_extract_epi64::<1>(halves)
        },
        f64: |from| _mm256_loadu_pd(from),
        f32: |from| _mm256_cvtps_pd(_mm_loadu_ps(from)),
        bf16: |from: *const bf16| {
            let words = _mm256_loadu_si256(from.cast());
            let lower = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
            let upper = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(UPPER)));
            [
                _mm256_castps256_ps128(lower),
                _mm256_extractf128_ps::<1>(lower),
                _mm256_castps256_ps128(upper),
                _mm256_extractf128_ps::<1>(upper),
            ]
        },
        f16: |from: *const f16| _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(from.cast()))));

    vector!(Avx512, 8, _mm512_set1_pd, _mm512_add_pd, _mm512_sub_pd, _mm512_mul_pd, _mm512_fmadd_pd, _mm512_fmsub_pd, _mm512_cvtps_pd: __m256,
        abs: |x| _mm512_abs_pd(x),
        units: |x, start| {
            _mm512_reduce_add_epi64(_mm512_sub_epi64(_mm512_castpd_si512(x), _mm512_set1_epi64(start)))
        },
        f64: |from| _mm512_loadu_pd(from),
        f32: |from| _mm512_cvtps_pd(_mm256_loadu_ps(from)),
        bf16: |from: *const bf16| {
            let words = _mm512_loadu_si512(from.cast());
            let lower = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
            let upper = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(UPPER)));
            [
                _mm512_castps512_ps256(lower),
                _mm512_extractf32x8_ps::<1>(lower),
                _mm512_castps512_ps256(upper),
                _mm512_extractf32x8_ps::<1>(upper),
            ]
        },
        f16: |from: *const f16| _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))));
}
