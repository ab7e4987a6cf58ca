"""Proves that specs and ranges survive printing and parsing, and that example inputs stay inside their ranges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.converters.graph.preprocess import PreprocessConfig
from accel.errors import BadFeeds, BadInputSpec
from accel.proof.data import Dataset
from accel.proof.stream import SampleStream
from accel.signature import DTYPES, DimRange, Signature, TensorSpec, numpy_dtype
from accel.sources.output_specs import probe_cases
from accel.stage import config_json

names = st.from_regex(r"[a-z_][a-z0-9_.]{0,8}", fullmatch=True)
dims = st.one_of(st.integers(0, 9), st.sampled_from(["batch", "sequence", "height"]))


def _held(spec: TensorSpec) -> TensorSpec:
    """Returns ``spec`` with a range that its dtype holds."""
    low = -5 if spec.dtype_range is None else spec.dtype_range[0]
    return spec if spec.values is None else replace(spec, values=(max(int(spec.values[0]), low), spec.values[1]))


specs = st.builds(
    TensorSpec,
    names,
    st.sampled_from([d for d in DTYPES if d != "string"]),
    st.lists(dims, max_size=4).map(tuple),
    st.one_of(st.none(), st.tuples(st.integers(-5, 0), st.integers(0, 100))),
).map(_held)
ranges = st.lists(st.integers(1, 9), min_size=3, max_size=3).map(lambda v: DimRange(*sorted(v)))


def _signature(inputs: list[TensorSpec], bounds: DimRange) -> Signature:
    distinct = tuple({spec.name: spec for spec in inputs}.values())
    dynamic = {dim for spec in distinct for dim in spec.shape if isinstance(dim, str)}
    return Signature(distinct, (), dict.fromkeys(sorted(dynamic), bounds))


signatures = st.builds(_signature, st.lists(specs, min_size=1, max_size=3), ranges)


@given(specs)
def test_a_spec_reads_back_what_it_prints(spec: TensorSpec) -> None:
    """Fails if parsing a printed spec loses a field."""
    assert TensorSpec.parse(str(spec)) == spec


@given(signatures)
def test_json_round_trip(signature: Signature) -> None:
    """Fails if the manifest loses a field of the signature."""
    assert Signature.from_json(signature.to_json()) == signature


@st.composite
def stepped(draw: st.DrawFn) -> DimRange:
    step = draw(st.integers(1, 7))
    low, opt, high = sorted(draw(st.lists(st.integers(1, 9), min_size=3, max_size=3)))
    return DimRange(low * step, opt * step, high * step, step)


@given(signatures, st.lists(stepped(), min_size=3, max_size=3))
def test_every_size_is_a_multiple_of_its_step(signature: Signature, found: list[DimRange]) -> None:
    """In gates and in the runs that find output shapes, every size of a dim must be inside the dim's range, and must be
    a multiple of the dim's step. Also fails if the step is lost in the manifest or in a printed range, or if inputs of
    a wrong size are accepted."""
    signature = signature.with_dims(dict(zip(signature.dims, found, strict=False)))
    for sizes in (*signature.cases(), *probe_cases(signature)):
        assert all(r.min <= sizes[d] <= r.max and sizes[d] % r.step == 0 for d, r in signature.dims.items())
    assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature
    for dim, r in signature.dims.items():
        assert DimRange.parse(str(r)) == r
        assert (r.down(r.opt + r.step - 1), r.up(r.opt - r.step + 1)) == (r.opt, r.opt)
        if r.step > 1:
            odd = {**signature.sizes(), dim: r.opt + 1}
            feeds = {s.name: np.zeros(s.resolve(odd), numpy_dtype(s.dtype)) for s in signature.inputs}
            with pytest.raises(BadFeeds, match=f"takes multiples of {r.step}"):
                signature.check_feeds(feeds)
            with pytest.raises(BadInputSpec, match=f"sizes are multiples of {r.step}"):
                signature.example_inputs(**{dim: r.opt + 1})


def test_without_a_step_nothing_is_written_differently() -> None:
    """If a model has no steps, its manifest and its cache key must not mention steps, like in old versions of accel."""
    signature = Signature((TensorSpec.parse("x:float32[batch,length]"),), (), {"length": DimRange(4, 8, 32)})
    assert json.dumps(signature.to_json()["dims"]) == '{"batch": [1, 1, 8], "length": [4, 8, 32]}'
    older = {"inputs": signature.to_json()["inputs"], "outputs": [], "dims": {"batch": [1, 2, 3]}}
    assert Signature.from_json(older).dims["batch"] == DimRange(1, 2, 3, 1)
    config = PreprocessConfig(dims={"height": DimRange(16, 32, 64)})
    assert config_json(config)["dims"] == {"height": {"min": 16, "opt": 32, "max": 64}}
    config = PreprocessConfig(dims={"height": DimRange(16, 32, 64, 4)})
    assert config_json(config)["dims"] == {"height": {"min": 16, "opt": 32, "max": 64, "step": 4}}


def test_a_range_in_place_of_another() -> None:
    """A new range without a step must get the old range's step, unless a size of the new range isn't a multiple of this
    step."""
    known = DimRange(16, 32, 64, 4)
    assert DimRange(16, 20, 32).over(known) == DimRange(16, 20, 32, 4)
    assert DimRange(16, 21, 32).over(known) == DimRange(16, 21, 32)
    assert DimRange(16, 24, 32, 8).over(known) == DimRange(16, 24, 32, 8)
    assert known.over(None) == known


def test_samples_that_come_in_multiples(tmp_path: Path) -> None:
    """Checks that the size of every batch is a multiple of the batch dim's step. In this test, the step is 8."""
    spec = TensorSpec.parse("x:float32[batch,2]")
    signature = Signature((spec,), (), {"batch": DimRange(8, 8, 32, 8)})
    np.savez(tmp_path / "frames.npz", x=np.arange(84, dtype=np.float32).reshape(42, 2))
    for data in (Dataset.load(tmp_path / "frames.npz", signature), SampleStream(tmp_path / "frames.npz", signature)):
        assert [len(part["x"]) for part in data.batches(20)] == [16, 16, 8]
        assert [len(part["x"]) for part in data.batches(4, 20)] == [8, 8]


