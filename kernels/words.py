"""Elements in memory -> float64: two 16-bit elements a 32-bit word, or one element a word.

Whole words let one load bring 16 bytes a thread, and let integer operations check two 16-bit
elements at once. An element that comes alone is a word whose upper half is zero.
"""

import triton
import triton.language as tl

FRACTION_BITS = {tl.float16: 10, tl.bfloat16: 7, tl.float32: 23, tl.float64: 52}


@triton.constexpr_function
def bias(dtype):
    """Exponent bias of the element type."""
    return 15 if dtype == tl.float16 else 1023 if dtype == tl.float64 else 127


@triton.constexpr_function
def fraction_bits(dtype):
    """Stored bits of the significand."""
    return FRACTION_BITS[dtype]


@triton.constexpr_function
def infinity_bits(dtype):
    """Bits of the type's infinity."""
    exponents = {tl.float16: 0x1F, tl.bfloat16: 0xFF, tl.float32: 0xFF, tl.float64: 0x7FF}
    return (
        exponents[dtype] << {tl.float16: 10, tl.bfloat16: 7, tl.float32: 23, tl.float64: 52}[dtype]
    )


@triton.jit
def load_elements(address, offsets, mask, DTYPE: tl.constexpr):
    """Loads single elements as words."""
    if DTYPE == tl.float64:
        return tl.load(address.to(tl.pointer_type(tl.int64)) + offsets, mask=mask, other=0)
    elif DTYPE == tl.float32:
        return tl.load(address.to(tl.pointer_type(tl.int32)) + offsets, mask=mask, other=0)
    else:
        half = tl.load(address.to(tl.pointer_type(tl.int16)) + offsets, mask=mask, other=0)
        return half.to(tl.int32) & 0xFFFF


@triton.jit
def magnitudes(word, DTYPE: tl.constexpr):
    """The word without the sign bits of its elements."""
    if DTYPE == tl.float64:
        return word & 0x7FFFFFFFFFFFFFFF
    elif DTYPE == tl.float32:
        return word & 0x7FFFFFFF
    else:
        return word & 0x7FFF7FFF


@triton.jit
def narrow(word, DTYPE: tl.constexpr):
    """The word's element, of two the one in the lower half, as float32; float64 stays."""
    if DTYPE == tl.float64:
        return word.to(tl.float64, bitcast=True)
    elif DTYPE == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def narrow_upper(word, DTYPE: tl.constexpr):
    """The element in the upper half of a word, as float32."""
    if DTYPE == tl.bfloat16:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def widen(word, DTYPE: tl.constexpr):
    """As `narrow`, in float64."""
    return narrow(word, DTYPE).to(tl.float64)
