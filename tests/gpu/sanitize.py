"""Every kernel once over awkward gradients, for the sanitizer; small, as that is slow.

`compute-sanitizer --tool memcheck python -m tests.gpu.sanitize`, and with racecheck and initcheck.
The value of each total is checked too.
"""

import math

import torch

import gradclip

from .support import DEVICE, REAL, device_sums, heavy, host_sums, parameters


def awkward(dtype: torch.dtype) -> list[torch.Tensor]:
    """Odd offsets, rows, heavy tails, a few small elements, infinities and NaN."""
    whole = torch.arange(1, 9001, dtype=torch.float64).sqrt().to(dtype).to(DEVICE)
    tails = heavy(3001, dtype)
    small = torch.exp2(-torch.arange(5000, device=DEVICE) % 20.0).to(dtype)
    bad = torch.tensor([1.0, math.nan, -math.inf, math.inf, 0.0], dtype=dtype, device=DEVICE)
    return [
        whole[1:4000],
        whole[4003:4004],
        whole[5000:9000].view(40, 100)[:, 3:77],
        small,
        tails,
        bad,
    ]


def main() -> None:
    """Sums for each dtype and p, then scaling and clamping."""
    for dtype in REAL:
        tensors = awkward(dtype)
        for p in (0.0, 1.0, 2.0, 3.0, 5.0, math.inf, -math.inf):
            assert device_sums(tensors, p) == host_sums(tensors, p), (dtype, p)
        gradclip.clip_(parameters(tensors[:5]), 1.0)
        gradclip.clip_grad_value_(parameters(tensors), 0.5)
    numbers = torch.complex(torch.arange(999.0), torch.arange(999.0).flip(0)).to(DEVICE)
    for p in (0.0, 1.0, 2.0, 3.0, math.inf):
        assert device_sums([numbers], p) == host_sums([numbers], p), p
    torch.cuda.synchronize()
    print("all totals are right")


if __name__ == "__main__":
    main()
