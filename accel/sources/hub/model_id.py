"""Distinguishes ids of models on the Hugging Face Hub from paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel.tables.kinds import KINDS

# A spec with one of these suffixes is always read as a path, although the name of a repository may have the same
# suffix.
_FILES = {kind.suffix for kind in KINDS.values()} | {
    ".bin", ".ckpt", ".gguf", ".h5", ".hdf5", ".jit", ".json", ".keras", ".meta", ".npz", ".pkl", ".pt", ".pth", ".py",
    ".safetensors", ".tar", ".torchscript", ".ts", ".zip",
}  # fmt: skip
# timm writes its ids with this prefix.
_PREFIX = "hf-hub:"
_ID = re.compile(
    r"(?P<repo>[a-z0-9][\w.-]*/[a-z0-9_][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?(?::(?P<file>[^:]+\.onnx))?",
    re.IGNORECASE | re.ASCII,
)


# The organizations of models whose ids once had no organization. Each row is the beginning of such an id.
_ORGANIZATIONS = (
    ("distil", "distilbert"), ("bert-", "google-bert"), ("gpt2", "openai-community"),
    ("openai-gpt", "openai-community"), ("roberta-", "FacebookAI"), ("xlm-", "FacebookAI"), ("t5-", "google-t5"),
    ("albert-", "albert"), ("xlnet-", "xlnet"),
)  # fmt: skip


@dataclass(frozen=True)
class ModelId:
    """A repository of the hub. ``revision`` is a branch, a tag or a commit, or "" for the main branch. ``file`` is an
    ONNX file of the repository, or "" for the model of the whole repository."""

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.file}' if self.file else ''}"

    @property
    def commit(self) -> str:
        """Returns the revision if it is a full commit hash, else "". The files of a commit never change."""
        return self.revision if re.fullmatch("[0-9a-f]{40}", self.revision) else ""


def model_id(spec: str) -> ModelId | None:
    """Parses a ``spec`` such as ``org/name``, ``org/name@revision`` or ``org/name:file.onnx`` into a model id. Returns
    None if ``spec`` is an existing path or looks like a path, such as ``folder/model.onnx`` or ``a/b/c``.
    """
    found = _ID.fullmatch(spec.removeprefix(_PREFIX))
    if found is None or ".." in spec:
        return None
    if not spec.startswith(_PREFIX) and (Path(spec).exists() or Path(found["repo"]).suffix.lower() in _FILES):
        return None
    return ModelId(found["repo"], found["revision"] or "", found["file"] or "")


def or_hub_id(spec: str) -> str:
    """Returns the part of an advice that says how to name a model of the hub, for a ``spec`` such as
    ``bert-base-uncased``, which lacks the organization. Returns "" if ``spec`` can't be the name of a model."""
    if not re.fullmatch(r"[a-z0-9][\w.-]*", spec, re.IGNORECASE | re.ASCII) or Path(spec).suffix.lower() in _FILES:
        return ""
    organization = next((name for start, name in _ORGANIZATIONS if spec.startswith(start)), "ORGANIZATION")
    return f", or for a model of the Hugging Face Hub {organization}/{spec}"
