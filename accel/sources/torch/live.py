"""Writes a live PyTorch module to the cache, and opens the cached module in any process."""

from __future__ import annotations

import copy
import copyreg
import importlib.machinery
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

from accel.artifact import canonical_json, text_sha256
from accel.cache import StageCache
from accel.errors import AccelError, BadInputSpec, BadSource, no_space, one_line
from accel.folders.writing import cannot_write
from accel.signature import BATCH, DimRange, Signature, TensorSpec
from accel.spelling import option

from ..dynamic import Axes, Dynamic, NamedAxes, named_axes
from ..live import FACTS, facts_about
from ..output_specs import same_output
from ..python_object import is_installed, place_in_user_code
from ..structure import Template
from .arguments import (
    arguments_of_example,
    callable_as,
    class_name,
    defaults_replaced,
    positional_parameters,
    unwrapped,
)
from .call import NamedModule, flatten, to_array, to_tensor
from .fingerprint import code_and_attributes_sha256, script_bytes, state_sha256, tensor_sha256
from .found import Found
from .probe.changed_state import changes_words
from .probe.checked_bags import checked_bags
from .probe.readable import check_values, computes_otherwise, unreadable

SUFFIX = ".module"
_EXAMPLE = "example.pt"
Tensors = Mapping[str, torch.Tensor]


# cloudpickle copies the modules that the code refers to, but it can't copy torch.ops and the namespaces in torch.ops.
copyreg.pickle(type(torch.ops), lambda _: (getattr, (torch, "ops")))
copyreg.pickle(type(torch.ops.aten), lambda space: (getattr, (torch.ops, space.name)))


