"""Proves that tensors of every datatype survive the conversion from numpy to the wire and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tritonclient.utils as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from accel.serve.protocol.inference import Code, ServeError
from accel.serve.protocol.tensors import DATATYPES, decode_raw, decode_typed, encode

FIXED = [d for d in DATATYPES.values() if d.name not in ("BYTES", "BF16")]
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(st.data())
def test_raw_round_trip(data: st.DataObject) -> None:
    """Fails if a round trip changes a bit, a shape or a dtype, even for NaNs or empty tensors."""
    kind = data.draw(st.sampled_from(FIXED))
    array = data.draw(hnp.arrays(kind.numpy, shapes))
    back = decode_raw("x", kind.name, array.shape, bytes(encode(array, kind.name)), "m")
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(hnp.arrays(np.float32, shapes))
def test_bfloat16_round_trip(values: np.ndarray) -> None:
    """Checks that bfloat16 is sent as its sixteen bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = values.astype(ml_dtypes.bfloat16)
    back = decode_raw("x", "BF16", array.shape, bytes(encode(array, "BF16")), "m")
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


@given(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), st.data())
def test_strings_are_read_and_written_as_triton_does(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Fails if a byte of a string changes, or if Triton's client would encode the strings differently. Some strings are
    empty, contain zero bytes or aren't UTF-8."""
    array = np.empty(shape, dtype=object)
    for index in np.ndindex(shape):
        array[index] = data.draw(st.binary(max_size=9))
    body = bytes(encode(array, "BYTES"))
    back = decode_raw("x", "BYTES", shape, body, "m")
    assert back.shape == shape
    assert back.ravel().tolist() == array.ravel().tolist()
    if array.size:
        assert triton.serialize_byte_tensor(array).item() == body


@given(st.data())
def test_typed_contents_round_trip(data: st.DataObject) -> None:
    """Fails if an array changes when its values are sent as typed contents."""
    kind = data.draw(st.sampled_from([d for d in FIXED if d.contents]))
    array = data.draw(hnp.arrays(kind.numpy, shapes))
    back = decode_typed("x", kind.name, array.shape, array.ravel().tolist(), "m")
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_fixed_tensor_is_a_view() -> None:
    """Fails if reading or writing a tensor copies its bytes."""
    body = np.arange(4, dtype=np.int32).tobytes()
    array = decode_raw("x", "INT32", (2, 2), body, "m")
    assert np.shares_memory(array, np.frombuffer(body, dtype=np.uint8))
    assert np.shares_memory(np.frombuffer(encode(array, "INT32"), dtype=np.uint8), array)


@given(st.binary(max_size=64), st.lists(st.integers(-2, 1 << 62), max_size=4), st.sampled_from(sorted(DATATYPES)))
def test_hostile_bytes_are_refused_or_read(body: bytes, shape: list[int], kind: str) -> None:
    """Fails if wrong sizes cause anything but INVALID_ARGUMENT, such as a crash, a large allocation or another
    exception."""
    found: list[int] | Code
    try:
        found = list(decode_raw("x", kind, shape, body, "m").shape)
    except ServeError as error:
        found = error.code
    assert found in (shape, Code.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    ("kind", "shape", "body", "says"),
    [
        ("FP32", (2,), b"1234", "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 4"),
        ("FP31", (2,), b"1234", "unsupported data type 'FP31'"),
        ("BYTES", (1,), b"\x05\0\0\0abc", "incomplete string data"),
        ("BYTES", (2,), b"\x01\0\0\0abcd", "expected 2 string elements"),
        ("BYTES", (2,), b"\x04\0\0\0abcd", "expected 2 string elements"),
        ("BYTES", (1,), b"\x01\0\0\0ab", "unexpected number of string elements"),
        ("INT8", (-1,), b"a", "negative dimension"),
    ],
)
def test_what_is_said_of_wrong_bytes(kind: str, shape: tuple[int, ...], body: bytes, says: str) -> None:
    """Checks that a wrong size is refused, and that the error names the wrong size."""
    with pytest.raises(ServeError, match=says.replace("[", r"\[").replace(".", r"\.")):
        decode_raw("x", kind, shape, body, "m")


@pytest.mark.parametrize(
    ("kind", "values"), [("INT8", [300]), ("UINT8", [-1]), ("INT32", [1.5]), ("FP32", ["a"]), ("INT64", [[1]])]
)
def test_values_that_do_not_fit_are_refused(kind: str, values: list[object]) -> None:
    """Checks that a number that doesn't fit its datatype is refused."""
    with pytest.raises(ServeError) as caught:
        decode_typed("x", kind, (1,), values, "m")
    assert caught.value.code is Code.INVALID_ARGUMENT
