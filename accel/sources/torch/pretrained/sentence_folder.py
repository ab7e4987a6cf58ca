"""Opens sentence-transformers folders. Each folder holds a text encoder with pooling, which maps a text to one
vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.errors import BadSource, InvalidModel, MissingExtra, one_line

from ..found import Found
from .folder import MODULES, read_json, weight_files
from .sentence_encoder import INPUTS, SentenceEncoder
from .transformers_folder import own_code, quiet_transformers
from .transformers_inputs import forms


def open_sentence_encoder(folder: Path, name: str) -> Found:
    """Opens the model in ``folder`` with all modules that modules.json lists, such as pooling and normalization.

    Raises ``BadSource`` if the model needs its own code or takes inputs that are not text. Raises ``InvalidModel`` if
    sentence-transformers can't load the folder. Raises ``MissingExtra`` if sentence-transformers is not installed.
    """
    modules = read_json(folder / MODULES, list)
    try:
        kinds = [str(one["type"]) for one in modules]
        places = [folder / str(one["path"]) for one in modules]
    except (KeyError, TypeError) as error:
        raise InvalidModel(f"the file {folder / MODULES} lists no modules; save the model again") from error
    # sentence-transformers would import any class that modules.json names, even from another library.
    if not all(kind.startswith("sentence_transformers.") for kind in kinds):
        raise own_code(name)
    if any(not place.resolve().is_relative_to(folder.resolve()) for place in places):
        raise InvalidModel(
            f"the file {folder / MODULES} lists folders outside the model's folder; save the model again"
        )
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtra("sentence-transformers", "examples") from error
    quiet_transformers()
    weights = weight_files(places[0] if places else folder, name)
    try:
        model = SentenceTransformer(
            str(folder),
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": weights[0].suffix == ".safetensors", "weights_only": True},
        )
        encoder: Any = model[0].auto_model
    except Exception as error:
        reason = one_line(error, 200)
        raise InvalidModel(f"sentence-transformers can't load {name} ({reason}); save the model again") from error
    found = forms(encoder, places[0])
    if not found or not {spec.name for spec in found[0].inputs} <= set(INPUTS):
        raise BadSource(
            f"the model {name} takes inputs that are not text; load the model with sentence-transformers, and give the "
            "loaded model with example inputs"
        )
    dense = [file for place in places[1:] if place != folder for file in sorted(place.glob("*.safetensors"))]
    configs = [place / "config.json" for place in places if (place / "config.json").is_file()]
    files = tuple(dict.fromkeys((*weights, *dense, folder / MODULES, *configs)))
    return Found(module=SentenceEncoder(model), path=folder / MODULES, files=files, forms=found[:1])
