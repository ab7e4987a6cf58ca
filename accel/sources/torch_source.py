"""PyTorch sources: a factory (with or without separate weights), an exported program, TorchScript."""

from __future__ import annotations

import hashlib
import inspect
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Artifact, combined_sha256, file_sha256, text_sha256
from accel.errors import AccelError, BadInputSpec, BadSource, InvalidModel, one_line
from accel.signature import DimRange, Signature, TensorSpec
from accel.sources.checkpoint import Checkpoint, detect
from accel.sources.declare import Declaration, Dims, Inputs, input_example, parse_dims, parse_inputs
from accel.sources.python_object import load_object, raised
from accel.sources.torch_call import discover_outputs, flatten, in_training, script_parameters
from accel.sources.unpickle import refuse_bomb
from accel.sources.weights import load_weights

# Modules that were opened in this process, by the source's sha256: building one twice costs seconds.
_opened: dict[str, torch.nn.Module] = {}

# A dim that an exported program lets go beyond the first was meant to take any size. What it declares below that is the
# range of the dim, up to the second or four times its example: everything is tried at its ends.
_ANY_SIZE, _DECLARED = 2**13, 32


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a spec led to: the module, what is known of its inputs, and the files it was read from. ``forms``: what it
    may be called with, where that is for PyTorch to tell; ``example``: how its inputs may be declared."""

    module: torch.nn.Module
    path: Path
    files: tuple[Path, ...]
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    dims: Mapping[str, DimRange] | None = None
    checkpoint: Checkpoint | None = None
    forms: tuple[Signature, ...] = ()
    example: tuple[str, ...] = ()


def open_torch(
    spec: str,
    *,
    inputs: Inputs | None = None,
    weights: Path | None = None,
    dims: Dims | None = None,
    like: Callable[[], Signature] | None = None,
) -> Artifact:
    """The PyTorch model that ``spec`` names, as an artifact of kind ``torch``.

    ``spec``: ``package.module:factory``, ``file.py:factory``, ``model.pt2``, a TorchScript file, a transformers folder.
    ``inputs``: overrides what the factory declares. ``weights``: a state dict, or the folder of a
    training checkpoint, to load into what the factory makes. ``like``: the signature of another form of the model,
    which is asked for where neither says what the model takes.
    """
    found = _find(spec, weights)
    given = parse_inputs(inputs) if inputs else ()
    ranges = parse_dims(dims or {})
    if found.forms:
        from accel.sources.transformers_inputs import that_runs

        form = found.forms[0] if given else that_runs(found.module, found.forms, ranges)
        found = replace(found, inputs=form.inputs, dims=form.dims)
    specs = given or found.inputs
    if not specs and like is not None:
        other = like()
        specs = given = other.inputs
        found = replace(found, dims=other.dims)
    if not specs:
        examples = found.example or tuple(map(input_example, _required_parameters(found.module) or ["x"]))
        words = " ".join(f"--input {example}" for example in examples)
        raise BadInputSpec(f"{spec} doesn't say what it takes; pass --input for each input, e.g. {words}")
    declared = dict(found.dims or {})
    bare = Signature(specs)
    unknown = [d for d in ranges if d not in bare.dims]
    if unknown:
        raise BadInputSpec(f"no input has a dim called {unknown[0]!r}; the dims are {', '.join(bare.dims) or 'none'}")
    signature = Signature(specs, (), {d: r for d, r in declared.items() if d in bare.dims}).with_dims(ranges)
    found.module.eval()
    names = found.outputs if not given or found.outputs else ()
    signature = replace(signature, outputs=discover_outputs(found.module, signature, names, spec))
    training = in_training(found.module)
    files = [{"path": str(f.absolute()), "sha256": file_sha256(f)} for f in found.files]
    state = state_sha256(found.module)
    code = _code_sha256(found.module)
    # Two factories of one file may differ in nothing else than what they set.
    factory = spec.rpartition(":")[2] if ":" in spec else ""
    sha256 = text_sha256("\n".join([state, code, factory, *(f["sha256"] for f in files)]))
    _opened[sha256] = found.module
    return Artifact(
        path=found.path,
        kind="torch",
        signature=signature,
        properties={"precision": _precision(found.module)},
        source={
            "kind": "torch",
            "spec": spec,
            "weights": str(weights) if weights else None,
            **({"checkpoint": found.checkpoint.to_json()} if found.checkpoint else {}),
            **({"in_training": training} if training else {}),
            **({"renamed": renamed} if (renamed := _renamed(found.module, specs)) else {}),
            "files": files,
            "state_sha256": state,
            "code_sha256": code,
            "sha256": sha256,
        },
    )


def module_of(artifact: Artifact) -> torch.nn.Module:
    """The module behind an artifact of kind ``torch``; opened again where this process hasn't yet."""
    if artifact.manifest is not None or "sha256" not in artifact.source:  # a stage made it: the source is another model
        digest = artifact.digest
        if digest not in _opened:
            _opened[digest] = _from_exported_program(artifact.path).module
        return _opened[digest]
    sha256 = artifact.source["sha256"]
    if sha256 not in _opened:
        weights = artifact.source.get("weights")
        found = _find(artifact.source["spec"], Path(weights) if weights else None)
        _opened[sha256] = found.module.eval()
    return _opened[sha256]


