"""The README does what it says: its Python and its commands are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

METRIC = """
def top1(outputs, data):
    return float((outputs["output"].argmax(1) == data["label"]).mean())
"""


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def user_folder(my_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the README speaks of."""
    folder = my_model.parent
    rng = np.random.default_rng(0)
    for name in ("samples", "test"):
        x = rng.standard_normal((24, 3, 32, 32)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, label=np.full(24, 3))
    (folder / "my_metric.py").write_text(METRIC)
    monkeypatch.chdir(folder)
    return folder


def test_the_python_of_the_readme(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a line of the README's Python raises, or its last two checks don't hold."""
    found = blocks("python")
    assert found
    for code in found:
        exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-2:] == ["True", "True"]


def test_the_commands_of_the_readme(user_folder: Path, cli: Any) -> None:
    """Fails if a command under "Your own model" doesn't work as written."""
    section = README.partition("## Your own model")[2].partition("\n## ")[0]
    commands = [
        line[2:] for block in blocks("console", section) for line in block.splitlines() if line.startswith("$ ")
    ]
    assert len(commands) >= 7
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "accel"
        # Less of the same: what is tested is that the words are right, not the figures.
        faster = ["--rounds", "5"] if words[1] in ("optimize", "bench") else []
        faster += ["--fixed-session"] if words[1] == "optimize" else []
        ran = cli(*words[1:], *faster, "-q")
        assert ran.code == 0, f"{command}: {ran.stderr}"


def test_the_ten_options_of_the_readme() -> None:
    """Fails if the README's table of options isn't of ten, or an example in it can't be given to ``accel optimize``."""
    from accel.cli.optimize import command
    from accel.cli.options import read_dims
    from accel.signature import TensorSpec

    section = README.partition("## Your own model")[2].partition("\n## ")[0]
    examples = re.findall(r"^\| `(--[^`]+)` \|", section, flags=re.MULTILINE)
    assert len(examples) == 10
    words = [word for example in examples for word in shlex.split(example)]
    asked = command.make_context("optimize", ["my.onnx", "-o", "out", *words]).params
    assert [TensorSpec.parse(text).values for text in asked["inputs"]] == [(0, 30521)]
    assert list(read_dims(asked["dims"])) == ["length"]


def test_the_commands_about_optimizing(user_folder: Path, cli: Any) -> None:
    """Fails if a command of docs/optimize.md doesn't work as written, or it speaks of an option that there isn't."""
    from importlib import import_module

    from accel.cli import COMMANDS

    text = (ROOT / "docs" / "optimize.md").read_text(encoding="utf-8")
    used = [import_module(COMMANDS[name][0]).command for name in ("export", "optimize", "bench", "preflight", "bisect")]
    known = {word for command in used for parameter in command.params for word in parameter.opts}
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", text)) - known == {"--help"}

    np.savez(user_folder / "labels.npz", label=np.full(24, 3))
    assert cli("export", "my_model.py:make", "--input", "x:float32[batch,3,32,32]", "-o", "my.onnx", "-q").code == 0
    commands = [shlex.split(line[2:]) for block in blocks("console", text) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["accel", n] for n in ("optimize", "preflight", "optimize", "bench")]
    fewer = {"optimize": ["--rounds", "5", "--fixed-session"], "preflight": []}
    fewer["bench"] = ["--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0"]
    for words in commands:
        ran = cli(*words[1:], *fewer[words[1]], "-q")
        assert ran.code == 0, f"{shlex.join(words)}: {ran.stderr}"


def test_the_commands_about_checkpoints(user_folder: Path, cli: Any, tmp_path: Path) -> None:
    """Fails if a command of docs/checkpoints.md doesn't work as written on a checkpoint of that kind."""
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
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    commands = [line[2:] for block in blocks("console", text) for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        ran = cli(*words[1:], "-q")
        assert ran.code == 0, f"{command}: {ran.stderr}"


def test_every_target_and_extra_is_in_the_readme() -> None:
    """Fails if a target or an extra is added and the README doesn't know it."""
    import tomllib

    from accel.target import TARGETS

    for name in TARGETS:
        assert f"`{name}`" in README
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in extras:
        assert f"`{name}`" in README or f"[{name}]" in README, name


def test_every_dependency_says_why() -> None:
    """Fails if a dependency stands in pyproject.toml without its reason, or a pin in constraints.txt isn't exact, or is
    there twice."""
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
    """The name of a distribution in the one form of its many that is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned() -> None:
    """Fails if a requirement of accel, of one of its extras or of its build stands in no pin of constraints.txt, a pin
    is not what pyproject.toml asks for, or packages that are one release in two builds are of two releases."""
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
