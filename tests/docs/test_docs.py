"""Proves that the README and the docs are correct. The tests run the Python code and the commands, and check the links,
the pictures and the lists of errors."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Options of ``accel bench`` for a short measurement.
QUICK = ["--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0"]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def fast_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``accel.optimize`` try the candidates of one target, measure few rounds and no session options. The tests
    check that the code runs, not how fast the models are."""
    optimize = accel.optimize

    @functools.wraps(optimize)
    def faster(*arguments: Any, **options: Any) -> Any:
        return optimize(*arguments, **{"target": "ort-cpu", "rounds": 5, "vary_session": False, **options})

    monkeypatch.setattr(accel, "optimize", faster)


@pytest.fixture
def user_folder(my_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with the files that the README uses."""
    folder = my_model.parent
    rng = np.random.default_rng(0)
    for name in ("samples", "test"):
        x = rng.standard_normal((24, 3, 32, 32)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, label=np.full(24, 3))
    (metric,) = blocks("python", (ROOT / "docs" / "how-to" / "optimize.md").read_text(encoding="utf-8"))
    (folder / "my_metric.py").write_text(metric)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return folder


@pytest.mark.usefixtures("fast_optimize")
def test_the_python_of_the_readme(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the README's Python code runs without errors, and that the last two printed lines are True."""
    found = blocks("python")
    assert found
    for code in found:
        exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-2:] == ["True", "True"]


