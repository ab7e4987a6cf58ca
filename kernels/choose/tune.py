"""Times every configuration of a problem, and verifies the fastest configuration before storing the result.

``choose_fastest`` picks one of the given candidates with the given timer. ``tune`` calls ``choose_fastest`` with the
kernels of a product or a convolution on this machine's GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from accel.errors import AccelError, UnknownName, UnsupportedHere, one_line

from ..catalogue import reference
from ..catalogue.reference import TORCH_DTYPES
from ..catalogue.spec import SCALED, ConvSpec, EpilogueSpec, GemmSpec
from . import choices, dispatch
from .tuned import Entry, Key, Table, key_of

Run = Callable[[], object]
Operands = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# The sizes (N, K) of the matrix products in BERT-base and in a decoder with 7 billion parameters.
LAYERS = ((768, 768), (3072, 768), (768, 3072), (4096, 4096), (11008, 4096), (4096, 11008))
ROWS = (1, 16, 128, 1024, 4096)
# The convolutions of ResNet-50 at a batch of 8: the first convolution, the 3x3 convolution of each stage, and the 3x3
# convolutions between two stages.
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
ROTATED_BYTES = 256 << 20  # larger than any GPU's L2 cache, so that each call reads its operands from memory
BLOCK_MICROSECONDS = 10_000.0
# In calls that take less than LAUNCH_MICROSECONDS, most of the time may be Python's overhead.
LAUNCH_MICROSECONDS = 500.0
# The operands of the smallest layer of BERT-base take 1 MiB, so 256 sets of operands fill ROTATED_BYTES.
MOST_SETS = 256
# Short calls are recorded in a CUDA graph, one call for each set of operands, so that a replay takes milliseconds.
RECORDED_CALLS = MOST_SETS
BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Describes a configuration that the tuner may choose.

    ``run`` is the timed call. ``error`` runs the kernel once more and returns the largest ratio of an error to its
    bound.
    """

    name: str
    run: Run
    error: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Holds the result of tuning a problem.

    ``entry`` is the fastest correct candidate, or None if no candidate was correct. ``timed`` maps each candidate to
    its time in microseconds. ``refused`` maps each refused candidate to the reason. A candidate is refused if it
    failed, or if it was fast but its result was wrong.
    """

    key: Key
    entry: Entry | None
    timed: Mapping[str, float]
    refused: Mapping[str, str]


def choose_fastest(key: Key, candidates: Sequence[Candidate], *, timer: Callable[[Run], float], table: Table) -> Tuned:
    """Times every candidate, then verifies the candidates, starting with the fastest. Puts the first correct candidate
    into ``table``.

    ``timer`` returns the time of a call in microseconds. Refuses a candidate that fails or has an error over the bound.
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
        if not ratio <= 1:  # also True for NaN
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
    """Returns the products to tune. By default, ``shapes`` (M, N, K) has the layers of BERT-base and of a decoder with
    7 billion parameters.

    ``added`` lists the terms that are added to the product. Each term is one of ``ADDED``. Products in int8 and fp8 are
    tuned for fp16 and bf16 output. Raises ``UnknownName`` for an unknown term.
    """
    for words in added:
        if words not in ADDED:
            raise UnknownName(f"the term {words!r} can't be added to a product; use one of {', '.join(ADDED)}")
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
    """Returns the convolutions to tune, with the sizes and strides from ``shapes`` and the dtypes and epilogues from
    ``specs``.

    Leaves out the row scale, which a convolution doesn't have.
    """
    epilogues = [
        (s.in_dtype, replace(s.epilogue, row_scale=False)) for s in specs(dtypes, acts, [(1, 1, 1)], added=added)
    ]
    return [replace(shape, in_dtype=dtype, epilogue=epilogue) for shape in shapes for dtype, epilogue in epilogues]


