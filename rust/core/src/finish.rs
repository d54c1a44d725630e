//! The finish: from the sums to the total norm, the clip coefficient and the factor of the gradients.

use crate::cpu::float_mode::in_standard_mode;
use crate::exact::{NO_EXTREME, Sums, root, square_root, value};
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
        NormKind::Real(p) if p < 0.0 && sums.zeros > 0 => 0.0,
        NormKind::Real(p) if p < 0.0 => return negative_power(sums, p, scale),
        _ if infinite => f64::INFINITY,
        NormKind::Sum => value(&sums.limbs),
        NormKind::Squares => square_root(&sums.limbs),
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

/// Infinite elements add nothing here; without any other element they alone decide.
fn negative_power(sums: &Sums, p: f64, scale: Option<Scale>) -> Option<f64> {
    let none = sums.limbs == Default::default() && sums.misfits == 0;
    match none {
        true if sums.infinities() > 0 => Some(f64::INFINITY),
        true => Some(0.0),
        false => power(sums, p, scale),
    }
}

/// A total divided by a loss scale.
pub fn unscaled(total: f64, loss_scale: f64) -> f64 {
    in_standard_mode((total, loss_scale), |(total, loss_scale)| total / loss_scale)
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
