"""Proves that the errors of ``accel train`` name the cause and the fix."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import accel.train.run.launch
from accel.cli import group, run
from accel.errors import BadConfig, BadData, TrainingFailed
from accel.train.config.schema import TrainConfig
from accel.train.run.launch import first_errors, train
from accel.train.run.rank import leave
from tests.support.runs import SMALL, config_of

# Each rank raises a different error. The second rank ignores SIGTERM, waits for the first rank's error file, and then
# raises an error of its own.
_TWO_FAIL = """
import signal, time
from pathlib import Path

def wait_for(file):
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)

def fails(outputs, targets):
    folder = Path(__file__).parent
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "ready").touch()
        wait_for(folder / "run/errors/rank-0.json")
        raise ValueError("the disk of this rank is gone")
    wait_for(folder / "ready")  # before this moment, the end of rank 0 would also end rank 1
    raise KeyError("a label nobody knows")
"""


def test_each_ranks_first_error_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the error of one of two ranks is lost, or if the command prints tracebacks. One line must list the ranks
    in order, each with its error."""
    source, config = tmp_path / "source.py", tmp_path / "run.toml"
    source.write_text(SMALL.read_text() + _TWO_FAIL)
    config.write_text(config_of(loss=f"{source}:fails", micro_batch=4).to_toml())
    assert run(group, ["train", str(config), "--nproc", "2", "--out", str(tmp_path / "run"), "-q"]) == 1
    said = capsys.readouterr().err
    assert "rank 0: KeyError: 'a label nobody knows' | rank 1: ValueError: the disk of this rank is gone" in said
    assert "Traceback" not in said
    assert said.count("\n") == 1
    assert (tmp_path / "run" / "ranks.log").read_text().count("Traceback") >= 2


@pytest.mark.slow
def test_what_ends_a_restarted_run_is_what_is_said(tmp_path: Path) -> None:
    """Checks that a run of a single process is restarted, and that the final error comes from the last attempt. If a
    signal killed a rank, the error must name the signal and the line of code. The error must also say that a new run
    starts over."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal\nfrom pathlib import Path\n\n"
        "def fails(outputs, targets):\n"
        "    flag = Path(__file__).with_name('begun')\n"
        "    if flag.exists():\n        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    flag.touch()\n    raise ValueError('only the first attempt')\n"
    )
    with pytest.raises(
        TrainingFailed,
        match=r"^rank 0 was killed by signal 11 in fails at .*source.py:\d+; .*again, it starts over.*--max-restarts",
    ) as caught:
        train(config_of(loss=f"{source}:fails"), tmp_path / "run", max_restarts=1)
    assert "only the first attempt" not in str(caught.value)


def test_a_killed_rank_is_named_before_those_that_missed_it(tmp_path: Path) -> None:
    """Checks that the message names the killed rank before a rank that failed because of it, and leaves out a rank that
    only lost its connection. Also checks that the message names the step at which the next run resumes."""
    leave(tmp_path, 0, ValueError("a queue is empty"))
    leave(tmp_path, 2, RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    checkpoint = tmp_path / "checkpoints" / "step-00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").touch()
    found = first_errors(tmp_path, range(3), 1, killed={1: 9})
    assert re.match(
        r"rank 1 was killed by signal 9 [^|]* \| then rank 0: ValueError: a queue is empty; run the same "
        r"command again, it goes on after step 40, or pass --max-restarts to restart automatically",
        str(found),
    )


def test_a_killed_torchrun_is_named(tmp_path: Path) -> None:
    """Fails if the end of torchrun, which starts the ranks, is reported as the end of a rank."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal, time\n\ndef kills(outputs, targets):\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(100)\n"
    )
    with pytest.raises(
        TrainingFailed, match=r"^torchrun, which starts the ranks, was killed by signal 9 .*, it starts over, "
    ) as caught:
        train(config_of(loss=f"{source}:kills"), tmp_path / "run", nproc=2)
    assert "rank 0" not in str(caught.value)


# ``extra`` is never used, or only by the first rank.
_UNUSED = """
class Extra(GPT):
    def __init__(self):
        super().__init__(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))
        self.extra = torch.nn.Linear(1, 1)

    def forward(self, ids):
        found = super().forward(ids)
        return found + self.extra(found[:1, :1, :1]) if os.environ["RANK"] == USED else found

def frozen():
    made = Extra()
    made.extra.requires_grad_(False)
    return made
"""


@pytest.mark.slow
def test_a_parameter_of_some_ranks_only_is_hinted_at(tmp_path: Path) -> None:
    """Fails if the message about a rank that gloo ended doesn't say why gloo does so. Under ZeRO, the ranks then reduce
    gradients of different sizes."""
    source = tmp_path / "source.py"
    source.write_text(SMALL.read_text() + _UNUSED.replace("USED", "'0'"))
    config = config_of(model=f"{source}:Extra", parallel={"zero": 1})
    with pytest.raises(
        TrainingFailed, match=r"signal 6 \(a library does this, such as gloo if only some ranks use a pa"
    ):
        train(config, tmp_path / "run", nproc=2)


