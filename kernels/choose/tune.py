"""Finding the fastest configuration of a problem: every candidate timed, the winner verified before it is remembered.

``choose_fastest`` is the decision, with the timer and the candidates handed in; ``tune`` hands in the kernels and the
GPU that is there, for a product or a convolution.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from accel.errors import AccelError, UnknownName, UnsupportedHere, one_line
from accel.kernels import choices, dispatch, reference
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import SCALED, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.tuned import Entry, Key, Table, key_of

Run = Callable[[], object]
Operands = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# The products of BERT-base, and of a 7B decoder: N, K.
LAYERS = ((768, 768), (3072, 768), (768, 3072), (4096, 4096), (11008, 4096), (4096, 11008))
ROWS = (1, 16, 128, 1024, 4096)
# The convolutions of ResNet-50 at a batch of 8: the first, the 3x3 of each stage and the step between two of them.
CONVOLUTIONS = (
    ConvSpec(images=8, height=224, width=224, c_in=3, c_out=64, kernel=(7, 7), stride=(2, 2), padding=(3, 3)),
    *(
        ConvSpec(images=8, height=size, width=size, c_in=c, c_out=c, kernel=(3, 3), padding=(1, 1))
        for size, c in ((56, 64), (28, 128), (14, 256), (7, 512))
    ),
    *(
        ConvSpec(images=8, height=size, width=size, c_in=c, c_out=c, kernel=(3, 3), stride=(2, 2), padding=(1, 1))
        for size, c in ((56, 128), (28, 256), (14, 512))
    ),
)
ADDED = ("none", "bias", "residual", "bias+residual")
ROTATED_BYTES = 256 << 20  # more than the L2 of any GPU: each call finds its operands in memory
BLOCK_MICROSECONDS = 10_000.0
LAUNCH_MICROSECONDS = 500.0  # under this Python may be what takes the time
MOST_SETS = 256  # of operands: enough for sets of 1 MiB, the weights of BERT-base's smallest layer
RECORDED_CALLS = MOST_SETS  # then so many in a graph: every set in turn, and milliseconds of the smallest kernel
BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """``run`` is what is timed; ``error`` runs it once more and gives its largest error over the bound."""

    name: str
    run: Run
    error: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What came of one problem. ``entry`` is None where no candidate was right. ``timed``: microseconds by name.
    ``refused``: name -> why, for those that were faster than the winner and wrong, or didn't run."""

    key: Key
    entry: Entry | None
    timed: Mapping[str, float]
    refused: Mapping[str, str]


def choose_fastest(key: Key, candidates: Sequence[Candidate], *, timer: Callable[[Run], float], table: Table) -> Tuned:
    """Time every candidate, verify them from the fastest on, and put the first right one into ``table``.

    ``timer`` gives the microseconds of a call. A candidate that raises, or whose error is over the bound, is refused
    however fast it is.
    """
    timed: dict[str, float] = {}
    refused: dict[str, str] = {}
    for candidate in candidates:
        try:
            timed[candidate.name] = timer(candidate.run)
        except (AccelError, RuntimeError) as error:  # CUDA's and Triton's errors are RuntimeErrors
            refused[candidate.name] = one_line(error, 200)
    fit = [candidate for candidate in candidates if candidate.name in timed]
    for candidate in sorted(fit, key=lambda one: timed[one.name]):
        try:
            ratio = candidate.error()
        except (AccelError, RuntimeError) as error:
            refused[candidate.name] = one_line(error, 200)
            continue
        if not ratio <= 1:  # a NaN is not
            refused[candidate.name] = f"its error is {ratio:.3g} times the bound"
            continue
        entry = Entry(config=candidate.name, microseconds=timed[candidate.name], error=ratio)
        table.put(key, entry)
        return Tuned(key=key, entry=entry, timed=timed, refused=refused)
    return Tuned(key=key, entry=None, timed=timed, refused=refused)


def specs(
    dtypes: Sequence[str],
    acts: Sequence[str],
    shapes: Sequence[tuple[int, int, int]] | None = None,
    *,
    added: Sequence[str] = ("bias",),
) -> list[GemmSpec]:
    """The problems that are tuned: ``shapes`` (M, N, K), by default the layers of BERT-base and of a 7B decoder.

    ``added``: what is added to the product, each one of ``ADDED``. int8 and fp8 are tuned for fp16 and bf16 output.
    Raises ``UnknownName`` for another.
    """
    for words in added:
        if words not in ADDED:
            raise UnknownName(f"nothing is called {words!r}; what can be added is {', '.join(ADDED)}")
    sizes = list(shapes) if shapes else [(m, n, k) for n, k in LAYERS for m in ROWS]
    return [
        GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=epilogue_for(dtype, act, words, out))
        for m, n, k in sizes
        for dtype in dtypes
        for act in acts
        for words in added
        for out in (("fp16", "bf16") if dtype in SCALED else (dtype,))
    ]


