"""Defines the table of stages. Each row holds a stage's input and output kinds and its code. ``accel.stage`` runs the
stages."""

from __future__ import annotations

from dataclasses import dataclass

from accel.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the table. ``function`` and ``config`` are import strings, which are resolved at first use.

    ``takes`` lists the kinds of artifacts that the stage accepts, and ``gives`` is the kind that the stage makes.
    ``packages`` lists distributions whose versions are part of the cache key. ``may_change`` lists the parts of a model
    that the stage may change. The parts are called ``dtypes``, ``opset``, ``ir``, ``shapes``, ``optional`` (the inputs
    that a run may leave out) and ``interface``. The part ``interface`` is all inputs and outputs. If a stage may change
    ``interface``, the inputs and outputs are checked only by the stage's own gate. ``version`` is increased when a code
    change changes the stage's result. ``proves`` is True if the stage's function checks its own files. If ``proves`` is
    True, the function takes the ``Proof`` of the run as a fourth argument.
    """

    name: str
    function: str
    config: str
    takes: tuple[str, ...]
    gives: str
    packages: tuple[str, ...]
    may_change: frozenset[str] = frozenset()
    version: int = 1
    proves: bool = False


# All stages, in the order in which a run uses them. A run uses only some of the stages.
STAGES: tuple[Stage, ...] = (
    Stage(
        name="onnx_from_torch",
        function="accel.converters.from_torch.onnx_from_torch:onnx_from_torch",
        config="accel.converters.from_torch.onnx_from_torch:OnnxFromTorchConfig",
        takes=("torch",),
        gives="onnx",
        packages=("torch", "onnx", "onnxscript"),
        version=9,
        proves=True,
    ),
    Stage(
        name="onnx_from_tensorflow",
        version=2,
        function="accel.converters.from_tensorflow.onnx_from_tensorflow:onnx_from_tensorflow",
        config="accel.converters.from_tensorflow.onnx_from_tensorflow:OnnxFromTensorFlowConfig",
        takes=("tensorflow",),
        gives="onnx",
        packages=("tensorflow-cpu", "tensorflow", "tf2onnx", "keras", "onnx"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="onnx_from_tflite",
        version=2,
        function="accel.converters.from_tensorflow.onnx_from_tflite:onnx_from_tflite",
        config="accel.converters.from_tensorflow.onnx_from_tflite:OnnxFromTfliteConfig",
        takes=("tflite",),
        gives="onnx",
        packages=("tensorflow-cpu", "tensorflow", "tf2onnx", "onnx"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="onnx_from_onnx",
        function="accel.converters.graph.onnx_from_onnx:onnx_from_onnx",
        config="accel.converters.graph.onnx_from_onnx:OnnxFromOnnxConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime"),
        may_change=frozenset({"opset", "ir", "shapes"}),
    ),
    Stage(
        name="preprocess",
        function="accel.converters.graph.preprocess:preprocess",
        config="accel.converters.graph.preprocess:PreprocessConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx",),
        may_change=frozenset({"interface"}),
    ),
    Stage(
        name="simplify",
        version=2,
        function="accel.converters.graph.simplify:simplify",
        config="accel.converters.graph.simplify:SimplifyConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxsim"),
    ),
    Stage(
        name="cast",
        version=2,
        function="accel.converters.cast.stage:cast",
        config="accel.converters.cast.stage:CastConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime", "ml_dtypes"),
        may_change=frozenset({"dtypes"}),
    ),
    Stage(
        name="quantize",
        version=6,
        function="accel.converters.quantize.stage:quantize",
        config="accel.converters.quantize.stage:QuantizeConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime", "nncf"),
    ),
    Stage(
        name="adapter_inputs",
        function="accel.converters.decoder.adapter_inputs:adapter_inputs",
        config="accel.converters.decoder.adapter_inputs:AdapterInputsConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime"),
        may_change=frozenset({"optional"}),
    ),
    Stage(
        name="fuse_decoder",
        function="accel.converters.decoder.stage:fuse_decoder",
        config="accel.converters.decoder.stage:FuseDecoderConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime"),
    ),
    Stage(
        name="pack_weights",
        function="accel.converters.decoder.packed:pack_weights",
        config="accel.converters.decoder.packed:PackWeightsConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime"),
    ),
    Stage(
        name="lower_cache",
        function="accel.converters.decoder.lower_cache:lower_cache",
        config="accel.converters.decoder.lower_cache:LowerCacheConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx", "onnxruntime"),
        may_change=frozenset({"dtypes"}),
    ),
    Stage(
        name="fuse_kernels",
        version=4,
        function="accel.converters.graph.fuse_kernels:fuse_kernels",
        config="accel.converters.graph.fuse_kernels:FuseKernelsConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx",),
    ),
    Stage(
        name="fit_tensorrt",
        function="accel.converters.to_tensorrt.fit:fit_tensorrt",
        config="accel.converters.to_tensorrt.fit:FitTensorRtConfig",
        takes=("onnx",),
        gives="onnx",
        packages=("onnx",),
        version=2,
    ),
    Stage(
        name="engine_from_onnx",
        version=4,
        function="accel.converters.to_tensorrt.engine_from_onnx:engine_from_onnx",
        config="accel.converters.to_tensorrt.engine_from_onnx:EngineFromOnnxConfig",
        takes=("onnx",),
        gives="engine",
        packages=("onnx", "tensorrt-rtx-cu13-bindings", "tensorrt-cu13-bindings", "triton"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="openvino_from_onnx",
        version=4,
        function="accel.converters.to_openvino.openvino_from_onnx:openvino_from_onnx",
        config="accel.converters.to_openvino.openvino_from_onnx:OpenVinoFromOnnxConfig",
        takes=("onnx",),
        gives="openvino",
        packages=("onnx", "openvino"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="stateful_from_onnx",
        function="accel.converters.to_openvino.stateful_from_onnx:stateful_from_onnx",
        config="accel.converters.to_openvino.stateful_from_onnx:StatefulFromOnnxConfig",
        takes=("onnx",),
        gives="openvino",
        packages=("onnx", "openvino"),
        may_change=frozenset({"opset", "ir", "interface"}),
        version=3,
    ),
    Stage(
        name="ncnn_from_onnx",
        version=2,
        function="accel.converters.to_others.ncnn_from_onnx:ncnn_from_onnx",
        config="accel.converters.to_others.ncnn_from_onnx:NcnnFromOnnxConfig",
        takes=("onnx",),
        gives="ncnn",
        packages=("pnnx", "ncnn"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="torch_from_onnx",
        function="accel.converters.to_others.torch_from_onnx:torch_from_onnx",
        config="accel.converters.to_others.torch_from_onnx:TorchFromOnnxConfig",
        takes=("onnx",),
        gives="torch",
        packages=("torch",),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="saved_model_from_onnx",
        function="accel.converters.to_others.saved_model_from_onnx:saved_model_from_onnx",
        config="accel.converters.to_others.saved_model_from_onnx:SavedModelFromOnnxConfig",
        takes=("onnx",),
        gives="tensorflow",
        packages=("onnx2tf", "tensorflow-cpu", "tensorflow"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="pipeline_from_parts",
        function="accel.converters.to_others.pipeline_from_parts:pipeline_from_parts",
        config="accel.converters.to_others.pipeline_from_parts:PipelineFromPartsConfig",
        takes=("torch", "pipeline"),
        gives="pipeline",
        packages=("torch",),
    ),
    Stage(
        name="tflite_from_saved_model",
        function="accel.converters.to_others.tflite_from_saved_model:tflite_from_saved_model",
        config="accel.converters.to_others.tflite_from_saved_model:TfliteFromSavedModelConfig",
        takes=("tensorflow",),
        gives="tflite",
        packages=("tensorflow-cpu", "tensorflow"),
        may_change=frozenset({"opset", "ir"}),
    ),
)


def get_stage(name: str) -> Stage:
    """Returns the stage called ``name``. Raises ``UnknownName`` with a list of the stages for an unknown name."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise UnknownName(f"unknown stage {name!r}; the stages are {', '.join(s.name for s in STAGES)}")


def route(start: str, end: str) -> tuple[Stage, ...]:
    """Returns the shortest chain of stages from the kind ``start`` to the kind ``end``. Raises ``UnknownName`` if no
    chain leads from ``start`` to ``end``.
    """
    routes: dict[str, tuple[Stage, ...]] = {start: ()}
    kinds = [start]
    for kind in kinds:  # breadth-first search: the list grows during the loop
        for stage in STAGES:
            if kind in stage.takes and stage.gives not in routes:
                routes[stage.gives] = (*routes[kind], stage)
                kinds.append(stage.gives)
    if end not in routes:
        others = ", ".join(kinds[1:]) or "nothing"
        raise UnknownName(f"no stages convert {start} to {end}; {start} can be converted to {others}")
    return routes[end]
