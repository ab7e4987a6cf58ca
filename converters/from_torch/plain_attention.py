"""Makes torch's own transformer layers exportable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Within the ``with`` block, torch's transformer layers use the given mask, and use no fused operators.

    ``nn.Transformer`` compares its mask with the causal mask to choose a faster form of the same attention. The
    exporters can't record a choice that depends on the values of a mask. The fused operators of evaluation mode have no
    ONNX translation.
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
