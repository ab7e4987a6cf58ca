"""Serves gRPC requests with as little work as possible, to show the least time that a Python server needs.

Usage:

    python floor.py PORT BYTES         # answers every request with one output of BYTES bytes, all zeros
    python floor.py PORT MODEL.onnx    # runs the model with one thread, the thread that handles the request.

Parses a ModelInferRequest and builds a ModelInferResponse, without a queue, checks or batches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from accel.serve.process.serving import keep_freed_memory

DTYPES = {"FP32": np.float32, "INT64": np.int64}


def main(port: int, answered: str) -> None:
    keep_freed_memory()
    if os.fork() == 0:  # two processes on one port, one per core
        os.sched_setaffinity(0, {0})
    else:
        os.sched_setaffinity(0, {1})
    run = running(answered) if answered.endswith(".onnx") else zeros(int(answered))

    def answer(request: Any, _context: Any) -> Any:
        found = run(request)
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name="y", datatype="FP32", shape=found.shape)
        response.raw_output_contents.append(found.tobytes())
        return response

    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            answer, service_pb2.ModelInferRequest.FromString, service_pb2.ModelInferResponse.SerializeToString
        )
    }
    options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(4), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def zeros(size: int) -> Callable[[Any], np.ndarray]:
    found = np.zeros((1, size // 4), np.float32)
    return lambda _request: found


def running(model: str) -> Callable[[Any], np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(request: Any) -> np.ndarray:
        feeds = {
            given.name: np.frombuffer(raw, DTYPES[given.datatype]).reshape(given.shape)
            for given, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        (found,) = session.run(None, feeds)
        return found

    return run


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
