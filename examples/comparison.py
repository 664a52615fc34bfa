"""A comparison from Python: train position methods on short texts, test them on long ones, read the figures.

It is what `trainshort compare` does, for those who want the numbers rather than the table: everything comes back as
plain dictionaries, and lies in the folder of the runs as JSON. What is there already is not done again; another
text has a folder of its own, and other steps need one (--out).

    python examples/comparison.py                            on the source of Python's library: a minute
    python examples/comparison.py --text book.txt            on a text of yours
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from trainshort.data import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.experiments.compare import compare
from trainshort.experiments.config import CompareConfig
from trainshort.report.build import build_report


def losses(run: dict[str, Any]) -> dict[int, float]:
    """The mean loss of a run in nats, by the length of the test windows; every length scores the same tokens."""
    return {record["length"]: record["nll_sum"] / record["scored_tokens"] for record in run["records"]}


def main(text: str | None, out: str, **settings: Any) -> dict[str, Any]:
    data = None
    if text is not None:
        # Written anew each time: the same text gives the same tokens, and runs on another are refused.
        data = str(prepare(PrepareConfig(sources=(text,), out=f"{out}/data", overwrite=True), progress=False))
    fields: dict[str, Any] = {
        "positions": ("alibi", "rotary", "sinusoidal"), "length": (64,), "multiples": (1, 4, 16), "num_layers": 2,
        "d_model": 64, "num_heads": 4, "batch_tokens": 2048, "test_tokens": 32768,
    }  # fmt: skip
    result = compare(CompareConfig(data=data, out=out, **(fields | settings)), progress=False)
    print(f"{'perplexity, tested at':24}", *(f"{length:>8,}" for length in losses(result["runs"][0])))
    for run in result["runs"]:
        print(f"{run['position']:24}", *(f"{math.exp(loss):8.2f}" for loss in losses(run).values()))
    for run in result["runs"]:
        by_length, trained = losses(run), run["length"]
        longest = max(by_length)
        change = by_length[longest] - by_length[trained]
        verdict = "is as good in" if abs(change) < 0.005 else "gains from" if change < 0 else "is hurt by"
        print(
            f"{run['position']}, trained at {trained}, {verdict} windows of {longest:,}: {change:+.3f} nats a token"
        )
    print(f"the report is {build_report([out], f'{out}/report', figures=False).page}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a file to train and test on")
    parser.add_argument("--out", help="the folder of the runs; runs/comparison, or runs/comparison-NAME for a text")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    folder = "runs/comparison" if given.text is None else f"runs/comparison-{Path(given.text).stem}"
    try:
        main(given.text, given.out or folder, steps=given.steps)
    except (ValueError, OSError) as error:
        sys.exit(f"comparison: {error}")
