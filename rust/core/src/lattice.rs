//! Whether strided sets of integers meet: the question behind every overlap verdict.
//!
//! A strided set is `{ Σ stride_i * x_i : 0 <= x_i < size_i }`. Two strided memory regions share a byte iff a set made
//! of both contains their distance. In general that is a knapsack problem; with at most two strides left after
//! `absorb` it is decided in logarithmic time, beyond that by a search whose steps come out of a budget.

use smallvec::SmallVec;

/// One dimension: `size` steps of `stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    /// Number of indices.
    pub size: u64,
    /// Distance between neighbours.
    pub stride: u64,
}

/// Dimensions of one tensor; few, so they live on the stack.
pub type Dims = SmallVec<[Dim; 4]>;

/// Steps that searches may take together; when they are spent, the answer is "undecided".
#[derive(Clone, Copy, Debug)]
pub struct Budget(pub u32);

/// The answer is not known within the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undecided;

impl Default for Budget {
    /// Some 60 ms of search at the most, for a whole plan.
    fn default() -> Self {
        Budget(1 << 17)
    }
}

impl Budget {
    fn spend(&mut self) -> Result<(), Undecided> {
        self.0 = self.0.checked_sub(1).ok_or(Undecided)?;
        Ok(())
    }
}

/// Whether the strided set of `dims` contains `target`.
///
/// Strides are positive and, as extents, below 2^61; so every product here fits in an `i128`.
pub fn contains(mut dims: Dims, target: i128, budget: &mut Budget) -> Result<bool, Undecided> {
    absorb(&mut dims);
    match dims.split_first() {
        // Steps of one turn the point into an interval, and leave a dimension less to search.
        Some((unit, rest)) if unit.stride == 1 => {
            let low = target - (i128::from(unit.size) - 1);
            meets(rest, low, target, budget)
        }
        _ => meets(&dims, target, target, budget),
    }
}

/// Merges dimensions without changing the set: steps of `k * stride` close the gaps between runs of at least `k` steps
/// of `stride`. Leaves the dimensions sorted by stride.
fn absorb(dims: &mut Dims) {
    dims.sort_unstable_by_key(|dim| dim.stride);
    dims.dedup_by(|coarse, fine| {
        let steps = coarse.stride / fine.stride;
        let closes = coarse.stride % fine.stride == 0 && steps <= fine.size;
        if closes {
            fine.size += steps * (coarse.size - 1);
        }
        closes
    });
}

/// Whether the strided set of `dims` (sorted by stride) meets `low..=high`.
fn meets(dims: &[Dim], low: i128, high: i128, budget: &mut Budget) -> Result<bool, Undecided> {
    match dims {
        [] => Ok(low <= 0 && 0 <= high),
        [dim] => Ok(steps(*dim, low, high).next().is_some()),
        [fine, coarse] => Ok(pair_meets(*fine, *coarse, low, high)),
        [rest @ .., coarse] => {
            let reach: i128 = rest.iter().map(|&dim| extent(dim)).sum();
            for step in steps(*coarse, low - reach, high) {
                budget.spend()?;
                let done = step * i128::from(coarse.stride);
                if meets(rest, low - done, high - done, budget)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// The largest element of one dimension's set.
fn extent(dim: Dim) -> i128 {
    i128::from(dim.size - 1) * i128::from(dim.stride)
}

/// The indices of `dim` whose position lies in `low..=high`.
fn steps(dim: Dim, low: i128, high: i128) -> impl Iterator<Item = i128> {
    let stride = i128::from(dim.stride);
    let first = ceil_div(low, stride).max(0);
    let last = high.div_euclid(stride).min(i128::from(dim.size) - 1);
    first..=last
}

/// Whether `low <= a * x + b * y <= high` for some `x` and `y` of the two dimensions.
///
/// With `y` counted from its end this is `low' <= a * x - b * z <= high'`. The least `x` that leaves a remainder within
/// the interval also has the least `z`, so it alone has to be tried.
fn pair_meets(fine: Dim, coarse: Dim, low: i128, high: i128) -> bool {
    let (a, b) = (i128::from(fine.stride), i128::from(coarse.stride));
    let (low, high) = (low - extent(coarse), high - extent(coarse));
    let start = ceil_div(low, a).max(0);
    let rest = (a * start - low).rem_euclid(b);
    let width = high - low;
    let wait = if rest <= width { Some(0) } else { first_residue_within(a, b, b - rest, b - rest + width) };
    wait.is_some_and(|wait| {
        let x = start + wait;
        let z = ceil_div(a * x - high, b).max(0);
        x < i128::from(fine.size) && z < i128::from(coarse.size)
    })
}

/// The least `x >= 0` with `low <= a * x mod modulus <= high`, for `0 <= low <= high < modulus`, by Euclid's descent.
fn first_residue_within(a: i128, modulus: i128, low: i128, high: i128) -> Option<i128> {
    let a = a.rem_euclid(modulus);
    if low == 0 {
        return Some(0);
    }
    if a == 0 {
        return None;
    }
    // The smaller of a and -a halves the modulus at each descent.
    if 2 * a > modulus {
        return first_residue_within(modulus - a, modulus, modulus - high, modulus - low);
    }
    let direct = ceil_div(low, a);
    if a * direct <= high {
        return Some(direct);
    }
    // No multiple of a lies within: the first wrap-around after which one does.
    let wraps = first_residue_within(modulus, a, (-high).rem_euclid(a), (-low).rem_euclid(a))?;
    Some(ceil_div(low + modulus * wraps, a))
}

fn ceil_div(numerator: i128, denominator: i128) -> i128 {
    -(-numerator).div_euclid(denominator)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dims() -> impl Strategy<Value = Vec<Dim>> {
        let dim = (1u64..7, 1u64..25).prop_map(|(size, stride)| Dim { size, stride });
        prop::collection::vec(dim, 0..5)
    }

    fn sums(dims: &[Dim]) -> Vec<i128> {
        dims.iter().fold(vec![0], |sums, dim| {
            let steps = |sum: i128| (0..dim.size).map(move |x| sum + i128::from(x * dim.stride));
            sums.into_iter().flat_map(steps).collect()
        })
    }

    proptest! {
        #[test]
        fn contains_agrees_with_enumeration(dims in dims(), target in -5i128..300) {
            let expected = sums(&dims).contains(&target);
            let found = contains(dims.into_iter().collect(), target, &mut Budget::default());
            prop_assert_eq!(found, Ok(expected));
        }

        #[test]
        fn meets_agrees_with_enumeration(mut dims in dims(), low in -9i128..300, width in 0i128..40) {
            dims.sort_unstable_by_key(|dim| dim.stride);
            let expected = sums(&dims).iter().any(|&sum| low <= sum && sum <= low + width);
            prop_assert_eq!(meets(&dims, low, low + width, &mut Budget::default()), Ok(expected));
        }

        #[test]
        fn first_residue_is_the_first(a in 0i128..60, modulus in 1i128..60, low in 0i128..60, width in 0i128..60) {
            let low = low % modulus;
            let high = (low + width).min(modulus - 1);
            let expected = (0..modulus).find(|x| (low..=high).contains(&(a * x % modulus)));
            prop_assert_eq!(first_residue_within(a, modulus, low, high), expected);
        }
    }

    #[test]
    fn a_spent_budget_is_undecided() {
        let strides = [1009, 1511, 2003, 2503];
        let dims = strides.map(|stride| Dim { size: 900, stride }).into_iter().collect();
        assert_eq!(contains(dims, 3_000_000, &mut Budget(1)), Err(Undecided));
    }
}
