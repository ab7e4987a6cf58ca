"""Proves that the C++ plugins for TensorRT (IPluginV3) compile, and compute correct results for the calls that TensorRT
makes.

The tests compile against stub headers (``tensorrt_stub/``), and also against the real headers if
``$ACCEL_TENSORRT_INCLUDE`` names the folder of TensorRT's headers. The tests don't use TensorRT's library itself. The
tests cover the plugins' own logic and use kernels that are compiled for the host. A simple GEMM on the host replaces
the tensor-core GEMM, and computes products whose output has 24 columns.

These tests check that each name from ``accel.kernels.onnx.function`` has a creator and gets the right epilogue. The
tests fail if types, shapes, serialized fields or the order of the inputs are wrong, or if a result differs from the
reference. The tests also fail if a plugin returns numbers instead of an error for sizes that no kernel supports, or if
the error for missing headers takes more than one line.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto

from accel.cli.kernels import command
from accel.errors import BadFeeds, UnsupportedHere
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.reference import TORCH_DTYPES
from accel.kernels.catalogue.spec import ACTS, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.native import bridges, build
from accel.kernels.native import library as native
from accel.kernels.onnx.function import DTYPES, FusedGemm, parse

STUB = Path(__file__).with_name("tensorrt_stub")
INCLUDE = os.environ.get("ACCEL_TENSORRT_INCLUDE", "")
TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "fp8_e4m3": 6, "bf16": 7}  # nvinfer1::DataType
DTYPE = {text: dtype for dtype, text in DTYPES.items()}
PATCHES = "kPatchBytes = 256 << 20"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def nhwc(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with four dims in PyTorch's channels-last memory format, and any other tensor unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class Plugins:
    """Loads the plugin library, and a driver that calls the library as TensorRT does."""

    def __init__(self, library: Path, driver: Path) -> None:
        self._library, self._driver = ctypes.CDLL(str(library)), ctypes.CDLL(str(driver))
        self._library.getCreators.restype = ctypes.c_void_p
        self._driver.name_of.restype = self._driver.last_words.restype = ctypes.c_char_p
        count = ctypes.c_int32()
        self._all = ctypes.c_void_p(self._library.getCreators(ctypes.byref(count)))
        self._driver.listen(self._library.setLoggerFinder)
        self.names = [self._driver.name_of(self._all, at).decode() for at in range(count.value)]

    def run(
        self,
        name: str,
        inputs: list[tuple[torch.Tensor, str]],
        out: tuple[int, ...],
        dtype: str,
        *,
        fields: dict[str, int] | None = None,
        largest_m: int = 16,
        tactic: int = -1,
    ) -> tuple[int, torch.Tensor, int]:
        """Runs a plugin. Returns the status (0: success), the output, and the number of tactics."""
        given = fields or {}
        result = torch.full(out, float("nan"), dtype=TORCH_DTYPES[dtype])
        result = nhwc(result) if name == "FusedConv2d" else result
        shapes = [*(tuple(tensor.shape) for tensor, _ in inputs), out]
        dims = [size for shape in shapes for size in (*shape, 0, 0, 0)[:4]]
        types = [*(TYPES[kind] for _, kind in inputs), TYPES[dtype]]
        tactics = ctypes.c_int32()
        status = self._driver.run(
            self._all,
            len(self.names),
            name.encode(),
            len(given),
            (ctypes.c_char_p * len(given))(*(word.encode() for word in given)),
            (ctypes.c_int32 * len(given))(*given.values()),
            len(inputs),
            (ctypes.c_void_p * len(inputs))(*(tensor.data_ptr() for tensor, _ in inputs)),
            (ctypes.c_int32 * len(types))(*types),
            (ctypes.c_int64 * len(dims))(*dims),
            (ctypes.c_int32 * len(shapes))(*map(len, shapes)),
            ctypes.c_void_p(result.data_ptr()),
            ctypes.c_int64(largest_m),
            tactic,
            ctypes.byref(tactics),
        )
        return status, result, tactics.value

    @property
    def said(self) -> str:
        return str(self._driver.last_words().decode())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the kernels for the host, without CUTLASS. A simple GEMM computes products whose output has 24 columns and
    more than 16 rows."""
    folder = tmp_path_factory.mktemp("kernels")
    sources = shutil.copytree(build.SOURCES, folder / "csrc")
    shutil.copy(STUB / "host_gemm.cu", sources)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "SOURCES", sources)
        return build.build_for_host("undefined", cache=folder).path


