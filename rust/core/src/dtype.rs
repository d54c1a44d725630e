//! The element types whose gradients the engines read.

/// Element type of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16: the upper half of an IEEE binary32.
    Bf16 = 1,
    /// IEEE binary32.
    F32 = 2,
    /// IEEE binary64.
    F64 = 3,
    /// Two binary32: real, imaginary.
    C64 = 4,
    /// Two binary64: real, imaginary.
    C128 = 5,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
            DType::F64 | DType::C64 => 8,
            DType::C128 => 16,
        }
    }

    /// The name that torch prints.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::C64 => "complex64",
            DType::C128 => "complex128",
        }
    }

    /// Whether totals over such gradients are returned as float64 by default.
    pub const fn is_double(self) -> bool {
        matches!(self, DType::F64 | DType::C128)
    }

    /// Whether an element is a pair of reals.
    pub const fn is_complex(self) -> bool {
        matches!(self, DType::C64 | DType::C128)
    }
}
