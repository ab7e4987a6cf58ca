"""int8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.stage import StageConfig


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(StageConfig):
    form: str = "ort-cpu"
    mode: str = "static"
    data: Path | None = None
    samples: int = 128


def quantize(src: Artifact, config: QuantizeConfig, out: Path) -> Artifact:
    import onnxruntime.quantization as q

    if config.mode == "dynamic":
        q.quantize_dynamic(str(src.path), str(out))
    else:
        from accel.verify.data import Dataset

        batches = Dataset.load(config.data, src.signature).batches(8, config.samples)

        class Reader(q.CalibrationDataReader):
            def get_next(self):
                return next(batches, None)

        q.quantize_static(str(src.path), str(out), Reader(), per_channel=True)
    return Artifact(path=out, kind="onnx", signature=src.signature)
