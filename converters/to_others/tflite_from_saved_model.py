"""Converts SavedModels to TFLite files with TensorFlow's own converter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.progress import report
from accel.sources.tensorflow.process import require_tensorflow
from accel.stage import StageConfig

from ..cast.float64 import NO_FLOAT64, float64_end
from .keras2_process import NotTensorFlow, run_with_keras2


@dataclass(frozen=True, kw_only=True)
class TfliteFromSavedModelConfig(StageConfig):
    """The conversion is stopped after ``timeout`` seconds."""

    timeout: float = 1800.0


def tflite_from_saved_model(src: Artifact, config: TfliteFromSavedModelConfig, out: Path) -> Artifact:
    """Converts the SavedModel ``src`` to the float32 file ``out``, and keeps the names of the signature.

    Raises ``NotTensorFlow`` if the converter fails or takes too long.
    """
    require_tensorflow()
    report("tflite_from_saved_model")
    what = f"TFLite can't hold {src.source.get('spec', src.path)}"
    try:
        run_with_keras2(
            "accel.converters.to_others.tflite_from_saved_model:run_tflite",
            what,
            config.timeout,
            folder=src.path.parent,
            out=out,
        )
    except NotTensorFlow as error:
        # TFLite has few operators in float64, such as Cast, so the converter's own message names only a place.
        if found := float64_end(src.signature):
            raise NotTensorFlow(
                f"{what}: TFLite has hardly any operators for float64, the dtype of the {found[0]} {found[1].name!r}; "
                f"{NO_FLOAT64}"
            ) from error
        raise
    properties = {"form": "tflite", "precision": src.properties.get("precision", "fp32")}
    return Artifact(path=out, kind="tflite", signature=src.signature, properties=properties)


def run_tflite(folder: Path, out: Path) -> None:
    """Runs the TFLite converter on a SavedModel. Runs in a child process."""
    import tensorflow as tf

    out.write_bytes(tf.lite.TFLiteConverter.from_saved_model(str(folder)).convert())
