"""Runs the training loop: builds the model, resumes, steps, evaluates, saves and finishes. Every rank runs the same
loop."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel.artifact import Artifact
from accel.errors import BadConfig, BadData, TrainingFailed
from accel.sources.torch.decoder import takes_cache

from . import loss as losses
from .batch import Batch
from .build import build, make_data, seeded
from .checkpoints.checkpoint import Checkpoints
from .checkpoints.final import gather, set_metrics, sources, write_run
from .config.rules import runnable
from .config.schema import TrainConfig
from .data.misfit import misfit, not_finite, taken_at
from .data.samples import loader
from .data.stream import Stream, micro_batches
from .disk.parameters import park
from .distill.ahead import taught
from .distill.teacher import open_teacher
from .evaluation import evaluated
from .log import LOG, StepLog, beat
from .optimizer.finite import first_bad, first_overflow
from .optimizer.master import MasterOptimizer
from .optimizer.scale import LossScale
from .optimizer.schedule import Rates
from .parallel import tensor as tensor_parallel
from .passes import take
from .precision.modes import ADVICE, parameter_dtype, scales_loss
from .ranks import Ranks
from .state import RunState


class Trainer:
    """A run on one rank. ``run()`` trains to the last step and writes ``final/``."""

    def __init__(self, config: TrainConfig, out: Path, ranks: Ranks) -> None:
        from accel.sources.python_object import load_object

        runnable(config)
        self.config, self.out, self.ranks = config, out, ranks
        self.mode = config.precision.resolved
        torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
        torch.backends.cudnn.allow_tf32 = config.precision.tf32  # torch uses TF32 for convolutions by default
        torch.use_deterministic_algorithms(config.deterministic)
        self.data = make_data(config)
        with seeded(config.seed):  # a factory may draw the teacher's weights
            teacher = open_teacher(config.distillation) if config.distillation.teacher else None
        if isinstance(teacher, Artifact):
            self.data = taught(self.data, teacher, config, out, ranks)
        self.loss: losses.Loss = load_object(config.loss, "loss")[1] if config.loss else losses.cross_entropy
        with seeded(config.seed):  # the user's module may draw random numbers on import
            self.evaluate: Callable[[nn.Module], Mapping[str, float]] | None = (
                load_object(config.evaluate, "metric")[1] if config.evaluate else None
            )
        self.built = build(config, ranks, self.loss, self.data, teacher)
        self.module = self.built.module
        self.code = sources(config.model)  # read at the start, because the file may be edited during the run
        p = config.parallel
        self.optimizer = MasterOptimizer(self.module, config.optimizer, self.mode, p.disk, parked=p.disk_parameters)
        if self.optimizer.parked and self.optimizer.disk is not None:
            park(self.module, self.optimizer.disk)
        self.rates = Rates(config)
        self.scale = LossScale(
            config.precision.loss_scale, config.precision.growth_interval, enabled=scales_loss(self.mode)
        )
        self.state = RunState(self.module, self.optimizer, self.scale, self.built.memory, self.built.history, config)
        self.checkpoints = Checkpoints(out, config.checkpoint, ranks.saving, self.optimizer.disk)
        self.accumulation = config.accumulation(ranks.world)
        self.step = 0
        self.expected = 0.0  # The number of targets in the previous step.
        self.checked = ranks.tp is None  # True once check_replicated() has run or isn't needed.
        self.metrics: dict[str, float] = {}
        self.began_in = ""  # The precision mode of the checkpoint that the run resumed from.
        self.reordered: list[str] = []  # The changed config keys that reordered the samples.
        self.log: StepLog | None = None  # The log is open only during run(), and only on rank 0.
        self.written = True  # True if no rank was writing a checkpoint when the last losses were summed.

    def run(self) -> dict[str, Any]:
        """Trains until ``config.steps``.

        Returns a dict with the number of steps, the last loss and the metrics. A figure of the last step that isn't
        finite is None. If an earlier step was better than the last step, the dict also has the record of the best step.
        """
        self.resume()
        first = 0 if scales_loss(self.began_in) else self.step  # the first step with a loss scale
        batches = self.batches()
        log = self.log = self._log() if self.ranks.rank == 0 else None
        if log is not None:
            for said in self.checkpoints.damaged:
                log.note(f"skipped a damaged checkpoint: {said}")
            if self.config.precision.mode in ADVICE:
                log.note(ADVICE[self.config.precision.mode])
            for said in self.built.advice:
                log.note(said)
            if self.step:
                converted = (
                    "" if self.began_in == self.config.precision.mode else f", which was trained in {self.began_in}"
                )
                log.note(f"resumed from step {self.step}{converted}")
            if self.reordered:
                log.note(
                    f"{', '.join(self.reordered)} changed: the samples come in another order from here on, so this "
                    "epoch may repeat some samples and leave out others"
                )
            if not self.config.peak_flops and self.ranks.device.type == "cuda":  # data sheets of CPUs have no FLOP/s
                log.note("MFU isn't shown; give one GPU's FLOP/s, e.g. --peak-flops=989e12 for an H100 in bf16")
            elif self.config.peak_flops and not self.built.flops:
                log.note(f"MFU isn't shown: the FLOPs of {self.config.model} can't be counted on fake tensors")
        last: dict[str, float] = {}
        try:
            while self.step < self.config.steps:
                beat(self.out)
                skipped, scale = self.scale.skipped, self.scale.scale
                last = self.one_step(batches)
                if log is not None:
                    if self.scale.skipped > skipped:
                        log.skip(self.step, self.scale.skipped, scale, self.scale.scale)
                    log.step(self.step, last)
                self._between()
        finally:
            self._wait_quietly()
        self.checkpoints.wait()
        beat(self.out)
        if 0 < self.step - first == self.scale.skipped:
            self.save()
            self.checkpoints.wait()
            raise TrainingFailed(self._nothing_learned())
        self.finish()
        self.metrics = self._told(self.metrics)  # only rank 0 measured them
        best = self.checkpoints.standing()
        better = {"best": best} if best is not None and best["step"] != self.step else {}
        skips = {"skipped": self.scale.skipped} if self.scale.enabled else {}
        figures = {
            name: value if math.isfinite(value) else None for name, value in last.items()
        }  # JSON has no infinity
        return {"steps": self.step, **figures, **skips, "metrics": self.metrics, **better}

    def _told(self, own: Any) -> Any:
        """Returns rank 0's value on every rank."""
        if self.ranks.world == 1:
            return own
        told: list[Any] = [own]
        dist.broadcast_object_list(told, src=0, group=self.ranks.saving)
        return told[0]

    def _log(self) -> StepLog:
        flops, peak = self.built.flops * self.config.global_batch, self.config.peak_flops * self.ranks.world
        return StepLog(self.out / LOG, self.config, self.step, flops=flops, peak=peak)

    def batches(self) -> Iterator[Batch]:
        """Returns this rank's micro-batches from the current step on."""
        config = self.config
        if isinstance(self.data, Stream):
            return micro_batches(
                self.data,
                global_batch=config.global_batch,
                micro_batch=config.micro_batch,
                rank=self.ranks.data_rank,
                ranks=self.ranks.data_ranks,
                drop_last=config.drop_last,
            )
        return iter(
            loader(
                self.data,
                global_batch=config.global_batch,
                micro_batch=config.micro_batch,
                rank=self.ranks.data_rank,
                ranks=self.ranks.data_ranks,
                seed=config.seed,
                first=self.step,
                processes=config.loader_processes,
                drop_last=config.drop_last,
            )
        )

    def one_step(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Runs one optimizer step and returns the step's figures.

        Loss and gradient are means over every counted target of the global batch. The gradient of the summed loss is
        divided once, by the number of targets of all ranks and micro-batches.
        """
        config, ranks = self.config, self.ranks
        torch.manual_seed(self._seed())
        self.optimizer.begin()
        # DDP and FSDP average gradients over the ranks. To keep float16 sums small, the loss is first divided by the
        # previous step's number of targets. If a step has as many targets as the previous step, its gradients need no
        # second division.
        expected = self.expected or config.global_batch
        forth = ranks.averaged * self.scale.scale / expected
        taken = take(batches, self.accumulation)
        try:
            seen = self.built.passes.run(taken, forth)
        except Exception as error:  # the model and the loss may raise any exception
            if said := misfit(error, self.module, taken_at(self.step, taken, self.data, config, ranks)):
                raise BadData(said) from error
            raise
        if not ranks.counts:
            seen.zero_()
        self.optimizer.collect()
        parameters = self.optimizer.parameters
        holders = ranks.world // (ranks.pp.size() if ranks.pp is not None else 1)
        squares = self.optimizer.share_of_squares(ranks.rank % holders, holders)
        further = self.built.passes.figures()
        # One all-reduce sums all figures, because ranks wait for each other in each all-reduce: the loss, the number of
        # ranks that still write a checkpoint, the squares of the gradients, and the further figures.
        parts = [seen.new_tensor([self.checkpoints.writing]), squares.to(seen).reshape(1)]
        seen = torch.cat((seen, *parts, *(value.to(seen).reshape(1) for value in further.values())))
        if ranks.world > 1:
            dist.all_reduce(seen)
        total_loss, counted, writing, square, *sums = seen.tolist()
        self.written = not writing
        if counted == 0:
            raise BadData(f"all targets of step {self.step + 1} are -100, so none is counted; give data with targets")
        back = expected / (self.scale.scale * counted)
        self.expected = counted
        if not self.checked and ranks.tp is not None:
            self.checked = True
            tensor_parallel.check_replicated(
                zip(self.optimizer.names, parameters, strict=True), ranks.tp, self.optimizer.value
            )
        norm = math.sqrt(square) * back
        mean = total_loss / counted
        finite = math.isfinite(norm) and math.isfinite(mean)
        if not finite:
            # A smaller loss scale doesn't help if the data has a NaN, or if a weight is already NaN. A loss that is
            # finite shows that the model masks the NaN.
            if not math.isfinite(mean) and (said := self._bad_data(taken)):
                raise TrainingFailed(
                    f"the loss is {mean:g} at step {self.step + 1}, because {said}; {self._kept()}, correct the data"
                )
            bad = first_bad(self.optimizer, ranks.world)
            if bad or not self.scale.enabled:
                raise TrainingFailed(
                    self._not_finite(mean, bad or first_bad(self.optimizer, ranks.world, gradients=True))
                )
        rate = self.rates.at(self.step)
        if finite:
            clip = config.optimizer.clip
            self.optimizer.set_lr(rate)
            self.optimizer.step(back * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0))
        self.scale.update(finite=finite)
        if self.scale.hopeless:
            raise TrainingFailed(self._hopeless(mean))
        self.optimizer.zero_grad(keep=self.built.alike and self.accumulation > 1)
        self.step += 1
        found = {"loss": mean, "lr": rate, "grad_norm": norm, "targets": counted}
        found |= {name: value / counted for name, value in zip(further, sums, strict=True)}
        found |= self.optimizer.moved
        return found | ({"loss_scale": self.scale.scale, "skipped": self.scale.skipped} if self.scale.enabled else {})

    def _seed(self) -> int:
        """Returns the seed of this step's dropout.

        The seed is the same after a resume, and on the tensor-parallel ranks that compute the same samples together.
        """
        ranks = self.ranks
        stage = ranks.pp.get_local_rank() if ranks.pp is not None else 0
        parts, part = (ranks.cp.size(), ranks.cp.get_local_rank()) if ranks.cp is not None else (1, 0)
        stream = (self.step * ranks.data_ranks + ranks.data_rank) * parts + part
        return (self.config.seed << 32) + stream + (stage << 48)

    def _not_finite(self, loss: float, bad: str) -> str:
        return (
            f"the loss is {loss:g} at step {self.step + 1}{bad}; {self._kept()}, check the data or lower the "
            "learning rate"
        )

    def _bad_data(self, taken: Sequence[Batch]) -> str:
        """Returns a part of a message that names a sample of the step with a value that isn't finite, or "" if no rank
        has such a sample."""
        own = not_finite(taken_at(self.step, taken, self.data, self.config, self.ranks), parameter_dtype(self.mode))
        found: list[Any] = [own]
        if self.ranks.world > 1:
            found = [""] * self.ranks.world
            dist.all_gather_object(found, own)
        return next(filter(None, found), "")

    def _hopeless(self, loss: float) -> str:
        name = first_overflow(self.optimizer, self.ranks.world)
        first = f", and the gradient of {name} overflows first" if name else ""
        return (
            f"{self.scale.in_a_row} steps in a row overflowed although the loss scale fell to {self.scale.fell_to()} "
            f"(the loss is {loss:g}{first}); {self._kept()}, use --precision.mode=bf16 or a lower lr, or check the data"
        )

    def _nothing_learned(self) -> str:
        return (
            f"all {self.scale.skipped} steps were skipped because a gradient overflowed in each, so no weight has "
            f"changed; the loss scale fell to {self.scale.fell_to()} and falls further with more --steps, or use "
            "--precision.mode=bf16 with --fresh, or check the data"
        )

    def _kept(self) -> str:
        if self.checkpoints.pending or self.checkpoints.complete():
            return "the last checkpoint is kept"
        return "there is no checkpoint to go back to yet (checkpoint.every writes checkpoints)"

    def _between(self) -> None:
        every, config = self.config.checkpoint.every, self.config
        if self.step == config.steps:  # finish() evaluates and saves the last step
            return
        if self.checkpoints.pending and self.written:
            self.checkpoints.wait()
        best = False
        if self.evaluate is not None and config.evaluate_every and self.step % config.evaluate_every == 0:
            best = self.measure()
        if best or (every and self.step % every == 0):
            self.save()

    def measure(self) -> bool:
        """Runs ``evaluate`` on rank 0, on a separate model with the unsharded weights. Returns True if the result is
        the best so far.

        If ``evaluate`` fails on rank 0, saves a checkpoint of this step and then raises the error on every rank.
        """
        self.checkpoints.wait()  # a save in the background uses the same process group
        best, failed = False, ""
        kind: type[BadConfig | TrainingFailed] = TrainingFailed
        state = gather(self.optimizer.weights(self.module), self.ranks)
        if state is not None:
            assert self.evaluate is not None
            try:
                self.metrics = evaluated(self.evaluate, state, self.config, self.step, self.out)
                best = self.checkpoints.mark_best(self.step, self.metrics)
            except (BadConfig, TrainingFailed) as error:
                failed, kind = str(error), type(error)
            else:
                if self.log is not None:
                    self.log.evaluation(self.step, self.metrics)
                    name = self.config.checkpoint.best.removeprefix("-")
                    if math.isnan(self.metrics.get(name, 0.0)):
                        said = f"{name} is nan at step {self.step} and can't be the best"
                        self.log.note(f"{said}; check {self.config.evaluate}")
        best, failed, kind = self._told((best, failed, kind))
        if failed:
            self.save()
            self.checkpoints.wait()
            last = self.step == self.config.steps
            where = f"the weights are in {self.out / 'final'}" if last else f"step {self.step} is saved"
            raise kind(f"{failed}; {where}; correct the function and run the same command again")
        return bool(best)

    def save(self) -> None:
        """Writes a checkpoint of this step, in the background if ``checkpoint.asynchronous`` is set.

        Does nothing if this step already has a checkpoint.
        """
        if self.checkpoints.has(self.step):
            return
        tensors = self.state.tensors()
        run = {
            "step": self.step,
            "model": self.config.model,
            **self.state.facts(tensors),
            "metrics": self.metrics,
            "config": dataclasses.asdict(self.config),
            "world": self.ranks.world,
            "expected": self.expected,
            "samples": len(self.data),
            **({"stream": self.data.place()} if isinstance(self.data, Stream) else {}),
        }
        self.checkpoints.save(tensors, run)

    def resume(self) -> None:
        """Loads the newest finished checkpoint, if there is one. The checkpoint may come from a run with another world
        size or ZeRO stage."""
        if not self.checkpoints.complete():
            return
        found = self.checkpoints.load_newest(self.state.wanted, self.config.model)
        assert found is not None
        run, state = found
        self.state.take(run, state)
        self.metrics = dict(run["metrics"])
        self.expected = float(run["expected"])
        self.step = int(run["step"])
        before = run["config"]
        self.began_in = before["precision"]["mode"]
        self.reordered = [
            name
            for name in ("data", "global_batch", "seed", "drop_last", "pack")
            if before.get(name, getattr(self.config, name)) != getattr(self.config, name)
        ]
        if isinstance(self.data, Stream) and "stream" in run:
            self.data.epoch, self.data.taken = int(run["stream"]["epoch"]), int(run["stream"]["taken"])
            # A stream goes on at its next sample, whatever the size of a batch.
            self.reordered = [name for name in self.reordered if name in ("data", "seed")]
        elif run.get("samples", len(self.data)) != len(self.data):
            self.reordered.append("the number of samples")

    def finish(self) -> None:
        """Writes the last checkpoint and ``final/``.

        Evaluates after writing, so that a failed evaluation doesn't lose the weights.
        """
        self.save()
        self.checkpoints.wait()
        state = gather(self.optimizer.weights(self.module), self.ranks)
        if state is not None:
            write_run(
                self.out / "final",
                state,
                config=self.config,
                data=self.data,
                names=self.built.inputs,
                metrics={} if self.evaluate is not None else self.metrics,
                code=self.code,
                decoder=takes_cache(self.module),
            )
        if self.evaluate is not None:
            self.measure()
            if self.ranks.rank == 0:
                set_metrics(self.out / "final", self.metrics)
                self.checkpoints.set_metrics(self.step, self.metrics)
        if self.ranks.world > 1:
            dist.barrier(self.ranks.saving)

    def _wait_quietly(self) -> None:
        """Lets a background save finish after an error, because this save becomes the last good checkpoint."""
        if sys.exc_info()[0] is not None:
            with suppress(Exception):
                self.checkpoints.wait()
