"""Builds an ONNX file with TensorRT-RTX in a separate process, and prints the kernels of the engine.

The second argument is the compute capability, by default ``SM86``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tensorrt_rtx_bindings as trt


class Log(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.layers = ""

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(message)
        if message.startswith("Layers:"):
            self.layers = message


def main() -> None:
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(Path(sys.argv[1]).read_bytes())
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    member = sys.argv[2] if len(sys.argv) > 2 else "SM86"
    config.set_compute_capability(getattr(trt.ComputeCapability, member), 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    for at in range(network.num_inputs):
        tensor = network.get_input(at)
        low, high = ([size if dim == -1 else dim for dim in tensor.shape] for size in (1, 8))
        profile.set_shape(tensor.name, low, high, high)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config) if parsed else None
    size = 0 if engine is None else engine.nbytes
    print(json.dumps({"parsed": parsed, "bytes": size, "layers": log.layers, "errors": log.errors}))


if __name__ == "__main__":
    main()
