"""Implements the gate of the preprocess stage. The gate repeats preprocessing and postprocessing in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.runtimes.base import open_session
from accel.stage import GateResult
from accel.tables.limits import EXPORT_LIMITS

from .compare import compare
from .gates import PATIENT, case_name, gate_runtime, output_result

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class PreprocessGate:
    """Compares two models at every case: the new model on raw images, and the old model on images that numpy
    preprocessed.

    The gate has the fields of ``PreprocessConfig``. Indices of ``argmax`` and ``topk`` may differ if their scores are
    equal within the limit.
    """

    name: str = "preprocess"
    limit: float = EXPORT_LIMITS["fp32"]
    image: str
    channels_axis: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layout: str = ""
    resize: tuple[int, int] | None = None
    postprocess: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, src: Artifact, out: Artifact) -> Sequence[GateResult]:
        """Returns a result for each output and case."""
        results = []
        with ExitStack() as stack:
            old = stack.enter_context(open_session(src, gate_runtime(src), PATIENT))
            new = stack.enter_context(open_session(out, gate_runtime(out), PATIENT))
            for sizes in out.signature.cases():
                raw = out.signature.inputs_at(sizes)
                feeds = dict(raw)
                if self.image:
                    dtype = {spec.name: spec.dtype for spec in src.signature.inputs}[self.image]
                    feeds[self.image] = self._on_the_host(raw[self.image]).astype(dtype)
                (name, scores), *rest = old.run(feeds).items()
                found = new.run(raw)
                wanted = {name: scores, **dict(rest)}
                if self.postprocess:
                    wanted = self._after(name, scores, found)
                results += [output_result(self.name, case_name(sizes), d, self.limit) for d in compare(wanted, found)]
        return results

    def _on_the_host(self, raw: np.ndarray) -> np.ndarray:
        """Returns the preprocessed pixels as float64 in the model's layout."""
        import numpy as np

        layout = self.layout or ("NCHW" if self.channels_axis == 1 else "NHWC")
        x: np.ndarray = raw.astype(np.float64)
        x = x if layout == "NHWC" else x.transpose(0, 2, 3, 1)
        if self.resize is not None:
            x = resize_bilinear(x, self.resize)
        if raw.dtype == np.uint8:
            x = x / 255
        x = (x - np.array(self.mean or [0.0])) / np.array(self.std or [1.0])
        return x.transpose(0, 3, 1, 2) if self.channels_axis == 1 else x

    def _after(self, name: str, scores: np.ndarray, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        import numpy as np

        if self.postprocess == "softmax":
            powers = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
            return {name: powers / powers.sum(-1, keepdims=True)}
        top = -np.sort(-scores, axis=-1)
        if self.postprocess == "argmax":
            given = found[name]
            picked = np.take_along_axis(scores, given[..., None], -1)[..., 0]
            level = np.abs(picked - top[..., 0]) <= self.limit * np.abs(top[..., 0]).max(initial=1e-9)
            return {name: np.where(level, given, scores.argmax(-1))}
        count = int(self.postprocess.partition(":")[2])
        best = top[..., :count]
        given = found[f"{name}_indices"]
        level = np.abs(np.take_along_axis(scores, given, -1) - best) <= self.limit * np.abs(best).max(initial=1e-9)
        order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
        return {f"{name}_values": best, f"{name}_indices": np.where(level, given, order)}


def resize_bilinear(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns ``images`` resized to ``size`` (height, width), as float64[n, h, w, c]. The interpolation between pixel
    centers is bilinear.

    Pixel i of the result is taken at (i + 0.5) * h / size - 0.5, clipped to the image. OpenCV's INTER_LINEAR and ONNX's
    half_pixel use the same formula.
    """
    import numpy as np

    for axis, wanted in ((1, size[0]), (2, size[1])):
        has = images.shape[axis]
        at = np.clip((np.arange(wanted) + 0.5) * has / wanted - 0.5, 0, has - 1)
        low = np.floor(at).astype(int)
        high = np.minimum(low + 1, has - 1)
        part = (at - low).reshape([-1 if i == axis else 1 for i in range(4)])
        images = images.take(low, axis) * (1 - part) + images.take(high, axis) * part
    return images
