"""docs/reproducing.md, made from the files in results/: tables, figures, and a verdict on each claim.

python results/page.py            # write the page and its figures
python results/page.py --check    # fail if the page is not what the files say

Without results there is no page. Figures are drawn by `trainshort report`'s own code.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

from claims import CLAIMS, verdict  # noqa: E402  beside this file
from found import Found, Run, text_of  # noqa: E402

PAPER = json.loads((HERE / "paper.json").read_text())
FIGURES = {  # of the report, and what the page says of them
    "extrapolation": "Perplexity on WikiText-103's validation set by test length, nonoverlapping windows",
    "sliding": "The same with sliding windows, which leave no token without context",
    "loss_by_position": "Loss by place in the window",
    "recall_passkey": "Recall of a passkey by length; the dashed line is chance",
    "recall_copy": "Recall of a passage by length",
    "kept": "What certified windows keep, by layer and head",
}
LABELS = {
    "alibi": "ALiBi", "sinusoidal": "sinusoidal", "rotary": "rotary", "t5": "T5 bias", "fox": "FoX",
    "alibi-free": "ALiBi, 2 of 8 heads without slope", "learned": "learned", "none": "no positions",
}  # fmt: skip


def main(results: Path = HERE, docs: Path = HERE.parent / "docs") -> int:
    page, found = docs / "reproducing.md", Found(results)
    text = page_of(found)
    if "--check" in sys.argv[1:]:
        there = page.read_text() if page.exists() else None
        if there == text:
            return 0
        print(f"{page} is not what results/ says: python results/page.py writes it")
        return 1
    if text is None:
        print("there are no results yet, and so no page: results/README.md says how they are made")
        return 0
    page.write_text(text)
    draw(found, docs / "reproduced")
    print(page)
    return 0


def page_of(found: Found) -> str | None:
    """None where there is nothing to show."""
    if not found.trained:
        return None
    parts = [head(found), claims(found)]
    for trained in found.lengths:
        parts.append(extrapolation(found, trained))
    parts += [headline(found), speeds(found), curse(found), recall(found), windows(found), rates(found), how(found)]
    return "\n".join(part for part in parts if part)


def draw(found: Found, folder: Path) -> None:
    """The figures of each training length, by the report's own code."""
    from trainshort.report.build import build_report

    for trained in found.lengths[:2]:
        runs = [run.folder for name in found.contenders for run in found.of(name, trained)]
        with tempfile.TemporaryDirectory() as place:
            build_report(runs, place)
            folder.mkdir(parents=True, exist_ok=True)
            for name in FIGURES:
                path = Path(place) / "figures" / f"{name}.svg"
                if path.exists():
                    shutil.copyfile(path, folder / f"{name}-{trained}.svg")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def head(found: Found) -> str:
    run = found.trained[0]
    model, train = run.read("config.json").get("model", {}), run.train
    runs = list(found.every())
    machines = sorted({str(each.made["machine"]["gpu"] or "a CPU") for each in runs})
    torches = sorted({each.made["machine"]["torch"] for each in runs})
    commits = sorted({each.made["commit"] for each in runs})
    seconds = sum({each.made["unit"]: each.made["seconds"] for each in runs}.values())
    tokens = train["steps"] * train["batch_tokens"] / 1e6
    shape = f"{model['num_layers']} layers, {model['d_model']} wide, {model['num_heads']} heads"
    steps = f"{train['steps']:,} steps of {train['batch_tokens']:,} tokens, {tokens:,.1f} million in all"
    return f"""<!-- made by results/page.py from the files in results/: change those, or that -->

# The paper's claims, run again

Every number here is of a run whose settings, commit, metrics and evaluations are in `results/`, made by `trainshort`
commands alone. {len({each.made["unit"] for each in runs})} units of work, {seconds / 60:,.0f} minutes of computing.

| | |
| --- | --- |
| model | {shape}, vocabulary of {model["vocab_size"]:,} |
| training | {steps}, of English Wikipedia of 2015 |
| tests | {", ".join(found.texts)}: each whole, every token but the first scored once at every length |
| machine | {", ".join(machines)}; torch {", ".join(torches)}; commits {", ".join(commits)} |

The models are far smaller than the paper's, and were trained on other text with another tokenizer: perplexities here
are comparable with each other, not with the paper's. What can be compared is what becomes of them beyond the trained
length, so tables give ratios beside them.
"""


