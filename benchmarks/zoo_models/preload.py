"""Imports the libraries once, in the process that later forks the children.

The variable $ACCEL_ZOO_PACKAGES names the folder of a family's packages. The C++ operators of torchvision are only
declared, not loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("USE_TF", "0")  # older versions of transformers import TensorFlow otherwise
warnings.simplefilter("ignore")

import onnxscript  # noqa: E402, F401
import onnxsim  # noqa: E402, F401
import torch  # noqa: E402

import accel.api.export  # noqa: E402
import accel.api.load  # noqa: E402
import accel.converters.from_torch.onnx_from_torch  # noqa: E402
import accel.runtimes.onnxruntime  # noqa: E402
import accel.sources.torch.live  # noqa: E402, F401

from .torchvision_operators import declare  # noqa: E402


def _warm_up() -> None:
    """Exports a small net, because the first export of a process takes seconds longer than later exports.

    Uses one thread, because a forked child lacks the OpenMP threads of its parent.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    net, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=({0: torch.export.Dim.AUTO},), verbose=False)


if folder := os.environ.get("ACCEL_ZOO_PACKAGES"):
    sys.path.insert(0, folder)
    declare()
for name in filter(None, os.environ.get("ACCEL_ZOO_PRELOAD", "").split(",")):
    with contextlib.suppress(Exception):  # if a package is missing, each model of the family reports the import error
        importlib.import_module(name)
_warm_up()
