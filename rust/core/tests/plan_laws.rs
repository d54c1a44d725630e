//! Laws of the plan, against enumeration of every address.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gradclip_core::dtype::DType;
use gradclip_core::layout::LayoutError;
use gradclip_core::plan::{Chunk, Descriptor, Device, Plan, PlanError, Reason, Route};
use proptest::prelude::*;

const DTYPES: [DType; 6] = [DType::F16, DType::Bf16, DType::F32, DType::F64, DType::C64, DType::C128];

/// How often each address is counted.
type Counts = BTreeMap<u64, u64>;

/// A dimension of a view: what is kept of a padded size, how it is stepped through, or expanded.
#[derive(Clone, Debug)]
struct ViewDim {
    size: i64,
    padding: i64,
    step: i64,
    expanded: bool,
}

fn view_dim() -> impl Strategy<Value = ViewDim> {
    let sizes = prop_oneof![1 => Just(0i64), 3 => Just(1), 20 => 2i64..6];
    (sizes, prop_oneof![3 => Just(0i64), 1 => 1i64..3], prop_oneof![5 => Just(1i64), 1 => 2i64..3], 0..8)
        .prop_map(|(size, padding, step, expanded)| ViewDim { size, padding, step, expanded: expanded == 0 })
}

/// Strides of a view into a buffer whose dimensions stand in the order of `keys`.
fn view_strides(dims: &[ViewDim], keys: &[u8]) -> Vec<i64> {
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|&dim| keys[dim]);
    let mut strides = vec![0; dims.len()];
    let mut stride = 1;
    for dim in order {
        if !dims[dim].expanded {
            strides[dim] = stride * dims[dim].step;
            stride *= dims[dim].size.max(1) * dims[dim].step + dims[dim].padding;
        }
    }
    strides
}

/// Views as slicing, permuting and expanding make them.
fn view() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    prop::collection::vec((view_dim(), any::<u8>()), 0..6).prop_map(|dims| {
        let (dims, keys): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        (dims.iter().map(|dim| dim.size).collect(), view_strides(&dims, &keys))
    })
}

/// Dense tensors of up to `dims` dimensions, in any order in memory.
fn dense(dims: usize) -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    prop::collection::vec((1i64..5, any::<u8>()), 0..=dims).prop_map(|dims| {
        let view = |size| ViewDim { size, padding: 0, step: 1, expanded: false };
        let (sizes, keys): (Vec<i64>, Vec<u8>) = dims.into_iter().unzip();
        let views: Vec<ViewDim> = sizes.iter().map(|&size| view(size)).collect();
        let strides = view_strides(&views, &keys);
        (sizes, strides)
    })
}

/// Convolution weights (out, in, spatial...) with `in` innermost in memory.
fn channels_last() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    prop::collection::vec(1i64..5, 2..6).prop_map(|sizes| {
        let mut strides = vec![1; sizes.len()];
        let mut stride = sizes[1];
        for dim in (0..sizes.len()).rev().filter(|&dim| dim != 1) {
            strides[dim] = stride;
            stride *= sizes[dim];
        }
        (sizes, strides)
    })
}

/// Any sizes with any small strides: many of them overlap themselves.
fn scramble() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    prop::collection::vec((1i64..6, 0i64..40), 0..5).prop_map(|dims| dims.into_iter().unzip())
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(&DTYPES[..])
}

fn shape() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    prop_oneof![3 => view(), 1 => scramble()]
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    (shape(), dtype(), 1u64..40).prop_map(|((sizes, strides), dtype, slot)| {
        tensor(0x1000 + slot * dtype.bytes() as u64, &sizes, &strides, dtype)
    })
}

fn tensor(address: u64, sizes: &[i64], strides: &[i64], dtype: DType) -> Descriptor {
    let (sizes, strides) = (sizes.into(), strides.into());
    Descriptor { address, sizes, strides, dtype, device: Device::CPU, owned: None }
}

/// Addresses in logical order.
fn addresses(tensor: &Descriptor) -> Vec<u64> {
    let outward = |addresses: Vec<u64>, (&size, &stride): (&i64, &i64)| {
        let step = stride as u64 * tensor.dtype.bytes() as u64;
        addresses.iter().flat_map(|address| (0..size as u64).map(move |index| address + index * step)).collect()
    };
    tensor.sizes.iter().zip(&tensor.strides).fold(vec![tensor.address], outward)
}

fn counts(addresses: impl IntoIterator<Item = u64>) -> Counts {
    let mut counts = Counts::new();
    for address in addresses {
        *counts.entry(address).or_default() += 1;
    }
    counts
}

fn chunk_addresses(chunk: &Chunk) -> impl Iterator<Item = u64> {
    let (chunk, bytes) = (*chunk, chunk.dtype.bytes() as u64);
    let row = move |row| {
        let element = move |column| chunk.address + (row * chunk.row_stride + column) * bytes;
        (0..chunk.row_length).map(element)
    };
    (0..chunk.rows).flat_map(row)
}

