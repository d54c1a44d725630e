//! The CUDA driver, loaded when first needed: nothing of CUDA is linked.
//!
//! Signatures are those of `cuda.h`; functions with a `_v2` in their name are the current ones of CUDA 12 and 13.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;
use thiserror::Error;

type Status = c_int;
type Handle = *mut c_void;

const SUCCESS: Status = 0;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and the two numbers of the compute capability.
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: c_int = 8;

/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NOT_CAPTURING: c_int = 0;

/// A kernel gets more shared memory than this only when it asks.
const SHARED_WITHOUT_ASKING: u32 = 48 * 1024;

#[cfg(windows)]
const LIBRARIES: &[&str] = &["nvcuda.dll"];
#[cfg(not(windows))]
const LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];

/// What the driver could not do.
#[derive(Clone, Debug, Error)]
pub enum DriverError {
    /// No driver on this machine, or one that cannot be opened.
    #[error("the CUDA driver cannot be loaded ({reason}); install the NVIDIA driver")]
    Missing {
        /// What the system's loader said.
        reason: String,
    },
    /// A driver older than the functions that are called.
    #[error("the CUDA driver has no `{function}`; update the NVIDIA driver")]
    Old {
        /// The function.
        function: &'static str,
    },
    /// A call failed.
    #[error("`{function}` failed: {message} (CUDA error {status})")]
    Call {
        /// The function.
        function: &'static str,
        /// Its result code.
        status: i32,
        /// The driver's words for it.
        message: String,
    },
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The functions that are called.
        pub struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
            _library: Library,
        }

        impl Driver {
            fn load(library: Library) -> Result<Self, DriverError> {
                $(
                    // SAFETY: the symbol has this signature in every driver that has it.
                    let $field = unsafe { library.get($symbol) }.map(|symbol| *symbol);
                    let $field = $field.map_err(|_| DriverError::Old { function: name_of($symbol) })?;
                )*
                Ok(Driver { $($field,)* _library: library })
            }
        }
    };
}

functions! {
    init = b"cuInit\0": fn(c_uint);
    device_get = b"cuDeviceGet\0": fn(*mut c_int, c_int);
    device_attribute = b"cuDeviceGetAttribute\0": fn(*mut c_int, c_int, c_int);
    primary_retain = b"cuDevicePrimaryCtxRetain\0": fn(*mut Handle, c_int);
    context_current = b"cuCtxGetCurrent\0": fn(*mut Handle);
    context_push = b"cuCtxPushCurrent_v2\0": fn(Handle);
    context_pop = b"cuCtxPopCurrent_v2\0": fn(*mut Handle);
    module_load = b"cuModuleLoadData\0": fn(*mut Handle, *const c_void);
    module_function = b"cuModuleGetFunction\0": fn(*mut Handle, Handle, *const c_char);
    function_attribute = b"cuFuncSetAttribute\0": fn(Handle, c_int, c_int);
    launch_kernel = b"cuLaunchKernel\0": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    stream_capturing = b"cuStreamIsCapturing\0": fn(Handle, *mut c_int);
    error_string = b"cuGetErrorString\0": fn(Status, *mut *const c_char);
}

/// A stream's handle; 0 is the default stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub u64);

/// A loaded kernel.
#[derive(Clone, Copy, Debug)]
pub struct Function(usize);

/// The size of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

