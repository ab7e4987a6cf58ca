"""The least a Python gRPC server can do: parse a ModelInferRequest, build a ModelInferResponse, run nothing.

python floor.py PORT BYTES: BYTES is the size of the one output it answers with.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from accel.serve.process import keep_freed_memory


def main(port: int, size: int) -> None:
    keep_freed_memory()
    raw = bytes(size)

    def answer(request: Any, _context: Any) -> Any:
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name="y", datatype="FP32", shape=[1, size // 4])
        response.raw_output_contents.append(raw)
        return response

    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            answer, service_pb2.ModelInferRequest.FromString, service_pb2.ModelInferResponse.SerializeToString
        )
    }
    if os.fork() == 0:  # two processes on one port, one for each core
        os.sched_setaffinity(0, {0})
    else:
        os.sched_setaffinity(0, {1})
    options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(4), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
