//! Digests against their definition in 128-bit arithmetic, for every layout, split and instruction set.

mod support;

use gradclip_core::cpu::{Threads, digest_each};
use gradclip_core::dtype::DType;
use gradclip_core::plan::{Descriptor, Device, Plan};
use proptest::prelude::*;
use support::instruction_sets;

const MODULUS: u128 = 1 << 64;

/// The definition, step by step.
fn weight(k: u128) -> u128 {
    let mut x = (k / 2 + 1) * 0x9E37_79B9_7F4A_7C15 % MODULUS;
    for factor in [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB] {
        x = (x ^ x >> 32) * factor % MODULUS;
    }
    x ^= x >> 32;
    if k % 2 == 1 {
        x = (x << 27 | x >> 37) % MODULUS;
    }
    x | 1
}

fn expected(words: &[u32], first: u64) -> u64 {
    let terms =
        words.iter().zip(u128::from(first)..).map(|(&word, k)| weight(k % MODULUS) * u128::from(word) % MODULUS);
    (terms.sum::<u128>() % MODULUS) as u64
}

/// Bits of a tensor in memory, read as elements of a dtype.
#[derive(Clone, Debug)]
struct Memory {
    /// Multiples of 16 bytes.
    bytes: Vec<[u64; 2]>,
    dtype: DType,
}

impl Memory {
    /// The 32-bit words, or for 16-bit types the 16-bit words, of the element at an offset.
    fn words(&self, offset: u64) -> Vec<u32> {
        let size = self.dtype.bytes();
        let bits = self.dtype.bytes().min(4) * 8;
        let word = |byte: usize| (self.bytes[byte / 16][byte % 16 / 8] >> (8 * (byte % 8))) & ((1 << bits) - 1);
        (0..size.div_ceil(4)).map(|part| word(offset as usize * size + 4 * part) as u32).collect()
    }

    fn descriptor(&self, start: u64, sizes: &[i64], strides: &[i64]) -> Descriptor {
        Descriptor {
            address: self.bytes.as_ptr() as u64 + start * self.dtype.bytes() as u64,
            sizes: sizes.into(),
            strides: strides.into(),
            dtype: self.dtype,
            device: Device::CPU,
            owned: None,
        }
    }

    /// The words of a strided tensor in logical order.
    fn logical_words(&self, start: u64, sizes: &[i64], strides: &[i64]) -> Vec<u32> {
        let mut offsets = vec![start];
        for (&size, &stride) in sizes.iter().zip(strides) {
            offsets =
                offsets.iter().flat_map(|offset| (0..size).map(move |at| offset + (at * stride) as u64)).collect();
        }
        offsets.iter().flat_map(|&offset| self.words(offset)).collect()
    }
}

/// The digest on every instruction set, on one thread and on three.
fn digest(descriptor: &Descriptor, offset: u64) -> u64 {
    Plan::new(std::slice::from_ref(descriptor)).expect("no element overlaps another");
    // SAFETY: the memory is the test's, and the plan accepted it.
    let each = |simd, threads| unsafe { digest_each(&[descriptor], offset, simd, Threads::new(threads)) };
    let sets = instruction_sets();
    let all: Vec<u64> = sets.iter().flat_map(|&simd| [each(simd, 1)[0], each(simd, 3)[0]]).collect();
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    all[0]
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F16, DType::Bf16, DType::F32, DType::F64, DType::C64, DType::C128])
}

fn memory(most: usize) -> impl Strategy<Value = Memory> {
    let word = prop_oneof![4 => any::<u64>(), 1 => Just(0), 1 => Just(1 << 63), 1 => Just(u64::MAX)];
    (prop::collection::vec((word.clone(), word), 1..most), dtype())
        .prop_map(|(words, dtype)| Memory { bytes: words.into_iter().map(|(a, b)| [a, b]).collect(), dtype })
}

