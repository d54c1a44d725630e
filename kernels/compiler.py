"""One entry for one architecture -> its image, without a GPU; kept for the next time."""

import hashlib
import json
import re
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .entries import ENTRIES

C_TYPES = {"i32": "int32_t", "i64": "int64_t", "fp64": "double"}
PTX_TYPES = {"void*": "u64", "int32_t": "u32", "int64_t": "u64", "double": "f64"}
SCRATCH = ("void* global_scratch", "void* profile_scratch")
"""Parameters that Triton adds after a kernel's own."""

OPTIONS = {"enable_fp_fusion": False}
"""The sums are built from error terms: a * b + c must not become one operation unasked."""


class CompileError(RuntimeError):
    """An entry that does not compile, or to something that the launcher cannot launch."""


def compiled(name, architecture, folder):
    """The manifest line and the code of an entry, from the folder if they are kept there.

    Raises:
        CompileError: no such entry, or Triton refuses it or the architecture.
    """
    entry = next((entry for entry in ENTRIES if entry.name == name), None)
    if entry is None:
        raise CompileError(f"there is no kernel entry `{name}`")
    if not hasattr(entry.kernel, "cache_key"):
        raise CompileError("Triton interprets kernels in this process; unset TRITON_INTERPRET")
    path = Path(folder) / f"{_key(entry, architecture)}.image"
    kept = _kept(path)
    if kept is None:
        kept = _compile(entry, architecture)
        _keep(path, *kept)
    facts, code = kept
    return {**_described(entry, architecture), **facts}, code


def _key(entry, architecture):
    """Names an image by all that it depends on; Triton's key covers what the kernel calls."""
    parts = (
        Path(__file__).read_text(encoding="utf-8"),
        entry.kernel.cache_key,
        sorted(entry.signature.items()),
        sorted(entry.constants.items()),
        (entry.warps, entry.registers, architecture, triton.__version__),
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return f"{entry.name}-sm_{architecture}-{key}"


def _described(entry, architecture):
    """What the entry says of its image."""
    constants = {name: _plain(value) for name, value in entry.constants.items()}
    return {
        "entry": entry.name,
        "architecture": architecture,
        "warps": entry.warps,
        "threads": 32 * entry.warps,
        "programs": entry.programs_on.get(architecture, entry.programs),
        "chunk": entry.chunk,
        "constants": constants,
    }


def _plain(value):
    return value if isinstance(value, (bool, int, float)) else str(value)


def _compile(entry, architecture):
    """What Triton made of the entry: facts for the manifest, and the code."""
    types = {name: text.partition(":")[0] for name, text in entry.signature.items()}
    types |= dict.fromkeys(entry.constants, "constexpr")
    names = entry.kernel.arg_names
    if set(names) != set(types):
        other = ", ".join(sorted(set(names) ^ set(types)))
        raise CompileError(f"entry `{entry.name}` and its kernel differ in arguments: {other}")
    source = ASTSource(
        entry.kernel,
        {name: types[name] for name in names},
        constexprs=entry.constants,
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, text in entry.signature.items()
            if text.endswith(":16")
        },
    )
    options = {**OPTIONS, "num_warps": entry.warps, "maxnreg": entry.registers}
    target = GPUTarget("cuda", architecture, 32)
    try:
        kernel = triton.compile(source, target=target, options=options)
    except Exception as error:
        raise CompileError(f"Triton {triton.__version__}: {error}") from error
    return _facts(entry, kernel), kernel.asm["cubin"]


def _facts(entry, kernel):
    needs = ("global_scratch_size", "profile_scratch_size", "tmem_size", "launch_cooperative_grid")
    needed = [name for name in needs if getattr(kernel.metadata, name, None)]
    if needed or kernel.metadata.num_ctas != 1 or kernel.metadata.num_warps != entry.warps:
        raise CompileError(f"`{entry.name}` needs what the launcher does not give: {needed}")
    code = kernel.asm["cubin"]
    return {
        "symbol": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": _registers(code),
        "parameters": _parameters(entry, kernel),
        "size": len(code),
        "sha256": hashlib.sha256(code).hexdigest(),
    }


def _parameters(entry, kernel):
    """C declarations of all parameters; what the code really takes must agree with them."""
    declared = [_declaration(name, entry.signature[name]) for name in entry.signature]
    declared += SCRATCH
    head = re.search(r"\.entry\s+\w+\s*\((.*?)\)", kernel.asm["ptx"], re.DOTALL)
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", head[1] if head else "")
    expected = [PTX_TYPES[declaration.split()[0]] for declaration in declared]
    if found != expected:
        raise CompileError(
            f"`{entry.name}` takes ({', '.join(found)}) from Triton {triton.__version__}; "
            f"expected ({', '.join(expected)})"
        )
    return declared


def _declaration(name, text):
    kind = text.partition(":")[0]
    return f"{'void*' if kind.startswith('*') else C_TYPES[kind]} {name}"


def _registers(code):
    """Registers of a thread, by the tool that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"\bREG:(\d+)", usage)[1])


def _kept(path):
    """Facts and code from an earlier run; None if there are none, or they are damaged."""
    try:
        first, _, code = path.read_bytes().partition(b"\n")
        facts = json.loads(first)
    except (OSError, ValueError):
        return None
    return (facts, code) if hashlib.sha256(code).hexdigest() == facts["sha256"] else None


def _keep(path, facts, code):
    """Written aside and renamed: no other process ever sees half a file.

    A folder that cannot be written costs the time to compile again, and no more.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(json.dumps(facts).encode() + b"\n" + code)
        Path(file.name).replace(path)
