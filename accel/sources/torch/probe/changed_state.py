"""Finds the buffers that a model changes when it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def changes_words(module: torch.nn.Module, run: Callable[[], object]) -> str:
    """Calls ``run``, which runs ``module``. Returns a text about the first buffer that the run changes, and the fix.
    Returns "" if the run changes no buffer."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    run()
    for name, buffer in module.named_buffers():
        if name in before and not torch.equal(buffer, before[name]):
            own = name.removeprefix("module.")
            return (
                f"forward changes the buffer {own!r}, so a call depends on the calls before it; change the buffer only "
                "if self.training is true, and don't compute with the number of calls"
            )
    return ""
