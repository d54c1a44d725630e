//! Everything that a pass over the gradients leaves behind, and its form as a vector of integers.

use super::limbs::{LIMBS, Limbs};

/// Length of the vector form: the limbs, six counts and keys, two reserved places.
pub const SUMS_LENGTH: usize = 144;

/// The extreme key when no element was seen: below every key.
pub const NO_EXTREME: i64 = i64::MIN;

const NAN: usize = LIMBS;
const POSITIVE_INFINITY: usize = LIMBS + 1;
const NEGATIVE_INFINITY: usize = LIMBS + 2;
const ZEROS: usize = LIMBS + 3;
const MISFITS: usize = LIMBS + 4;
const EXTREME: usize = LIMBS + 5;

/// The sums of one pass. Merging is associative and commutative: the bits of the result have no order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sums {
    /// The exact sum of the terms of all finite elements.
    pub limbs: Limbs,
    /// Number of NaN elements.
    pub nan: i64,
    /// Number of elements that are +Inf.
    pub positive_infinity: i64,
    /// Number of elements that are -Inf.
    pub negative_infinity: i64,
    /// Number of zero elements; counted only for negative p, where each is an infinite term.
    pub zeros: i64,
    /// Number of elements whose term left float64's range: the pass must be repeated with a scale.
    pub misfits: i64,
    /// Order-preserving key of the largest (p = inf) or smallest (p = -inf) magnitude.
    pub extreme: i64,
}

impl Default for Sums {
    fn default() -> Self {
        Sums {
            limbs: Limbs::default(),
            nan: 0,
            positive_infinity: 0,
            negative_infinity: 0,
            zeros: 0,
            misfits: 0,
            extreme: NO_EXTREME,
        }
    }
}

impl Sums {
    /// Adds the sums of other elements.
    pub fn merge(&mut self, other: &Sums) {
        self.merge_weighted(other, 1);
    }

    /// Adds `weight` times the sums of other elements, as an expanded gradient needs.
    pub fn merge_weighted(&mut self, other: &Sums, weight: u64) {
        let times = |count: i64| count.saturating_mul(i64::try_from(weight).unwrap_or(i64::MAX));
        self.limbs.merge_weighted(&other.limbs, weight);
        self.nan = self.nan.saturating_add(times(other.nan));
        self.positive_infinity = self.positive_infinity.saturating_add(times(other.positive_infinity));
        self.negative_infinity = self.negative_infinity.saturating_add(times(other.negative_infinity));
        self.zeros = self.zeros.saturating_add(times(other.zeros));
        self.misfits = self.misfits.saturating_add(times(other.misfits));
        self.extreme = self.extreme.max(other.extreme);
    }

    /// Number of infinite elements of either sign.
    pub fn infinities(&self) -> i64 {
        self.positive_infinity.saturating_add(self.negative_infinity)
    }

    /// Takes one non-finite element into the counts.
    pub fn count_non_finite(&mut self, value: f64) {
        if value.is_nan() {
            self.nan += 1;
        } else if value > 0.0 {
            self.positive_infinity += 1;
        } else {
            self.negative_infinity += 1;
        }
    }

    /// The vector that engines, kernels and ranks exchange, carries propagated.
    pub fn to_vector(&self) -> [i64; SUMS_LENGTH] {
        let mut vector = [0; SUMS_LENGTH];
        vector[..LIMBS].copy_from_slice(&self.limbs.carried());
        vector[NAN] = self.nan;
        vector[POSITIVE_INFINITY] = self.positive_infinity;
        vector[NEGATIVE_INFINITY] = self.negative_infinity;
        vector[ZEROS] = self.zeros;
        vector[MISFITS] = self.misfits;
        vector[EXTREME] = self.extreme;
        vector
    }

    /// The sums behind a vector; its limbs may have carries pending.
    pub fn from_vector(vector: &[i64; SUMS_LENGTH]) -> Self {
        let mut limbs = [0; LIMBS];
        limbs.copy_from_slice(&vector[..LIMBS]);
        Sums {
            limbs: Limbs::from_limbs(limbs),
            nan: vector[NAN],
            positive_infinity: vector[POSITIVE_INFINITY],
            negative_infinity: vector[NEGATIVE_INFINITY],
            zeros: vector[ZEROS],
            misfits: vector[MISFITS],
            extreme: vector[EXTREME],
        }
    }
}
