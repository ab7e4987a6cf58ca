"""Proves that generated tokens are those of transformers, and that wrong prompts are refused in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

import accel
from accel import artifact as module
from accel.decoders.decoder import Decoder
from accel.decoders.generation import Generation, Row
from accel.decoders.replay import Replay
from accel.decoders.sampling import Sampler, Sampling
from accel.decoders.tokenizer import TextStream, Tokenizer
from accel.errors import BadFeeds, BadSource, RunFailed, UnsupportedHere, UsageError
from tests.support.onnx_builder import FLOAT, INT64, artifact, node
from tests.support.small_decoder import BYTE_VOCABULARY, save_byte_tokenizer, save_decoder, small_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an exported decoder with a tokenizer of bytes."""
    source = save_decoder(tmp_path_factory.mktemp("decoder") / "llama")
    save_byte_tokenizer(source)
    out = tmp_path_factory.mktemp("exported") / "dec"
    accel.export(source, out=out, simplify=False)
    return out


PROMPTS = [[5, 60, 7], [8, 90, 100, 11, 120, 13, 14], [15]]


def _of_transformers(prompt: Sequence[int], count: int, **options: object) -> list[int]:
    model = small_decoder()
    ids = torch.tensor([list(prompt)])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_greedy_tokens_are_those_of_transformers(folder: Path, options: dict[str, float]) -> None:
    """Fails if padding, positions or the cache of a batch of unequal prompts change a token, or if a row that has ended
    changes the others."""
    wanted = [_of_transformers(prompt, 20, **options) for prompt in PROMPTS]
    answers = accel.generate(folder, PROMPTS, max_new_tokens=20, **options)
    assert answers.ids == wanted
    assert answers.finishes == ["end" if ids[-1] == 2 else "length" for ids in wanted]


