"""Gives each operator on complex tensors as operators on the real and imaginary parts."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from . import fourier
from .fourier import Pair

Rule = Callable[..., Any]

# Operators that move values, or are linear in their values. They compute the real and the imaginary part separately.
# Each row has the positions of the arguments that hold values.
_LINEAR: dict[tuple[int, ...], tuple[str, ...]] = {
    (0,): (
        *("alias", "cat", "clone", "cumsum", "detach", "diagonal", "expand", "flip", "gather", "index"),
        *("index_select", "lift_fresh", "lift_fresh_copy", "mean", "neg", "permute", "repeat", "roll", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "stack", "sum", "t", "transpose", "tril", "triu"),
        *("unbind", "unfold", "unsqueeze"),
    ),
    (0, 1): ("add", "copy", "select_scatter", "slice_scatter", "sub"),
    (0, 2): ("constant_pad_nd", "index_put"),
    (0, 3): ("index_add", "scatter", "scatter_add"),
    (1, 2): ("where",),
}
# Operators that are linear in each of their two arguments.
_PRODUCTS = ("bmm", "dot", "matmul", "mm", "mul", "mv", "outer")
_FILLED = ("empty", "full", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "scalar_tensor", "zeros")
_FILLED_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")


def rule_of(target: Any) -> Rule | None:
    """Returns the function that computes the operator ``target`` with pairs in the place of complex tensors. Returns
    None if no rule exists."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    name = target._schema.name.partition("::")[2]
    if name in _OWN:
        return _OWN[name]
    if name in _PRODUCTS:
        return partial(_product, target)
    if name in (*_FILLED, *_FILLED_LIKE):
        return partial(_filled, target)
    positions = next((at for at, names in _LINEAR.items() if name in names), None)
    return partial(_linear, target, positions) if positions else None


def pair(value: Any) -> Pair:
    """Returns ``value`` as a pair. A real tensor gets an imaginary part of zeros."""
    if isinstance(value, Pair):
        return value
    if value.is_complex():
        both = torch.view_as_real(value)
        return Pair(both.select(-1, 0), both.select(-1, 1))
    return Pair(value, torch.zeros_like(value))


def _part(value: Any, imag: bool) -> Any:
    """Returns the real or the imaginary part of a tensor, a number, or a list of tensors."""
    if isinstance(value, list | tuple):
        return type(value)(_part(one, imag) for one in value)
    if isinstance(value, Pair | torch.Tensor):
        found = pair(value)
        return found.imag if imag else found.real
    return value.imag if imag else value.real


