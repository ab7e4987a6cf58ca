"""Proves that one exported decoder serves its base model and its LoRA adapters, and that a wrong adapter is caught."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import accel
from accel.artifact import ADAPTER_SUFFIX, Artifact
from accel.converters.decoder.stage import FuseDecoderConfig
from accel.converters.graph.simplify import SimplifyConfig
from accel.converters.quantize.stage import QuantizeConfig
from accel.decoders.adapters import adapter_feeds
from accel.decoders.proof import DecoderGate
from accel.decoders.replay import Replay, padded
from accel.errors import AccelError, InvalidModel, UnknownName
from accel.optimizer.attempt import gates_of
from accel.runtimes.base import open_session
from accel.runtimes.kv.lora import read_lora, write_lora
from accel.signature.decoder import IDS, LOGITS, MASK, POSITIONS, Cache
from accel.sources.source import Source
from accel.sources.torch.source import adapted, module_of
from accel.stage import run_stage
from tests.support.small_decoder import adapter_of, save_adapter, save_decoder, small_decoder

CONTEXT = 160
PROMPTS = [[5, 60, 7, 90, 11], [8, 100]]
Matrices = dict[str, np.ndarray]


@dataclass(frozen=True)
class Made:
    """A decoder with two adapters of other layers and ranks, as PEFT wrote them and as they were exported."""

    base: Path
    adapters: dict[str, Path]
    exported: Artifact

    def merged(self, name: str) -> Artifact:
        """Returns the PyTorch model with the adapter ``name`` merged."""
        return adapted(Source(self.base, decoder=True).open(), self.adapters[name])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("adapters")
    base = save_decoder(folder / "llama")
    model = small_decoder()
    adapters = {
        "query": save_adapter(folder / "query", adapter_of(model, ("q_proj", "lm_head"))),
        "wide": save_adapter(
            folder / "wide", adapter_of(model, ("q_proj", "v_proj", "down_proj"), rank=5), r=5, lora_alpha=20,
        ),
    }  # fmt: skip
    out = folder / "dec"
    exported = accel.export(base, adapters=list(adapters.values()), adapters_as="inputs", out=out, simplify=False)
    return Made(base, adapters, exported)


def _logits(of: Artifact, text: list[int]) -> np.ndarray:
    """Returns the logits of PyTorch for a text."""
    module: Any = module_of(of)
    found: np.ndarray = module.whole(torch.tensor([text])).numpy()
    return found


def test_onnx_runtime_applies_the_files_of_the_adapters(made: Made) -> None:
    """Fails if a matrix in a file is turned, unscaled or for another input than the decoder's, or if ONNX Runtime can't
    read the file as onnxruntime-genai would: without accel."""
    session = onnxruntime.InferenceSession(made.exported.path, providers=["CPUExecutionProvider"])
    layout = Cache.of(made.exported.signature)
    assert layout is not None
    ids = np.array([PROMPTS[0]])
    feeds = {IDS: ids, MASK: np.ones_like(ids), POSITIONS: np.arange(ids.shape[1])[None], **layout.empty(1)}
    source = Source(made.base, decoder=True).open()
    base = session.run([LOGITS], feeds)[0]
    assert np.allclose(base, _logits(source, PROMPTS[0]), rtol=1e-4, atol=1e-4)
    for name in made.adapters:
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(str(made.exported.adapters[name]))
        options.add_active_adapter(adapter)
        found = session.run([LOGITS], feeds, options)[0]
        assert np.allclose(found, _logits(made.merged(name), PROMPTS[0]), rtol=1e-4, atol=1e-4)
        assert np.linalg.norm(found - base) > 0.1 * np.linalg.norm(base)


def test_the_signature_and_the_manifest_name_the_adapters(made: Made) -> None:
    """Fails if a run needs the matrices, if their dims get ranges, if the manifest loses them or the files, or if the
    proof leaves an adapter out."""
    opened = Artifact.open(made.exported.path)
    inputs = {spec.name for spec in opened.signature.inputs}
    optional = {spec.name: spec.shape for spec in opened.signature.optional}
    assert not inputs & set(optional)
    assert optional["model.layers.1.self_attn.q_proj.lora_A"][0] == 32
    assert len(optional) == 2 * (2 * 3 + 1)
    assert set(opened.signature.dims) == {"batch", "sequence", "past"}
    assert set(opened.signature.example_inputs()) == inputs
    assert opened.adapters == made.exported.adapters
    assert opened.manifest is not None
    assert {f"adapters/{name}{ADAPTER_SUFFIX}" for name in made.adapters} <= set(opened.manifest.files)
    gates = {gate["case"].partition(", with the adapter ")[2] for gate in opened.history[-1]["gates"]}
    assert gates == {"", *made.adapters}


@pytest.mark.parametrize("name", ["query", "wide", None])
def test_generated_tokens_are_those_of_the_merged_model(made: Made, name: str | None) -> None:
    """Fails if a batch, the cache or a single token runs without the adapter, or with another one."""
    model: Any = module_of(made.merged(name) if name else Source(made.base, decoder=True).open())
    wanted = [
        model.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert accel.generate(made.exported, PROMPTS, max_new_tokens=12, adapter=name).ids == wanted


def test_an_unknown_adapter_is_refused(made: Made, cli: Callable[..., Any]) -> None:
    """Fails if a wrong name runs the base model in silence, or if the message names no adapter or no fix."""
    ran = cli("generate", made.exported.path.parent, "--prompt-ids", "1,2", "--adapter", "quary")
    assert ran.code != 0
    assert "has no adapter 'quary'; its adapters are query, wide" in ran.stderr
    with pytest.raises(UnknownName, match=r"has no adapters; export its source with adapters='FOLDER', adapters_as="):
        accel.generate(made.base, [[1]], adapter="query")


def _scaling_forgotten(found: Matrices) -> Matrices:
    return {name: value / 2 if name.endswith("_B") else value for name, value in found.items()}


def _of_another_layer(found: Matrices) -> Matrices:
    """Swaps A of the two layers."""
    names = [f"model.layers.{layer}.self_attn.q_proj.lora_A" for layer in (0, 1)]
    return {**found, names[0]: found[names[1]], names[1]: found[names[0]]}


def _left_out(found: Matrices) -> Matrices:
    return {name: value for name, value in found.items() if "lm_head" not in name}


@pytest.mark.parametrize("fault", [_scaling_forgotten, _of_another_layer, _left_out])
def test_the_gate_finds_a_wrong_adapter(made: Made, fault: Callable[[Matrices], Matrices], tmp_path: Path) -> None:
    """Shows that the gate of the stage can fail: one adapter has wrong matrices. Also fails if a file that was changed
    later is taken."""
    shutil.copytree(made.exported.path.parent, tmp_path / "dec")
    wrong = Artifact.open(tmp_path / "dec/model.onnx")
    file = wrong.adapters["query"]
    write_lora(file, fault(read_lora(file)))
    gate = DecoderGate(limit=1e-4, context=CONTEXT, adapter="query", reference=made.merged("query"))
    assert sum(not result.passed for result in gate.check(made.exported, wrong)) >= 7
    with pytest.raises(InvalidModel, match="is not the file its manifest describes"):
        accel.generate(tmp_path / "dec", [[1]], adapter="query")


def test_the_gate_finds_a_wrong_graph(made: Made, tmp_path: Path) -> None:
    """Shows that the gate can fail if a layer reads the matrices of another layer."""
    shutil.copytree(made.exported.path.parent, tmp_path / "dec")
    model = onnx.load(tmp_path / "dec/model.onnx")
    names = [f"model.layers.{layer}.self_attn.q_proj.lora_B" for layer in (0, 1)]
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[1 - names.index(name)]
    onnx.save(model, tmp_path / "dec/model.onnx")
    gate = DecoderGate(limit=1e-4, context=CONTEXT, adapter="wide", reference=made.merged("wide"))
    wrong = Artifact.open(tmp_path / "dec/model.onnx")
    assert any(not result.passed for result in gate.check(made.exported, wrong))


def test_verify_compares_each_adapter(made: Made, tmp_path: Path) -> None:
    """Fails if verify leaves an adapter out, passes an adapter that was trained on after the export, or can't compare
    one adapter in another folder."""
    found = accel.verify(made.base, made.exported)
    assert found.passed, found.problems
    assert sum("with the adapter" in case for case in found.cases) == 2 * 8
    moved = shutil.copytree(made.adapters["wide"], tmp_path / "wide")
    alone = accel.verify(made.base, made.exported, adapters=moved)
    assert alone.passed, alone.problems
    assert sum("with the adapter wide" in case for case in alone.cases) == 8
    config = moved / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 20', '"lora_alpha": 10'))
    wrong = accel.verify(made.base, made.exported, adapters=moved)
    assert not wrong.passed
    assert "with the adapter wide" in wrong.problems[0]


def test_two_adapters_take_turns_in_one_session(made: Made) -> None:
    """Fails if an adapter stays in the session after its request."""
    source = Source(made.base, decoder=True).open()
    ids, mask = padded(PROMPTS)
    with open_session(made.exported, "onnxruntime") as session:
        for name in ("wide", "", "query", "wide", ""):
            feeds = adapter_feeds(made.exported, name)
            found = Replay(session, 2, adapter=feeds).step(ids, mask)
            of = made.merged(name) if name else source
            for row, text in zip(found, PROMPTS, strict=True):
                assert np.allclose(row[-len(text) :], _logits(of, text)[0], rtol=1e-4, atol=1e-4)


def test_optimized_forms_keep_the_adapters(made: Made, tmp_path: Path) -> None:
    """Fails if a stage of accel optimize drops the inputs or the files of the adapters, fuses their products with those
    of the base, or quantizes them, or if a batch that runs row by row cuts their matrices."""
    artifact = run_stage("simplify", made.exported, SimplifyConfig())
    fused = run_stage(
        "fuse_decoder", artifact, FuseDecoderConfig(), gates=gates_of("fuse_decoder", artifact, 1e-4, None)
    )
    small = QuantizeConfig(mode="int4-weights", smallest=256)
    quantized = {
        "int8": run_stage("quantize", fused, QuantizeConfig(mode="dynamic")),
        "int4": run_stage("quantize", fused, small, out=tmp_path / "q/model.onnx"),
    }
    operators = [node.op_type for node in onnx.load(quantized["int4"].path).graph.node]
    assert operators.count("MatMul") == 2 * (2 * 3 + 1)  # of the adapters alone
    ids, mask = padded(PROMPTS)
    base = _replayed(made.exported, "", ids, mask)
    for name in ("wide", "query"):
        wanted = _replayed(made.exported, name, ids, mask)
        assert np.allclose(_replayed(fused, name, ids, mask), wanted, rtol=1e-3, atol=1e-3)
        for of in quantized.values():
            rounding = _distance(_replayed(of, "", ids, mask), base)
            error = _distance(_replayed(of, name, ids, mask), wanted)
            assert error < 1.5 * rounding < _distance(base, wanted)
    assert accel.generate(tmp_path / "q", PROMPTS, max_new_tokens=2, adapter="wide").ids


def _replayed(of: Artifact, name: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the logits of the last two tokens of a batch, which run after the others."""
    with open_session(of, "onnxruntime") as session:
        running = Replay(session, len(ids), adapter=adapter_feeds(of, name))
        running.step(ids[:, :-2], mask[:, :-2])
        return running.step(ids[:, -2:], mask[:, -2:])


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_a_format_without_optional_inputs_is_refused(made: Made, tmp_path: Path) -> None:
    """Fails if OpenVINO gets a decoder without the adapters in silence."""
    with pytest.raises(
        AccelError, match=r"takes its adapters \(query, wide\) as inputs .* export that merges one adapter"
    ):
        accel.export(made.exported.path.parent, to="openvino", out=tmp_path / "ov")


