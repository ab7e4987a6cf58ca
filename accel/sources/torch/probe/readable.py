"""Finds tensors that have no values to read, or whose values have no dense form in memory."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accel.errors import BadSource


def unreadable(tensor: torch.Tensor) -> str:
    """Returns the reason why the values of ``tensor`` can't be read as an array, and the fix. Returns "" if the values
    can be read."""
    if tensor.device.type == "meta":
        return "the tensor is on the device meta, which holds no values; give a tensor with values"
    if tensor.is_nested:
        return "the tensor is nested; pad it, e.g. with torch.nested.to_padded_tensor"
    if tensor.layout is not torch.strided:
        return f"the tensor has the layout {tensor.layout}; make it dense with to_dense()"
    return ""


def computes_otherwise(kind: type[torch.Tensor]) -> bool:
    """Tells whether a subclass of ``torch.Tensor`` may change what operators compute."""
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    usual: tuple[Any, Any] = (torch.Tensor.__torch_function__, torch.Tensor.__torch_dispatch__)
    function = getattr(kind.__torch_function__, "__func__", None)
    return function is not usual[0].__func__ or kind.__torch_dispatch__ is not usual[1]


def check_values(module: torch.nn.Module, name: str) -> None:
    """Raises ``BadSource`` if a parameter or a buffer of ``module`` has no values yet, or if a tensor of the module is
    sparse. ``name`` names the module."""
    for path, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise BadSource(
                f"the weight {path!r} of {name} has no values before the first call of the module; call the module "
                "once on an example, and then give it to accel"
            )
        if tensor.device.type == "meta":
            raise BadSource(
                f"the weight {path!r} of {name} is on the device meta, which holds no values; load the weights first, "
                "as in model.load_state_dict(torch.load('weights.pt'), assign=True)"
            )
    for part, inside in module.named_modules():
        tensors = chain(
            inside.named_buffers(recurse=False), inside.named_parameters(recurse=False), vars(inside).items()
        )
        for key, value in tensors:
            if isinstance(value, torch.Tensor) and not is_lazy(value) and value.layout is not torch.strided:
                path = f"{part}.{key}" if part else key
                raise BadSource(
                    f"the tensor {path!r} of {name} has the layout {value.layout}, which no exported file can hold; "
                    "make it dense with to_dense(), and multiply by it with torch.matmul"
                )
