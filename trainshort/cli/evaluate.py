"""Perplexity of a run or a public model at any lengths, on exactly the same tokens at every length.

Writes evaluation.json: for each length perplexity per token and word, bits per byte, loss by position in the window,
speed, peak memory and, under ALiBi, what certified windows keep. Into a run's own folder; a public model's folder
stays as it is, and its figures go to evaluations/NAME. To put models with different tokenizers side by side, evaluate
each on the same --text, and name their folders to `trainshort report`.

With --task recall: how often a model finds a passkey, or a passage of the text, that stood once in its window, by
length and depth, among several answers. Writes recall.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainshort.cli.errors import UsageError
from trainshort.cli.folders import check_one_model
from trainshort.cli.settings import options_from
from trainshort.cli.stopping import ending_undisturbed, on_stop
from trainshort.evaluation.about import place_for, with_options
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.recall_config import ANSWER, RecallConfig, shortest_window
from trainshort.training.launch import EndedByOthersError, is_launched, number_of_processes, rank

if TYPE_CHECKING:
    from trainshort.evaluation.runs import OpenedRun

# Flags that mean something for one task only.
PERPLEXITY_ALONE = ("mode", "stride", "tokens", "lead", "kept", "attention", "context_parallel")
RECALL_ALONE = ("depths", "trials", "choices", "seed")

EXAMPLES = """
  trainshort evaluate runs/alibi-256                          at 1 to 16 times the trained length
  trainshort evaluate runs/alibi-256 --lengths 256 512 4096
  trainshort evaluate runs/alibi-256 --lengths 1024 --mode sliding --stride 64 --tokens 20000
  trainshort evaluate runs/alibi-256 --lengths 1024 --data other
  trainshort evaluate bloom-560m --lengths 2048 8192 --text book.txt     a public model, on a text of yours
  trainshort evaluate runs/alibi-256 --lengths 2048 8192 --text book.txt && \\
    trainshort report evaluations/bloom-560m runs/alibi-256              both side by side
  trainshort evaluate runs/rotary-256 --set position.scaling=yarn        stretched for longer texts, not trained anew
  trainshort evaluate runs/alibi-256 --task recall --lengths 256 1024 4096
  torchrun --nproc-per-node 4 -m trainshort evaluate runs/alibi-256 --lengths 1000000 --context-parallel
