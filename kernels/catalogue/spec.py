"""Describes the matrix products and convolutions that the kernels compute. The reference, the tests and the tuner use
the same descriptions.

A product computes ``out = act(row_scale * col_scale * (a @ b) + bias) + residual``. ``a`` is (M, K), ``b`` is (K, N),
``row_scale`` is (M,), and ``col_scale`` and ``bias`` are (N,). ``residual`` and ``out`` are (M, N). Products are summed
in fp32, or exactly in int32 for int8 operands. The epilogue runs in fp32, and ``out`` is rounded once.

A convolution is a product with M = images * output height * output width, K = kernel height * kernel width * input
channels and N = output channels. The input and the output of a convolution are NHWC.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from accel.errors import BadFeeds, UnknownName, UnsupportedHere

ACTS = ("none", "relu", "gelu_tanh", "gelu_erf", "silu")
IN_DTYPES = ("fp32", "fp16", "bf16", "int8", "fp8_e4m3")
OUT_DTYPES = ("fp32", "fp16", "bf16")
SCALED = ("int8", "fp8_e4m3")
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8_e4m3": 1}

# A sum of K int8 products has to fit in an int32 accumulator. Each product is at most 128 * 128.
MAX_INT8_K = (2**31 - 1) // (128 * 128)


@dataclass(frozen=True, kw_only=True)
class EpilogueSpec:
    """Describes the epilogue, which is every operation after the matrix product.

    ``act`` is one of ``ACTS``, and ``out_dtype`` is one of ``OUT_DTYPES``. The flags ``bias``, ``residual``,
    ``row_scale`` and ``col_scale`` tell which operands the epilogue has. Raises ``UnknownName`` for an unknown
    activation or dtype.
    """

    act: str = "none"
    bias: bool = False
    residual: bool = False
    row_scale: bool = False
    col_scale: bool = False
    out_dtype: str = "fp16"

    def __post_init__(self) -> None:
        _one_of("activation", self.act, ACTS)
        _one_of("output dtype", self.out_dtype, OUT_DTYPES)

    @property
    def operands(self) -> tuple[str, ...]:
        """Returns the names of the operands that this epilogue takes, in a fixed order."""
        return tuple(name for name in ("bias", "residual", "row_scale", "col_scale") if getattr(self, name))

    @property
    def key(self) -> str:
        """Returns a short name, such as ``gelu_erf+bias+residual:fp16``. Equal epilogues have equal names."""
        return "+".join((self.act, *self.operands)) + f":{self.out_dtype}"


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """Describes a matrix product, with the sizes M, N and K (at least 1), the dtype of both operands, and the epilogue.

    Raises ``BadFeeds`` for a size under 1, ``UnknownName`` for an unknown dtype, and ``UnsupportedHere`` if the int8
    sum could overflow its int32 accumulator.
    """

    m: int
    n: int
    k: int
    in_dtype: str = "fp16"
    epilogue: EpilogueSpec = field(default_factory=EpilogueSpec)

    def __post_init__(self) -> None:
        _one_of("input dtype", self.in_dtype, IN_DTYPES)
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise BadFeeds(
                    f"the size {name.upper()} is {getattr(self, name)}; a product needs M, N and K of at least 1"
                )
        if self.in_dtype == "int8" and self.k > MAX_INT8_K:
            raise UnsupportedHere(
                f"an int32 sum of K = {self.k} int8 products can overflow; split K into parts of at most {MAX_INT8_K}"
            )

    @property
    def flops(self) -> int:
        """Returns the number of multiplications and additions of the product, 2*M*N*K."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Returns the bytes of memory traffic if every operand is read or written once."""
        e, out = self.epilogue, BYTES[self.epilogue.out_dtype]
        operands = (self.m * self.k + self.k * self.n) * BYTES[self.in_dtype]
        vectors = 4 * (e.row_scale * self.m + e.col_scale * self.n + e.bias * self.n)
        return operands + vectors + (1 + e.residual) * self.m * self.n * out


@dataclass(frozen=True, kw_only=True)
class ConvSpec:
    """Describes a convolution with one group. The input is NHWC, and the weights are (output channels, kernel height,
    kernel width, input channels).

    ``stride``, ``padding`` and ``dilation`` are pairs (height, width). Raises ``BadFeeds`` if the output would be
    empty.
    """

    images: int
    height: int
    width: int
    c_in: int
    c_out: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    in_dtype: str = "fp16"
    epilogue: EpilogueSpec = field(default_factory=EpilogueSpec)

    def __post_init__(self) -> None:
        if min(*self.kernel, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            raise BadFeeds("kernel, stride and dilation have to be at least 1 and padding at least 0")
        if min(self.out_height, self.out_width) < 1:
            raise BadFeeds(
                f"a {self.kernel} kernel with dilation {self.dilation} is larger than the padded "
                f"{self.height}x{self.width} input; raise padding"
            )
        _ = self.gemm

    @property
    def out_height(self) -> int:
        return _out(self.height, self.kernel[0], self.stride[0], self.padding[0], self.dilation[0])

    @property
    def out_width(self) -> int:
        return _out(self.width, self.kernel[1], self.stride[1], self.padding[1], self.dilation[1])

    @property
    def gemm(self) -> GemmSpec:
        """Returns the matrix product that computes this convolution."""
        return GemmSpec(
            m=self.images * self.out_height * self.out_width,
            n=self.c_out,
            k=self.kernel[0] * self.kernel[1] * self.c_in,
            in_dtype=self.in_dtype,
            epilogue=self.epilogue,
        )


def _out(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownName(f"unknown {what} {value!r}; use one of {', '.join(known)}")
