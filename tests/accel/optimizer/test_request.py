"""Proves that the request object of accel optimize has the defaults of the public function, checks the arguments, and
can write the command line that repeats the run."""

from __future__ import annotations

import inspect
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.api.optimize import CastOptions, QuantizeOptions
from accel.artifact import Artifact
from accel.cli.optimize import command
from accel.errors import BadInputSpec, UnknownName, UsageError
from accel.optimizer.report.command import command_line
from accel.optimizer.request import OptimizeRequest
from accel.optimizer.stage_options import options_given, parse_cast_options, parse_quantize_options
from accel.sources.source import Source
from accel.tables.precision import PRECISIONS
from accel.tables.target import TARGETS
from tests.support.onnx_builder import FLOAT, artifact, node

QUANTIZE = QuantizeOptions(percentile=99.9, samples=64, per_channel=False, keep=("a/*", "Conv"))
CAST = CastOptions(keep_io=False, keep_fp32=("Softmax",))


@pytest.fixture
def src(tmp_path: Path) -> Artifact:
    return artifact(
        tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])}
    )


def test_defaults_are_those_of_the_function() -> None:
    """Fails if the public function and the request have different arguments or defaults. A difference would make the
    report's command leave out an option."""
    parameters = dict(inspect.signature(accel.optimize).parameters)
    assert parameters.pop("about").annotation == "Unpack[SourceOptions]"
    assert parameters.pop("out").default is None  # without ``out``, the result goes to the cache
    del parameters["model"]
    known = [one for one in fields(OptimizeRequest) if one.name not in ("source", "out")]
    assert set(parameters) == {one.name for one in known}
    for one in known:
        default = parameters[one.name].default
        if one.default is MISSING:
            assert default is inspect.Parameter.empty
        else:
            assert (default or None) == (one.default or None), one.name


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"max_drop": "a"}, UsageError, "max_drop= takes a number, not 'a'; give e.g. max_drop=0.01"),
        ({"budget_seconds": "1"}, UsageError, "budget_seconds= takes a number, not '1'"),
        ({"rounds": 1.5}, UsageError, "rounds= takes a whole number, not 1.5"),
        ({"max_drop": 1.0}, UsageError, "the drop 1.0 has to be at least 0 and below 1"),
        ({"label_metric": "top1"}, UsageError, "pass the labels with labels="),
        ({"labels": Path("l.npz"), "metric": "m:f"}, UsageError, "labels have a metric of their own"),
        ({"budget_seconds": 0.0}, UsageError, "a budget of 0 s is too short"),
        ({"target": "tpu"}, UnknownName, "unknown target 'tpu'"),
        ({"precision": ("fp7",)}, UnknownName, "unknown precision 'fp7'; use one of fp32, tf32, fp16"),
        ({"quantize": ("smooth=2",)}, BadInputSpec, "smooth=0.5"),
        ({"cast": ("keep-io=maybe",)}, BadInputSpec, "keep-io=no"),
        ({"engine": ("speed=9",)}, BadInputSpec, "builder-level"),
    ],
)
def test_checked_when_it_is_built(wrong: dict[str, Any], error: type[UsageError], says: str) -> None:
    """Fails if a wrong argument is found only after the model was exported."""
    with pytest.raises(error, match=says):
        OptimizeRequest(source=Source("m.onnx"), out=Path("out"), **wrong)


def test_options_in_python_are_the_words_of_the_command_line() -> None:
    """Fails if an option means something else in Python than on the command line, or if a value out of range is
    accepted."""
    assert parse_quantize_options(QUANTIZE.words()) == QUANTIZE.to_fields()
    assert QUANTIZE.to_fields() == {
        "calibration": "percentile", "percentile": 99.9, "samples": 64, "per_channel": False, "keep": ("a/*", "Conv"),
    }  # fmt: skip
    assert parse_cast_options(CAST.words()) == CAST.to_fields() == {"keep_io": False, "keep_fp32": ("Softmax",)}
    assert (QuantizeOptions().to_fields(), CastOptions().to_fields()) == ({}, {})
    for wrong in ({"percentile": 200.0}, {"block_size": 17}, {"calibration": "guess"}, {"samples": 0}):
        with pytest.raises(BadInputSpec):
            QuantizeOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"keep": ["a/*", "Conv"]}, QuantizeOptions(keep=("a/*", "Conv")), "keep=a/*,Conv"])
def test_options_in_python_are_a_dict_fields_or_a_text(given: Any) -> None:
    """Fails if a dict or one string is read by its keys or characters."""
    made = options_given(QuantizeOptions, "quantize", given)
    fields = made.to_fields() if isinstance(made, QuantizeOptions) else parse_quantize_options(made)
    assert fields == {"keep": ("a/*", "Conv")}


def test_an_unknown_option_of_a_dict_is_refused_before_work_starts() -> None:
    with pytest.raises(BadInputSpec, match=r"quantize has no option 'block'; choose from .*, block_size, smallest"):
        accel.optimize("absent.onnx", quantize={"block": 32})


@pytest.mark.parametrize("quantize", [QUANTIZE, QUANTIZE.words()])
@pytest.mark.parametrize("cast", [CAST, CAST.words()])
def test_both_forms_reach_the_recipes_and_the_command(src: Artifact, quantize: Any, cast: Any) -> None:
    """Checks that the report's command repeats the options. The user may give the options as fields or as strings."""
    request = OptimizeRequest(
        source=Source(src),
        out=Path("out"),
        target="ort-cpu",
        precision=("int8",),
        quantize=quantize,
        cast=cast,
        kernels=True,
    )
    asked = request.recipe_request(samples=8)
    assert (asked.quantize, asked.cast) == (QUANTIZE.to_fields(), CAST.to_fields())
    words = shlex.split(command_line(request))
    assert words[:2] == ["accel", "optimize"]
    read = command.make_context("optimize", words[2:]).params
    assert (read["quantize"], read["cast"]) == (QUANTIZE.words(), CAST.words())
    assert (read["model"], read["target"], read["precision"], read["kernels"]) == (
        str(src.path), ("ort-cpu",), ("int8",), True,
    )  # fmt: skip


def test_a_function_and_mixed_options_in_the_command() -> None:
    """Fails if the written command line contains an unreadable argument, or an argument that exists only in Python."""
    request = OptimizeRequest(
        source=Source("m.onnx", graph_inputs=("a", "b"), placeholders={"keep": 1.0, "on": False}),
        out=Path("out"), metric=sum, data=Path("d.npz"), lengths=(8, 16), sizes={"batch": 2},
        profiles=("x=1,2,3",), vary_session=False, use_cache=False,
    )  # fmt: skip
    assert command_line(request) == (
        "accel optimize m.onnx -o out --data d.npz --metric builtins:sum --profile x=1,2,3 --sizes batch=2 "
        "--lengths 8,16 --fixed-session --inputs a,b --placeholder keep=1.0 --placeholder on=False"
    )


def test_the_table_of_precisions() -> None:
    """Fails if a target names a precision that the table of precisions lacks, or if two precisions have the same
    rank."""
    assert all(name in PRECISIONS for target in TARGETS.values() for name in target.precisions)
    for rank in ("rank", "rank_unmeasured"):
        assert sorted(getattr(row, rank) for row in PRECISIONS.values()) == list(range(len(PRECISIONS)))
    assert all(row.quantized for row in PRECISIONS.values() if row.needs_data)