def state_sha256(module: torch.nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _code_sha256(module: torch.nn.Module) -> str:
    """sha256 over the files that define the classes of the module and of everything in it."""
    files = set()
    for kind in {type(m) for m in module.modules()}:
        try:
            files.add(inspect.getfile(kind))
        except (TypeError, OSError):
            continue
    return combined_sha256(sorted({file_sha256(Path(f)) for f in files if Path(f).is_file()}) or [""])


def _renamed(module: torch.nn.Module, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """The name that a single input was given in place of that of ``forward``'s first parameter: by ``NamedModule`` it
    goes there by position."""
    if len(specs) != 1:
        return {}
    parameters = _forward_parameters(module)
    if isinstance(module, torch.jit.ScriptModule):
        anything = False
    else:
        kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
        anything = bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
    if anything or not parameters or specs[0].name in parameters:
        return {}
    return {specs[0].name: parameters[0]}


def _precision(module: torch.nn.Module) -> str:
    kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
    main = max(set(kinds), key=kinds.count, default=torch.float32)
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(main, "fp32")


def _find(spec: str, weights: Path | None) -> Found:
    path = Path(spec)
    if path.is_dir():
        from accel.sources.train_folder import final_folder, open_train_folder

        if (trained := final_folder(path)) is not None:
            return open_train_folder(trained)
        if not (path / "config.json").is_file() and detect(path) is not None:
            raise BadSource(
                f"{path} holds weights and no code; name what they belong to: accel export FILE.py:FACTORY "
                f"--weights {path}"
            )
        from accel.sources.transformers_folder import open_folder

        return open_folder(path)
    if path.suffix == ".pt2":
        return _from_exported_program(path)
    if path.suffix in (".pt", ".pth", ".ts", ".jit", ".torchscript", ".bin", ".safetensors", ".ckpt"):
        return _from_torchscript(path)
    return _from_factory(spec, weights)


def _from_factory(spec: str, weights: Path | None) -> Found:
    module, factory = load_object(spec, "factory")
    declaration: Declaration | None = getattr(factory, "__accel__", None)
    made = call_factory(factory, spec)
    example: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor | None = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        made, example = made
    if not isinstance(made, torch.nn.Module):
        raise BadSource(
            f"{spec} returned {type(made).__name__}; a factory returns an nn.Module (or a module and inputs)"
        )
    code = Path(getattr(module, "__file__", "") or spec)
    files = [code] if code.is_file() else []
    checkpoint = load_weights(made, weights) if weights is not None else None
    if checkpoint is not None:
        files = [*checkpoint.files, *files]
    if declaration and declaration.weights:
        files = [*(Path(f) for f in declaration.weights()), *files]
    folder = getattr(getattr(made, "config", None), "_name_or_path", "")
    if folder and Path(folder).is_dir():  # a transformers model that was read from there
        files = [*sorted(Path(folder).glob("*.safetensors")), *files]
    inputs = declaration.inputs if declaration else specs_from_example(made, example)
    return Found(
        module=made,
        path=code,
        files=tuple(dict.fromkeys(files)),
        inputs=inputs,
        outputs=declaration.outputs if declaration else (),
        dims=declaration.dims if declaration else None,
        checkpoint=checkpoint,
    )


def specs_from_example(module: torch.nn.Module, example: Any) -> tuple[TensorSpec, ...]:
    """Example tensors as specs, first dim dynamic: a factory that returns them says no more than that."""
    if example is None:
        return ()
    if isinstance(example, torch.Tensor):
        example = (example,)
    if not isinstance(example, Mapping):
        example = dict(zip(_forward_parameters(module), example, strict=False))
    tensors = flatten(example)
    specs = []
    for name, tensor in tensors.items():
        shape = ("batch", *tensor.shape[1:]) if tensor.ndim else ()
        values = None
        if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel():
            values = (int(tensor.min()), int(tensor.max()))
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), shape, values))
    return tuple(specs)


