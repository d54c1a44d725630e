"""Lists of gradients: shapes of real models, and the mixtures that are hard to serve."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benches.shapes import Shape, gpt2_small

DEVICE = torch.device("cuda", 0)
SIGMA = 1e-3


def mixed_sizes(count: int = 740, elements: int = 5_490_000_000) -> list[Shape]:
    """Sizes spread evenly over the logarithm of their range, from a thousand to 75 million."""
    made = torch.Generator().manual_seed(7)
    spread = torch.rand(count, generator=made, dtype=torch.float64) * math.log(6e4)
    sizes = spread.exp() * 1e3
    scaled = sizes * (elements / float(sizes.sum()))
    return [(max(8, int(size)) // 8 * 8,) for size in scaled.tolist()]


def llama_3_8b() -> list[Shape]:
    """The 291 tensors of Llama-3-8B."""
    width, hidden, pair = 4096, 14336, 1024
    attention: list[Shape] = [(width, width), (pair, width), (pair, width), (width, width)]
    network: list[Shape] = [(hidden, width), (hidden, width), (width, hidden)]
    block = [*attention, *network, (width,), (width,)]
    return [(128256, width), *(block * 32), (width,), (128256, width)]


def moe_share() -> list[Shape]:
    """What a rank holds of a 30B mixture of experts: 2,400 matrices."""
    return [*[(1024, 2048)] * 2304, *[(2048, 2048)] * 96]


def many_small() -> list[Shape]:
    """5,000 tensors of 1,000 elements."""
    return [(1000,)] * 5000


def one_large() -> list[Shape]:
    """One tensor that 32 bits do not count."""
    return [(2**31 + 8,)]


SHAPES = {
    "740 mixed sizes": mixed_sizes,
    "Llama-3-8B": llama_3_8b,
    "MoE share": moe_share,
    "5,000 x 1,000": many_small,
    "2^31 + 8": one_large,
    "GPT-2 small": gpt2_small,
}


def parameters(shapes: list[Shape], dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    """Parameters with Gaussian gradients; element types take turns. Data are gradients' own."""
    made = []
    for place, shape in enumerate(shapes):
        gradient = torch.empty(shape, dtype=dtypes[place % len(dtypes)], device=DEVICE)
        parameter = nn.Parameter(gradient)
        parameter.grad = gradient
        made.append(parameter)
    fill(made, "gaussian")
    return made


def gradients(params: list[nn.Parameter]) -> list[Tensor]:
    """Their gradients."""
    return [parameter.grad for parameter in params if parameter.grad is not None]


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.view(-1).split(1 << 27)


@torch.no_grad()
def fill(params: list[nn.Parameter], how: str) -> None:
    """Gaussian elements; or all but 1% of rows zero; or log-normal ones (sigma 8, of ln)."""
    for part in (part for gradient in gradients(params) for part in _slices(gradient)):
        part.normal_(0, SIGMA)
        if how == "zero rows":
            rows = part[: part.numel() // 4096 * 4096].view(-1, 4096)
            rows[torch.rand(len(rows), device=DEVICE) > 0.01] = 0
        elif how == "heavy tails":
            wide = torch.empty(part.numel(), device=DEVICE).normal_(0, 8)
            part.copy_(wide.clamp_(-80, 80).exp_())
