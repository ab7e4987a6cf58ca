"""The plugins for TensorRT in C++ (IPluginV3), compiled against its headers and driven as TensorRT does.

The headers are a stub of the interface (``tensorrt_stub/``) and, where ``$ACCEL_TENSORRT_INCLUDE`` says where they are,
the real ones too. The library of TensorRT is not here: what is shown is the plugin's own logic, on the host's kernels.

These fail where a name of ``accel.kernels.onnx_function`` has no creator or another epilogue, where types, shapes, the
fields that are kept or the order of the inputs are wrong, where a result isn't the reference's, where sizes that no
kernel takes give numbers instead of an error, or where missing headers get anything but one line.
"""

from __future__ import annotations

import ctypes
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
from accel.errors import UnsupportedHere
from accel.kernels import bridges, build, reference
from accel.kernels.onnx_function import DTYPES, FusedGemm, parse
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import ACTS, EpilogueSpec, GemmSpec

STUB = Path(__file__).with_name("tensorrt_stub")
INCLUDE = os.environ.get("ACCEL_TENSORRT_INCLUDE", "")
TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "fp8_e4m3": 6, "bf16": 7}  # nvinfer1::DataType
DTYPE = {text: dtype for dtype, text in DTYPES.items()}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Plugins:
    """The plugin library, and the driver that does with it what TensorRT does."""

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
        out: tuple[int, int],
        dtype: str,
        *,
        fields: dict[str, int] | None = None,
        largest_m: int = 16,
        tactic: int = -1,
    ) -> tuple[int, torch.Tensor, int]:
        """What came of it (0: right), the output, and how many tactics there were."""
        given = fields or {}
        result = torch.full(out, float("nan"), dtype=TORCH_DTYPES[dtype])
        shapes = [*(tuple(tensor.shape) for tensor, _ in inputs), out]
        dims = [size for shape in shapes for size in (*shape, 0)[:2]]
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
            (ctypes.c_int32 * len(inputs))(*(tensor.dim() for tensor, _ in inputs)),
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
    """For the host: no GEMM of CUTLASS, so that products of more than 16 rows have no kernel."""
    return build.build_for_host("undefined", cache=tmp_path_factory.mktemp("kernels")).path


@pytest.fixture(scope="module", params=["stub", "real"])
def plugins(request: pytest.FixtureRequest, kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    if request.param == "real" and not INCLUDE:
        pytest.skip("needs TensorRT's headers in $ACCEL_TENSORRT_INCLUDE")
    include = Path(INCLUDE) if request.param == "real" else STUB
    folder = tmp_path_factory.mktemp("tensorrt")
    library = bridges.build_for_tensorrt(include, kernels=kernels, cache=folder).path
    # The stub's folder, where the driver is, must not be in the way of the real headers.
    driver = shutil.copy(STUB / "driver.cpp", folder)
    folders = [f"-isystem{path}" for path in (include, *bridges.cuda_includes())]
    words = ["g++", "-std=c++20", "-fPIC", "-shared", *folders, driver, "-o", folder / "driver.so"]
    subprocess.run(words, check=True)
    return Plugins(library, folder / "driver.so")


def operands(function: FusedGemm, m: int, n: int, k: int) -> dict[str, torch.Tensor]:
    """By name, in the dtypes and the order of the ONNX function's inputs."""
    g = torch.Generator().manual_seed(m * n + k)
    shapes = {"a": (m, k), "b": (n, k)}
    shapes |= {"bias": (n,)} if function.bias else {}
    shapes |= {"row_scale": (m,)} if function.row_scale else {}
    shapes |= {"col_scale": (n,)} if function.col_scale else {}
    shapes |= {"residual": (m, n)} if function.residual else {}
    dtypes = [TORCH_DTYPES[DTYPES[dtype]] for dtype in function.dtypes]
    return {
        name: torch.randn(shape, generator=g).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


@needs_compiler
@pytest.mark.proof
def test_every_name_has_a_creator(plugins: Plugins) -> None:
    """All that b as (N, K) and an fp16 or bf16 output allow, each once; every one is a name that accel gives."""
    assert plugins.names[0] == "FusedGemm"
    named = plugins.names[1:]
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
    """Every combination of operands, by its name and by fields alone. Bound: ``gemm_bound``."""
    m, n, k = 3, 4, 9
    for flags in range(16):
        bias, residual, row, col = (bool(flags >> at & 1) for at in range(4))
        given = {"bias": bias, "residual": residual, "row_scale": row, "col_scale": col}
        function = FusedGemm(product="gemm_nt", act=act, dtype=DTYPE[dtype], **given)
        tensors = operands(function, m, n, k)
        kinds = [DTYPES[one] for one in function.dtypes]
        number = {"fp16": 1, "bf16": 2}[dtype]
        fields = {"act": ACTS.index(act), "dtype": number, "out_dtype": number, "plugin_version": 7}
        fields |= {name: int(there) for name, there in given.items()}
        spec = GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=EpilogueSpec(act=act, out_dtype=dtype, **given))
        extra = {name: tensor for name, tensor in tensors.items() if name not in ("a", "b")}
        exact = reference.gemm_torch(spec, tensors["a"], tensors["b"].t(), extra)
        bound = reference.gemm_bound(spec, tensors["a"], tensors["b"].t(), extra)
        for name, some in ((function.name, {}), ("FusedGemm", fields)):
            inputs = list(zip(tensors.values(), kinds, strict=True))
            status, got, tactics = plugins.run(name, inputs, (m, n), dtype, fields=some)
            assert (status, tactics) == (0, 1), (name, plugins.said)
            assert reference.error_over_bound(got, exact, bound) <= 1, name


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
    assert run(17, largest_m=17) > 100, "there is no GEMM in the host's library"
    assert "accel FusedGemm: " in plugins.said
    assert run(4, largest_m=4096) == 0, "few rows of a range that goes further"
    assert run(4, tactic=12345) == 0, "a tactic of another library"
    # Sizes and types that don't fit, and fields that contradict the name.
    a, b, bias = operands(plain, 4, 8, 16).values()
    good = [(a, "fp16"), (b, "fp16"), (bias, "fp16")]
    assert plugins.run(plain.name, good[:2], (4, 8), "fp16")[0] == 5, "an input is missing"
    assert plugins.run(plain.name, [*good[:2], (bias.float(), "fp32")], (4, 8), "fp16")[0] == 5
    assert plugins.run(plain.name, good, (4, 8), "bf16")[0] == 5
    assert plugins.run(plain.name, [(a[None], "fp16"), *good[1:]], (4, 8), "fp16")[0] == 8
    assert plugins.run(plain.name, [(a[:, :8].contiguous(), "fp16"), *good[1:]], (4, 8), "fp16")[0] == 102
    assert plugins.run(plain.name, good, (4, 8), "fp16", fields={"act": 2})[0] == 2
    for wrong in ({"act": 9}, {"bias": 2}, {"dtype": 0}, {"out_dtype": 3}):
        assert plugins.run("FusedGemm", good, (4, 8), "fp16", fields=wrong)[0] == 2, wrong
    assert plugins.run("FusedGemm_gemm_nn_fp16", good, (4, 8), "fp16")[0] == 1


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