fn chunk_counts<'a>(chunks: impl IntoIterator<Item = &'a Chunk>) -> Counts {
    let mut counts = Counts::new();
    for chunk in chunks {
        for address in chunk_addresses(chunk) {
            *counts.entry(address).or_default() += chunk.weight;
        }
    }
    counts
}

fn sum_chunks(plan: &Plan, chunk_elements: u64) -> Vec<Chunk> {
    plan.devices.iter().flat_map(|device| device.sum_chunks(chunk_elements)).collect()
}

fn scale_chunks(plan: &Plan, chunk_elements: u64) -> Vec<Chunk> {
    plan.devices.iter().flat_map(|device| device.scale_chunks(chunk_elements)).collect()
}

/// Every byte of the tensor.
fn bytes(tensor: &Descriptor) -> BTreeSet<u64> {
    addresses(tensor).into_iter().flat_map(|address| address..address + tensor.dtype.bytes() as u64).collect()
}

fn overlaps_itself(tensor: &Descriptor) -> bool {
    let strided = tensor.sizes.iter().copied().zip(tensor.strides.iter().copied()).filter(|&(_, stride)| stride != 0);
    let (sizes, strides) = strided.unzip();
    counts(addresses(&Descriptor { sizes, strides, ..tensor.clone() })).values().any(|&count| count > 1)
}

