//! A Kulisch accumulator in carry-save form.
//!
//! Limb j is a signed 64-bit integer that weighs 2^(32 j + BASE). Deposits touch at most four limbs and
//! leave carries behind; integer addition has no order, so any split of the work gives the same sum.
//! Sources: U. Kulisch, "Computer Arithmetic and Validity" (2008); R. Neal, "Fast exact summation using
//! small and large superaccumulators", arXiv:1505.05571 (2015).

/// Weight of bit 0 of limb 0, as a power of two. Squares of float64 subnormals reach down to 2^-2148.
pub const BASE: i32 = -2176;

/// Number of limbs: squares of float64 stay below 2^2048, which leaves 128 bits for counts and weights.
pub const LIMBS: usize = 136;

const LIMB_BITS: u32 = 32;
const LIMB_MASK: i64 = 0xFFFF_FFFF;

/// A deposit adds less than 2^32 to a limb in magnitude, and a limb holds 2^63: carry well before that.
const DEPOSITS_BEFORE_CARRY: u32 = 1 << 29;

/// An exact sum of integers times powers of two.
#[derive(Clone, Debug)]
pub struct Limbs {
    limbs: [i64; LIMBS],
    deposits: u32,
}

impl Default for Limbs {
    fn default() -> Self {
        Limbs { limbs: [0; LIMBS], deposits: 0 }
    }
}

impl PartialEq for Limbs {
    /// Equal sums, whatever carries are pending.
    fn eq(&self, other: &Self) -> bool {
        self.carried() == other.carried()
    }
}

impl Eq for Limbs {}

impl Limbs {
    /// Adds `whole` x 2^`exponent`.
    ///
    /// `exponent` must be at least [`BASE`], and the value must lie below the top limb's end: both hold for
    /// squares, magnitudes and scaled powers of every supported type.
    #[inline]
    pub fn deposit(&mut self, whole: i128, exponent: i32) {
        if whole == 0 {
            return;
        }
        let place = exponent.wrapping_sub(BASE) as u32;
        let (limb, shift) = ((place / LIMB_BITS) as usize, place % LIMB_BITS);
        let low = (whole & LIMB_MASK as i128) << shift;
        let high = (whole >> LIMB_BITS) << shift;
        let pieces = [
            low as i64 & LIMB_MASK,
            (low >> LIMB_BITS) as i64 + (high as i64 & LIMB_MASK),
            (high >> LIMB_BITS) as i64 & LIMB_MASK,
            (high >> (2 * LIMB_BITS)) as i64,
        ];
        for (target, piece) in self.limbs.iter_mut().skip(limb).zip(pieces) {
            *target += piece;
        }
        self.note(1);
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Limbs) {
        for (mine, theirs) in self.limbs.iter_mut().zip(&other.limbs) {
            *mine += theirs;
        }
        self.note(other.deposits.saturating_add(1));
    }

    /// Adds `weight` times another sum.
    pub fn merge_weighted(&mut self, other: &Limbs, weight: u64) {
        if weight == 1 {
            return self.merge(other);
        }
        for (limb, &digit) in other.carried().iter().enumerate() {
            self.deposit(digit as i128 * weight as i128, BASE + (limb as i32) * LIMB_BITS as i32);
        }
    }

    /// The limbs with all carries propagated: each in [0, 2^32), the top one signed.
    pub fn carried(&self) -> [i64; LIMBS] {
        let mut limbs = self.limbs;
        let mut carry = 0;
        for limb in &mut limbs[..LIMBS - 1] {
            let sum = *limb + carry;
            *limb = sum & LIMB_MASK;
            carry = sum >> LIMB_BITS;
        }
        limbs[LIMBS - 1] += carry;
        limbs
    }

    /// The sum that these limbs stand for; carries may be pending.
    ///
    /// Each limb must leave room for the deposits to come: below 2^62 in magnitude, as sums over ranks of carried
    /// limbs are.
    pub fn from_limbs(limbs: [i64; LIMBS]) -> Self {
        let pending = Limbs { limbs, deposits: 0 };
        Limbs { limbs: pending.carried(), deposits: 1 }
    }

    fn note(&mut self, deposits: u32) {
        self.deposits = self.deposits.saturating_add(deposits);
        if self.deposits > DEPOSITS_BEFORE_CARRY {
            self.limbs = self.carried();
            self.deposits = 1;
        }
    }
}