@pytest.mark.parametrize(("prompts", "widths"), [([PROMPTS[1]], [2, 2, 2, 1]), ([PROMPTS[1], PROMPTS[0]], [5, 2])])
def test_a_long_prompt_runs_in_parts(
    prompts: list[list[int]], widths: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a part has only padding, if the parts don't give the tokens of the whole prompt, or if all logits of a
    long prompt are in memory at once."""
    monkeypatch.setattr("accel.decoders.replay.PROMPT_TOKENS", 2)
    found: list[int] = []
    alive: list[weakref.ref[np.ndarray]] = []
    step = Replay.step

    def counted(self: Replay, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        assert ids.shape[1] == 1 or not any(logits() is not None for logits in alive)
        found.append(ids.shape[1])
        logits = step(self, ids, mask)
        alive.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(Replay, "step", counted)
    answers = accel.generate(folder, prompts, max_new_tokens=3)
    assert answers.ids == [_of_transformers(prompt, 3) for prompt in prompts]
    assert found == [*widths, 1, 1]


@pytest.mark.parametrize("last", [1, 2, 3, 6, 7])
def test_the_last_tokens_of_a_long_prompt_run_together(
    last: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a draft that checks several tokens gets the logits of fewer, or of other tokens."""
    ids = np.array([PROMPTS[1]])
    with accel.load(folder) as session:
        whole = Replay(session, 1).step(ids)[:, -last:]
        monkeypatch.setattr("accel.decoders.replay.PROMPT_TOKENS", 2)
        found = Replay(session, 1).prompt(ids, last=last)
    assert found.shape == whole.shape == (1, last, whole.shape[2])
    assert np.allclose(found, whole, rtol=1e-4, atol=1e-5)


def test_the_weights_of_a_decoder_are_in_a_second_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ONNX Runtime would copy the weights of a large decoder instead of mapping them into memory."""
    from accel.converters.graph import write

    monkeypatch.setattr(write, "DECODER_BYTES", 1000)
    (name,) = write.write_onnx(onnx.load(folder / "model.onnx"), tmp_path / "model.onnx")
    inside = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer
    assert (tmp_path / name).is_file()
    assert max(len(tensor.raw_data) for tensor in inside) < 1024
    for file in ("config.json", "generation_config.json"):
        shutil.copy(folder / file, tmp_path)
    assert (
        accel.generate(tmp_path, PROMPTS, max_new_tokens=6).ids == accel.generate(folder, PROMPTS, max_new_tokens=6).ids
    )


def test_opening_reads_each_file_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the weights are hashed twice, or if a generation waits for the import of a library that it doesn't
    need."""
    read: list[str] = []
    sha256 = module.file_sha256

    def counted(path: Path) -> str:
        read.append(path.name)
        return sha256(path)

    monkeypatch.setattr(module, "file_sha256", counted)
    accel.generate(folder, [[5, 60, 7]], max_new_tokens=1).close()
    assert sorted(read) == sorted(path.name for path in accel.Artifact.open(folder / "model.onnx").files)
    code = (
        "import sys, accel; accel.generate(sys.argv[1], [[5, 60, 7]], max_new_tokens=2).ids; "
        "print([name for name in ('torch', 'transformers', 'openvino', 'accel.optimizer') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code, folder], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"


def test_a_row_that_ends_leaves_the_batch() -> None:
    """Fails if the rows that go on get the cache of another row after one has ended. The second row ends early, because
    a token that the first row doesn't have is declared to be an end."""
    first, second = (_of_transformers(prompt, 12) for prompt in PROMPTS[:2])
    at = next(index for index, token in enumerate(second) if token not in first)
    end = second[at]
    assert at < 6
    module = small_decoder()
    module.generation_config.eos_token_id = [end, 2]
    answers = accel.generate(module, PROMPTS[:2], max_new_tokens=12)
    assert answers.ids == [first, second[: at + 1]]
    assert answers.finishes == ["length", "end"]


def test_a_seed_gives_the_same_tokens_on_two_runtimes(folder: Path) -> None:
    """Fails if the random numbers depend on the runtime or on the other rows of the batch."""
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7, "max_new_tokens": 16}
    module = small_decoder()
    both = accel.generate(folder, PROMPTS, **options).ids
    assert accel.generate(module, PROMPTS, **options).ids == both
    assert accel.generate(folder, PROMPTS[:1], **options).ids == both[:1]
    assert accel.generate(folder, PROMPTS, **{**options, "seed": 8}).ids != both


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 1.4, "top_k": 20}]
)
def test_sampling_has_the_distribution_of_transformers(options: dict[str, float]) -> None:
    """Fails if the shares of 20,000 draws are off by more than five standard deviations from the probabilities that
    transformers gives, or if a token is drawn that transformers excludes."""
    from transformers import GenerationConfig

    logits = np.random.default_rng(0).standard_normal(30).astype(np.float32) * 2
    model = small_decoder()
    processors = model._get_logits_processor(
        GenerationConfig(do_sample=True, **{"top_k": 0, **options}), input_ids_seq_length=1, device="cpu"
    )
    wanted = processors(torch.tensor([[1]]), torch.from_numpy(logits)[None])[0].softmax(-1).numpy()
    sampler, draws = Sampler(Sampling(seed=3, **options), 1), 20_000
    found = np.bincount([sampler.choose(0, logits, [1], 1) for _ in range(draws)], minlength=30) / draws
    assert (found[wanted == 0] == 0).all()
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / draws) + 1e-9).all()


def test_penalties_and_biases() -> None:
    """Fails if a penalty hits tokens of the prompt, or a bias is ignored."""
    logits = np.array([1.0, 0.9, 0.8, -9.0], np.float32)
    assert Sampler(Sampling(presence_penalty=0.5), 1).choose(0, logits, [0, 1, 0], prompt=2) == 1
    assert Sampler(Sampling(logit_bias={3: 20.0}), 1).choose(0, logits, [0], prompt=1) == 3


