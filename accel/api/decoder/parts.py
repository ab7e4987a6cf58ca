"""Opens a model that generates text: a decoder, or an encoder and a decoder. Imports no more than that needs, because
``accel generate`` waits for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from accel.artifact import Artifact
from accel.errors import BadSource
from accel.signature.encoder_decoder import ENCODER_FILE, Caches
from accel.sources.run_folder import CONFIG
from accel.sources.source import Source

ENCODER, DECODER = "encoder", "decoder"


def is_pair(source: Source, out: Path | None = None) -> bool:
    """Tells whether ``source`` is a folder of an encoder-decoder of transformers, to be opened as two parts. A user who
    declares the inputs, wants a single file or says ``decoder=False`` gets one pass without a cache."""
    if source.decoder is False or source.inputs or (out is not None and out.suffix):
        return False
    if not source.native or source.form is not None:
        return False
    try:
        config = json.loads((source.path / CONFIG).read_text(encoding="utf-8"))
        names = config["architectures"]
        found = isinstance(names, list) and bool(names) and isinstance(config, Mapping)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if not found or not config.get("is_encoder_decoder"):
        return False
    from accel.sources.torch.pretrained.transformers_folder import answers

    return answers(str(names[0]))


def open_parts(source: Source) -> tuple[Artifact, Artifact | None]:
    """Opens a decoder, or both parts of an encoder-decoder, a folder of transformers or of ``export_pair``. Returns the
    decoder, and the encoder if there is one. A model of transformers is opened with its cache, unless it has a form.
    Raises ``BadSource`` if the encoder is missing."""
    if is_pair(source):
        source = replace(source, decoder=None)
        return source.open(part=DECODER), source.open(part=ENCODER)
    if source.native:
        return (replace(source, decoder=True) if source.form is None else source).open(), None
    decoder = source.open()
    return decoder, None if Caches.of(decoder.signature) is None else encoder_of(decoder)


def encoder_of(decoder: Artifact) -> Artifact:
    """Opens the encoder beside an exported decoder. Raises ``BadSource`` if it is missing."""
    path = decoder.path.with_name(ENCODER_FILE)
    if not path.is_file():
        raise BadSource(f"{path} does not exist, and the decoder beside it needs it; export the model again")
    return Source(path).open()
