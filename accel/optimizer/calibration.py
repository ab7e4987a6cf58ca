"""Splits the samples into calibration samples and samples for judging."""

from __future__ import annotations

from accel.proof.stream import SampleStream

from .request import OptimizeRequest

_USUAL_SAMPLES = 128
_READ_AT_ONCE = 64


def calibration_samples(request: OptimizeRequest, stream: SampleStream | None) -> int:
    """Reads every sample once, and returns the number of calibration samples (0 without data).

    Raises ``BadData``, which names the sample, if a sample can't be used.
    """
    if stream is None:
        return 0
    for _ in stream.batches(_READ_AT_ONCE):
        pass
    count = len(stream)
    asked = request.quantize_fields.get("samples")
    return samples_to_calibrate(count, asked, apart=request.eval_data is not None) if count else 0


def samples_to_calibrate(count: int, asked: int | None, *, apart: bool) -> int:
    """Returns the number of calibration samples, at most half of ``count``, so that candidates can be judged on the
    other half. ``asked`` is the number of calibration samples that the user requests. If there are separate samples for
    judging (``apart``), ``asked`` may be up to ``count``.
    """
    return min(asked or _USUAL_SAMPLES, count if asked and apart else max(1, count // 2))
