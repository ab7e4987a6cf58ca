"""A real model, served from what accel wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import Start

import accel
from accel.artifact import Artifact, manifest_path


@pytest.mark.slow
def test_minilm(minilm: Artifact, tmp_path: Path, start: Start) -> None:
    """Fails if the served model gives other embeddings than its session, at one of several lengths and batches; or its
    dynamic length isn't seen as one that batches may pad."""
    made = minilm.copy_to(tmp_path / "minilm" / "1" / "model.onnx")
    assert manifest_path(made.path).is_file()
    process = start(tmp_path)
    model = process.server.repository.get("minilm")
    assert model.scheduling.max_batch_size == 4
    assert model.scheduling.lengths is not None
    assert (model.scheduling.lengths.dim, model.scheduling.lengths.mask) == ("sequence", "attention_mask")
    with accel.load(made) as session, triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        for batch, sequence in ((1, 8), (3, 40), (4, 128)):
            feeds = session.example_inputs(batch=batch, sequence=sequence)
            inputs = []
            for name, value in feeds.items():
                inputs.append(triton.InferInput(name, list(value.shape), "INT64"))
                inputs[-1].set_data_from_numpy(value)
            found = client.infer("minilm", inputs).as_numpy("embedding")
            np.testing.assert_allclose(found, session.run(feeds)["embedding"], rtol=1e-4, atol=1e-5)
