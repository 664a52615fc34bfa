"""Perplexity of a run at any lengths, on exactly the same tokens at every length.

Writes evaluation.json into the run's folder: for each length perplexity per token and word, bits per byte, loss by
position in the window, speed, peak memory and, under ALiBi, what certified windows keep.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from trainshort.cli.stopping import on_stop
from trainshort.evaluation.config import EvaluateConfig

if TYPE_CHECKING:
    from trainshort.evaluation.runs import OpenedRun

EXAMPLES = """
  trainshort evaluate runs/alibi-256                          at 1 to 16 times the trained length
  trainshort evaluate runs/alibi-256 --lengths 256 512 4096
  trainshort evaluate runs/alibi-256 --lengths 1024 --mode sliding --stride 64 --tokens 20000
  trainshort evaluate runs/alibi-256 --lengths 1024 --data other
  torchrun --nproc-per-node 4 -m trainshort evaluate runs/alibi-256 --lengths 1000000 --context-parallel
"""


@dataclass(frozen=True, kw_only=True)
class Flags(EvaluateConfig):
    """What to evaluate, how, and on what."""

    run: str = field(metadata={"help": "the folder that train wrote", "positional": True})
    data: str | None = field(
        default=None, metadata={"help": "a folder that prepare wrote (default: the one the run was trained on)"}
    )
    context_parallel: bool = field(
        default=False, metadata={"help": "share every window among the processes of torchrun, a span each"}
    )


def run(flags: Flags) -> None:
    from trainshort.evaluation.runs import open_run

    opened = open_run(flags.run, flags.data)  # what is wrong with the folders shows before torch is there
    from trainshort.cli.shown import evaluation_table, print_table
    from trainshort.evaluation.evaluate import evaluate
    from trainshort.evaluation.progress import evaluation_progress
    from trainshort.evaluation.records import NAME

    values = {each.name: getattr(flags, each.name) for each in fields(EvaluateConfig)}
    if not flags.lengths:
        values["lengths"] = opened.usual_lengths()
    config = EvaluateConfig(**values)
    done: list[int] = []

    def left() -> str:
        names = ", ".join(f"{length:,}" for length in done)
        kept = f"{names} is done and in {opened.folder / NAME}" if done else "no length is done yet"
        rest = " ".join(str(length) for length in config.lengths if length not in done)
        tokens = "" if first is None else f" --tokens {first['end_token'] - first['first_token']}"
        return f"stopped; {kept}; go on with --lengths {rest}{tokens} and the other flags as they were"

    first: dict[str, Any] | None = None

    def on_record(record: dict[str, Any]) -> None:
        nonlocal first
        first = first or record
        done.append(record["length"])

    if flags.context_parallel:
        _evaluate_over_ranks(flags, opened, config)
        return
    with on_stop(left), evaluation_progress(len(config.lengths)) as on_scored:
        records = evaluate(opened.folder, opened.data, config, on_scored=on_scored, on_record=on_record)
    print_table(evaluation_table(str(opened.folder), records))


def _evaluate_over_ranks(flags: Flags, opened: OpenedRun, config: EvaluateConfig) -> None:
    """One of the processes that torchrun started. The first one alone writes and prints."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from trainshort.cli.shown import evaluation_table, print_table
    from trainshort.common.devices import device_for
    from trainshort.evaluation.evaluate import evaluate
    from trainshort.ops.context.parallel import context_parallel

    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "--context-parallel shares windows among processes: start them with "
            f"torchrun --nproc-per-node N -m trainshort evaluate {flags.run} --context-parallel ..."
        )
    device = device_for(flags.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))  # starts the process group
    try:
        with context_parallel(mesh) as parallel:
            records = evaluate(opened.folder, opened.data, replace(config, device=str(device)))
        if parallel.rank == 0:
            print_table(evaluation_table(str(opened.folder), records))
    finally:
        dist.destroy_process_group()
