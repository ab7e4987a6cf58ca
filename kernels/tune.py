"""Finding the fastest configuration of a problem: every candidate timed, the winner verified before it is remembered.

``choose_fastest`` is the decision, with the timer and the candidates handed in; ``tune_gemm`` hands in the kernels and
the GPU that is there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from accel.errors import AccelError, UnknownName, UnsupportedHere
from accel.kernels import dispatch, reference
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import BYTES, SCALED, EpilogueSpec, GemmSpec
from accel.kernels.tuned import Entry, Key, Table, key_of

Run = Callable[[], object]
Operands = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# The products of BERT-base, and of a 7B decoder: N, K.
LAYERS = ((768, 768), (3072, 768), (768, 3072), (4096, 4096), (11008, 4096), (4096, 11008))
ROWS = (1, 16, 128, 1024, 4096)
ADDED = ("none", "bias", "residual", "bias+residual")
ROTATED_BYTES = 256 << 20  # more than the L2 of any GPU: each call finds its operands in memory
BLOCK_MICROSECONDS = 10_000.0
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
            refused[candidate.name] = _one_line(error)
    fit = [candidate for candidate in candidates if candidate.name in timed]
    for candidate in sorted(fit, key=lambda one: timed[one.name]):
        try:
            ratio = candidate.error()
        except (AccelError, RuntimeError) as error:
            refused[candidate.name] = _one_line(error)
            continue
        if not ratio <= 1:  # a NaN is not
            refused[candidate.name] = f"its error is {ratio:.3g} times the bound"
            continue
        entry = Entry(config=candidate.name, microseconds=timed[candidate.name], error=ratio)
        table.put(key, entry)
        return Tuned(key=key, entry=entry, timed=timed, refused=refused)
    return Tuned(key=key, entry=None, timed=timed, refused=refused)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


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


def operands_for(spec: GemmSpec, device: torch.device, seed: int = 0) -> Operands:
    """Random operands: ``a`` (M, K), ``b`` (N, K) transposed, the epilogue's by name; sums stay within fp16."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device)

    def matrix(rows: int) -> torch.Tensor:
        if spec.in_dtype == "int8":
            return torch.randint(-128, 128, (rows, spec.k), generator=g, device=device, dtype=torch.int8)
        return normal(rows, spec.k).to(TORCH_DTYPES[spec.in_dtype])

    size = 0.001 if spec.in_dtype == "int8" else 0.1
    made = {
        "bias": normal(spec.n),
        "residual": normal(spec.m, spec.n).to(TORCH_DTYPES[spec.epilogue.out_dtype]),
        "row_scale": size * (0.5 + torch.rand(spec.m, generator=g, device=device)),
        "col_scale": size * (0.5 + torch.rand(spec.n, generator=g, device=device)),
    }
    return matrix(spec.m), matrix(spec.n).t(), {name: made[name] for name in spec.epilogue.operands}


def rotated_operands(spec: GemmSpec, device: torch.device) -> list[Operands]:
    """Several sets of operands, together larger than any cache: taken in turn, no call finds its own there."""
    bytes_each = (spec.m + spec.n) * spec.k * BYTES[spec.in_dtype]
    return [operands_for(spec, device, seed) for seed in range(max(2, min(64, ROTATED_BYTES // bytes_each)))]


def largest_error(spec: GemmSpec, operands: Operands, got: torch.Tensor) -> float:
    """The largest error of ``got`` over its bound, against the float64 reference; infinite for a NaN or a wrong shape.

    At most 256 rows are looked at, spread over all: a float64 product of a large problem takes a GPU seconds.
    """
    a, b, given = operands
    if got.shape != (spec.m, spec.n) or got.dtype != TORCH_DTYPES[spec.epilogue.out_dtype]:
        return float("inf")
    rows = torch.arange(spec.m, device=a.device)
    if spec.m > 256:
        rows = torch.linspace(0, spec.m - 1, 256, device=a.device).long()
    part = GemmSpec(m=len(rows), n=spec.n, k=spec.k, in_dtype=spec.in_dtype, epilogue=spec.epilogue)
    cut = {name: t[rows] if name in ("row_scale", "residual") else t for name, t in given.items()}
    exact = reference.gemm_torch(part, a[rows], b, cut)
    bound = reference.gemm_bound(part, a[rows], b, cut)
    if spec.in_dtype == "fp8_e4m3":
        bound = bound + fp8_sum_error(part, a[rows], b, cut)
    return reference.error_over_bound(got[rows], exact, bound)


def fp8_sum_error(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the sums of fp8 tensor cores add to the bound: they keep about 14 bits (DeepSeek-V3 report, section 3.3.2),
    2**-13 of the largest partial sum, for each of the four steps before the sum is added up in fp32."""
    magnitude = a.double().abs() @ b.double().abs()
    for name, dim in (("row_scale", 1), ("col_scale", 0)):
        if name in given:
            magnitude = magnitude * given[name].double().abs().unsqueeze(dim)
    return reference.SLOPE[spec.epilogue.act] * 4 * 2.0**-13 * magnitude


def microseconds(run: Run) -> float:
    """The median time of a call on the current GPU: several blocks of calls between two events each."""

    def block(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / calls

    block(3)  # compiles, and wakes the clocks
    calls = max(3, min(1000, int(BLOCK_MICROSECONDS / max(block(3), 0.1))))
    return statistics.median(block(calls) for _ in range(BLOCKS))


def tune_gemm(spec: GemmSpec, table: Table, *, device: int = 0) -> Tuned:
    """``spec`` on the GPU ``device``, dense operands, every configuration that there is for it.

    Raises ``UnsupportedHere`` without a GPU, or where it has no configuration for the problem.
    """
    if not torch.cuda.is_available():
        raise UnsupportedHere("no NVIDIA GPU here; accel kernels tune times the kernels on the GPU that is there")
    where = torch.device("cuda", device)
    with torch.cuda.device(where):
        sets = rotated_operands(spec, where)
        capability = torch.cuda.get_device_capability(where)
        usable = dispatch.candidates(
            spec,
            capability,
            tma_layout=dispatch.is_tma_layout(*sets[0][:2]),
            triton_installed=dispatch.has_triton(),
            native=dispatch.native_names(capability),
        )
        if not usable:
            raise UnsupportedHere(f"{torch.cuda.get_device_name(where)} has no kernel for {spec.in_dtype} products")
        found = [_candidate(spec, sets, config) for config in usable]
        return choose_fastest(key_of(spec, dispatch.device_of(device)), found, timer=microseconds, table=table)


def _candidate(spec: GemmSpec, sets: Sequence[Operands], config: dispatch.AnyConfig) -> Candidate:
    turns = cycle(sets)
    return Candidate(
        name=config.name,
        run=lambda: dispatch.run_config(spec, *next(turns), config),
        error=lambda: largest_error(spec, sets[0], dispatch.run_config(spec, *sets[0], config)),
    )
