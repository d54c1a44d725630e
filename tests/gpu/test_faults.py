"""What goes wrong is said in words before a gradient is touched, and the next call is right.

Kernels share a workspace between calls: what a failed launch leaves there must reach no other.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradclip
from gradclip import _core, cuda, images
from tests import oracle

from .support import DEVICE, bits, clips_exactly, parameters, refused, run_alone

pytestmark = pytest.mark.gpu

PACKAGE = Path(gradclip.__file__).parent
PACKED = Path("kernels", "images")


def mixed() -> list[Tensor]:
    """Gradients of two types: every step takes two launches."""
    return [torch.randn(70_001, device=DEVICE), torch.randn(5000, device=DEVICE).bfloat16()]


@contextmanager
def no_more_memory() -> Iterator[None]:
    """The device gives torch's allocator nothing; what the allocator holds, it may hand out."""
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def clip_without_memory_for_the_workspace() -> None:
    torch.manual_seed(0)
    tensors = mixed()
    made = parameters(tensors)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # The stream's first segment is 2 MiB: there is room for a result, but for no workspace.
        sizes = (1 << 20, (1 << 20) - 4096)
        full = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
        with refused(tensors, "out of memory", torch.OutOfMemoryError), no_more_memory():
            gradclip.clip_(made, 1.0)
        with refused(tensors, "out of memory", torch.OutOfMemoryError), no_more_memory():
            gradclip.clip_grad_value_(made, 0.5)
        del full
        clips_exactly(tensors)


def scale_without_memory_for_the_work_list() -> None:
    torch.manual_seed(0)
    whole = torch.randn(20_000, device=DEVICE)
    pieces = list(whole.split(1))
    expected = whole.cpu() * 0.5
    gradclip.scale_([torch.ones(1, device=DEVICE)], 0.5)  # makes the workspace
    with refused([whole], "out of memory", torch.OutOfMemoryError), no_more_memory():
        gradclip.scale_(pieces, 0.5)
    gradclip.scale_(pieces, 0.5)
    assert torch.equal(whole.cpu(), expected)


@pytest.mark.parametrize(
    "function", [clip_without_memory_for_the_workspace, scale_without_memory_for_the_work_list]
)
def test_memory_that_is_not_to_be_had(function: Any) -> None:
    run_alone(function)


def image_of(entry: str) -> images.Image:
    return images.image_for(_core.architecture(0), entry)


def refuse(patch: pytest.MonkeyPatch, entry: str) -> None:
    """The driver refuses the launches of an entry: no block may have so many threads."""
    sound, refused_one = cuda._kernel, cuda.loaded(0, replace(image_of(entry), threads=4096))

    def found(device: int, name: str) -> cuda._Kernel:
        known = sound(device, name)
        return known._replace(code=refused_one) if name == entry else known

    patch.setattr(cuda, "_kernel", found)
    patch.setattr(cuda.CudaEngine, "_step", cuda.CudaEngine._prepared)  # keeps none with a plan


NOT_STARTED = "kernel `{}` did not start.*`cuLaunchKernel` failed: .*CUDA error"


