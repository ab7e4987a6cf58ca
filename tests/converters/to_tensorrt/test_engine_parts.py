"""Proves, without building an engine, that the build's options, the GPU probe, the kernel listing and the progress are
correct."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accel.converters.to_tensorrt.build import _make_compatible
from accel.converters.to_tensorrt.build_progress import BuildProgress
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, build_options
from accel.converters.to_tensorrt.kernel_table import parse_layers, summary
from accel.errors import BadInputSpec, UnknownName, UnsupportedHere
from accel.runtimes.engine_options import engine_option_words, parse_engine_options
from accel.runtimes.tensorrt_toolkit import (
    Log,
    check_this_gpu,
    choose_capabilities,
    engine_problem,
    offered_capabilities,
)


@pytest.mark.parametrize("bad", ["sm_86", "8", "8.6.1", "", "eight.six"])
def test_unreadable_compute_capability(bad: str) -> None:
    """Checks that accel refuses a compute capability that isn't written as major.minor."""
    with pytest.raises(BadInputSpec, match=r"write major\.minor, e\.g\. 8\.6"):
        EngineFromOnnxConfig(compute_capabilities=(bad,))


@pytest.mark.parametrize(
    "wrong",
    [{"builder_level": 6}, {"builder_level": -1}, {"workspace_bytes": 0}],
    ids=str,
)
def test_options_out_of_range(wrong: dict[str, int]) -> None:
    """Fails if accel accepts an option value that TensorRT would silently replace with its default."""
    with pytest.raises(BadInputSpec, match="can't be"):
        EngineFromOnnxConfig(**wrong)  # type: ignore[arg-type]


def test_unknown_toolkit() -> None:
    """Checks that the config refuses an unknown toolkit before the build starts."""
    with pytest.raises(UnknownName, match="use one of tensorrt-rtx, tensorrt"):
        EngineFromOnnxConfig(toolkit="tensor-rt")


def test_capabilities_are_probed_on_the_toolkit() -> None:
    """Checks that accel reads the supported compute capabilities from the toolkit. Also checks that the user can't
    choose a compute capability if the toolkit builds engines only for the machine's own GPU."""
    members = {"NONE": 0, "CURRENT": 1, "SM120": 120, "SM75": 75, "SM86": 86}
    rtx = SimpleNamespace(ComputeCapability=SimpleNamespace(__members__=members))
    assert offered_capabilities(rtx) == {"7.5": 75, "8.6": 86, "12.0": 120}
    assert list(offered_capabilities(rtx)) == ["7.5", "8.6", "12.0"]
    assert offered_capabilities(SimpleNamespace()) == {}
    assert choose_capabilities("tensorrt-rtx", offered_capabilities(rtx), ("8.6", "7.5", "8.6")) == [86, 75]
    with pytest.raises(UnsupportedHere, match="builds engines only for the GPU"):
        choose_capabilities("tensorrt", {}, ("8.6",))
    check_this_gpu("tensorrt-rtx", offered_capabilities(rtx), "8.6")
    check_this_gpu("tensorrt", {}, "9.0")
    with pytest.raises(UnsupportedHere, match=r"tensorrt-rtx has no engines for the GPU of this machine .*9\.0"):
        check_this_gpu("tensorrt-rtx", offered_capabilities(rtx), "9.0")