@given(signatures)
def test_every_case_is_inside_the_ranges_and_fits(signature: Signature) -> None:
    """Checks that a gate runs inside the ranges, and that example inputs fit their own signature."""
    cases = signature.cases()
    for sizes in cases:
        assert all(r.min <= sizes[d] <= r.max for d, r in signature.dims.items())
        feeds = signature.example_inputs(**sizes)
        assert signature.check_feeds(feeds) == sizes
        for spec in signature.inputs:
            if spec.values and spec.dtype.startswith("int") and not spec.name.endswith("mask"):
                assert (feeds[spec.name] >= spec.values[0]).all()
                assert (feeds[spec.name] <= spec.values[1]).all()
    for dim, r in signature.dims.items():
        assert {r.min, r.max} <= {c[dim] for c in cases} or dim == signature.batch_dim


def test_cases_hold_batch_1_2_and_the_largest() -> None:
    """Fails if the cases of a gate leave out batch 1, batch 2 or the largest size of a dim. Also fails if the largest
    batch has a long usual length, which would make each gate several times slower."""
    signature = Signature((TensorSpec.parse("x:float32[batch,length]"),), (), {"length": DimRange(4, 8, 32)})
    cases = [(c["batch"], c["length"]) for c in signature.cases()]
    assert {1, 2, 8} <= {b for b, _ in cases}
    assert {4, 8, 32} <= {n for _, n in cases}
    assert {(8, 8), (1, 32)} <= set(cases)
    long = Signature(signature.inputs, (), {"length": DimRange(4, 128, 512)})
    assert {(8, 4), (1, 512)} <= {(c["batch"], c["length"]) for c in long.cases()}
    assert (8, 128) not in {(c["batch"], c["length"]) for c in long.cases()}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x", "name:dtype"),
        ("x:float31[3]", "unknown dtype"),
        ("x:float32[batch,,3]", "empty dim"),
        ("x:float32[-1]", "negative"),
        ("x:float32[3 4.5]", "number or a name"),
        ("x:int64[3]{5..1}", "empty range"),
        (":float32[3]", "name:dtype"),
    ],
)
def test_bad_specs_say_what_to_write(text: str, word: str) -> None:
    """Checks that a malformed spec gives an error that names the mistake."""
    with pytest.raises(BadInputSpec, match=word):
        TensorSpec.parse(text)


