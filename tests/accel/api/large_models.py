"""Contains the functions that the tests of large models run in child processes. The child processes of these tests
can't import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

from accel.converters.graph import write as onnx_write
from accel.converters.quantize.stage import Task
from accel.sources.onnx import weights as onnx_weights


def nncf_of_a_large_one(task: Task) -> Any:
    """Runs ``run_nncf`` or ``run_compressed`` in a child process. Returns the largest number of bytes that NNCF got
    at once."""
    import nncf

    from accel.converters.quantize import nncf as quantize_nncf
    from accel.converters.quantize import weights as quantize_weights

    onnx_write.SINGLE_FILE_BYTES = onnx_weights.DETACHED_BYTES = 0
    given: list[int] = []

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: onnx.ModelProto, *rest: Any, **words: Any) -> Any:
            given.append(model.ByteSize())
            return plain(model, *rest, **words)

        return call

    nncf.quantize, nncf.compress_weights = watched(nncf.quantize), watched(nncf.compress_weights)
    run = quantize_nncf.run_nncf if task.config.mode == "static" else quantize_weights.run_compressed
    run(task)
    return max(given)