def conv_specs(
    dtypes: Sequence[str],
    acts: Sequence[str],
    shapes: Sequence[ConvSpec] = CONVOLUTIONS,
    *,
    added: Sequence[str] = ("bias",),
) -> list[ConvSpec]:
    """The convolutions that are tuned: the geometry of ``shapes`` with the dtypes and epilogues of ``specs``, but no
    scale of a row, which a convolution doesn't have."""
    epilogues = [
        (s.in_dtype, replace(s.epilogue, row_scale=False)) for s in specs(dtypes, acts, [(1, 1, 1)], added=added)
    ]
    return [replace(shape, in_dtype=dtype, epilogue=epilogue) for shape in shapes for dtype, epilogue in epilogues]


def epilogue_for(dtype: str, act: str, added: str = "bias", out_dtype: str | None = None) -> EpilogueSpec:
    """A layer's epilogue: activation and what is added (of ``ADDED``); scales for int8 and fp8, whose output is fp16
    unless another is given."""
    scaled = dtype in SCALED
    return EpilogueSpec(
        act=act,
        bias="bias" in added,
        residual="residual" in added,
        row_scale=scaled,
        col_scale=scaled,
        out_dtype=out_dtype or ("fp16" if scaled else dtype),
    )


def operands_for(spec: GemmSpec | ConvSpec, device: torch.device, seed: int = 0) -> Operands:
    """Random operands: ``a`` (M, K), ``b`` (N, K) transposed, the epilogue's by name; sums stay within fp16. Of a
    convolution: the image, the weights, and the epilogue's."""
    g = torch.Generator(device).manual_seed(seed)
    product = spec.gemm if isinstance(spec, ConvSpec) else spec

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device)

    # Unscaled int8 sums are larger than fp16 holds: of numbers under 16 they aren't, up to a K of some ten thousand.
    e = spec.epilogue
    end = 128 if e.row_scale or e.col_scale or e.out_dtype != "fp16" else 16

    def operand(*shape: int) -> torch.Tensor:
        if spec.in_dtype == "int8":
            return torch.randint(-end, end, shape, generator=g, device=device, dtype=torch.int8)
        return normal(*shape).to(TORCH_DTYPES[spec.in_dtype])

    size = 0.001 if spec.in_dtype == "int8" else 0.1
    made = {
        "bias": normal(product.n),
        "residual": normal(*_out_shape(spec)).to(TORCH_DTYPES[spec.epilogue.out_dtype]),
        "row_scale": size * (0.5 + torch.rand(product.m, generator=g, device=device)),
        "col_scale": size * (0.5 + torch.rand(product.n, generator=g, device=device)),
    }
    given = {name: made[name] for name in spec.epilogue.operands}
    if isinstance(spec, ConvSpec):
        image = operand(spec.images, spec.height, spec.width, spec.c_in)
        return image, operand(spec.c_out, *spec.kernel, spec.c_in), given
    return operand(spec.m, spec.k), operand(spec.n, spec.k).t(), given


def _out_shape(spec: GemmSpec | ConvSpec) -> tuple[int, ...]:
    if isinstance(spec, ConvSpec):
        return (spec.images, spec.out_height, spec.out_width, spec.c_out)
    return (spec.m, spec.n)


