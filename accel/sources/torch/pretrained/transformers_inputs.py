"""Finds the inputs of a transformers model in its config and in the parameters of its ``forward``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.signature import BATCH, DimRange, Signature, TensorSpec

from ...declare import input_example
from ...output_specs import probe_cases
from ..call import NamedModule, Runs
from ..probe.taken_sizes import runs_at, shared_batch, within_reach

# The largest text length in a range that accel chooses. Gates run the model with texts up to this length, and longer
# texts would take too long.
_LONGEST = 512
# The last Unicode code point.
_LAST_CHARACTER = 0x10FFFF
_BATCH = DimRange(1, 1, 8)
# The number of boxes in a sample.
_BOXES = 16
# The number of samples in 0.5 to 5 seconds of sound at 16 kHz.
_SAMPLES = DimRange(8000, 16000, 80000)
_FRAMES = DimRange(32, 128, 1024)


def forms(module: Any, folder: Path) -> tuple[Signature, ...]:
    """Returns the signatures that ``module`` may have, with the most likely signature first. Returns an empty tuple if
    the config doesn't determine the inputs. ``folder`` may hold the preprocessor's config."""
    config, takes = module.config, set(inspect.signature(module.forward).parameters)
    main = module.main_input_name
    pictures = _images(config, folder) if "pixel_values" in takes else None
    seen: Signature | None = None
    if main == "input_ids" or (main == "pixel_values" and "input_ids" in takes):
        seen = _text(module, takes)
        if seen is not None and _sees(config, takes):
            seen = pictures and _both(seen, pictures)
        if _hears(config, takes):
            return ()
    elif main == "pixel_values":
        seen = pictures
    elif main in ("input_values", "input_features"):
        seen = _sound(main, config, takes)
    elif main == "past_values" and _whole(config, "context_length") and _whole(config, "num_input_channels"):
        seen = _one(main, int(config.context_length), int(config.num_input_channels))
    if seen is None:
        return ()
    if "bbox" in takes and (last := _whole(config, "max_2d_position_embeddings")):
        # Some models look up the width of a box in a table, and random corners may give a negative width.
        return _both(seen, _random_boxes(last)), _both(seen, _boxes(last))
    if main == "input_ids" and pictures is not None and getattr(config, "vision_config", None) is not None:
        # A model that compares each image with each text may take different numbers of images and texts.
        return _apart(seen), seen
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" not in takes:
        return (seen,)
    decoded = _both(seen, _decoder(config))
    # A model that generates text needs decoder_input_ids, and other models may work without decoder_input_ids.
    return (decoded, seen) if module.can_generate() else (seen, decoded)


def that_runs(module: Any, found: Sequence[Signature], given: Mapping[str, DimRange], runs: Runs) -> Signature:
    """Returns the first signature in ``found`` that lets the module run. Narrows the ranges of the dims to sizes that
    the module can take, because the config may not tell the largest size. Leaves the ranges in ``given`` unchanged. If
    the module fails with every signature in ``found``, returns the first signature unchanged. ``runs`` keeps the
    outputs.
    """
    module.eval()
    for form in found:
        fixed = {dim: bounds for dim, bounds in given.items() if dim in form.dims}
        asked = form.with_dims(fixed)
        run = runs.of(NamedModule(module, [spec.name for spec in asked.inputs]), asked)
        if len(found) > 1 and not all(runs_at(asked, run, case) for case in probe_cases(asked)):
            continue
        known = {*fixed, *([BATCH] if shared_batch(asked) == BATCH else [])}
        return within_reach(asked, run, [dim for dim in asked.dims if dim not in known])
    return found[0]


def example(module: Any) -> tuple[str, ...]:
    """Returns example declarations of the inputs that ``module`` needs."""
    parameters = inspect.signature(module.forward).parameters
    empty = inspect.Parameter.empty
    ordered = [n for n, p in parameters.items() if p.default is empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    names = dict.fromkeys([module.main_input_name, *ordered])
    if _sees(module.config, parameters) or _hears(module.config, parameters):
        several = ("input_ids", "attention_mask", "pixel_values", "input_features", "input_values")
        names |= dict.fromkeys(n for n in several if n in parameters)
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        names |= {"decoder_input_ids": None}
    return tuple(map(input_example, names))


def _sees(config: Any, takes: Container[str]) -> bool:
    return "pixel_values" in takes and _part(config, "patch_size") is not None


def _hears(config: Any, takes: Container[str]) -> bool:
    """Tells whether the model takes audio in addition to text."""
    return "input_ids" in takes and getattr(config, "audio_config", None) is not None


def _part(config: Any, name: str) -> Any:
    """Returns the attribute ``name`` of a config or of the first sub-config that has the attribute, else None."""
    inner = ("text_config", "vision_config", "image_config", "encoder", "decoder")
    parts = (config, *(getattr(config, part, None) for part in inner))
    return next((found for part in parts if (found := getattr(part, name, None)) is not None), None)


def _whole(config: Any, name: str) -> int | None:
    """Returns the attribute ``name`` of ``config`` if it is an integer above 0, else None."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _one(name: str, *shape: int | str, **dims: DimRange) -> Signature:
    return Signature((TensorSpec(name, "float32", ("batch", *shape)),), (), {"batch": _BATCH, **dims})


def _both(one: Signature, other: Signature) -> Signature:
    return Signature((*one.inputs, *other.inputs), (), {**other.dims, **one.dims})


