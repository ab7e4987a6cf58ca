"""One rank of a run: build, resume, step, evaluate, save, finish. Every rank runs this; they differ by rank alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.errors import BadConfig, BadData, TrainingFailed, UnsupportedHere
from accel.train import loss as losses
from accel.train.checkpoint import Checkpoints, plain
from accel.train.config import TrainConfig
from accel.train.data import loader
from accel.train.final import gather, write_final
from accel.train.precision import (
    LossScale,
    autocast,
    gradient_norm,
    make_optimizer,
    parameter_dtype,
    scale_gradients,
    scales_loss,
)
from accel.train.recompute import recompute
from accel.train.schedule import learning_rate
from accel.train.zero import micro_batch, shard

LOG = "log.jsonl"
# A run whose steps all overflow is going nowhere.
_MOST_SKIPPED = 50


@dataclass(frozen=True)
class Ranks:
    """Where this process stands: its rank, how many there are, its device, and the mesh of data-parallel ranks."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None
    saving: dist.ProcessGroup | None

    @property
    def sharding(self) -> dist.ProcessGroup | None:
        """The ranks that shards are spread over."""
        if self.mesh is None:
            return None
        return self.mesh.get_group(self.mesh.ndim - 1)


def join(config: TrainConfig) -> Ranks:
    """Join the process group that the environment describes (torchrun's variables); alone without one."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    config.validate(world)
    if config.parallel.tp > 1 or config.parallel.pp > 1:
        raise UnsupportedHere("accel train runs data parallel only; set parallel.tp and parallel.pp to 1")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world == 1:
        return Ranks(0, 1, device, None, None)
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    p = config.parallel
    two = p.zero > 0 and p.replicate > 1
    shape = (p.replicate, world // p.replicate) if two else (world,)
    names = ("replicate", "shard") if two else ("dp",)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Ranks(rank, world, device, mesh, dist.new_group(backend="gloo"))


class Trainer:
    """A run on one rank. ``run()`` takes it to the last step and writes ``final/``."""

    def __init__(self, config: TrainConfig, out: Path, ranks: Ranks) -> None:
        from accel.sources.python_object import load_object

        self.config, self.out, self.ranks = config, out, ranks
        if not config.model or not config.data:
            raise BadConfig("the config needs model and data; write model = 'package.module:factory'")
        self.mode = config.precision.resolved
        torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
        torch.use_deterministic_algorithms(config.deterministic)
        self.data = self._make(config.data)
        self.loss: losses.Loss = load_object(config.loss, "loss")[1] if config.loss else losses.cross_entropy
        self.evaluate: Callable[[nn.Module], Mapping[str, float]] | None = (
            load_object(config.evaluate, "metric")[1] if config.evaluate else None
        )
        self.module = self._model()
        recompute(self.module, config.parallel.recompute)
        self.called = shard(self.module, ranks.mesh, config.parallel.zero, offload=config.parallel.offload)
        self.optimizer = make_optimizer(self.module, config.optimizer, self.mode)
        self.scale = LossScale(
            config.precision.loss_scale, config.precision.growth_interval, enabled=scales_loss(self.mode)
        )
        self.checkpoints = Checkpoints(out, config.checkpoint, ranks.saving)
        self.accumulation = config.accumulation(ranks.world)
        self.step = 0
        self.skipped = 0
        self.expected = 0.0  # targets that the last step counted
        self.metrics: dict[str, float] = {}

    def _make(self, spec: str) -> Any:
        from accel.sources.python_object import load_object
        from accel.sources.torch_source import call_factory

        return call_factory(load_object(spec, "factory")[1], spec)

    def _model(self) -> nn.Module:
        torch.manual_seed(self.config.seed)  # the same weights on every rank
        made = self._make(self.config.model)
        made = made[0] if isinstance(made, tuple) else made
        if not isinstance(made, nn.Module):
            raise BadConfig(f"{self.config.model} made a {type(made).__name__}; a model factory makes an nn.Module")
        return made.to(device=self.ranks.device, dtype=parameter_dtype(self.mode)).train()

    def run(self) -> dict[str, Any]:
        """Train to ``config.steps``; what happened: steps, the last loss, metrics, seconds."""
        self.resume()
        batches = self.batches()
        log = _Log(self.out / LOG, self.config, self.step) if self.ranks.rank == 0 else None
        last: dict[str, float] = {}
        try:
            while self.step < self.config.steps:
                last = self.one_step(batches)
                if log is not None:
                    log.step(self.step, last)
                self._between()
        finally:
            self._wait_quietly()
        self.checkpoints.wait()
        self.finish()
        return {"steps": self.step, **last, "metrics": self.metrics}

    def batches(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Micro-batches of this rank from the current step on."""
        config = self.config
        return iter(
            loader(
                self.data,
                global_batch=config.global_batch,
                micro_batch=config.micro_batch,
                rank=self.ranks.rank,
                ranks=self.ranks.world,
                seed=config.seed,
                first=self.step,
                processes=config.loader_processes,
            )
        )

    def one_step(self, batches: Iterator[tuple[Any, torch.Tensor]]) -> dict[str, float]:
        """One optimizer step. The loss is the mean over every counted target of the global batch, and so is the
        gradient:
        sums are differentiated, and divided by the count of all ranks and micro-batches once."""
        config, ranks = self.config, self.ranks
        torch.manual_seed((config.seed << 32) + self.step * ranks.world + ranks.rank)  # dropout, the same when resumed
        seen = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        # DDP and FSDP average over the ranks. The step is divided by what the last one counted, and what that is off
        # by is put right below: usually nothing, which saves a pass over the gradients, and float16 sums stay small.
        expected = self.expected or config.global_batch
        forth = ranks.world * self.scale.scale / expected
        for index in range(self.accumulation):
            x, y = next(batches)
            with micro_batch(self.called, config.parallel.zero, last=index == self.accumulation - 1):
                with autocast(self.mode, ranks.device.type):
                    outputs = call(self.called, to_device(x, ranks.device, parameter_dtype(self.mode)))
                total, count = self.loss(outputs, y.to(ranks.device))
                torch.autograd.backward(total * forth)
            seen += torch.stack((total.detach().double(), count.double()))
        if ranks.world > 1:
            dist.all_reduce(seen)
        total_loss, counted = seen.tolist()
        if counted == 0:
            raise BadData(f"no target of step {self.step + 1} is counted (all are -100); give data with targets")
        back = expected / (self.scale.scale * counted)
        self.expected = counted
        parameters = self.optimizer.parameters
        norm = float(gradient_norm(parameters, ranks.sharding if config.parallel.zero else None)) * back
        mean = total_loss / counted
        finite = math.isfinite(norm) and math.isfinite(mean)
        if not finite and not self.scale.enabled:
            raise TrainingFailed(self._not_finite(mean))
        rate = learning_rate(config, self.step)
        if finite:
            clip = config.optimizer.clip
            scale_gradients(parameters, back * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0))
            self.optimizer.set_lr(rate)
            self.optimizer.step()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped == _MOST_SKIPPED:
            raise TrainingFailed(f"{_MOST_SKIPPED} steps in a row overflowed; use --precision.mode=bf16 or a lower lr")
        self.scale.update(finite=finite)
        self.optimizer.zero_grad()
        self.step += 1
        found = {"loss": mean, "lr": rate, "grad_norm": norm, "targets": counted}
        return found | ({"loss_scale": self.scale.scale, "skipped": float(not finite)} if self.scale.enabled else {})

    def _not_finite(self, loss: float) -> str:
        bad = ""
        for name, parameter in zip(self.optimizer.names, self.optimizer.parameters, strict=True):
            for what, value in (("", parameter), ("the gradient of ", parameter.grad)):
                local = getattr(value, "to_local", lambda v=value: v)()
                if local is not None and not bool(torch.isfinite(local).all()):
                    bad = f"; the first that isn't finite is {what}{name}"
                    break
            if bad:
                break
        return (
            f"the loss is {loss:g} at step {self.step + 1}{bad}; the last checkpoint is kept, look at the data or "
            f"lower the "
            "learning rate"
        )

    def _between(self) -> None:
        every, config = self.config.checkpoint.every, self.config
        if self.step == config.steps:  # finish() does both
            return
        best = False
        if self.evaluate is not None and config.evaluate_every and self.step % config.evaluate_every == 0:
            best = self.measure()
        if best or (every and self.step % every == 0):
            self.save()

    def measure(self) -> bool:
        """``evaluate`` on rank 0, with the whole weights in a model of their own; whether it was the best so far."""
        best = torch.zeros(1)
        state = gather(plain(self.called))
        if state is not None and self.evaluate is not None:
            model = self._whole(state)
            self.metrics = {name: float(value) for name, value in self.evaluate(model).items()}
            best += self.checkpoints.mark_best(self.step, self.metrics)
        if self.ranks.world > 1:
            dist.broadcast(best, 0, group=self.ranks.saving)
        return bool(best)

    def _whole(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        made = self._make(self.config.model)
        model: nn.Module = made[0] if isinstance(made, tuple) else made
        model.load_state_dict(dict(state))
        return model.eval()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, by name: ``model.*`` and ``optimizer.*``."""
        found = {f"model.{name}": value for name, value in plain(self.called).items()}
        return found | {f"optimizer.{name}": value for name, value in self.optimizer.state_dict().items()}

    def save(self) -> None:
        """Begin (or make) the checkpoint of this step, where there is none yet."""
        if self.checkpoints.has(self.step):
            return
        run = {
            "step": self.step,
            "model": self.config.model,
            "scale": self.scale.state_dict(),
            "metrics": self.metrics,
            "config": dataclasses.asdict(self.config),
            "world": self.ranks.world,
            "expected": self.expected,
        }
        self.checkpoints.save(self.state(), run)

    def resume(self) -> None:
        """Go on from the newest finished checkpoint there is, written on whatever world size and ZeRO stage."""
        found = self.checkpoints.complete()
        if not found:
            return
        self.optimizer.materialise()
        state = self.state()
        run = self.checkpoints.load(found[-1], state, self.config.model)
        with torch.no_grad():
            own = plain(self.called)
            for name, value in state.items():
                if name.startswith("model."):
                    own[name.removeprefix("model.")].copy_(value)
        self.optimizer.load_state_dict(
            {name.removeprefix("optimizer."): v for name, v in state.items() if name.startswith("optimizer.")}
        )
        self.scale.load_state_dict(run["scale"])
        self.metrics = dict(run["metrics"])
        self.expected = float(run["expected"])
        self.step = int(run["step"])

    def finish(self) -> None:
        """The last checkpoint, the last evaluation, and ``final/``."""
        if self.evaluate is not None:
            self.measure()
        self.save()
        self.checkpoints.wait()
        state = gather(plain(self.called))
        if state is not None:
            self._final(state)
        if self.ranks.world > 1:
            dist.barrier(self.ranks.saving)

    def _final(self, state: Mapping[str, torch.Tensor]) -> None:
        from accel.sources.python_object import load_object

        factory = load_object(self.config.model, "factory")[1]
        declaration = getattr(factory, "__accel__", None)
        count = min(64, len(self.data))
        stacked = torch.utils.data.default_collate([self.data[i] for i in range(count)])[0]
        signature = None
        if declaration is not None:
            signature = {
                "inputs": [str(spec) for spec in declaration.inputs],
                "outputs": list(declaration.outputs),
                "dims": {name: [r.min, r.opt, r.max] for name, r in declaration.dims.items()},
            }
        write_final(
            self.out / "final",
            state,
            model=absolute(self.config.model),
            config=dataclasses.asdict(self.config),
            metrics=self.metrics,
            example=named_inputs(self.module, stacked),
            signature=signature,
        )

    def _wait_quietly(self) -> None:
        """Whatever stopped the run, a save in the background is let finish: it is the last good checkpoint."""
        import sys

        if sys.exc_info()[0] is not None:
            from contextlib import suppress

            with suppress(Exception):
                self.checkpoints.wait()


class _Log:
    """``log.jsonl``: one JSON object every ``log_every`` steps and at the last."""

    def __init__(self, path: Path, config: TrainConfig, step: int) -> None:
        self.path, self.config = path, config
        self.began, self.first, self.targets = time.monotonic(), step, 0.0

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.targets += values["targets"]
        if step % self.config.log_every and step != self.config.steps:
            return
        seconds = time.monotonic() - self.began
        steps = step - self.first
        body = {
            "step": step,
            "steps": self.config.steps,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "targets_per_second": self.targets / seconds,
            "seconds_per_step": seconds / steps,
            "eta_seconds": (self.config.steps - step) * seconds / steps,
            "memory_bytes": _memory(),
        }
        self.began, self.first, self.targets = time.monotonic(), step, 0.0
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(body) + "\n")


def _memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def call(module: nn.Module, inputs: Any) -> torch.Tensor:
    """``module`` on a batch's inputs: one tensor, a tuple of them, or a dict by name."""
    if isinstance(inputs, Mapping):
        found = module(**inputs)
    else:
        found = module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
    tensor: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return tensor


def to_device(inputs: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Inputs on ``device``, floating ones in ``dtype``."""
    if isinstance(inputs, Mapping):
        return {name: to_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(to_device(value, device, dtype) for value in inputs)
    return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)


def named_inputs(module: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """A batch's inputs by the names of ``forward``'s parameters."""
    import inspect

    if isinstance(inputs, Mapping):
        return dict(inputs)
    several = inputs if isinstance(inputs, tuple | list) else (inputs,)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, several, strict=False))


def absolute(spec: str) -> str:
    """``file.py:factory`` with the file's whole path, so that it is found from any folder; a module stays as it is."""
    where, _, name = spec.rpartition(":")
    return f"{Path(where).absolute()}:{name}" if where.endswith(".py") else spec
