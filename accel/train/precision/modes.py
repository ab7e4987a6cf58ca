"""Implements the precision modes.

Mode                 apex  parameters, gradients   master   products   loss scale
fp32                 O0    float32                 -        float32    -
autocast-bf16              float32                 -        bfloat16   -
autocast-fp16        O1    float32                 -        float16    dynamic
bf16                       bfloat16                float32  bfloat16   -
fp16                 O2    float16                 float32  float16    dynamic
bf16-only                  bfloat16                -        bfloat16   -
fp16-only            O3    float16                 -        float16    dynamic

In the modes with master weights, batch norm stays float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..config.schema import APEX

# A run logs this advice if the config uses apex's name for the precision mode.
ADVICE = {
    "O1": "O1 is autocast-fp16: if the device has bfloat16, use autocast-bf16, which needs no loss scale",
    "O2": "O2 is fp16 with float32 batch norm: if the device has bfloat16, use bf16, which needs no loss scale",
    "O3": "O3 is fp16-only: small updates vanish in float16; use it only to measure how fast a run could be",
}


def parameter_dtype(mode: str) -> torch.dtype:
    """Returns the dtype of the parameters."""
    mode = APEX.get(mode, mode)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode.removesuffix("-only"), torch.float32)


def keeps_master(mode: str) -> bool:
    """Tells whether the optimizer works on float32 copies of 2-byte parameters."""
    return APEX.get(mode, mode) in ("bf16", "fp16")


def scales_loss(mode: str) -> bool:
    """Tells whether some gradients are float16, so that the loss has to be scaled."""
    return "fp16" in APEX.get(mode, mode)


def autocast(mode: str, device: str) -> AbstractContextManager[Any]:
    """Returns the context that a forward pass runs in."""
    mode = APEX.get(mode, mode)
    if not mode.startswith("autocast-"):
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16 if mode.endswith("bf16") else torch.float16)
