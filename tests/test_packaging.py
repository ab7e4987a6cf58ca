"""What is installed is what the checkout holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_symlinks_are_tracked_as_links() -> None:
    """Fails if a copy of converters, kernels or serve lies inside accel instead of a link."""
    for name in ("converters", "kernels", "serve"):
        link = ROOT / "accel" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    """Fails if a module of a linked folder, a CUDA source or py.typed is left out, or a folder lands at the top."""
    checkout = tmp_path / "checkout"  # a build leaves its folders where it runs
    checkout.mkdir()
    for name in ("accel", "converters", "kernels", "serve"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(checkout)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)
    wheel = next(tmp_path.glob("accel_toolchain-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"accel"}
    sources = [*ROOT.glob("accel/kernels/csrc/*.*"), *ROOT.glob("accel/kernels/csrc/cutlass/*.*")]
    sources += ROOT.glob("accel/kernels/plugins/*.*")
    assert len(sources) > 10
    for path in [*ROOT.glob("converters/*.py"), *ROOT.glob("accel/*/*.py"), *sources]:
        inside = path.relative_to(ROOT)
        expected = inside if inside.parts[0] == "accel" else Path("accel") / inside
        assert str(expected) in names, expected
    assert "accel/py.typed" in names
    texts = ("inference.binpb", "grpc_service.proto", "model_config.proto", "LICENSE.txt")
    assert {f"accel/serve/proto/{name}" for name in texts} <= set(names)
    assert "accel/serve/live.html" in names


def test_nothing_imports_upwards() -> None:
    """Fails if a lower part leans on a higher one."""
    rules = {
        "accel/*.py": ("accel.cli", "accel.api", "accel.optimizer", "accel.bench", "accel.serve", "accel.converters"),
        "converters/*.py": ("accel.cli", "accel.api", "accel.optimizer", "accel.bench", "accel.serve", "accel.train"),
        "accel/runtimes/*.py": ("accel.cli", "accel.api", "accel.optimizer", "accel.bench", "accel.converters"),
        "accel/verify/*.py": ("accel.cli", "accel.api", "accel.optimizer", "accel.bench"),
        "accel/sources/*.py": ("accel.cli", "accel.api", "accel.optimizer", "accel.bench", "accel.runtimes"),
        "accel/bench/*.py": ("accel.cli", "accel.api", "accel.optimizer"),
        "accel/api/*.py": ("accel.cli",),
        "kernels/*.py": ("accel.cli", "accel.api", "accel.runtimes", "accel.converters", "accel.verify"),
    }
    for pattern, forbidden in rules.items():
        for path in ROOT.glob(pattern):
            if path.name in ("__init__.py", "__main__.py") and path.parent.name == "accel":
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.strip().startswith(("import ", "from ")):
                    for name in forbidden:
                        assert f" {name}" not in line or f" {name}_" in line, f"{path}: {line.strip()}"


def test_files_are_short_and_names_are_plain() -> None:
    """Fails if a file passes 500 lines or has one of the names that say nothing."""
    for path in [p for d in ("accel", "converters", "kernels", "serve", "tests") for p in (ROOT / d).rglob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path
        assert not any(word in path.stem for word in ("utils", "helpers", "manager", "handler", "processor")), path


def test_an_errors_text_becomes_one_line_in_one_place() -> None:
    """Fails if a module folds the lines of an error by itself instead of by ``accel.errors.one_line``, or that loses
    something, keeps a line break or is longer than it was asked to be."""
    from accel.errors import one_line

    error = ValueError("first\n\n  second\tthird " + "x" * 400)
    assert one_line(error, None) == "first second third " + "x" * 400
    assert one_line(error, 12) == "first second"
    assert len(one_line(error)) == 300
    folding = re.compile(r"""["'] ["']\.join\(str\(\w+\)\.split\(\)\)""")
    for folder in ("accel", "converters", "kernels", "serve"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.name == "errors.py" or not folding.search(path.read_text(encoding="utf-8")), path
