"""What is packed: the wheel and the sdist, built by the backend from a copy of this tree."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_COPIED = (".git", ".venv", "target", "images", "dist", "__pycache__", "*.so", ".*_cache")
SOURCES = {f"gradclip/kernels/{source.name}" for source in (ROOT / "kernels").glob("*.py")}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("cargo") is None or find_spec("maturin") is None,
        reason="a wheel is built by cargo and maturin, which are not installed",
    ),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the checkout in which few kernels are compiled, by the Triton that is installed."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    entries = copy / "kernels" / "entries.py"
    entries.write_text(entries.read_text() + "\nENTRIES = ENTRIES[-1:]\n")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return copy
    command = copy / "kernels" / "ahead_of_time.py"
    text = command.read_text()
    changed = text.replace('\nTRITON = "3.6.0"\n', f'\nTRITON = "{triton}"\n')
    assert changed != text or triton == "3.6.0"
    command.write_text(changed)
    return copy


def build(tree: Path, call: str) -> str:
    """Calls a hook of the backend as pip does; returns what it said on standard error."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(tree / "build_backend"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.setdefault("CARGO_TARGET_DIR", str(ROOT / "target"))
    program = f"import gradclip_build as backend; backend.{call}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def packed(folder: Path) -> tuple[Path, set[str]]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return wheel, set(file.namelist())


@pytest.mark.skipif(find_spec("triton") is None, reason="images are compiled by Triton")
def test_wheel_holds_the_package_its_kernels_and_their_images(tree: Path, tmp_path: Path) -> None:
    build(tree, f"build_wheel({str(tmp_path)!r})")
    wheel, names = packed(tmp_path)

    folder = "gradclip/kernels/images"
    images = {name for name in names if name.startswith(folder)}
    assert images == {f"{folder}/manifest.json"} | {
        f"{folder}/sm_{number}.images" for number in (80, 90, 100, 103, 120)
    }
    assert {name for name in names if name.startswith("gradclip/kernels/")} == SOURCES | images
    assert {"gradclip/py.typed", "gradclip/_core.pyi"} <= names
    modules = {path.relative_to(ROOT / "python") for path in ROOT.glob("python/gradclip/**/*.py")}
    assert {path.as_posix() for path in modules} <= names
    assert any(
        name.startswith("gradclip/_core.") and name.endswith((".so", ".pyd")) for name in names
    )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"gradclip"}
    assert not [name for name in names if "__pycache__" in name or "target" in name]

    listed = installed(wheel, tmp_path / "installed", "-m", "gradclip", "kernels")
    assert "for sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120" in listed


def installed(wheel: Path, folder: Path, *arguments: str) -> str:
    """What Python says with the wheel unpacked first in its path, and no Triton to fall back on."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_without_images_says_so(tree: Path, tmp_path: Path) -> None:
    stale = tree / "kernels" / "images"
    stale.mkdir()
    (stale / "manifest.json").write_text("{}")
    said = build(tree, f"build_wheel({str(tmp_path)!r}, {{'images': 'no'}})")
    assert "no kernel images are built: images=no was asked for" in said
    wheel, names = packed(tmp_path)
    assert {name for name in names if name.startswith("gradclip/kernels/")} == SOURCES
    listed = installed(wheel, tmp_path / "installed", "-m", "gradclip", "kernels")
    assert "no kernel images in this installation" in listed


def test_wheel_for_another_triton_says_so(tree: Path, tmp_path: Path) -> None:
    command = tree / "kernels" / "ahead_of_time.py"
    lines = command.read_text().splitlines()
    pinned = ['TRITON = "0.1"' if line.startswith("TRITON = ") else line for line in lines]
    command.write_text("\n".join(pinned))
    said = build(tree, f"build_wheel({str(tmp_path)!r})")
    assert "images are compiled by Triton 0.1" in said
    assert packed(tmp_path)[1] >= SOURCES


def test_sdist_holds_all_that_a_wheel_is_built_from(tree: Path, tmp_path: Path) -> None:
    (tree / "kernels" / "images").mkdir()
    (tree / "kernels" / "images" / "manifest.json").write_text("{}")
    build(tree, f"build_sdist({str(tmp_path)!r})")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        members = {member.name.partition("/")[2]: member for member in file.getmembers()}
    kernels = {f"python/{source}" for source in SOURCES}
    needed = {"pyproject.toml", "Cargo.lock", "LICENSE", "build_backend/gradclip_build.py"}
    assert kernels | needed <= set(members)
    assert all(members[kernel].isfile() for kernel in kernels)
    assert not [name for name in members if "images/" in name or name.endswith(".so")]
    assert not [name for name in members if name.startswith("target/")]


def test_build_asks_for_the_pinned_triton_alone_where_it_exists() -> None:
    text = (ROOT / "kernels" / "ahead_of_time.py").read_text()
    assert '\nTRITON = "3.6.0"\n' in text
    check = (
        "get_requires_for_build_wheel; wants = backend.get_requires_for_build_wheel; "
        "assert any(r.startswith('triton==3.6.0; ') for r in wants({})), wants({}); "
        "assert not any('triton' in r for r in wants({'images': 'no'}))"
    )
    build(ROOT, check)
