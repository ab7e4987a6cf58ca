"""Provides a stand-in for TensorRT with a registry of plugins and a parser. Like TensorRT's parser, the stand-in's
parser chooses between a plugin and a function body. The stand-in builds an engine that lists its layers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
from onnx import TensorProto

from accel.artifact import Artifact
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
from accel.kernels.tensorrt.quick_plugins import PluginKernel
from accel.stage import run_stage

# For a node with a function body, TensorRT 10.0 uses the body. Versions after 10.0 use a plugin if its name, version
# and namespace match the node, and otherwise use the body. From 10.14 on, TensorRT uses the plugin only if the node
# itself names a namespace.
RULES = ("body first", "plugin first", "plugin where it is named")


# These are the implementations that the engine may choose for a node.
QUICK, LIBRARY_PLUGIN, BODY = "plugin of 'accel'", "plugin of ''", "body"


class Registry:
    def __init__(self) -> None:
        self.creators: set[tuple[str, str, str]] = set()
        self.loaded: list[str] = []

    def get_creator(self, name: str, version: str, plugin_namespace: str = "") -> object | None:
        return name if (name, version, plugin_namespace) in self.creators else None

    def load_library(self, path: str) -> object | None:
        """Loads a library of plugins from a text file that has one plugin name per line. Returns None if the file lacks
        FusedGemm, or if one of the plugins already exists."""
        names = {(line, "1", "") for line in Path(path).read_text().splitlines()}
        if ("FusedGemm", "1", "") not in names or names & self.creators:
            return None
        self.creators |= names
        self.loaded.append(path)
        return path


class FakeTensorRT(ModuleType):
    """Imitates the parts of the module ``tensorrt`` that an engine build uses."""

    __version__ = "11.0.0"
    NetworkDefinitionCreationFlag = SimpleNamespace()
    DataType = SimpleNamespace(FLOAT="FLOAT", HALF="HALF")
    float16 = "HALF"

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING = "internal", "error", "warning"

    def __init__(self, rule: str) -> None:
        super().__init__("tensorrt")
        self.rule = rule
        self.registry = Registry()
        self.parsed = onnx.ModelProto()
        self.plugin = quick_plugins(self.registry)
        self.BuilderFlag = SimpleNamespace(TF32="TF32")
        self.Runtime = lambda logger: SimpleNamespace(logger=logger)

    def get_plugin_registry(self) -> Registry:
        return self.registry

    def Builder(self, logger: Any) -> Any:
        cache = SimpleNamespace(serialize=bytes)
        config = SimpleNamespace(
            clear_flag=lambda _flag: None,
            add_optimization_profile=lambda _profile: 0,
            create_timing_cache=lambda _known: cache,
            set_timing_cache=lambda _cache, _ignore: True,
            get_timing_cache=lambda: cache,
        )
        return SimpleNamespace(
            create_network=lambda _flags: SimpleNamespace(layers=[], inputs=[], outputs=[]),
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *_: None),
            build_serialized_network=lambda network, _config: json.dumps(network.layers).encode(),
        )

    def OnnxParser(self, network: Any, logger: Any) -> Any:
        return SimpleNamespace(
            parse_from_file=lambda path: self._parse(network, onnx.load(path)),
            parse=lambda content, path: self._parse(network, with_weights(content, Path(path))),
            supports_operator=lambda _name: True,
        )

    def _parse(self, network: Any, model: onnx.ModelProto) -> bool:
        self.parsed = model
        bodies = {function.name for function in model.functions}
        network.layers += [[node.op_type, self._taken(node, bodies)] for node in model.graph.node]
        kinds = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "HALF"}
        for values, own in ((model.graph.input, network.inputs), (model.graph.output, network.outputs)):
            for value in values:
                tensor = value.type.tensor_type
                shape = [dim.dim_value or -1 for dim in tensor.shape.dim]
                dtype = kinds[tensor.elem_type]
                own.append(SimpleNamespace(name=value.name, dtype=dtype, shape=shape, is_shape_tensor=False))
        network.num_layers = len(network.layers)
        network.num_inputs, network.get_input = len(network.inputs), network.inputs.__getitem__
        network.num_outputs, network.get_output = len(network.outputs), network.outputs.__getitem__
        return True

    def _taken(self, node: onnx.NodeProto, bodies: set[str]) -> str:
        if not node.domain:
            return "operator"
        words = {attribute.name: attribute.s.decode() for attribute in node.attribute}
        space = words.get("plugin_namespace", "")
        known = self.registry.get_creator(node.op_type, words.get("plugin_version", "1"), space) is not None
        named = "plugin_namespace" in words
        first = {"body first": False, "plugin first": known, "plugin where it is named": known and named}[self.rule]
        if node.op_type in bodies and not first:
            return "body"
        if not known:
            space = node.domain
            assert self.registry.get_creator(node.op_type, "1", space) is not None, "Plugin not found"
            assert self.rule != RULES[2] or not named, "No importer registered for op"
        return f"plugin of {space!r}"


def with_weights(content: bytes, path: Path) -> onnx.ModelProto:
    """Returns the model with its external weights. Reads the weights as TensorRT's parser does. TensorRT reads files in
    the folder of ``path`` and follows links, but never reads a parent folder."""
    model = onnx.ModelProto.FromString(content)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            said = {entry.key: entry.value for entry in tensor.external_data}
            assert "../" not in said["location"]
            assert set(said) <= {"location", "offset", "length"}
            with (path.parent / said["location"]).open("rb") as file:
                file.seek(int(said.get("offset", 0)))
                tensor.raw_data = file.read(int(said["length"]))
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT
    return model


class Descriptor:
    """Describes a tensor to a quick plugin, as TensorRT does. The tensor's sizes are plain numbers instead of
    TensorRT's symbolic expressions."""

    def __init__(self, *shape: int) -> None:
        self.shape_expr = list(shape)
        self.dtype = "that of the first"

    def like(self) -> Descriptor:
        return Descriptor(*self.shape_expr)