@pytest.fixture(scope="module", params=["stub", "real"])
def plugins(request: pytest.FixtureRequest, kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    if request.param == "real" and not INCLUDE:
        pytest.skip("needs TensorRT's headers in $ACCEL_TENSORRT_INCLUDE")
    include = Path(INCLUDE) if request.param == "real" else STUB
    folder = tmp_path_factory.mktemp("tensorrt")
    shutil.copytree(build.SOURCES, folder / "csrc")
    copied = shutil.copytree(bridges.PLUGINS, folder / "plugins")
    source = copied / "tensorrt_conv2d.h"
    text = source.read_text()
    assert PATCHES in text
    source.write_text(text.replace(PATCHES, "kPatchBytes = 4 << 10"))  # the workspace holds two images at a time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bridges, "PLUGINS", copied)
        library = bridges.build_for_tensorrt(include, kernels=kernels, cache=folder).path
    # Compiles a copy of driver.cpp in another folder, because the stub headers in driver.cpp's own folder would hide
    # the real headers.
    driver = shutil.copy(STUB / "driver.cpp", folder)
    folders = [f"-isystem{path}" for path in (include, *bridges.cuda_includes())]
    words = ["g++", "-std=c++20", "-fPIC", "-shared", *folders, driver, "-o", folder / "driver.so"]
    subprocess.run(words, check=True)
    return Plugins(library, folder / "driver.so")


def operands(function: FusedGemm, m: int | tuple[int, ...], n: int, k: int) -> dict[str, torch.Tensor]:
    """Returns a dict of operands, in the dtypes and the order of the ONNX function's inputs. ``m`` is the number of
    rows, or a tuple of dims whose product is the number of rows."""
    rows = m if isinstance(m, tuple) else (m,)
    g = torch.Generator().manual_seed(math.prod(rows) * n + k)
    shapes: dict[str, tuple[int, ...]] = {"a": (*rows, k), "b": (n, k)}
    shapes |= {"bias": (n,)} if function.bias else {}
    shapes |= {"row_scale": rows} if function.row_scale else {}
    shapes |= {"col_scale": (n,)} if function.col_scale else {}
    shapes |= {"residual": (*rows, n)} if function.residual else {}
    dtypes = [TORCH_DTYPES[DTYPES[dtype]] for dtype in function.dtypes]
    return {
        name: torch.randn(shape, generator=g).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


@needs_compiler
@pytest.mark.proof
def test_every_name_has_a_creator(plugins: Plugins) -> None:
    """Checks that an operator has a creator if its matrix b is stored as (N, K) and its output is fp16 or bf16. Also
    fails if two creators have the same name, or if a creator has a name that accel never generates."""
    assert plugins.names[:2] == ["FusedGemm", "FusedConv2d"]
    named = plugins.names[2:]
    assert len(named) == len(set(named)) == 2 * 3 * len(ACTS) * 16
    for name in named:
        function = parse(name)
        assert isinstance(function, FusedGemm)
        assert function.name == name
        assert function.product == "gemm_nt"


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("act", ACTS)
def test_a_layer_is_the_reference(act: str, dtype: str, plugins: Plugins) -> None:
    """Fails if a layer's error exceeds ``gemm_bound``. The test runs every combination of operands with two plugins.
    The first plugin's name describes the operands. The second plugin is FusedGemm, and its fields describe the
    operands. The first operand has one, two or three dims in addition to K."""
    m, n, k = 6, 4, 9
    for flags, rows in itertools.product(range(16), ((m,), (2, 3), (1, 3, 2))):
        bias, residual, row, col = (bool(flags >> at & 1) for at in range(4))
        given = {"bias": bias, "residual": residual, "row_scale": row, "col_scale": col}
        function = FusedGemm(product="gemm_nt", act=act, dtype=DTYPE[dtype], **given)
        tensors = operands(function, rows, n, k)
        matrices = {
            name: tensor.reshape(m, -1) if name in ("a", "residual") else tensor for name, tensor in tensors.items()
        }
        matrices |= {"row_scale": tensors["row_scale"].flatten()} if row else {}
        kinds = [DTYPES[one] for one in function.dtypes]
        number = {"fp16": 1, "bf16": 2}[dtype]
        fields = {"act": ACTS.index(act), "dtype": number, "out_dtype": number, "plugin_version": 7}
        fields |= {name: int(there) for name, there in given.items()}
        spec = GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=EpilogueSpec(act=act, out_dtype=dtype, **given))
        extra = {name: tensor for name, tensor in matrices.items() if name not in ("a", "b")}
        exact = reference.gemm_torch(spec, matrices["a"], matrices["b"].t(), extra)
        bound = reference.gemm_bound(spec, matrices["a"], matrices["b"].t(), extra)
        for name, some in ((function.name, {}), ("FusedGemm", fields)):
            inputs = list(zip(tensors.values(), kinds, strict=True))
            status, got, tactics = plugins.run(name, inputs, (*rows, n), dtype, fields=some, largest_m=rows[0])
            assert (status, tactics) == (0, 1), (name, rows, plugins.said)
            assert reference.error_over_bound(got.reshape(m, n), exact, bound) <= 1, (name, rows)


@needs_compiler
@pytest.mark.proof
def test_rows_are_those_of_all_dimensions(plugins: Plugins) -> None:
    """Fails if the plugin takes the number of rows from a single dim of the first operand. The number of rows is the
    product of all dims before K. The kernel for few rows takes at most 16 rows. In some cases of this test, the number
    of rows or the largest possible number of rows exceeds 16, although each dim before K is at most 9."""
    plain = FusedGemm(product="gemm_nt", act="none", bias=False, residual=True, dtype=TensorProto.FLOAT16)
    n, k = 24, 16
    for rows, largest, wanted in (((2, 9), 2, 1), ((2, 3), 8, 1), ((2, 3), 2, 2)):
        a, b, residual = operands(plain, rows, n, k).values()
        inputs = [(tensor, "fp16") for tensor in (a, b, residual)]
        status, got, tactics = plugins.run(plain.name, inputs, (*rows, n), "fp16", largest_m=largest)
        assert (status, tactics) == (0, wanted), (rows, largest, plugins.said)
        epilogue = EpilogueSpec(act="none", residual=True, out_dtype="fp16")
        spec = GemmSpec(m=math.prod(rows), n=n, k=k, in_dtype="fp16", epilogue=epilogue)
        words = (spec, a.flatten(0, 1), b.t(), {"residual": residual.flatten(0, 1)})
        error = reference.error_over_bound(
            got.flatten(0, 1), reference.gemm_torch(*words), reference.gemm_bound(*words)
        )
        assert error <= 1, rows


@needs_compiler
@pytest.mark.proof
def test_what_no_kernel_takes_is_an_error(plugins: Plugins) -> None:
    plain = FusedGemm(product="gemm_nt", act="relu", bias=True, residual=False, dtype=TensorProto.FLOAT16)

    def run(m: int, **rest: Any) -> int:
        tensors = operands(plain, m, 8, 16)
        inputs = list(zip(tensors.values(), ["fp16"] * 3, strict=True))
        status, _, _ = plugins.run(plain.name, inputs, (m, 8), "fp16", **rest)
        return status

    assert run(16) == 0
    assert run(17, largest_m=17) > 100, "there is no GEMM of 8 columns in the host's library"
    assert "accel FusedGemm: " in plugins.said
    assert run(4, largest_m=4096) == 0, "few rows of a range that goes further"
    assert run(4, tactic=12345) == 0, "a tactic of another library"
    # Each call below has unsupported sizes or types, or plugin fields that contradict the operator's name.
    a, b, bias = operands(plain, 4, 8, 16).values()
    good = [(a, "fp16"), (b, "fp16"), (bias, "fp16")]
    assert plugins.run(plain.name, good[:2], (4, 8), "fp16")[0] == 5, "an input is missing"
    assert plugins.run(plain.name, [*good[:2], (bias.float(), "fp32")], (4, 8), "fp16")[0] == 5
    assert plugins.run(plain.name, good, (4, 8), "bf16")[0] == 5
    assert plugins.run(plain.name, [(a[0], "fp16"), *good[1:]], (8,), "fp16")[0] == 8, "a has no rows"
    assert plugins.run(plain.name, [(a[None], "fp16"), *good[1:]], (4, 8), "fp16")[0] == 9, "an output of another rank"
    summed = FusedGemm(product="gemm_nt", act="none", bias=False, residual=True, dtype=TensorProto.FLOAT16).name
    residual = torch.zeros(4, 8, dtype=torch.float16)
    assert plugins.run(summed, [(a[None], "fp16"), good[1], (residual, "fp16")], (1, 4, 8), "fp16")[0] == 8
    assert plugins.run(plain.name, [(a[:, :8].contiguous(), "fp16"), *good[1:]], (4, 8), "fp16")[0] == 102
    assert plugins.run(plain.name, good, (4, 8), "fp16", fields={"act": 2})[0] == 2
    for wrong in ({"act": 9}, {"bias": 2}, {"dtype": 0}, {"out_dtype": 3}):
        assert plugins.run("FusedGemm", good, (4, 8), "fp16", fields=wrong)[0] == 2, wrong
    assert plugins.run("FusedGemm_gemm_nn_fp16", good, (4, 8), "fp16")[0] == 1


# Each row has the kernel, stride, padding and dilation of a convolution. In the first row, the values for height and
# width differ. The second row is a 1 x 1 convolution, and im2col leaves its input unchanged.
GEOMETRIES = (((3, 2), (2, 1), (1, 0), (1, 2)), ((1, 1), (1, 1), (0, 0), (1, 1)))


def convolution(spec: ConvSpec) -> tuple[dict[str, int], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns the fields and inputs of the layer, the expected result and the allowed error, all in ONNX's layout."""
    e = spec.epilogue
    g = torch.Generator().manual_seed(spec.images * spec.c_out)
    x = torch.randn(spec.images, spec.c_in, spec.height, spec.width, generator=g)
    weight = torch.randn(spec.c_out, spec.c_in, *spec.kernel, generator=g)
    out = (spec.images, spec.c_out, spec.out_height, spec.out_width)
    added = {"bias": torch.randn(spec.c_out, generator=g), "residual": torch.randn(out, generator=g)}
    inputs = [x, weight, *(tensor for name, tensor in added.items() if getattr(e, name))]
    inputs = [nhwc(tensor.to(TORCH_DTYPES[e.out_dtype])) for tensor in inputs]
    last = [tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor for tensor in inputs]
    given = dict(zip([name for name in added if getattr(e, name)], last[2:], strict=True))
    exact = reference.conv2d_torch(spec, last[0], last[1], given)
    geometry = {"stride": spec.stride, "padding": spec.padding, "dilation": spec.dilation}
    patches = torch.nn.functional.unfold(inputs[0].float(), spec.kernel, **geometry).transpose(1, 2).flatten(0, 1)
    matrix = inputs[1].float().flatten(1).t()
    rows = given | ({"residual": given["residual"].reshape(-1, spec.c_out)} if e.residual else {})
    bound = reference.gemm_bound(spec.gemm, patches, matrix, rows).reshape(exact.shape)
    fields = {"act": ACTS.index(e.act), "bias": int(e.bias), "residual": int(e.residual)}
    fields |= {"dtype": {"fp16": 1, "bf16": 2}[e.out_dtype]}
    for name, pair in {"kernel": spec.kernel, **geometry}.items():
        fields |= {f"{name}_h": pair[0], f"{name}_w": pair[1]}
    return fields, inputs, exact.permute(0, 3, 1, 2), bound.permute(0, 3, 1, 2)


def run_convolution(plugins: Plugins, spec: ConvSpec, **changed: int) -> tuple[int, float, int]:
    """Runs a convolution. Returns the status (0: success), the largest error divided by the bound, and the number of
    tactics."""
    fields, inputs, exact, bound = convolution(spec)
    dtype = spec.epilogue.out_dtype
    status, got, tactics = plugins.run(
        "FusedConv2d",
        [(tensor, dtype) for tensor in inputs],
        tuple(exact.shape),
        dtype,
        fields=fields | changed,
        largest_m=spec.images,
    )
    return status, reference.error_over_bound(got, exact, bound), tactics


def conv_spec(geometry: int = 0, *, images: int = 1, c_in: int = 8, c_out: int = 8, **epilogue: Any) -> ConvSpec:
    kernel, stride, padding, dilation = GEOMETRIES[geometry]
    size = {"height": 7, "width": 6} if geometry == 0 else {"height": 5, "width": 3}
    e = EpilogueSpec(**{"act": "relu", "bias": True, "residual": True, "out_dtype": "fp16", **epilogue})
    words = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "in_dtype": e.out_dtype}
    return ConvSpec(images=images, c_in=c_in, c_out=c_out, **size, **words, epilogue=e)


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("geometry", range(len(GEOMETRIES)))
def test_a_convolution_is_the_reference(geometry: int, dtype: str, plugins: Plugins) -> None:
    """Fails if a convolution's error exceeds ``gemm_bound``. The test covers every epilogue. The output has only 16 or
    15 pixels, so that the kernel for few rows computes the product."""
    for act in ACTS:
        for flags in range(4):
            epilogue = {"act": act, "bias": bool(flags & 1), "residual": bool(flags & 2), "out_dtype": dtype}
            spec = conv_spec(geometry, **epilogue)
            status, error, tactics = run_convolution(plugins, spec)
            assert (status, tactics) == (0, 1), (spec, plugins.said)
            assert error <= 1, spec


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize("geometry", range(len(GEOMETRIES)))
def test_a_convolution_of_more_images_than_fit_at_a_time(geometry: int, plugins: Plugins) -> None:
    """Fails if a convolution of five images differs from the reference. The plugin computes two, two and one images at
    a time, because the workspace holds the patches of two images."""
    status, error, tactics = run_convolution(plugins, conv_spec(geometry, images=5, c_out=24, act="silu"))
    assert (status, tactics) == (0, 1), plugins.said
    assert error <= 1


@needs_compiler
@pytest.mark.proof
def test_what_is_no_convolution_is_an_error(plugins: Plugins) -> None:
    spec = conv_spec()
    for wrong in ({"act": 9}, {"residual": 2}, {"dtype": 3}, {"stride_w": 0}, {"padding_h": -1}, {"kernel_h": 0}):
        assert run_convolution(plugins, spec, **wrong)[0] == 2, wrong
    assert run_convolution(plugins, spec, residual=0)[0] == 5, "an input too many"
    assert run_convolution(plugins, conv_spec(c_in=12))[0] == 5, "channels that are no multiple of 8"
    assert run_convolution(plugins, conv_spec(c_out=12))[0] == 5
    assert run_convolution(plugins, spec, stride_w=2)[0] == 9, "another geometry than that of the output"
    assert run_convolution(plugins, conv_spec(1), dilation_h=3)[0] == 0, "of one tap nothing is apart"
    assert run_convolution(plugins, conv_spec(1), kernel_w=2, padding_w=1, dilation_w=2)[0] == 102
    assert run_convolution(plugins, conv_spec(images=5))[0] > 100, "there is no GEMM of 8 columns"
    assert "accel FusedConv2d: " in plugins.said


@needs_compiler
@pytest.mark.proof
def test_an_int8_sum_that_could_overflow_is_refused(kernels: Path) -> None:
    """Fails if a plugin computes an int8 sum that could overflow. A product with the largest allowed K passes the
    overflow check, but the library then refuses the product's dtype."""
    library = native.Library(kernels)
    for k, message in ((131071 + 1, "int8 a K of 131071"), (131071 - 15, "no kernel for this dtype")):
        problem = native.Problem(
            a=256, b=256, out=256, m=1, n=24, k=k, dtype=native.DTYPES["int8"], out_dtype=native.DTYPES["fp16"]
        )
        with pytest.raises(BadFeeds, match=message):
            library.gemm_workspace("host_fp16_naive", problem)


def test_missing_headers_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ACCEL_KERNEL_LIBRARY", raising=False)
    result = CliRunner().invoke(command, ["build", "--tensorrt-include", str(tmp_path)])
    assert isinstance(result.exception, UnsupportedHere)
    assert "pass the include folder of TensorRT 10 or later" in str(result.exception)
    (tmp_path / bridges.TENSORRT_HEADER).write_text("class IPluginV2;\n")
    with pytest.raises(UnsupportedHere, match="with IPluginV3"):
        bridges.build_for_tensorrt(tmp_path)
    with pytest.raises(UnsupportedHere, match="none is built; add --arch"):
        bridges.build_for_tensorrt(STUB)
    shutil.copy(STUB / bridges.TENSORRT_HEADER, tmp_path)
    monkeypatch.setattr(bridges, "cuda_includes", list)
    if shutil.which("g++") is not None:
        with pytest.raises(UnsupportedHere, match="install the CUDA toolkit"):
            bridges.build_for_tensorrt(tmp_path, kernels=tmp_path / "kernels.so")
