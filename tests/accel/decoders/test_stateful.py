"""Proves that decoders become stateful IRs of OpenVINO that equal PyTorch, in the form that openvino-genai reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as opset
import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.decoders.proof import DecoderGate
from accel.decoders.tokenizer_ir import TOKENIZER_IR, missing_ir, write_tokenizer_ir
from accel.errors import CannotWrite, GateFailed, UsageError
from accel.runtimes import openvino as runtime
from accel.sources.source import Source
from tests.support.small_decoder import BYTE_VOCABULARY, save_byte_tokenizer, save_decoder, small_decoder

LIMIT = 1e-4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_decoder(tmp_path_factory.mktemp("source") / "llama", vocab_size=BYTE_VOCABULARY)
    return save_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return accel.export(source, to="openvino", out=tmp_path_factory.mktemp("exported") / "dec")


def test_openvino_alone_continues_a_text(exported: Artifact) -> None:
    """Fails if the folder lacks what openvino-genai reads, or if plain OpenVINO gets other logits than PyTorch for a
    prompt, single tokens, a new order of the rows, and a second text after a reset."""
    folder = exported.path.parent
    assert exported.path.name == "openvino_model.xml"
    assert {"config.json", "generation_config.json", "tokenizer_config.json", "openvino_model.bin"} <= {
        file.name for file in folder.iterdir()
    }
    hints = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    model = openvino.compile_model(str(exported.path), "CPU", hints)
    assert [port.any_name for port in model.inputs] == ["input_ids", "attention_mask", "position_ids", "beam_idx"]
    assert [port.any_name for port in model.outputs] == ["logits"]
    request = model.create_infer_request()
    texts = np.random.default_rng(0).integers(3, BYTE_VOCABULARY, (3, 2, 9))

    def step(ids: np.ndarray, start: int, beams: list[int]) -> np.ndarray:
        rows, count = ids.shape
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones((rows, start + count), np.int64),
            "position_ids": np.tile(np.arange(start, start + count), (rows, 1)),
            "beam_idx": np.array(beams, np.int32),
        }
        return np.array(request.infer(feeds)["logits"])

    reference = small_decoder(vocab_size=BYTE_VOCABULARY)
    for first, second in texts:
        request.reset_state()
        parts = [step(np.stack([first[:5], second[:5]]), 0, [0, 1])[:, -1]]
        parts.append(step(np.stack([second[5:6], first[5:6]]), 5, [1, 0])[:, -1])  # the rows change places
        parts += [step(np.stack([second, first])[:, at : at + 1], at, [0, 1])[:, -1] for at in range(6, 9)]
        with torch.no_grad():
            wanted = reference(torch.from_numpy(np.stack([second, first]))).logits[:, 4:].numpy()
        found = np.stack([parts[0][::-1], *parts[1:]], axis=1)
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_every_scenario_was_run_against_pytorch(source: Path, exported: Artifact) -> None:
    """Fails if the manifest lacks a scenario of the stateful IR, or its reference isn't the PyTorch model."""
    record = exported.history[-1]
    assert record["name"] == "stateful_from_onnx"
    results = {result["case"]: result["value"] for result in record["gates"]}
    assert len(results) == 8
    assert max(results.values()) < 1e-5
    found = accel.verify(source, exported)
    assert found.passed, found.verdict
    assert set(results) <= set(found.cases)
    assert found.outputs["logits"].rel_l2 < 1e-5
    other = small_decoder(vocab_size=BYTE_VOCABULARY)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    assert not accel.verify(other, exported).passed
    with pytest.raises(UsageError, match="takes texts of its own; leave out data="):
        accel.verify(source, exported, data=Path("data.npz"))