"""


def _of_recall(name: str) -> Any:
    """The field of that name of RecallConfig, as a flag here."""
    found = next(each for each in fields(RecallConfig) if each.name == name)
    return field(default=found.default, metadata={"help": f"{found.metadata['help']}; for --task recall"})


@dataclass(frozen=True, kw_only=True)
class Flags(EvaluateConfig):
    """What to evaluate, how, and on what."""

    run: str = field(metadata={"help": "the folder that train wrote, or that of a public model", "positional": True})
    data: str | None = field(
        default=None, metadata={"help": "a folder that prepare wrote (default: the one the run was trained on)"}
    )
    text: str | None = field(
        default=None,
        metadata={
            "help": "a text file instead, in tokens of the model's own tokenizer.json, scored to its end (default "
            "for public models: the beginning of the Python library's source)",
            "metavar": "FILE",
        },
    )
    out: str | None = field(
        default=None,
        metadata={"help": "the folder for the figures (default: a run's own; evaluations/NAME for public models)"},
    )
    set: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "options of the position method that are to be other than saved, such as position.scaling=yarn; "
            "the figures go to evaluations/NAME",
            "metavar": "NAME=VALUE",
        },
    )
    table: bool = field(
        default=True,
        metadata={"help": "print what was measured as a table; without it the package rich is not needed"},
    )
    context_parallel: bool = field(
        default=False, metadata={"help": "share every window among the processes of torchrun, a span each"}
    )
    task: Literal["perplexity", "recall"] = field(default="perplexity", metadata={"help": "what to measure"})
    depths: tuple[int, ...] = _of_recall("depths")
    trials: int = _of_recall("trials")
    choices: int = _of_recall("choices")
    seed: int = _of_recall("seed")

    @classmethod
    def from_flags(cls, **given: Any) -> Flags:
        task = given.get("task", "perplexity")
        others, their_task = (RECALL_ALONE, "recall") if task == "perplexity" else (PERPLEXITY_ALONE, "perplexity")
        for name in others:
            if name in given:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --task {their_task}, and this is --task {task}: leave it out"
                )
        return cls(**given)

    @property
    def position_options(self) -> dict[str, Any]:
        model, position = options_from(self.set)
        if model:
            came = ", ".join(model)
            raise UsageError(f"--set takes options of positions here, such as position.scaling=yarn; got {came}")
        return position


def needs(flags: Flags) -> tuple[str, ...]:
    """Packages that an extra brings."""
    return ("rich",) if flags.table else ()


def run(flags: Flags) -> None:
    from trainshort.evaluation.runs import open_run

    if number_of_processes() > 1 and not flags.context_parallel:
        alone = "start trainshort evaluate without torchrun"
        shared = "" if flags.task == "recall" else "share windows among them with --context-parallel, or "
        count = number_of_processes()
        raise UsageError(f"torchrun started {count} processes, and each would measure everything: {shared}{alone}")
    if flags.text is not None and flags.split != "validation":
        raise ValueError("split is for prepared data (--data): a text is scored whole")
    check_one_model(flags.run)
    opened = open_run(flags.run, flags.data, flags.text)  # what is wrong with a run shows before torch is there
    place = place_for(opened.folder, opened.config, flags.out, flags.position_options)
    measure = _perplexity if flags.task == "perplexity" else _recall
    name = measure(flags, opened, place, flags.lengths or opened.usual_lengths())
    if name is None:  # another process tells of it
        return
    print(f"{place / name} holds these figures")
    if place != opened.folder:
        print(f"trainshort report {place} OTHERS... shows them beside those of other models and runs")


def _perplexity(flags: Flags, opened: OpenedRun, place: Path, lengths: tuple[int, ...]) -> str | None:
    """Measure, and show the table; the name of the file, None in processes beside the first."""
    from trainshort.evaluation.evaluate import evaluate
    from trainshort.evaluation.progress import evaluation_progress
    from trainshort.evaluation.records import NAME

    values = {each.name: getattr(flags, each.name) for each in fields(EvaluateConfig)}
    config = EvaluateConfig(**(values | {"lengths": lengths}))
    records: list[dict[str, Any]] = []

    def left() -> str:
        first = records[0] if records else {"whole_text": True}
        tokens = "" if first.get("whole_text") else f" --tokens {first['end_token'] - first['first_token']}"
        return _left([each["length"] for each in records], config.lengths, place / NAME, tokens)

    progress = evaluation_progress(len(lengths)) if rank() == 0 else nullcontext()
    with on_stop(lambda: f"stopped; {left()}"), _sharing(config, flags, left) as own, progress as on_scored:
        evaluate(
            opened.folder,
            opened.data,
            own,
            out=place,
            position_options=flags.position_options,
            on_scored=on_scored,
            on_record=records.append,
        )
    if rank() > 0:
        return None
    if flags.table:
        from trainshort.cli.shown import evaluation_table, print_table

        print_table(evaluation_table(with_options(str(opened.folder), flags.position_options), records))
    return NAME


@contextmanager
def _sharing(config: EvaluateConfig, flags: Flags, left: Callable[[], str]) -> Iterator[EvaluateConfig]:
    """With --context-parallel, in one of the processes that torchrun started: its device, and windows are shared."""
    if not flags.context_parallel:
        yield config
        return
    if not is_launched():
        raise ValueError(
            "--context-parallel shares windows among processes: start them with "
            f"torchrun --nproc-per-node N -m trainshort evaluate {flags.run} --context-parallel ..."
        )
    import torch.distributed as dist

    from trainshort.ops.context.parallel import context_parallel
    from trainshort.training.processes import in_group

    def lost(rank: int) -> str:
        return f"{flags.run}: a process of this evaluation has ended (rank {rank} has lost it); {left()}"

    try:
        with (
            in_group(config.device or "auto", lost) as processes,
            ending_undisturbed(),
            context_parallel(dist.group.WORLD),
        ):
            yield replace(config, device=str(processes.device))
    except EndedByOthersError as error:  # who failed first has said it
        raise SystemExit(1) from error


def _recall(flags: Flags, opened: OpenedRun, place: Path, lengths: tuple[int, ...]) -> str:
    """The same for recall. Of the usual lengths those that are long enough for it."""
    if not flags.lengths:
        lengths = tuple(length for length in lengths if length >= shortest_window()) or lengths
    values = {each.name: getattr(flags, each.name) for each in fields(RecallConfig)}
    config = RecallConfig(**(values | {"lengths": lengths}))
    from trainshort.evaluation.progress import evaluation_progress
    from trainshort.evaluation.recall import recall
    from trainshort.evaluation.recall_records import NAME

    records: list[dict[str, Any]] = []

    def left() -> str:
        tasks = Counter(each["length"] for each in records)
        done = [length for length in config.lengths if tasks[length] == len(ANSWER)]
        return f"stopped; {_left(done, config.lengths, place / NAME)}"

    with on_stop(left), evaluation_progress(len(lengths)) as on_fed:
        recall(
            opened.folder,
            opened.data,
            config,
            out=place,
            position_options=flags.position_options,
            on_fed=on_fed,
            on_record=records.append,
        )
    if flags.table:
        from trainshort.cli.shown import print_table, recall_table

        print_table(recall_table(with_options(str(opened.folder), flags.position_options), records))
    return NAME


def _left(done: Sequence[int], lengths: Sequence[int], path: Path, more: str = "") -> str:
    """What is there and what is not, after it was stopped."""
    names = ", ".join(f"{length:,}" for length in done)
    kept = f"{names} is done and in {path}" if done else "no length is done yet"
    rest = " ".join(str(length) for length in lengths if length not in done)
    return f"{kept}; go on with --lengths {rest}{more} and the other flags as they were"