def claims(found: Found) -> str:
    rows = []
    for claim in CLAIMS:
        checks = list(claim.checks(found))
        measured = "<br>".join(check.found for check in checks) or "–"
        rows.append((claim.says, claim.paper, measured, f"**{verdict(checks)}**", claim.rule))
    return "## Verdicts\n\n" + table(("claim", "the paper", "here", "verdict", "rule"), rows).replace(
        "| --- | ---: | ---: | ---: | ---: |", "| --- | --- | --- | --- | --- |"
    )


def extrapolation(found: Found, trained: int) -> str:
    contenders = [name for name in found.contenders if found.of(name, trained)]
    parts = [f"## Trained at {trained:,} tokens\n"]
    for text in found.texts:
        lengths = found.tested_lengths(trained, text)
        rows = []
        for name in contenders:
            seeds = len(found.of(name, trained))
            values = [found.perplexity(name, trained, length, text) for length in lengths]
            label = LABELS[name] + (f" ({seeds} seeds)" if seeds > 1 else "")
            rows.append((label, *(_with_ratio(value, values[0]) for value in values)))
            rows += _scaled_rows(found, name, trained, text, lengths, values[0])
        parts += [f"Perplexity on {text}, and its ratio to that at {trained:,}:\n"]
        parts += [table((f"{text}", *(f"{length:,}" for length in lengths)), rows)]
    if (paper := PAPER["extrapolation"].get(str(trained))) is not None:
        rows = []
        for name, values in paper["perplexity"].items():
            rows.append((LABELS[name], *(_with_ratio(value, values[0]) for value in values)))
        parts += [f"The paper's {paper['table']} ({PAPER['setting']}):\n"]
        parts += [table(("the paper", *(f"{length:,}" for length in paper["lengths"])), rows)]
    if trained in found.lengths[:2]:
        parts += [f"![{what}](reproduced/{name}-{trained}.svg)\n" for name, what in _drawn(found, trained)]
    return "\n".join(parts)


def _drawn(found: Found, trained: int) -> list[tuple[str, str]]:
    runs = [run for run in found.trained if run.train["length"] == trained]
    there = {"extrapolation"}
    there |= {"loss_by_position" for run in runs for each in run.records if "loss_by_position" in each}
    there |= {"sliding" for run in runs for each in run.records if each["mode"] == "sliding"}
    there |= {f"recall_{each['task']}" for run in runs for each in run.recall}
    there |= {"kept" for run in runs for each in run.records if "kept" in each}
    return [(name, what) for name, what in FIGURES.items() if name in there]


def _scaled_rows(
    found: Found, name: str, trained: int, text: str, lengths: Sequence[int], base: float | None
) -> list[tuple[str, ...]]:
    """The same weights, stretched for longer texts: of the first seed, like all that is scaled."""
    rows = []
    for run in found.runs("scaled"):
        stem, way = run.folder.name.rsplit("-", 1)
        if stem != f"{name}-{trained}-seed0":
            continue
        values = {each["length"]: each.get("perplexity") for each in run.records if text_of(each) == text}
        if values:
            rows.append(
                (f"{LABELS[name]}, scaled: {way}", *(_with_ratio(values.get(each), base) for each in lengths))
            )
    return rows


def _with_ratio(value: float | None, base: float | None) -> str:
    if value is None:
        return "–"
    return number(value) + (f" (×{number(value / base)})" if base else "")


