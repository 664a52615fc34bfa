"""The processes that train one run: this one alone, or those that torchrun has started, and what they agree on.

Alone, torch.distributed is not touched. With several, each has a rank; rank 0 writes the files of the run that are
there once, and shows what happens. An error on one rank ends all of them, and only the first to fail speaks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainshort.common.devices import device_for
from trainshort.ops.context.parallel import context_parallel
from trainshort.training.config import TrainConfig
from trainshort.training.launch import (
    EndedByOthersError,
    ends_at_once,
    is_launched,
    lasting_store,
    local_rank,
    number_of_processes,
    restarts,
)

ALLOWED = "auto, cpu, or one that torch finds here"
# What collectives say where a process at the other end has gone, and words of theirs that stand in other errors too.
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
PERHAPS_GONE = ("gloo", "NCCL", "TCPStore", "c10d")
FAILURES = "trainshort/failures"
BEGUN = "trainshort/begun"
Result = TypeVar("Result")


class Processes:
    """This process, alone. Everything it has to agree on with others, it agrees on with itself."""

    kind: str | None = None  # ddp or fsdp, where there is torch.distributed
    rank, world = 0, 1
    place, places = 0, 1  # of the rows of a batch: which share this process computes, of how many
    span, spans = 0, 1  # of the tokens of a row: the same
    weight: Tensor | None = None  # of the gradient of a loss: backward passes then average over processes

    def __init__(self, config: TrainConfig) -> None:
        self.before_leaving = contextlib.ExitStack()  # what has to be done before the process group ends
        named = None if config.device == "auto" else config.device
        self.device = device_for(named, allowed=ALLOWED)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def split(self, spans: int) -> None:
        """From now on so many processes share each row of a batch."""
        if spans != 1:
            raise ValueError(_no_spans(spans, "here is one; start more with torchrun --nproc-per-node N"))

    def rows(self, count: int) -> slice:
        """Which of so many rows of a batch are computed here: contiguous, and nearly as many everywhere."""
        return _share(count, self.place, self.places)

    def tokens(self, count: int) -> slice:
        """Which of so many tokens of each of these rows are."""
        return _share(count, self.span, self.spans)

    def sharing_rows(self) -> contextlib.AbstractContextManager[Any]:
        """Around calls of the model on these tokens, and around backward passes: losses are those of whole rows."""
        return contextlib.nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor, with the sum over all processes that have other rows in it."""
        return tensor

    def largest(self, number: int) -> int:
        return number

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, as JSON would have it, by rank."""
        return [value]

    def together(self, do: Callable[[], Result]) -> list[Result]:
        """Done by every process: the results by rank, or everywhere the error of the first rank that has one."""
        return [do()]

    def by_first(self, do: Callable[[], Result]) -> Result:
        """Done by rank 0, while the others wait for the result, or for the error."""
        return do()


class _Joined(Processes):
    """One of several processes, with torch.distributed."""

    made = 0  # so many before: runs of one process group are told apart by it

    def __init__(self, device: str, kind: str) -> None:
        _Joined.made += 1
        self.before_leaving = contextlib.ExitStack()
        self.kind, self.number = kind, _Joined.made
        self.device = _device_of_rank(device)
        self.owned = not _is_in_group()
        if self.owned:
            _meet(self.device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # Gradients of all ranks are to be summed: each has those of its own rows, or of its own tokens of them.
        self.weight = torch.full((), float(self.world), device=self.device)
        self.place, self.places = self.rank, self.world
        self.mesh: DeviceMesh | None = None  # where rows are split: rows go over "data", tokens over "context"

    def split(self, spans: int) -> None:
        if self.world % spans:
            raise ValueError(_no_spans(spans, f"it has to divide the number of all, {self.world}"))
        if spans == 1:
            return
        shape = (self.world // spans, spans)
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "context"))
        self.place, self.places = self.mesh.get_local_rank("data"), shape[0]
        self.span, self.spans = self.mesh.get_local_rank("context"), shape[1]

    def sharing_rows(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else context_parallel(self.mesh["context"])

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=None if self.mesh is None else self.mesh.get_group("data"))
        return tensor

    def largest(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, value: Any) -> list[Any]:
        found: list[str] = [""] * self.world
        dist.all_gather_object(found, json.dumps(value))
        return [json.loads(each) for each in found]

    def together(self, do: Callable[[], Result]) -> list[Result]:
        result, error = None, None
        try:
            result = do()
        except Exception as raised:
            error = raised
        outcomes = self.gather({"result": result if error is None else None, "error": _in_words(error)})
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome["error"] is not None]
        if not failed:
            return [outcome["result"] for outcome in outcomes]
        if error is not None and self.rank == failed[0]:
            raise error
        raise EndedByOthersError(f"rank {failed[0]}: {outcomes[failed[0]]['error']}") from error

    def by_first(self, do: Callable[[], Result]) -> Result:
        return self.together(lambda: do() if self.is_first else None)[0]  # type: ignore[return-value]

    def is_first_to_fail(self) -> bool:
        """Whether no other process has asked this before. The store outlives ranks: torchrun's own process has it."""
        try:
            store = dist.distributed_c10d._get_default_store()
            return int(store.add(f"{FAILURES}/{self.number}", 1)) == 1
        except Exception:
            return True

    def leave(self, failed: bool) -> None:
        """On a GPU a group that has lost a process is left alone: to end it would wait for that process."""
        self.before_leaving.close()
        if self.owned and not ends_at_once() and not (failed and self.device.type == "cuda"):
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            # Shards keep their group until the interpreter ends, and gloo's threads need Python's lock once more, to
            # free the tensors of the last exchange: here they get it.
            time.sleep(0.1 if self.kind == "fsdp" else 0)


