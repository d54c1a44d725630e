//! Routes, reasons and refusals of small lists.

use std::ops::Range;

use gradclip_core::dtype::DType;
use gradclip_core::plan::{Descriptor, Device, DevicePlan, Plan, PlanError, Reason, Route};

fn dense(address: u64, elements: i64, dtype: DType, device: Device) -> Descriptor {
    let (sizes, strides) = ([elements].as_slice().into(), [1].as_slice().into());
    Descriptor { address, sizes, strides, dtype, device, owned: None }
}

fn floats(address: u64, elements: i64) -> Descriptor {
    dense(address, elements, DType::F32, Device::CPU)
}

fn reason(descriptor: Descriptor) -> Reason {
    let plan = Plan::new(&[descriptor]).unwrap();
    assert_eq!(plan.devices.is_empty(), plan.tensors[0].route() == Route::Reference || plan.tensors[0].elements == 0);
    plan.tensors[0].reason
}

#[test]
fn devices_are_apart_and_keep_the_order_of_the_list() {
    let gpu = Device::cuda(1);
    // The same addresses on another device are other memory.
    let list = [dense(64, 9, DType::Bf16, gpu), floats(4096, 5), dense(1024, 7, DType::F64, gpu), floats(64, 3)];
    let plan = Plan::new(&list).unwrap();
    let work = |device: &DevicePlan| {
        let tensors = device.sums.iter().map(|segment| segment.tensor).collect::<Vec<_>>();
        (device.device, tensors)
    };
    let expected = [(gpu, vec![0, 2]), (Device::CPU, vec![1, 3])];
    assert_eq!(plan.devices.iter().map(work).collect::<Vec<_>>(), expected);
    assert!(plan.devices.iter().all(|device| device.sums == device.scales));
}

#[test]
fn reasons_tell_what_was_found() {
    let whole = floats(64, 6);
    let view =
        |sizes: &[i64], strides: &[i64]| Descriptor { sizes: sizes.into(), strides: strides.into(), ..whole.clone() };
    assert_eq!(reason(whole.clone()), Reason::Dense);
    assert_eq!(reason(view(&[4, 2], &[3, 1])), Reason::Rows { rows: 4 });
    assert_eq!(reason(view(&[4, 2], &[0, 1])), Reason::Expanded { weight: 4 });
    assert_eq!(reason(view(&[4, 2], &[30, 2])), Reason::Dims { dims: 2 });
    assert_eq!(reason(Descriptor { address: 66, ..whole.clone() }), Reason::Misaligned);
    assert_eq!(reason(Descriptor { address: 68, dtype: DType::C64, ..whole.clone() }), Reason::Dense);
    assert_eq!(
        reason(Descriptor { device: Device { kind: 8, index: 0 }, ..whole.clone() }),
        Reason::Device { kind: 8 }
    );
    let cut = Descriptor { owned: Some(0..8), ..view(&[4, 4, 4], &[1, 4, 16]) };
    assert_eq!(reason(cut), Reason::SliceDims { dims: 2 });
    assert_eq!(reason(floats(0, 0)), Reason::Empty);
}

#[test]
fn an_empty_slice_is_scaled_but_not_summed() {
    let plan = Plan::new(&[Descriptor { owned: Some(2..2), ..floats(64, 6) }]).unwrap();
    assert_eq!((plan.devices[0].sums.len(), plan.devices[0].scales.len()), (0, 1));
}

#[test]
fn the_refused_tensor_is_named_by_its_position() {
    let refusal = |last: Descriptor| Plan::new(&[floats(64, 4), last]).unwrap_err();
    assert_eq!(refusal(floats(0, 1)), PlanError::NullPointer { tensor: 1 });
    let address = u64::MAX - 7;
    assert_eq!(refusal(floats(address, 2)), PlanError::AddressOverflow { tensor: 1, address });
    for owned in [2..7, 7..7, Range { start: 3, end: 2 }] {
        let last = Descriptor { owned: Some(owned.clone()), ..floats(128, 6) };
        assert_eq!(refusal(last), PlanError::OwnedRange { tensor: 1, owned, elements: 6 });
    }
    assert_eq!(refusal(floats(76, 4)), PlanError::Overlap { first: 0, second: 1 });
    assert!(Plan::new(&[floats(64, 4), floats(80, 4)]).is_ok());
}

#[test]
fn tensors_of_the_reference_route_overlap_too() {
    let strided = Descriptor { sizes: [2, 2].as_slice().into(), strides: [30, 2].as_slice().into(), ..floats(64, 1) };
    let (hit, miss) = (floats(64 + 4 * 32, 1), floats(64 + 4 * 31, 1));
    assert!(Plan::new(&[strided.clone(), hit]).is_err());
    assert!(Plan::new(&[strided, miss]).is_ok());
}