def headline(found: Found) -> str:
    """ALiBi trained short beside sinusoidal trained at the length of the test."""
    if found.short is None:
        return ""
    rows = []
    for trained in (found.short, 2 * found.short):
        for name, own in (("alibi", trained), ("sinusoidal", 2 * trained)):
            row = [LABELS[name], f"{own:,}", f"{2 * trained:,}", number(found.perplexity(name, own, 2 * trained))]
            for attention in ("dense", "auto"):
                run = found.speed(name, attention, own)
                row += [
                    _thousands(run.training_speed if run else None),
                    _gigabytes(run.training_memory if run else None),
                ]
            rows.append(row)
    columns = ("", "trained at", "tested at", "perplexity", "dense: tokens/s", "GB", "kernels: tokens/s", "GB")
    text = (
        "ALiBi trained short beside sinusoidal trained at the length of the test; speed and memory of training, with"
    )
    return (
        f"## Train short, test long\n\n{text}\ndense attention as in the paper's time and with today's kernels.\n\n"
        + table(columns, rows)
    )


def _thousands(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e3:,.0f}k"


def _gigabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e9:,.2f}"


def speeds(found: Found) -> str:
    if not found.runs("speed"):
        return ""
    parts = ["## Speed and memory\n"]
    names = {"dense": "dense attention, as in the paper's time", "auto": "today's kernels"}
    for attention, what in names.items():
        lengths = found.speed_lengths(attention)
        contenders = [each for each in LABELS if any(found.speed(each, attention, length) for length in lengths)]
        kinds = {
            "training, tokens/s": lambda run: _thousands(run.training_speed),
            "training, GB": lambda run: _gigabytes(run.training_memory),
            "evaluation, tokens/s": lambda run: _thousands(_tested(run, "tokens_per_second")),
            "evaluation, GB": lambda run: _gigabytes(_tested(run, "peak_memory_bytes")),
        }
        rows = []
        for kind, show in kinds.items():
            for name in contenders:
                runs = [found.speed(name, attention, length) for length in lengths]
                rows.append((f"{LABELS[name]}: {kind}", *(_shown(run, show) for run in runs)))
        parts += [f"With {what}:\n", table(("", *(f"{length:,}" for length in lengths)), rows)]
    paper = PAPER["speed"]
    rows = [
        (f"{LABELS[name]}: {kind}", *(number(value, 1) for value in values))
        for kind in ("training", "evaluation", "memory")
        for name, values in paper[kind].items()
    ]
    parts += [f"The paper's {paper['table']} ({paper['setting']}):\n"]
    parts += [table(("the paper", *(f"{length:,}" for length in paper["lengths"])), rows)]
    return "\n".join(parts)


def _tested(run: Run, name: str) -> float | int | None:
    return run.records[0].get(name) if run.records else None


def _shown(run: Run | None, show: object) -> str:
    if run is None:
        return "–"
    out = any(f"/{run.folder.name}" in " ".join(each["command"]) for each in run.made.get("failed", []))
    assert callable(show)
    return "out of memory" if out else str(show(run))


def curse(found: Found) -> str:
    """Small strides: every token with a full window."""
    rows, lengths = [], set[int]()
    by_row = []
    for trained in found.lengths[:2]:
        for name in found.contenders:
            if small := found.sliding(name, trained, small=True):
                by_row.append((f"{LABELS[name]}, L = {trained:,}", small))
                lengths |= set(small)
    if not by_row:
        return ""
    ordered = sorted(lengths)
    rows = [(label, *(number(small.get(length)) for length in ordered)) for label, small in by_row]
    paper = PAPER["small_stride"]
    known = dict(zip(paper["lengths"], paper["alibi"]["512"], strict=True))
    rows.append(("the paper: ALiBi, L = 512, stride 1", *(number(known.get(length)) for length in ordered)))
    intro = (
        "Windows that slide by a few tokens give every token a full window. What longer windows gain here is use of\n"
        "the longer context; what they gain beyond it above is fewer early tokens with little context.\n"
    )
    return f"## The early token curse\n\n{intro}\n" + table(("perplexity", *(f"{each:,}" for each in ordered)), rows)


