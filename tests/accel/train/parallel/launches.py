"""Launches ``suite`` with the checks that the collected tests need."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.accel.train.parallel import rows

# Maps each launch to a dict. The dict maps a key to the names of the checks to run.
Orders = dict[str, dict[str, list[str]]]
# Maps each test to a key in suite.PARTS. The test checks the results under this key.
NEEDS = {
    "test_parity": "parity",
    "test_what_a_row_names_is_on": "parity",
    "test_the_parity_table_is_of_these_rows": "parity",
    "test_gradients_equal_under_uneven_targets": "gradients",
    "test_final_weights_are_the_trained_ones": "final",
    "test_a_wrong_layout_is_said": "refused",
    "test_rounding_is_no_wrong_layout": "refused",
    "test_bytes_a_rank_equal_the_formula": "bytes",
    "test_stages_send_what_the_plan_says": "pipeline",
    "test_experts_take_what_the_plan_says": "experts",
    "test_an_overflow_on_one_rank_skips_the_step_on_all": "spiky",
    "test_a_weight_that_is_no_number_is_named_by_all_ranks": "not a number",
    "test_all_ranks_pass_over_one_ranks_damaged_shard": "damaged",
    "test_what_adamw_holds_is_cut_anew": "adamw",
    "test_resuming_on_another_layout": "resumed",
    "test_resuming_on_one_process": "final",
    "test_power_sgd_is_resumed_with_its_memory": "power_sgd",
    "test_context_parallel_keeps_and_sends_what_the_plan_says": "context parallel",
    "test_tensor_parallel_keeps_what_the_plan_says": "tensor parallel",
}


def orders(items: Iterable[pytest.Item], folder: Path) -> Orders:
    """Returns a dict for each launch. The dict maps a key to the names of the checks that the collected tests in
    ``folder`` need. The launches are "world2", "world4", "world8" and "again". The launch "again" has world size 2 and
    runs after "world4"."""
    orders: dict[int, dict[str, list[str]]] = {world: {} for world in rows.WORLDS}
    for item in items:
        if not (isinstance(item, pytest.Function) and item.path.parent == folder):
            continue
        key, callspec = NEEDS.get(item.originalname), getattr(item, "callspec", None)
        if key is None:
            continue
        params = callspec.params if callspec is not None else {}
        name = str(params.get("name", ""))
        if key == "resumed":  # "world4 hsdp -> 2 ddp" needs the checkpoint that world size 4 saved
            world = int(name.partition("-> ")[2][0])
            orders[int(name[5])].setdefault("final", [])
        else:
            world = params.get("world", {"refused": 2, "bytes": 4, "experts": 4}.get(key, 0))
        both = (2, 4) if key in ("adamw", "power_sgd") or not world else (world,)
        for one in both:
            named = orders[one].setdefault(key, [])
            if name and name not in named:
                named.append(name)
    if "power_sgd" in orders[2]:
        orders[4].pop("power_sgd")
        orders[2]["power_sgd resumed"] = orders[4]["power_sgd resumed"] = []
    # A separate launch of world size 2 resumes from the checkpoints of world size 4.
    both = orders[2].pop("resumed", [])
    later = [name for name in both if name.startswith("world4")]
    found = {f"world{world}": order for world, order in orders.items()}
    if len(both) > len(later):
        found["world2"]["resumed"] = [name for name in both if name not in later]
    if later:
        found["again"] = {"resumed": later}
    return {home: order for home, order in found.items() if order}


def launch(orders: Orders, folder: Path) -> None:
    """Runs ``orders``. Each launch writes its results to the folder ``folder/LAUNCH``."""
    for home, order in orders.items():
        other = {"world4": "world2", "again": "world4"}.get(home, home)
        _ranks(_world(home), folder / home, order, [folder / other])


def read(orders: Orders, folder: Path) -> dict[int, dict[str, Any]]:
    """Returns a dict that maps each world size to the results of rank 0. The key "ranks" in these results holds the
    results of all ranks."""
    found: dict[int, dict[str, Any]] = {
        world: {"ranks": [], "folder": folder / f"world{world}"} for world in rows.WORLDS
    }
    for home in orders:
        world = _world(home)
        ranks = [json.loads((folder / home / f"rank-{rank}.json").read_text()) for rank in range(world)]
        if home == "again":
            found[world].setdefault("resumed", {}).update(ranks[0]["resumed"])
        else:
            found[world] |= {**ranks[0], "ranks": ranks}
    return found


def _world(home: str) -> int:
    return 2 if home == "again" else int(home.removeprefix("world"))


def _ranks(world: int, out: Path, order: dict[str, list[str]], others: list[Path]) -> None:
    """Starts ``world`` ranks without torchrun and waits until they end. Other tests cover torchrun."""
    out.mkdir(exist_ok=True)
    (out / "order.json").write_text(json.dumps({"folder": str(out), "others": [str(path) for path in others], **order}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    everywhere = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "tests.accel.train.parallel.suite", str(out / "order.json")]
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        with (out / f"said-{rank}").open("w") as said:
            environment = {**os.environ, **everywhere, **address, **own}
            ranks.append(subprocess.Popen(line, env=environment, stdout=said, stderr=said))
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:  # kills ranks that still wait for a failed rank
            rank.kill()
            rank.wait()
    texts = [(out / f"said-{rank}").read_text() for rank in range(world)]
    assert not any(rank.returncode for rank in ranks), "\n".join(
        f"rank {i}: {text[-3000:]}" for i, text in enumerate(texts)
    )


def marked(cases: Iterable[tuple[Any, ...]], fast: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns ``cases`` as pytest parameters. `make test` runs only the cases in ``fast``, and `make proof` runs the
    other cases."""
    fast, cases = list(fast), list(cases)
    assert set(fast) <= set(cases), set(fast) - set(cases)
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.proof) for case in cases]


def marked_one(cases: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """Returns ``cases`` as pytest parameters, like ``marked``, if each case is a single string."""
    return marked(((case,) for case in cases), ((case,) for case in fast))


def named(table: Mapping[int, Iterable[str]]) -> list[tuple[int, str]]:
    """Returns a pair of world size and name for each name in ``table``."""
    return [(world, name) for world, names in table.items() for name in names]
