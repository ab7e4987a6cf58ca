"""The stages: what each takes and gives, and where it is. ``accel.stage`` runs them."""

from __future__ import annotations

from dataclasses import dataclass

from accel.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the table. ``function`` and ``config`` are import strings, loaded at first use.

    ``takes``/``gives``: artifact kinds. ``packages``: distributions whose versions are part of the cache key.
    ``may_change``: the parts of the contract this stage is there to change (``dtypes``, ``opset``, ``ir``, ``shapes``,
    or the whole ``interface``: what goes in and comes out is then for the stage's own gate).
    ``suffix``: the ending of its output. ``version``: raised when the stage's own code changes its result.
    """

    name: str
    function: str
    config: str
    takes: tuple[str, ...]
    gives: str
    suffix: str
    packages: tuple[str, ...]
    may_change: frozenset[str] = frozenset()
    version: int = 1


# The order in which they can follow one another.
STAGES: tuple[Stage, ...] = (
    Stage(
        name="onnx_from_torch",
        function="accel.converters.onnx_from_torch:onnx_from_torch",
        config="accel.converters.onnx_from_torch:OnnxFromTorchConfig",
        takes=("torch",),
        gives="onnx",
        suffix=".onnx",
        packages=("torch", "onnx", "onnxscript"),
        version=2,
    ),
    Stage(
        name="onnx_from_tensorflow",
        function="accel.converters.onnx_from_tensorflow:onnx_from_tensorflow",
        config="accel.converters.onnx_from_tensorflow:OnnxFromTensorFlowConfig",
        takes=("tensorflow",),
        gives="onnx",
        suffix=".onnx",
        packages=("tensorflow-cpu", "tensorflow", "tf2onnx", "keras", "onnx"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="onnx_from_tflite",
        function="accel.converters.onnx_from_tflite:onnx_from_tflite",
        config="accel.converters.onnx_from_tflite:OnnxFromTfliteConfig",
        takes=("tflite",),
        gives="onnx",
        suffix=".onnx",
        packages=("tensorflow-cpu", "tensorflow", "tf2onnx", "onnx"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="onnx_from_onnx",
        function="accel.converters.onnx_from_onnx:onnx_from_onnx",
        config="accel.converters.onnx_from_onnx:OnnxFromOnnxConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx", "onnxruntime"),
        may_change=frozenset({"opset", "ir", "shapes"}),
    ),
    Stage(
        name="preprocess",
        function="accel.converters.preprocess:preprocess",
        config="accel.converters.preprocess:PreprocessConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx",),
        may_change=frozenset({"interface"}),
    ),
    Stage(
        name="simplify",
        version=2,
        function="accel.converters.simplify:simplify",
        config="accel.converters.simplify:SimplifyConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx", "onnxsim"),
    ),
    Stage(
        name="cast",
        version=2,
        function="accel.converters.cast:cast",
        config="accel.converters.cast:CastConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx", "onnxruntime", "ml_dtypes"),
        may_change=frozenset({"dtypes"}),
    ),
    Stage(
        name="quantize",
        version=4,
        function="accel.converters.quantize:quantize",
        config="accel.converters.quantize:QuantizeConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx", "onnxruntime", "nncf"),
    ),
    Stage(
        name="fuse_kernels",
        version=4,
        function="accel.converters.fuse_kernels:fuse_kernels",
        config="accel.converters.fuse_kernels:FuseKernelsConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx",),
    ),
    Stage(
        name="fit_tensorrt",
        function="accel.converters.fit_tensorrt:fit_tensorrt",
        config="accel.converters.fit_tensorrt:FitTensorRtConfig",
        takes=("onnx",),
        gives="onnx",
        suffix=".onnx",
        packages=("onnx",),
        version=2,
    ),
    Stage(
        name="engine_from_onnx",
        version=3,
        function="accel.converters.engine_from_onnx:engine_from_onnx",
        config="accel.converters.engine_from_onnx:EngineFromOnnxConfig",
        takes=("onnx",),
        gives="engine",
        suffix=".engine",
        packages=("onnx", "tensorrt-rtx-cu13-bindings", "tensorrt-cu13-bindings", "triton"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="openvino_from_onnx",
        version=3,
        function="accel.converters.openvino_from_onnx:openvino_from_onnx",
        config="accel.converters.openvino_from_onnx:OpenVinoFromOnnxConfig",
        takes=("onnx",),
        gives="openvino",
        suffix=".xml",
        packages=("onnx", "openvino"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="ncnn_from_onnx",
        function="accel.converters.ncnn_from_onnx:ncnn_from_onnx",
        config="accel.converters.ncnn_from_onnx:NcnnFromOnnxConfig",
        takes=("onnx",),
        gives="ncnn",
        suffix=".ncnn.param",
        packages=("pnnx", "ncnn"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="torch_from_onnx",
        function="accel.converters.torch_from_onnx:torch_from_onnx",
        config="accel.converters.torch_from_onnx:TorchFromOnnxConfig",
        takes=("onnx",),
        gives="torch",
        suffix=".pt2",
        packages=("torch",),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="saved_model_from_onnx",
        function="accel.converters.saved_model_from_onnx:saved_model_from_onnx",
        config="accel.converters.saved_model_from_onnx:SavedModelFromOnnxConfig",
        takes=("onnx",),
        gives="tensorflow",
        suffix=".pb",
        packages=("onnx2tf", "tensorflow-cpu", "tensorflow"),
        may_change=frozenset({"opset", "ir"}),
    ),
    Stage(
        name="tflite_from_saved_model",
        function="accel.converters.tflite_from_saved_model:tflite_from_saved_model",
        config="accel.converters.tflite_from_saved_model:TfliteFromSavedModelConfig",
        takes=("tensorflow",),
        gives="tflite",
        suffix=".tflite",
        packages=("tensorflow-cpu", "tensorflow"),
        may_change=frozenset({"opset", "ir"}),
    ),
)

# How the signature of a file is read back from the file itself, independent of the stage that wrote it. An engine can't
# be: without its GPU nothing opens it.
READERS: dict[str, str] = {
    kind: f"accel.converters.read_back:{kind}" for kind in ("onnx", "openvino", "torch", "tensorflow", "tflite", "ncnn")
}


def get_stage(name: str) -> Stage:
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise UnknownName(f"unknown stage {name!r}; the stages are {', '.join(s.name for s in STAGES)}")