def recall(found: Found) -> str:
    rows, lengths = [], set[int]()
    for task in ("passkey", "copy"):
        for run in [*found.trained, *found.runs("scaled")]:
            records = {each["length"]: each for each in run.recall if each["task"] == task}
            if records and run.folder.name.split("-seed")[1][:1] == "0":
                lengths |= set(records)
                rows.append((task, run.folder.name.replace("-seed0", ""), records))
    if not rows:
        return ""
    ordered, chance = sorted(lengths), 1 / next(iter(rows[0][2].values()))["choices"]
    shown = [(task, name, *(_share(records.get(length)) for length in ordered)) for task, name, records in rows]
    intro = (
        f"The share of right answers over all depths of a window; chance is {chance:.1%}. Names are of folders in\n"
        "`results/`: the method, the training length, and how it was stretched.\n"
    )
    return f"## Recall\n\n{intro}\n" + table(("task", "run", *(f"{each:,}" for each in ordered)), shown)


def _share(record: dict | None) -> str:
    if record is None:
        return "–"
    return f"{statistics.fmean(record['correct']) / record['trials']:.0%}"


def windows(found: Found) -> str:
    """What certified windows say about how far heads can see, by layer."""
    rows = []
    for run in found.trained:
        seen = run.read("inspection.json")
        if not seen.get("penalty") or run.train["seed"]:
            continue
        heads = seen["heads"]
        for layer, visited in enumerate(heads["visited"]):
            values = [statistics.fmean(heads[name][layer]) for name in ("reach", "needed")]
            cells = (f"{statistics.fmean(visited):.0%}", f"{values[0]:,.0f}", f"{max(heads['farthest'][layer]):,.0f}")
            first = f"{LABELS[run.contender]}, L = {run.train['length']:,}" if layer == 0 else ""
            rows.append((first, str(layer + 1), *cells, f"{values[1]:,.0f}"))
    if not rows:
        return ""
    columns = ("", "layer", "keys visited", "windows end, tokens away", "at most", "99% of attention within")
    intro = (
        "Of the first tokens of a book: the share of keys that attention visits, how many tokens away certified\n"
        "windows end (everything beyond provably can't matter), and within how many tokens 99% of the attention\n"
        "really lies; means over heads.\n"
    )
    return f"## How far heads can see\n\n{intro}\n" + table(columns, rows)


def rates(found: Found) -> str:
    tries = found.runs("rates")
    if not tries:
        return ""
    rows = []
    for run in sorted(tries, key=lambda run: (list(LABELS).index(run.contender), run.train["lr"])):
        used = any(each.train["lr"] == run.train["lr"] for each in found.of(run.contender, run.train["length"]))
        loss = "diverged" if run.validation_loss is None else number(run.validation_loss, 4)
        rows.append((LABELS[run.contender], f"{run.train['lr']:g}", loss, "used everywhere" if used else ""))
    intro = "Each method was tried with the same learning rates; the validation text is in no table above.\n"
    return f"## Learning rates\n\n{intro}\n" + table(("", "learning rate", "validation loss", ""), rows)


def how(found: Found) -> str:
    return (
        "## To do it again\n\n`results/README.md` has the commands; `made.json` in the folder of each run lists\n"
        "those that made it. One seed where nothing else is said: differences of a percent between methods are no\n"
        "finding.\n"
        f"Perplexities and recall are in {_dtypes(found)}, on a GPU with products in TF32; speeds and\n"
        "inspections in bfloat16.\n"
    )


def _dtypes(found: Found) -> str:
    return " and ".join(sorted({each["dtype"] for run in found.trained for each in run.records}))


if __name__ == "__main__":
    sys.exit(main())
