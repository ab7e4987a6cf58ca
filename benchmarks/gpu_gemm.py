"""Compares the speed of the fused GEMMs with cuBLASLt, a GEMM with a separate epilogue, and torch.compile.

Usage:

    python benchmarks/gpu_gemm.py                 # tunes, measures, writes benchmarks/results/gpu_gemm.json and .md
    python benchmarks/gpu_gemm.py --seconds 240   # less time: the most important rows come first
    python benchmarks/gpu_gemm.py --go-on         # adds the rows that an earlier run had no time for
    python benchmarks/gpu_gemm.py --warm 0/4      # only compiles the kernels of every fourth problem (0/4 to 3/4).

Each row computes act(a @ b + bias) on random data. Consecutive calls get different operands, so a call's operands
aren't in the L2 cache. The result files are written after every row, so an interrupted run keeps its results. The
measurements run in a separate process. If a kernel hangs or kills its process, the row records the failure, and a new
process measures the next row. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import supervised_rows
import torch

from accel.errors import AccelError, one_line
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import GemmSpec
from accel.kernels.choose import choices, dispatch, tune
from accel.kernels.choose.tuned import Table

RESULTS = Path(__file__).parent / "results"
# For each goal, the smallest measured ratio that meets the goal. The notes under the table explain the goals.
GOALS = {"cublaslt": 0.95, "unfused": 1.1, "copy": 0.7, "bf16": 1.6}
Run = Callable[[], object]
PADDED = 32  # _int_mm needs at least 17 rows, so matrices with fewer rows are padded to 32 rows


BERT = ((768, 768), (3072, 768), (768, 3072))  # (N, K) of each layer of BERT-base.
LLAMA = ((4096, 4096), (11008, 4096), (4096, 11008))  # (N, K) of each layer of a 7B decoder.


def problems() -> Iterator[tuple[GemmSpec, bool]]:
    """Yields the problems, the most important first. Each problem comes with a bool, which tells whether torch.compile
    is measured on the problem."""
    for dtype in ("bf16", "fp16", "int8", "fp8_e4m3"):
        for size in (4096, 8192):
            yield spec_of(size, size, size, dtype, "gelu_tanh"), dtype == "bf16"
    for m in (1, 16, 8):
        for n, k in LLAMA:
            yield spec_of(m, n, k, "bf16", "silu"), k == 4096 and m != 8
    for m in (512, 128, 64):
        for n, k in (*BERT, *LLAMA):
            yield spec_of(m, n, k, "bf16", "gelu_erf"), (n, k) in ((3072, 768), (11008, 4096)) and m != 128
    for m in (1, 16, 8):
        for n, k in BERT:
            yield spec_of(m, n, k, "bf16", "gelu_erf"), (m, n) == (16, 3072)
    for dtype in ("int8", "fp8_e4m3"):
        for m in (512, 128, 64, 16, 1):
            yield spec_of(m, 4096, 4096, dtype, "none"), False
        for m in (512, 16):
            for n, k in ((11008, 4096), (3072, 768)):
                yield spec_of(m, n, k, dtype, "none"), False
    for m in (512, 64, 16, 1):
        for n, k in ((4096, 4096), (3072, 768)):
            yield spec_of(m, n, k, "fp16", "gelu_erf"), False


def spec_of(m: int, n: int, k: int, dtype: str, act: str) -> GemmSpec:
    return GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=tune.epilogue_for(dtype, act))


def runs(spec: GemmSpec, sets: list[tune.Operands]) -> dict[str, Run]:
    """Returns the functions that are timed for comparison with the fused kernel, by name. For types other than int8
    and fp8, cuBLASLt adds the bias in its epilogue. The operands are brought to the layout of each library before the
    timing starts."""
    act = spec.epilogue.act
    out = reference.TORCH_DTYPES[spec.epilogue.out_dtype]

    def epilogue(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return reference.epilogue_torch(spec.epilogue, x, given)

    if spec.in_dtype == "int8":
        more = PADDED - spec.m if spec.m <= 16 else 0
        padded = [(torch.nn.functional.pad(a, (0, 0, 0, more)), b, given) for a, b, given in sets]
        both, apart = cycle(padded), cycle(padded)

        def product() -> object:
            a, b, _ = next(both)
            return torch._int_mm(a, b)

        def separate() -> object:
            a, b, given = next(apart)
            return epilogue(torch._int_mm(a, b)[: spec.m].float(), given).to(out)

        return {"cublaslt product only": product, "unfused": separate}
    if spec.in_dtype == "fp8_e4m3":
        scaled = [(a, b, g["row_scale"][:, None], g["col_scale"][None], g) for a, b, g in sets]
        both, apart = cycle(scaled), cycle(scaled)

        def product() -> object:
            a, b, row, column, _ = next(both)
            return torch._scaled_mm(a, b, scale_a=row, scale_b=column, out_dtype=torch.bfloat16)

        def separate() -> object:
            a, b, row, column, given = next(apart)
            x = torch._scaled_mm(a, b, scale_a=row, scale_b=column, out_dtype=torch.bfloat16)
            return reference.act_torch(act, x + given["bias"]).to(out)

        return {"cublaslt product only": product, "unfused": separate}
    plain = [(a, b, b.t(), g["bias"].to(out)) for a, b, g in sets]
    linear, matmul = cycle(plain), cycle(plain)

    def with_bias() -> object:
        a, _, weight, bias = next(linear)
        return torch.nn.functional.linear(a, weight, bias)

    def separate() -> object:
        a, b, _, bias = next(matmul)
        return reference.act_torch(act, a @ b + bias)

    return {"cublaslt with bias": with_bias, "unfused": separate}


def compiled(spec: GemmSpec, sets: list[tune.Operands]) -> Run:
    """Returns a function that runs the operation of ``spec``, compiled by torch.compile with max-autotune."""
    # torch.compile compiles the same function at most eight times, and the reset sets this count back to 0.
    torch._dynamo.reset()
    out = reference.TORCH_DTYPES[spec.epilogue.out_dtype]
    act = spec.epilogue.act
    function = torch.compile(lambda a, w, bias: reference.act_torch(act, torch.nn.functional.linear(a, w, bias)),
                             mode="max-autotune-no-cudagraphs", dynamic=False)  # fmt: skip
    turns = cycle([(a, b.t(), g["bias"].to(out)) for a, b, g in sets])
    return lambda: function(*next(turns))


def named(spec: GemmSpec, error: str = "") -> dict[str, Any]:
    """Returns a row without measurements, with ``error`` if the problem failed."""
    row = {"shape": [spec.m, spec.n, spec.k], "dtype": spec.in_dtype, "epilogue": spec.epilogue.key, "chosen": "none"}
    return row | {"us": {}} | ({"errors": {"row": error}} if error else {})


def measured(spec: GemmSpec, table: Table) -> dict[str, Any]:
    """Calls ``measure`` and returns its row. If ``measure`` raises, returns a row with the error, so that the next
    problems still run."""
    try:
        return measure(spec, table)
    except Exception as error:
        return named(spec, one_line(error, 200))


def gpu_answers() -> bool:
    """Tells whether the GPU still works in this process. After an illegal access, the GPU no longer works in the
    process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def measure(spec: GemmSpec, table: Table) -> dict[str, Any]:
    """Returns one row: microseconds of each implementation, the chosen kernel, and the kernel's numerical error divided
    by the error bound."""
    device = torch.device("cuda")
    sets = tune.rotated_operands(spec, device)
    tuned = tune.tune(spec, table)
    choice = dispatch.choose_for(spec, *sets[0])
    row = named(spec) | {
        "chosen": str(choice),
        "error_over_bound": tuned.entry.error if tuned.entry else None,
        "refused": dict(tuned.refused),
        "candidates_us": {name: us for name, us in tuned.timed.items() if name not in tuned.refused},
    }
    turns = cycle(sets)

    def fused() -> object:
        a, b, given = next(turns)
        return dispatch.run_gemm(spec, a, b, given)

    if tuned.entry is None:
        row["errors"] = {"fused": "no kernel computes this right: see refused"}
    else:
        timed(row, "fused", fused)
    for name, run in runs(spec, sets).items():
        timed(row, name, run)
    return row


