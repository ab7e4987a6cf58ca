"""Defines options that several commands share, and functions that read the values of these options."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from accel.errors import BadInputSpec
from accel.signature import DimRange

if TYPE_CHECKING:
    from accel.sources.source import SourceOptions

_input = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:DTYPE[DIM,...]",
    help="An input of the model; a named dim is dynamic: x:float32[batch,3,32,32]. Numbers may add the range of "
    "random inputs: ids:int64[batch,sequence]{0..30521}, scale:float32[]{0.5..2}. Repeat for each input.",
)
_weights = click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Weights for the factory: .safetensors, its index.json, .pt or .ckpt, or the folder of a training checkpoint "
    "(DeepSpeed, torch.distributed.checkpoint, Megatron, Accelerate). No pickled code is run.",
)
_weights_dtype = click.option(
    "--weights-dtype",
    default="",
    metavar="DTYPE",
    help="Round the weights of --weights or of a run folder: bfloat16 or float16. Default: the float32 master weights, "
    "if the training kept them.",
)
_adapters = click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    multiple=True,
    help="The folder of a LoRA adapter that PEFT wrote. It is merged into the weights.",
)
_dim = click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=MIN:OPT:MAX[:STEP]",
    help="The range of a dynamic dim: sequence=8:128:512. Gates run at its ends, benchmarks at OPT. STEP, if only "
    "multiples of a number fit: height=16:32:64:4.",
)


def read_dims(dims: tuple[str, ...]) -> dict[str, DimRange]:
    """Converts texts such as ``"sequence=8:128:512"`` to a dict from dims to ranges."""
    found: dict[str, DimRange] = {}
    for text in dims:
        name, equals, rest = text.partition("=")
        if not equals or not name:
            raise BadInputSpec(f"can't read --dim {text!r}; write NAME=MIN:OPT:MAX[:STEP], e.g. sequence=8:128:512")
        found[name] = DimRange.parse(rest)
    return found


_graph_inputs = click.option(
    "--inputs", "graph_inputs", multiple=True, metavar="X:0,...", help="Input tensors of a frozen .pb or a .meta."
)
_graph_outputs = click.option(
    "--outputs", "graph_outputs", multiple=True, metavar="Y:0,...", help="Output tensors of a frozen .pb or a .meta."
)
_signature = click.option("--signature", default="", help="The signature of a SavedModel. Default: serving_default.")


_strip = click.option(
    "--strip-training-ops",
    is_flag=True,
    help="Remove dropout that training left in a TensorFlow model, and set placeholders such as is_training.",
)
_placeholder = click.option(
    "--placeholder",
    "placeholders",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a placeholder of a TF1 graph that is no input: keep_prob=1.0. Repeat for each placeholder.",
)


_Value = TypeVar("_Value")


def read_pairs(flag: str, texts: tuple[str, ...], kind: Callable[[str], _Value], example: str) -> dict[str, _Value]:
    """Converts the texts of a repeated option, such as ``"keep_prob=1.0"``, to a dict. ``kind`` converts each value.
    Raises ``BadInputSpec`` with ``example`` for another text."""
    found: dict[str, _Value] = {}
    for text in texts:
        name, _, value = map(str.strip, text.partition("="))
        try:
            if not (name and value):
                raise ValueError
            found[name] = kind(value)
        except ValueError:
            raise BadInputSpec(f"can't read {flag} {text!r}; write NAME=VALUE, e.g. {example}") from None
    return found


_decoder = click.option(
    "--decoder/--no-decoder",
    default=None,
    help="Open a model that generates text with its KV cache as inputs and outputs. Default for an export to a folder.",
)


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of ``accel.Source``. ``function`` gets the options as the argument ``source``. The keys of the
    dict ``source`` are the names of the Python arguments."""

    @_input
    @_weights
    @_weights_dtype
    @_adapters
    @_dim
    @_graph_inputs
    @_graph_outputs
    @_signature
    @_strip
    @_placeholder
    @_decoder
    @wraps(function)
    def wrapped(
        *args: Any,
        inputs: tuple[str, ...],
        weights: Path | None,
        weights_dtype: str,
        adapters: tuple[Path, ...],
        dims: tuple[str, ...],
        graph_inputs: tuple[str, ...],
        graph_outputs: tuple[str, ...],
        signature: str,
        strip_training_ops: bool,
        placeholders: tuple[str, ...],
        decoder: bool | None,
        **kwargs: Any,
    ) -> Any:
        source: SourceOptions = {
            "inputs": inputs or None,
            "weights": weights,
            "weights_dtype": weights_dtype,
            "adapters": adapters or None,
            "dims": read_dims(dims) or None,
            "graph_inputs": read_names(graph_inputs),
            "graph_outputs": read_names(graph_outputs),
            "signature": signature,
            "strip_training_ops": strip_training_ops,
            "placeholders": read_pairs("--placeholder", placeholders, str, "keep_prob=1.0") or None,
            "decoder": decoder,
        }
        return function(*args, source=source, **kwargs)

    return wrapped


def read_names(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names in the values of a repeated option, such as ``"x:0, y:0"``."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def read_contexts(text: str | None) -> tuple[int, ...]:
    """Converts a text such as ``128,1024`` to numbers."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadInputSpec(f"can't read --contexts {text!r}; write numbers with commas, e.g. 128,1024")
    return tuple(map(int, parts))


sizes_option = click.option(
    "--sizes",
    metavar="NAME=SIZE,...",
    help="The shape to measure at: batch=1,sequence=128. Default: the shape of a sample of the data, or usual sizes.",
)


wide_option = click.option("--wide", is_flag=True, help="Print all columns and reasons, in lines of any length.")


def read_sizes(text: str | None) -> dict[str, int]:
    """Converts a text such as ``"batch=1,sequence=128"`` to a dict from dims to sizes."""
    found: dict[str, int] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, equals, size = part.partition("=")
        if not equals or not name or not size.isdecimal():
            raise BadInputSpec(f"can't read --sizes {text!r}; write NAME=SIZE,..., e.g. batch=1,sequence=128")
        found[name] = int(size)
    return found


def read_normalize(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Reads the mean and the standard deviation from a text such as ``"0.5,0.5"``. The mean and the deviation may have
    one number per channel, as in ``"0.4:0.5:0.4,0.2"``."""
    try:
        mean, std = (tuple(float(number) for number in part.split(":")) for part in text.split(","))
    except ValueError:
        raise BadInputSpec(
            f"can't read --normalize {text!r}; write MEAN,STD, with colons between channels: 0.485:0.456:0.406,0.2"
        ) from None
    return mean, std