@pytest.mark.parametrize("used", ["no", pytest.param("0", marks=pytest.mark.slow)])
def test_a_parameter_that_is_not_used_is_named(tmp_path: Path, used: str) -> None:
    """Fails if data-parallel ranks train on gradients that weren't averaged because a parameter isn't used, if the
    error doesn't name the parameter, or if the advice to freeze it doesn't help. torch sees the fault a step later, so
    a run of one step would end well."""
    source = tmp_path / "source.py"
    source.write_text(SMALL.read_text() + _UNUSED.replace("USED", repr(used)))
    says = r"rank \d: the loss doesn't depend on extra.weight and extra.bias, but .* requires_grad_\(False\)$"
    with pytest.raises(BadConfig, match=says):
        train(config_of(model=f"{source}:Extra", steps=1), tmp_path / "run", nproc=2)
    if used == "no":
        train(config_of(model=f"{source}:frozen", steps=1), tmp_path / "frozen", nproc=2)


def test_a_run_whose_steps_were_all_skipped_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run in fp16 that took no step ends well or writes ``final/``, if its checkpoint is lost, or if the
    advised larger number of steps doesn't help. Also fails if a run that took one step is refused."""
    config, out = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(config_of(precision={"mode": "fp16", "loss_scale": 2.0**40}).to_toml())
    assert run(group, ["train", str(config), "--out", str(out), "-q"]) == 1
    said = capsys.readouterr().err
    assert "all 4 steps were skipped because a gradient overflowed in each, so no weight has changed" in said
    assert "fell to 6.87195e+10 and falls further with more --steps" in said
    assert not (out / "final").exists()
    assert not (out / "result.json").exists()
    assert run(group, ["train", str(config), "--out", str(out), "-q"]) == 1
    assert "all 4 steps were skipped" in capsys.readouterr().err
    assert run(group, ["train", str(config), "--out", str(out), "--steps", "40", "-q", "--json"]) == 0
    assert 4 < json.loads(capsys.readouterr().out)["skipped"] < 40


def test_an_interrupt_says_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if Ctrl-C causes a traceback, or if the message promises to resume a run that has no checkpoint. Also fails
    if --fresh keeps files of the earlier run."""

    def interrupted(process: subprocess.Popen[bytes], out: Path, _: float) -> None:
        process.kill()
        raise KeyboardInterrupt

    monkeypatch.setattr(accel.train.run.launch, "_follow", interrupted)
    config = tmp_path / "run.toml"
    config.write_text(config_of().to_toml())
    for says in ("it starts over, because there is no checkpoint yet", "it goes on after step 12"):
        assert run(group, ["train", str(config), "--out", str(tmp_path / "run"), "-q"]) == 1
        assert says in capsys.readouterr().err
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000012"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "run.json").touch()
    (tmp_path / "run" / "tensorboard").mkdir()
    assert run(group, ["train", str(config), "--out", str(tmp_path / "run"), "-q", "--fresh"]) == 1
    assert "it starts over" in capsys.readouterr().err
    assert not [name for name in ("checkpoints", "tensorboard") if (tmp_path / "run" / name).exists()]


def test_data_shorter_than_a_batch(tmp_path: Path) -> None:
    """Checks that a BadData error raised in a rank reaches the caller with its type and message."""
    with pytest.raises(BadData, match="the data has only 96 samples, but global_batch is 128"):
        train(config_of(global_batch=128), tmp_path)


def test_bad_options_end_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a wrong option causes an error of one line that names the fix."""
    for words, says in (
        (["nothing.toml"], "does not exist"),
        (["examples/digits.toml", "--learning-rate=3"], "has no key learning_rate"),
        (["examples/digits.toml", "--nproc", "3"], "use --global-batch="),
        (["examples/digits.toml", "stray"], "write --key=value"),
        (
            ["examples/digits.toml", "--micro-batch", "8"],
            "the option '--micro-batch'; write --micro-batch=8",
        ),
        (["examples/digits.toml", "--nnodes", "2"], "pass the same --rendezvous HOST:PORT on each"),
        (["examples/digits.toml", "--nnodes", "1:2"], "pass the same --rendezvous HOST:PORT on each"),
        (["examples/digits.toml", "--nnodes", "2:1"], "write a number of machines, or a range MIN:MAX"),
        (["examples/digits.toml", "--nnodes", "3", "--rendezvous", "localhost:1"], "use --global-batch=96"),
        (
            ["examples/digits.toml", "--parallel.tp=2", "--nproc", "2", "--micro-batch=32"],
            "needs a plan of the modules to split",
        ),
    ):
        assert run(group, ["train", *words, "--out", str(tmp_path / "run"), "-q"]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_a_config_without_a_model_is_refused(tmp_path: Path) -> None:
    """Fails if ``accel train`` accepts a config without a model. ``accel plan`` writes a config without a model if its
    options give only the model's sizes, such as ``--layers``."""
    with pytest.raises(BadConfig, match="needs the keys model and data"):
        train(TrainConfig.from_dict({}), tmp_path)
