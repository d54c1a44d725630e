//! What the planner is told about one gradient.

use std::ops::Range;

use smallvec::SmallVec;

use crate::dtype::DType;

/// A device, by DLPack's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device {
    /// DLPack device type.
    pub kind: i32,
    /// Which of them.
    pub index: i32,
}

impl Device {
    /// Main memory.
    pub const CPU: Device = Device { kind: 1, index: 0 };

    /// CUDA GPU `index`.
    pub const fn cuda(index: i32) -> Self {
        Device { kind: 2, index }
    }

    /// Whether this is main memory.
    pub const fn is_cpu(self) -> bool {
        self.kind == Device::CPU.kind
    }

    /// Whether this is a CUDA GPU.
    pub const fn is_cuda(self) -> bool {
        self.kind == Device::cuda(0).kind
    }

    /// Whether the fused engines run there, and addresses are those of bytes.
    pub const fn is_fusible(self) -> bool {
        self.is_cpu() || self.is_cuda()
    }
}

/// One strided gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Address of the element with all indices 0; any value without elements.
    pub address: u64,
    /// Size of each dimension.
    pub sizes: SmallVec<[i64; 4]>,
    /// Elements (not bytes) between neighbours, for each dimension.
    pub strides: SmallVec<[i64; 4]>,
    /// Element type.
    pub dtype: DType,
    /// Where the memory is.
    pub device: Device,
    /// The logical row-major elements that this rank counts; `None`: all. Scaling covers the whole tensor regardless.
    pub owned: Option<Range<u64>>,
}
