//! Exact sums of a block by float64 accumulators on fixed grids.
//!
//! An accumulator that starts at 2^(52+g) and stays in its binade is a multiple of 2^g: `t = top + x; rest = x - (t - top)`
//! rounds x to that grid without error anywhere, and `rest` goes to the next, finer grid. The block's span is known, so
//! the grids are laid to hold every term, and the last one takes all that is left exactly. As a lane stays in one binade,
//! the integer difference of its bits and its start's is its sum in units of 2^g.
//! Source: the "prerounding" of S. M. Rump, T. Ogita, S. Oishi, "Accurate floating-point summation", SIAM J. Sci.
//! Comput. 31 (2008); P. Ahrens, J. Demmel, H. D. Nguyen, TOMS 46 (2020).

use super::block::BLOCK;
use super::element::Element;
use super::simd::Kernel;
use super::vector::{GROUP, Vector};
use crate::exact::{Limbs, power_of_two};

/// The finest grid: every float64 is a multiple of it.
const FINEST: i32 = -1074;

/// Above this exponent of its terms a block's accumulators would overflow.
const LARGEST_TOP: i32 = 1000;

/// A span of terms: they are below 2^`top` and multiples of 2^`unit`.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub top: i32,
    pub unit: i32,
}

impl Terms {
    /// Whether float64 accumulators hold such terms at all.
    pub fn fit(self) -> bool {
        self.top <= LARGEST_TOP && self.unit >= FINEST
    }

    /// Grids that `count` terms need, each of `parts` numbers, in vectors of `width` lanes.
    pub fn levels(self, count: usize, parts: usize, width: usize) -> usize {
        Window::new(self, count.div_ceil(GROUP * width), parts).levels(self)
    }
}

/// The grids for the lanes of one block.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: i32,
    bits: i32,
}

impl Window {
    /// The grids that hold `additions` terms a lane, each of `parts` numbers.
    ///
    /// A lane of 2^c terms grows by c bits, and 52 is what float64 has below its leading one. The same holds for the
    /// rests, which are at most half of their grid's unit and start in the middle of the binade.
    fn new(terms: Terms, additions: usize, parts: usize) -> Self {
        let carry_bits = (additions * parts).next_power_of_two().ilog2() as i32;
        let bits = 52 - carry_bits;
        Window { first: (terms.top - bits).max(FINEST), bits }
    }

    fn levels(&self, terms: Terms) -> usize {
        1 + ((self.first - terms.unit).max(0) as usize).div_ceil(self.bits as usize)
    }

    fn grid(&self, level: usize) -> i32 {
        (self.first - level as i32 * self.bits).max(FINEST)
    }

    /// Where the lanes of a level start. Rests have either sign: their start lies in the middle of the binade.
    fn start(&self, level: usize) -> f64 {
        let bottom = power_of_two(self.grid(level) + 52);
        if level == 0 { bottom } else { 1.5 * bottom }
    }
}

/// The lanes of all levels.
struct Lanes<V, const LEVELS: usize>([[V; GROUP]; LEVELS]);

impl<V: Vector, const LEVELS: usize> Lanes<V, LEVELS> {
    /// Elements added at once.
    const STRIDE: usize = GROUP * V::WIDTH;

    #[inline(always)]
    fn new(window: &Window) -> Self {
        Lanes(std::array::from_fn(|level| [V::splat(window.start(level)); GROUP]))
    }

    /// Adds one term a lane to the `column`-th vectors, from `level` on downwards.
    #[inline(always)]
    fn add(&mut self, level: usize, column: usize, mut rest: V) {
        for level in level..LEVELS - 1 {
            let top = self.0[level][column];
            let sum = top.add(rest);
            rest = rest.sub(sum.sub(top));
            self.0[level][column] = sum;
        }
        let last = &mut self.0[LEVELS - 1][column];
        *last = last.add(rest);
    }

    /// Adds the square of x, exact in float64: the first level takes it inside a fused multiply-add.
    #[inline(always)]
    fn add_exact_square(&mut self, column: usize, x: V) {
        let top = self.0[0][column];
        let sum = x.square_plus(top);
        self.0[0][column] = sum;
        if LEVELS > 1 {
            self.add(1, column, x.square_plus(top.sub(sum)));
        }
    }

    /// Adds the square of x, as its rounded value and the rest of that.
    #[inline(always)]
    fn add_square(&mut self, column: usize, x: V) {
        let square = x.square();
        self.add(0, column, square);
        if LEVELS > 1 {
            self.add(1, column, x.square_rest(square));
        }
    }

    #[inline(always)]
    fn deposit(&self, window: &Window, limbs: &mut Limbs) {
        for (level, tops) in self.0.iter().enumerate() {
            let start = window.start(level);
            let units = tops.iter().map(|top| top.units_above(start)).sum::<i64>();
            limbs.deposit(i128::from(units), window.grid(level));
        }
    }
}

/// Adds the magnitudes or the squares of a block.
pub struct Windowed<'a, T, const LEVELS: usize, const SQUARES: bool> {
    pub block: &'a [T],
    pub terms: Terms,
    pub limbs: &'a mut Limbs,
}

impl<T: Element, const LEVELS: usize, const SQUARES: bool> Kernel for Windowed<'_, T, LEVELS, SQUARES> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let stride = Lanes::<V, LEVELS>::STRIDE;
        let parts = if SQUARES && !T::SQUARE_IS_EXACT { 2 } else { 1 };
        let window = Window::new(self.terms, self.block.len().div_ceil(stride), parts);
        let mut lanes = Lanes::<V, LEVELS>::new(&window);
        let groups = self.block.chunks_exact(stride);
        let mut padded = [T::ZERO; MOST_LANES];
        let rest = groups.remainder();
        padded[..rest.len()].copy_from_slice(rest);
        for group in groups {
            add_group::<T, V, LEVELS, SQUARES>(&mut lanes, group);
        }
        if !rest.is_empty() {
            add_group::<T, V, LEVELS, SQUARES>(&mut lanes, &padded[..stride]);
        }
        lanes.deposit(&window, self.limbs);
    }
}

/// Lanes of the widest vectors.
const MOST_LANES: usize = GROUP * 8;

#[inline(always)]
fn add_group<T: Element, V: Vector, const LEVELS: usize, const SQUARES: bool>(
    lanes: &mut Lanes<V, LEVELS>,
    group: &[T],
) {
    assert!(group.len() == Lanes::<V, LEVELS>::STRIDE);
    prefetch::<T, V>(group);
    // SAFETY: the group holds GROUP x WIDTH elements, as asserted.
    let vectors: [V; GROUP] = unsafe { T::load(group.as_ptr()) };
    for (column, x) in vectors.into_iter().enumerate() {
        if !SQUARES {
            lanes.add(0, column, x.abs());
        } else if T::SQUARE_IS_EXACT {
            lanes.add_exact_square(column, x);
        } else {
            lanes.add_square(column, x);
        }
    }
}

/// Asks for what will be read two blocks later: the first pass over a block leaves memory idle otherwise.
#[inline(always)]
fn prefetch<T, V: Vector>(group: &[T]) {
    const LINE: usize = 64;
    let ahead = group.as_ptr().cast::<u8>().wrapping_add(2 * BLOCK * size_of::<T>());
    for line in (0..size_of_val(group)).step_by(LINE) {
        V::prefetch(ahead.wrapping_add(line));
    }
}
