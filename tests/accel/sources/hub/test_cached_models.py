"""Proves that accel opens models from the local cache of the Hugging Face Hub without a network."""

from __future__ import annotations

import io
import json
import pickle
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.api.reproduce import reproduce
from accel.errors import BadSource, InvalidModel, UnsupportedHere, UsageError
from accel.sources.source import Source
from tests.support import ROOT
from tests.support.hub.fake_hub import COMMIT, FakeHub, files_of, into_cache


@pytest.mark.slow
def test_a_model_of_transformers(
    cache: Path, bert: dict[str, bytes], own_cache: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Fails if the first command in hub.md fails, or if the manifest lacks the commit. Also checks that reproduce and
    inspect open the manifest's source from the cache of the hub. The test uses a tiny model under the name of
    MiniLM."""
    page = (ROOT / "docs" / "how-to" / "hub.md").read_text(encoding="utf-8")
    words = shlex.split(page.partition("$ accel ")[2].partition("\n")[0])
    into_cache(cache, words[1], bert)
    ran = cli(*words, "--no-simplify")
    assert ran.code == 0, ran.stderr
    source = json.loads(Path(f"{words[-1]}.manifest.json").read_text())["source"]
    assert source["spec"] == f"{words[1]}@{COMMIT}"
    assert source["hub"] == {"id": words[1], "revision": "main", "commit": COMMIT}
    assert accel.inspect(words[-1], check=True).intact
    assert reproduce(words[-1]).passed
    next(cache.glob("*/snapshots/*/config.json")).unlink()
    ran = cli("reproduce", words[-1])
    assert (ran.code, "restore the source" in ran.stderr) == (1, True), ran.stderr


def test_the_commit_is_the_source(cache: Path, bert: dict[str, bytes]) -> None:
    """Checks that a model id opens the same source with and without the commit of the main branch."""
    into_cache(cache, "org/bert", bert)
    by_branch = Source("org/bert").open()
    assert Source(f"hf-hub:org/bert@{COMMIT}").open().source["sha256"] == by_branch.source["sha256"]
    assert Source("org/bert@main").open().source["spec"] == f"org/bert@{COMMIT}"


def test_weights_of_other_formats_are_not_read(cache: Path, bert: dict[str, bytes]) -> None:
    """Fails if unused files in the cache change the hash of the source."""
    into_cache(cache, "org/bert", bert)
    into_cache(cache, "org/more", {**bert, "model.onnx": b"", "x.safetensors": b"", "pytorch_model.bin": b""})
    assert Source("org/more").open().source["sha256"] == Source("org/bert").open().source["sha256"]


def test_weights_are_refused(cache: Path, bert: dict[str, bytes]) -> None:
    """Fails if accel silently ignores --weights for a model of the hub."""
    into_cache(cache, "org/bert", bert)
    with pytest.raises(UsageError, match="org/bert has its own weights; leave out weights="):
        Source("org/bert", weights="w.safetensors").open()


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this code must not run",)


def test_pickled_weights(cache: Path, bert: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that accel reads a model that has only pickled weights, and doesn't run code in the pickle."""
    from safetensors.torch import load

    config = {"config.json": bert["config.json"]}
    weights = io.BytesIO()
    torch.save(load(bert["model.safetensors"]), weights)
    into_cache(cache, "org/pickled", {**config, "pytorch_model.bin": weights.getvalue()})
    feeds = Source("org/pickled").open().signature.example_inputs(batch=2)
    into_cache(cache, "org/bert", bert)
    ours, theirs = (accel.load(name).run(feeds)["last_hidden_state"] for name in ("org/pickled", "org/bert"))
    assert np.array_equal(ours, theirs)
    into_cache(cache, "org/hostile", {**config, "pytorch_model.bin": pickle.dumps(Hostile())})
    with pytest.raises(InvalidModel, match="transformers can't load org/hostile"):
        Source("org/hostile").open()
    assert "must not run" not in capsys.readouterr().out


def test_code_of_a_model_is_not_run(cache: Path, bert: dict[str, bytes]) -> None:
    """Fails if accel loads a model that needs code from its repository, or if transformers asks the user whether to run
    this code."""
    config = {**json.loads(bert["config.json"]), "architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}
    code = {"config.json": json.dumps(config).encode(), "own.py": b"raise SystemExit"}
    into_cache(cache, "org/own", {**bert, **code})
    with pytest.raises(BadSource, match=r"needs code of its own, which accel doesn't run; .* FILE\.py:FUNCTION"):
        Source("org/own").open()
    modules = [{"idx": 0, "name": "0", "path": "", "type": "os.system"}]
    into_cache(cache, "org/modules", {**bert, "modules.json": json.dumps(modules).encode()})
    with pytest.raises(BadSource, match="org/modules needs code of its own"):
        Source("org/modules").open()


def test_a_model_of_sentence_transformers(cache: Path, bert: dict[str, bytes], tmp_path: Path) -> None:
    """Fails if the exported model lacks the pooling, the dense layer or the normalization, or takes only one sequence
    length."""
    import sentence_transformers as st
    import transformers
    from sentence_transformers.sentence_transformer import modules

    for name, body in bert.items():
        (tmp_path / name).write_bytes(body)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    parts = [modules.Transformer(str(tmp_path)), modules.Pooling(16), modules.Dense(16, 4), modules.Normalize()]
    model = st.SentenceTransformer(modules=parts, device="cpu")
    model.save(str(tmp_path / "saved"), create_model_card=False)
    into_cache(cache, "org/sentences", files_of(tmp_path / "saved"))
    session = accel.load("org/sentences")
    assert str(session.signature).endswith("-> sentence_embedding:float32[batch,4]")
    assert session.signature.dims["sequence"].max == 40
    feeds = {name: value.numpy() for name, value in model.preprocess(["a b", "c b a c"]).items() if name != "modality"}
    assert np.allclose(session.run(feeds)["sentence_embedding"], model.encode(["a b", "c b a c"]), atol=1e-6)
    other = [path["path"].rpartition("/")[2] for path in Source("org/sentences").open().source["files"]]
    assert other.count("model.safetensors") == 2  # one file belongs to the encoder and one to the dense layer


TIMM = """
    import torch
    __version__ = "1.0.0"
    def create_model(name, pretrained):
        assert name.startswith("local-dir:") and pretrained
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
        net.pretrained_cfg = {"input_size": (3, 8, 8)}
        return net
"""


def test_a_model_of_timm(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that timm opens a timm model, and that the model gets the image size of its config. Also checks that the
    error about a missing timm names the package. The test replaces timm with a short module, because timm needs
    torchvision."""
    config = {"architecture": "net", "num_classes": 2, "pretrained_cfg": {"input_size": [3, 8, 8]}}
    into_cache(cache, "timm/net.a1", {"config.json": json.dumps(config).encode(), "model.safetensors": b"x"})
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UnsupportedHere, match="timm, which is not installed; run: pip install timm"):
        Source("timm/net.a1").open()
    monkeypatch.delitem(sys.modules, "timm")
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedHere, match=r"torchvision::nms.*install the torchvision that belongs to torch"):
        Source("timm/net.a1").open()
    (tmp_path / "timm.py").write_text(textwrap.dedent(TIMM))
    found = Source("hf-hub:timm/net.a1").open()
    assert str(found.signature) == "x:float32[batch,3,8,8] -> output:float32[batch,2]"
    monkeypatch.delitem(sys.modules, "timm")


def net(folder: Path, data: str = "model.onnx_data") -> dict[str, bytes]:
    """Returns the files of an ONNX model with its weights in the file ``data``."""
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    ends = [onnx.helper.make_tensor_value_info(name, 1, ["batch", 4]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location=data, size_threshold=0)
    return files_of(folder)


def test_an_onnx_model(cache: Path, tmp_path: Path, own_cache: Path, cli: Callable[..., Any]) -> None:
    """Checks that accel reads an ONNX model with external data through the links in the cache. Also checks that accel
    chooses the right model if the repository has copies in other precisions."""
    files = {f"onnx/{name}": body for name, body in net(tmp_path / "net").items()}
    into_cache(cache, "org/net", {**files, "config.json": b"{}", "onnx/model_quantized.onnx": b""})
    found = Source("org/net").open()
    assert (found.kind, found.source["hub"]["commit"]) == ("onnx", COMMIT)
    assert accel.load("org/net").run({"x": np.ones((1, 4), np.float32)})["y"].tolist() == [[4.0] * 4]
    assert Source("org/net:onnx/model.onnx").open().digest == found.digest
    ran = cli("export", "org/net", "-o", tmp_path / "out.onnx")
    assert (ran.code, "org/net is ONNX already" in ran.stderr) == (2, True), ran.stderr
    ran = cli("export", "org/net", "--opset", "18", "-o", tmp_path / "out.onnx")
    assert ran.code == 0, ran.stderr
    assert reproduce(tmp_path / "out.onnx").passed


@pytest.mark.parametrize("name", ["weights.pb", "model_weights", "w"])
@pytest.mark.parametrize("offline", [False, True])
def test_external_data_of_any_name(hub: FakeHub, cache: Path, tmp_path: Path, name: str, offline: bool) -> None:
    """Fails if accel downloads only the data files whose names begin with the name of the ONNX file."""
    files = {f"onnx/{file}": body for file, body in net(tmp_path / "net", name).items()}
    hub.files["org/net"] = {**files, "onnx/other.bin": b"x", "weights.pb": b"x", "config.json": b"{}"}
    if offline:  # the cache has everything, and the hub doesn't answer
        into_cache(cache, "org/net", files)
        hub.server_close()
    with accel.load("org/net") as session:
        assert session.run({"x": np.ones((1, 4), np.float32)})["y"].tolist() == [[4.0] * 4]
    got = {path.name for path in (cache / "models--org--net" / "snapshots" / COMMIT).rglob("*") if path.is_file()}
    assert got == {"model.onnx", name}


@pytest.mark.parametrize(
    ("names", "spec", "words"),
    [
        (["a.onnx", "b.onnx"], "org/x", r"several ONNX models \(a.onnx, b.onnx\); name one model, e.g. org/x:a.onnx"),
        (["model_fp16.onnx", "model_q4.onnx"], "org/x", r"name one model, e.g. org/x:model_fp16.onnx"),
        (["a.onnx"], "org/x:b.onnx", "org/x has no file b.onnx; the repository has a.onnx"),
        (["x.Q4_K_M.gguf", "config.json"], "org/x", "has only GGUF files"),
        (["model_index.json", "unet/model.safetensors"], "org/x", r"pipeline of diffusers.* FILE\.py:FUNCTION"),
        (["adapter_config.json", "adapter_model.safetensors"], "org/x", "adapter of peft.*merge_and_unload"),
        (["config.json", "tf_model.h5"], "org/x", "has neither config.json with weights"),
        (["README.md"], "org/x", "has neither config.json with weights"),
    ],
)  # fmt: skip
def test_what_is_not_read(cache: Path, names: list[str], spec: str, words: str) -> None:
    """Checks that accel refuses a repository without a readable model, and that the error lists the repository's
    contents."""
    into_cache(cache, "org/x", {name: name.encode() for name in names})
    with pytest.raises(BadSource, match=words):
        Source(spec).open()


def test_a_config_that_is_no_object(cache: Path, bert: dict[str, bytes]) -> None:
    """Fails if a damaged config.json ends in a traceback."""
    for number, text in enumerate((b"", b"[1]", b'{"architectures": 3}', b"\xff")):
        into_cache(cache, f"org/damaged-{number}", {**bert, "config.json": text})
        with pytest.raises(InvalidModel, match=r"no valid JSON config|can't load org/damaged"):
            Source(f"org/damaged-{number}").open()