def _apart(seen: Signature) -> Signature:
    """Returns ``seen`` with separate first dims for images and texts instead of a common batch dim."""
    inputs = []
    for spec in seen.inputs:
        dim = "images" if spec.name == "pixel_values" else "texts"
        inputs.append(replace(spec, shape=(dim, *spec.shape[1:])))
    dims = {dim: bounds for dim, bounds in seen.dims.items() if dim != "batch"}
    return Signature(tuple(inputs), (), {**dims, "images": DimRange(1, 1, 8), "texts": DimRange(1, 3, 16)})


def _random_boxes(last: int) -> Signature:
    """Returns an input of boxes with random corners, which are numbers below ``last``."""
    return Signature((TensorSpec("bbox", "int64", ("batch", "sequence", 4), (0, last - 1)),))


def _boxes(last: int) -> Signature:
    """Returns an input of boxes whose second corner is below and right of the first corner."""
    half = max(1, last // 2)
    steps = [(17 * number % half, 29 * number % half) for number in range(1, _BOXES + 1)]
    sample = tuple((x, y, x + y % (last - x), y + x % (last - y)) for x, y in steps)
    (spec,) = _random_boxes(last).inputs
    return Signature((replace(spec, sample=(sample,)),))


def _text(module: Any, takes: set[str]) -> Signature | None:
    config = module.config
    vocabulary = _part(config, "vocab_size")
    if not vocabulary and _whole(config, "num_hash_buckets"):
        vocabulary = _LAST_CHARACTER + 1
    if not vocabulary:
        return None
    shape = ("batch", "sequence")
    specs = [TensorSpec("input_ids", "int64", shape, (0, int(vocabulary) - 1))]
    if "attention_mask" in takes:
        specs.append(TensorSpec("attention_mask", "int64", shape))
    types = int(_part(config, "type_vocab_size") or 0)
    if types > 1 and "token_type_ids" in takes:
        specs.append(TensorSpec("token_type_ids", "int64", shape, (0, types - 1)))
    positions = _part(config, "max_position_embeddings")
    longest = _LONGEST
    if positions and positions > 0:  # XLNet and others say -1 for any length
        longest = min(int(positions) - _first_position(module, positions), _LONGEST)
    longest = max(longest, 1)
    sequence = DimRange(min(8, longest), min(128, longest), longest)
    return Signature(tuple(specs), (), {"batch": _BATCH, "sequence": sequence})


def _first_position(module: Any, positions: int) -> int:
    """Returns the index of the row that holds the first position in the position table. In models like RoBERTa, the
    row of the first position follows the padding row."""
    import torch

    for name, part in module.named_modules():
        if "position" in name and isinstance(part, torch.nn.Embedding) and part.num_embeddings == positions:
            return 0 if part.padding_idx is None else part.padding_idx + 1
    return 0


def _decoder(config: Any) -> Signature:
    vocabulary = _whole(config, "decoder_vocab_size") or int(_part(config, "vocab_size"))
    names = ("max_target_positions", "max_decoder_position_embeddings")
    decoder = getattr(config, "decoder", None)
    longest = next((found for name in names if (found := _whole(config, name))), None) or (
        _whole(decoder, "max_position_embeddings") or _part(config, "max_position_embeddings")
    )
    longest = min(int(longest), _LONGEST) if longest and longest > 0 else _LONGEST
    spec = TensorSpec("decoder_input_ids", "int64", ("batch", "decoder_sequence"), (0, vocabulary - 1))
    dims = {"batch": _BATCH, "decoder_sequence": DimRange(1, min(16, longest), longest)}
    return Signature((spec,), (), dims)


def _images(config: Any, folder: Path) -> Signature | None:
    backbone = getattr(config, "backbone_config", None)
    told = (_part(config, "image_size"), _whole(config, "input_size"), _preprocessed_size(folder))
    size = next((found for one in (*told, getattr(backbone, "image_size", None)) if (found := _size(one))), None)
    if size is None:
        return None
    channels = _part(config, "num_channels")
    shape = (channels if isinstance(channels, int) else 3, *size)
    frames = _whole(config, "num_frames")
    return _one("pixel_values", *((frames, *shape) if frames else shape))


def _size(value: Any) -> tuple[int, int] | None:
    """Reads height and width from a config value, which is one number, two numbers or a dict. Returns None for other
    values."""
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    found = value if isinstance(value, list | tuple) else [value, value]
    if len(found) == 2 and all(isinstance(side, int) and side > 0 for side in found):
        return found[0], found[1]
    return None


def _preprocessed_size(folder: Path) -> tuple[int, int] | None:
    """Returns the image size in the preprocessor's config, or None if ``folder`` has no config with a size."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            found = found.get("image_processor", found)
        if not isinstance(found, dict):
            continue
        cropped = found.get("crop_size") if found.get("do_center_crop") else None
        if size := _size(cropped) or _size(found.get("size")):
            return size
    return None


def _sound(name: str, config: Any, takes: set[str]) -> Signature | None:
    bins = _whole(config, "num_mel_bins")
    if name == "input_values":
        if bins and _whole(config, "max_length"):
            return _one(name, int(config.max_length), bins)
        if hasattr(config, "conv_stride") or "decoder_input_ids" in takes:
            return _one(name, "samples", samples=_SAMPLES)
        return None
    source = _whole(config, "max_source_positions")
    if bins and source and "decoder_input_ids" in takes:
        return _one(name, bins, 2 * source)
    width = _whole(config, "input_feat_per_channel") or _whole(config, "feature_projection_input_dim")
    if width:
        return _one(name, "frames", width * (_whole(config, "input_channels") or 1), frames=_FRAMES)
    if bins and source:  # an encoder of Whisper alone, as in its classifier
        return _one(name, bins, 2 * source)
    return None
