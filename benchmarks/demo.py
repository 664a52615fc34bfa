"""Run the comparison of `make demo` from its start, for the figure of the docs: trained short, tested long.

python benchmarks/demo.py --out benchmarks/results/demo.json && python benchmarks/charts.py

Perplexities say nothing of speed, so a machine that is busy will do. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention_cpu import about

from trainshort.experiments.compare import compare
from trainshort.experiments.recipes import demo


def records(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "position": run["position"],
            "trained_length": run["length"],
            "lengths": [record["length"] for record in run["records"]],
            "perplexities": [round(record["perplexity"], 4) for record in run["records"]],
        }
        for run in comparison["runs"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = records(compare(replace(demo(), out=f"{folder}/demo")))
    options.out.write_text(json.dumps({"about": about(2, "demo"), "records": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
