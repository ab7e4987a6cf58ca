"""Opens torch's files that hold a module with its code: exported programs (``.pt2``) and TorchScript files."""

from __future__ import annotations

import inspect
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel, one_line
from accel.signature import DimRange, TensorSpec
from accel.spelling import option

from ..checkpoints.unpickle import read_torch, refuse_bomb
from ..nearby import or_nearby
from .arguments import Arguments, Called, Wrapper, arguments_of_example
from .found import Found

# For a dim without a declared limit, torch writes a limit of at least _ANY_SIZE. A limit below _ANY_SIZE was declared
# by the user, and becomes the upper end of the dim's range. Gates run the model at the upper end of the range, so a
# very large upper end would take too long. The upper end is therefore at most the larger of _DECLARED and four times
# the example's size.
_ANY_SIZE, _DECLARED = 2**13, 32


def open_exported_program(path: Path) -> Found:
    """Opens a ``.pt2`` file. The inputs and the ranges of their dims come from the program's example inputs and range
    constraints.

    Raises ``BadSource`` or ``InvalidModel`` if the file can't be read.
    """
    _check_file(path)
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise InvalidModel(
            f"the file {path} is no exported program ({_reason(error)}); write it with torch.export.save"
        ) from error
    args, kwargs = program.example_inputs or ((), {})
    called = _Program(program.module())
    arguments, tensors, by_position = arguments_of_example(called, Arguments(args, kwargs), may_be_empty=True)
    module = Called(called, arguments, list(tensors), by_position)
    placeholders = [
        node
        for node in program.graph.nodes
        if node.op == "placeholder"
        and node.name in program.graph_signature.user_inputs
        and isinstance(node.meta["val"], torch.Tensor)
    ]
    bounds = {str(symbol): interval for symbol, interval in program.range_constraints.items()}
    specs: list[TensorSpec] = []
    dims: dict[str, tuple[str, DimRange]] = {}
    for (name, tensor), node in zip(tensors.items(), placeholders, strict=True):
        shape: list[int | str] = []
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                shape.append(size)
                continue
            written = str(size.node.expr)
            step, symbol = _multiple_of(size.node.expr)
            dim = "batch" if axis == 0 and symbol not in dims else symbol
            if dim != "batch" and dims.get(dim, (written,))[0] != written:  # another size already has this name
                dim = f"{symbol}_in_steps_of_{step}"
            dim = next((d for d, s in dims.items() if s[0] == written), dim)
            opt = int(tensor.shape[axis])
            interval = bounds.get(symbol)
            low = step * max(1, int(interval.lower)) if interval is not None else step
            high = max(8, 4 * opt)
            if interval is not None and interval.upper < _ANY_SIZE:
                high = min(step * int(interval.upper), max(high, _DECLARED // step * step))
            dims[dim] = (written, DimRange(min(low, opt), opt, max(opt, high), step))
            shape.append(dim)
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(shape)))
    return Found(
        module=module,
        path=path,
        files=(path,),
        inputs=tuple(specs),
        dims={d: r for d, (_, r) in dims.items()},
        tensors=tensors,
        arguments=arguments,
    )


def _multiple_of(expression: Any) -> tuple[int, str]:
    """Returns the step and the symbol of a dim that was exported as ``step * Dim(...)``. For any other dim, returns 1
    and the whole expression.
    """
    factor, symbol = expression.as_coeff_Mul()
    if factor.is_Integer and factor > 1 and symbol.is_Symbol:
        return int(factor), str(symbol)
    return 1, str(expression)


class _Program(Wrapper):
    """Wraps an exported program. The program stays in the mode (training or evaluation) of its export."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.program = module

    def signature(self) -> inspect.Signature:
        return inspect.signature(self.program.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> _Program:  # noqa: ARG002 - the program's graph refuses eval() and train()
        return self


def open_torchscript(path: Path) -> Found:
    """Opens a TorchScript file.

    Raises ``BadSource`` if the file holds only weights, and ``InvalidModel`` if the file can't be read.
    """
    _check_file(path)
    if path.suffix == ".safetensors" or not _is_torchscript(path):
        if path.suffix != ".safetensors":
            # A pickled module isn't taken as weights either, which the first message has to say.
            fix = "save model.state_dict() alone, and name the factory of the model: FILE.py:FACTORY with "
            read_torch(path, fix=fix + option("weights", "WEIGHTS.pt"))
        raise weights_without_code(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides the warning that TorchScript is deprecated
            module = torch.jit.load(str(path), map_location="cpu")
    except Exception as error:
        raise InvalidModel(f"the file {path} is no TorchScript file ({_reason(error)}); save it again") from error
    return Found(module=module, path=path, files=(path,))


def weights_without_code(path: Path) -> BadSource:
    """Returns the error for a file or folder that holds weights but no model."""
    return BadSource(
        f"{path} holds weights and no code; name the factory of their model: FILE.py:FACTORY with "
        f"{option('weights', path)}"
    )


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise InvalidModel(
            f"the file {path} is no PyTorch file or is damaged ({_reason(error)}); save it again"
        ) from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise BadSource(f"{path} does not exist; {or_nearby(str(path))}")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save it again")
    refuse_bomb(path)


def _reason(error: BaseException) -> str:
    return one_line(error, 160)
