"""Calls the public functions as a user in a notebook does.

``make lint`` checks these calls with mypy and with pyright, both in strict mode, and so finds public types that a
user's code can't meet. No test runs this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from onnx import ModelProto
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.api.optimize import CastOptions, Optimized, QuantizeOptions
from accel.sources.pipeline import Parts


def top1(outputs: dict[str, np.ndarray], data: dict[str, np.ndarray]) -> float:
    return float((outputs["output"].argmax(-1) == data["labels"]).mean())


def top1_of_mappings(outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:
    return float((outputs["output"].argmax(-1) == data["labels"]).mean())


def batches(images: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(images), 32):
        yield {"input": images[start : start + 32]}


@accel.declare(inputs={"x": ("float32", ("batch", 16))}, outputs=["scores"], dims={"batch": (1, 8, 32)})
def make() -> torch.nn.Module:
    return torch.nn.Linear(16, 4)


def optimized(model: torch.nn.Module, x: torch.Tensor, images: torch.Tensor) -> Optimized:
    """Optimizes a model in memory and a model in a file, with each kind of data, metric and options."""
    loader = DataLoader(TensorDataset(images, torch.zeros(len(images))), batch_size=32)
    fast = accel.optimize(model, example=(x,), data=loader, metric=top1, max_drop=0.01)
    accel.optimize(model, example={"input": x}, data={"input": x.numpy()}, metric=top1_of_mappings)
    accel.optimize(
        model, example=x, data=batches(images), eval_data="test.npz", metric=lambda _, data: float(len(data))
    )
    accel.optimize(model, inputs=["input:float32[batch,3,8,8]"], data="samples.npz", metric="my.py:top1")
    accel.optimize(
        Path("model.onnx"),
        target=["ort-cpu", "openvino"],
        precision="int8",
        labels="labels.npz",
        sizes={"batch": 1},
        quantize={"calibration": "entropy", "keep": ["head"]},
        cast={"keep_fp32": ["Softmax"]},
        dims={"batch": (1, 8, 32)},
        budget_seconds=60,
        out="out",
    )
    accel.optimize(
        "dec", text="text.txt", max_kl=0.005, contexts=[128, 1024], quantize=QuantizeOptions(percentile=99.9)
    )
    accel.optimize(
        "model.onnx", quantize=["calibration=entropy"], cast=CastOptions(keep_io=True), engine=["builder-level=5"]
    )
    return fast


def results(fast: Optimized, x: torch.Tensor) -> list[str]:
    """Reads the result of an optimization."""
    y: torch.Tensor = fast(x)
    outputs: dict[str, np.ndarray] = fast.run({"input": x.numpy()})
    speedup: float | None = fast.speedup
    noisy: bool = fast.comparison is not None and fast.comparison.too_noisy
    lines = [fast.table(), fast.chosen, f"{fast.max_drop}", f"{y.shape} {list(outputs)} {speedup} {noisy}"]
    for row in fast.candidates:
        ms = row.measured["median_ms"] if row.measured else None
        drop = row.judgement.drop if row.judgement else None
        lines.append(f"{row.name} {row.status} {row.reason} {ms} {drop}")
    saved: accel.Artifact = fast.save("out")
    manifest: accel.Manifest | None = saved.manifest
    signature: accel.Signature = saved.signature
    spec: accel.TensorSpec = signature.inputs[0]
    stages = [str(stage["name"]) for stage in manifest.stages] if manifest else []
    return [*lines, *stages, *fast.notes, spec.name, spec.dtype, ",".join(map(str, spec.shape))]


def sessions(x: torch.Tensor) -> np.ndarray:
    """Opens a session and calls it, with tensors and with arrays."""
    with accel.load("out", options={"threads": 2}) as session:
        z: torch.Tensor = session(x)
        array: np.ndarray = session.run({"input": x.numpy()})["output"]
        several = session.run_many([session.example_inputs(batch=2), session.example_inputs(seed=1, batch=4)])
    opened: accel.Session = accel.load(accel.Source("net.py:make", weights="w.pt", dims={"batch": "1:8:32"}))
    feeds: dict[str, np.ndarray] = opened.example_inputs(batch=2)
    opened.close()
    return np.concatenate([array, z.numpy(), *(one["output"] for one in several), *feeds.values()])


def files(model: torch.nn.Module, fast: Optimized, old: ModelProto, x: torch.Tensor) -> list[str]:
    """Exports, compares, times, bisects and inspects models."""
    exported: accel.Artifact = accel.export(model, example=(x,), dynamic={"input": {0: "batch", 2: "height"}})
    accel.export(make, out="made.onnx", opset=20, limit=1e-3)
    accel.export(torch.export.export(model, (x,)), to="openvino", out="ir")
    accel.export(old, opset=20, inputs=["x:float32[batch,4]{0..1}"], out="new.onnx")
    checked = accel.verify(model, exported, example=(x,), limit=1e-3)
    worst: float = max(found.rel_l2 for found in checked.outputs.values())
    report = accel.bench([fast, exported, "out"], against=model, example=(x,), also=["torch-compile"])
    times = [f"{row.name} {row.median_ms} {row.speedup} {row.verdict}" for row in report.rows]
    found = accel.bisect(model, exported, example=(x,), data="samples.npz")
    where = str(found.divergence) if found.divergence is not None else "equal"
    about = accel.inspect(exported, check=True, sizes={"batch": 8})
    changed = [str(link) for link in about.changed]
    target: accel.Target = accel.Target.get("ort-cpu")
    rows = accel.infer("out", "rows.parquet", out="scores", pad={"input": 0.0}, columns={"input": "pixels"}).rows
    answer = f"{checked.passed} {worst} {report.too_noisy} {about.intact} {target.runtime} {rows}"
    return [answer, where, *times, *changed, *checked.problems, str(accel.doctor()["python"])]


def decoded(first: accel.Artifact) -> list[str | None]:
    """Generates texts and token ids, in a loop and at once."""
    words: list[str] = []
    for token in accel.generate("dec", "def ", max_new_tokens=64, temperature=0.7, stop=["\n"]):
        words.append(f"{token.prompt} {token.id} {token.text} {token.finish}")
    with accel.generate(first, [[1, 2, 3], [4]], logit_bias={7: -1.0}, json_schema={"type": "object"}) as answers:
        ids: list[list[int]] = answers.ids
    texts: list[str | None] = accel.generate("dec", ["one", "two"], draft="ngram", chat=True).texts
    return [*words, *texts, *answers.finishes, f"{ids} {answers.tokens_per_second}"]


def translate(parts: Parts, tokens: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = parts.decoder(parts.encoder(tokens))
    return out


def modules(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Joins modules, fuses layers and compiles a module."""
    both = accel.Pipeline(translate, encoder=model, decoder=model)
    accel.export(both, example=(x,), out="both")
    fused, report = accel.fuse(model.eval(), x)
    y: torch.Tensor = fused(x)
    compiled = torch.compile(model, backend="accel")  # pyright: ignore[reportUnknownMemberType] - torch has no types here
    z: torch.Tensor = compiled(x)
    try:
        accel.export("net.py:make", out="net.onnx")
    except accel.AccelError as error:
        print(error, report.difference, len(report.matches))
    return y + z
