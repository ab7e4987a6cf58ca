"""Reads the machine instructions of each kernel in a compiled library, with cuobjdump."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from accel.errors import BuildFailed, MissingExtra

_MMA = re.compile(r"\b([A-Z]*MMA)\b")


def find_cuobjdump() -> Path:
    """Returns Triton's cuobjdump, or else the cuobjdump on PATH. Raises ``MissingExtra`` without cuobjdump."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if own.is_file():
            return own
    found = shutil.which("cuobjdump")
    if found is None:
        raise MissingExtra("cuobjdump", "kernels")
    return Path(found)


def products(library: Path) -> dict[tuple[str, str], set[str]]:
    """Maps each kernel (architecture, mangled name) to its matrix instructions, such as HMMA, HGMMA or UTCHMMA."""
    command = [str(find_cuobjdump()), "-sass", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"cuobjdump can't read the library {library} ({done.stderr.strip()[:200]}); build it again")
    found: dict[tuple[str, str], set[str]] = {}
    arch, kernel = "", ("", "")
    for line in done.stdout.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ").strip()
        elif "Function : " in line:
            kernel = (arch, line.partition("Function : ")[2].strip())
            found[kernel] = set()
        elif "MMA" in line and kernel in found:
            found[kernel] |= set(_MMA.findall(line))
    return found
