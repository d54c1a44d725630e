"""Kernel images: compiled without a GPU, checked before a launch, refused when damaged."""

import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gradclip import __main__ as command_line
from gradclip import images
from gradclip.images import ImageError
from gradclip.kernels import sources
from gradclip.manifest import LAYOUTS, SCRATCH, Manifest

ROOT = Path(__file__).parent.parent
SMALL = "clamp_float64"
"""The entry that compiles fastest."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, in which Triton compiles whatever other tests asked of it."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment |= {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images: one small entry, for sm_90."""
    folder = tmp_path_factory.mktemp("compiled")
    out, cache = folder / "images", folder / "cache"
    command = f"-m kernels.ahead_of_time --archs 90 --entries {SMALL} --out {out} --cache {cache}"
    done = run(*command.split())
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def folder(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the images, to be damaged."""
    for file in compiled.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool = True) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    if sealed:
        content["seal"] = sources.seal(content)
    path.write_text(json.dumps(content))


def image(folder: Path) -> images.Image:
    manifest = Manifest.read(folder)
    assert manifest is not None
    return manifest.image(90, SMALL)


@needs_triton
def test_image_says_what_a_launch_needs(folder: Path) -> None:
    found = image(folder)
    assert (found.entry, found.symbol, found.architecture) == (SMALL, "clamp", 90)
    assert found.code.startswith(b"\x7fELF")
    assert found.symbol.encode() in found.code
    assert (found.size, found.sha256) == (
        len(found.code),
        hashlib.sha256(found.code).hexdigest(),
    )
    assert found.parameters == LAYOUTS["clamp"] + SCRATCH
    assert found.threads == 32 * found.warps
    assert 0 < found.registers <= 255
    assert found.shared >= 0
    assert found.programs >= 1


@needs_triton
def test_devices_run_the_image_that_serves_them(folder: Path) -> None:
    edit(folder, lambda content: content["serves"].update({"91": 90}))
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert manifest.image(91, SMALL).architecture == 90


@needs_triton
def test_damaged_code_is_refused(folder: Path) -> None:
    path = folder / "sm_90.images"
    packed = bytearray(path.read_bytes())
    packed[len(packed) // 2] ^= 1
    path.write_bytes(packed)
    with pytest.raises(ImageError, match="reinstall gradclip"):
        image(folder)


@needs_triton
def test_truncated_code_is_refused(folder: Path) -> None:
    path = folder / "sm_90.images"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ImageError, match="cannot be read"):
        image(folder)


@needs_triton
def test_other_code_is_refused(folder: Path) -> None:
    other = zlib.compress(image(folder).code[:-1] + b"!")
    (folder / "sm_90.images").write_bytes(other)
    edit(folder, lambda content: content["images"][0].update(length=len(other)))
    with pytest.raises(ImageError, match=f"`{SMALL}` for sm_90 is damaged .its SHA-256"):
        image(folder)


@needs_triton
def test_missing_file_is_refused(folder: Path) -> None:
    (folder / "sm_90.images").unlink()
    with pytest.raises(ImageError, match=r"sm_90\.images cannot be read"):
        image(folder)


@needs_triton
def test_missing_entry_is_refused(folder: Path) -> None:
    edit(folder, lambda content: content["images"].clear())
    with pytest.raises(ImageError, match=f"no image of kernel `{SMALL}` for sm_90"):
        image(folder)


@needs_triton
@pytest.mark.parametrize(
    "parameters",
    [
        [*LAYOUTS["clamp"][1:], LAYOUTS["clamp"][0], *SCRATCH],
        [*LAYOUTS["clamp"], SCRATCH[0]],
        [*LAYOUTS["clamp"], *SCRATCH, "void* more"],
        [],
    ],
    ids=["reordered", "one scratch pointer", "one more", "none"],
)
def test_other_parameters_are_refused(folder: Path, parameters: list[str]) -> None:
    edit(folder, lambda content: content["images"][0].update(parameters=parameters))
    with pytest.raises(ImageError, match="the launcher passes"):
        image(folder)


@needs_triton
def test_unknown_kernel_is_refused(folder: Path) -> None:
    edit(folder, lambda content: content["images"][0].update(symbol="matmul"))
    with pytest.raises(ImageError, match="`matmul`, which this version does not launch"):
        image(folder)


@needs_triton
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "manifest format 2, this version reads 1"),
        ({"triton": "3.5.1"}, "Triton 3.5.1, whose parameters"),
        ({"triton": "4.0.0"}, "Triton 4.0.0, whose parameters"),
        ({"source": "0" * 64}, "other sources than those installed"),
        ({"images": [{}]}, "is damaged"),
        ({"serves": None}, "is damaged"),
    ],
)
def test_manifest_of_something_else_is_refused(
    folder: Path, change: dict[str, object], words: str
) -> None:
    edit(folder, lambda content: content.update(change))
    with pytest.raises(ImageError, match=words):
        Manifest.read(folder)


@needs_triton
@pytest.mark.parametrize("field", ["chunk", "threads", "programs", "offset"])
def test_manifest_with_another_number_is_refused(folder: Path, field: str) -> None:
    """A larger chunk, say, would leave the window of a sum."""

    def flip(content: dict[str, Any]) -> None:
        content["images"][0][field] ^= 1

    edit(folder, flip, sealed=False)
    with pytest.raises(ImageError, match="is not what was sealed"):
        Manifest.read(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ImageError, match="is damaged"):
        Manifest.read(tmp_path)


def test_no_manifest_means_no_images(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None


@needs_triton
def test_every_entry_takes_what_the_launcher_passes() -> None:
    program = (
        "import json; from kernels.compiler import ENTRIES, _declaration as declared; "
        "print(json.dumps([(e.name, e.kernel.__name__, "
        "[declared(*argument) for argument in e.signature.items()]) for e in ENTRIES]))"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    names = [name for name, _, _ in entries]
    assert len(set(names)) == len(names)
    for name, kernel, parameters in entries:
        assert tuple(parameters) == LAYOUTS[kernel], name
    assert {kernel for _, kernel, _ in entries} == set(LAYOUTS)


HERE = (
    "from gradclip import images; images.installed = lambda: None; "
    "image = images.image_for(87, 'clamp_float64'); "
)
"""No packed image serves sm_87, whatever this checkout has."""


@needs_triton
def test_unknown_architecture_is_compiled_once_and_kept(tmp_path: Path) -> None:
    first = run("-c", HERE + "print(image.architecture, len(image.code))", cache=tmp_path)
    assert first.stdout.startswith("87 "), first.stderr
    (kept,) = (tmp_path / "gradclip" / "images").iterdir()
    no_compiler = "from gradclip.kernels import compiler; compiler._compile = None; "
    second = run("-c", no_compiler + HERE + "print(len(image.code))", cache=tmp_path)
    assert second.stdout.split() == first.stdout.split()[1:], second.stderr

    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    third = run("-c", HERE, cache=tmp_path)
    assert third.returncode == 0, third.stderr
    assert kept.read_bytes() == whole


def test_unknown_architecture_without_triton_says_so(tmp_path: Path) -> None:
    done = run("-c", "import sys; sys.modules['triton'] = None; " + HERE, cache=tmp_path)
    assert "NoImageError: no kernel image serves sm_87 and no Triton is installed" in done.stderr
    assert not (tmp_path / "gradclip").exists()


@needs_triton
def test_architecture_that_triton_does_not_know_says_so(tmp_path: Path) -> None:
    done = run("-c", HERE.replace("87", "31"), cache=tmp_path)
    assert "NoImageError: kernel `clamp_float64` cannot be compiled for sm_31" in done.stderr


@needs_triton
def test_command_line_lists_the_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "installed", lambda: Manifest.read(folder))
    found = image(folder)
    assert command_line.main(["kernels"]) == 0
    head, line, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["entry", "image", "bytes", "registers", "shared", "threads", "source"]
    numbers = (found.size, found.registers, found.shared, found.threads)
    assert line.split() == [SMALL, "sm_90", *map(str, numbers), found.source[:12]]
    assert last.startswith("for sm_90; by Triton ")


def test_command_line_without_images_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "installed", lambda: None)
    assert command_line.main(["kernels"]) == 0
    assert "python -m kernels.ahead_of_time" in capsys.readouterr().out


def test_command_line_says_what_is_wrong_with_the_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged() -> None:
        raise ImageError("manifest.json is damaged")

    monkeypatch.setattr(images, "installed", damaged)
    assert command_line.main(["kernels"]) == 1
    assert capsys.readouterr().err == "gradclip: manifest.json is damaged\n"


def test_command_line_alone_prints_its_usage() -> None:
    done = run("-m", "gradclip")
    assert done.returncode == 0
    assert "usage: python -m gradclip" in done.stdout
