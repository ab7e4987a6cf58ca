"""Implements ``torch.compile(model, backend="accel")``, which runs exported or optimized parts of a model. Takes the
graphs of TorchDynamo. Gives functions that run them.
"""

from .backend import accel_backend

__all__ = ["accel_backend"]
