//! Exact sums of a block by float64 accumulators on fixed grids.
//!
//! An accumulator that starts at 2^(52+g) and stays in its binade is a multiple of 2^g: `t = top + x; rest = x - (t - top)`
//! rounds x to that grid without error anywhere, and `rest` goes to the next, finer grid. The block's span is known, so
//! the grids are laid to hold every term, and the last one takes all that is left exactly. As a lane stays in one binade,
//! the integer difference of its bits and its start's is its sum in units of 2^g.
//! Source: the "prerounding" of S. M. Rump, T. Ogita, S. Oishi, "Accurate floating-point summation", SIAM J. Sci.
//! Comput. 31 (2008); P. Ahrens, J. Demmel, H. D. Nguyen, TOMS 46 (2020).

use super::block::{BLOCK, LANES, lanes};
use super::element::Element;
use super::simd::Kernel;
use crate::exact::{Limbs, power_of_two};

/// Bits that the additions of one lane may carry: it takes BLOCK / LANES terms, and twice as many rests of squares.
const CARRY_BITS: i32 = (BLOCK / LANES).ilog2() as i32 + 1;

/// Bits of one grid that are left for a term.
const GRID_BITS: i32 = 52 - CARRY_BITS;

/// The finest grid: every float64 is a multiple of it.
const FINEST: i32 = -1074;

/// Above this exponent of its terms a block's accumulators would overflow.
const LARGEST_TOP: i32 = 1023 - CARRY_BITS - 2;

/// The grids for one block of terms.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    first: i32,
    levels: usize,
}

impl Window {
    /// The window of non-negative terms below 2^`top` that are multiples of 2^`unit`; `None` when they lie outside
    /// of what float64 accumulators can hold.
    pub fn new(top: i32, unit: i32) -> Option<Self> {
        if top > LARGEST_TOP || unit < FINEST {
            return None;
        }
        let first = (top - GRID_BITS).max(FINEST);
        let levels = 1 + ((first - unit).max(0) as usize).div_ceil(GRID_BITS as usize - 1);
        Some(Window { first, levels })
    }

    /// Grids needed.
    pub fn levels(&self) -> usize {
        self.levels
    }

    fn grid(&self, level: usize) -> i32 {
        (self.first - level as i32 * (GRID_BITS - 1)).max(FINEST)
    }

    /// Where the lanes of a level start. Rests have either sign: their start lies in the middle of the binade.
    fn start(&self, level: usize) -> f64 {
        let bottom = power_of_two(self.grid(level) + 52);
        if level == 0 { bottom } else { 1.5 * bottom }
    }
}

/// The lanes of all levels.
struct Lanes<const LEVELS: usize>([[f64; LANES]; LEVELS]);

impl<const LEVELS: usize> Lanes<LEVELS> {
    #[inline(always)]
    fn new(window: &Window) -> Self {
        Lanes(std::array::from_fn(|level| [window.start(level); LANES]))
    }

    /// Adds one term a lane from `level` on downwards.
    #[inline(always)]
    fn add(&mut self, level: usize, terms: [f64; LANES]) {
        let mut rest = terms;
        for tops in &mut self.0[level..LEVELS - 1] {
            for lane in 0..LANES {
                let sum = tops[lane] + rest[lane];
                rest[lane] -= sum - tops[lane];
                tops[lane] = sum;
            }
        }
        for lane in 0..LANES {
            self.0[LEVELS - 1][lane] += rest[lane];
        }
    }

    #[inline(always)]
    fn deposit(&self, window: &Window, limbs: &mut Limbs) {
        for (level, tops) in self.0.iter().enumerate() {
            let start = window.start(level).to_bits();
            let units = tops
                .iter()
                .map(|top| top.to_bits().wrapping_sub(start) as i64)
                .sum::<i64>();
            limbs.deposit(i128::from(units), window.grid(level));
        }
    }
}

/// Adds the magnitudes of a block.
pub struct Magnitudes<'a, T, const LEVELS: usize> {
    pub block: &'a [T],
    pub window: Window,
    pub limbs: &'a mut Limbs,
}

impl<T: Element, const LEVELS: usize> Kernel for Magnitudes<'_, T, LEVELS> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut tops = Lanes::<LEVELS>::new(&self.window);
        let (groups, rest) = lanes(self.block);
        for group in groups {
            tops.add(0, group.map(|x| x.widen().abs()));
        }
        tops.add(0, rest.map(|x| x.widen().abs()));
        tops.deposit(&self.window, self.limbs);
    }
}

/// Adds the squares of a block.
pub struct Squares<'a, T, const LEVELS: usize> {
    pub block: &'a [T],
    pub window: Window,
    pub limbs: &'a mut Limbs,
}

impl<T: Element, const LEVELS: usize> Kernel for Squares<'_, T, LEVELS> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut tops = Lanes::<LEVELS>::new(&self.window);
        let (groups, rest) = lanes(self.block);
        for group in groups {
            add_squares::<T, LEVELS, FMA>(&mut tops, group);
        }
        add_squares::<T, LEVELS, FMA>(&mut tops, &rest);
        tops.deposit(&self.window, self.limbs);
    }
}

#[inline(always)]
fn add_squares<T: Element, const LEVELS: usize, const FMA: bool>(
    tops: &mut Lanes<LEVELS>,
    group: &[T; LANES],
) {
    let x = group.map(T::widen);
    if T::SQUARE_IS_EXACT && FMA && LEVELS > 1 {
        add_fused(tops, x);
        return;
    }
    tops.add(0, x.map(|x| x * x));
    if !T::SQUARE_IS_EXACT && LEVELS > 1 {
        tops.add(1, x.map(|x| x.mul_add(x, -(x * x))));
    }
}

/// The first level takes the square inside a fused multiply-add, which saves one operation in five.
#[inline(always)]
fn add_fused<const LEVELS: usize>(tops: &mut Lanes<LEVELS>, x: [f64; LANES]) {
    let mut rest = [0.0; LANES];
    for lane in 0..LANES {
        let top = tops.0[0][lane];
        let sum = x[lane].mul_add(x[lane], top);
        rest[lane] = x[lane].mul_add(x[lane], top - sum);
        tops.0[0][lane] = sum;
    }
    tops.add(1, rest);
}
