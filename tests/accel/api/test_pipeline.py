"""Proves that the public functions export, load, verify and inspect a pipeline of several modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accel
from accel.errors import AccelError, BadFeeds


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"memory": self.mix(self.table(tokens)).tanh()}


class Decoder(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = table  # shared with the encoder
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        scores = (self.table(ids) @ memory.transpose(1, 2)).softmax(-1)
        return self.head(scores @ memory + self.table(ids))


def translate(parts: Any, tokens: torch.Tensor, steps: int = 3) -> torch.Tensor:
    memory = parts.encoder(tokens)["memory"]
    ids = torch.zeros(len(tokens), 1, dtype=torch.int64)
    for _ in range(steps):
        ids = torch.cat([ids, parts.decoder(ids, memory)[:, -1:].argmax(-1)], 1)
    return ids


TOKENS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def both() -> accel.Pipeline:
    encoder = Encoder()
    return accel.Pipeline(translate, encoder=encoder, decoder=Decoder(encoder.table))


@pytest.fixture(scope="module")
def exported(both: accel.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pipeline") / "out"
    dynamic = {"tokens": {0: "batch", 1: "length"}}
    assert accel.export(both, example=(TOKENS,), dynamic=dynamic, out=out).kind == "pipeline"
    return out


def test_the_parts_run_in_the_place_of_the_modules(both: accel.Pipeline, exported: Path) -> None:
    """Checks that the exported parts compute the same tokens as the modules. The outputs must also agree if the batch,
    the length and the number of steps differ from the example's."""
    with accel.load(exported) as session:
        for tokens, steps in ((TOKENS, 3), (torch.randint(20, (3, 7)), 6)):
            with torch.no_grad():
                assert torch.equal(session(tokens, steps=steps), both(tokens, steps=steps))
        assert isinstance(session(TOKENS.numpy()), np.ndarray)
        np.testing.assert_array_equal(session.run({"tokens": TOKENS.numpy()})["output"], session(TOKENS.numpy()))


def test_dims_come_from_the_recorded_calls(exported: Path) -> None:
    """Checks that a dim of a part is dynamic only if its size changed between calls. Also checks that a dim has the
    same name in a part as in the pipeline."""
    decoder = accel.load(exported / "decoder").signature
    assert [str(spec.shape) for spec in decoder.inputs] == ["('batch', 'ids_1')", "('batch', 'length', 8)"]


def test_a_size_that_the_pipeline_does_not_take(both: accel.Pipeline) -> None:
    """Fails if the message about a fixed size names the input of a part instead of the caller's argument, or if its
    advice fails when it is followed."""

    def renamed(parts: Any, words: torch.Tensor) -> torch.Tensor:
        return translate(parts, words)

    pipeline = accel.Pipeline(renamed, **both.by_name())
    with accel.load(accel.export(pipeline, example=(TOKENS,))) as session:
        said = (
            r"^input 'words' has shape \[2, 4\], but the pipeline takes words:int64\[batch,5\].*dynamic={'words': {1: "
        )
        for words in (TOKENS[:, 1:], TOKENS.numpy()[:, 1:]):
            with pytest.raises(BadFeeds, match=said):
                session(words)
    with accel.load(accel.export(pipeline, example=(TOKENS,), dynamic={"words": {1: "length"}})) as session:
        assert torch.equal(session(TOKENS[:, 1:]), pipeline(TOKENS[:, 1:]))


def test_one_manifest_and_one_verification(both: accel.Pipeline, exported: Path) -> None:
    """Checks that accel compares the exported pipeline's outputs with the modules' outputs, and that the manifest lists
    every file of the parts."""
    artifact = accel.Source(exported).open()
    assert artifact.manifest is not None
    (stage,) = artifact.history
    assert {gate["gate"] for gate in stage["gates"]} == {"outputs", "recorded"}
    assert all(gate["passed"] and gate["value"] <= gate["limit"] for gate in stage["gates"])
    assert {"batch=1, length=5", "example 0001"} <= {gate["case"] for gate in stage["gates"]}
    files = {str(file.relative_to(exported)) for file in exported.rglob("*.onnx*")}
    assert files == set(artifact.manifest.files) - {"model.pipeline"}
    assert accel.verify(both, exported, example=(TOKENS,)).passed


