"""The process in which ONNX becomes TensorFlow again."""

from __future__ import annotations

from typing import Any

from accel.child import Child
from accel.errors import BuildFailed, ChildCrashed
from accel.sources.onnx_file import one_line

# onnx2tf builds with Keras 2, which tf_keras is.
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "TF_USE_LEGACY_KERAS": "1"}


class NotTensorFlow(BuildFailed):
    """onnx2tf or the TFLite converter can't write the model; the operator is named where they name it."""


def run_with_keras2(target: str, what: str, timeout: float, **arguments: Any) -> None:
    """``target(**arguments)`` in a TensorFlow process of its own. ``NotTensorFlow`` says that ``what`` failed where it
    died, or took longer than ``timeout`` seconds."""
    try:
        # A process of its own, not the one of the sources: it runs with another Keras.
        with Child(env=_ENV) as child:
            child.call(target, timeout=timeout, **arguments)
    except ChildCrashed as error:
        raise NotTensorFlow(f"{what} ({one_line(error)[:240]}); choose another --to") from error
    except TimeoutError as error:
        raise NotTensorFlow(f"{what}: it took longer than {timeout:g} s; choose another --to") from error