def uncompiled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows without a torch.compile time, in order."""
    asked = {((s.m, s.n, s.k), s.in_dtype) for s, with_compile in problems() if with_compile}
    return [
        row
        for row in rows
        if (tuple(row["shape"]), row["dtype"]) in asked and "torch.compile" not in row["us"] | row.get("errors", {})
    ]


def timed(row: dict[str, Any], name: str, run: Run) -> None:
    """Times ``run`` and adds the microseconds to the row. If ``run`` raises, adds the error to the row instead."""
    try:
        row["us"][name] = tune.microseconds(run)
    except Exception as error:
        row.setdefault("errors", {})[name] = one_line(error, 200)


def warm(part: int, of: int) -> None:
    """Fills Triton's cache of compiled kernels. Divides the problems into ``of`` parts, and runs each candidate kernel
    of one part once."""
    capability = torch.cuda.get_device_capability()
    names = dispatch.native_names(capability)
    for spec, _ in list(problems())[part::of]:
        a, b, given = tune.operands_for(spec, torch.device("cuda"))
        layout = {"tma_layout": dispatch.is_tma_layout(a, b), "dense": dispatch.is_dense(a, b)}
        for config in choices.candidates(spec, capability, **layout, native=names):
            with contextlib.suppress(AccelError, RuntimeError):  # the tuner will report this error
                dispatch.run_config(spec, a, b, given, config)
    torch.cuda.synchronize()


def copy_gigabytes_per_second() -> float:
    """Returns the bytes that a copy of 1 GiB reads and writes per second."""
    x = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / tune.microseconds(lambda: y.copy_(x)) / 1000


def judged(rows: list[dict[str, Any]], copy: float) -> list[dict[str, Any]]:
    """Returns each row with its speeds and its goals. ``goals`` maps a goal's name to (ratio, met)."""
    fused = {(tuple(r["shape"]), r["dtype"]): r["us"].get("fused") for r in rows}
    found = []
    for row in rows:
        m, n, k = row["shape"]
        us = row["us"].get("fused")
        if us is None:
            found.append({**row, "goals": {}})
            continue
        spec = spec_of(m, n, k, row["dtype"], row["epilogue"].partition("+")[0])
        ratios: dict[str, float] = {}
        library = next((value for name, value in row["us"].items() if name.startswith("cublaslt")), None)
        if m >= 4096 and library:
            ratios["cublaslt"] = library / us
        if "unfused" in row["us"]:
            ratios["unfused"] = row["us"]["unfused"] / us
        if m <= 16:
            ratios["copy"] = spec.bytes_moved / us / 1000 / copy
        bf16 = fused.get(((m, n, k), "bf16"))
        if row["dtype"] in ("int8", "fp8_e4m3") and m >= 4096 and bf16:
            ratios["bf16"] = bf16 / us
        goals = {name: [round(ratio, 3), ratio >= GOALS[name]] for name, ratio in ratios.items()}
        speed = {"tflops": spec.flops / us / 1e6, "gigabytes_per_second": spec.bytes_moved / us / 1000}
        found.append({**row, **speed, "goals": goals})
    return found


