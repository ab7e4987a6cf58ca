"""Rewrites a model as the error message of accel.export advises, in a copy of the model's source."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .case import Case, make


@dataclass(frozen=True)
class Rewrite:
    """The change that a message asks for: in the source of ``module``, the texts of ``changes`` are replaced. The
    message has to contain ``advice``, and to name a line of the first text.

    ``more`` adds inputs to the arguments of a call, and ``dynamic`` names their dynamic axes. ``arbitrary`` says why
    the model's own outputs are one choice of several. The rewritten model makes another choice, so its outputs aren't
    compared with those of the original model.
    """

    module: str
    advice: str
    changes: Sequence[tuple[str, str]]
    more: Callable[[Any], Any] | None = None
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    arbitrary: str = ""


_DRAWN = "; make them an input of forward, or take them out of the model"
REWRITES = {
    ("own", "branch-on-values"): Rewrite(
        module="zoo_models.own.control",
        advice="write `torch.where(x.mean() > 0, self.a(x), -x)` instead of `self.a(x) if x.mean() > 0 else -x`",
        changes=[
            (
                "        return self.a(x) if x.mean() > 0 else -x\n",
                "        return torch.where(x.mean() > 0, self.a(x), -x)\n",
            )
        ],
    ),
    ("own", "random-noise"): Rewrite(
        module="zoo_models.own.control",
        advice=_DRAWN,
        changes=[
            ("        return x + torch.randn_like(x)\n", "        return x + noise\n"),
            (
                '    """Draws random numbers in evaluation mode."""\n\n'
                "    def forward(self, x: torch.Tensor) -> torch.Tensor:\n",
                "    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:\n",
            ),
        ],
        more=lambda arguments: (*arguments, torch.randn_like(arguments[0])),
        arbitrary="the outputs are random",
    ),
    ("own", "dropout-on"): Rewrite(
        module="zoo_models.own.control",
        advice=_DRAWN,
        changes=[
            (
                "    def forward(self, x: torch.Tensor) -> torch.Tensor:\n"
                "        return self.a(nn.functional.dropout(x, 0.5, training=True))\n",
                "    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:\n"
                "        return self.a(x * kept / 0.5)\n",
            )
        ],
        more=lambda arguments: (*arguments, (torch.rand_like(arguments[0]) < 0.5).float()),
        arbitrary="the outputs are random",
    ),
    ("transformers", "vit_mae"): Rewrite(
        module="transformers.models.vit_mae.modeling_vit_mae",
        advice=_DRAWN,
        changes=[
            (
                "            noise = torch.rand(batch_size, seq_length, device=sequence.device)\n",
                "            noise = torch.zeros(batch_size, seq_length, device=sequence.device)\n",
            )
        ],
        more=lambda arguments: {**arguments, "noise": torch.rand(len(arguments["pixel_values"]), 16)},
        dynamic={"noise": {0: "batch"}},
        arbitrary="the outputs are random",
    ),
    ("transformers", "afmoe"): Rewrite(
        module="transformers.models.afmoe.modeling_afmoe",
        advice="make the scores differ by more than rounding first (e.g. scores - 1e-3 * torch.arange(",
        changes=[
            (
                "        _, selected_experts = torch.topk(scores + expert_bias, k=self.top_k, dim=1)\n",
                "        biased = scores + expert_bias\n"
                "        biased = biased - 1e-3 * torch.arange(biased.shape[-1])\n"
                "        _, selected_experts = torch.topk(biased, k=self.top_k, dim=1)\n",
            )
        ],
        arbitrary="the routers start with zeros, so all experts have equal scores",
    ),
    ("transformers", "fsmt"): Rewrite(
        module="transformers.models.fsmt.modeling_fsmt",
        advice="keep a tensor in both cases, such as a mask that changes nothing, instead of",
        changes=[
            (
                "    if not padding_mask.any():\n        padding_mask = None\n    return padding_mask\n",
                "    return padding_mask\n",
            )
        ],
    ),
    ("transformers", "switch_transformers"): Rewrite(
        module="transformers.models.switch_transformers.modeling_switch_transformers",
        advice="compute all rows at once, by a mask with torch.where instead of `for expert_idx in expert_hit`",
        changes=[
            (
                "        for expert_idx in expert_hit:\n"
                "            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))\n"
                "            current_state = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])\n"
                '            current_hidden_states = self[f"expert_{expert_idx[0]}"](current_state) * '
                "routing_weights[top_x, idx, None]\n"
                "            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))\n",
                "        for number in range(self.num_experts):\n"
                '            found = self[f"expert_{number}"](hidden_states) * routing_weights\n'
                "            rows = expert_mask[number, 0, :, None] > 0\n"
                "            found = torch.where(rows, found, torch.zeros_like(found))\n"
                "            final_hidden_states = final_hidden_states + found\n",
            )
        ],
    ),
}


def rewritten(family: str, name: str, original: Case, message: str, folder: Path) -> Case | None:
    """Returns the model ``original`` with the change that ``message`` advises, and with the same weights. Returns None
    if the message doesn't advise the change in ``REWRITES``, or names another line. Writes the changed source to
    ``folder``.

    The module's classes are replaced in this process, so the original model has to be called before.
    """
    found = REWRITES.get((family, name))
    if found is None or found.advice not in message:
        return None
    module = importlib.import_module(found.module)
    source = Path(str(module.__file__))
    text = source.read_text(encoding="utf-8")
    old = found.changes[0][0]
    if any(text.count(before) != 1 for before, _ in found.changes):
        return None
    first = text[: text.index(old)].count("\n") + 1
    lines = range(first, first + old.count("\n"))
    if not any(int(line) in lines for line in re.findall(rf"\b{re.escape(source.name)}:(\d+)", message)):
        return None
    for before, after in found.changes:
        text = text.replace(before, after)
    package = found.module.split(".")[:-1]
    changed = _RELATIVE.sub(lambda match: _absolute(package, match[1], match[2]), text)
    copied = folder / f"{source.stem}_rewritten.py"
    copied.write_text(changed, encoding="utf-8")
    # accel's child processes import the copy too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    sys.path.insert(0, str(folder))
    own = vars(importlib.import_module(copied.stem))
    # ``make`` looks the models up in these two places.
    for space in (vars(module), vars(sys.modules[package[0]])):
        common = [key for key in space.keys() & own.keys() if key == "MODELS" or _is_of(own[key], copied.stem)]
        space.update({key: own[key] for key in common})
    case = make(family, name)
    case.module.load_state_dict(original.module.state_dict())
    more, example = found.more, case.example
    if case.dynamic:
        case = replace(case, dynamic={**case.dynamic, **found.dynamic})
    return replace(case, example=lambda batch, size: more(example(batch, size))) if more else case


_RELATIVE = re.compile(r"^( *from )(\.+\S*)(?= import )", re.MULTILINE)


def _absolute(package: Sequence[str], start: str, name: str) -> str:
    """Returns the begin of an import, with the absolute name of a relative module."""
    rest = name.lstrip(".")
    up = len(name) - len(rest) - 1
    return start + ".".join(filter(None, [*package[: len(package) - up], rest]))


def _is_of(value: Any, module: str) -> bool:
    """Tells whether ``value`` is a class or a function of ``module``."""
    return getattr(value, "__module__", None) == module
