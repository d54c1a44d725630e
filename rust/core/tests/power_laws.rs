//! Norms of integer order against big integers: in range, and where terms leave float64's range.

mod support;

use gradclip_core::norm::NormKind;
use num_bigint::BigUint;
use proptest::prelude::*;
use support::{chunks, instruction_sets, norm};

/// Bits below 2^0 that the exact values keep: enough for the 40th power of 2^-560.
const FRACTION_BITS: u32 = 24_000;

fn value() -> impl Strategy<Value = f64> {
    prop_oneof![
        3 => -100.0..100.0f64,
        1 => (-1.0..1.0f64, -500..500i32).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => Just(0.0),
    ]
}

/// |x|^p in units of 2^-FRACTION_BITS.
fn exact_term(x: f64, p: u32) -> BigUint {
    let bits = x.abs().to_bits();
    let biased = (bits >> 52) as i64;
    let fraction = bits & ((1 << 52) - 1);
    let whole = BigUint::from(if biased == 0 { fraction } else { fraction | 1 << 52 });
    let shift = i64::from(FRACTION_BITS) + i64::from(p) * (biased.max(1) - 1075);
    whole.pow(p) << shift as u64
}

/// The p-th root of units of 2^-FRACTION_BITS as float64, right to 60 bits and more.
fn exact_root(units: &BigUint, p: u32) -> f64 {
    let extra = p - FRACTION_BITS % p + 80 * p;
    let root = (units << extra).nth_root(p);
    let places = i64::from((FRACTION_BITS + extra) / p);
    let drop = root.bits().saturating_sub(60);
    let leading = (&root >> drop).iter_u64_digits().next().unwrap_or(0) as f64;
    let exponent = (drop as i64 - places) as i32;
    leading * 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2)
}

fn ulps_apart(a: f64, b: f64) -> u64 {
    a.to_bits().abs_diff(b.to_bits())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn integer_orders(values in prop::collection::vec(value(), 1..60), p in 3u32..40, length in 1usize..60) {
        let sum = values.iter().map(|&x| exact_term(x, p)).sum::<BigUint>();
        let expected = exact_root(&sum, p);
        let norms: Vec<f64> = instruction_sets()
            .into_iter()
            .map(|simd| norm(&chunks(&values, length), NormKind::Power(p), simd, 2))
            .collect();
        for &total in &norms {
            prop_assert!(ulps_apart(total, expected) <= 1, "{total} is not {expected}");
            prop_assert_eq!(total.to_bits(), norms[0].to_bits());
        }
    }

    #[test]
    fn high_orders_tend_to_the_largest(values in prop::collection::vec(-1e300..1e300f64, 1..20)) {
        let largest = values.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
        for p in [900u32, 901, 1_000_000, u32::MAX] {
            let total = norm(&chunks(&values, 7), NormKind::Power(p), instruction_sets()[0], 1);
            let bound = largest * (values.len() as f64).powf(1.0 / f64::from(p)) * (1.0 + 1e-15);
            prop_assert!(total >= largest * (1.0 - 1e-15) && total <= bound, "{total} for {largest}");
        }
    }
}

/// The norm of a tiny p in the limit: one element is its own norm, more of them leave float64's range.
fn limit(values: &[f64], p: f64) -> f64 {
    let others: Vec<f64> = values.iter().map(|x| x.abs()).filter(|&x| x != 0.0).collect();
    let finite: Vec<f64> = others.iter().copied().filter(|x| x.is_finite()).collect();
    match (p > 0.0, finite.as_slice()) {
        (false, _) if values.contains(&0.0) => 0.0,
        (true, _) if finite.len() < others.len() => f64::INFINITY,
        (false, []) if !others.is_empty() => f64::INFINITY,
        (_, []) => 0.0,
        (_, [one]) => *one,
        (positive, _) => {
            if positive {
                f64::INFINITY
            } else {
                0.0
            }
        }
    }
}

proptest! {
    #[test]
    fn tiny_orders(values in prop::collection::vec(prop_oneof![
                       2 => Just(0.0), 1 => any::<f64>(), 1 => -3.0..3.0f64, 1 => Just(f64::INFINITY)], 0..5),
                   p in prop_oneof![Just(1e-20), Just(-1e-20), Just(5e-324), Just(2e-4), Just(-2e-4)], length in 1usize..4) {
        let values: Vec<f64> = values.into_iter().filter(|x| !x.is_nan()).collect();
        for simd in instruction_sets() {
            let total = norm(&chunks(&values, length), NormKind::new(p).unwrap(), simd, 2);
            prop_assert_eq!(total, limit(&values, p), "{:?}", values);
        }
    }
}