@pytest.mark.parametrize("entry", ["sums_2_float32", "sums_2_bfloat16", "scale_float32"])
def test_a_launch_that_the_driver_refuses(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = mixed()
    with monkeypatch.context() as patch:
        refuse(patch, entry)
        with refused(tensors, NOT_STARTED.format(entry.split("_")[0])):
            gradclip.clip_(parameters(tensors), 1.0)
    clips_exactly(tensors)


def test_a_refused_value_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = mixed()
    with monkeypatch.context() as patch:
        refuse(patch, "clamp_float32")
        with refused(tensors, "float32 were not changed: " + NOT_STARTED.format("clamp")):
            gradclip.clip_grad_value_(parameters(tensors), 0.5)
    clips_exactly(tensors)


def test_a_second_refused_write_says_what_the_first_did(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = mixed()
    copies = [tensor.cpu().clone() for tensor in tensors]
    refuse(monkeypatch, "scale_bfloat16")
    with pytest.raises(RuntimeError, match="bfloat16 were not changed, those of float32 were: ker"):
        gradclip.clip_(parameters(tensors), 1.0)
    clipped = oracle.clipped(copies[0], oracle.total_norm(copies), 1.0)
    for tensor, wanted in zip(tensors, (clipped, copies[1]), strict=True):
        assert torch.equal(bits(tensor.cpu()), bits(wanted))


def test_a_refused_finish_of_sums_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = mixed()
    engine = cuda.CudaEngine(_core.Gradients.from_tensors(tensors), 0)
    sums = engine.sums(2.0)
    with monkeypatch.context() as patch:
        refuse(patch, "sums_2_float32")
        with refused(tensors, NOT_STARTED.format("sums")):
            engine.finish(sums, 2.0, 1.0, 0.0, 1.0)
    clips_exactly(tensors)


def test_shared_memory_that_no_device_has() -> None:
    with pytest.raises(RuntimeError, match=r"kernel `scale` did not start.*cuFuncSetAttribute"):
        cuda.loaded(0, replace(image_of("scale_float32"), shared=1 << 30))


def test_damaged_code_is_refused_by_the_driver() -> None:
    image = image_of("scale_float32")
    with pytest.raises(RuntimeError, match="kernel `scale` did not start"):
        cuda.loaded(0, replace(image, code=image.code[:200] + bytes(len(image.code) - 200)))


def damaged_copy(folder: Path, *entries: str) -> Path:
    """A copy of what is installed, in which a byte of each image of these entries is flipped."""
    shutil.copytree(PACKAGE, folder / "gradclip")
    packed = folder / "gradclip" / PACKED
    for line in json.loads((packed / "manifest.json").read_text())["images"]:
        if line["entry"] in entries:
            content = bytearray((packed / line["file"]).read_bytes())
            content[line["offset"] + line["length"] // 2] ^= 1
            (packed / line["file"]).write_bytes(content)
    return folder


def clip_with_damaged_images() -> None:
    assert PACKAGE.parent.name == "damaged"
    for dtype in (torch.bfloat16, torch.float16):
        tensors = [torch.randn(1000, device=DEVICE).to(dtype)]
        with refused(tensors, "reinstall gradclip", images.ImageError):
            gradclip.clip_(parameters(tensors), 1.0)
    clips_exactly([torch.randn(1000, device=DEVICE)])


def clip_with_the_first_image_damaged() -> None:
    tensors = [torch.randn(1000, device=DEVICE).bfloat16()]
    for _ in range(2):
        with refused(tensors, "reinstall gradclip", images.ImageError):
            gradclip.clip_(parameters(tensors), 1.0)


@pytest.mark.skipif(not (PACKAGE / PACKED).exists(), reason="needs packed images, of a wheel")
def test_a_flipped_byte_in_the_installed_images(tmp_path: Path) -> None:
    folder = damaged_copy(tmp_path / "damaged", "sums_2_bfloat16", "scale_float16")
    run_alone(clip_with_damaged_images, folder)
    folder = damaged_copy(tmp_path / "first", "scale_float32")
    run_alone(clip_with_the_first_image_damaged, folder)


def test_an_unserved_device_takes_the_reference_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_image(architecture: int, entry: str) -> None:
        raise images.NoImageError(f"no image of {entry} for sm_{architecture}")

    monkeypatch.setattr(images, "image_for", no_image)
    cuda._kernel.cache_clear()
    cuda.is_served.cache_clear()
    try:
        with pytest.warns(UserWarning, match="torch operations"):
            clips_exactly([torch.randn(1000, device=DEVICE)])
    finally:
        cuda._kernel.cache_clear()
        cuda.is_served.cache_clear()


def test_error_if_nonfinite_writes_nothing() -> None:
    tensors = mixed()
    tensors[0][5] = torch.nan
    with refused(tensors, "non-finite.*: the gradient of parameter 0 holds 1 NaN of"):
        gradclip.clip_(parameters(tensors), 1.0, error_if_nonfinite=True)