impl Driver {
    /// The driver of this machine, opened at the first call.
    ///
    /// # Errors
    /// No driver, or one that is too old or does not start.
    pub fn get() -> Result<&'static Driver, DriverError> {
        static DRIVER: OnceLock<Result<Driver, DriverError>> = OnceLock::new();
        DRIVER.get_or_init(Driver::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Driver, DriverError> {
        let mut reason = String::new();
        for name in LIBRARIES {
            // SAFETY: the system's CUDA driver; its initialisers are what every CUDA program runs.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    let driver = Driver::load(library)?;
                    // SAFETY: takes no pointers.
                    driver.check("cuInit", unsafe { (driver.init)(0) })?;
                    return Ok(driver);
                }
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                    reason = format!("{error}{}", cause.unwrap_or_default());
                }
            }
        }
        Err(DriverError::Missing { reason })
    }

    fn check(&self, function: &'static str, status: Status) -> Result<(), DriverError> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: writes a pointer to a static string, or null for codes that it does not know.
        unsafe { (self.error_string)(status, &mut text) };
        let message = match text.is_null() {
            true => "unknown error".into(),
            // SAFETY: not null, so the driver's own zero-terminated string.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(DriverError::Call { function, status, message })
    }

    fn attribute(&self, device: c_int, attribute: c_int) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: writes one integer.
        let status = unsafe { (self.device_attribute)(&mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", status)?;
        Ok(value.unsigned_abs())
    }
}

/// The primary context of a device, which torch uses too.
pub struct Context {
    driver: &'static Driver,
    handle: usize,
    /// Compute capability as one number: 90 for 9.0.
    pub architecture: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
}

impl Context {
    /// The context of the device with this index; it stays retained as long as the process.
    ///
    /// # Errors
    /// No driver, or no such device.
    pub fn of_device(index: i32) -> Result<Self, DriverError> {
        let driver = Driver::get()?;
        let mut device = 0;
        // SAFETY: writes one integer.
        driver.check("cuDeviceGet", unsafe { (driver.device_get)(&mut device, index) })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.primary_retain)(&mut handle, device) })?;
        let major = driver.attribute(device, CAPABILITY_MAJOR)?;
        let minor = driver.attribute(device, CAPABILITY_MINOR)?;
        let multiprocessors = driver.attribute(device, MULTIPROCESSORS)?;
        Ok(Context { driver, handle: handle as usize, architecture: 10 * major + minor, multiprocessors })
    }

    /// Makes the context current on this thread until the guard is dropped; the caller's comes back then.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn enter(&self) -> Result<Entered<'_>, DriverError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        self.driver.check("cuCtxGetCurrent", unsafe { (self.driver.context_current)(&mut current) })?;
        let is_pushed = current as usize != self.handle;
        if is_pushed {
            // SAFETY: the handle is that of a retained context.
            self.driver.check("cuCtxPushCurrent", unsafe { (self.driver.context_push)(self.handle as Handle) })?;
        }
        Ok(Entered { context: self, is_pushed })
    }
}

/// A thread on which a context is current.
pub struct Entered<'a> {
    context: &'a Context,
    is_pushed: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut previous = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed; a failure could not be handled here, and leaves nothing undone.
            unsafe { (self.context.driver.context_pop)(&mut previous) };
        }
    }
}

impl Entered<'_> {
    /// Loads an image (a cubin) and finds its kernel. The image stays loaded as long as the process.
    ///
    /// # Errors
    /// An image that is broken or made for another device, or has no such kernel.
    pub fn load(&self, image: &[u8], entry: &CStr, shared: u32) -> Result<Function, DriverError> {
        let driver = self.context.driver;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the driver reads an ELF image, whose headers bound it, and copies what it needs.
        driver.check("cuModuleLoadData", unsafe { (driver.module_load)(&mut module, image.as_ptr().cast()) })?;
        // SAFETY: the module was just loaded; the name is zero-terminated.
        let status = unsafe { (driver.module_function)(&mut function, module, entry.as_ptr()) };
        driver.check("cuModuleGetFunction", status)?;
        if shared > SHARED_WITHOUT_ASKING {
            // SAFETY: the function was just found.
            let status = unsafe { (driver.function_attribute)(function, MAX_DYNAMIC_SHARED, shared as c_int) };
            driver.check("cuFuncSetAttribute", status)?;
        }
        Ok(Function(function as usize))
    }

    /// Whether a CUDA graph takes down what is queued on a stream of this context.
    ///
    /// # Errors
    /// The default stream, while a capture forbids its use.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool, DriverError> {
        let driver = self.context.driver;
        let mut status = NOT_CAPTURING;
        // SAFETY: torch's own handle of a stream; writes one integer.
        driver.check("cuStreamIsCapturing", unsafe { (driver.stream_capturing)(stream.0 as Handle, &mut status) })?;
        Ok(status != NOT_CAPTURING)
    }

    /// Queues a kernel on a stream.
    ///
    /// # Errors
    /// The driver refuses the launch; nothing runs then.
    ///
    /// # Safety
    /// `parameters` must match the kernel's in number, size and meaning, and what they point at on the device must
    /// stay valid until the kernel has run.
    pub unsafe fn launch(
        &self,
        function: Function,
        launch: Launch,
        stream: Stream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let Launch { grid, threads, shared } = launch;
        let (function, stream) = (function.0 as Handle, stream.0 as Handle);
        // SAFETY: handles of this context; the parameters are the caller's contract.
        let status = unsafe {
            let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            (self.context.driver.launch_kernel)(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, extra)
        };
        self.context.driver.check("cuLaunchKernel", status)
    }
}

/// A symbol's name without its closing zero.
fn name_of(symbol: &'static [u8]) -> &'static str {
    std::str::from_utf8(&symbol[..symbol.len() - 1]).unwrap_or("a function")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so() {
        match Driver::get() {
            Ok(_) => {}
            Err(error) => assert!(error.to_string().contains("NVIDIA driver"), "{error}"),
        }
    }
}
