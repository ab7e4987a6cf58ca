"""Translates special functions, which ONNX lacks. They are computed in float64, so that no digit of float32 is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .opset import operators

_FLOAT64 = 11
# From here on, the asymptotic series of log(gamma) and of its derivative are exact in float64 with the terms below.
_LARGE = 10
# B_2n / (2n (2n - 1)), the coefficients of Stirling's series, for n = 1, 2, ... (DLMF 5.11.1).
_OF_LOG_GAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
# B_2n / 2n for n = 1, 2, ... (DLMF 5.11.2).
_OF_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)

# From the constant on; see ``_log_of_scaled_complement``.
_OF_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.erfinv.default: _inverse_of_erf,
        aten.special_ndtri.default: _normal_quantile,
        aten.erfc.default: _complement_of_erf,
        aten.special_erfcx.default: _scaled_complement_of_erf,
        aten.special_log_ndtr.default: _log_of_normal,
        aten.lgamma.default: _log_gamma,
        aten.digamma.default: _digamma,
    }


def _inverse_of_erf(x: Any) -> Any:
    """Computes y with erf(y) = x as the quantile of the normal distribution at (1 + x) / 2, divided by sqrt(2)."""
    op = operators()
    wide = op.Cast(x, to=_FLOAT64)
    half = _number(0.5)
    found = _quantile(op.Mul(wide, half), op.Mul(op.Sub(_number(1), op.Abs(wide)), half))
    return op.CastLike(op.Mul(found, _number(math.sqrt(0.5))), x)


def _complement_of_erf(x: Any) -> Any:
    """Computes 1 - erf(x), also where erf(x) is nearly 1."""
    op = operators()
    wide, size, log_scaled = _log_of_scaled_complement(x)
    found = op.Exp(op.Sub(log_scaled, op.Mul(size, size)))
    return op.CastLike(op.Where(op.Less(wide, _number(0)), op.Sub(_number(2), found), found), x)


def _scaled_complement_of_erf(x: Any) -> Any:
    """Computes e^(x^2) (1 - erf(x))."""
    op = operators()
    wide, size, log_scaled = _log_of_scaled_complement(x)
    found = op.Exp(log_scaled)
    mirrored = op.Sub(op.Mul(_number(2), op.Exp(op.Mul(size, size))), found)
    return op.CastLike(op.Where(op.Less(wide, _number(0)), mirrored, found), x)


def _log_of_normal(x: Any) -> Any:
    """Computes the logarithm of the distribution function of the normal distribution, (1 - erf(-x / sqrt(2))) / 2."""
    op = operators()
    wide, size, log_scaled = _log_of_scaled_complement(op.Mul(op.Cast(x, to=_FLOAT64), _number(math.sqrt(0.5))))
    log_tail = op.Sub(op.Sub(log_scaled, op.Mul(size, size)), _number(math.log(2)))
    tail = op.Exp(log_tail)
    # log(1 - tail), by its series if the tail is small
    series = op.Neg(op.Mul(tail, op.Add(_number(1), op.Mul(tail, _number(0.5)))))
    upper = op.Where(op.Less(tail, _number(1e-6)), series, op.Log(op.Sub(_number(1), tail)))
    return op.CastLike(op.Where(op.Less(wide, _number(0)), log_tail, upper), x)


def _log_of_scaled_complement(x: Any) -> tuple[Any, Any, Any]:
    """Returns ``x`` as float64, |x|, and log(e^(x^2) (1 - erf(|x|))) with a relative error of 1.2e-7 (Press et al.,
    Numerical Recipes, 2nd edition, section 6.2, function erfcc)."""
    op = operators()
    wide = op.Cast(x, to=_FLOAT64)
    size = op.Abs(wide)
    t = op.Div(_number(1), op.Add(_number(1), op.Mul(size, _number(0.5))))
    return wide, size, op.Add(op.Log(t), _polynomial(t, _OF_ERFC))


def _normal_quantile(x: Any) -> Any:
    op = operators()
    wide = op.Cast(x, to=_FLOAT64)
    return op.CastLike(_quantile(op.Sub(wide, _number(0.5)), op.Min(wide, op.Sub(_number(1), wide))), x)


def _quantile(middle: Any, tail: Any) -> Any:
    """Returns the quantile of the normal distribution at p, given ``middle`` = p - 1/2 and ``tail`` = min(p, 1 - p).
    Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37 (1988), whose relative error is 1e-16."""
    op = operators()
    central = op.Mul(middle, _ratio(op.Sub(_number(0.180625), op.Mul(middle, middle)), *_AS241_CENTRAL))
    root = op.Sqrt(op.Neg(op.Log(tail)))
    near = _ratio(op.Sub(root, _number(1.6)), *_AS241_NEAR)
    far = _ratio(op.Sub(root, _number(5)), *_AS241_FAR)
    outer = op.Where(op.LessOrEqual(root, _number(5)), near, far)
    outer = op.Where(op.Equal(tail, _number(0)), _number(math.inf), outer)
    signed = op.Mul(op.Sign(middle), outer)
    return op.Where(op.LessOrEqual(op.Abs(middle), _number(0.425)), central, signed)


def _log_gamma(x: Any) -> Any:
    """Computes log|gamma(x)| from Stirling's series (DLMF 5.11.1), the recurrence (5.5.1) below ``_LARGE``, and the
    reflection (5.5.3) below 1/2."""
    op = operators()
    wide, positive, reflected = _reflected(x)
    product = _number(1)
    for step in range(_LARGE):
        product = op.Mul(product, op.Add(positive, _number(step)))
    small = op.Less(positive, _number(_LARGE))
    raised = op.Where(small, op.Add(positive, _number(_LARGE)), positive)
    inverse = op.Div(_number(1), raised)
    series = op.Mul(inverse, _polynomial(op.Mul(inverse, inverse), _OF_LOG_GAMMA))
    main = op.Mul(op.Sub(raised, _number(0.5)), op.Log(raised))
    stirling = op.Add(op.Add(op.Sub(main, raised), _number(0.5 * math.log(2 * math.pi))), series)
    stirling = op.Where(op.IsInf(raised), raised, stirling)
    found = op.Sub(stirling, op.Where(small, op.Log(product), _number(0)))
    sine = op.Abs(op.Sin(op.Mul(_number(math.pi), _fraction(wide))))
    mirrored = op.Sub(op.Log(op.Div(_number(math.pi), sine)), found)
    mirrored = op.Where(op.Or(op.Equal(sine, _number(0)), op.IsInf(wide)), _number(math.inf), mirrored)
    return op.CastLike(op.Where(reflected, mirrored, found), x)


def _digamma(x: Any) -> Any:
    """Computes the derivative of log(gamma(x)) from the asymptotic series (DLMF 5.11.2), the recurrence (5.5.2) below
    ``_LARGE``, and the reflection (5.5.4) below 1/2. As in PyTorch, the result is NaN at negative integers, and
    infinite at 0."""
    op = operators()
    wide, positive, reflected = _reflected(x)
    small = op.Less(positive, _number(_LARGE))
    terms = _number(0)
    for step in range(_LARGE):
        terms = op.Add(terms, op.Div(_number(1), op.Add(positive, _number(step))))
    raised = op.Where(small, op.Add(positive, _number(_LARGE)), positive)
    inverse = op.Div(_number(1), raised)
    square = op.Mul(inverse, inverse)
    series = op.Sub(op.Log(raised), op.Mul(inverse, _number(0.5)))
    series = op.Sub(series, op.Mul(square, _polynomial(square, _OF_DIGAMMA)))
    found = op.Sub(series, op.Where(small, terms, _number(0)))
    angle = op.Mul(_number(math.pi), _fraction(wide))
    sine, cosine = op.Sin(angle), op.Cos(angle)
    mirrored = op.Sub(found, op.Div(op.Mul(_number(math.pi), cosine), sine))
    mirrored = op.Where(op.Equal(sine, _number(0)), _number(math.nan), mirrored)
    # 1 / 0 has the sign of the zero.
    mirrored = op.Where(op.Equal(wide, _number(0)), op.Neg(op.Div(_number(1), wide)), mirrored)
    return op.CastLike(op.Where(reflected, mirrored, found), x)


def _reflected(x: Any) -> tuple[Any, Any, Any]:
    """Returns ``x`` as float64, 1 - x where x is below 1/2 and else x, and where x is below 1/2."""
    op = operators()
    wide = op.Cast(x, to=_FLOAT64)
    below = op.Less(wide, _number(0.5))
    return wide, op.Where(below, op.Sub(_number(1), wide), wide), below


def _fraction(x: Any) -> Any:
    """Returns the distance of ``x`` to the nearest even number, with 0 for odd numbers. The sine and the tangent of pi
    times the distance are those of pi x, up to the sign of the sine, and exactly 0 at integers."""
    op = operators()
    rest = op.Sub(x, op.Mul(op.Round(op.Mul(x, _number(0.5))), _number(2)))
    return op.Where(op.Equal(op.Abs(rest), _number(1)), _number(0), rest)


def _number(value: float) -> Any:
    import onnx_ir as ir

    return operators().Constant(value=ir.tensor(float(value), dtype=ir.DataType.DOUBLE))


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Evaluates c_0 + c_1 x + c_2 x^2 + ... by Horner's rule."""
    op = operators()
    found = _number(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        found = op.Add(op.Mul(found, x), _number(coefficient))
    return found


def _ratio(x: Any, above: Sequence[float], below: Sequence[float]) -> Any:
    return operators().Div(_polynomial(x, above), _polynomial(x, below))


# The coefficients of numerator and denominator, from the constant on, of the three ranges of AS 241.
_AS241_CENTRAL = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_AS241_NEAR = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_AS241_FAR = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