class Scalars(list[Any]):
    """Replaces ``tensorrt.plugin.SymIntExprs``."""

    def __init__(self, size: int) -> None:
        super().__init__([None] * size)


def quick_plugins(registry: Registry | None = None) -> ModuleType:
    """Makes a stand-in for the module ``tensorrt.plugin``. ``tensorrt.plugin.kept`` holds the registered functions
    under the keys ``<id> shapes`` and ``<id> kernel``."""
    plugin = ModuleType("tensorrt.plugin")
    kept: dict[str, Callable[..., Any]] = {}

    def register(identity: str) -> Callable[[Callable[..., Any]], None]:
        def keep(function: Callable[..., Any]) -> None:
            kept[f"{identity} shapes"] = function
            if registry is not None:
                space, _, name = identity.partition("::")
                registry.creators.add((name, "1", space))

        return keep

    plugin.__dict__.update(
        kept=kept,
        TensorDesc=Descriptor,
        KernelLaunchParams=SimpleNamespace,
        SymIntExprs=Scalars,
        SymInt32=int,
        cdiv=lambda a, b: -(-a // b),
        register=register,
        aot_impl=lambda identity: lambda function: kept.__setitem__(f"{identity} kernel", function),
    )
    return plugin


def kernel(function: Any, arch: int) -> PluginKernel:
    """Replaces ``compile_kernel`` in tests. Returns a kernel without PTX code."""
    assert arch == 80
    return PluginKernel(name=function.name, ptx="", threads=128, shared=0, block_m=64, block_n=64)


def built(src: Artifact, folder: Path, **options: Any) -> tuple[dict[str, str], Artifact]:
    """Builds an engine. Returns a dict with the implementation of each operator, and the engine itself."""
    config = EngineFromOnnxConfig(toolkit="tensorrt", kernels=True, **options)
    made = run_stage("engine_from_onnx", src, config, out=folder / "made.engine")
    return dict(json.loads(made.path.read_bytes())), made


def library(folder: Path, *names: str) -> Path:
    """Writes a library of plugins with the given names."""
    path = folder / "plugins.so"
    path.write_text("\n".join(["FusedGemm", *names]))
    return path
