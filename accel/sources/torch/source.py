"""Opens every kind of PyTorch source as an artifact of kind ``torch``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel import kept_outputs
from accel.artifact import Artifact, canonical_json, file_sha256, text_sha256
from accel.errors import BadInputSpec, UsageError
from accel.signature import Signature, TensorSpec
from accel.sources.structure import Template
from accel.spelling import option

from ..checkpoints.checkpoint import detect
from ..declare import Dims, Inputs, gaps_words, parse_dims, parse_inputs
from ..hub.download import locate
from ..hub.model_id import model_id
from ..pipeline import keep_function, pipeline_in
from ..run_folder import CONFIG, final_folder
from .arguments import Called, class_name, left_out
from .call import NamedModule, Runs, discover_outputs, in_training
from .decoder import CachedDecoder, about_decoder, as_decoder
from .factory import forward_parameters, open_factory, suggested_inputs
from .fingerprint import code_and_attributes_sha256, state_sha256
from .found import Found
from .live import SUFFIX, open_captured
from .pretrained.encoder_decoder import ENCODER, DecoderPart, EncoderPart, about_pair, as_part
from .pretrained.folder import open_folder
from .pretrained.transformers_inputs import that_runs
from .probe.integer_bounds import bounds_words, columns_words, find_bounds, with_samples, with_table_ranges
from .probe.readable import check_values
from .probe.taken_sizes import guessed_within_reach, reach_words, refused_empty, shared_batch
from .saved import open_exported_program, open_torchscript, weights_without_code
from .train_folder import open_train_folder
from .weights import DTYPES

# Maps the sha256 of each source to the module that this process opened from the source. Building a module again would
# take seconds.
_opened: dict[str, torch.nn.Module] = {}


def open_torch(
    spec: str,
    *,
    inputs: Inputs | None = None,
    weights: Path | None = None,
    weights_dtype: str = "",
    adapters: Path | None = None,
    dims: Dims | None = None,
    like: Callable[[], Signature] | None = None,
    decoder: bool = False,
    part: str = "",
) -> Artifact:
    """Opens the PyTorch model that ``spec`` names, as an artifact of kind ``torch``.

    ``spec`` is ``package.module:factory``, ``file.py:factory``, ``model.pt2``, a TorchScript file, a transformers
    folder, a folder that ``accel train`` wrote, or a Hugging Face Hub model at a commit. ``inputs`` replaces the inputs
    that the factory declares. ``weights`` is a state dict or the folder of a training checkpoint, which is loaded into
    the factory's module. ``weights_dtype`` rounds these weights, or the weights of a run folder. ``adapters`` is the
    folder of a LoRA adapter, which is merged into the model. ``like`` is a function that returns the signature of
    another version of the model. ``like`` is called if neither ``spec`` nor ``inputs`` declares the inputs. With
    ``decoder``, the model gets a KV cache as inputs and outputs. ``part`` opens only the encoder or the decoder of an
    encoder-decoder of transformers.

    Raises ``BadSource`` or ``InvalidModel`` if the model can't be found, read or run, and ``BadInputSpec`` if its
    inputs are unknown or wrong.
    """
    found, adapted = _adapted(find(spec, weights, weights_dtype), adapters)
    check_values(found.module, found.name or spec)
    found = as_part(found, part) if part else as_decoder(found) if decoder else found
    given = parse_inputs(inputs) if inputs else ()
    ranges = parse_dims(dims or {})
    found.module.eval()
    reached = ""
    runs = Runs()
    if found.forms:
        sampled = (_sampled(found, form, runs) for form in found.forms)
        form = found.forms[0] if given else that_runs(found.module, tuple(sampled), ranges, runs)
        names_of = [spec.name for spec in form.inputs]
        before = next(one for one in found.forms if [spec.name for spec in one.inputs] == names_of)
        reached = reach_words(before, form) if not given else ""
        found = replace(found, inputs=form.inputs, dims=form.dims)
    specs = given or found.inputs
    if not specs and like is not None:
        other = like()
        specs = given = other.inputs
        found = replace(found, dims=other.dims)
    if not specs:
        if found.live:
            raise BadInputSpec(
                f"the inputs of {found.name} are unknown; pass example arguments with {option('example')}"
            )
        examples = found.example or suggested_inputs(found.module)
        raise BadInputSpec(
            f"the model {found.name or spec} doesn't declare its inputs; pass {option('inputs')} for each input, e.g. "
            f"{option('inputs', list(examples))}{gaps_words(examples)}"
        )
    declared = dict(found.dims or {})
    bare = Signature(specs)
    unknown = [d for d in ranges if d not in bare.dims]
    if unknown:
        raise BadInputSpec(f"no input has a dim called {unknown[0]!r}; the dims are {', '.join(bare.dims) or 'none'}")
    signature = Signature(specs, (), {d: r for d, r in declared.items() if d in bare.dims}).with_dims(ranges)
    names = found.outputs if not given or found.outputs else ()
    named = NamedModule(found.module, [one.name for one in specs])
    run = runs.of(named, signature)
    if given or not found.forms:  # otherwise the forms already have their samples
        signature = with_samples(signature, run, found.tensors)
    signature = with_table_ranges(signature, run, runs.of(named, signature, again=True))
    bounded = find_bounds(signature, run, found.tensors)
    words = "; ".join(filter(None, (columns_words(signature), bounds_words(signature, bounded))))
    # An exported program may have guards that its ranges don't tell, so its ranges are guesses too.
    known = {*ranges, *(declared if found.path.suffix != ".pt2" else ()), shared_batch(bounded)}
    guessed = [dim for dim in bounded.dims if dim not in known]
    signature = guessed_within_reach(bounded, run, guessed)
    reached = reached or reach_words(bounded, signature)
    outputs = discover_outputs(found.module, signature, names, found.name or spec, runs)
    empty = refused_empty(signature, run)
    signature = replace(signature, outputs=outputs.specs)
    training = in_training(found.module)
    files = [{"path": str(f.absolute()), "sha256": file_sha256(f)} for f in found.files]
    if found.live:
        state, code = found.live["state_sha256"], found.live["code_sha256"]
    else:
        state, code = state_sha256(found.module), code_and_attributes_sha256(found.module)
    about = about_decoder(found.module, not _of_folder(found)) if isinstance(found.module, CachedDecoder) else None
    pair = about_pair(found.module.parts) if isinstance(found.module, EncoderPart | DecoderPart) else None
    facts: list[Any] = [about] if about else [[part, pair]] if pair else []
    # The example's constants are part of the graph. A hook may compute with the arguments by position alone.
    facts += [found.module.templates, found.module.positional] if isinstance(found.module, Called) else []
    sha256 = text_sha256("\n".join([state, code, *map(canonical_json, facts), *(f["sha256"] for f in files)]))
    _opened[sha256] = found.module
    kept_outputs.rename(runs.name, sha256, [spec.name for spec in outputs.specs])
    return Artifact(
        path=found.path,
        kind="torch",
        signature=signature,
        properties={"precision": _precision(found.module)},
        source={
            "kind": "torch",
            "spec": spec,
            "weights": str(weights) if weights else None,
            **({"weights_dtype": weights_dtype} if weights_dtype else {}),
            **({"adapters": adapted} if adapted else {}),
            **({"checkpoint": found.checkpoint.to_json()} if found.checkpoint else {}),
            **({"in_training": training} if training else {}),
            **({"live": {"note": note}} if found.live and (note := found.live.get("note")) else {}),
            **({"bounds": words} if words else {}),
            **({"sizes": reached} if reached else {}),
            **({"not_empty": empty} if empty else {}),
            "call": {**_call(found, specs), "result": outputs.result},
            **_pipeline(found.module),
            **({"decoder": about} if about else {}),
            **({"encoder_decoder": pair, "part": part} if pair else {}),
            **({"renamed": renamed} if (renamed := _renamed(found.module, specs)) else {}),
            "files": files,
            "covers": "attributes",
            "state_sha256": state,
            "code_sha256": code,
            "sha256": sha256,
        },
    )


def _of_folder(found: Found) -> bool:
    """Tells whether the model was read from a folder of transformers, which has its configs as files."""
    return found.path.name == CONFIG and final_folder(found.path.parent) is None


def _sampled(found: Found, form: Signature, runs: Runs) -> Signature:
    named = NamedModule(found.module, [spec.name for spec in form.inputs])
    return with_samples(form, runs.of(named, form), found.tensors)


def module_of(artifact: Artifact) -> torch.nn.Module:
    """Returns the module behind an artifact of kind ``torch``. Opens the module once per process."""
    if artifact.manifest is not None or "sha256" not in artifact.source:  # a stage of accel wrote this file
        digest = artifact.digest
        if digest not in _opened:
            module = open_exported_program(artifact.path).module
            if isinstance(module, Called):  # the stage's program has the signature's inputs in this order
                module.rename([spec.name for spec in artifact.signature.inputs])
            _opened[digest] = module
        return _opened[digest]
    sha256 = artifact.source["sha256"]
    if sha256 not in _opened:
        weights = artifact.source.get("weights")
        rounded = artifact.source.get("weights_dtype", "")
        adapters = artifact.source.get("adapters")
        found = find(artifact.source["spec"], Path(weights) if weights else None, rounded)
        module = _adapted(found, Path(adapters["path"]) if adapters else None)[0].module.eval()
        # The signature is known, so the dims of a decoder needn't be found again.
        part = artifact.source.get("part")
        if part:
            _opened[sha256] = (EncoderPart if part == ENCODER else DecoderPart)(module).eval()
        else:
            _opened[sha256] = CachedDecoder(module).eval() if "decoder" in artifact.source else module
    return _opened[sha256]


def adapted(artifact: Artifact, folder: Path) -> Artifact:
    """Returns the opened PyTorch model with the adapter in ``folder`` merged. The adapter changes no input."""
    from .pretrained.adapter_folder import read_adapter

    files = [file_sha256(file) for file in read_adapter(folder).files]
    sha256 = text_sha256("\n".join([artifact.source["sha256"], *files]))
    return replace(artifact, source={**artifact.source, "adapters": {"path": str(folder)}, "sha256": sha256})


def forget(artifact: Artifact) -> None:
    """Frees the module of ``artifact``, which is built again if it is needed."""
    _opened.pop(artifact.source["sha256"], None)


def _arguments(found: Found, specs: Sequence[TensorSpec]) -> dict[str, Template]:
    """Maps each parameter of ``forward`` to the structure of its argument (see ``accel.sources.structure``)."""
    if found.arguments:
        return dict(found.arguments)
    if len(specs) == 1:
        return {(forward_parameters(found.module) or [specs[0].name])[0]: {"tensor": specs[0].name}}
    named = [spec.name for spec in specs]
    order = [name for name in forward_parameters(found.module) if name in named]
    return {name: {"tensor": name} for name in (order if len(order) == len(named) else named)}


def _call(found: Found, specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Returns the structure of the module's arguments, and the constants that the call leaves out."""
    call = {"arguments": _arguments(found, specs), **(found.live["call"] if found.live else {})}
    return {**call, **left_out(found.module, call["arguments"])}


