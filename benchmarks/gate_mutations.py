"""Counts how many random faults in exported graphs the gate of an export finds.

Usage:

    python benchmarks/gate_mutations.py           # writes benchmarks/results/gate_mutations.json and .md
    python benchmarks/gate_mutations.py --count 20

Each fault changes one thing in the ONNX graph of a small transformer, a convolutional net or a recurrent net: a weight,
an attribute, an operator, the order of two inputs, or an integer constant such as a size in a Reshape. A fault counts
if the outputs differ from the original by more than the gate's limit, or can't be computed, at one of 27 combinations
of sizes, with three inputs for each. The gate runs with its own cases, and with the cases of version 0.1.0, which
combined the largest batch with the usual sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper

import accel
from accel import kept_outputs
from accel.artifact import Artifact
from accel.errors import AccelError
from accel.proof.compare import compare
from accel.proof.gates import OutputGate
from accel.runtimes.base import open_session
from accel.signature import Signature
from accel.sources.onnx.file import open_onnx
from accel.tables.limits import EXPORT_LIMITS

RESULTS = Path(__file__).parent / "results"
LIMIT = EXPORT_LIMITS["fp32"]
SEEDS = 3
UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Sqrt", "Erf", "Exp")
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min")


class Tagger(torch.nn.Module):
    """A recurrent net with one label for each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)
        self.rnn = torch.nn.LSTM(16, 12, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(24, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.table(ids))[0]).softmax(-1)


class Convolutions(torch.nn.Module):
    """A net with a downsampling and an upsampling branch, and dynamic heights and widths."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        self.same = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.head = torch.nn.Linear(8, 6)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = self.down(image)
        mixed = low + self.same(low).sigmoid()
        scores = self.head(mixed.flatten(2).transpose(1, 2).mean(1))
        return scores, torch.nn.functional.interpolate(mixed, scale_factor=2.0, mode="nearest")


def transformer() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=99, max_position_embeddings=64, **sizes), add_pooling_layer=False)


def exported(folder: Path) -> list[Artifact]:
    """Returns the ONNX files of the three nets."""
    torch.manual_seed(0)
    ids, text = "ids:int64[batch,length]{0..49}", "input_ids:int64[batch,length]{0..98}"
    mask = "attention_mask:int64[batch,length]"
    image = "image:float32[batch,3,height,width]"
    lengths = {"batch": (1, 1, 8), "length": (4, 16, 48)}
    areas = {"batch": (1, 1, 8), "height": (8, 16, 40, 2), "width": (8, 16, 40, 2)}
    nets: list[tuple[str, torch.nn.Module, list[str], Any]] = [
        ("transformer", transformer(), [text, mask], lengths),
        ("tagger", Tagger(), [ids], lengths),
        ("convolutions", Convolutions(), [image], areas),
    ]
    return [
        accel.export(net.eval(), inputs=inputs, dims=dims, out=folder / f"{name}.onnx")
        for name, net, inputs, dims in nets
    ]


def mutations() -> dict[str, Callable[[onnx.GraphProto, random.Random], bool]]:
    """Returns the kinds of faults. Each function changes a graph in place, and returns False if it can't."""
    return {
        "weight": change_weight,
        "attribute": change_attribute,
        "operator": change_operator,
        "order of inputs": swap_inputs,
        "constant": change_constant,
    }


def change_weight(graph: onnx.GraphProto, draw: random.Random) -> bool:
    floats = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 1]
    tensor = draw.choice(floats)
    value = numpy_helper.to_array(tensor).copy()
    row = draw.randrange(len(value))
    value[row] = draw.choice([0.0, 1.1, -1.0]) * value[row]
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return True


def change_attribute(graph: onnx.GraphProto, draw: random.Random) -> bool:
    kinds = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOAT)
    found = [attribute for node in graph.node for attribute in node.attribute if attribute.type in kinds]
    attribute = draw.choice(found)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i += draw.choice([-1, 1])
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f *= draw.choice([0.5, 2.0])
    elif len(attribute.ints):
        at = draw.randrange(len(attribute.ints))
        attribute.ints[at] += draw.choice([-1, 1])
    return True


def change_operator(graph: onnx.GraphProto, draw: random.Random) -> bool:
    found = [node for node in graph.node if node.op_type in (*UNARY, *BINARY)]
    if not found:
        return False
    node = draw.choice(found)
    others = UNARY if node.op_type in UNARY else BINARY
    node.op_type = draw.choice([name for name in others if name != node.op_type])
    return True


def swap_inputs(graph: onnx.GraphProto, draw: random.Random) -> bool:
    found = [node for node in graph.node if len(node.input) == 2]
    node = draw.choice(found)
    first, second = node.input
    node.input[0], node.input[1] = second, first
    return True


