//! The finish: from the sums to the total norm, the clip coefficient and the factor of the gradients.

use crate::cpu::float_mode::in_standard_mode;
use crate::exact::{BASE, LIMBS, Limbs, NO_EXTREME, Sums, root, square_root, value};
use crate::norm::{NormKind, Scale};

/// The total norm, rounded once to float64; `None` when terms left float64's range and the sums must be taken again
/// with a scale ([`NormKind::scale_for`]).
///
/// `scale` is what the sums were taken with; only powers use one. Non-finite elements follow torch: any NaN gives NaN,
/// else an infinity gives infinity (p = 0 counts it, p = -inf compares it, negative p ignores it).
pub fn total(sums: &Sums, kind: NormKind, scale: Option<Scale>) -> Option<f64> {
    in_standard_mode(sums, |sums| rounded_total(sums, kind, scale))
}

fn rounded_total(sums: &Sums, kind: NormKind, scale: Option<Scale>) -> Option<f64> {
    if sums.nan > 0 {
        return Some(f64::NAN);
    }
    let infinite = sums.infinities() > 0;
    Some(match kind {
        NormKind::Max | NormKind::Min => extreme(sums.extreme, kind),
        NormKind::Count => value(&sums.limbs),
        NormKind::Real(p) | NormKind::Tiny(p) if p < 0.0 && sums.zeros > 0 => 0.0,
        NormKind::Real(p) | NormKind::Tiny(p) if p < 0.0 => return negative_power(sums, kind, scale),
        _ if infinite => f64::INFINITY,
        NormKind::Sum => value(&sums.limbs),
        NormKind::Squares => square_root(&sums.limbs),
        NormKind::Tiny(p) => tiny_power(&sums.limbs, p),
        NormKind::Power(_) | NormKind::Real(_) => return power(sums, kind.p(), scale),
    })
}

/// The key of a magnitude: larger for larger magnitudes (`Max`) or for smaller ones (`Min`).
pub fn extreme_key(magnitude: f64, kind: NormKind) -> i64 {
    let bits = magnitude.to_bits() as i64;
    if kind == NormKind::Min { !bits } else { bits }
}

/// The magnitude of a key; 0 when no element was seen.
fn extreme(key: i64, kind: NormKind) -> f64 {
    match key {
        NO_EXTREME => 0.0,
        _ if kind == NormKind::Min => f64::from_bits(!key as u64),
        _ => f64::from_bits(key as u64),
    }
}

/// The scale for a second pass over powers of `kind`, from a pass with [`NormKind::leading`].
pub fn scale_from(extremes: &Sums, kind: NormKind) -> Scale {
    in_standard_mode(extremes.extreme, |key| kind.scale_for(extreme(key, kind.leading())))
}

fn power(sums: &Sums, p: f64, scale: Option<Scale>) -> Option<f64> {
    match scale {
        None if sums.misfits > 0 => None,
        None => Some(root(&sums.limbs, p, 0)),
        Some(Scale::Exponent(exponent)) => Some(root(&sums.limbs, p, exponent)),
        Some(Scale::Divisor(divisor)) => Some(root(&sums.limbs, p, 0) * divisor),
    }
}

/// The limb from which sums of [`NormKind::Tiny`] count elements; their magnitudes stay far below it.
const COUNT_LIMB: usize = 116;

/// Weight of one element in the count that sums of [`NormKind::Tiny`] hold above their magnitudes, as a power of two.
pub const COUNT_PLACE: i32 = 32 * COUNT_LIMB as i32 + BASE;

/// The norm of a tiny p: that of a single element is its magnitude, more of them leave float64's range.
fn tiny_power(limbs: &Limbs, p: f64) -> f64 {
    let mut magnitudes = limbs.carried();
    let mut counts = [0; LIMBS];
    counts[COUNT_LIMB..].swap_with_slice(&mut magnitudes[COUNT_LIMB..]);
    let one = counts[COUNT_LIMB] == 1 && counts[COUNT_LIMB + 1..].iter().all(|&digit| digit == 0);
    match counts.iter().any(|&digit| digit != 0) {
        false => 0.0,
        true if one => value(&Limbs::from_limbs(magnitudes)),
        true if p < 0.0 => 0.0,
        true => f64::INFINITY,
    }
}

/// Infinite elements add nothing here; without any other element they alone decide.
fn negative_power(sums: &Sums, kind: NormKind, scale: Option<Scale>) -> Option<f64> {
    let none = sums.limbs == Default::default() && sums.misfits == 0;
    match kind {
        _ if none && sums.infinities() > 0 => Some(f64::INFINITY),
        _ if none => Some(0.0),
        NormKind::Tiny(p) => Some(tiny_power(&sums.limbs, p)),
        _ => power(sums, kind.p(), scale),
    }
}

/// What a clip comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The total norm of the gradients divided by the loss scale.
    pub total: f64,
    /// min(1, max_norm / (total + eps)).
    pub coefficient: f64,
    /// What the gradients are multiplied by: the coefficient divided by the loss scale.
    pub factor: f64,
}

/// The outcome of a clip from the exact total of the gradients as they are; a count (p = 0) has no loss scale.
pub fn outcome(exact_total: f64, kind: NormKind, max_norm: f64, eps: f64, loss_scale: f64) -> Outcome {
    in_standard_mode((exact_total, max_norm, eps, loss_scale), |(exact_total, max_norm, eps, loss_scale)| {
        let total = if kind == NormKind::Count { exact_total } else { exact_total / loss_scale };
        let coefficient = clipping(total, max_norm, eps);
        Outcome { total, coefficient, factor: coefficient / loss_scale }
    })
}

/// The clip coefficient min(1, max_norm / (total + eps)) in float64, as `torch.nn.utils.clip_grad_norm_`; NaN totals
/// give NaN, and an infinite `max_norm` gives 1 whatever the total.
pub fn coefficient(total: f64, max_norm: f64, eps: f64) -> f64 {
    in_standard_mode((total, max_norm, eps), |(total, max_norm, eps)| clipping(total, max_norm, eps))
}

fn clipping(total: f64, max_norm: f64, eps: f64) -> f64 {
    if max_norm == f64::INFINITY {
        return 1.0;
    }
    match max_norm / (total + eps) {
        // 0 / 0: nothing to scale, as without eps and gradients
        ratio if ratio.is_nan() && !total.is_nan() => 1.0,
        ratio if ratio > 1.0 => 1.0,
        ratio => ratio,
    }
}
