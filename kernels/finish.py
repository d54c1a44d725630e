"""The end of a clip: from the stripes to the total norm and the clip coefficient, in float64."""

import triton
import triton.language as tl

from .carries import LANES, collect
from .chunks import is_last_program
from .limbs import EXTREME, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, SUMS_LENGTH
from .roots import root, square_root, value

COUNT, SUM, SQUARES, POWER, MAX, MIN = (tl.constexpr(kind) for kind in range(6))

NOTHING = tl.constexpr(0)
"""More launches follow: leave the stripes as they are."""
COLLECT = tl.constexpr(1)
"""Write the carried sums, for the caller to merge with those of other devices."""
FINISH = tl.constexpr(2)
"""Write the carried sums, and what they give."""


@triton.jit
def _extreme(key, KIND: tl.constexpr):
    bits = ~key if KIND == MIN else key
    NONE: tl.constexpr = -9223372036854775808
    return tl.where(key == NONE, 0.0, bits.to(tl.float64, bitcast=True))


@triton.jit
def total_norm(sums, limbs, degree, KIND: tl.constexpr):
    """The total norm of carried sums, once in memory and once as int64[LANES].

    degree: p, not negative, of POWER. Non-finite elements follow torch: any NaN gives NaN, else an
    infinity gives infinity (p = 0 counts it, p = +-inf compares it).
    """
    if KIND == MAX or KIND == MIN:
        total = _extreme(tl.load(sums + EXTREME, volatile=True), KIND)
    elif KIND == SQUARES:
        total = square_root(sums, limbs)
    elif KIND == POWER:
        total = root(sums, limbs, degree)
    else:
        total = value(sums, limbs)
    infinities = tl.load(sums + POSITIVE_INFINITY, volatile=True)
    infinities += tl.load(sums + NEGATIVE_INFINITY, volatile=True)
    if KIND == SUM or KIND == SQUARES or KIND == POWER:
        total = tl.where(infinities > 0, float("inf"), total)
    return tl.where(tl.load(sums + NAN, volatile=True) > 0, float("nan"), total)


@triton.jit
def coefficient(total, max_norm, eps):
    """min(1, max_norm / (total + eps)) as `torch.nn.utils.clip_grad_norm_`.

    NaN stays NaN; an infinite `max_norm` gives 1 whatever the total.
    """
    ratio = max_norm / (total + eps)
    nothing = (ratio != ratio) & (total == total)  # 0 / 0: nothing to scale
    ratio = tl.where(nothing | (ratio > 1.0), 1.0, ratio)
    return tl.where(max_norm == float("inf"), 1.0, ratio)


@triton.jit
def write_result(result, total, max_norm, eps, loss_scale, KIND: tl.constexpr):
    """result: float64[4] = total, coefficient, coefficient / loss scale; float32(total) follows.

    Total and coefficient are those of the gradients divided by the loss scale.
    """
    total = total if KIND == COUNT else total / loss_scale
    clip = coefficient(total, max_norm, eps)
    tl.store(result, total)
    tl.store(result + 1, clip)
    tl.store(result + 2, clip / loss_scale)
    tl.store((result + 3).to(tl.pointer_type(tl.float32)), total.to(tl.float32))


@triton.jit
def _write_sums(stripes, scratch, output):
    sums = collect(stripes, scratch)
    lanes = tl.arange(0, LANES)
    tl.store(output + lanes, sums, mask=lanes < SUMS_LENGTH)
    tl.debug_barrier()
    return sums


@triton.jit
def collect_if_last(stripes, turns, scratch, output, then):
    """The last program to end adds up the stripes, unless more launches follow.

    turns: int32[2], zero before and after: chunks drawn, programs done. output:
    int64[SUMS_LENGTH], the carried sums.
    """
    if is_last_program(turns) & (then != NOTHING):
        _write_sums(stripes, scratch, output)


@triton.jit
def finish_if_last(
    stripes, turns, scratch, output, result, then, max_norm, eps, loss_scale, degree,
    KIND: tl.constexpr,
):  # fmt: skip
    """As `collect_if_last`; the last program then finishes. result: see `write_result`."""
    if is_last_program(turns) & (then != NOTHING):
        sums = _write_sums(stripes, scratch, output)
        if then == FINISH:
            total = total_norm(output, sums, degree, KIND)
            write_result(result, total, max_norm, eps, loss_scale, KIND)
