"""Proves that accel accepts only consistent optimization profiles, because TensorRT doesn't check profiles."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.converters.to_tensorrt.profiles import InputShapes, default_profile, merged_dims, parse_profiles
from accel.errors import BadInputSpec
from accel.signature import DimRange, Signature, TensorSpec
from accel.spelling import on_command_line

SIGNATURE = Signature(
    (
        TensorSpec("ids", "int64", ("batch", "sequence")),
        TensorSpec("pairs", "float32", ("sequence", "sequence", 3)),
        TensorSpec("scale", "float32", (4,)),
    ),
    dims={"batch": DimRange(1, 2, 8), "sequence": DimRange(4, 16, 32)},
)


@st.composite
def profile_texts(draw: st.DrawFn) -> list[str]:
    """Generates --profile arguments of a consistent profile, and changes a few sizes by one. Most contradictory
    profiles have a single wrong size."""
    sizes = st.integers(0, 4)
    ranges = {dim: sorted(draw(st.tuples(sizes, sizes, sizes))) for dim in ("batch", "sequence")}
    texts = []
    for spec in SIGNATURE.inputs:
        if draw(st.integers(0, 9)) == 0:
            continue
        ends = [[ranges[d][end] if isinstance(d, str) else d for d in spec.shape] for end in range(3)]
        if draw(st.integers(0, 3)) == 0:
            ends[draw(st.integers(0, 2))][draw(st.integers(0, len(spec.shape) - 1))] += draw(st.integers(-1, 1))
        texts.append(f"{spec.name}=" + ",".join("x".join(map(str, shape)) for shape in ends))
    return draw(st.permutations(texts))


@given(profile_texts())
def test_an_accepted_profile_is_consistent(texts: list[str]) -> None:
    """Checks that an accepted profile contains every dynamic input and doesn't change a fixed dim. Also checks that a
    shared dim has a single range, and that min, opt and max are in order."""
    try:
        profiles = parse_profiles(texts, SIGNATURE)
    except BadInputSpec:
        return
    for profile in profiles:
        given_shapes = {shapes.name: shapes for shapes in profile.inputs}
        ranges: dict[str, set[tuple[int, int, int]]] = {}
        for spec in SIGNATURE.inputs:
            if spec.name not in given_shapes:
                assert all(isinstance(dim, int) for dim in spec.shape)
                continue
            shapes = given_shapes[spec.name]
            for dim, low, opt, high in zip(spec.shape, shapes.min, shapes.opt, shapes.max, strict=True):
                assert 1 <= low <= opt <= high
                if isinstance(dim, int):
                    assert low == high == dim
                else:
                    ranges.setdefault(dim, set()).add((low, opt, high))
        assert all(len(found) == 1 for found in ranges.values())


GOOD = ["ids=1x4,2x8,4x16", "pairs=4x4x3,8x8x3,16x16x3"]

WRONG = {
    "another batch of one input": (
        ["ids=1x4,2x8,4x16", "pairs=4x4x3,8x8x3,32x32x3"],
        "'sequence' has the sizes 4..8..16 in the profile of the input 'ids'",
    ),
    "one dim of two sizes in one input": (["ids=1x4,2x8,4x16", "pairs=4x4x3,8x8x3,16x8x3"], "'sequence'"),
    "min over opt": (["ids=4x4,2x8,4x16", GOOD[1]], "has the sizes 4, 2, 4 at dim 0; a profile needs"),
    "opt over max": (["ids=1x4,2x32,4x16", GOOD[1]], "has the sizes 4, 32, 16 at dim 1; a profile needs"),
    "zero": (["ids=0x4,2x8,4x16", GOOD[1]], "1 <= min"),
    "rank": (["ids=1,2,4", GOOD[1]], "rank 1"),
    "ranks that differ": (["ids=1x4,2,4x16", GOOD[1]], "same rank"),
    "a fixed dim": ([GOOD[0], "pairs=4x4x3,8x8x4,16x16x4"], "fixed to 3"),
    "an unknown input": ([*GOOD, "tokens=1,2,3"], "names an unknown input; the inputs are ids, pairs, scale"),
    "a dynamic input left out": ([GOOD[0]], "dynamic input 'pairs'; add profiles=['pairs=4x4x3,8x8x3,16x16x3']"),
    "two shapes": (["ids=1x4,2x8"], "write NAME=MIN,OPT,MAX"),
    "no name": (["=1x4,2x8,4x16"], "write NAME=MIN,OPT,MAX"),
    "no equals": (["1x4,2x8,4x16"], "write NAME=MIN,OPT,MAX"),
    "a negative size": (["ids=-1x4,2x8,4x16"], "write NAME=MIN,OPT,MAX"),
    "a word": (["ids=1xmany,2x8,4x16"], "write NAME=MIN,OPT,MAX"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_profiles_name_the_fix(case: str) -> None:
    """Checks that a contradictory profile is refused with an error that names the cause."""
    texts, message = WRONG[case]
    with pytest.raises(BadInputSpec) as caught:
        parse_profiles(texts, SIGNATURE)
    assert message in str(caught.value)


def test_the_missing_line_can_be_copied() -> None:
    """Checks that the user gets a valid profile by adding the --profile lines that the error suggests. For a dim in the
    user's own --profile lines, the error suggests the same range. For any other dim, the error suggests the range in
    the signature."""
    three = replace(SIGNATURE, inputs=(*SIGNATURE.inputs, TensorSpec("a mask", "int64", ("batch", "sequence"))))
    with on_command_line(), pytest.raises(BadInputSpec) as caught:
        parse_profiles([GOOD[1]], three)
    said, _, line = str(caught.value).partition("; add ")
    assert said.endswith("dynamic inputs 'ids', 'a mask'")
    words = shlex.split(line)
    assert words[::2] == ["--profile", "--profile"]
    (made,) = parse_profiles([GOOD[1], *words[1::2]], three)
    assert made.dims == {"batch": SIGNATURE.dims["batch"], "sequence": DimRange(4, 8, 16)}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_text_form_reads_back(steps: list[tuple[int, int, int]]) -> None:
    """Checks that writing a profile as text and parsing the text gives the original profile."""
    low = tuple(a for a, _, _ in steps)
    opt = tuple(a + b for a, b, _ in steps)
    high = tuple(a + b + c for a, b, c in steps)
    shapes = InputShapes(name="layer/x=1:0", min=low, opt=opt, max=high)
    assert InputShapes.parse(str(shapes)) == shapes


def test_repeating_the_inputs_makes_a_second_profile() -> None:
    """Fails if the second profile replaces the first, or if the sizes of the two profiles are mixed."""
    more = ["pairs=32x32x3,32x32x3,64x64x3", "ids=8x32,8x32,8x64"]
    first, second = parse_profiles([*GOOD, *more], SIGNATURE)
    assert first.dims == {"batch": DimRange(1, 2, 4), "sequence": DimRange(4, 8, 16)}
    assert second.dims == {"batch": DimRange(8, 8, 8), "sequence": DimRange(32, 32, 64)}
    assert merged_dims([first, second]) == {"batch": DimRange(1, 2, 8), "sequence": DimRange(4, 8, 64)}


def test_default_profile_is_the_signatures_ranges() -> None:
    """Fails if an engine built without --profile has other size ranges than the signature."""
    profile = default_profile(SIGNATURE)
    assert profile is not None
    assert profile.dims == dict(SIGNATURE.dims)
    assert profile.to_json() == {
        "ids": [[1, 4], [2, 16], [8, 32]],
        "pairs": [[4, 4, 3], [16, 16, 3], [32, 32, 3]],
    }
    assert default_profile(Signature((TensorSpec("x", "float32", (4, 8)),))) is None


def test_profiles_of_dims_that_go_in_steps() -> None:
    """Checks that accel refuses a size that isn't a multiple of the dim's step, and that the merged ranges keep the
    step."""
    signature = Signature((TensorSpec("x", "float32", ("batch", "height")),), (), {"height": DimRange(16, 32, 64, 4)})
    with pytest.raises(
        BadInputSpec, match=r"profile x=1x16,1x30,2x64, dim 1: .*30 is no multiple .* write the range 16:28:64:4"
    ):
        parse_profiles(["x=1x16,1x30,2x64"], signature)
    profiles = parse_profiles(["x=1x16,1x32,2x48", "x=1x48,1x48,2x64"], signature)
    assert merged_dims(profiles)["height"] == DimRange(16, 32, 64, 4)
    assert default_profile(signature).dims["height"] == DimRange(16, 32, 64, 4)  # type: ignore[union-attr]
