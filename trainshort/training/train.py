"""The training loop: from a TrainConfig to a run folder.

Exact: the tokens of a step and its learning rate are functions of the config and the step alone; everything else that
a step depends on (weights, optimizer state, random numbers) is in the checkpoint. So a run that was interrupted, at
whatever moment, goes on to the same losses and tensors, bit for bit on a CPU with the same number of threads.

Several processes, started by torchrun, each compute their rows of every batch; the losses are then those of one
process to rounding (without dropout, whose random numbers are each rank's own). What they have to agree on is in
processes.py, how they share the model in sharing.py; a process alone runs the same lines with nobody to agree with.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainshort.common.extras import require
from trainshort.common.files import is_full
from trainshort.common.machine import Waiting
from trainshort.common.reading import read_json
from trainshort.data.dataset import TokenData
from trainshort.models import LanguageModel, ModelConfig
from trainshort.models.checkpoints import native
from trainshort.models.checkpoints.native import check_position
from trainshort.models.checkpoints.weights import check_fits, fill, stored_tensors, weights_of
from trainshort.models.kept import share_of_keys
from trainshort.training.ahead import BatchesAhead
from trainshort.training.alike import about_command, about_data, require_alike
from trainshort.training.batches import Batch, Batches
from trainshort.training.config import TrainConfig
from trainshort.training.metrics import Metrics, NoMetrics
from trainshort.training.optimizer import Optimizer, learning_rate
from trainshort.training.processes import Processes, joined, remember_begun, was_begun
from trainshort.training.progress import TrainProgress
from trainshort.training.rank_log import RankLog, rank_log
from trainshort.training.run import Checkpoint, Interrupted, RunFolder
from trainshort.training.sharing import SharedModel
from trainshort.training.speed import Speed, matrix_rate, operations_per_token
from trainshort.training.step_log import OnStep, StepLog
from trainshort.training.stopping import StopSignals

VERIFIED_AT_START = 2**32  # bytes: larger data is only read in full where it seems to have changed
EXAMINE_EVERY = 200  # steps between looks at the share of keys that certified windows keep
RANDOM = "random."


def train(
    config: TrainConfig,
    *,
    progress: bool = True,
    stop: Callable[[], bool] | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> Path:
    """Train, and return the run folder.

    on_step: told of logged steps and their losses instead of a bar, and once, without a loss, of where it begins.
    resume: go on from the checkpoint in config.out, or start where there is none. A run that is done stays as it is,
    unless config.steps is larger than it was: then it goes on, and config.extended_at remembers where.
    stop: asked after each step. If it says True, and on Ctrl-C and SIGTERM, the run is saved; it raises Interrupted.
    Of several processes, which torchrun starts, the first to fail raises its error, the others EndedByOthersError.
    """
    with StopSignals() as signals, joined(config) as processes:
        require_alike(processes, about_command(config))
        processes.split(config.context_parallel)
        run = RunFolder(config.out)
        values = processes.by_first(lambda: _checked(config, run, resume or was_begun(run.folder)).to_dict())
        config = replace(TrainConfig.from_dict(values), data=config.data)
        with contextlib.ExitStack() as stack:
            processes.together(lambda: _enter(stack, run, processes))
            log = stack.enter_context(rank_log(run.folder, processes))
            cuda = [processes.device] if processes.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            trainer = _Trainer(config, run, processes, log)
            trainer.on_step = on_step if processes.is_first else None
            return trainer.train(progress and on_step is None, lambda: signals.received or _asked(stop))


def _checked(config: TrainConfig, run: RunFolder, resume: bool) -> TrainConfig:
    """The config to train with, if the run folder takes it and what it needs is installed."""
    if config.tensorboard:
        require(["tensorboard"], by="tensorboard (--tensorboard)")
    if not resume and run.has_checkpoint:
        raise FileExistsError(
            f"{run} holds a run already (step {run.step} of {run.config().steps}): go on with it with resume "
            "(--resume), or choose another folder with out (--out)"
        )
    if resume and (started := run.started_with()) is not None:
        return _going_on(config, started, run)
    return config


def _enter(stack: contextlib.ExitStack, run: RunFolder, processes: Processes) -> None:
    if processes.is_first:
        stack.enter_context(run.locked())
        remember_begun(run.folder)


class _Trainer:
    on_step: OnStep | None = None

    def __init__(self, config: TrainConfig, run: RunFolder, processes: Processes, log: RankLog) -> None:
        self.config, self.run, self.processes, self.log = config, run, processes, log
        self.device = device = processes.device
        _refuse_too_few_rows(config, processes)
        saved = self._open_data()
        self.batches = self._batches("train", seed=config.seed, vocab_size=self.data.vocab_size)
        torch.manual_seed(config.seed)
        if saved is not None and (path := run.folder / "config.json").exists():
            check_position(path, read_json(path, "it belongs to the run: restore it from a copy"))
        shape = ModelConfig.from_dict(config.model_fields(self.data.vocab_size))
        if saved is not None and not saved.is_sharded:
            check_fits(LanguageModel, shape, saved.model, str(run.state_file))
        self.model = LanguageModel(shape)
        self.model.tokenizer = self.data.tokenizer
        self.names = list(stored_tensors(self.model))
        operations = operations_per_token(self.model, config.length)
        if saved is None:
            processes.by_first(self._write_config)
        if processes.kind != "fsdp":  # which moves a block at a time
            self.model.to(device)
        self.model.checkpoint_activations(config.activation_checkpointing)
        self.model.attend_densely(config.attention == "dense")
        self.shared = SharedModel(self.model, processes, torch.bfloat16 if self._is_half() else None)
        self.optimizer = Optimizer(self.model, config)
        self.step, self.seconds, self.note, self.waiting = 0, 0.0, "", Waiting()
        self.peak_memory = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if saved is None:
            self._save()  # so that there is something to go on from at every moment, and a full disk shows at once
        else:
            self._go_on(saved)
        self.saved_step = self.step
        if config.compile if config.compile is not None else device.type == "cuda":
            # Shapes never change within a run, but for the number of documents. Left to itself, torch compiles the
            # second run of a process for any shape, because the first had others: slower, and another kernel.
            self.model.compile_blocks(dynamic=None if config.packing == "documents" else False)
        rate = matrix_rate(device)
        self.speed = Speed(config.batch_tokens, operations, None if rate is None else rate * processes.world)
        self.began, self.waiting = time.monotonic() - self.seconds, Waiting()

    def _open_data(self) -> Checkpoint | None:
        """Find the data, refused where it is not the run's or not that of all processes; returns the checkpoint."""
        self.processes.together(self._find_data)
        require_alike(self.processes, about_data(self.data))
        saved = self.run.load(self.processes) if self.processes.by_first(lambda: self.run.has_checkpoint) else None
        self.processes.together(lambda: self._check_data(saved))
        return saved

    def _find_data(self) -> None:
        self.data = TokenData(self.config.data)

    def _batches(self, split: str, **options: Any) -> Batches:
        apart = self.config.packing == "documents"
        return Batches(
            self.data.split(split),
            self.config.length,
            borders=self.data.borders_of(split) if apart else None,
            end_id=self.data.end_id if apart else None,
            **options,
        )

    def train(self, progress: bool, asked_to_stop: Callable[[], int | None]) -> Path:
        config = self.config
        title = f"{config.position} at {config.length}, seed {config.seed}"
        bar = TrainProgress(title, steps=config.steps, start=self.step, show=progress and self.processes.is_first)
        first = self.processes.is_first
        metrics = (
            Metrics(self.run.folder, after_step=self.step, tensorboard=config.tensorboard) if first else NoMetrics()
        )
        log = StepLog(
            config, metrics, bar, self.speed, began=self.began, on_step=self.on_step, failed=self._not_finite
        )
        ahead = BatchesAhead(self._parts, self.device, first=self.step + 1, last=config.steps)
        with contextlib.closing(metrics), bar, ahead:
            if self.note:
                bar.note(self.note)
            if self.on_step is not None:
                self.on_step(self.step, None)
            try:
                self._steps(ahead, log, asked_to_stop)
            except OSError as error:
                if not is_full(error):
                    raise
                raise RuntimeError(
                    f"{self.run}: no space left on the disk; the checkpoint of step {self.saved_step} is whole: free "
                    "some space and go on with resume (--resume)"
                ) from error
            finally:
                with contextlib.suppress(Exception):  # what was computed before it failed
                    log.flush()
        return self.run.folder

    def _steps(self, ahead: BatchesAhead, log: StepLog, asked_to_stop: Callable[[], int | None]) -> None:
        config, first = self.config, self.step + 1
        while self.step < config.steps:
            self._one_step(ahead.next(), log)
            number = self.processes.largest(asked_to_stop() or 0)
            last = self.step == config.steps
            validate = last or self._is_due(config.eval_every)
            examine = validate or self._is_due(EXAMINE_EVERY)
            save = last or number or self._is_due(config.checkpoint_every)
            if examine or save:
                log.flush()
            if examine:
                self._examine(log, validate)
            if save:
                log.metrics.push_to_disk()
                self._save()
            if number and not last:
                raise Interrupted(self.run.folder, self.step, config.steps, number)
            if examine or save or self.step == first:  # the first step compiles
                self.speed.begin(self.step)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _parts(self, step: int) -> list[Batch]:
        """The batch of a step, in the parts that it is computed in."""
        config = self.config
        starts = self.batches.starts((step - 1) * config.sequences, config.sequences)
        rows = config.sequences // config.accumulation
        parts = [starts[at : at + rows] for at in range(0, len(starts), rows)]
        own = self.processes.rows(rows)
        return [self._own_tokens(self.batches.batch(part[own], of=part)) for part in parts]

    def _own_tokens(self, part: Batch) -> Batch:
        return part.of_tokens(self.processes.tokens(part.inputs.shape[1]))

    def _one_step(self, parts: list[Batch], log: StepLog) -> None:
        config, step = self.config, self.step + 1
        self.model.train()
        if self.processes.kind is not None:
            torch.manual_seed(self._seed_of(step, self.processes.rank))
        count = max(1, sum(part.count for part in parts))
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, part in enumerate(parts, 1):
            with self.shared.part_of_step(last=number == len(parts)), self.processes.sharing_rows():
                loss = self._sum(part) / count
                loss.backward(self.processes.weight)
            total += loss.detach()
        norm = self.shared.clip(config.clip or math.inf)
        lr = learning_rate(config, step)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self.step = step
        log.add(step, lr, self.processes.sum(total), norm)

    def _is_half(self) -> bool:
        return self.config.dtype == "bfloat16" or (self.config.dtype == "auto" and self.device.type == "cuda")

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_half())

    def _sum(self, part: Batch) -> Tensor:
        with self._autocast():
            return self.shared.loss(part)

    def _seed_of(self, step: int, rank: int) -> int:
        """Of the random numbers of a step, with several processes: so they go on alike, whatever their number was."""
        random = np.random.SeedSequence([self.config.seed, step, rank])
        return int(random.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _not_finite(self, step: int, loss: float, norm: float) -> RuntimeError:
        return RuntimeError(
            f"{self.run}: at step {step} the loss is {loss} and the gradient norm {norm}: the learning rate "
            f"{self.config.lr} is too high, or the warm-up short. The checkpoint of step {self.saved_step} is whole"
        )

    @torch.no_grad()
    def _examine(self, log: StepLog, validate: bool) -> None:
        """A line of metrics: the validation loss, if wanted, and the share of keys that certified windows keep."""
        self.model.eval()
        row = self._validation() if validate else {}
        tokens = self.data.validation if len(self.data.validation) else self.data.train
        sample = torch.from_numpy(np.asarray(tokens[: self.config.length]).astype(np.int64))[None]
        with self._autocast(), self.shared.whole() as model:
            log.keys_kept = share_of_keys(model, sample.to(self.device))
        if log.keys_kept is not None:
            row["keys_kept"] = round(log.keys_kept, 4)
        if row:
            log.add_row(self.step, row)

    def _validation(self) -> dict[str, Any]:
        """The loss of the first validation tokens, in windows of the training length. Nothing is compiled for it."""
        config, tokens = self.config, self.data.validation
        windows = min(config.eval_tokens, len(tokens) - 1) // config.length
        if windows < 1:
            return {}
        batches = self._batches("validation")
        rows = config.sequences // config.accumulation
        starts = [window * config.length for window in range(windows)]
        parts = [starts[at : at + rows] for at in range(0, windows, rows)]
        with self.processes.sharing_rows():
            sums = self.processes.sum(torch.stack([self._validation_sum(batches, part) for part in parts]))
        count = sum(batches.count(part) for part in parts)
        return {"validation_loss": sum(sums.tolist()) / max(1, count), "validation_tokens": count}

    def _validation_sum(self, batches: Batches, starts: list[int]) -> Tensor:
        """Of this process's windows. Where there are none left for it, it computes one that does not count."""
        own = starts[self.processes.rows(len(starts))]
        total = self._sum(self._own_tokens(batches.batch(own or starts[:1])).to(self.device))
        return total if own else torch.zeros_like(total)

    def _write_config(self) -> None:
        self.run.write_config(self.config)
        native.save(self.model, self.run.folder, weights=self.processes.kind is None)

    def _go_on(self, saved: Checkpoint) -> None:
        self.step, self.seconds = saved.step, float(saved.state["seconds"])
        self.peak_memory = saved.state.get("peak_memory_bytes") or 0
        if (before := saved.state["environment"]) != (now := self._environment()):
            changes = (
                f"{name} was {before.get(name)}, is {now.get(name)} now"
                for name in before.keys() | now.keys()
                if before.get(name) != now.get(name)
            )
            self.note = f"{self.run}: {'; '.join(sorted(changes))}: losses may differ in their last digits"
        if saved.is_sharded or self.processes.kind is not None:
            self._read_shards(saved)
        else:
            fill(self.model, saved.model)
            random = {name: value for name, value in saved.optimizer.items() if name.startswith(RANDOM)}
            state = {name: value for name, value in saved.optimizer.items() if name not in random}
            self.optimizer.load(state, str(self.run.state_folder / saved.state["files"]["optimizer"]["name"]))
            self._restore_random_numbers(random)

        def write() -> None:
            self.run.write_config(self.config)  # paths and cadences may have changed
            self.run.publish()

        self.processes.by_first(write)
        self.log.line(f"goes on from step {self.step}")

    def _read_shards(self, saved: Checkpoint) -> None:
        """From what any number of processes wrote, into what this one holds."""
        from trainshort.training.shards import names_in, read_shards

        weights = {name: tensor.detach() for name, tensor in stored_tensors(self.model).items()}
        there = names_in(saved.folder)
        state = {name: value for name, value in self.optimizer.empty_state().items() if name in there}
        random = {f"{RANDOM}cpu": torch.get_rng_state()} if f"{RANDOM}cpu" in there else {}
        read_shards({**weights, **state, **random}, saved.folder, self.processes)
        self.optimizer.load(state, str(saved.folder))
        if self.processes.kind is None:
            self._restore_random_numbers(random)

    def _restore_random_numbers(self, random: dict[str, Tensor]) -> None:
        try:
            torch.set_rng_state(random[f"{RANDOM}cpu"])
            if self.device.type == "cuda" and f"{RANDOM}cuda" in random:
                torch.cuda.set_rng_state(random[f"{RANDOM}cuda"], self.device)
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{self.run}: the checkpoint holds no state of random numbers that torch reads ({error}): restore it "
                "from a copy"
            ) from error

    def _save(self) -> None:
        if self.processes.by_first(lambda: self.run.has_checkpoint and self.run.step == self.step):
            return
        state = {
            "step": self.step,
            "finished": self.step == self.config.steps,
            "sequences": self.step * self.config.sequences,
            "seconds": 0.0 if self.step == 0 else round(time.monotonic() - self.began, 3),
            "waiting": self.waiting.share() if self.step else None,  # for cores: a loaded machine trains slowly
            "peak_memory_bytes": self._peak_memory(),
            "config": self.config.to_dict(),
            "data": {"identity": self.data.identity, "files": self.data_files},
            "environment": self._environment(),
        }
        if self.processes.kind is None:
            self.run.save(state, weights_of(self.model), {**self.optimizer.state(), **self._random_numbers()})
        else:
            weights = {name: tensor.detach() for name, tensor in stored_tensors(self.model).items()}
            tensors = {**weights, **self.optimizer.shards(), **self._random_numbers()}
            self.run.save_shards(state, tensors, self.names, self.processes)
        self.saved_step = self.step
        self.log.line(f"saved step {self.step}")

    def _peak_memory(self) -> int | None:
        """The most that tensors took on this process's GPU, before an interruption too; None without a GPU."""
        if self.device.type != "cuda":
            return None
        return max(self.peak_memory, torch.cuda.max_memory_allocated(self.device))

    def _random_numbers(self) -> dict[str, Tensor]:
        """The state to go on with. Several processes make theirs for each step, and leave one for a process alone."""
        if self.processes.kind is not None:
            return {f"{RANDOM}cpu": torch.Generator().manual_seed(self._seed_of(self.step + 1, 0)).get_state()}
        found = {f"{RANDOM}cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def _environment(self) -> dict[str, Any]:
        """What the last digits depend on."""
        processes = self.processes
        device = str(self.device) if processes.kind is None else self.device.type
        found = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
        if processes.kind is not None:
            found |= {"processes": processes.world, "parallel": processes.kind}
        return found | ({"context_parallel": processes.spans} if processes.spans > 1 else {})

    def _check_data(self, saved: Checkpoint | None) -> None:
        """Refuse other data than the run was started with. Keeps sizes and times of its files."""
        now = {}
        for name in self.data.meta["hashes"]:
            about = (self.data.folder / name).stat()
            now[name] = [about.st_size, about.st_mtime_ns]
        before: dict[str, Any] = saved.state["data"] if saved is not None else {}
        if saved is not None and before["identity"] != self.data.identity:
            raise ValueError(
                f"{self.data.folder} is not the data that {self.run} was started with: it was prepared again, or is "
                "another folder. Go on with the old data, or start another run"
            )
        small = sum(size for size, _ in now.values()) <= VERIFIED_AT_START
        if small if saved is None else before["files"] != now:
            self.data.verify()
        self.data_files = now


def _refuse_too_few_rows(config: TrainConfig, processes: Processes) -> None:
    rows = config.sequences // config.accumulation
    if rows < processes.places:
        raise ValueError(
            f"a step has {config.sequences} sequences in {config.accumulation} parts, {rows} rows each, and there "
            f"are {processes.places} processes to share them: use fewer processes, less accumulation "
            "(--accumulation), a larger batch (--batch-tokens), or a larger context_parallel (--context-parallel)"
        )


def _going_on(config: TrainConfig, started: TrainConfig, run: RunFolder) -> TrainConfig:
    """The config that a run goes on with: the one it was started with, or, if it is done, one with more steps."""
    config = replace(config, extended_at=started.extended_at)
    done = run.has_checkpoint and run.step == started.steps
    if done and config.steps > started.steps:
        config = replace(config, extended_at=(*started.extended_at, started.steps))
        started = replace(started, steps=config.steps, extended_at=config.extended_at)
    if not (changed := started.differences(config)):
        return config
    more = ""
    if config.steps > started.steps and not done:
        more = f". More steps may be given once it is done, with {started.steps}"
    raise ValueError(
        f"{run} was started with another config: {'; '.join(changed)}. Go on without that, or start another run{more}"
    )


def _asked(stop: Callable[[], bool] | None) -> int | None:
    return signal.SIGINT if stop is not None and stop() else None