@pytest.mark.usefixtures("fast_optimize")
@pytest.mark.parametrize(("page", "count"), [("own-model.md", 4), ("pipelines.md", 3), ("decoders.md", 2)])
def test_the_python_about_models_in_memory(
    page: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that the Python code of these pages runs without errors. Also checks that a pipeline has the outputs of
    its modules, and that a decoder generates the tokens of its source."""
    monkeypatch.chdir(tmp_path)
    found = blocks("python", (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8"))
    assert len(found) >= count
    code = "\n".join(found)
    (tmp_path / page).write_text(code, encoding="utf-8")  # for inspect, which finds the source code of a loop
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert "False" not in capsys.readouterr().out.splitlines()


def test_the_commands_of_the_readme(user_folder: Path, cli: Any) -> None:
    """Checks that each command under "Your own model" works as written."""
    section = README.partition("## Your own model")[2].partition("\n## ")[0]
    commands = [
        line[2:] for block in blocks("console", section) for line in block.splitlines() if line.startswith("$ ")
    ]
    assert len(commands) >= 7
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "accel"
        # Uses few rounds, because the test checks that the commands run, not how fast the models are.
        faster = {"optimize": ["--rounds", "5", "--fixed-session"], "bench": QUICK}.get(words[1], [])
        ran = cli(*words[1:], *faster, "-q")
        assert ran.code == 0, f"{command}: {ran.stderr}"


def test_the_ten_options() -> None:
    """Checks that the table of options has ten rows, and that ``accel optimize`` accepts the example in each row."""
    from accel.cli.optimize import command
    from accel.cli.options import read_dims
    from accel.signature import TensorSpec

    page = (ROOT / "docs" / "how-to" / "optimize.md").read_text(encoding="utf-8")
    section = page.partition("## The ten options")[2].partition("\n## ")[0]
    examples = re.findall(r"^\| `(--[^`]+)` \|", section, flags=re.MULTILINE)
    assert len(examples) == 10
    words = [word for example in examples for word in shlex.split(example)]
    asked = command.make_context("optimize", ["my.onnx", "-o", "out", *words]).params
    assert [TensorSpec.parse(text).values for text in asked["inputs"]] == [(0, 30521)]
    assert list(read_dims(asked["dims"])) == ["length"]


@pytest.mark.proof
def test_the_commands_about_optimizing(user_folder: Path, cli: Any) -> None:
    """Checks that each command of optimize.md, engines.md and measure.md works as written. Also fails if one of these
    pages names an option that doesn't exist."""
    from importlib import import_module

    from accel.cli import COMMANDS

    pages = ("optimize.md", "engines.md", "measure.md")
    text = "\n".join((ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8") for page in pages)
    used = [import_module(COMMANDS[name][0]).command for name in ("export", "optimize", "bench", "preflight", "bisect")]
    known = {word for command in used for parameter in command.params for word in parameter.opts}
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", text)) - known == {"--help"}

    np.savez(user_folder / "labels.npz", label=np.full(24, 3))
    assert cli("export", "my_model.py:make", "--input", "x:float32[batch,3,32,32]", "-o", "my.onnx", "-q").code == 0
    commands = [shlex.split(line[2:]) for block in blocks("console", text) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["accel", n] for n in ("optimize", "preflight", "optimize", "bench")]
    fewer = {"optimize": ["--rounds", "5", "--fixed-session"], "preflight": []}
    fewer["bench"] = QUICK
    for words in commands:
        ran = cli(*words[1:], *fewer[words[1]], "-q")
        assert ran.code == 0, f"{shlex.join(words)}: {ran.stderr}"


@pytest.mark.proof
def test_the_commands_about_checkpoints(user_folder: Path, cli: Any, tmp_path: Path) -> None:
    """Checks that each command of docs/how-to/checkpoints.md works as written on a checkpoint of the format that the
    page names."""
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    from accel.sources.python_object import load_object

    state = load_object("my_model.py:make", "factory")[1]().state_dict()
    (user_folder / "deepspeed_run" / "step1").mkdir(parents=True)
    (user_folder / "deepspeed_run" / "latest").write_text("step1")
    deepspeed = {"module": state, "buffer_names": [], "param_shapes": None, "ds_version": "0.19.8"}
    torch.save(deepspeed, user_folder / "deepspeed_run" / "step1" / "mp_rank_00_model_states.pt")
    lightning = {"pytorch-lightning_version": "2.6.6", "state_dict": {f"model.{n}": t for n, t in state.items()}}
    torch.save(lightning, user_folder / "run.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state}, checkpoint_id=user_folder / "dcp_run", no_dist=True)
    text = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text(encoding="utf-8")
    commands = [line[2:] for block in blocks("console", text) for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        ran = cli(*words[1:], "-q")
        assert ran.code == 0, f"{command}: {ran.stderr}"


def test_every_target_and_extra_is_in_the_readme() -> None:
    """Fails if the README lacks a target or an extra."""
    import tomllib

    from accel.tables.target import TARGETS

    for name in TARGETS:
        assert f"`{name}`" in README
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in extras:
        assert f"`{name}`" in README or f"[{name}]" in README, name


def test_every_dependency_says_why() -> None:
    """Checks that each dependency in pyproject.toml has a comment with its reason, and that each pin in constraints.txt
    is exact and unique."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if re.match(r'^  "(?!accel-toolchain)[A-Za-z0-9_.-]+[><=]', line):
            assert "# " in line, line
    pins = [
        x for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if x and not x.startswith("#")
    ]
    assert all(re.match(r"^[A-Za-z0-9_.-]+==[^ ]+$", pin) for pin in pins)
    names = [canonical(pin.partition("==")[0]) for pin in pins]
    assert len(set(names)) == len(names)


def canonical(name: str) -> str:
    """Returns the normalized name of a distribution, for comparisons."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned() -> None:
    """Fails if constraints.txt lacks a pin for a dependency of accel, of an extra or of the build. Also fails if a pin
    contradicts pyproject.toml, or if two builds of one package are pinned to different releases."""
    import tomllib

    from packaging.requirements import Requirement

    def pins(path: Path) -> dict[str, str]:
        found = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return {canonical(name): version for name, version in found}

    pinned = pins(ROOT / "constraints.txt")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = declared["project"]
    asked = [*project["dependencies"], *declared["build-system"]["requires"]]
    asked += [line for lines in project["optional-dependencies"].values() for line in lines]
    for wanted in map(Requirement, asked):
        if wanted.name != "accel-toolchain":
            assert canonical(wanted.name) in pinned, str(wanted)
            assert wanted.specifier.contains(pinned[canonical(wanted.name)], prereleases=True), str(wanted)
    assert pinned["onnxruntime-gpu"] == pinned["onnxruntime"]
    assert pinned["tensorflow"] == pinned["tensorflow-cpu"]
    assert pinned["ray"] == pins(ROOT / "tests" / "serve" / "ray.txt")["ray"]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


def _script(name: str) -> Any:
    """Imports a script from docs/ by its path."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_a_page() -> None:
    """Fails if the README exceeds 120 lines."""
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", [p for p in PAGES if "_build" not in p.parts], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Checks that each link from a page to a file of the repository leads to an existing file."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in found:
        assert link.startswith(("http://", "https://")) or (page.parent / link).exists(), link


def test_the_picture_shows_the_committed_figures() -> None:
    """Fails if the README's picture, which shows MiniLM's measurements, differs from the picture that docs/figures.py
    draws."""
    figures = _script("figures")
    for theme in figures.COLORS:
        committed = (ROOT / "docs" / "images" / f"overview-{theme}.svg").read_text(encoding="utf-8")
        assert committed == figures.draw(theme), "run: python docs/figures.py"


def test_every_error_is_explained() -> None:
    """Fails if docs/troubleshooting.md lacks an error class, or explains an error class that no longer exists."""
    from accel import errors

    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (\w+)$", text, flags=re.MULTILINE)) == classes - {"AccelError"}


def test_every_message_is_listed() -> None:
    """Checks that ``docs/messages.py`` finds the error messages in the source."""
    found = set(_script("messages").messages())
    assert len(found) > 500
    assert ("BadSource", "no model is named; give a path, file.py:factory or package.module:factory") in found


def test_every_command_is_in_the_reference() -> None:
    """Fails if docs/reference/commands.md lacks a command."""
    from accel.cli import COMMANDS

    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^\.\. click:: (\S+):command$", text, flags=re.MULTILINE) == [m for m, _ in COMMANDS.values()]


def test_a_plain_checkout_has_something_to_read() -> None:
    """Fails if a page of the reference, which ``make docs`` fills, is empty without it: the page of commands has to say
    what each command does, and the list of messages has to print."""
    from accel.cli import COMMANDS

    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL).lower()
    for name, (_, line) in COMMANDS.items():
        assert f"- `accel {name} --help`: {line}".lower() in plain
    ran = subprocess.run([sys.executable, "docs/messages.py"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "no model is named; give a path" in ran.stdout


def test_the_layers_of_the_architecture_are_those_of_the_linter() -> None:
    """Checks that the layers in docs/architecture.md are the layers that import-linter enforces."""
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (held,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["accel"])
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = blocks("text", page.partition("## Allowed imports")[2])[0].splitlines()
    assert shown == held