/// A range of logical elements from two fractions of 256.
fn range(elements: usize, one: u8, other: u8) -> Range<u64> {
    let at = |fraction: u8| (elements * usize::from(fraction)).div_ceil(255) as u64;
    at(one.min(other))..at(one.max(other))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_element_is_summed_once_and_every_address_scaled_once(tensor in descriptor(), chunk_elements in 1u64..50) {
        let expected = counts(addresses(&tensor));
        let refused = overlaps_itself(&tensor);
        let plan = match Plan::new(std::slice::from_ref(&tensor)) {
            Ok(plan) => plan,
            Err(error) => {
                let overlaps = PlanError::Layout { tensor: 0, error: LayoutError::OverlapsItself };
                prop_assert_eq!((error, refused), (overlaps, true));
                return Ok(());
            }
        };
        prop_assert!(!refused);
        let (sums, scales) = (sum_chunks(&plan, chunk_elements), scale_chunks(&plan, chunk_elements));
        if plan.tensors[0].route() == Route::Reference {
            prop_assert!(sums.is_empty() && scales.is_empty());
            return Ok(());
        }
        prop_assert!(sums.iter().chain(&scales).all(|chunk| chunk.elements() <= chunk_elements));
        prop_assert_eq!(chunk_counts(&sums), expected.clone());
        prop_assert_eq!(chunk_counts(&scales), expected.into_keys().map(|address| (address, 1)).collect());
    }

    #[test]
    fn owned_elements_are_summed_and_all_scaled(tensor in descriptor(), cut in any::<(u8, u8)>(), chunk_elements in 1u64..50) {
        let Ok(whole) = Plan::new(std::slice::from_ref(&tensor)) else { return Ok(()) };
        let logical = addresses(&tensor);
        let owned = range(logical.len(), cut.0, cut.1);
        let part = Descriptor { owned: Some(owned.clone()), ..tensor };
        let plan = Plan::new(&[part]).unwrap();
        if plan.tensors[0].route() == Route::Fused {
            let expected = counts(logical[owned.start as usize..owned.end as usize].iter().copied());
            prop_assert_eq!(chunk_counts(&sum_chunks(&plan, chunk_elements)), expected);
            prop_assert_eq!(scale_chunks(&plan, chunk_elements), scale_chunks(&whole, chunk_elements));
        } else {
            prop_assert!(plan.devices.is_empty());
        }
    }

    #[test]
    fn slices_of_matrices_and_channels_last_weights_stay_fused(
        (sizes, strides) in prop_oneof![dense(2), channels_last()], cut in any::<(u8, u8)>(),
    ) {
        let tensor = tensor(64, &sizes, &strides, DType::F32);
        let owned = range(addresses(&tensor).len(), cut.0, cut.1);
        let plan = Plan::new(&[Descriptor { owned: Some(owned), ..tensor }]).unwrap();
        prop_assert_eq!(plan.tensors[0].reason, Reason::Dense);
        prop_assert!(plan.devices[0].sums.len() < 2 * sizes.len().max(1));
    }

    #[test]
    fn owned_parts_add_up(tensor in descriptor(), cuts in prop::collection::vec(any::<u8>(), 0..4)) {
        let Ok(whole) = Plan::new(std::slice::from_ref(&tensor)) else { return Ok(()) };
        let elements = addresses(&tensor).len();
        let mut ends: Vec<u8> = cuts.into_iter().chain([0, 255]).collect();
        ends.sort_unstable();
        let parts: Vec<Plan> = ends.windows(2).map(|ends| {
            let owned = Some(range(elements, ends[0], ends[1]));
            Plan::new(&[Descriptor { owned, ..tensor.clone() }]).unwrap()
        }).collect();
        if parts.iter().all(|part| part.tensors[0].route() == Route::Fused) {
            let sums: Vec<Chunk> = parts.iter().flat_map(|part| sum_chunks(part, 7)).collect();
            prop_assert_eq!(chunk_counts(&sums), chunk_counts(&sum_chunks(&whole, 7)));
        }
    }

    #[test]
    fn tensors_are_refused_iff_two_share_a_byte(list in prop::collection::vec((shape(), dtype(), 0u64..400), 2..5)) {
        let tensors: Vec<Descriptor> = list.iter()
            .map(|((sizes, strides), dtype, offset)| tensor(0x1000 + offset, sizes, strides, *dtype))
            .filter(|tensor| !overlaps_itself(tensor))
            .collect();
        let bytes: Vec<_> = tensors.iter().map(bytes).collect();
        let shared = |(one, other): (usize, usize)| !bytes[one].is_disjoint(&bytes[other]);
        let mut pairs = (0..bytes.len()).flat_map(|other| (0..other).map(move |one| (one, other)));
        match Plan::new(&tensors) {
            Ok(_) => prop_assert!(!pairs.any(shared)),
            Err(PlanError::Overlap { first, second }) => prop_assert!(first < second && shared((first, second))),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn columns_of_one_matrix_are_apart_iff_their_ranges_are(
        pitch in 4u64..40, columns in prop::collection::vec((0u64..40, 1u64..12), 2..6), rows in 2i64..5,
    ) {
        let tensors: Vec<Descriptor> = columns.iter()
            .map(|&(start, width)| (start % pitch, width.min(pitch)))
            .map(|(start, width)| tensor(256 + 4 * start, &[rows, width as i64], &[pitch as i64, 1], DType::F32))
            .collect();
        let all: Vec<u64> = tensors.iter().flat_map(addresses).collect();
        let apart = counts(all).values().all(|&count| count == 1);
        prop_assert_eq!(Plan::new(&tensors).is_ok(), apart);
    }

    #[test]
    fn a_dense_tensor_is_one_run_in_any_order_of_dimensions((sizes, strides) in dense(6)) {
        let plan = Plan::new(&[tensor(64, &sizes, &strides, DType::F32)]).unwrap();
        prop_assert_eq!(plan.tensors[0].reason, Reason::Dense);
        prop_assert_eq!(plan.devices[0].scales[0].layout.row_length, sizes.iter().product::<i64>() as u64);
    }

    #[test]
    fn wild_descriptors_never_panic(list in prop::collection::vec(wild(), 0..4), chunk_elements in wild_address()) {
        let Ok(plan) = Plan::new(&list) else { return Ok(()) };
        for device in &plan.devices {
            let ends = |chunk: &Chunk| {
                let last = (chunk.rows - 1) * chunk.row_stride + chunk.row_length;
                chunk.address.checked_add(last * chunk.dtype.bytes() as u64)
            };
            let few = device.sum_chunks(chunk_elements).take(20).chain(device.sum_chunks(chunk_elements).rev().take(20));
            let few = few.chain(device.scale_chunks(chunk_elements).take(20));
            for chunk in few.chain(device.scale_chunks(chunk_elements).rev().take(20)) {
                prop_assert!(chunk.elements() > 0 && chunk.elements() <= chunk_elements.max(1));
                prop_assert!(ends(&chunk).is_some());
            }
        }
    }
}

fn wild_integer() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => 0i64..5,
        2 => (0u32..63, -2i64..3).prop_map(|(shift, near)| (1i64 << shift).wrapping_add(near)),
        1 => prop::sample::select(&[i64::MIN, -1, i64::MAX][..]),
        1 => any::<i64>(),
    ]
}

fn wild_address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0u64..200,
        2 => (0u32..64, -2i64..3).prop_map(|(shift, near)| (1u64 << shift).wrapping_add_signed(near)),
        1 => (0u64..300).prop_map(|below| u64::MAX - below),
        1 => any::<u64>(),
    ]
}

fn wild() -> impl Strategy<Value = Descriptor> {
    let dims = prop::collection::vec((wild_integer(), wild_integer()), 0..7);
    let owned = prop::option::of((wild_address(), wild_address()).prop_map(|(start, end)| start..end));
    let kind = prop_oneof![6 => Just(1), 2 => Just(2), 1 => any::<i32>()];
    (wild_address(), dims, -1i64..20, dtype(), kind, owned).prop_map(|(address, dims, extra, dtype, kind, owned)| {
        let (sizes, mut strides): (Vec<i64>, Vec<i64>) = dims.into_iter().unzip();
        // Now and then a stride too many.
        strides.extend((extra < 0).then_some(extra));
        Descriptor { device: Device { kind, index: 0 }, owned, ..tensor(address, &sizes, &strides, dtype) }
    })
}
