"""What is installed is what the checkout holds."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
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


# What each part may import of accel, beside itself and what every part shares. ``accel`` is what lies at its top.
SHARED = {
    "artifact", "cache", "child", "cpu", "errors", "key_values", "memory", "progress", "signature", "stage",
    "stage_table", "target",
}  # fmt: skip
MAY_IMPORT = {
    "accel": set(),
    "accel/sources": set(),
    "accel/plan": set(),
    "accel/runtimes": {"sources", "kernels"},
    "accel/graph": {"sources", "runtimes"},
    "accel/verify": {"sources", "runtimes"},
    "converters": {"sources", "runtimes", "kernels", "graph", "verify"},
    "accel/bench": {"runtimes", "verify"},
    "accel/train": {"sources", "plan"},
    "accel/optimizer": {"sources", "runtimes", "verify", "converters", "bench"},
    "accel/examples": {"sources"},
    "serve": {"sources", "runtimes"},
    "accel/api": {
        "sources", "runtimes", "verify", "converters", "bench", "train", "optimizer", "plan", "graph",
    },
}  # fmt: skip
GRPC = {"serve/grpc_front.py", "serve/client.py", "serve/ray_app.py"}
RUNTIMES = {"onnxruntime", "openvino", "torch", "tensorrt", "tensorrt_rtx_bindings", "tensorflow", "ncnn"}


def imported(text: str) -> Iterator[str]:
    """The full names that a module imports, anywhere in it; of accel also what it takes from ``import accel``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "accel")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "accel":
            yield f"accel.{node.attr}"


def test_the_ways_to_import_are_all_seen() -> None:
    """Fails if one of the forms of an import is missed, or a name that only begins alike is taken for a part."""
    forms = ["import accel.bench", "from accel import bench", "from accel.bench import paired"]
    for text in (*forms, "def f():\n import accel.bench.paired", "import accel\naccel.bench.compare()"):
        assert {name.split(".")[1] for name in imported(text)} == {"bench"}, text
    assert [name.split(".")[1] for name in imported("from accel.stage_table import STAGES")] == ["stage_table"]


def test_nothing_imports_upwards() -> None:
    """Fails if a part leans on one that stands above or beside it; if the kernels import more of accel than its errors;
    if grpc is imported by another module than the three that speak it, or serve runs a model but by a Session."""
    parts = {*MAY_IMPORT, "accel/cli", "kernels"}
    found = {str(p.parent.relative_to(ROOT)) for p in (ROOT / "accel").glob("*/*.py") if not p.parent.is_symlink()}
    assert found <= parts, "a part without a row"
    for part in parts - {"accel/cli"}:
        files = list((ROOT / part).glob("*.py") if part == "accel" else (ROOT / part).rglob("*.py"))
        assert files, part
        own = part.rpartition("/")[2]
        may = {"errors", own} if part == "kernels" else {*SHARED, *MAY_IMPORT[part], own}
        for path in files:
            name = str(path.relative_to(ROOT))
            if name in ("accel/__init__.py", "accel/__main__.py"):  # the public names and the command
                continue
            for what in imported(path.read_text(encoding="utf-8")):
                package, _, rest = what.partition(".")
                if package == "accel" and not rest.startswith("__"):  # its version, its file
                    assert rest.partition(".")[0] in may, f"{name} imports {what}"
                assert not package.startswith("grpc") or name in GRPC, f"{name} imports {what}"
                assert part != "serve" or package not in RUNTIMES, f"{name} imports {what}"


def test_nothing_that_runs_imports_the_tuner() -> None:
    """Fails if a module other than the command, which is what tunes, imports ``accel.kernels.tune`` or names it for
    loading at first use: a server would load and, worse, might time kernels while it serves."""
    tuner = re.compile(r"accel\.kernels\.tune([.:]|$)")
    found = set()
    for path in [p for d in ("accel", "converters", "kernels", "serve") for p in (ROOT / d).rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        names = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if any(map(tuner.match, [*imported(text), *names])):
            found.add(str(path.relative_to(ROOT)))
    assert found == {"accel/cli/kernels.py"}


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
