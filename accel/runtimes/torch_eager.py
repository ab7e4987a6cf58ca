"""Runs modules in PyTorch's eager mode, the reference of export gates and the baseline of benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel.artifact import Artifact
from accel.errors import one_line
from accel.signature import Feeds, shapes_of
from accel.sources.torch.call import NamedModule, run_named, run_own
from accel.sources.torch.probe.integers_alone import integers_alone
from accel.sources.torch.source import module_of

from .base import BaseSession, SessionOptions

if TYPE_CHECKING:
    import numpy as np


class TorchSession(BaseSession):
    """Runs a module in eval mode on the CPU. ``options.threads`` sets the number of torch's threads for the whole
    process."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        if options.threads:
            torch.set_num_threads(options.threads)
        inputs = [spec.name for spec in artifact.signature.inputs]
        outputs = [spec.name for spec in artifact.signature.outputs]
        self.module = NamedModule(module_of(artifact), inputs, outputs)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        try:
            return self._run_bare(feeds)
        except Exception as error:  # a model may raise any type of error
            failed = f"{self.artifact.path} fails in PyTorch at {shapes_of(feeds)}: {one_line(error, 200)}"
            raise self._run_error(failed, "; check the inputs' values", feeds) from error

    def integers_alone(self, feeds: Feeds) -> frozenset[str]:
        def run() -> dict[str, torch.Tensor]:
            return self.module.by_name(run_own(self.module, self.signature, feeds))

        return integers_alone(run)

    def _run_bare(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Returns the outputs by name. Doesn't change the errors that PyTorch or the model raises."""
        return run_named(self.module, self.signature, feeds)
