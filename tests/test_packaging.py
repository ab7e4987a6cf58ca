"""Proves that an installation holds the same files as the checkout."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

from tests.support import ROOT


def _through_a_link(path: Path) -> bool:
    return any(folder.is_symlink() for folder in path.parents)


def test_the_symlinks_are_tracked_as_links() -> None:
    """Fails if accel contains a copy of converters, kernels or serve instead of a link."""
    for name in ("converters", "kernels", "serve"):
        link = ROOT / "accel" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    """Fails if the wheel lacks a module of a linked folder, a CUDA source or py.typed. Also fails if the wheel has a
    top-level folder other than accel."""
    checkout = tmp_path / "checkout"  # the build writes folders into this copy
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
    sources = [*ROOT.glob("accel/kernels/native/csrc/*.*"), *ROOT.glob("accel/kernels/native/csrc/cutlass/*.*")]
    sources += ROOT.glob("accel/kernels/native/plugins/*.*")
    sources += ROOT.glob("accel/serve/transports/native/csrc/*.*")
    assert len(sources) > 10
    for path in [*ROOT.glob("converters/*.py"), *ROOT.glob("accel/*/*.py"), *sources]:
        inside = path.relative_to(ROOT)
        expected = inside if inside.parts[0] == "accel" else Path("accel") / inside
        assert str(expected) in names, expected
    assert "accel/py.typed" in names
    texts = ("inference.binpb", "grpc_service.proto", "model_config.proto", "LICENSE.txt")
    assert {f"accel/serve/protocol/{name}" for name in texts} <= set(names)
    assert "accel/serve/transports/http/live.html" in names


PARTS = ("converters", "kernels", "serve")
SOURCES = [path for folder in ("accel", *PARTS) for path in (ROOT / folder).rglob("*.py") if not _through_a_link(path)]


def test_parts_are_imported_through_accel() -> None:
    """Fails if a module imports ``converters``, ``kernels`` or ``serve`` as a top-level package. A top-level import of
    these packages loads modules twice in a checkout, and fails in a wheel."""
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & set(PARTS), f"{path} imports {names}"


def test_a_checkout_without_links_says_so(tmp_path: Path) -> None:
    """Checks that the error of ``import accel`` names the git setting to change if the checkout's links are text files.
    Git writes text files if its support for links is off."""
    shutil.copytree(ROOT / "accel", tmp_path / "accel", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PARTS:
        (tmp_path / "accel" / name).unlink()
        (tmp_path / "accel" / name).write_text(f"../{name}")
    ran = subprocess.run(
        [sys.executable, "-c", "import accel"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 1
    assert "git config core.symlinks true" in ran.stderr.splitlines()[-1]


def test_nothing_that_runs_names_the_tuner() -> None:
    """Fails if a module holds the name ``accel.kernels.choose.tune`` as a string, because the module could then load
    the tuner at run time. A server with the tuner might time kernels while it serves requests. This test checks
    strings, because import-linter checks only import statements."""
    tuner = re.compile(r"accel\.kernels\.choose\.tune([.:]|$)")
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not tuner.match(node.value), path


def test_files_and_folders_are_small_and_names_are_plain() -> None:
    """Fails if a file exceeds 450 lines, or if a file's name is too vague. Also fails if a folder holds over 15 files,
    except the commands and the benchmarks."""
    tests = list((ROOT / "tests").rglob("*.py"))
    for path in [*SOURCES, *tests, *(ROOT / "benchmarks").rglob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 450, path
        assert not any(word in path.stem for word in ("utils", "helpers", "manager", "handler", "processor")), path
    for folder, files in Counter(path.parent for path in [*SOURCES, *tests]).items():
        assert files <= 15 or folder == ROOT / "accel" / "cli", folder


def test_every_folder_says_what_lives_there() -> None:
    """Checks that each package has a docstring of its own in ``__init__.py``."""
    for path in SOURCES:
        if path.name == "__init__.py":
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            assert len(said) > 40, path


def test_an_errors_text_becomes_one_line_in_one_place() -> None:
    """Fails if a module joins the lines of an error itself instead of calling ``accel.errors.one_line``. Also fails if
    ``one_line`` loses text, keeps a line break or exceeds the given length."""
    from accel.errors import one_line

    error = ValueError("first\n\n  second\tthird " + "x" * 400)
    assert one_line(error, None) == "first second third " + "x" * 400
    assert one_line(error, 12) == "first second"
    assert len(one_line(error)) == 300
    folding = re.compile(r"""["'] ["']\.join\(str\(\w+\)\.split\(\)\)""")
    for folder in ("accel", "converters", "kernels", "serve"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.name == "errors.py" or not folding.search(path.read_text(encoding="utf-8")), path