def change_constant(graph: onnx.GraphProto, draw: random.Random) -> bool:
    """Changes an integer of a shape, an index or a bound. Half of the faults set a size that is right for the usual
    sizes, as an exporter does that records the example's sizes."""
    found = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT64 and np.prod(t.dims) >= 1]
    if not found:
        return False
    tensor = draw.choice(found)
    value = numpy_helper.to_array(tensor).copy()
    at = draw.randrange(value.size)
    value.reshape(-1)[at] = draw.choice([1, 2, 8, 16, 48, int(value.reshape(-1)[at]) + draw.choice([-1, 1])])
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return True


def old_cases(self: Signature, largest_batch: int | None = None) -> list[dict[str, int]]:
    """Returns the cases of version 0.1.0."""
    new = new_cases(self, largest_batch)
    largest = dict(new[-1])
    usual = self.sizes()
    return [*new[:-1], {dim: size if dim == self.batch_dim else usual[dim] for dim, size in largest.items()}]


new_cases = Signature.cases


@contextmanager
def with_cases(cases: Callable[..., list[dict[str, int]]]) -> Iterator[None]:
    Signature.cases = cases  # type: ignore[method-assign]
    try:
        yield
    finally:
        Signature.cases = new_cases  # type: ignore[method-assign]


def is_wrong(session: Any, wanted: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]) -> bool:
    """Tells whether a model's outputs are off, or can't be computed, for one of the inputs in ``wanted``."""
    for feeds, outputs in wanted:
        try:
            found = session.run(feeds)
        except AccelError:
            return True
        if any(not one.rel_l2 <= LIMIT for one in compare(outputs, found)):
            return True
    return False


def everywhere(source: Artifact) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Returns the inputs at many combinations of sizes, and the outputs of ``source``."""
    signature = source.signature
    picks = [
        sorted({r.min, r.opt, r.max, 2 if dim == signature.batch_dim else r.opt}) for dim, r in signature.dims.items()
    ]
    with open_session(source) as session:
        found = []
        for sizes in itertools.product(*picks):
            for seed in range(SEEDS):
                feeds = signature.example_inputs(seed=1000 + seed, **dict(zip(signature.dims, sizes, strict=True)))
                found.append((feeds, session.run(feeds)))
    return found


def finds(source: Artifact, mutant: Artifact) -> bool:
    """Tells whether the gate finds the fault."""
    try:
        return any(result.passed is False for result in OutputGate(limit=LIMIT).check(source, mutant))
    except AccelError:
        return True


def run(count: int) -> dict[str, Any]:
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    onnxruntime.set_default_logger_severity(4)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        sources = exported(folder)
        wanted = {source.path.stem: everywhere(source) for source in sources}
        kinds = mutations()
        while len(rows) < count:
            source, kind = draw.choice(sources), draw.choice(list(kinds))
            model = onnx.load(str(source.path))
            before = model.SerializeToString()
            if not kinds[kind](model.graph, draw) or model.SerializeToString() == before:
                continue
            path = folder / "mutant.onnx"
            onnx.save(model, str(path))
            try:
                mutant = replace(open_onnx(path, probe=False), signature=source.signature)
                with open_session(mutant) as session:
                    if not is_wrong(session, wanted[source.path.stem]):
                        continue
            except AccelError:  # no runtime loads the graph, so every gate finds the fault
                continue
            found = {}
            for name, cases in (("new", new_cases), ("old", old_cases)):
                kept_outputs.forget()
                with with_cases(cases):
                    found[name] = finds(source, mutant)
            rows.append({"model": source.path.stem, "kind": kind, **found})
            print(f"{len(rows)}: {rows[-1]}", flush=True)
    return {"rows": rows, "limit": LIMIT}


def markdown(body: dict[str, Any]) -> str:
    rows = body["rows"]
    lines = [
        "# Random faults that the gate of an export finds",
        "",
        f"{len(rows)} faults in the graphs of three small nets, each of which changes the outputs by more than"
        f" {body['limit']:g}",
        "at some sizes, or stops the model there. Made by `python benchmarks/gate_mutations.py`.",
        "",
        "| fault | faults | found | found with the cases of version 0.1.0 |",
        "|---|---|---|---|",
    ]
    for kind in (*mutations(), ""):
        own = [row for row in rows if row["kind"] == kind or not kind]
        new, old = (sum(row[name] for row in own) for name in ("new", "old"))
        lines.append(f"| {kind or 'all'} | {len(own)} | {new} | {old} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    body = run(asked.count)
    (asked.results / "gate_mutations.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (asked.results / "gate_mutations.md").write_text(markdown(body), encoding="utf-8")
    print(markdown(body))


if __name__ == "__main__":
    main()