def test_the_chain_covers_the_parts(exported: Path, tmp_path: Path) -> None:
    """Checks that accel notices a changed or missing part, and that the chain of an exported pipeline includes the
    stages of its parts."""
    copy = accel.Source(exported).open().copy_to(tmp_path / "copy" / "model.pipeline").path.parent
    found = accel.inspect(copy, check=True)
    assert found.intact
    assert any(link.what == "output of onnx_from_torch" for link in found.chain)
    assert accel.inspect(copy).graph == {}
    with (copy / "decoder" / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert accel.inspect(copy, check=True).intact is False
    (copy / "decoder" / "model.onnx").unlink()
    assert accel.inspect(copy, check=True).intact is False
    with pytest.raises(AccelError, match=r"the part 'decoder' of .* is missing; copy the whole folder"):
        accel.load(copy)


def test_a_pipeline_from_elsewhere_needs_its_function(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that accel runs the function that the caller passes. Accel must not run a function only because the
    pipeline's folder names the function."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("accel.sources.pipeline._functions", {})
    with pytest.raises(AccelError, match=r"needs the function 'translate', .* to accel.load as call=translate"):
        accel.load(exported)
    assert accel.load(exported, call=translate)(TOKENS).shape == (2, 4)
    assert accel.load(exported, call=f"{__file__}:translate")(TOKENS).shape == (2, 4)
    with pytest.warns(UserWarning, match="another version of translate; export the pipeline again"):
        session = accel.load(exported, call=lambda parts, tokens: parts.encoder(tokens))
    assert session(TOKENS)["memory"].shape == (2, 5, 8)
    with pytest.raises(AccelError, match="is no exported pipeline; leave out call="):
        accel.load(exported / "encoder", call=translate)


def test_hostile_files(exported: Path, tmp_path: Path) -> None:
    """Checks that the file ``model.pipeline`` can't name parts outside its own folder, and that a damaged
    ``model.pipeline`` gives no traceback."""
    artifact = accel.Source(exported).open()
    for text in ("", "{}", "[]", '{"function": "f", "sha256": "", "parts": {"a": "../../model.onnx"}}'):
        copy = artifact.copy_to(tmp_path / "model.pipeline").path
        copy.write_text(text)
        with pytest.raises(AccelError, match="export the pipeline again"):
            accel.load(copy)


def test_a_diffusion_loop_with_a_method_as_a_part(tmp_path: Path) -> None:
    """Checks that a method of a module can be a part, and that a scalar tensor can be an argument. Also checks that the
    modules and the parts get the same noise if the function draws the noise with a fixed seed."""

    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.ConvTranspose2d(4, 3, 2, 2)

        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            return self.out(latents).tanh()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.down, self.text = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 4)

        def forward(self, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return self.down(latents) * time.sqrt() + self.text(text).mean(1)[:, :, None, None]

    def draw(parts: Any, tokens: torch.Tensor) -> torch.Tensor:
        text = parts.text(tokens)["memory"]
        text = torch.cat([torch.zeros_like(text), text])  # with and without the text
        latents = torch.randn(len(tokens), 4, 4, 4, generator=torch.Generator().manual_seed(0))
        for time in torch.linspace(1, 0.25, 4):
            plain, guided = parts.unet(torch.cat([latents, latents]), time, text).chunk(2)
            latents = latents - 0.1 * (plain + 2 * (guided - plain))
        return parts.decode(latents)

    pipeline = accel.Pipeline(draw, text=Encoder(), unet=Net(), decode=Auto().decode)
    accel.export(pipeline, example=(TOKENS,), out=tmp_path / "out")
    with accel.load(tmp_path / "out") as session, torch.no_grad():
        torch.testing.assert_close(session(TOKENS), pipeline(TOKENS), rtol=1e-4, atol=1e-5)
        assert session(TOKENS[:1]).shape == (1, 3, 8, 8)


def never(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.one(x)


def two_ways(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.one(parts.two(x, None), x)


def numbers(parts: Any, x: torch.Tensor) -> torch.Tensor:
    for number in (1, 2):
        x = parts.one(x) + parts.two(x, number)
    return x


def reads(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.one(x) * parts.one.weight.sum()


def sets(parts: Any, x: torch.Tensor) -> torch.Tensor:
    parts.one = parts.two
    return x


def another(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.three(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (never, "never calls the part 'two' on the example; call parts.two(...) in the function"),
        (two_ways, "the part 'one': its argument 'more' differs in kind between two calls"),
        (numbers, "the part 'two': its argument 'more' is 1 in one call and 2 in another"),
        (
            reads,
            "the attribute 'weight' of the part 'one', but an exported part can only be called; read 'weight' outside",
        ),
        (sets, "sets the part 'one'; use a local variable instead"),
        (another, "the pipeline has no part 'three'; use one of one, two"),
    ],
)
def test_a_function_that_cannot_be_exported(function: Any, message: str) -> None:
    """Checks that accel refuses a pipeline if its function can't run on exported parts, and that the error names the
    fix."""

    def add(x: torch.Tensor, more: Any = None) -> torch.Tensor:
        return x if more is None else x + more

    def call_twice(parts: Any, x: torch.Tensor) -> torch.Tensor:
        parts.one(x)
        return function(parts, x)

    called = call_twice if function is two_ways else function
    with pytest.raises(AccelError, match=re.escape(message)):
        accel.export(accel.Pipeline(called, one=add, two=add), example=(torch.ones(2, 3),))


def test_a_function_that_changes_a_part() -> None:
    """Checks that accel refuses a pipeline if its function changes the weights of a part."""
    layer = nn.Linear(3, 3)

    def step(parts: Any, x: torch.Tensor) -> torch.Tensor:
        layer.bias.data += 1
        return parts.layer(x)

    with pytest.raises(AccelError, match=r"(changes the weights or buffers of a part|changes a buffer)"):
        accel.export(accel.Pipeline(step, layer=layer), example=(torch.ones(2, 3),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: accel.Pipeline(translate), "the pipeline has no parts; give the modules by name"),
        (lambda: accel.Pipeline(Encoder(), a=Encoder()), "Encoder is no function; begin with the function"),
        (lambda: accel.Pipeline(lambda: 1, a=Encoder()), "gets the parts as its first argument; add a first parameter"),
        (lambda: accel.Pipeline(translate, **{"a/b": Encoder()}), "'a/b' can't be the name of a part"),
        (lambda: accel.Pipeline(translate, a="encoder.onnx"), "the part 'a' is a str; give a PyTorch module"),
    ],
)
def test_what_is_no_pipeline(make: Any, message: str) -> None:
    """Checks that accel refuses a pipeline of unsuitable objects, and that the error names the fix."""
    with pytest.raises(AccelError, match=re.escape(message)):
        make()


def test_arguments_that_no_pipeline_takes(both: accel.Pipeline, tmp_path: Path) -> None:
    """Checks that accel refuses options that only single models have, and never overwrites a file that accel didn't
    make."""
    (tmp_path / "file").write_text("mine")
    for arguments, message in (
        ({"out": tmp_path / "x.onnx"}, "a pipeline of several models is exported to a folder; pass e.g. out='x/'"),
        ({"out": tmp_path / "file"}, "file has to end in .onnx"),
        ({"to": "openvino"}, "to='openvino' is for a single model"),
    ):
        with pytest.raises(AccelError, match=re.escape(message)):
            accel.export(both, example=(TOKENS,), **arguments)
    (tmp_path / "out" / "decoder").mkdir(parents=True)
    (tmp_path / "out" / "decoder" / "model.onnx").write_text("mine")
    with pytest.raises(AccelError, match=r"model\.onnx was not made by accel and would be overwritten"):
        accel.export(both, example=(TOKENS,), out=tmp_path / "out")
    with pytest.raises(AccelError, match="give tensors, numbers, strings"):
        accel.export(both, example=(TOKENS, object()))
