"""Opens folders that transformers' ``save_pretrained`` wrote, with config.json and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.errors import BadSource, InvalidModel, MissingExtra, one_line

from ..found import Found
from .folder import weight_files
from .transformers_inputs import example, forms


def open_transformers(folder: Path, name: str, config: Mapping[str, Any]) -> Found:
    """Opens the model in ``folder`` with the architecture that ``config`` names. Never executes code from the folder.

    Raises ``BadSource`` if the weights are missing or the model needs its own code. Raises ``InvalidModel`` if
    transformers can't load the folder. Raises ``MissingExtra`` if transformers is not installed.
    """
    weights = weight_files(folder, name)
    transformers = quiet_transformers()
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else ""
    kind = getattr(transformers, str(architecture), None)
    if kind is None and "auto_map" in config:
        raise own_code(name)
    kind = kind or transformers.AutoModel
    safe = weights[0].suffix == ".safetensors"
    try:
        # ``weights_only=True`` reads pickled weights without running their code.
        module = kind.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=safe, weights_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = one_line(error, 200)
        raise InvalidModel(
            f"transformers can't load {name} as {kind.__name__} ({reason}); save the model again"
        ) from error
    found = forms(module, folder)
    files = (*weights, folder / "config.json")
    return Found(module=module, path=folder / "config.json", files=files, forms=found, example=example(module))


def quiet_transformers() -> Any:
    """Imports transformers, and turns off its warnings and progress bars. Raises ``MissingExtra`` if transformers is
    not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "examples") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def generates(architecture: str) -> bool:
    """Tells whether transformers knows ``architecture`` as a model that generates text from text, token by token."""
    quiet_transformers()
    from transformers.models.auto import modeling_auto

    known: Mapping[str, Any] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return any(architecture in (names if isinstance(names, tuple) else (names,)) for names in known.values())


def answers(architecture: str) -> bool:
    """Tells whether transformers knows ``architecture`` as a model that answers text or sound with text, by an encoder
    and a decoder."""
    quiet_transformers()
    from transformers.models.auto import modeling_auto

    text: Mapping[str, Any] = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    sound: Mapping[str, Any] = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    known = (names for table in (text, sound) for names in table.values())
    return any(architecture in (names if isinstance(names, tuple) else (names,)) for names in known)


def own_code(name: str) -> BadSource:
    """Returns the error for a model that needs Python code from its own folder."""
    return BadSource(
        f"{name} needs code of its own, which accel doesn't run; write a function that loads the model with "
        "trust_remote_code=True and give it as FILE.py:FUNCTION"
    )