def rotated_operands(spec: GemmSpec | ConvSpec, device: torch.device) -> list[Operands]:
    """Several sets of operands, together at least ``ROTATED_BYTES``: taken in turn, no call finds its own in a cache.
    Of sets of less than 1 MiB there are ``MOST_SETS``, however little that is."""
    first = operands_for(spec, device)
    bytes_each = sum(operand.numel() * operand.element_size() for operand in first[:2])
    count = max(2, min(MOST_SETS, -(-ROTATED_BYTES // bytes_each)))
    return [first, *(operands_for(spec, device, seed) for seed in range(1, count))]


def largest_error(spec: GemmSpec | ConvSpec, operands: Operands, got: torch.Tensor) -> float:
    """The largest error of ``got`` over its bound, against the float64 reference; infinite for a NaN or a wrong shape.

    At most 256 rows (of a convolution: output pixels) are looked at, spread over all: a float64 product of a large
    problem takes a GPU seconds.
    """
    a, b, given = operands
    if got.shape != _out_shape(spec) or got.dtype != TORCH_DTYPES[spec.epilogue.out_dtype]:
        return float("inf")
    product = spec.gemm if isinstance(spec, ConvSpec) else spec
    rows = torch.arange(product.m, device=a.device)
    if product.m > 256:
        rows = torch.linspace(0, product.m - 1, 256, device=a.device).long()
    if isinstance(spec, ConvSpec):
        a, b = patches(spec, a, rows), b.reshape(product.n, product.k).t()
    else:
        a = bits(a)[rows].view(a.dtype)
    part = replace(product, m=len(rows))
    cut = dict(given)
    if "row_scale" in cut:
        cut["row_scale"] = cut["row_scale"][rows]
    if "residual" in cut:
        cut["residual"] = cut["residual"].reshape(product.m, product.n)[rows]
    exact = reference.gemm_torch(part, a, b, cut)
    bound = reference.gemm_bound(part, a, b, cut)
    if spec.in_dtype == "fp8_e4m3":
        bound = bound + fp8_sum_error(part, a, b, cut)
    return reference.error_over_bound(got.reshape(product.m, product.n)[rows], exact, bound)


def patches(spec: ConvSpec, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows ``rows`` (of the output's pixels, in order) of the matrix that a convolution multiplies, (rows, K)."""
    column, rest = rows % spec.out_width, rows // spec.out_width
    line, image = rest % spec.out_height, rest // spec.out_height

    def taps(start: torch.Tensor, axis: int) -> torch.Tensor:
        steps = torch.arange(spec.kernel[axis], device=x.device) * spec.dilation[axis]
        return start[:, None] * spec.stride[axis] - spec.padding[axis] + steps

    height, width = taps(line, 0)[:, :, None], taps(column, 1)[:, None, :]
    inside = (height >= 0) & (height < spec.height) & (width >= 0) & (width < spec.width)
    found = bits(x)[image[:, None, None], height.clamp(0, spec.height - 1), width.clamp(0, spec.width - 1)]
    return (found * inside[..., None]).to(found.dtype).view(x.dtype).reshape(len(rows), -1)


def bits(x: torch.Tensor) -> torch.Tensor:
    """``x`` as integers of its size: few operators take float8, on a GPU not even indexing in every torch."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def fp8_sum_error(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the sums of fp8 tensor cores add to the bound: they keep about 14 bits (DeepSeek-V3 report, section 3.3.2),
    2**-13 of the largest partial sum, for each of the four steps before the sum is added up in fp32."""
    magnitude = a.double().abs() @ b.double().abs()
    for name, dim in (("row_scale", 1), ("col_scale", 0)):
        if name in given:
            magnitude = magnitude * given[name].double().abs().unsqueeze(dim)
    return reference.SLOPE[spec.epilogue.act] * 4 * 2.0**-13 * magnitude


def microseconds(run: Run) -> float:
    """The median time of a call on the current GPU: several blocks of calls between two events each.

    The calls are recorded in a CUDA graph and replayed, so that what Python takes to launch a kernel, often more than
    the kernel itself, is not measured. Where they can't be recorded, they are called.
    """

    def block(calls: int, step: Run = run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / calls

    block(3)  # compiles, and wakes the clocks
    once = max(block(3), 0.1)
    calls = max(3, min(1000, int(BLOCK_MICROSECONDS / once)))
    if once < LAUNCH_MICROSECONDS:
        calls = max(calls, RECORDED_CALLS)  # once is then what the launch takes
    replay = recorded(run, calls)
    if replay is None:
        return statistics.median(block(calls) for _ in range(BLOCKS))
    block(1, replay)  # the first one moves the graph to the GPU
    return statistics.median(block(1, replay) / calls for _ in range(BLOCKS))


def recorded(run: Run, calls: int) -> Run | None:
    """``calls`` calls of ``run`` as one CUDA graph; None where they can't be recorded."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        # Not torch.cuda.graph, which empties the allocator's cache each time.
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")  # another thread's calls of CUDA don't end it
            try:
                for _ in range(calls):
                    run()
            finally:
                graph.capture_end()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def tune(spec: GemmSpec | ConvSpec, table: Table, *, device: int = 0) -> Tuned:
    """``spec`` on the GPU ``device``, dense operands, every configuration that there is for it.

    Raises ``UnsupportedHere`` without a GPU, or where it has no configuration for the problem.
    """
    if not torch.cuda.is_available():
        raise UnsupportedHere("no NVIDIA GPU here; accel kernels tune times the kernels on the GPU that is there")
    where = torch.device("cuda", device)
    with torch.cuda.device(where):
        sets = rotated_operands(spec, where)
        found = candidates_for(spec, sets, torch.cuda.get_device_capability(where))
        if not found:
            what = "convolutions" if isinstance(spec, ConvSpec) else "products"
            raise UnsupportedHere(f"{torch.cuda.get_device_name(where)} has no kernel for {spec.in_dtype} {what}")
        return choose_fastest(key_of(spec, dispatch.device_of(device)), found, timer=microseconds, table=table)


def candidates_for(spec: GemmSpec | ConvSpec, sets: Sequence[Operands], capability: tuple[int, int]) -> list[Candidate]:
    """What can compute ``spec`` on a GPU of this compute capability, each taking the sets of operands in turn."""
    a, b, _ = sets[0]
    usable = choices.candidates(
        spec,
        capability,
        tma_layout=dispatch.is_tma_layout(a, b),
        dense=dispatch.is_dense(a, b),
        triton_installed=dispatch.has_triton(),
        native=dispatch.native_names(capability),
    )
    return [_candidate(spec, sets, config) for config in usable]


def _candidate(spec: GemmSpec | ConvSpec, sets: Sequence[Operands], config: choices.AnyConfig) -> Candidate:
    turns = cycle(sets)
    return Candidate(
        name=config.name,
        run=lambda: dispatch.run_config(spec, *next(turns), config),
        error=lambda: largest_error(spec, sets[0], dispatch.run_config(spec, *sets[0], config)),
    )
