//! DLPack's C exchange table, as torch 2.10 and later publish it on `torch.Tensor`.
//!
//! The layouts are those of DLPack 1.3 (`dlpack.h`). The table lives as long as the process.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use gradclip_core::plan::Device;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyCapsule;

/// The major version whose layouts are declared here.
const MAJOR: u32 = 1;

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Header {
    version: Version,
    previous: *mut Header,
}

#[repr(C)]
struct Table {
    header: Header,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

/// `DLTensor`: borrowed, valid until control returns to torch.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_index: i32,
    dims: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    sizes: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// What a tensor says of itself, borrowed from it.
pub struct View<'a> {
    pub address: u64,
    pub device_type: i32,
    pub device_index: i32,
    pub code: u8,
    pub bits: u8,
    pub sizes: &'a [i64],
    pub strides: &'a [i64],
}

/// The exchange functions of torch.
#[derive(Clone, Copy)]
pub struct Exchange(NonNull<Table>);

// SAFETY: the table is immutable and lives as long as the process; its functions want the GIL, which `Python` proves.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

impl Exchange {
    /// The table of the torch that is loaded.
    ///
    /// # Errors
    /// `RuntimeError` if torch publishes none, or one of another major version.
    pub fn get(py: Python<'_>) -> PyResult<Self> {
        static EXCHANGE: PyOnceLock<Exchange> = PyOnceLock::new();
        EXCHANGE.get_or_try_init(py, || Self::find(py)).copied()
    }

    fn find(py: Python<'_>) -> PyResult<Self> {
        const NAME: &std::ffi::CStr = c"dlpack_exchange_api";
        let wanted = || PyRuntimeError::new_err("gradclip needs torch 2.10 or later: no DLPack exchange table found");
        let capsule =
            py.import("torch")?.getattr("Tensor")?.getattr("__dlpack_c_exchange_api__").map_err(|_| wanted())?;
        let capsule = capsule.cast_into::<PyCapsule>().map_err(|_| wanted())?;
        let exchange = Exchange(capsule.pointer_checked(Some(NAME))?.cast());
        if exchange.table().header.version.major != MAJOR || exchange.table().tensor_from_object.is_none() {
            return Err(wanted());
        }
        Ok(exchange)
    }

    fn table(&self) -> &Table {
        // SAFETY: torch keeps the table for the life of the process; the capsule's name says what it is.
        unsafe { self.0.as_ref() }
    }

    /// Shows `look` an object whose type is exactly `torch.Tensor` or `torch.nn.Parameter`; `None` if torch has no plain
    /// strided memory to show for it (sparse, meta, quantized and the like). `look` must not call torch.
    pub fn view<R>(&self, object: &Bound<'_, PyAny>, look: impl FnOnce(View<'_>) -> R) -> Option<R> {
        let read = self.table().tensor_from_object?;
        let mut tensor = std::mem::MaybeUninit::<Tensor>::uninit();
        // SAFETY: the object is of the type on which the table was found, and the GIL is held.
        let status = unsafe { read(object.as_ptr().cast(), tensor.as_mut_ptr()) };
        if status != 0 {
            // SAFETY: the GIL is held. The error text is torch's C++ trace: the caller words its own.
            unsafe { ffi::PyErr_Clear() };
            return None;
        }
        // SAFETY: status 0 means that torch filled it in.
        let tensor = unsafe { tensor.assume_init() };
        let dims = usize::try_from(tensor.dims).ok()?;
        let slice = |values: *const i64| match dims {
            0 => &[],
            // SAFETY: torch gives `dims` sizes and strides, which live until control returns to it.
            _ => unsafe { std::slice::from_raw_parts(values, dims) },
        };
        (tensor.lanes == 1).then(|| {
            look(View {
                address: (tensor.data as u64).wrapping_add(tensor.byte_offset),
                device_type: tensor.device_type,
                device_index: tensor.device_index,
                code: tensor.code,
                bits: tensor.bits,
                sizes: slice(tensor.sizes),
                strides: slice(tensor.strides),
            })
        })
    }

    /// The stream that torch works on for a device, as the driver's handle; 0 is the default stream.
    pub fn current_stream(&self, device: Device) -> Option<u64> {
        let current = self.table().current_stream?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one pointer; the GIL is held by whoever holds an `Exchange` and calls torch.
        let status = unsafe { current(device.kind, device.index, &mut stream) };
        if status != 0 {
            // SAFETY: as in `view`.
            unsafe { ffi::PyErr_Clear() };
            return None;
        }
        Some(stream as u64)
    }
}

const _: () = assert!(size_of::<Tensor>() == 48 && size_of::<Table>() == 56);