def test_feeds_are_checked() -> None:
    """Fails if accel accepts inputs with wrong names, dtypes, ranks or contradictory sizes."""
    signature = Signature((TensorSpec.parse("a:float32[batch,3]"), TensorSpec.parse("b:int64[batch]")))
    good = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int64)}
    assert signature.check_feeds(good) == {"batch": 2}
    for bad, word in (
        ({"a": good["a"]}, "missing input 'b'"),
        ({**good, "c": good["b"]}, "unknown input 'c'"),
        ({**good, "a": good["a"].astype(np.float64)}, "float64"),
        ({**good, "a": [[1.0, 2.0, 3.0]]}, "'a' has the type list; give a numpy array of float32"),
        ({**good, "a": np.zeros((2, 4), np.float32)}, r"\[2, 4\]"),
        ({**good, "a": np.zeros((2, 3, 1), np.float32)}, r"\[2, 3, 1\]"),
        ({**good, "b": np.zeros(3, np.int64)}, "'batch' has size 2 in one input, but size 3"),
    ):
        with pytest.raises(BadFeeds, match=word):
            signature.check_feeds(bad)


def test_two_inputs_of_one_name() -> None:
    """Fails if a signature accepts two inputs with the same name."""
    with pytest.raises(BadInputSpec, match="same name"):
        Signature((TensorSpec.parse("x:float32[1]"), TensorSpec.parse("x:float32[2]")))


def test_an_input_with_a_default_may_be_left_out() -> None:
    """Checks that an input with a default may be left out, and is checked if the caller passes it. Also fails if the
    example inputs contain an input with a default, or if the manifest loses an input with a default."""
    default = TensorSpec("k", "int64", (1,), optional=True)
    signature = Signature((TensorSpec("x", "float32", ("batch", 4)), default))
    assert Signature.from_json(signature.to_json()) == signature
    feeds = signature.example_inputs(batch=2)
    assert list(feeds) == ["x"]
    assert signature.check_feeds(feeds) == {"batch": 2}
    assert signature.check_feeds({**feeds, "k": np.array([3])}) == {"batch": 2}
    for wrong, says in (
        ({"k": np.array([3])}, "missing input 'x'"),
        ({**feeds, "k": np.array([3, 4])}, "input 'k' has shape"),
        ({**feeds, "k": np.array([3.0])}, "input 'k' has dtype float64"),
    ):
        with pytest.raises(BadFeeds, match=says):
            signature.check_feeds(wrong)


@pytest.mark.parametrize(
    ("given", "wanted", "fits"),
    [
        ("int32", "int64", True),
        ("uint8", "int32", True),
        ("bool", "int64", True),
        ("float16", "float32", True),
        ("bfloat16", "float32", True),
        ("int64", "int32", False),
        ("uint64", "int64", False),
        ("int64", "bool", False),
        ("float64", "float32", False),
        ("float16", "bfloat16", False),
        ("int32", "float64", False),
        ("float32", "int64", False),
        ("bool", "float32", False),
    ],
)
def test_narrower_arrays_become_wider(given: str, wanted: str, fits: bool) -> None:
    """Fails if an array isn't widened although no number changes, or if a cast that may lose numbers, or that turns
    integers into floats, goes unnoticed."""
    signature = Signature((TensorSpec("x", wanted, ("batch", 2)),))
    feeds = {"x": np.array([[0, 1]]).astype(numpy_dtype(given))}
    found = signature.widened(feeds)
    if fits:
        assert found["x"].dtype == numpy_dtype(wanted)
        assert signature.check_feeds(found) == {"batch": 1}
    else:
        assert found is feeds
        with pytest.raises(BadFeeds, match=f"has dtype {given}, but the model takes {wanted}; cast the input to"):
            signature.check_feeds(found)
    exact = {"x": np.zeros((1, 2), numpy_dtype(wanted))}
    assert signature.widened(exact) is exact