/// Sizes, a permutation that nests the dimensions in memory, gaps, and which dimensions are expanded.
fn layout() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    (1usize..=4).prop_flat_map(|dims| {
        let order = Just((0..dims).collect::<Vec<_>>()).prop_shuffle();
        let each = prop::collection::vec((1i64..6, 0i64..3, prop::bool::weighted(0.15)), dims);
        (order, each).prop_map(|(order, each)| {
            let sizes: Vec<i64> = each.iter().map(|&(size, ..)| size).collect();
            let mut strides = vec![0; sizes.len()];
            let mut span = 1;
            for dim in order {
                let (size, gap, expanded) = each[dim];
                if !expanded {
                    strides[dim] = span + gap;
                    span += strides[dim] * (size - 1);
                }
            }
            (sizes, strides)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_run_equals_the_definition(memory in memory(300), from in 0.0..1.0f64, offset in prop_oneof![
        0u64..9, Just((1 << 32) - 3), any::<u64>(),
    ]) {
        let elements = (memory.bytes.len() * 16 / memory.dtype.bytes()) as u64;
        let start = (from * elements as f64) as u64;
        let sizes = [(elements - start) as i64];
        let words = memory.logical_words(start, &sizes, &[1]);
        let first = offset.wrapping_mul((memory.dtype.bytes() as u64).div_ceil(4));
        prop_assert_eq!(digest(&memory.descriptor(start, &sizes, &[1]), offset), expected(&words, first));
    }

    #[test]
    fn any_strides_equal_the_definition((sizes, strides) in layout(), dtype in dtype(), seed in any::<u64>()) {
        let last: i64 = sizes.iter().zip(&strides).map(|(size, stride)| (size - 1) * stride).sum();
        let count = (last as usize + 1) * dtype.bytes() / 16 + 1;
        let bits = |at: usize| seed.wrapping_add(at as u64).wrapping_mul(0xD134_2543_DE82_EF95).rotate_left(29);
        let memory = Memory { bytes: (0..count).map(|at| [bits(2 * at), bits(2 * at + 1)]).collect(), dtype };
        let words = memory.logical_words(0, &sizes, &strides);
        prop_assert_eq!(digest(&memory.descriptor(0, &sizes, &strides), 0), expected(&words, 0));
    }

    #[test]
    fn shards_add_up(memory in memory(200), cuts in prop::collection::vec(0.0..1.0f64, 0..6)) {
        let elements = (memory.bytes.len() * 16 / memory.dtype.bytes()) as u64;
        let mut ends: Vec<u64> = cuts.iter().map(|cut| (cut * elements as f64) as u64).collect();
        ends.extend([0, elements]);
        ends.sort_unstable();
        let shard = |ends: &[u64]| digest(&memory.descriptor(ends[0], &[(ends[1] - ends[0]) as i64], &[1]), ends[0]);
        let sum = ends.windows(2).map(shard).fold(0, u64::wrapping_add);
        prop_assert_eq!(sum, digest(&memory.descriptor(0, &[elements as i64], &[1]), 0));
    }

    #[test]
    fn one_changed_bit_changes_the_digest(memory in memory(40), at in any::<prop::sample::Index>(), bit in 0u32..64) {
        let elements = (memory.bytes.len() * 16 / memory.dtype.bytes()) as i64;
        let mut changed = memory.clone();
        changed.bytes[at.index(memory.bytes.len())][bit as usize % 2] ^= 1 << bit;
        let of = |memory: &Memory| digest(&memory.descriptor(0, &[elements], &[1]), 0);
        prop_assert_ne!(of(&changed), of(&memory));
    }
}

/// More elements than one task or one thread takes: a matrix, its transpose, rows with gaps, and a repeated row.
#[test]
fn large_tensors_equal_the_definition() {
    let bits = |at: u64| at.wrapping_mul(0xD134_2543_DE82_EF95).rotate_left(23);
    for dtype in [DType::Bf16, DType::F32, DType::F64] {
        let memory = Memory { bytes: (0..40_000).map(|at| [bits(2 * at), bits(2 * at + 1)]).collect(), dtype };
        let elements = (40_000 * 16 / dtype.bytes()) as i64;
        let rows = elements / 250;
        for (sizes, strides) in [
            (vec![elements], vec![1]),
            (vec![250, rows], vec![1, 250]),
            (vec![rows, 201], vec![250, 1]),
            (vec![rows / 2, 120], vec![500, 2]),
            (vec![70, 3, 1111], vec![0, 2000, 1]),
        ] {
            let words = memory.logical_words(0, &sizes, &strides);
            assert_eq!(
                digest(&memory.descriptor(0, &sizes, &strides), 0),
                expected(&words, 0),
                "{sizes:?} {strides:?}"
            );
        }
    }
}

#[test]
fn zero_bits_and_no_elements_give_zero() {
    let zeros = Memory { bytes: vec![[0; 2]; 99], dtype: DType::F32 };
    assert_eq!(digest(&zeros.descriptor(0, &[9, 11], &[11, 1]), 7), 0);
    assert_eq!(digest(&zeros.descriptor(0, &[3, 0], &[1, 1]), 7), 0);
    let minus_zero = Memory { bytes: vec![[1 << 31, 0]], dtype: DType::F32 };
    assert_ne!(digest(&minus_zero.descriptor(0, &[4], &[1]), 0), 0);
}
