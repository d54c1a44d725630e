"""Gradients on the device, and the same bits on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradclip import _core, cuda

DEVICE = torch.device("cuda", 0)
REAL = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def parameters(gradients: Sequence[Tensor]) -> list[nn.Parameter]:
    """Parameters that hold these very tensors as gradients."""
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.empty_like(gradient, memory_format=torch.preserve_format))
        parameter.grad = gradient
        made.append(parameter)
    return made


def host_sums(tensors: Sequence[Tensor], p: float) -> list[int]:
    """The sums by the CPU engine."""
    return _core.Gradients.from_tensors([t.cpu() for t in tensors]).sums(p, 8).to_list()


def device_sums(tensors: Sequence[Tensor], p: float) -> list[int]:
    """The sums by the kernels."""
    core = _core.Gradients.from_tensors(list(tensors))
    found: list[int] = cuda.CudaEngine(core, 0).sums(p).tolist()
    return found


def heavy(size: int, dtype: torch.dtype, sigma: float = 8.0) -> Tensor:
    """Log-normal magnitudes of either sign."""
    limit = 0.99 * float(torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).log())
    powers = torch.randn(size, device=DEVICE, dtype=torch.float64) * sigma
    signs = torch.randn(size, device=DEVICE, dtype=torch.float64).sign()
    return (powers.clamp(-limit, limit).exp() * signs).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor."""
    return tensor.detach().contiguous().view(torch.uint8)