def test_an_engine_for_other_gpus_is_no_problem() -> None:
    """Fails if a machine with a GPU can't build an engine for another GPU, because its own GPU can't load the engine.
    Also fails if the flag hides another problem of the engine."""
    members = {"UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4}
    trt = SimpleNamespace(EngineInvalidityDiagnostics=SimpleNamespace(__members__=members))

    def problem(found: int, **flag: bool) -> str | None:
        runtime = SimpleNamespace(get_engine_validity=lambda _header: (None, found))
        return engine_problem(trt, Log(), runtime, b"engine", **flag)

    assert problem(2) == "it was not built for the compute capability of this GPU"
    assert problem(2, for_any_gpu=True) is None
    assert problem(6, for_any_gpu=True) == "the CUDA driver is too old for it"


LISTING = "\n".join(
    (
        "Layers:",
        "Name: a+b, [c]_myl0_0, LayerType: gemm, "
        "Inputs: [ { Name: x, Dimensions: [-1,8], Datatype: Half, Format: f }, "
        "{ Name: Datatype, Dimensions: [1], Datatype: Int64, Format: f }], "
        "Constants: [ { Name: w, Datatype: Float, Format: f }], "
        "Outputs: [ { Name: y, Dimensions: [-1,8], Datatype: BFloat16, Format: f }], TacticName: t, StreamId: 0, "
        "Metadata: [ONNX Layer: /block/MatMul][ONNX Layer: odd [name]]\x1f[ONNX Layer: last]",
        "Name: shape, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , Metadata: ",
        "a line of another kind",
        "I/O Tensors:",
        "Name: x, LayerType: not a kernel, Inputs: [], Constants: [], Outputs: [], TacticName: , Metadata: ",
    )
)


def test_kernel_listing_is_read_as_it_stands() -> None:
    """Fails if brackets, commas or separators in names shift the fields of the kernel listing. Also fails if constants
    count as inputs, or if lines after the kernels count as kernels."""
    rows = parse_layers(LISTING)
    assert rows[0] == {
        "name": "a+b, [c]_myl0_0",
        "type": "gemm",
        "inputs": ["float16", "int64"],
        "outputs": ["bfloat16"],
        "onnx": ["/block/MatMul", "odd [name]", "last"],
    }
    assert [row["name"] for row in rows[1:]] == ["shape"]
    assert summary(rows) == {
        "kernels": 2,
        "fused": 1,
        "types": {"gemm": 1, "shape_call": 1},
        "dtypes": {"bfloat16": 1, "none": 1},
    }
    assert parse_layers("") == []


def test_progress_of_nested_phases() -> None:
    """Checks that the progress of an inner phase counts toward the current step of its parent phase, and that the
    progress never decreases."""
    progress = BuildProgress()
    assert progress.fraction == 0
    progress.start("build", None, 4)
    progress.step("build", 0)
    assert progress.fraction == pytest.approx(0.25)
    progress.start("inner", "build", 10)
    progress.step("inner", 4)
    assert progress.fraction == pytest.approx(0.25 + 0.5 / 4)
    progress.finish("inner")
    assert progress.fraction == pytest.approx(0.25 + 0.5 / 4)
    progress.step("build", 3)
    assert progress.fraction < 1
    progress.finish("build")
    progress.start("another", None, 100)
    assert progress.fraction == pytest.approx(0.99)


def test_engine_options_come_back_in_the_rebuild_command() -> None:
    """Fails if an engine option is parsed as another option or with the wrong unit. Also fails if the rebuild command
    has other options than the original command."""
    texts = ["builder-level=0", "workspace=2GiB", "version-compatible=yes", "hardware=ampere-plus"]
    found = parse_engine_options(texts)
    assert found == {
        "builder_level": 0,
        "workspace_bytes": 2 << 30,
        "version_compatible": True,
        "hardware": "ampere-plus",
    }
    words = engine_option_words(found)
    assert words[::2] == ["--engine"] * 4
    assert parse_engine_options(words[1::2]) == found
    assert engine_option_words({}) == []
    config = EngineFromOnnxConfig(toolkit="tensorrt", **found)
    assert build_options(config) == found
    assert build_options(EngineFromOnnxConfig()) == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "workspace", "workspace=", "workspace=lots", "builder-level=two", "builder_level=5", "hardware=turing",
        "speed=11",
    ],
)  # fmt: skip
def test_engine_options_that_are_none(text: str) -> None:
    """Fails if accel silently ignores an engine option that can't be parsed."""
    with pytest.raises(BadInputSpec, match=r"can't read engine .*; write"):
        parse_engine_options([text])


@pytest.mark.parametrize("options", [{"version_compatible": True}, {"hardware": "ampere-plus"}])
def test_what_tensorrt_rtx_has_not(options: dict[str, Any]) -> None:
    """Fails if accel accepts version_compatible or a hardware compatibility level for TensorRT-RTX. The option
    version_compatible breaks the build, and TensorRT-RTX ignores a hardware compatibility level."""
    with pytest.raises(UnsupportedHere, match="list the GPUs with compute_capabilities="):
        EngineFromOnnxConfig(toolkit="tensorrt-rtx", **options)


def test_compatibility_is_asked_of_the_builder() -> None:
    """Checks that the builder gets the compatibility options, and that accel refuses a compatibility level that the
    installed TensorRT lacks."""
    flags: list[str] = []
    toolkit = SimpleNamespace(
        BuilderFlag=SimpleNamespace(VERSION_COMPATIBLE="compatible"),
        HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS="ampere"),
    )
    config = SimpleNamespace(set_flag=flags.append, hardware_compatibility_level="none")
    _make_compatible(toolkit, config, False, None)
    assert (flags, config.hardware_compatibility_level) == ([], "none")
    _make_compatible(toolkit, config, True, "ampere-plus")
    assert (flags, config.hardware_compatibility_level) == (["compatible"], "ampere")
    with pytest.raises(UnsupportedHere, match="leave out same-capability"):
        _make_compatible(toolkit, config, False, "same-capability")