def test_generation_equals_transformers(source: Path, exported: Artifact, cli) -> None:
    """Fails if accel generate can't run the folder, rows of unequal lengths disturb each other, or a row that ends
    early shifts the cache of the others."""
    prompts = [[5, 6, 7, 8], [9], [40, 41]]
    wanted = accel.generate(source, prompts, max_new_tokens=12)
    found = accel.generate(exported.path.parent, prompts, max_new_tokens=12)
    assert found.ids == wanted.ids
    ends = wanted.ids[1][2]
    stopping = replace(exported, source={**exported.source, "decoder": {**exported.source["decoder"], "eos": [ends]}})
    cut = [row[: row.index(ends) + 1] if ends in row else row for row in wanted.ids]
    assert len({len(row) for row in cut}) > 1
    assert accel.generate(stopping, prompts, max_new_tokens=12).ids == cut
    ran = cli("generate", str(exported.path.parent), "--prompt", "ab", "--max-new-tokens", "3", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["ids"] == accel.generate(source, "ab", max_new_tokens=3).ids[0]


Edit = Callable[[Any], None]


def _same_order(model: Any) -> None:
    """Ignores ``beam_idx``: every row keeps its place."""
    for node in model.get_ops():
        if node.get_type_name() == "Gather" and node.input_value(0).get_node().get_type_name() == "ReadValue":
            node.output(0).replace(node.input_value(0))


def _swapped(model: Any) -> None:
    """Stores the keys of a layer where the values belong."""
    sinks = {sink.get_variable_id(): sink for sink in model.get_sinks()}
    key, value = (sinks[f"past_key_values.1.{part}present.1.{part}"] for part in ("key", "value"))
    both = key.input_value(0), value.input_value(0)
    key.input(0).replace_source_output(both[1])
    value.input(0).replace_source_output(both[0])


def _shifted(model: Any) -> None:
    """Stores the values of a layer one token late."""
    sink = next(sink for sink in model.get_sinks() if "1.value" in sink.get_variable_id())
    sink.input(0).replace_source_output(opset.roll(sink.input_value(0), [1], [2]).output(0))


@pytest.mark.parametrize(
    ("edit", "case"),
    [(_same_order, "rows in a new order"), (_swapped, "prefill in three parts"), (_shifted, "prefill in three parts")],
)
def test_planted_faults_are_found(edit: Edit, case: str, source: Path, exported: Artifact, tmp_path: Path) -> None:
    """Fails if the gate passes an IR with this fault, or doesn't name the scenario."""
    core = openvino.Core()
    model = core.read_model(str(exported.path))
    edit(model)
    openvino.save_model(model, str(tmp_path / "model.xml"), compress_to_fp16=False)
    faulty = replace(exported, path=tmp_path / "model.xml", companions=("model.bin",))
    gate = DecoderGate(limit=LIMIT, context=exported.source["decoder"]["context"])
    results = gate.check(Source(source, decoder=True).open(), faulty)
    assert case in [result.case for result in results if not result.passed]
    assert next(result for result in results if result.case == "prefill of the whole text").passed


@pytest.mark.skipif("BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="no bf16")
def test_bfloat16_does_not_pass_as_float32(source: Path, exported: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a session that says float32 computes in bfloat16, OpenVINO's default on such CPUs, and the gate doesn't
    say so by what the compiled model reports."""
    monkeypatch.setitem(runtime._HINTS, "fp32", "bf16")
    gate = DecoderGate(limit=1.0, context=160)
    with pytest.raises(GateFailed, match=r"matrix products .* in bf16 instead of float32"):
        gate.check(Source(source, decoder=True).open(), exported)


def test_a_cache_of_8_bits_does_not_pass_as_float32(exported: Artifact) -> None:
    """Fails if a session leaves the precision of the cache to OpenVINO, which is 8 bits."""
    with accel.load(exported) as session:
        assert isinstance(session, runtime.OpenVinoSession)
        assert str(session._model.get_property("KV_CACHE_PRECISION").to_string()) == "f32"
        assert set(session.computed_in()) == {"f32"}


def test_a_run_begins_with_an_empty_cache(exported: Artifact) -> None:
    """Fails if a session keeps the cache of one call for the next."""
    with accel.load(exported) as session:
        feeds = session.example_inputs(batch=2, sequence=5)
        first = session.run(feeds)["logits"]
        assert np.array_equal(session.run(feeds)["logits"], first)


@pytest.mark.slow
def test_a_folder_holds_one_form(source: Path, exported: Artifact, tmp_path: Path) -> None:
    """Fails if two forms of a decoder land in one folder, where accel and others would open the older one, or if a
    decoder of accel in ONNX isn't converted."""
    with pytest.raises(CannotWrite, match="holds a model in another form"):
        accel.export(source, out=exported.path.parent)
    cached = accel.export(source, out=tmp_path / "dec")
    again = accel.export(tmp_path / "dec", to="openvino", out=tmp_path / "ov")
    assert [spec.name for spec in again.signature.inputs][-1] == "beam_idx"
    assert again.history[-1]["input"] == cached.digest
    assert (
        accel.generate(again, [[5, 6]], max_new_tokens=5).ids == accel.generate(cached, [[5, 6]], max_new_tokens=5).ids
    )


# A library with the interface of openvino-tokenizers, for a tokenizer of bytes. Its IRs look bytes up in a table.
LIBRARY = """
import numpy as np, openvino, openvino.opset15 as opset
from accel.decoders.tokenizer_ir import _TEXTS

def convert_tokenizer(tokenizer, with_detokenizer):
    assert with_detokenizer
    table, back, zero = np.zeros(256, np.int64), np.zeros(300, np.uint8), opset.constant(np.int64(0))
    for text in _TEXTS:
        for byte, number in zip(text.encode(), tokenizer(text)["input_ids"], strict=True):
            table[byte], back[number] = number, byte
    text = openvino.op.Parameter(openvino.Type.string, openvino.PartialShape([-1]))
    _, _, chars = opset.string_tensor_unpack(text).outputs()
    ids = opset.unsqueeze(opset.gather(opset.constant(table + SHIFT), opset.convert(chars, "i32"), zero), zero)
    ids.output(0).get_tensor().set_names({"input_ids"})
    given = openvino.op.Parameter(openvino.Type.i64, openvino.PartialShape([1, -1]))
    flat = opset.squeeze(given, zero)
    count, start = opset.convert(opset.shape_of(flat), "i32"), opset.constant(np.array([0], np.int32))
    packed = opset.string_tensor_pack(start, count, opset.gather(opset.constant(back), flat, zero))
    packed.output(0).get_tensor().set_names({"string_output"})
    return openvino.Model([ids], [text], "tokenizer"), openvino.Model([packed], [given], "detokenizer")
"""


@pytest.mark.parametrize(("shift", "written"), [(0, True), (1, False)])
def test_the_tokenizer_gets_an_ir(shift: int, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the tokenizer's IR isn't written when the library can convert it, or an IR is kept that gives other ids
    than the tokenizer."""
    (tmp_path / "openvino_tokenizers.py").write_text(LIBRARY.replace("SHIFT", str(shift)))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = save_byte_tokenizer(tmp_path / "dec")
    write_tokenizer_ir(folder)
    assert all((folder / name).is_file() is written for name in TOKENIZER_IR)
    assert (missing_ir(folder) is None) is written
    assert written or "openvino-tokenizers can't convert the tokenizer" in str(missing_ir(folder))
    assert not list(folder.glob(".tokenizer*"))


@pytest.mark.slow
def test_a_missing_library_is_said(source: Path, tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a folder without the tokenizer's IR is written in silence, or with the wrong reason."""
    monkeypatch.setitem(sys.modules, "openvino_tokenizers", None)
    ran = cli("export", str(source), "--to", "openvino", "-o", str(tmp_path / "dec"))
    assert "openvino-tokenizers isn't installed; run pip install openvino-tokenizers and export again" in ran.stderr
    (tmp_path / "dec" / "tokenizer_config.json").unlink()
    assert "the source has no tokenizer" in str(missing_ir(tmp_path / "dec"))


def test_openvino_genai_reads_the_folder(source: Path, exported: Artifact) -> None:
    """Fails if openvino-genai can't open the folder, or its greedy tokens differ. The test
    ``test_openvino_alone_continues_a_text`` checks the same contract without openvino-genai."""
    genai = pytest.importorskip("openvino_genai")
    pipeline = genai.LLMPipeline(str(exported.path.parent), "CPU", INFERENCE_PRECISION_HINT="f32")
    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = 8, False
    found = pipeline.generate(openvino.Tensor(np.array([[5, 6, 7, 8]])), config)
    assert found.tokens[0] == accel.generate(source, [[5, 6, 7, 8]], max_new_tokens=8).ids[0]