def epilogue_for(dtype: str, act: str, added: str = "bias", out_dtype: str | None = None) -> EpilogueSpec:
    """Returns a layer's epilogue, with the activation ``act`` and the term ``added``, which is one of ``ADDED``.

    For int8 and fp8, the epilogue has scales, and its output is fp16 by default.
    """
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
    """Returns random operands, which are ``a`` (M, K), ``b`` (K, N) and a dict with the epilogue's operands by name.
    ``b`` is the transpose of a dense matrix.

    For a convolution, ``a`` is the image and ``b`` the weights. The operands are small enough that the output of
    ``spec`` stays in the range of fp16.
    """
    g = torch.Generator(device).manual_seed(seed)
    product = spec.gemm if isinstance(spec, ConvSpec) else spec

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device)

    # Unscaled int8 sums would overflow fp16. If the int8 numbers are below 16, the sums fit in fp16 for K up to about
    # ten thousand.
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
    """Returns several sets of operands. All sets together have at least ``ROTATED_BYTES`` bytes, so that no call finds
    its operands in a cache.

    Returns at most ``MOST_SETS`` sets, even if all sets together have fewer bytes than ``ROTATED_BYTES``.
    """
    first = operands_for(spec, device)
    bytes_each = sum(operand.numel() * operand.element_size() for operand in first[:2])
    count = max(2, min(MOST_SETS, -(-ROTATED_BYTES // bytes_each)))
    return [first, *(operands_for(spec, device, seed) for seed in range(1, count))]


def largest_error(spec: GemmSpec | ConvSpec, operands: Operands, got: torch.Tensor) -> float:
    """Divides the error of each element of ``got`` by the bound on this error, and returns the largest ratio. The
    float64 reference counts as exact.

    Returns infinity for a NaN or a wrong shape. Checks at most 256 rows (output pixels of a convolution), spread over
    all rows, because a GPU needs seconds for a large product in float64.
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
    """Returns the patches of some output pixels of a convolution, with the shape (pixels, K). ``rows`` has the indices
    of the pixels."""
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
    """Returns ``x`` viewed as integers of the same size.

    Few operators take float8 tensors. In some versions of torch, float8 tensors can't even be indexed.
    """
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def fp8_sum_error(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the rounding error of the sums in fp8 tensor cores. The caller adds this error to the bound.

    The tensor cores keep about 14 bits of a sum (DeepSeek-V3 report, section 3.3.2). After every four steps along K,
    the sum in the tensor cores is added to a second sum, which is in fp32. Each step can add an error of 2**-13 of the
    largest partial sum.
    """
    magnitude = a.double().abs() @ b.double().abs()
    for name, dim in (("row_scale", 1), ("col_scale", 0)):
        if name in given:
            magnitude = magnitude * given[name].double().abs().unsqueeze(dim)
    return reference.SLOPE[spec.epilogue.act] * 4 * 2.0**-13 * magnitude


def microseconds(run: Run) -> float:
    """Returns the median time of a call on the current GPU in microseconds. CUDA events measure the time of several
    blocks of calls.

    Replays a CUDA graph of the calls, because Python's overhead for a launch often takes longer than the kernel. Calls
    ``run`` directly if the calls can't be recorded.
    """

    def block(calls: int, step: Run = run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / calls

    block(3)  # these first calls compile the kernel and raise the GPU's clocks
    once = max(block(3), 0.1)
    calls = max(3, min(1000, int(BLOCK_MICROSECONDS / once)))
    if once < LAUNCH_MICROSECONDS:
        calls = max(calls, RECORDED_CALLS)  # the time of a single short call is mostly the time of its launch
    replay = recorded(run, calls)
    if replay is None:
        return statistics.median(block(calls) for _ in range(BLOCKS))
    block(1, replay)  # the first replay moves the graph to the GPU
    return statistics.median(block(1, replay) / calls for _ in range(BLOCKS))


def recorded(run: Run, calls: int) -> Run | None:
    """Records a CUDA graph that calls ``run`` as often as ``calls`` says, and returns the graph's replay. Returns None
    if the calls can't be recorded."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        # The function torch.cuda.graph would empty the allocator's cache each time.
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")  # lets other threads call CUDA during the capture
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
    """Chooses the fastest correct configuration for ``spec`` on the GPU ``device``, with dense operands.

    Raises ``UnsupportedHere`` if there is no GPU, or if no configuration fits the problem and the GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedHere("no NVIDIA GPU here; run accel kernels tune on a machine that has an NVIDIA GPU")
    where = torch.device("cuda", device)
    with torch.cuda.device(where):
        sets = rotated_operands(spec, where)
        found = candidates_for(spec, sets, torch.cuda.get_device_capability(where))
        if not found:
            what = "convolutions" if isinstance(spec, ConvSpec) else "products"
            raise UnsupportedHere(
                f"accel has no kernel for {spec.in_dtype} {what} on the GPU {torch.cuda.get_device_name(where)}"
            )
        return choose_fastest(key_of(spec, dispatch.device_of(device)), found, timer=microseconds, table=table)


def candidates_for(spec: GemmSpec | ConvSpec, sets: Sequence[Operands], capability: tuple[int, int]) -> list[Candidate]:
    """Returns the candidates for ``spec`` on a GPU of this compute capability.

    Each candidate runs on the sets of operands in turn.
    """
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