def _pipeline(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the names of the parts of a pipeline and the sha256 of its function, or an empty dict for any other
    module. Writes the function to the cache for other processes."""
    pipeline = pipeline_in(module)
    if pipeline is None:
        return {}
    name = class_name(pipeline)
    return {"pipeline": {"parts": list(pipeline.names), "function": name, "sha256": keep_function(pipeline)}}


def _renamed(module: torch.nn.Module, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Maps the name of a model's only input to the name of the first parameter of ``forward``.

    Returns an empty dict if the model has several inputs, if the input already has a parameter's name, or if
    ``forward`` takes ``*args`` or ``**kwargs``. A single input may have any name, because ``NamedModule`` passes it by
    position.
    """
    if len(specs) != 1:
        return {}
    parameters = forward_parameters(module)
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


def _adapted(found: Found, adapters: Path | None) -> tuple[Found, dict[str, Any]]:
    """Merges the adapter into the model, if there is one. Returns the model and the facts about the adapter."""
    if adapters is None:
        return found, {}
    from .pretrained.adapter import with_adapter

    return with_adapter(found, adapters)


# The suffixes of files that may be TorchScript. A file of weights alone gets an error that says so.
_TORCHSCRIPT = (".pt", ".pth", ".ts", ".jit", ".torchscript", ".bin", ".safetensors", ".ckpt")
_WITH_WEIGHTS = (SUFFIX, ".pt2", *_TORCHSCRIPT)


def find(spec: str, weights: Path | None, weights_dtype: str) -> Found:
    """Returns the module that ``spec`` names, without running it. ``open_torch`` explains the arguments."""
    if weights_dtype and weights_dtype not in DTYPES:
        raise UsageError(f"{option('weights_dtype', weights_dtype)} is no dtype of weights; use {', '.join(DTYPES)}")
    if weights_dtype and weights is None and final_folder(Path(spec)) is None:
        raise UsageError(
            f"{spec} has no weights that {option('weights_dtype')} could round; pass {option('weights')}, or leave out "
            f"{option('weights_dtype')}"
        )
    asked = model_id(spec)
    if asked is not None and asked.commit:  # ``Source`` has already resolved the branch or tag to a commit
        found = locate(asked)
        return replace(open_folder(found.path, found.name), name=found.name)
    path = Path(spec)
    if weights is not None and (path.is_dir() or path.suffix in _WITH_WEIGHTS):
        raise UsageError(
            f"{spec} has its own weights; leave out {option('weights')}, or load {weights} into the module of a "
            "factory (FILE.py:FUNCTION)"
        )
    if path.is_dir():
        if (trained := final_folder(path)) is not None:
            return open_train_folder(trained, weights_dtype)
        if not (path / "config.json").is_file() and detect(path) is not None:
            raise weights_without_code(path)
        return open_folder(path)
    if path.suffix == SUFFIX:
        return open_captured(path)
    if path.suffix == ".pt2":
        return open_exported_program(path)
    if path.suffix in _TORCHSCRIPT:
        return open_torchscript(path)
    return open_factory(spec, weights, weights_dtype)
