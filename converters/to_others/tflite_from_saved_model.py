"""A SavedModel to TFLite, by TensorFlow's own converter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.converters.keras2_process import run_with_keras2
from accel.progress import report
from accel.sources.tensorflow_process import require_tensorflow
from accel.stage import StageConfig


@dataclass(frozen=True, kw_only=True)
class TfliteFromSavedModelConfig(StageConfig):
    """``timeout``: seconds until the converter is given up."""

    timeout: float = 1800.0


def tflite_from_saved_model(src: Artifact, config: TfliteFromSavedModelConfig, out: Path) -> Artifact:
    """Convert the SavedModel ``src`` to ``out``, float32, its names in the file's signature."""
    require_tensorflow()
    report("tflite_from_saved_model")
    run_with_keras2(
        "accel.converters.tflite_from_saved_model:run_tflite",
        f"TFLite can't hold {src.source.get('spec', src.path)}",
        config.timeout,
        folder=src.path.parent,
        out=out,
    )
    properties = {"form": "tflite", "precision": src.properties.get("precision", "fp32")}
    return Artifact(path=out, kind="tflite", signature=src.signature, properties=properties)


def run_tflite(folder: Path, out: Path) -> None:
    """The TFLite converter on a SavedModel. In a child process."""
    import tensorflow as tf

    out.write_bytes(tf.lite.TFLiteConverter.from_saved_model(str(folder)).convert())
