"""Builds and checks engines in a child process, because native code that reads foreign files can crash."""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.errors import MissingExtra, UnsupportedHere
from accel.progress import report
from accel.runtimes.cuda_memory import device_capability
from accel.runtimes.tensorrt_toolkit import (
    Log,
    check_this_gpu,
    choose_capabilities,
    engine_problem,
    field_dtype,
    load_plugin_library,
    load_toolkit,
    make_logger,
    offered_capabilities,
)
from accel.sources.onnx.file import one_line, read_proto

from .build_progress import BuildProgress
from .engine_from_onnx import EngineNotBuilt
from .kernel_table import parse_layers, summary
from .plugins import PluginChoice, bodies_note, choose_plugins, take_fp8_bodies, with_plugins
from .preflight import empty_network, known_operators
from .requirements import check_onnx
from .timing_cache import keep_timing_cache, timing_file, use_timing_cache

# TensorRT's parser is recursive, and a chain of about 3500 nodes overflows the usual stack of 8 MB. A large stack needs
# no extra memory, because only the used pages of a stack take memory. The smaller stacks are for machines that limit
# the address space.
STACK_MEGABYTES = (1024, 256, 64)

# Each pair has a text from an error of TensorRT's parser, and the fix for this error. The first text that occurs in an
# error selects the fix.
FIXES = (
    ("zero point", "quantize it symmetrically to int8 (accel optimize does for this target)"),
    ("input has type Int32", "quantize it without quantizing biases (accel optimize does for this target)"),
    ("Plugin not found", "rewrite it with standard ONNX operators or export with another opset"),
    ("plugin creator", "rewrite it with standard ONNX operators or export with another opset"),
    ("of same type", "cast the model again so that all inputs of the node have one type"),
    ("for Turing", "cast the model to fp16 or build for 8.0 and later"),
)
DEFAULT_FIX = "simplify the model or export it with another opset"


def build(
    model: Path,
    out: Path,
    toolkit: str,
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]],
    capabilities: Sequence[str],
    workspace_bytes: int | None,
    builder_level: int | None,
    version_compatible: bool = False,
    hardware: str | None = None,
    kept: Path | None = None,
    kernels: Path | None = None,
    tf32: bool = False,
) -> dict[str, Any]:
    """Builds an engine from ``model`` into ``out``, and describes the network's inputs, outputs and kernels.

    ``tf32`` lets the products of float32 tensors round their inputs to TF32. ``kept`` is the folder of the timing
    cache, if the toolkit has a timing cache. If ``kernels`` is a folder, the engine uses plugins for accel's operators.
    Transposed weights for plugins are written to ``kernels``. Raises ``EngineNotBuilt``, ``UnsupportedHere`` or
    ``InvalidModel``.
    """

    def body() -> dict[str, Any]:
        trt = load_toolkit(toolkit)
        offered = offered_capabilities(trt)
        members = choose_capabilities(toolkit, offered, tuple(capabilities))
        here = _capability()
        if here is not None and not capabilities:
            check_this_gpu(toolkit, offered, here)
        report(f"{toolkit}: checking the model", 0.0)
        log = Log()
        logger = make_logger(trt, log)
        builder = _builder(trt, toolkit, logger)
        proto = read_proto(model)
        check_onnx(model, proto, capabilities, known_operators(trt, builder, logger, proto))
        plugins: list[PluginChoice] = []
        content = proto.SerializeToString() if take_fp8_bodies(proto) else None
        parsed = model
        if kernels is not None:
            plugins = choose_plugins(trt, proto, device_capability())
            content, parsed = with_plugins(proto, plugins, model, kernels)
        network = _parse(trt, builder, logger, parsed, content)
        config = _config(trt, builder, members, workspace_bytes, builder_level)
        _allow_tf32(trt, config, tf32)
        _make_compatible(trt, config, version_compatible, hardware)
        _refuse_shape_inputs(network)
        for shapes in profiles:
            _add_profile(builder, config, network, shapes)
        monitor = _watch(trt, config, toolkit)
        timings = timing_file(kept, str(trt.__version__), device_capability()) if kept is not None else None
        if timings is not None:
            use_timing_cache(config, timings)
        data = builder.build_serialized_network(network, config)
        del monitor
        if timings is not None and data is not None:
            keep_timing_cache(config, timings)
        if data is None:
            raise EngineNotBuilt(_refused(f"{toolkit} can't build {model.name}", _first_reason(log.errors)))
        content = bytes(data)
        elsewhere = bool(capabilities) and here not in capabilities
        if problem := engine_problem(trt, Log(), trt.Runtime(logger), content, for_any_gpu=elsewhere):
            raise EngineNotBuilt(f"{toolkit} built an engine of {model.name} that it can't load: {problem}")
        out.write_bytes(content)
        rows = parse_layers(log.layers)
        chosen = [choice.to_json() for choice in plugins]
        if note := bodies_note(chosen):
            report(note)
        return {
            "toolkit_version": str(trt.__version__),
            "compute_capabilities": list(dict.fromkeys(capabilities)) or _capability_here(trt),
            "inputs": [_tensor(trt, network.get_input(i)) for i in range(network.num_inputs)],
            "outputs": [_tensor(trt, network.get_output(i)) for i in range(network.num_outputs)],
            "kernels": rows,
            "summary": summary(rows),
            "warnings": [*([note] if note else []), *(one_line(w) for w in log.warnings[:20])],
            "plugins": chosen,
        }

    return with_big_stack(body)