@given(st.text("abc", min_size=1, max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_never_shown(text: str, stops: list[str]) -> None:
    """Fails if the pieces contain a stop string, or aren't the text before the first stop string that appears."""

    class Letters(Tokenizer):
        def __init__(self) -> None:
            pass

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    class Known:
        tokens = type("Tokens", (), {"context": None, "ends": (0,)})

    row = Row(number=0, prompt=0, tokens=[], stream=TextStream(Letters()))
    known: Decoder = Known()  # type: ignore[assignment]
    generation = Generation(decoder=known, rows=[row], most=100, sampling=Sampling(), stops=tuple(stops))
    shown = ""
    for letter in (*map(ord, text), 0):
        token = generation.add(row, letter)
        shown += token.text
        if token.finish:
            break
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert (shown, token.finish) == (text, "end")
        return
    seen = text[: min(ends)]
    assert token.finish == "stop"
    assert shown == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


@given(st.text(max_size=40))
def test_pieces_make_the_whole_text(text: str) -> None:
    """Fails if a piece ends within a character, or a piece is lost or shown twice. Every token is one byte."""
    stream = TextStream(_tokenizer())
    encoded = _tokenizer().encode(text)
    pieces = [stream.add(token) for token in encoded]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def _tokenizer(found: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006 - kept for all examples
    if not found:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            found.append(Tokenizer.open(save_byte_tokenizer(Path(folder)), BYTE_VOCABULARY))
    return found[0]


def test_a_text_and_a_chat(folder: Path) -> None:
    """Fails if a text isn't encoded by the folder's tokenizer, or the chat template is left out."""
    answers = accel.generate(folder, "héllo", max_new_tokens=4)
    assert answers.prompts == [_tokenizer().encode("héllo")]
    assert answers.texts == [_tokenizer().decode(answers.ids[0])]
    chat = accel.generate(folder, "hi", chat=True, max_new_tokens=1)
    assert chat.prompts == [[1, *_tokenizer().encode("[user] hi\n[assistant] ")]]


# The template, the seconds that it may take, and the reason that the error gives.
HOSTILE = {
    "an endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        3.0,
        "took longer than 3 s",
    ),
    "endless text": (
        "{% set a = ['x' * 99999] %}{% for b in range(99999) %}{{ a[0] }}{% endfor %}",
        60.0,
        "MemoryError",
    ),
    "Python's inside": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", 60.0, "'__class__' of 'list'"),
    "a syntax error": ("{% for %}", 60.0, "Expected an expression"),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_chat_template(hostile: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a template from outside hangs the command, fills the memory or reaches Python's classes."""
    template, seconds, said = HOSTILE[hostile]
    monkeypatch.setattr("accel.decoders.chat._SECONDS", seconds)
    copy = shutil.copytree(folder, tmp_path / "dec")
    save_byte_tokenizer(copy, template)
    with pytest.raises(BadSource, match=f"chat template of .* fails .*{said}"):
        accel.generate(copy, "hi", chat=True)


BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "no prompt": ({"prompts": []}, UsageError, "there is no prompt"),
    "an empty prompt": ({"prompts": [[5], []]}, UsageError, "prompt 2 has no tokens"),
    "an empty text": ({"prompts": ""}, UsageError, "prompt 1 has no tokens; give a text or token ids with prompts=$"),
    "an id beyond the vocabulary": ({"prompts": [[5, 259]]}, UsageError, "ids are 0 to 258"),
    "no whole numbers": ({"prompts": [[1.5, 2]]}, UsageError, "no list of whole numbers"),
    "a negative id": ({"prompts": [[-1]]}, UsageError, "ids are 0 to 258"),
    "longer than the context": ({"prompts": [[5] * 160]}, UsageError, "has 160 tokens.*truncate=True"),
    "temperature 0": ({"prompts": [[5]], "temperature": 0.0}, UsageError, "leave out temperature"),
    "top-p 0": ({"prompts": [[5]], "top_p": 0.0}, UsageError, "leave out top_p"),
    "top-k 0": ({"prompts": [[5]], "top_k": 0}, UsageError, "at least 1"),
    "no new tokens": ({"prompts": [[5]], "max_new_tokens": 0}, UsageError, "generates nothing"),
    "no answers": ({"prompts": [[5]], "sequences": 0}, UsageError, "gives no answer"),
    "a bias beyond the vocabulary": ({"prompts": [[5]], "logit_bias": {999: 1.0}}, UsageError, "ids are 0 to 258"),
    "an empty stop": ({"prompts": [[5]], "stop": ""}, UsageError, "ends every text at once"),
    "no beams": ({"prompts": [[5]], "beams": 0}, UsageError, "give at least 1"),
    "more answers than beams": ({"prompts": [[5]], "beams": 2, "sequences": 3}, UsageError, "give beams=3 or lower"),
    "beams and a temperature": ({"prompts": [[5]], "beams": 2, "temperature": 1.0}, UsageError, "leave out that or"),
    "beams and a stop": ({"prompts": [[5]], "beams": 2, "stop": "x"}, UsageError, "goes without stop="),
    "beams and a draft": ({"prompts": [[5]], "beams": 2, "draft": "ngram"}, UsageError, "goes without draft="),
    "ids for a chat": ({"prompts": [[5]], "chat": True}, UsageError, "takes texts"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad: str, folder: Path) -> None:
    arguments, error, said = BAD[bad]
    with pytest.raises(error, match=said):
        accel.generate(folder, **arguments)  # type: ignore[arg-type]


def test_a_call_of_a_decoder_hints_at_generate(folder: Path) -> None:
    """Fails if a call with token ids alone doesn't say how to generate text, or if the advice doesn't run."""
    with accel.load(folder) as session, pytest.raises(BadFeeds, match=r"'attention_mask' is missing") as refused:
        session(np.array([[1, 2, 3]]))
    assert f"give {str(folder)!r} and token ids to accel.generate" in str(refused.value)
    assert len(accel.generate(folder, [[1, 2, 3]], max_new_tokens=4).ids[0]) == 4


def test_a_long_prompt_loses_its_beginning(folder: Path) -> None:
    """Fails if the advice of the error about long prompts doesn't help, or drops the end of the prompt."""
    prompt = [*range(10, 110), *range(20, 120)]
    answers = accel.generate(folder, [prompt], truncate=True, max_new_tokens=10)
    assert answers.prompts == [prompt[-150:]]
    assert len(answers.ids[0]) <= 10


def test_a_missing_and_a_foreign_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Fails if a text is encoded with a tokenizer of another model, or token ids ask for a tokenizer."""
    copy = shutil.copytree(folder, tmp_path / "dec")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(BadSource, match=r"has no tokenizer; .* prompts="):
        accel.generate(copy, "hi")
    assert accel.generate(copy, [[5]], max_new_tokens=1).texts == [None]
    save_byte_tokenizer(copy)
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(BadSource, match="can't be read"):
        accel.generate(copy, "hi")
    with pytest.raises(BadSource, match="has 259 tokens, but the decoder has 100"):
        Tokenizer.open(save_byte_tokenizer(tmp_path / "other"), 100)


def test_nan_names_the_layer(folder: Path, tmp_path: Path) -> None:
    """Fails if NaN becomes a token, or the message names another layer than the one with the planted NaN."""
    model = onnx.load(folder / "model.onnx")
    target = {node.output[0]: node for node in model.graph.node}["present.1.value"]
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    seen, names = [target], []
    producers = {out: node for node in model.graph.node for out in node.output}
    while seen and not names:  # the nearest matrix product before layer 1's values
        node = seen.pop(0)
        names = [name for name in node.input if name in weights and node.op_type == "MatMul"]
        seen += [producers[name] for name in node.input if name in producers]
    value = numpy_helper.to_array(weights[names[0]]).copy()
    value[0, 0] = np.nan
    weights[names[0]].CopyFrom(numpy_helper.from_array(value, names[0]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(RunFailed, match=r"NaN or infinite .*layer 1 are the first"):
        _ = accel.generate(tmp_path / "model.onnx", [[5, 6]]).ids


def test_a_cache_that_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a generation starts although its cache needs more memory than there is."""
    monkeypatch.setattr("accel.decoders.generation.available_memory", lambda: 1 << 16)
    with pytest.raises(UnsupportedHere, match="a cache of 160 tokens for 1 prompts takes"):
        accel.generate(folder, [[5]], max_new_tokens=4000)


def test_a_model_without_a_cache(tmp_path: Path) -> None:
    """Fails if a model of one pass, from tokens to logits, is run as a decoder."""
    inputs, outputs = {"input_ids": (INT64, ["batch", "n"])}, {"logits": (FLOAT, ["batch", "n", 9])}
    table = {"table": np.ones((9, 9), np.float32)}
    made = artifact(tmp_path / "one.onnx", [node("Gather", "table input_ids", "logits")], inputs, outputs, table)
    with pytest.raises(BadSource, match=r"has no KV cache"):
        accel.generate(made, [[5]])


def test_the_command(folder: Path, cli: Callable[..., object]) -> None:
    """Fails if the command's JSON, text or error differs from the Python function's."""
    wanted = accel.generate(folder, [[104, 105]], max_new_tokens=6)
    ran = cli("generate", str(folder), "--prompt-ids", "104,105", "--max-new-tokens", "6", "--json", "-q")
    body = json.loads(ran.stdout)  # type: ignore[attr-defined]
    assert (body["ids"], body["text"], body["finish"]) == (wanted.ids[0], wanted.texts[0], "length")
    ran = cli("generate", str(folder), "--prompt-ids", "104,105", "--max-new-tokens", "6", "-q")
    assert ran.stdout == f"{wanted.texts[0]}\n"  # type: ignore[attr-defined]
    ran = cli("generate", str(folder), "--prompt-ids", "1,x")
    assert (ran.code, ran.stdout) == (2, "")  # type: ignore[attr-defined]
    assert "write numbers with commas" in ran.stderr  # type: ignore[attr-defined]
