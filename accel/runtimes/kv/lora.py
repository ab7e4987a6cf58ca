"""Reads and writes the files of LoRA adapters that ONNX Runtime and onnxruntime-genai read (``.onnx_adapter``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# The version of a file's content, which ONNX Runtime hands on to the readers of the file.
_VERSION = 1


def write_lora(path: Path, matrices: Mapping[str, np.ndarray]) -> None:
    """Writes the matrices of an adapter, by the names of the inputs that take them."""
    import numpy as np
    import onnxruntime

    file: Any = onnxruntime.AdapterFormat()
    file.set_adapter_version(_VERSION)
    file.set_model_version(_VERSION)
    arrays = {name: np.ascontiguousarray(value) for name, value in matrices.items()}  # kept until they are written
    file.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in arrays.items()})
    file.export_adapter(str(path))


def read_lora(path: Path) -> dict[str, np.ndarray]:
    """Returns the matrices of an adapter, by the names of the inputs that take them."""
    import numpy as np
    import onnxruntime

    file: Any = onnxruntime.AdapterFormat.read_adapter(str(path))
    return {name: np.array(value.numpy()) for name, value in file.get_parameters().items()}