def check(path: Path, toolkit: str, plugins: bool = False) -> str | None:
    """Returns the error that the toolkit finds in an engine file, or None. The error doesn't name the file.

    ``plugins`` is True if the engine calls accel's plugin library. Raises the errors of ``load_plugin_library`` if the
    plugin library can't be loaded.
    """
    trt = load_toolkit(toolkit)
    log = Log()
    runtime = trt.Runtime(make_logger(trt, log))
    data = path.read_bytes()
    if not data:
        return "the file is empty"
    if problem := engine_problem(trt, log, runtime, data, for_any_gpu=True):
        return problem
    if engine_problem(trt, log, runtime, data):  # the engine is for other GPUs, so this GPU can't load it
        return None
    capability = _capability() if plugins else None
    # Without a GPU, the right plugin library is unknown. A missing library is reported when the engine is run.
    if plugins and (capability is None or load_plugin_library(trt, capability) is None):
        return None
    log.errors.clear()
    if runtime.deserialize_cuda_engine(data) is not None:
        return None
    # The toolkit reads the header and the layout before its first call to CUDA. On a machine without a GPU, loading an
    # intact engine file therefore fails only at the first call to CUDA.
    if log.errors and "Cuda Runtime" in log.errors[0]:
        return None
    return f"the file is corrupt or truncated ({_first_reason(log.errors)})"


def _capability() -> str | None:
    """Returns the compute capability of this machine's GPU. Returns None if the machine has no GPU, or no library that
    can query the GPU."""
    try:
        return device_capability()
    except (UnsupportedHere, MissingExtra):
        return None


