"""Finds Triton in the wheel of nvidia-pytriton, and runs an ONNX file on its Python backend.

The wheel has no other backend that runs a model. Its Python backend needs the program that starts a process of Python
3.11, and the library of Python 3.11."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

# Runs all requests that Triton has batched at once.
_MODEL = """import sys

sys.path.insert(0, "{packages}")  # Triton's Python doesn't read PYTHONPATH

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("{model}", options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        (found,) = self.session.run(None, {{"x": np.concatenate(rows) if len(rows) > 1 else rows[0]}})
        answers, begin = [], 0
        for row in rows:
            part = pb_utils.Tensor("y", found[begin : begin + len(row)])
            answers.append(pb_utils.InferenceResponse([part]))
            begin += len(row)
        return answers
"""


def _packages(peers: Path) -> Path:
    return next((peers / "lib").glob("python3.11/site-packages"))


def model(file: Path, peers: Path) -> str:
    """Returns the text of a model.py that runs the ONNX file."""
    return _MODEL.format(model=file, packages=_packages(peers))


def program(peers: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts Triton, and its environment. ``peers`` is a virtual environment of Python 3.11
    with nvidia-pytriton, onnxruntime and numpy. ``folder`` gets a copy of the Python backend."""
    packages = _packages(peers)
    home = packages / "pytriton" / "tritonserver"
    backends = folder / "triton-backends"
    if not backends.exists():
        shutil.copytree(home / "backends" / "python", backends / "python")
        stub = home / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
        (backends / "python" / stub.name).chmod(0o755)
    libraries = [packages / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR") or "")]
    env = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}
    server = home / "bin" / "tritonserver"
    server.chmod(server.stat().st_mode | 0o111)
    return [str(server), "--backend-directory", str(backends)], env
