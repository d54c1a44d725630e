"""Parameter shapes of real models, and parameters with gradients in those shapes."""

from collections.abc import Iterable

import torch
from torch import nn

Shape = tuple[int, ...]

GRADIENT_SIZE = 1e-2  # standard deviation: no float16 overflow, few float16 subnormals


def gpt2_small() -> list[Shape]:
    """The 148 tensors (124,439,808 elements) of GPT-2 small, its output layer tied."""
    width, vocabulary, context, blocks = 768, 50257, 1024, 12
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    network = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block: list[Shape] = [*norm, *attention, *norm, *network]
    return [(vocabulary, width), (context, width), *(block * blocks), *norm]


def parameters(
    shapes: Iterable[Shape], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> list[nn.Parameter]:
    """Parameters of these shapes, each with a Gaussian gradient of its own memory."""
    generator = torch.Generator(device).manual_seed(seed)
    result = []
    for shape in shapes:
        gradient = torch.randn(shape, generator=generator, device=device) * GRADIENT_SIZE
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        parameter.grad = gradient.to(dtype)
        result.append(parameter)
    return result
