"""Proves that accel reads the signature from the written TensorFlow file instead of trusting the stage that wrote the
file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from accel.artifact import Artifact
from accel.child import resolve
from accel.errors import SignatureDrift
from accel.signature import Signature, TensorSpec
from accel.stage import run_stage
from accel.tables.stage_table import get_stage

SAVED, LITE = "saved_model_from_onnx", "tflite_from_saved_model"


@pytest.mark.parametrize(
    ("stage", "written", "takes", "gives", "words"),
    [
        (SAVED, "dropout", "x:float32[batch,6]", "logits:float32[batch,2]", ""),
        (SAVED, "dropout", "x:float32[batch,6]", "scores:float32[batch,2]", "lost the output 'scores'"),
        (SAVED, "dropout", "x:float32[batch,6]", "logits:float16[batch,2]", "changed the dtype of the output 'logits'"),
        (SAVED, "gelu", "x:float32[batch,6,4]", "y:float32[batch,6,4]", "'batch' of the input 'x' into 1"),
        (SAVED, "gelu", "z:float32[1,6,4]", "y:float32[1,6,4]", "lost the input 'z'"),
        (LITE, "noise.tflite", "x:float32[2,64]", "place:int32[2]", ""),
        (LITE, "noise.tflite", "x:float32[2,64]", "where:int32[2]", "lost the output 'where'"),
        (LITE, "noise.tflite", "x:float32[batch,64]", "place:int32[batch]", "into 2"),
    ],
)
def test_tensorflow_files(
    tensorflow_models: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    written: str,
    takes: str,
    gives: str,
    words: str,
) -> None:
    """Fails if accel accepts a written file in which a name is lost, the batch size is fixed, or a dtype is changed.
    The faulty stage in this test reports the signature of the source instead of the file's signature."""
    row = get_stage(stage)
    config: Any = resolve(row.config)()
    known = Signature((TensorSpec.parse(takes),), (TensorSpec.parse(gives),))
    (tmp_path / "source").write_bytes(b"of no account: the planted stage copies a file")

    def planted(src: Artifact, config: Any, out: Path) -> Artifact:
        main = out
        if row.gives == "tensorflow":
            shutil.copytree(tensorflow_models / written, out.parent, dirs_exist_ok=True)
            main = out.parent / "saved_model.pb"
        else:
            shutil.copyfile(tensorflow_models / written, out)
        return Artifact(path=main, kind=row.gives, signature=src.signature)

    monkeypatch.setattr(row.function.replace(":", "."), planted)
    src = Artifact(path=tmp_path / "source", kind=row.takes[0], signature=known)
    if not words:
        assert run_stage(stage, src, config).signature == known
        return
    with pytest.raises(SignatureDrift, match=f"stage {stage} .*{words}"):
        run_stage(stage, src, config)