def _forward_parameters(module: torch.nn.Module) -> list[str]:
    if isinstance(module, torch.jit.ScriptModule):
        return script_parameters(module)
    return [n for n, p in inspect.signature(module.forward).parameters.items() if p.kind is not p.VAR_KEYWORD]


def _required_parameters(module: torch.nn.Module) -> list[str]:
    """Names of what ``forward`` can't be called without; the first of what it takes where all have defaults."""
    names = _forward_parameters(module)
    if isinstance(module, torch.jit.ScriptModule):
        return names
    parameters = inspect.signature(module.forward).parameters
    needed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [n for n in names if parameters[n].default is inspect.Parameter.empty and parameters[n].kind in needed]
    return required or names[:1]


def call_factory(factory: Callable[[], Any], spec: str) -> Any:
    """What ``factory`` makes; ``BadSource`` with the place where it raised."""
    if isinstance(factory, torch.nn.Module):
        return factory
    try:
        return factory()
    except AccelError:
        raise
    except (Exception, SystemExit) as error:
        raise raised(spec, error) from error


def _from_exported_program(path: Path) -> Found:
    _check_file(path)
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise InvalidModel(
            f"{path} is no exported program ({_reason(error)}); write it with torch.export.save"
        ) from error
    args, kwargs = program.example_inputs or ((), {})
    placeholders = [
        n for n in program.graph.nodes if n.op == "placeholder" and n.name in program.graph_signature.user_inputs
    ]
    names = [node.name for node in placeholders[: len(placeholders) - len(kwargs)]] + list(kwargs)
    tensors = dict(zip(names, [*flatten(args).values(), *kwargs.values()], strict=False))
    module = _Program(program.module(), tuple(kwargs))
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
            if dim != "batch" and dims.get(dim, (written,))[0] != written:  # other multiples of the same number
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
    )


def _multiple_of(expression: Any) -> tuple[int, str]:
    """The step of a dim that was exported as ``step * Dim(...)`` and that symbol; 1 and all of it of any other."""
    factor, symbol = expression.as_coeff_Mul()
    if factor.is_Integer and factor > 1 and symbol.is_Symbol:
        return int(factor), str(symbol)
    return 1, str(expression)


class _Program(torch.nn.Module):
    """An exported program, called with all tensors in order. It stays in the mode in which it was exported."""

    def __init__(self, module: torch.nn.Module, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.program = module
        self.keywords = keywords

    def forward(self, *tensors: torch.Tensor) -> Any:
        split = len(tensors) - len(self.keywords)
        return self.program(*tensors[:split], **dict(zip(self.keywords, tensors[split:], strict=True)))

    def train(self, mode: bool = True) -> _Program:  # noqa: ARG002 - its graph is fixed: it refuses eval() and train()
        return self


def _from_torchscript(path: Path) -> Found:
    _check_file(path)
    if path.suffix == ".safetensors" or not _is_torchscript(path):
        raise BadSource(
            f"{path} holds weights and no code; name what they belong to: accel export FILE.py:FACTORY --weights {path}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is deprecated is no news to who has one
            module = torch.jit.load(str(path), map_location="cpu")
    except Exception as error:
        raise InvalidModel(f"{path} is no TorchScript file ({_reason(error)}); save it again") from error
    return Found(module=module, path=path, files=(path,))


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise InvalidModel(f"{path} is neither a PyTorch file nor whole ({_reason(error)}); save it again") from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise BadSource(f"{path} does not exist; check the path")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save it again")
    refuse_bomb(path)


def _reason(error: BaseException) -> str:
    return one_line(error, 160)