def _linear(target: Any, positions: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    def computed(imag: bool) -> Any:
        return target(*(_part(one, imag) if at in positions else one for at, one in enumerate(args)), **named)

    named = {name: _real_dtype(value) for name, value in kwargs.items()}
    real, imag = computed(False), computed(True)
    return (
        [Pair(*both) for both in zip(real, imag, strict=True)] if isinstance(real, list | tuple) else Pair(real, imag)
    )


def _product(target: Any, a: Any, b: Any) -> Pair:
    if not isinstance(b, Pair | complex):
        return Pair(target(a.real, b), target(a.imag, b))
    if not isinstance(a, Pair | complex):
        return Pair(target(a, b.real), target(a, b.imag))
    real = target(a.real, b.real) - target(a.imag, b.imag)
    return Pair(real, target(a.real, b.imag) + target(a.imag, b.real))


def _filled(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes operators that fill a new tensor with one number."""
    dtype = kwargs.get("dtype")
    like = next((one for one in args if isinstance(one, Pair)), None)
    if like is not None and dtype is not None and not dtype.is_complex:
        return target(*(_part(one, False) for one in args), **kwargs)
    named = {name: _real_dtype(value) for name, value in kwargs.items()}
    real = target(*(_filling(one, False) for one in args), **named)
    imag = target(*(_filling(one, True) for one in args), **named)
    return Pair(real, imag if any(isinstance(one, complex) for one in args) else torch.zeros_like(real))


def _filling(value: Any, imag: bool) -> Any:
    return _part(value, imag) if isinstance(value, Pair | complex) else value


def _real_dtype(value: Any) -> Any:
    return value.to_real() if isinstance(value, torch.dtype) and value.is_complex else value


def _divided(a: Any, b: Any) -> Pair:
    if not isinstance(b, Pair | complex):
        return Pair(a.real / b, a.imag / b)
    return _product(torch.ops.aten.mul.Tensor, a, _reciprocal(b))


def _reciprocal(x: Any) -> Any:
    if isinstance(x, complex):
        return 1 / x
    size = x.real * x.real + x.imag * x.imag
    return Pair(x.real / size, -x.imag / size)


def _copied(x: Any, **kwargs: Any) -> Any:
    """Computes a conversion to another dtype."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return x
    if not isinstance(x, Pair):
        return pair(x.to(dtype.to_real()))
    return x.map(lambda part: part.to(dtype.to_real())) if dtype.is_complex else x.real.to(dtype)


def _absolute(x: Pair) -> torch.Tensor:
    return (x.real * x.real + x.imag * x.imag).sqrt()


def _angle(x: Pair) -> torch.Tensor:
    return torch.atan2(x.imag, x.real)


def _exponential(x: Pair) -> Pair:
    return _polar(x.real.exp(), x.imag)


def _logarithm(x: Pair) -> Pair:
    return Pair(_absolute(x).log(), _angle(x))


def _polar(size: torch.Tensor, angle: torch.Tensor) -> Pair:
    return Pair(size * angle.cos(), size * angle.sin())


def _power(x: Any, exponent: Any) -> Any:
    """Computes a small whole power as products, and other powers as exp(exponent * log(x))."""
    multiply = partial(_product, torch.ops.aten.mul.Tensor)
    if exponent in (1, 2, 3, 4):
        found = x
        for _ in range(int(exponent) - 1):
            found = multiply(found, x)
        return found
    logarithm = _logarithm(pair(x)) if isinstance(x, Pair | torch.Tensor) else cmath.log(x)
    return _exponential(multiply(logarithm, exponent))


def _square_root(x: Pair) -> Pair:
    size = _absolute(x).sqrt()
    return _polar(size, _angle(x) / 2)


def _sign(x: Pair) -> Pair:
    size = _absolute(x)
    return x.map(lambda part: torch.where(size == 0, part, part / size))


def _with_bias(bias: Any, a: Any, b: Any) -> Any:
    """Computes ``addmm`` and ``baddbmm`` with the default factors."""
    return _linear(torch.ops.aten.add.Tensor, (0, 1), bias, _product(torch.ops.aten.matmul.default, a, b))


def _both(x: Pair) -> torch.Tensor:
    return torch.stack([x.real, x.imag], -1)


def _by_two(x: torch.Tensor) -> Pair:
    return Pair(x.select(-1, 0), x.select(-1, 1))


def _broadcast(real: torch.Tensor, imag: torch.Tensor) -> Pair:
    return Pair(*torch.broadcast_tensors(real, imag))


def _short_time(*args: Any, **kwargs: Any) -> Pair:
    """Keeps ``torch.stft``, which the exporter translates to ONNX's operator STFT."""
    return pair(torch.ops.aten.stft.default(*args, **kwargs))


def _same(x: Pair, *_: Any, **__: Any) -> Pair:
    return x


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _size_of(name: str) -> Rule:
    return lambda x, *args: getattr(torch.ops.aten, name)(x.real, *args)


_OWN: dict[str, Rule] = {
    **dict.fromkeys(("conj", "_conj", "_conj_physical", "conj_physical"), lambda x: Pair(x.real, -x.imag)),
    **dict.fromkeys(("contiguous", "resolve_conj", "resolve_neg"), _same),
    # Unlike ``view``, ``reshape`` takes any strides. The strides of a part differ from those of the complex tensor.
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), lambda x, size: x.map(lambda part: part.reshape(size))),
    **{name: _size_of(name) for name in ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset")},
    "_assert_tensor_metadata": _nothing,
    "_fft_c2c": fourier.of_pair,
    "_fft_c2r": fourier.to_real,
    "_fft_r2c": fourier.from_real,
    "_neg_view": lambda x: x.map(torch.neg),
    "_to_copy": _copied,
    "abs": _absolute,
    "addmm": _with_bias,
    "angle": _angle,
    "baddbmm": _with_bias,
    "complex": _broadcast,
    "div": _divided,
    "exp": _exponential,
    "imag": lambda x: x.imag,
    "log": _logarithm,
    "polar": _polar,
    "pow": _power,
    "real": lambda x: x.real,
    "reciprocal": _reciprocal,
    "sgn": _sign,
    "sqrt": _square_root,
    "square": lambda x: _power(x, 2),
    "stft": _short_time,
    "view_as_complex": _by_two,
    "view_as_complex_copy": _by_two,
    "view_as_real": _both,
    "view_as_real_copy": _both,
}
