"""Runs conversions to TensorFlow in a child process with Keras 2."""

from __future__ import annotations

from typing import Any

from accel.child import Child
from accel.errors import BuildFailed, ChildCrashed
from accel.sources.onnx.file import one_line

# onnx2tf needs Keras 2, which the package tf_keras provides.
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "TF_USE_LEGACY_KERAS": "1"}


class NotTensorFlow(BuildFailed):
    """onnx2tf or the TFLite converter can't write the model.

    ``operator`` names the operator and the node at which the conversion failed, or is empty if unknown.
    """

    operator: str = ""

    def at(self, operator: str) -> NotTensorFlow:
        """Sets ``operator`` and returns this error."""
        self.operator = operator
        return self


def run_with_keras2(target: str, what: str, timeout: float, **arguments: Any) -> None:
    """Calls ``target(**arguments)`` in a new process with TensorFlow and Keras 2.

    Raises ``NotTensorFlow`` if the process dies or takes longer than ``timeout`` seconds. The error message begins with
    ``what``.
    """
    try:
        # The process that reads TensorFlow sources can't be used here, because it has another Keras version.
        with Child(env=_ENV) as child:
            child.call(target, timeout=timeout, **arguments)
    except ChildCrashed as error:
        raise NotTensorFlow(f"{what} ({one_line(error)[:240]}); choose another format") from error
    except TimeoutError as error:
        raise NotTensorFlow(f"{what}: the conversion took longer than {timeout:g} s; choose another format") from error
