"""Proves that the server serves a real model from the files that accel wrote."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

import accel
from accel.artifact import Artifact, manifest_path
from tests.support.serving import Start


@pytest.mark.slow
def test_minilm(minilm: Artifact, tmp_path: Path, start: Start) -> None:
    """Runs the model in the server and in a session, with three lengths and batch sizes. Fails if the embeddings
    differ. Also checks that the server detects the dim along which batches may be padded."""
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


@pytest.mark.slow
def test_texts_of_many_lengths_together(minilm: Artifact, tmp_path: Path, start: Start) -> None:
    """Checks that texts of different lengths share a batch. Also fails if unmasked padding, a missing mask or another
    text's answer changes an embedding."""
    minilm.copy_to(tmp_path / "minilm" / "1" / "model.onnx")
    (tmp_path / "minilm" / "config.pbtxt").write_text("dynamic_batching { max_queue_delay_microseconds: 2000000 }")
    process = start(tmp_path)
    lengths = (8, 200, 9, 64, 10, 130, 11, 33, 256, 12, 65, 13)
    answers: queue.Queue[Any] = queue.Queue()
    with accel.load(minilm) as session, triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        asked = {}
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number, length in enumerate(lengths):
            feeds = session.example_inputs(seed=number, batch=1, sequence=length)
            if number % 2:
                feeds["attention_mask"] = np.ones_like(feeds["attention_mask"])
            asked[str(number)] = feeds
            inputs = []
            for name, value in feeds.items():
                if name != "attention_mask" or number % 2 == 0:
                    inputs.append(triton.InferInput(name, list(value.shape), "INT64"))
                    inputs[-1].set_data_from_numpy(value)
            client.async_stream_infer("minilm", inputs, request_id=str(number))
        for _ in lengths:
            result, error = answers.get(timeout=60)
            assert error is None
            reference = session.run(asked.pop(result.get_response().id))["embedding"]
            apart = np.linalg.norm(result.as_numpy("embedding") - reference) / np.linalg.norm(reference)
            assert apart < 1e-4
        client.stop_stream()
        assert not asked
        [counted] = client.get_inference_statistics("minilm").model_stats
    assert counted.inference_count == len(lengths)
    assert counted.execution_count < len(lengths)
