"""Proves on the CPU, with a stand-in for the GPU's clock and graphs, that the tuner times only the kernel.

These tests fail if the time of a call includes the launch from Python, or if the GPU's cache can hold all operands.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from accel.kernels.catalogue.spec import GemmSpec
from accel.kernels.choose import tune


class FakeGpu:
    """Imitates a GPU whose clock advances only while the GPU works. Counts the recorded and timed calls of a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, records: bool) -> None:
        self.now, self.launched, self.recording = 0.0, 0, False
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1000

        class Graph:
            def capture_begin(self, capture_error_mode: str) -> None:
                gpu.recording, gpu.launched = True, 0

            def capture_end(self) -> None:
                gpu.recording = False
                if not records:
                    raise RuntimeError("operation not permitted when stream is capturing")

            def replay(self) -> None:
                gpu.now += 5.0 * gpu.launched

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(self) -> None:
        """Imitates a kernel that takes 5 microseconds. Python takes 80 microseconds to launch the kernel."""
        self.launched += 1
        if not self.recording:
            self.now += 80.0


def test_what_python_takes_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the tuner measures the launch of a small kernel instead of the kernel itself. If the tuner measured
    launches, all candidates would look equally fast. Also checks that the CUDA graph calls a small kernel often enough
    to use every set of operands."""
    gpu = FakeGpu(monkeypatch, records=True)
    assert tune.microseconds(gpu.run) == pytest.approx(5.0)
    assert gpu.launched >= tune.MOST_SETS, "as many as there can be sets of operands"


def test_the_sets_of_the_smallest_layers_are_more_than_any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the sets of operands of a product with one row don't fit into a GPU's L2 cache (60 MB on an H200, 126
    MB on a B200). If the operands fitted into the cache, the timed kernel would read them from the cache instead of
    from memory."""

    def made(spec: GemmSpec, _device: torch.device, _seed: int = 0, *, seed: int = 0) -> tune.Operands:
        a, b = (torch.empty(size, spec.k, dtype=torch.bfloat16, device="meta") for size in (spec.m, spec.n))
        return a, b.t(), {}

    monkeypatch.setattr(tune, "operands_for", made)
    for n, k in tune.LAYERS:
        spec = tune.specs(["bf16"], ["none"], [(1, n, k)])[0]
        sets = tune.rotated_operands(spec, torch.device("meta"))
        total = sum(operand.numel() * operand.element_size() for a, b, _ in sets for operand in (a, b))
        assert total >= tune.ROTATED_BYTES > 2 * 126e6, (n, k)
        assert len(sets) <= tune.RECORDED_CALLS, "each has its turn"


def test_what_cannot_be_recorded_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune.microseconds(FakeGpu(monkeypatch, records=False).run) == pytest.approx(80.0)
