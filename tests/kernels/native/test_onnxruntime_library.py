"""Proves that accel builds the library for ONNX Runtime once. Also proves that accel loads the library from a path that
the user sets. Also proves that ONNX Runtime runs the function body of an operator that the library lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import TensorProto

from accel.cli.kernels import command
from accel.errors import AccelError, BadConfig, UnsupportedHere
from accel.kernels.native.bridges import build_for_onnxruntime
from accel.kernels.onnx.function import FusedGemm
from tests.kernels.native.onnxruntime_models import (
    INCLUDE,
    convolution,
    feeds,
    model,
    opened,
    options,
    right,
    right_convolution,
    session,
)


@pytest.mark.proof
def test_a_session_takes_the_convolutions_of_its_model(
    onnxruntime_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = convolution(act="silu", residual=True)
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(onnxruntime_library))
    with opened(function, tmp_path) as session:
        right_convolution(function, session.run(feeds())[function.name])


@pytest.mark.proof
def test_the_command_builds_it_once(onnxruntime_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    for cached in ("false", "true"):
        result = CliRunner().invoke(command, ["build", "--onnxruntime-include", INCLUDE, "--json", "-q"])
        assert result.exit_code == 0, result.output
        assert f'"cached": {cached}' in result.output
        assert "libaccel_onnxruntime.so" in result.output


PLAIN = FusedGemm(product="gemm_nn", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT)


@pytest.mark.proof
def test_a_session_takes_the_library_that_the_environment_names(
    onnxruntime_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCEL_ONNXRUNTIME_LIBRARY", raising=False)
    with pytest.raises(AccelError, match=r"is unknown\); build accel's operators .* ACCEL_ONNXRUNTIME_LIBRARY"):
        opened(PLAIN, tmp_path)
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(onnxruntime_library))
    with opened(PLAIN, tmp_path) as session:
        right(PLAIN, session.run(feeds())[PLAIN.name])


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_wrong_library_in_the_environment_is_an_error(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "mine.so").write_bytes(content)
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(tmp_path / "mine.so"))
    with pytest.raises(BadConfig, match=r"ACCEL_ONNXRUNTIME_LIBRARY names .*mine\.so.*unset the variable") as caught:
        opened(PLAIN, tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_headers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedHere, match="pass the include folder of an ONNX Runtime release"):
        build_for_onnxruntime(tmp_path)
    result = CliRunner().invoke(command, ["build"])
    assert result.exit_code == 2
    assert "--arch sm_90a, --cpu, --onnxruntime-include DIR, or --tensorrt-include DIR" in result.output


@pytest.mark.proof
def test_what_has_no_operator_is_still_inlined(onnxruntime_library: Path) -> None:
    """Checks that ONNX Runtime runs the function body of a product for which the registered library has no operator.
    The model also contains a product for which the library has an operator."""
    plain = FusedGemm(product="gemm_nn", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT)
    scaled = FusedGemm(
        product="gemm_nt", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT, col_scale=True
    )
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(model([scaled], bodies=False), options(onnxruntime_library))
    made = model([plain, scaled], bodies=True)
    for with_it, without in zip(
        session(made, options(onnxruntime_library)).run(None, feeds()),
        session(made, options(None)).run(None, feeds()),
        strict=True,
    ):
        np.testing.assert_allclose(with_it, without, rtol=0, atol=1e-5 * float(np.abs(without).max()))