@contextlib.contextmanager
def joined(config: TrainConfig) -> Iterator[Processes]:
    """The processes of this run, as long as the context is open."""
    kind = kind_of(config)
    if kind is None:
        yield Processes(config)
        return

    def lost(rank: int) -> str:
        return (
            f"{config.out}: a process of this run has ended (rank {rank} has lost it; logs/ in the run folder says "
            "what each did last). The last checkpoint is whole: go on with resume (--resume)"
        )

    with in_group(config.device, lost, kind) as processes:
        yield processes


@contextlib.contextmanager
def in_group(device: str, lost: Callable[[int], str], kind: str = "ddp") -> Iterator[Processes]:
    """The processes that torchrun has started, in a process group. lost: what this rank says if another has gone."""
    processes = _Joined(device, kind)
    failed = True
    try:
        yield processes
        failed = False
    except Exception as error:
        if isinstance(error, EndedByOthersError) or not processes.is_first_to_fail():
            raise EndedByOthersError(str(error)) from error
        if (said := _said_of_loss(error)) is not None:
            raise RuntimeError(lost(processes.rank) + said) from error
        raise
    finally:
        processes.leave(failed)


def kind_of(config: TrainConfig) -> str | None:
    """How the processes share the work, or None for a process alone."""
    if not is_launched() and not _is_in_group():
        if config.parallel is not None:
            raise ValueError(
                f"parallel {config.parallel!r} needs processes that torchrun starts: torchrun --nproc-per-node 2 -m "
                "trainshort train ...; or leave parallel (--parallel) out"
            )
        return None
    several = dist.get_world_size() if _is_in_group() else number_of_processes()
    return config.parallel or ("ddp" if several > 1 else None)


def remember_begun(folder: Path) -> None:
    """Rank 0 trains in this folder: processes that torchrun starts in place of these may go on there."""
    if (store := _lasting_store()) is not None:
        store.set(f"{BEGUN}/{folder.resolve()}", "yes")


def was_begun(folder: Path) -> bool:
    """Whether processes before this one, of the same job of torchrun, have trained in this folder."""
    store = _lasting_store() if restarts() > 0 else None
    return store is not None and bool(store.check([f"{BEGUN}/{folder.resolve()}"]))


def _lasting_store() -> Any:
    if (place := lasting_store()) is None:
        return None
    seconds = timedelta(seconds=60)
    return dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=seconds)  # type: ignore[attr-defined]


def _is_in_group() -> bool:
    """Whether somebody has made a process group already. Some builds of torch know of none."""
    return dist.is_available() and dist.is_initialized()


def _meet(device: torch.device) -> None:
    """Make the process group: gloo between CPUs, NCCL between GPUs.

    torchrun keeps its store when it restarts processes, with the addresses of those that have gone: each attempt
    writes under a name of its own.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(iter(rendezvous("env://")))
    own = dist.PrefixStore(f"attempt {restarts()}", store)  # type: ignore[attr-defined]
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=own, rank=rank, world_size=world)


def _device_of_rank(device: str) -> torch.device:
    found = device_for(None if device == "auto" else device, allowed=ALLOWED)
    if found.type == "cpu":
        return found
    if found.type != "cuda" or found.index is not None:
        raise ValueError(
            f"device must be auto, cpu or cuda with several processes, which share the GPUs by their ranks; got "
            f"{device!r}"
        )
    if (here := local_rank()) >= torch.cuda.device_count():
        raise ValueError(
            f"this machine has {torch.cuda.device_count()} GPUs, and process {here + 1} found none left: start as "
            "many processes as there are GPUs (torchrun --nproc-per-node), or use device cpu (--device cpu)"
        )
    return torch.device("cuda", here)


def _share(count: int, place: int, places: int) -> slice:
    return slice(place * count // places, (place + 1) * count // places)


def _no_spans(spans: int, why: str) -> str:
    return f"context_parallel (--context-parallel) is {spans}, the number of processes that share a row: {why}"


def _in_words(error: Exception | None) -> str | None:
    return None if error is None else " ".join(str(error).split()) or type(error).__name__


def _said_of_loss(error: BaseException | None) -> str | None:
    """None if this is not what a collective says when another process has gone; else what to repeat of it, if it may
    be something else after all."""
    if error is None:
        return None
    text = str(error) if isinstance(error, RuntimeError) else ""
    if any(words in text for words in GONE):
        return ""
    if any(word in text for word in PERHAPS_GONE):
        return f" (it said: {text.strip().splitlines()[0]})"
    return "" if isinstance(error, dist.DistError) else _said_of_loss(error.__cause__)
