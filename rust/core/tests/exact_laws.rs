//! Sums and norms against big integers, for every instruction set, split and thread count.

mod support;

use gradclip_core::cpu::Pass;
use gradclip_core::exact::Sums;
use gradclip_core::norm::NormKind;
use half::{bf16, f16};
use num_bigint::BigUint;
use proptest::prelude::*;
use support::{Number, chunks, exact_power, instruction_sets, norm, rounded, rounded_root, sums};

/// Magnitudes of every kind: ordinary, far apart, subnormal, zero.
fn value() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => -1e3..1e3f64,
        3 => (-1.0..1.0f64, -1070..1020i32).prop_map(|(m, e)| m * 2f64.powi(e / 2) * 2f64.powi(e - e / 2)),
        2 => (-1.0..1.0f64, -148..128i32).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => (-1.0..1.0f64, -24..15i32).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => Just(0.0),
        1 => Just(f64::MAX),
        1 => Just(5e-324),
    ]
}

/// Values of one scale, as gradients are.
fn similar() -> impl Strategy<Value = Vec<f64>> {
    (-140..120i32, prop::collection::vec(-1.0..1.0f64, 0..9000))
        .prop_map(|(exponent, values)| values.into_iter().map(|v| v * v * v * 2f64.powi(exponent)).collect())
}

fn check<T: Number>(values: &[f64], length: usize) {
    let narrow: Vec<T> = values.iter().map(|&v| T::narrowed(v)).filter(|v| v.wide().is_finite()).collect();
    let wide: Vec<f64> = narrow.iter().map(|v| v.wide()).collect();
    let exact = |power| wide.iter().map(|&v| exact_power(v, power)).sum::<BigUint>();
    let (sum, squares) = (rounded(&exact(1)), rounded_root(&exact(2)));
    let largest = wide.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    let smallest = wide.iter().map(|v| v.abs()).reduce(f64::min).unwrap_or(0.0);
    let count = wide.iter().filter(|&&v| v != 0.0).count() as f64;
    let chunks = chunks(&narrow, length);
    for simd in instruction_sets() {
        for threads in [1, 2] {
            let total = |kind| norm(&chunks, kind, simd, threads);
            assert_eq!(total(NormKind::Sum), sum, "p = 1, {}", simd.name());
            assert_eq!(total(NormKind::Squares), squares, "p = 2, {}", simd.name());
            assert_eq!(total(NormKind::Max), largest, "p = inf, {}", simd.name());
            assert_eq!(total(NormKind::Min), smallest, "p = -inf, {}", simd.name());
            assert_eq!(total(NormKind::Count), count, "p = 0, {}", simd.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_values_of_any_type(values in prop::collection::vec(value(), 0..600), length in 1usize..700) {
        check::<f64>(&values, length);
        check::<f32>(&values, length);
        check::<bf16>(&values, length);
        check::<f16>(&values, length);
    }

    #[test]
    fn gradients_of_any_type(values in similar(), length in 1usize..10000) {
        check::<f64>(&values, length);
        check::<f32>(&values, length);
        check::<bf16>(&values, length);
        check::<f16>(&values, length);
    }

    #[test]
    fn vectors_carry_the_sums(values in prop::collection::vec(value(), 1..100), cut in 0usize..100) {
        let pass = Pass { kind: NormKind::Squares, scale: None, simd: gradclip_core::cpu::detect() };
        let whole = sums(&chunks(&values, values.len()), pass, 1);
        prop_assert_eq!(&Sums::from_vector(&whole.to_vector()), &whole);
        let (left, right) = values.split_at(cut.min(values.len()));
        let parts = [left, right].map(|part| sums(&chunks(part, 50), pass, 1).to_vector());
        let added = std::array::from_fn(|i| parts[0][i].wrapping_add(parts[1][i]));
        prop_assert_eq!(Sums::from_vector(&added).limbs, whole.limbs);
    }

    #[test]
    fn weights_count_that_often(values in prop::collection::vec(value(), 1..50), weight in 1u64..1000) {
        let narrow: Vec<f32> = values.iter().map(|&v| v as f32).filter(|v| v.is_finite()).collect();
        let mut weighted = chunks(&narrow, 7);
        weighted.iter_mut().for_each(|chunk| chunk.weight = weight);
        let exact = narrow.iter().map(|&v| exact_power(v.into(), 2)).sum::<BigUint>() * weight;
        prop_assert_eq!(norm(&weighted, NormKind::Squares, gradclip_core::cpu::detect(), 1), rounded_root(&exact));
    }
}