WHOLE = {"base_model.model.model.norm.weight": torch.ones(32)}
BIAS = {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": torch.ones(32)}


@pytest.mark.parametrize(
    ("names", "extra", "said"),
    [
        (("q_proj",), WHOLE, "has the whole weights model.norm.weight"),
        (("q_proj",), BIAS, "has a bias for model.layers.0.self_attn.q_proj"),
        (("embed_tokens",), {}, "adapts model.embed_tokens, a layer of the type Embedding"),
    ],
)
def test_an_adapter_that_can_only_be_merged_is_refused(
    names: tuple[str, ...], extra: Mapping[str, torch.Tensor], said: str, made: Made, tmp_path: Path
) -> None:
    """Fails if a part of an adapter is left out in silence, or the message doesn't say to merge it."""
    adapter = save_adapter(tmp_path / "adapter", adapter_of(small_decoder(), names) | dict(extra))
    with pytest.raises(AccelError, match=rf"{said}.*; merge it: give it alone, without adapters_as='inputs'"):
        accel.export(made.base, adapters=adapter, adapters_as="inputs", out=tmp_path / "dec")
    assert not (tmp_path / "dec").exists()


def test_layers_with_equal_weights_are_refused(tmp_path: Path) -> None:
    """Fails if the matrices of a layer go to another layer with the same weights."""
    model = small_decoder()
    first, second = (model.model.layers[number].self_attn.q_proj for number in (0, 1))
    with torch.no_grad():
        second.weight.copy_(first.weight)
    model.save_pretrained(tmp_path / "llama")
    adapter = save_adapter(tmp_path / "adapter", adapter_of(model, ("q_proj",)))
    with pytest.raises(AccelError, match=r"self_attn.q_proj, whose weights are those of another layer"):
        accel.export(tmp_path / "llama", adapters=adapter, adapters_as="inputs", out=tmp_path / "dec")


def test_wrong_options_are_refused(made: Made, tmp_path: Path) -> None:
    """Fails if an option has no effect, or if a message names no fix."""
    two = list(made.adapters.values())
    same = shutil.copytree(two[0], tmp_path / "other" / "query")
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"adapters": two},
            "2 adapters can't be merged into one model; give one with adapters=, or keep them as inputs",
        ),
        ({"adapters": two, "adapters_as": "input"}, "adapters_as= takes merged or inputs"),
        ({"adapters_as": "inputs"}, "give their folders with adapters="),
        ({"adapters": [two[0], same], "adapters_as": "inputs"}, "two adapters are called query; rename one"),
        ({"adapters": two, "adapters_as": "inputs", "to": "openvino"}, "a model in the format openvino can't take"),
        ({"adapters": two, "adapters_as": "inputs", "decoder": False}, "is not exported as a decoder"),
    ]
    for options, said in wrong:
        with pytest.raises(AccelError, match=said):
            accel.export(made.base, out=tmp_path / "dec", **options)


@pytest.mark.proof
def test_layers_of_gpt2_take_adapters(tmp_path: Path) -> None:
    """Fails if the turned weights of GPT-2's linear layers, which become Gemm, aren't found, or get a turned product.
    The gates of the export compare the adapter with PyTorch."""
    base = save_decoder(tmp_path / "gpt2", "gpt2")
    adapter = save_adapter(tmp_path / "adapter", adapter_of(small_decoder("gpt2"), ("c_attn", "c_proj", "lm_head")))
    made = accel.export(base, adapters=adapter, adapters_as="inputs", out=tmp_path / "dec")
    assert len(made.signature.optional) == 2 * (2 * 3 + 1)
    assert [node.op_type for node in onnx.load(made.path).graph.node].count("Gemm") == 2 * 4
    tokens = accel.generate(made, PROMPTS, max_new_tokens=4).ids
    assert accel.generate(made, PROMPTS, max_new_tokens=4, adapter="adapter").ids != tokens