def markdown(body: dict[str, Any]) -> str:
    lines = [
        "# Fused products on a GPU",
        "",
        f"{body['gpu']}, driver {body['driver']}, torch {body['torch']}, copy {body['copy_gb_s']:.0f} GB/s. Median of "
        f"{tune.BLOCKS} replays of a CUDA graph of many calls (what Python takes to launch them isn't in it), rotated "
        f"operands. `python benchmarks/gpu_gemm.py`; {body['date']}.",
        "",
        "| M, N, K | dtype, epilogue | chosen | us | TFLOP/s | GB/s | cuBLASLt us | unfused us | compile us | goals |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in body["rows"]:
        us = row["us"]
        library = next((value for name, value in us.items() if name.startswith("cublaslt")), None)
        numbers = [us.get("fused"), row.get("tflops"), row.get("gigabytes_per_second"), library]
        numbers += [us.get("unfused"), us.get("torch.compile")]
        cells = [f"{number:.1f}" if number is not None else "-" for number in numbers]
        goals = ", ".join(f"{name} {r:.2f}x {'met' if met else 'MISSED'}" for name, (r, met) in row["goals"].items())
        shape = ", ".join(map(str, row["shape"]))
        chosen = row["chosen"].partition(":")[0]
        lines.append(f"| {shape} | {row['dtype']} {row['epilogue']} | {chosen} | {' | '.join(cells)} | {goals} |")
    lines += [
        "",
        "Goals: at least 0.95x of cuBLASLt at M of 4096 and more (F.linear with its bias; _int_mm and _scaled_mm: the "
        "product alone), at least 1.1x of product and epilogue apart everywhere, at least 0.7 of the copy's bandwidth "
        "at M of 16 and less, int8 and fp8 at least 1.6x of bf16 at M of 4096 and more.",
        "",
        f"int8 at M of 16 and less: _int_mm takes no fewer than 17 rows and is given {PADDED}, of which the rest are "
        "zeros. A dash under compile: torch.compile (max-autotune) is timed for some rows only.",
    ]
    failed = [(row, name, text) for row in body["rows"] for name, text in row.get("errors", {}).items()]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- {', '.join(map(str, row['shape']))} {row['dtype']}, {name}: {text}" for row, name, text in failed]
    if body["left"]:
        lines += ["", f"Not measured, the time was over: {body['left']} of {body['left'] + len(body['rows'])} rows."]
    if late := [f"{', '.join(map(str, row['shape']))} {row['dtype']}" for row in uncompiled(body["rows"])]:
        lines += ["", f"Not timed with torch.compile, the time was over: {'; '.join(late)}."]
    return "\n".join(lines) + "\n"


def write(body: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in (("gpu_gemm.json", json.dumps(body, indent=1) + "\n"), ("gpu_gemm.md", markdown(body))):
        temporary = folder / f".{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


def part_of(text: str) -> tuple[int, int]:
    part, _, of = text.partition("/")
    if not (part.isdecimal() and of.isdecimal() and int(part) < int(of)):
        raise argparse.ArgumentTypeError(f"invalid part {text!r}; write 0/4, 1/4, 2/4 or 3/4")
    return int(part), int(of)


def read(folder: Path) -> dict[str, Any]:
    """Returns the results written so far, or an empty dict if there is no file."""
    file = folder / "gpu_gemm.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def supervise(
    command: Sequence[str], seconds: float, folder: Path, stalled: float = supervised_rows.STALLED, go_on: bool = False
) -> int:
    """Runs ``command`` with ``supervised_rows.supervise``. If a row kills the process or exceeds ``stalled`` seconds,
    the row is recorded as failed. torch.compile is measured after all rows, so a crash after the last row is recorded
    as an error of torch.compile."""

    def blame(why: str) -> bool:
        body = read(folder)
        if body["left"]:
            spec = list(problems())[len(body["rows"])][0]
            body |= {"rows": [*body["rows"], named(spec, why) | {"goals": {}}], "left": body["left"] - 1}
        elif waiting := uncompiled(body["rows"]):
            waiting[0].setdefault("errors", {})["torch.compile"] = why
        else:  # every row was measured, with and without torch.compile
            return False
        write(body, folder)
        return True

    return supervised_rows.supervise(command, seconds, folder / "gpu_gemm.json", blame, stalled, go_on)


def earlier(folder: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of an earlier run, so that this run can add rows.

    Exits if the earlier run measured other problems, or if its GPU or library versions differ from ``here``.
    """
    before = read(folder)
    other = [name for name, value in here.items() if before and before.get(name) != value]
    rows = [(row["shape"], row["dtype"]) for row in before.get("rows", ())]
    if rows != [([s.m, s.n, s.k], s.in_dtype) for s, _ in problems()][: len(rows)]:
        other.append("rows")
    if other:
        file = folder / "gpu_gemm.json"
        raise SystemExit(
            f"this run can't add rows to the file {file}, because the file has other values of {', '.join(other)}; "
            "leave out --go-on to replace the file"
        )
    return before


def run(seconds: float, folder: Path, go_on: bool) -> None:
    """Measures in this process all rows that have no result yet."""
    started = time.monotonic()
    device = dispatch.device_of(torch.cuda.current_device())
    here = {
        "gpu": device.gpu,
        "driver": device.driver,
        "torch": torch.__version__,
        "library": device.library,
        "native": len(dispatch.native_names(device.capability)),
    }
    before = earlier(folder, here) if go_on else {}
    rows: list[dict[str, Any]] = list(before.get("rows", ()))
    copy, table = before.get("copy_gb_s") or copy_gigabytes_per_second(), Table()
    wanted = list(problems())

    def left() -> float:
        return seconds - (time.monotonic() - started)

    def report() -> None:
        body = here | {
            "copy_gb_s": copy,
            "date": time.strftime("%Y-%m-%d"),
            "left": len(wanted) - len(rows),
            "rows": judged(rows, copy),
        }
        write(body, folder)

    report()
    for spec, _ in wanted[len(rows) :]:
        if left() < 0:
            break
        rows.append(measured(spec, table))
        report()
        print(f"{spec.m}x{spec.n}x{spec.k} {spec.in_dtype}: {rows[-1]['us'] or rows[-1]['errors']}", flush=True)
        if not gpu_answers():
            raise SystemExit(supervised_rows.LOST)
    # torch.compile is measured last, because its tuning takes up to a minute per problem.
    waiting = uncompiled(rows)
    for row, (spec, _) in zip(rows, wanted, strict=False):
        if row in waiting and left() > 60:
            timed(row, "torch.compile", compiled(spec, tune.rotated_operands(spec, torch.device("cuda"))))
            report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=480.0, help="no new row is started after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--warm", metavar="I/N", type=part_of, help="only compile the kernels of every N-th problem")
    parser.add_argument("--here", action="store_true", help="in this process, which a kernel may take down")
    parser.add_argument("--go-on", action="store_true", help="add to the results that are there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU here: not run")
    if options.warm:
        warm(*options.warm)
    elif options.here:
        run(options.seconds, options.out, options.go_on)
    else:
        command = [sys.executable, __file__, "--here", "--out", str(options.out)]
        raise SystemExit(supervise(command, options.seconds, options.out, go_on=options.go_on))


if __name__ == "__main__":
    main()
