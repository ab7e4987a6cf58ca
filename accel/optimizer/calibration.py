"""Splits the samples into calibration samples and samples for judging."""

from __future__ import annotations

from accel.proof.stream import SampleStream

from .request import OptimizeRequest

_USUAL_SAMPLES = 128
# A search with a time limit calibrates a large model on fewer samples, because a large model may take a second for each
# sample. The number of samples times the size of the model in MB is at most ``_MEGABYTES``, but there are never fewer
# than ``_FEWEST_SAMPLES`` samples.
_MEGABYTES = 12_800.0
_FEWEST_SAMPLES = 32
_READ_AT_ONCE = 64


def calibration_samples(request: OptimizeRequest, stream: SampleStream | None, megabytes: float) -> int:
    """Reads every sample once, and returns the number of calibration samples (0 without data) for a model of
    ``megabytes``.

    Raises ``BadData``, which names the sample, if a sample can't be used.
    """
    if stream is None:
        return 0
    for _ in stream.batches(_READ_AT_ONCE):
        pass
    count = len(stream)
    asked = request.quantize_fields.get("samples")
    usual = _USUAL_SAMPLES if request.thorough else usual_samples(megabytes)
    return samples_to_calibrate(count, asked, usual, apart=request.eval_data is not None) if count else 0


def usual_samples(megabytes: float) -> int:
    """Returns the number of calibration samples for a model of ``megabytes`` in a search with a time limit."""
    return min(_USUAL_SAMPLES, max(_FEWEST_SAMPLES, int(_MEGABYTES / max(megabytes, 1.0))))


def samples_to_calibrate(count: int, asked: int | None, usual: int = _USUAL_SAMPLES, *, apart: bool) -> int:
    """Returns the number of calibration samples, at most half of ``count``, so that candidates can be judged on the
    other half. ``asked`` is the number of calibration samples that the user requests, and ``usual`` the number if the
    user requests none. If there are separate samples for judging (``apart``), ``asked`` may be up to ``count``.
    """
    return min(asked or usual, count if asked and apart else max(1, count // 2))
