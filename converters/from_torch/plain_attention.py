"""Makes torch's own transformer layers exportable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Makes torch's transformer layers use the given mask and no fused operators within the ``with`` block.

    ``nn.Transformer`` compares its mask with the causal mask to choose a faster form of the same attention. A traced
    program can't compare values. The fused operators of evaluation mode have no ONNX translation.
    """
    import torch
    from torch.nn.modules import transformer

    def is_causal(_: Any, causal: bool | None = None, __: Any = None) -> bool:
        return causal is True

    fused = torch.backends.mha.get_fastpath_enabled()
    with mock.patch.object(transformer, "_detect_is_causal_mask", is_causal):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