def capture(model: Callable[..., Any], example: Any = None, dynamic: Dynamic | None = None) -> Path:
    """Writes ``model`` and its example inputs to the cache. Returns the path of the file, which can be opened like any
    other source.

    ``example`` is a tuple of positional arguments, a dict of keyword arguments, or a single tensor. ``dynamic`` names
    the dynamic axes of the inputs, as in ``{"x": {0: "batch", 2: "height"}}``. Unless ``dynamic`` is empty or names a
    first axis, the first axis is dynamic if the model runs with another batch size. ``model`` isn't changed: a copy is
    set to evaluation mode and moved to the CPU.

    Raises ``BadSource`` if the model can't be copied or fails on the example, and ``BadInputSpec`` if the example
    doesn't fit the model.
    """
    module = unwrapped(model)
    arguments, tensors, facts = facts_of_call(module, example)
    by_position = facts["by_position"]
    named = named_axes(dynamic, arguments, {name: tuple(one.shape) for name, one in tensors.items()})
    values = {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
    key = text_sha256(canonical_json([facts, values, named.names, named.ranges, named.open_batch]))
    cache = StageCache()
    path: Path = cache.entry(key) / (facts["class"].rpartition(".")[2] + SUFFIX)
    if not path.is_file():
        with cache.scratch() as folder:
            _write(module, folder / path.name)
            copied = callable_as(_read(folder / path.name), arguments, by_position).eval()
            outputs: Tensors = {}
            if tensors:
                outputs = _run(copied, tensors, facts["class"])
                facts |= _described(copied, tensors, named)
            torch.save({"inputs": tensors, "outputs": outputs}, folder / _EXAMPLE)
            (folder / FACTS).write_text(json.dumps(facts))
            return cache.keep(key, folder) / path.name
    return path


def found_called(module: torch.nn.Module, example: Any, path: Path) -> Found:
    """Returns the module of a factory with the signature of its example arguments, as ``capture`` finds it. The module
    stays in this process, so it may hold anything. ``path`` is the factory's file."""
    arguments, tensors, facts = facts_of_call(module, example)
    called = callable_as(module, arguments, facts["by_position"]).eval()
    _run(called, tensors, facts["class"])
    facts |= _described(called, tensors, named_axes(None, {}, {}))
    signature = Signature.from_json(facts["signature"])
    return Found(
        module=called, path=path, files=(), name=facts["class"], forms=(signature,), tensors=tensors, live=facts
    )


def facts_of_call(
    module: torch.nn.Module, example: Any
) -> tuple[dict[str, Template], dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the templates of the example's arguments, the tensors in the arguments by name, and the facts that a
    manifest records about the module and the call.

    Raises ``BadInputSpec`` if the example doesn't fit the module, and ``BadSource`` if a weight has no values.
    """
    arguments, inputs, by_position = arguments_of_example(module, example)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and (why := unreadable(value)):
            raise BadInputSpec(f"the example's {name} can't be read: {why}")
        if isinstance(value, torch.Tensor) and computes_otherwise(type(value)):
            raise BadInputSpec(
                f"the example's {name} is a {type(value).__name__}, whose own operators an exported model can't have; "
                f"give {name}.as_subclass(torch.Tensor), for which the model is then exported"
            )
    tensors = {name: _on_cpu(value) for name, value in inputs.items()}
    _check_rows(tensors)
    check_values(module, class_name(module))
    facts: dict[str, Any] = {
        "note": "",
        "class": class_name(module),
        "state_sha256": state_sha256(module),
        "code_sha256": code_and_attributes_sha256(module),
        "by_position": by_position,
        "call": {"arguments": arguments, "rest": positional_parameters(module)[1]} if arguments else {},
        **({"not_finite": unfit} if (unfit := _not_finite(tensors)) else {}),
    }
    if defaults := defaults_replaced(module, arguments):
        facts["call"]["defaults"] = defaults
    return arguments, tensors, facts


def capture_program(program: torch.export.ExportedProgram) -> Path:
    """Writes an exported program to the cache. Returns the path of the ``.pt2`` file."""
    digest = {name: tensor_sha256(tensor) for name, tensor in sorted(program.state_dict.items())}
    constants = {name: tensor_sha256(one) for name, one in program.constants.items() if isinstance(one, torch.Tensor)}
    key = text_sha256(canonical_json([str(program), digest, constants]))
    cache = StageCache()
    path = cache.entry(key) / "program.pt2"
    if not path.is_file():
        with cache.scratch() as folder:
            torch.export.save(program, folder / path.name)
            cache.keep(key, folder)
    return path


def kept_example(path: Path) -> dict[str, torch.Tensor]:
    """Returns the example inputs of a captured module by name."""
    found: dict[str, torch.Tensor] = torch.load(path.parent / _EXAMPLE, weights_only=True)["inputs"]
    return found


def open_captured(path: Path) -> Found:
    """Opens a module that ``capture`` wrote.

    Raises ``BadSource`` if the file isn't in the user's cache, because opening the file runs its code. Also raises
    ``BadSource`` if the opened module computes other outputs than the live module, for example because the file of the
    module's class was edited, or because another process imports a value that the user's process changed.
    """
    if not path.is_file():
        raise BadSource(f"the live module {path.stem} is no longer in the cache; give the module again")
    if not StageCache().holds(path):
        raise BadSource(f"the module {path} is not in the cache of this user; give the module itself or a file")
    facts = facts_about(path)
    kept = torch.load(path.parent / _EXAMPLE, weights_only=True)
    module = callable_as(_read(path), facts["call"].get("arguments", {}), facts["by_position"]).eval()
    if kept["outputs"]:
        outputs = _run(module, kept["inputs"], path.stem)
        # Models that draw random numbers are refused later, so they raise no error here.
        if not _same(outputs, kept["outputs"]) and _same(outputs, _run(module, kept["inputs"], path.stem)):
            if changes := changes_words(module, lambda: _run(module, kept["inputs"], path.stem)):
                raise BadSource(f"the outputs of {path.stem} differ from run to run on the same inputs: {changes}")
            raise BadSource(
                f"the copy {path.stem} computes other outputs than the original module, because it imports other code "
                "or other values: restart Python if a file was edited after its import, and if a value of an imported "
                "Python module was changed at run time, make the value an attribute of the model; then give the model "
                "again"
            )
    signature = Signature.from_json(facts["signature"]) if "signature" in facts else None
    return Found(
        module=module,
        path=path,
        files=(),
        name=facts["class"],
        forms=(signature,) if signature else _forms(module),
        tensors=kept["inputs"],
        live=facts,
    )


def _same(outputs: Tensors, others: Tensors) -> bool:
    return all(same_output(to_array(outputs[name]), to_array(value)) for name, value in others.items())


def _forms(module: torch.nn.Module) -> tuple[Signature, ...]:
    """Returns the possible signatures of a transformers model, or an empty tuple for any other module."""
    if not hasattr(module, "main_input_name") or not hasattr(module, "config"):
        return ()
    from .pretrained.transformers_inputs import forms

    return forms(module, Path(str(getattr(module.config, "_name_or_path", "") or "missing")))


def _on_cpu(value: Any) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else to_tensor(value)
    return tensor.detach().as_subclass(torch.Tensor).cpu().contiguous().clone()


def _check_rows(tensors: Tensors) -> None:
    """Raises ``BadInputSpec`` if a tensor of the example has no row, because its first axis would stay empty."""
    for name, tensor in tensors.items():
        if tensor.ndim and not tensor.shape[0]:
            raise BadInputSpec(
                f"the example's {name} has the shape {list(tensor.shape)}, which holds no sample; give at least one "
                f"row with {option('example')}, as in torch.zeros({[1, *tensor.shape[1:]]})"
            )


def _not_finite(tensors: Tensors) -> str:
    """Returns the names of the tensors that hold NaN or infinity, joined by "and", or "" if none does."""
    floats = {name: one for name, one in tensors.items() if one.is_floating_point() or one.is_complex()}
    return " and ".join(name for name, one in floats.items() if not torch.isfinite(one).all())


def _described(module: torch.nn.Module, tensors: Tensors, named: NamedAxes) -> dict[str, Any]:
    """Returns the signature of the inputs as JSON, and a note. If ``named`` leaves the batch open, also looks for the
    batch dim, and the note says how it was found. Otherwise, the note is empty."""
    note, axes, ranges = "", named.names, named.ranges
    if named.open_batch and not any(BATCH in one.values() or 0 in one for one in axes.values()):
        firsts, note = _batch_axes(module, tensors)
        axes = {name: {**firsts.get(name, {}), **axes.get(name, {})} for name in tensors}
    sizes: dict[str, int] = {}
    specs = []
    for name, tensor in tensors.items():
        shape = [axes.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)]
        sizes |= {dim: size for dim, size in zip(shape, tensor.shape, strict=True) if isinstance(dim, str)}
        counts = tensor.numel() and not tensor.is_floating_point() and tensor.dtype != torch.bool
        seen = (int(tensor.min()), int(tensor.max())) if counts else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(shape), seen=seen))
    dims = {}
    for dim, size in sizes.items():
        low, high = ranges.get(dim, (1, max(8, size if dim == BATCH else 4 * size)))
        dims[dim] = DimRange(min(max(1, low), size), size, max(size, min(high, max(8, 4 * size))))
    return {"signature": Signature(tuple(specs), (), dims).to_json(), "note": note}


def _batch_axes(module: torch.nn.Module, tensors: Tensors) -> tuple[Axes, str]:
    """Runs the module with a batch that is one row larger. Returns the batch axis of each input that has a batch axis,
    and a note about the result of this run."""
    size = next((tensor.shape[0] for tensor in tensors.values() if tensor.ndim), 0)
    batched = [name for name, tensor in tensors.items() if tensor.ndim and tensor.shape[0] == size]
    if not size:
        return {}, ""
    more = {
        name: tensor[torch.arange(size + 1) % size] if name in batched else tensor for name, tensor in tensors.items()
    }
    which = " and ".join(batched) if len(batched) < 4 else f"{len(batched)} inputs"
    try:
        outputs = _run(module, more, "")
    except BadSource as error:
        reason = one_line(error.__cause__ or error, 120)
        return {}, f"the first axis of {which} stays {size}, because the model fails at {size + 1}: {reason}"
    if set(outputs) != set(_run(module, tensors, "")):
        return {}, f"the first axis of {which} stays {size}, because the model returns other tensors at {size + 1}"
    note = f"the first axis of {which} is the batch: the model ran at {size} and {size + 1}"
    return {name: {0: BATCH} for name in batched}, note


def _run(module: torch.nn.Module, tensors: Tensors, where: str) -> dict[str, torch.Tensor]:
    """Returns the outputs of one forward pass by name."""
    try:
        with torch.no_grad(), checked_bags(module):
            result = NamedModule(module, list(tensors)).call(*tensors.values())
    except AccelError:  # the error message already names the fix
        raise
    except Exception as error:  # a model may raise any type of error
        reason = f"the model {where} fails on its example{place_in_user_code(error)}: {one_line(error, 200)}"
        fix = _dtype_fix(module, tensors) or f"correct the model, or give other arguments with {option('example')}"
        raise BadSource(f"{reason}; {fix}") from error
    found = flatten(result)
    for name, one in found.items():
        if why := unreadable(one):
            raise BadSource(f"the output {name!r} of the model {where} can't be read: {why}")
    return {name: one.detach() for name, one in found.items()}


def _dtype_fix(module: torch.nn.Module, tensors: Tensors) -> str:
    """Returns the fix for an example of another floating-point dtype than the weights, or "" if the dtypes agree."""
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    wrong = [name for name, value in tensors.items() if value.is_floating_point() and value.dtype not in kinds]
    if len(kinds) != 1 or not wrong:
        return ""
    own, given = (str(dtype).removeprefix("torch.") for dtype in (*kinds, tensors[wrong[0]].dtype))
    cast = f"{wrong[0]}.to(torch.{own})"
    return f"the weights are {own} and {wrong[0]} is {given}: cast it in {option('example')}, as in {cast}"


def _write(module: torch.nn.Module, path: Path) -> None:
    """Pickles ``module``. Raises ``BadSource`` with the name of the part that can't be pickled."""
    if any(parametrize.is_parametrized(part) for part in module.modules()):  # torch can't pickle parametrizations
        module = copy.deepcopy(module, _results_in(module))
        for part in module.modules():
            if parametrize.is_parametrized(part):  # the original has the same class, so the copy gets its own class
                own = type(part)
                part.__class__ = type(own.__name__, own.__bases__, dict(vars(own)))
            for name in list(getattr(part, "parametrizations", ())) if parametrize.is_parametrized(part) else ():
                parametrize.remove_parametrizations(part, name, leave_parametrized=True)
    body: Any = module
    if isinstance(module, torch.jit.ScriptModule):
        body = io.BytesIO(script_bytes(module))
    with by_value(module):
        try:
            with path.open("wb") as stream:  # given a path, torch's own code hides that the disk is full
                torch.save(body, stream, pickle_module=cloudpickle)
        except Exception as error:  # an object may raise any type of error
            if full := no_space(error):
                raise cannot_write(full, path) from error
            raise BadSource(
                f"the module {class_name(module)} can't be copied: {_unpicklable(module)}{one_line(error, 160)}; "
                "remove this part from the module, or write a function that makes the module and give the function as "
                "FILE.py:FUNCTION"
            ) from error


def _results_in(module: torch.nn.Module) -> dict[int, Any]:
    """Maps the ids of computed tensors in ``module`` to copies, because torch's deepcopy refuses such tensors. The old
    weight_norm computes a weight before each call and keeps it as an attribute."""
    values = [value for part in module.modules() for value in vars(part).values()]
    return {id(one): one.detach().clone() for one in values if isinstance(one, torch.Tensor) and not one.is_leaf}


def _read(path: Path) -> torch.nn.Module:
    body = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    if isinstance(body, io.BytesIO):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides the warning that TorchScript is deprecated
            body = torch.jit.load(body, map_location="cpu")
    assert isinstance(body, torch.nn.Module)
    return body


def _unpicklable(module: torch.nn.Module) -> str:
    """Returns a text about the first attribute that can't be pickled, or "" if all attributes can be pickled."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                cloudpickle.dumps(value)
            except Exception:  # an object may raise any type of error
                return f"its attribute {'.'.join(filter(None, (name, attribute)))!r} is a {type(value).__name__}, "
    return ""


@contextmanager
def by_value(module: torch.nn.Module) -> Iterator[None]:
    """Lets cloudpickle copy the code of Python modules that another process can't import by name."""
    names = {type(part).__module__ for part in module.modules()}
    names |= {getattr(value, "__module__", None) or "" for part in module.modules() for value in vars(part).values()}
    registered = []
    for name in names - {"__main__", ""}:
        code = sys.modules.get(name)
        if code is not None and not is_installed(name) and not _importable(name, str(getattr(code, "__file__", ""))):
            cloudpickle.register_pickle_by_value(code)
            registered.append(code)
    try:
        yield
    finally:
        for code in registered:
            cloudpickle.unregister_pickle_by_value(code)


def _importable(name: str, file: str) -> bool:
    """Tells whether ``import name`` in a new process with the same ``sys.path`` would import ``file``."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()
