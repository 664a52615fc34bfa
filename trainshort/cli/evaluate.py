"""Perplexity of a run or a public model at any lengths, on exactly the same tokens at every length.

Writes evaluation.json: for each length perplexity per token and word, bits per byte, loss by position in the window,
speed, peak memory and, under ALiBi, what certified windows keep. Into a run's own folder; a public model's folder
stays as it is, and its figures go to evaluations/NAME. To put models with different tokenizers side by side, evaluate
each on the same --text, and name their folders to `trainshort report`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trainshort.cli.stopping import on_stop
from trainshort.evaluation.config import EvaluateConfig

EXAMPLES = """
  trainshort evaluate runs/alibi-256                          at 1 to 16 times the trained length
  trainshort evaluate runs/alibi-256 --lengths 256 512 4096
  trainshort evaluate runs/alibi-256 --lengths 1024 --mode sliding --stride 64 --tokens 20000
  trainshort evaluate runs/alibi-256 --lengths 1024 --data other
  trainshort evaluate bloom-560m --lengths 2048 8192 --text book.txt     a public model, on a text of yours
  trainshort evaluate runs/alibi-256 --lengths 2048 8192 --text book.txt && \\
    trainshort report evaluations/bloom-560m runs/alibi-256              both side by side
"""


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
        metadata={
            "help": "the folder for evaluation.json (default: a run's own; evaluations/NAME for public models)"
        },
    )


def run(flags: Flags) -> None:
    from trainshort.evaluation.about import place_for
    from trainshort.evaluation.runs import open_run

    if flags.text is not None and flags.split != "validation":
        raise ValueError("split is for prepared data (--data): a text is scored whole")
    opened = open_run(flags.run, flags.data, flags.text)  # what is wrong with a run shows before torch is there
    place = place_for(opened.folder, opened.config, flags.out)
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
        kept = f"{names} is done and in {place / NAME}" if done else "no length is done yet"
        rest = " ".join(str(length) for length in config.lengths if length not in done)
        whole = first is None or first.get("whole_text")
        tokens = "" if first is None or whole else f" --tokens {first['end_token'] - first['first_token']}"
        return f"stopped; {kept}; go on with --lengths {rest}{tokens} and the other flags as they were"

    first: dict[str, Any] | None = None

    def on_record(record: dict[str, Any]) -> None:
        nonlocal first
        first = first or record
        done.append(record["length"])

    with on_stop(left), evaluation_progress(len(config.lengths)) as on_scored:
        records = evaluate(opened.folder, opened.data, config, out=place, on_scored=on_scored, on_record=on_record)
    print_table(evaluation_table(str(opened.folder), records))
    print(f"{place / NAME} holds these figures")
    if place != opened.folder:
        print(f"trainshort report {place} OTHERS... shows them beside those of other models and runs")
