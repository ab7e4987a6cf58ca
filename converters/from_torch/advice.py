"""Checks whether the cause of wrong ONNX outputs lies in the PyTorch model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.proof.compare import difference, holds_floats
from accel.sources.torch.call import flatten, in_training, run_named, to_array, to_tensor
from accel.spelling import option
from accel.stage import GateResult

if TYPE_CHECKING:
    import numpy as np

    from accel.sources.torch.call import NamedModule

_APART = "make the scores differ by more than rounding first (e.g. scores - 1e-3 * torch.arange(scores.shape[-1]))"


def own_fault(src: Artifact, module: NamedModule, off: Sequence[Sequence[GateResult]]) -> str:
    """If a fault of the model makes every exporter fail, returns a text that names the fault and the fix. The text
    begins with ``; ``. Returns "" if no fault is found.

    ``module`` is the module of ``src``. ``off`` has one list for each exporter, with the comparisons that exceed the
    error limit.
    """
    if training := in_training(module):
        return f"; {training}"
    if not any(off):
        return ""
    sizes = src.signature.sizes()
    feeds = src.signature.example_inputs(**sizes)
    try:
        found = run_named(module, src.signature, feeds)
    except Exception:  # a model may raise anything; the caller already reports why the exporters failed
        return ""
    outputs = {result.output for results in off for result in results}
    whole = sorted(name for name in outputs if name in found and not holds_floats(found[name]))
    if all(result.limit == 0 for results in off for result in results):
        small = [f"{replace(spec, values=None)}{{0..1000}}" for spec in src.signature.inputs if "int" in spec.dtype][:1]
        return f"; if the model's numbers are smaller than those, give their range with {option('inputs', small)}"
    if all(off) and whole and len(whole) == len(outputs):
        return (
            f"; only the integers of {', '.join(map(repr, whole))} differ, all floats agree: topk, argmax and sort "
            f"order equal or nearly equal scores differently in each runtime; return the scores themselves, or {_APART}"
        )
    limit = min(result.limit or 0.0 for results in off for result in results)
    if place := _ties(src, module, feeds, found, limit):
        return (
            f"; the outputs depend on the order of equal or nearly equal scores in {place}, and each runtime orders "
            f"them differently; {_APART}; a model may have equal scores because its weights are not trained"
        )
    if other := _differs_by_attention(src, module, feeds, limit) or _differs_in_exports(src, module, feeds, limit):
        return other
    apart = _from_float64(src, module, feeds, found) if all(off) else 0.0
    if apart > limit / 4:
        return (
            f"; float32 is not enough for this model: PyTorch's own result is off by {apart:.2g} from the result in "
            "float64, because an operation amplifies rounding errors (a difference of nearly equal numbers, or a "
            "BatchNorm over a channel that hardly varies: raise its eps, or leave that channel out)"
        )
    return ""


def _differs_in_exports(src: Artifact, module: NamedModule, feeds: dict[str, np.ndarray], limit: float) -> str:
    """Returns a text about a model that computes other outputs while it is exported. Returns "" if the outputs agree
    within ``limit`` on ``feeds``, and on ``feeds`` with masks of ones."""
    import numpy as np

    from .exporters import example
    from .python_numbers import during_export, places

    ones = {name: np.ones_like(value) for name, value in feeds.items() if name.endswith("mask")}
    apart = False
    try:
        for given in (feeds, {**feeds, **ones}):
            found = run_named(module, src.signature, given)
            with during_export():
                changed = run_named(module, src.signature, given)
            differences = [difference(name, found[name], changed[name]) for name in found]
            apart = apart or any(one.problem or one.rel_l2 > limit for one in differences)
    except Exception:  # a model may raise anything
        return ""
    if not apart:
        return ""
    read = list(dict.fromkeys(place.where for place in places(module, example(src))))
    where = f" at {' and '.join(read[:2])}" if read else ""
    return (
        "; the model computes other outputs while it is exported (torch.compiler.is_exporting()) than in eager mode, "
        f"which chooses by values of the inputs{where}; make both ways equal"
    )


def _differs_by_attention(src: Artifact, module: NamedModule, feeds: dict[str, np.ndarray], limit: float) -> str:
    """Returns a text about a model of transformers whose outputs depend on how it computes attention. Returns "" if the
    outputs agree within ``limit`` on ``feeds``, and on ``feeds`` with masks of ones.

    PyTorch's own attention gets no mask if transformers finds only ones in the mask, and an exported graph can't choose
    by the values. If a layer isn't declared as causal, it then sees tokens that the mask would hide.
    """
    import numpy as np

    whole: Any = next((part for part in module.modules() if hasattr(part, "set_attn_implementation")), None)
    own = getattr(getattr(whole, "config", None), "_attn_implementation", "eager")
    if own == "eager":
        return ""
    ones = {name: np.ones_like(value) for name, value in feeds.items() if name.endswith("mask")}
    try:
        wanted = [run_named(module, src.signature, given) for given in (feeds, {**feeds, **ones})]
        whole.set_attn_implementation("eager")
        found = [run_named(module, src.signature, given) for given in (feeds, {**feeds, **ones})]
    except Exception:  # a model may raise anything
        return ""
    finally:
        whole.set_attn_implementation(own)
    pairs = [difference(name, a[name], b[name]) for a, b in zip(wanted, found, strict=True) for name in a]
    if not any(one.problem or one.rel_l2 > limit for one in pairs):
        return ""
    return (
        f"; the model's attention ({own}) leaves out a mask of ones, and its outputs then differ from those with the "
        'attention "eager"; call model.set_attn_implementation("eager") before the export'
    )


def _ties(
    src: Artifact, module: NamedModule, feeds: dict[str, np.ndarray], found: dict[str, np.ndarray], limit: float
) -> str:
    """Returns the first place at which another order of equal scores changes the float outputs ``found`` by more than
    ``limit``. Returns "" if the outputs don't depend on this order."""
    from .ties import OtherOrder

    floats = [name for name in found if holds_floats(found[name])]
    for odd in (False, True):
        try:
            with OtherOrder(odd=odd) as other:
                changed = run_named(module, src.signature, feeds)
        except Exception:  # a mode of torch may not support an operator of the model
            return ""
        differences = [difference(name, found[name], changed[name]) for name in floats if name in changed]
        if other.places and any(one.problem or one.rel_l2 > limit for one in differences):
            place: str = other.places[0]
            return place
    return ""


def _from_float64(
    src: Artifact, module: NamedModule, feeds: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> float:
    """Returns the largest relative error of the float outputs ``found`` against the outputs of the model in float64.

    Returns 0 if the model can't run in float64.
    """
    import copy

    import torch

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value.double() if value.dtype == torch.float32 else value

    try:
        double: Any = copy.deepcopy(module).double()
        with torch.no_grad():
            tensors = [wide(to_tensor(feeds[spec.name])) for spec in src.signature.inputs]
            wanted = {name: to_array(value) for name, value in flatten(tuple(double(*tensors))).items()}
    except Exception:  # some models run only in float32
        return 0.0
    names = list(found)
    if len(wanted) != len(names):
        return 0.0
    pairs = zip(names, wanted.values(), found.values(), strict=True)
    return max(
        (d.rel_l2 for n, a, b in pairs if holds_floats(b) and not (d := difference(n, a, b)).problem), default=0.0
    )
