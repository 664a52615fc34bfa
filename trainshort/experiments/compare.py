"""Methods x lengths x seeds: each run in its own folder, what is done already is not done again.

Leaves the runs, each with its evaluation.json, and comparison.json, which names them all with their records and is
extended when more methods, lengths, seeds or tests are compared into the same folder.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainshort.common.machine import in_words
from trainshort.data import PrepareConfig, TokenData
from trainshort.data.prepare import prepare
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.evaluation.records import Record, fingerprint, key_of, read_records
from trainshort.evaluation.windows import scored_span
from trainshort.experiments.comparison import NAME as NAME
from trainshort.experiments.comparison import Comparison, Entry, common_test
from trainshort.experiments.config import CompareConfig
from trainshort.experiments.contenders import contender
from trainshort.experiments.parallel import train_all, visible_gpus
from trainshort.experiments.samples import write_samples
from trainshort.experiments.watching import QUIET, Planned, Remaining, Watcher
from trainshort.positions import plain_options
from trainshort.training import RunFolder, TrainConfig
from trainshort.training.launch import is_launched
from trainshort.training.train import train


class Interrupted(KeyboardInterrupt):
    """A comparison was asked to stop; says what is done. The same comparison goes on from there."""

    def __init__(self, out: str, done: int, total: int, stop: KeyboardInterrupt) -> None:
        saved = f" ({stop})" if str(stop) else ""
        text = f"{out}: stopped with {done} of {total} runs trained and tested{saved}"
        super().__init__(f"{text}; the same compare goes on from there")
        self.status = int(getattr(stop, "status", 128 + signal.SIGINT))


def compare(config: CompareConfig, watcher: Watcher | None = None, *, progress: bool = True) -> dict[str, Any]:
    """Train and test everything that is not there yet; returns what comparison.json holds, earlier runs included.

    What happens is shown on stderr, or told to the watcher; progress=False: to nobody.
    """
    watcher = watcher or (Watcher() if progress else QUIET)
    if is_launched():
        raise RuntimeError(
            "compare starts processes of its own, one a GPU: run it without torchrun (one run on several GPUs is "
            "trained by trainshort train under torchrun)"
        )
    for position in config.positions:
        chosen = contender(position)
        plain_options(chosen.position, chosen.options)  # refuses what is not known before any work is done
    data = _data(config, watcher)
    _check_tests(config, data)
    trainings = [config.training(str(data.folder), *run) for run in config.runs()]
    planned = [Planned(number, len(trainings), training) for number, training in enumerate(trainings, 1)]
    for training in trainings:
        _refuse_another_run(training, data)
    comparison = Comparison(config, data)
    comparison.refuse_others(trainings)
    done = 0
    try:
        for entry, records in _made(config, planned, data, watcher):
            comparison.add(entry, records)
            if (test := common_test(entry["length"], records)) not in comparison.tests:
                comparison.tests.append(test)
            comparison.write()
            done += 1
    except KeyboardInterrupt as stop:
        raise Interrupted(config.out, done, len(planned), stop) from stop
    return comparison.content()


def _made(
    config: CompareConfig, planned: list[Planned], data: TokenData, watcher: Watcher
) -> Iterator[tuple[Entry, list[Record]]]:
    """Every run, trained and tested."""
    new = [run for run in planned if not RunFolder(run.folder).finished]
    slow = new  # what takes time: training and testing, or the tests alone
    gpus = visible_gpus(config.device)
    jobs = config.jobs or max(1, len(gpus))
    if jobs > 1 and len(new) > 1:
        train_all(new, jobs, watcher, gpus)
        slow = planned
    remaining, tokens = Remaining(len(slow)), _tokens(config, data)
    for run in planned:
        training = run.training
        head = f"{run.title}{remaining}"
        summary = _trained(training, run in new, head, watcher)
        test = replace(config.evaluation(training.length), tokens=tokens)
        records = _tested(training, test, data, head, watcher)
        write_samples(run.folder, data, training.length)
        remaining.add(int(run in slow))
        name = training.name or training.position
        about = {"position": name, "length": training.length, "seed": training.seed, "lr": training.lr}
        yield {"folder": run.folder.name} | about | {"config": training.to_dict(), "training": summary}, records


def _data(config: CompareConfig, watcher: Watcher) -> TokenData:
    if config.data is not None:
        return TokenData(config.data)
    folder = Path(config.out) / "data"
    if not (folder / "meta.json").exists():
        watcher.say("preparing the source of Python's standard library")
        prepare(PrepareConfig(sources=("stdlib",), out=str(folder)), progress=watcher.progress)
    return TokenData(folder)


def _check_tests(config: CompareConfig, data: TokenData) -> None:
    """Refuse lengths that the validation text cannot fill, before hours of training."""
    for length in config.length:
        scored_span(len(data.validation), config.lengths_for(length), limit=config.test_tokens)


def _tokens(config: CompareConfig, data: TokenData) -> int | None:
    """How many to score: the same for all training lengths where the text has enough for whole windows of all."""
    windows = math.lcm(*(max(config.lengths_for(length)) for length in config.length))
    there = len(data.validation) - 1
    there = there if config.test_tokens is None else min(there, config.test_tokens)
    return there - there % windows or config.test_tokens


def _refuse_another_run(training: TrainConfig, data: TokenData) -> None:
    run = RunFolder(training.out)
    if not run.has_config:
        return
    changed = run.config().differences(training)
    if run.has_checkpoint and run.state()["data"]["identity"] != data.identity:
        changed.append("it was trained on other data")
    if changed:
        raise ValueError(
            f"{training.out} holds another run ({'; '.join(changed)}): choose another folder with out (--out), or "
            "remove it"
        )


def _trained(training: TrainConfig, new: bool, head: str, watcher: Watcher) -> dict[str, Any]:
    """Train the run unless it is done; what it took."""
    run = RunFolder(training.out)
    if not run.finished:
        watcher.say(f"{head}: training")
        train(training, progress=watcher.progress, resume=True)
    state = run.state()
    seconds, tokens = float(state["seconds"]), training.steps * training.batch_tokens
    speed = tokens / seconds if seconds else 0.0
    how = f"trained in {seconds:,.0f} s" if new else "trained already"
    loaded = in_words(state.get("waiting"))
    watcher.say(f"{head}: {how}, {tokens:,} tokens, {speed:,.0f} a second{loaded}")
    figures = {"seconds": seconds, "tokens": tokens, "tokens_per_second": round(speed, 1)}
    return figures | {"waiting": state.get("waiting")} | state["environment"]


def _tested(
    training: TrainConfig, config: EvaluateConfig, data: TokenData, head: str, watcher: Watcher
) -> list[Record]:
    """Evaluate the run at the lengths whose records are not there yet; all of its records for this test."""
    folder = Path(training.out)
    first, last = scored_span(len(data.validation), config.lengths, limit=config.tokens, lead=config.lead)
    weights = fingerprint(folder / "model.safetensors")
    test: Record = {"model": weights, "data": data.identity, "split": config.split, "mode": config.mode}
    test |= {"first_token": first + 1, "end_token": last + 1, "dtype": config.dtype}
    keys = {key_of(test | {"length": each, "stride": config.stride_of(each)}) for each in config.lengths}

    def wanted() -> dict[int, Record]:
        return {record["length"]: record for record in read_records(folder, weights) if key_of(record) in keys}

    missing = tuple(length for length in config.lengths if length not in wanted())
    if missing:
        watcher.say(f"{head}: testing at {', '.join(f'{length:,}' for length in missing)}")
        with watcher.testing(len(missing)) as on_scored:
            evaluate(folder, data, replace(config, lengths=missing, tokens=last - first), on_scored=on_scored)
    found = wanted()
    return [found[length] for length in config.lengths]