def with_big_stack(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs ``body()`` on a thread with the largest stack that this machine allows, and returns the result."""
    answer: list[dict[str, Any]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(body())
        except BaseException as error:
            failed.append(error)

    context = contextvars.copy_context()  # passes the progress watcher to the new thread
    before = threading.stack_size()
    for megabytes in STACK_MEGABYTES:
        threading.stack_size(megabytes << 20)
        thread = threading.Thread(target=context.run, args=(run,), name="build")
        with contextlib.suppress(RuntimeError):  # not enough memory, so the loop tries the next smaller stack
            thread.start()
            break
    else:
        raise EngineNotBuilt("not enough memory for the stack of the builder; free some memory or raise ulimit -v")
    threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return answer[0]


def _builder(trt: Any, toolkit: str, logger: Any) -> Any:
    try:
        builder = trt.Builder(logger)
    except (TypeError, RuntimeError) as error:  # pybind raises these errors if TensorRT can't create a builder
        raise UnsupportedHere(
            f"{toolkit} can't build on this machine ({one_line(error)}); build on a machine with an "
            "NVIDIA GPU, or for the target tensorrt-rtx"
        ) from error
    return builder


def _parse(trt: Any, builder: Any, logger: Any, model: Path, content: bytes | None = None) -> Any:
    """Parses ``model``, and returns the network. If ``content`` is given, parses ``content`` instead of the file.

    External weights are read from the folder of ``model``. Raises ``EngineNotBuilt`` if the parser refuses a node.
    """
    network = empty_network(trt, builder)
    parser = trt.OnnxParser(network, logger)
    if not (parser.parse_from_file(str(model)) if content is None else parser.parse(content, str(model))):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        named = next((e for e in errors if e.node_operator()), errors[0] if errors else None)
        where = (
            f"node {named.node_name()!r} ({named.node_operator()})" if named and named.node_operator() else "the model"
        )
        reasons = [e.desc() for e in ([named] if named else []) + errors]
        raise EngineNotBuilt(_refused(f"TensorRT refuses {where} of {model.name}", _first_reason(reasons)))
    if not network.num_layers or not network.num_outputs:
        raise EngineNotBuilt(f"TensorRT found no layers or no outputs in {model.name}; export it again")
    return network


def _config(
    trt: Any, builder: Any, capabilities: Sequence[Any], workspace_bytes: int | None, builder_level: int | None
) -> Any:
    config = builder.create_builder_config()
    if hasattr(trt, "ProfilingVerbosity"):
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # makes TensorRT log the kernels
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for index, member in enumerate(capabilities):
            if not config.set_compute_capability(member, index):
                raise UnsupportedHere(f"TensorRT refuses the compute capability {member}; build for another GPU")
    if workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    if builder_level is not None:
        config.builder_optimization_level = builder_level
        if config.builder_optimization_level != builder_level:  # TensorRT doesn't raise an error for a wrong level
            raise UnsupportedHere(f"your TensorRT has no builder level {builder_level}; leave out builder_level")
    return config


def _allow_tf32(trt: Any, config: Any, allowed: bool) -> None:
    """Sets or clears the flag TF32, which is set by default."""
    if allowed:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)


def _make_compatible(trt: Any, config: Any, version_compatible: bool, hardware: str | None) -> None:
    """Makes the engine compatible with later versions of the toolkit and with other GPUs.

    The options are described in TensorRT's developer guide, "Engine compatibility".
    """
    if version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if hardware is not None:
        name = {"ampere-plus": "AMPERE_PLUS", "same-capability": "SAME_COMPUTE_CAPABILITY"}[hardware]
        level = getattr(trt.HardwareCompatibilityLevel, name, None)
        if level is None:
            raise UnsupportedHere(
                f"this version of TensorRT can't build for the hardware level {hardware}; leave out {hardware}, or "
                "update TensorRT"
            )
        config.hardware_compatibility_level = level


def _refuse_shape_inputs(network: Any) -> None:
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor:
            raise EngineNotBuilt(
                f"the values of the input {tensor.name!r} are sizes of other tensors, and accel can't give TensorRT "
                "ranges for these values; make the sizes constant and export the model again"
            )


def _add_profile(builder: Any, config: Any, network: Any, shapes: Mapping[str, Sequence[Sequence[int]]]) -> None:
    profile = builder.create_optimization_profile()
    present = {network.get_input(index).name for index in range(network.num_inputs)}
    for name, ends in shapes.items():
        if name in present:
            profile.set_shape(name, *(tuple(shape) for shape in ends))
    if config.add_optimization_profile(profile) < 0:
        raise EngineNotBuilt(f"TensorRT refuses the optimization profile {dict(shapes)}; give other shapes")


def _watch(trt: Any, config: Any, toolkit: str) -> Any:
    """Reports the build's progress. The caller must keep a reference to the result until the build ends."""
    if not hasattr(trt, "IProgressMonitor") or not hasattr(config, "progress_monitor"):
        return None
    lock = threading.Lock()  # TensorRT calls ``Monitor`` from its own threads.
    context = contextvars.copy_context()  # TensorRT's threads don't inherit the progress watcher.
    progress = BuildProgress()
    sent = [-1.0]

    def tell() -> None:
        fraction = progress.fraction
        if fraction - sent[0] >= 0.01:
            sent[0] = fraction
            context.run(report, f"{toolkit}: building the engine", fraction)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with lock:
                progress.start(phase_name, parent_phase, num_steps)
                tell()

        def phase_finish(self, phase_name: str) -> None:
            with lock:
                progress.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with lock:
                progress.step(phase_name, step)
                tell()
            return True  # always continues: to cancel a build, accel kills this process

    config.progress_monitor = Monitor()
    return config.progress_monitor


def _capability_here(trt: Any) -> list[str]:
    """Returns the compute capability of an engine that was built without a list of compute capabilities.

    Returns the capability of this machine's GPU if the toolkit can only build for this GPU. Returns an empty list if
    the toolkit can build for other GPUs.
    """
    if offered_capabilities(trt):
        return []
    return [device_capability()]


def _tensor(trt: Any, tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": field_dtype(trt, tensor.dtype), "shape": [int(d) for d in tensor.shape]}


def _first_reason(messages: Sequence[str]) -> str:
    """Returns the first line of ``messages`` that gives a reason, without source locations. Skips lines that every
    machine without a GPU prints."""
    for line in (line.strip() for message in messages for line in message.splitlines()):
        if line.startswith(("[checkMacros", "Invalid Node")) or line in ("", "false"):
            continue
        line = re.sub(r"^.*?Error Code \d+: ", "", line)
        line = re.sub(r"\.? In \S+( \S+)? at /\S+?:\d+", "", line)
        return one_line(line).rstrip(". ")
    return "it gives no reason"


def _refused(what: str, reason: str) -> str:
    fix = next((text for piece, text in FIXES if piece in reason), DEFAULT_FIX)
    return f"{what}: {reason}; {fix}"
