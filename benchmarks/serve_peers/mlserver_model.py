"""Defines an MLServer runtime that runs an ONNX file with ONNX Runtime, as accel does."""

from __future__ import annotations

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):
    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            self.settings.parameters.uri, options, providers=["CPUExecutionProvider"]
        )
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        feeds = {entry.name: NumpyCodec.decode_input(entry) for entry in payload.inputs}
        names = [output.name for output in self.session.get_outputs()]
        found = self.session.run(names, feeds)
        outputs = [NumpyCodec.encode_output(name, value) for name, value in zip(names, found, strict=True)]
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=outputs)