def test_a_dim_may_be_a_sum_of_other_dims() -> None:
    """Fails if a sum counts as a dim of its own, its size isn't the sum, or wrong feeds are accepted."""
    texts = ("ids:int64[batch,new]{0..9}", "mask:int64[batch,past+new]", "cache:float32[batch,past,4]")
    signature = Signature(tuple(map(TensorSpec.parse, texts)), (), {"past": DimRange(0, 8, 16)})
    assert signature.dynamic_dims == ("batch", "new", "past")
    for sizes in signature.cases():
        feeds = signature.inputs_at(sizes)
        assert feeds["mask"].shape[1] == sizes["past"] + sizes["new"]
        assert signature.check_feeds(feeds) == sizes
    assert 0 in {sizes["past"] for sizes in signature.cases()}
    with pytest.raises(BadFeeds, match="'past\\+new' of input 'mask' has size 1, but has to be"):
        signature.check_feeds({**feeds, "mask": feeds["mask"][:, :1]})
    assert Signature.from_json(signature.to_json()) == signature
    fixed = signature.inputs[1].with_dims({"past": 3, "new": 4})
    assert fixed.shape == ("batch", 7)


def test_a_sum_is_no_batch() -> None:
    """Fails if a sum of dims on axis 0 counts as the batch. A sum has no range."""
    one = Signature((TensorSpec.parse("x:float32[a+b,2]"),))
    assert one.batch_dim is None
    assert one.batch_unit == 1
    assert one.cases()[0] == {"a": 16, "b": 16}


def test_the_first_dim_is_never_empty() -> None:
    with pytest.raises(BadInputSpec, match="1 <= min <= opt <= max"):
        Signature((TensorSpec.parse("x:float32[batch,4]"),), (), {"batch": DimRange(0, 1, 2)})


def test_a_wrong_number_of_features() -> None:
    """Fails if the error for a wrong size on a fixed axis only advises a dynamic dim, which a model whose weights fix
    the size can't have."""
    signature = Signature((TensorSpec("x", "float32", ("batch", 3)),))
    said = r"give 3 on axis 1, or if the source takes other sizes there, export it again with dynamic=\{'x': "
    with pytest.raises(BadFeeds, match=said):
        signature.check_feeds({"x": np.zeros((2, 5), np.float32)})


LORA = Signature(
    (TensorSpec("x", "float32", ("batch", 4)),),
    optional=(TensorSpec("a", "float32", (4, "rank"), optional=True), TensorSpec("b", "float32", ("rank", 6))),
)


def test_optional_inputs_may_be_left_out() -> None:
    """Fails if example inputs have an optional input, if its dim gets a range, if the manifest loses it, or if a row of
    a batch cuts it."""
    assert Signature.from_json(json.loads(json.dumps(LORA.to_json()))) == LORA
    assert "optional" not in Signature(LORA.inputs).to_json()  # manifests of other models stay as they are
    assert list(LORA.dims) == ["batch"]
    feeds = LORA.example_inputs(batch=2)
    assert set(feeds) == {"x"}
    assert LORA.check_feeds(feeds) == {"batch": 2}
    given = {**feeds, "a": np.ones((4, 3), np.float32), "b": np.ones((3, 6), np.float32)}
    assert LORA.check_feeds(given) == {"batch": 2}
    row = LORA.row_of(given, 1)
    assert row["x"].tolist() == feeds["x"][1:].tolist()
    assert row["a"].shape == (4, 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"a": np.ones((3, 3), np.float32)}, r"'a' has shape \[3, 3\], but the model takes a:float32\[4,rank\]"),
        ({"b": np.ones((2, 6), np.float32)}, r"'b' has shape \[2, 6\]"),
        ({"b": np.ones((3, 6))}, "dtype float64, but the model takes float32"),
        ({"c": np.ones((3, 6))}, "unknown input 'c'"),
    ],
)
def test_wrong_optional_inputs_are_refused(wrong: dict[str, np.ndarray], said: str) -> None:
    """Fails if matrices of two ranks, of another layer or of another dtype reach the runtime."""
    given = {"x": np.ones((2, 4), np.float32), "a": np.ones((4, 3), np.float32), "b": np.ones((3, 6), np.float32)}
    with pytest.raises(BadFeeds, match=said):
        LORA.check_feeds({**given, **wrong})
