//! Scaling and clamping against one element at a time, for every instruction set.

mod support;

use gradclip_core::cpu::{Threads, clamp, scale};
use gradclip_core::dtype::DType;
use gradclip_core::exact::to_odd_float32;
use half::{bf16, f16};
use proptest::prelude::*;
use support::{Number, chunks, instruction_sets};

fn value() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => -1e3..1e3f64,
        2 => (-1.0..1.0f64, -300..300i32).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => prop::sample::select(vec![0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65504.0]),
    ]
}

/// Runs `change` on the values in one place of a longer array, and expects `one` of each and nothing else.
fn check<T: Number>(
    values: &[f64],
    length: usize,
    change: impl Fn(&[gradclip_core::plan::Chunk], gradclip_core::cpu::Simd),
    one: impl Fn(T) -> T,
) {
    for simd in instruction_sets() {
        let padded: Vec<T> = [&[7.0], values, &[9.0]].concat().into_iter().map(T::narrowed).collect();
        let mut written = padded.clone();
        let inner = &mut written[1..=values.len()];
        change(&chunks(inner, length), simd);
        for (place, (&before, &after)) in padded.iter().zip(&written).enumerate() {
            let inside = place > 0 && place <= values.len();
            let expected = if inside { one(before) } else { before };
            let same = after.wide().to_bits() == expected.wide().to_bits();
            let nan = after.wide().is_nan() && expected.wide().is_nan();
            assert!(same || nan, "{}: {} became {}", simd.name(), before.wide(), after.wide());
        }
    }
}

/// A float64 rounded once.
fn rounded<T: Number>(value: f64) -> T {
    let narrow = if T::DTYPE == DType::F32 { value } else { f64::from(to_odd_float32(value)) };
    if T::DTYPE == DType::F64 { T::narrowed(value) } else { T::narrowed(narrow) }
}

fn through_float<T: Number>(values: &[f64], length: usize, factor: f64) {
    // SAFETY: the chunks lie over an array that is ours.
    let change = |chunks: &[_], simd| unsafe { scale(chunks, factor, simd, Threads::new(2)) };
    let finite: Vec<f64> = values.iter().copied().filter(|v| !v.is_nan()).collect();
    check::<T>(&finite, length, change, |x| {
        if factor == 1.0 { x } else { T::narrowed(f64::from(x.wide() as f32 * factor as f32)) }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn factors(values in prop::collection::vec(value(), 0..5000), length in 1usize..3000,
               factor in prop_oneof![Just(1.0), Just(0.0), 1e-12..1.0f64, Just(1e-40)]) {
        through_float::<f32>(&values, length, factor);
        through_float::<f16>(&values, length, factor);
        through_float::<bf16>(&values, length, factor);
        // SAFETY: the chunks lie over an array that is ours.
        let change = |chunks: &[_], simd| unsafe { scale(chunks, factor, simd, Threads::new(2)) };
        check::<f64>(&values, length, change, |x| if factor == 1.0 { x } else { x * factor });
    }

    #[test]
    fn limits(values in prop::collection::vec(value(), 0..3000), length in 1usize..3000,
              limit in prop_oneof![Just(0.0), Just(f64::INFINITY), 0.0..100.0f64]) {
        // SAFETY: the chunks lie over an array that is ours.
        let change = |chunks: &[_], simd| unsafe { clamp(chunks, limit, simd, Threads::new(2)) };
        fn limited<T: Number>(x: T, limit: f64) -> T {
            let limit = rounded::<T>(limit).wide();
            let x = x.wide();
            T::narrowed(if x > limit { limit } else if x < -limit { -limit } else { x })
        }
        let ordinary: Vec<f64> = values.iter().copied().filter(|v| !v.is_nan()).collect();
        check::<f64>(&values, length, change, |x| limited(x, limit));
        check::<f32>(&ordinary, length, change, |x| limited(x, limit));
        check::<bf16>(&ordinary, length, change, |x| limited(x, limit));
        check::<f16>(&ordinary, length, change, |x| limited(x, limit));
    }
}
