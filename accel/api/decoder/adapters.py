"""Exports a decoder whose LoRA adapters stay inputs, and proves the base model and each adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.decoders.proof import DecoderGate
from accel.errors import UnknownName, UsageError
from accel.sources.source import Source
from accel.spelling import option
from accel.stage import run_stage

if TYPE_CHECKING:
    from accel.converters.decoder.adapter_inputs import AdapterInputsConfig

MERGED, INPUTS = "merged", "inputs"


def apart(source: Source, adapters_as: str) -> tuple[Source, tuple[Path, ...]]:
    """Returns the source without the adapters that stay inputs, and the folders of these adapters.

    Raises ``UnknownName`` if ``adapters_as`` is no form of an adapter, and ``UsageError`` if there are no adapters, or
    two of the same name.
    """
    if adapters_as not in (MERGED, INPUTS):
        raise UnknownName(f"adapters can't be {adapters_as!r}; {option('adapters_as')} takes {MERGED} or {INPUTS}")
    if adapters_as == MERGED:
        return source, ()
    folders = source.adapter_folders
    if not folders:
        raise UsageError(
            f"{option('adapters_as', INPUTS)} is for adapters; give their folders with {option('adapters')}"
        )
    names = [folder.absolute().name for folder in folders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"two adapters are called {twice}; rename one of the folders, because requests name an adapter"
        )
    return replace(source, adapters=None), folders


def check_form(source: Source, to: str, *, as_decoder: bool) -> None:
    """Raises ``UsageError`` if the export of ``source`` to the format ``to`` can't keep adapters as inputs."""
    if as_decoder and to == "onnx":
        return
    why = f"a model in the format {to}" if as_decoder else f"{source.text}, which is not exported as a decoder,"
    raise UsageError(
        f"{why} can't take adapters as inputs; leave out {option('adapters_as', INPUTS)} to merge one adapter"
    )


def adapter_config(src: Artifact, folders: Sequence[Path]) -> AdapterInputsConfig:
    """Returns the config of the stage that makes the adapters in ``folders`` inputs of the PyTorch decoder ``src``.
    Raises the errors of ``layers_of``."""
    from accel.converters.decoder.adapter_inputs import AdapterInputsConfig
    from accel.sources.torch.decoder import CachedDecoder
    from accel.sources.torch.pretrained.adapter_inputs import layers_of
    from accel.sources.torch.source import module_of

    module = module_of(src)
    assert isinstance(module, CachedDecoder), "the source was opened as a decoder"
    return AdapterInputsConfig(adapters=tuple(folders), layers=layers_of(module.model, folders))


def with_adapter_inputs(
    src: Artifact, base: Artifact, config: AdapterInputsConfig, limit: float, cache: StageCache, out: Path
) -> Artifact:
    """Adds the inputs of adapters to the ONNX decoder ``base``, which was exported from the PyTorch model ``src``.
    Without an adapter, the file has to give the logits of ``src``, and with an adapter those of ``src`` with this
    adapter merged.

    Raises ``GateFailed`` if the logits differ by more than ``limit``.
    """
    from accel.sources.torch.source import adapted

    gate = DecoderGate(limit=limit, context=src.source["decoder"]["context"], reference=src)
    merged = {folder.absolute().name: adapted(src, folder) for folder in config.adapters}
    gates = [gate, *(replace(gate, reference=reference, adapter=name) for name, reference in merged.items())]
    return run_stage("adapter_inputs", base, config, gates=gates, out=out, cache=cache)
