"""docs/reproducing.md, made from the files in results/: tables, figures, and a verdict on each claim.

python results/page.py            # write the page and its figures
python results/page.py --check    # fail if the page is not what the files say

Without results there is no page. Figures are drawn by `trainshort report`'s own code (drawing.py).
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

import drawing  # noqa: E402  beside this file
from claims import CLAIMS, spread_of, verdict  # noqa: E402
from found import LABELS, WIKITEXT, Found, Run, text_of  # noqa: E402

PAPER = json.loads((HERE / "paper.json").read_text())
BY_DEPTH = (1, 4, 16)  # times the training length, where recall is shown by depth
TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


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
    draw(found, docs)
    print(page)
    return 0


def page_of(found: Found) -> str | None:
    """None where there is nothing to show."""
    if next(found.every(), None) is None:
        return None
    parts = [head(found), claims(found)]
    for trained in found.lengths:
        parts.append(extrapolation(found, trained))
    parts += [headline(found), sliding(found), curse(found), recall(found), speeds(found)]
    parts += [windows(found), rates(found), how(found)]
    return "\n".join(part for part in parts if part)


def draw(found: Found, docs: Path) -> None:
    """docs/reproduced/, and docs/reproduced.svg, which is for the README."""
    folder = docs / "reproduced"
    folder.mkdir(exist_ok=True)
    figures = [*drawing.of_speed(found)]
    for trained in found.lengths[:2]:
        figures += [*drawing.of_trained(found, trained), *drawing.of_scaled(found, trained)]
    for old in set(folder.glob("*.svg")) - {folder / f"{each.name}.svg" for each in figures}:
        old.unlink()
    for each in figures:
        (folder / f"{each.name}.svg").write_bytes(each.svg)
    if (front := drawing.front(found)) is not None:
        (docs / "reproduced.svg").write_bytes(front.svg)


def shown(figures: Sequence[drawing.Figure]) -> list[str]:
    return [f"![{each.caption}](reproduced/{each.name}.svg)\n\n*{each.caption}.*\n" for each in figures]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 118) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def head(found: Found) -> str:
    runs = list(found.every())
    made = [run.made for run in runs]
    machines, torches, commits = (
        ", ".join(sorted(each))
        for each in (
            {str(each["machine"]["gpu"] or "a CPU") for each in made},
            {each["machine"]["torch"] for each in made},
            {each["commit"] for each in made},
        )
    )
    seconds = sum({each["unit"]: each["seconds"] for each in made}.values())
    rows = [("machine", f"{machines}; torch {torches}; commits {commits}")]
    if found.trained:
        rows = [*_setting(found, found.trained[0]), *rows]
    return f"""<!-- made by results/page.py from the files in results/: change those, or that -->

# The paper's claims, run again

Every number here is of a run whose settings, commit, metrics and evaluations are in `results/`, made by `trainshort`
commands alone. {len({each["unit"] for each in made})} units of work, {seconds / 60:,.0f} minutes of computing.

{table(("", ""), rows).replace("| --- | ---: |", "| --- | --- |")}
The models are far smaller than the paper's, and were trained on other text with another tokenizer: perplexities here
are comparable with each other, not with the paper's. What can be compared is what becomes of them beyond the trained
length, so tables give ratios beside them.
"""


def _setting(found: Found, run: Run) -> list[tuple[str, str]]:
    """What all runs have in common."""
    model, train = run.read("config.json").get("model", {}), run.train
    shape = f"{model['num_layers']} layers, {model['d_model']} wide, {model['num_heads']} heads"
    tokens = train["steps"] * train["batch_tokens"] / 1e6
    steps = f"{train['steps']:,} steps of {train['batch_tokens']:,} tokens, {tokens:,.1f} million in all"
    texts = f"{', '.join(found.texts)}: each whole, every token but the first scored once at every length"
    return [
        ("model", f"{shape}, vocabulary of {model['vocab_size']:,}"),
        ("training", f"{steps}, of English Wikipedia of 2015"),
        ("tests", texts),
    ]


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
            seeds = [list(found.perplexities(name, trained, length, text).values()) for length in lengths]
            base = found.perplexity(name, trained, trained, text)
            missing = "diverged" if all(run.diverged for run in found.of(name, trained)) else "–"
            rows.append((_label(found, name, trained), *(_of_seeds(values, base, missing) for values in seeds)))
            rows += _scaled_rows(found, name, trained, text, lengths)
        parts += [f"Perplexity on {text} in nonoverlapping windows, and its ratio to that at {trained:,}:\n"]
        parts += [table((f"{text}", *(f"{length:,}" for length in lengths)), rows)]
    if (paper := PAPER["extrapolation"].get(str(trained))) is not None:
        rows = []
        for name, values in paper["perplexity"].items():
            rows.append((LABELS[name], *(_with_ratio(value, values[0]) for value in values)))
        parts += [f"The paper's {paper['table']} ({PAPER['setting']}):\n"]
        parts += [table(("the paper", *(f"{length:,}" for length in paper["lengths"])), rows)]
    if trained in found.lengths[:2]:
        parts += shown([*drawing.of_trained(found, trained), *drawing.of_scaled(found, trained)])
    return "\n".join(parts)


def _label(found: Found, name: str, trained: int) -> str:
    runs = found.of(name, trained)
    diverged = sum(run.diverged for run in runs)
    if len(runs) < 2:
        return LABELS[name]
    return f"{LABELS[name]} ({len(runs)} seeds" + (f", {diverged} diverged)" if diverged else ")")


def _of_seeds(values: Sequence[float], base: float | None, missing: str) -> str:
    """The mean, its ratio, and the standard deviation where there are seeds."""
    if not values:
        return missing
    mean, spread = statistics.fmean(values), spread_of(values)
    return number(mean) + ("" if spread is None else f" ± {number(spread)}") + _ratio(mean, base)


def _scaled_rows(found: Found, name: str, trained: int, text: str, lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """The same weights, stretched for longer texts: of the first seed, and relative to that one."""
    base = found.perplexities(name, trained, trained, text).get(0)
    rows = []
    for way, run in found.scaled(name, trained).items():
        values = {each["length"]: each.get("perplexity") for each in run.records if text_of(each) == text}
        if values:
            cells = (_with_ratio(values.get(each), base) for each in lengths)
            rows.append((f"{LABELS[name]}, scaled: {way}", *cells))
    return rows


def _with_ratio(value: float | None, base: float | None) -> str:
    return "–" if value is None else number(value) + _ratio(value, base)


def _ratio(value: float, base: float | None) -> str:
    return f" (×{number(value / base)})" if base else ""


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
                row += [_shown(run, *TRAINING_SPEED), _shown(run, *TRAINING_MEMORY)]
            rows.append(row)
    columns = ("", "trained at", "tested at", "perplexity", "dense: tokens/s", "GB", "kernels: tokens/s", "GB")
    text = (
        "ALiBi trained short beside sinusoidal trained at the length of the test; speed and memory of training, with"
    )
    return (
        f"## Train short, test long\n\n{text}\ndense attention as in the paper's time and with today's kernels.\n\n"
        + table(columns, rows)
        + against_long(found)
    )


def against_long(found: Found) -> str:
    """The same at more lengths, beside the paper's."""
    paper = PAPER["against_long"]
    if found.short != paper["lengths"][0]:
        return ""
    rows, lengths = [], paper["lengths"]
    for trained, values in paper["alibi"].items():
        ours = [found.perplexity("alibi", int(trained), length) for length in lengths]
        rows.append((f"ALiBi, L = {int(trained):,}", *map(number, ours)))
        rows.append((f"the paper: ALiBi, L = {int(trained):,}", *map(number, values)))
    ours = [found.perplexity("sinusoidal", length, length) for length in lengths]
    rows.append(("sinusoidal, trained at the length of the test", *map(number, ours)))
    rows.append(("the paper: sinusoidal, the same", *map(number, paper["sinusoidal"])))
    said = f"Perplexity by the length of the test, on {WIKITEXT}, beside the paper's"
    shown = [row for row in rows if any(cell != "–" for cell in row[1:])]
    return f"\n{said} ({PAPER['setting']}):\n\n" + table(("", *(f"{length:,}" for length in lengths)), shown)


def sliding(found: Found) -> str:
    """Windows that overlap leave no token without context."""
    parts = []
    for trained in found.lengths[:2]:
        for text in found.texts:
            stride = found.short if text == WIKITEXT else None
            by_name = {name: found.sliding(name, trained, stride, text) for name in found.contenders}
            lengths = sorted({length for values in by_name.values() for length in values})
            rows = [
                (
                    _label(found, name, trained),
                    *(_with_ratio(values.get(each), values.get(trained)) for each in lengths),
                )
                for name, values in by_name.items()
                if values
            ]
            if rows:
                moved = "half their length" if stride is None else f"{stride:,} tokens"
                parts += [f"Perplexity on {text}, trained at {trained:,}, with windows that slide by {moved}:\n"]
                parts += [table((text, *(f"{length:,}" for length in lengths)), rows)]
    if not parts:
        return ""
    paper = PAPER["sliding"]
    known = ", ".join(f"{name} {number(value)}" for name, value in paper["perplexity"].items())
    parts += [f"The paper has, on {paper['setting']}: {known}.\n"]
    return "\n".join(["## Sliding windows\n", *parts])


def _thousands(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e3:,.0f}k"


def _gigabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:,.2f}"


def speeds(found: Found) -> str:
    if not found.runs("speed"):
        return ""
    parts = ["## Speed and memory\n", *shown(drawing.of_speed(found))]
    names = {"dense": "dense attention, as in the paper's time", "auto": "today's kernels"}
    for attention, what in names.items():
        if not (lengths := found.speed_lengths(attention)):
            continue
        contenders = [each for each in LABELS if any(found.speed(each, attention, length) for length in lengths)]
        rows = []
        for kind, way in SPEEDS.items():
            for name in contenders:
                runs = [found.speed(name, attention, length) for length in lengths]
                rows.append((f"{LABELS[name]}: {kind}", *(_shown(run, *way) for run in runs)))
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


Shown = tuple[str, Callable[[Run], str]]  # by which command it was measured
TRAINING_SPEED: Shown = "train", lambda run: _thousands(run.training_speed)
TRAINING_MEMORY: Shown = "train", lambda run: _gigabytes(run.training_memory)
SPEEDS: Mapping[str, Shown] = {
    "training, tokens/s": TRAINING_SPEED,
    "training, GB": TRAINING_MEMORY,
    "evaluation, tokens/s": ("evaluate", lambda run: _thousands(run.tested("tokens_per_second"))),
    "evaluation, GB": ("evaluate", lambda run: _gigabytes(run.tested("peak_memory_bytes"))),
}


def _shown(run: Run | None, command: str, show: Callable[[Run], str]) -> str:
    if run is None:
        return "–"
    return "out of memory" if run.ran_out_of_memory(command) else show(run)


def curse(found: Found) -> str:
    """Small strides: every token with a full window."""
    stride, by_row = found.small_stride, list[tuple[str, dict[int, float]]]()
    if stride is None:
        return ""
    for trained in found.lengths[:2]:
        for name in found.contenders:
            if small := found.sliding(name, trained, stride):
                by_row.append((f"{_label(found, name, trained)}, L = {trained:,}", small))
    ordered = sorted({length for _, small in by_row for length in small})
    rows = [(label, *(number(small.get(length)) for length in ordered)) for label, small in by_row]
    paper = PAPER["small_stride"]
    known = dict(zip(paper["lengths"], paper["alibi"]["512"], strict=True))
    rows.append(("the paper: ALiBi, L = 512, stride 1", *(number(known.get(length)) for length in ordered)))
    intro = paragraph(
        f"Windows that slide by {stride} tokens give every token a full window. What longer windows gain here is use",
        "of the longer context; what they gain beyond it above is fewer early tokens with little context.",
    )
    return f"## The early token curse\n\n{intro}\n" + table(("perplexity", *(f"{each:,}" for each in ordered)), rows)


Shares = dict[int, list[float]]  # by length: the share of right answers at each depth, the mean over seeds


def recall(found: Found) -> str:
    parts = []
    for trained in found.lengths[:2]:
        for task, what in (("passkey", "a passkey"), ("copy", "a passage")):
            known = [(label, shares) for label, runs in _asked(found, trained) if (shares := _shares(runs, task))]
            lengths = sorted({length for _, shares in known for length in shares})
            if known:
                rows = [(label, *(_recalled(shares, each, trained) for each in lengths)) for label, shares in known]
                parts += [f"Recall of {what}, trained at {trained:,}:\n"]
                parts += [table(("", *(f"{each:,}" for each in lengths)), rows)]
    if not parts:
        return ""
    first = next(record for run in found.trained for record in run.recall)
    trials, depths = first["trials"], first["depths"]
    at, times = (", ".join(map(str, values)) for values in (depths, BY_DEPTH))
    most = 50 / trials**0.5  # points, of a share of a half
    least = most / len(depths) ** 0.5
    intro = paragraph(
        f"The share of right answers among {first['choices']}, of {trials} windows x {len(depths)} depths; chance is",
        f"{1 / first['choices']:.1%}. In brackets, at {times} times the training length: the share in percent at",
        f"each depth, {at} percent of the window, where 0 is its start. Means over seeds where there are several.",
        f"One standard error of a share of a half is {most:.0f} points for {trials} windows; over all depths, at",
        f"which cues and answers are the same, between {least:.0f} and {most:.0f}. All methods were asked the same.",
    )
    return "\n".join([f"## Recall\n\n{intro}", *parts])


def _asked(found: Found, trained: int) -> list[tuple[str, list[Run]]]:
    """All seeds of each method, and the first as it was stretched."""
    asked = []
    for name in found.contenders:
        if runs := found.of(name, trained):
            asked.append((_label(found, name, trained), runs))
        asked += [(f"{LABELS[name]}, scaled: {way}", [run]) for way, run in found.scaled(name, trained).items()]
    return asked


def _shares(runs: Sequence[Run], task: str) -> Shares:
    by_length: dict[int, list[list[float]]] = {}
    for run in runs:
        for record in run.recall:
            if record["task"] == task:
                right = [count / record["trials"] for count in record["correct"]]
                by_length.setdefault(record["length"], []).append(right)
    return {
        length: [statistics.fmean(values) for values in zip(*seeds, strict=True)]
        for length, seeds in by_length.items()
    }


def _recalled(shares: Shares, length: int, trained: int) -> str:
    if length not in shares:
        return "–"
    by_depth = f" ({', '.join(f'{share:.0%}'[:-1] for share in shares[length])})"
    return f"{statistics.fmean(shares[length]):.0%}" + (by_depth if length // trained in BY_DEPTH else "")


def windows(found: Found) -> str:
    """What certified windows say about how far heads can see, by layer."""
    rows, read = [], set[int]()
    inspected = [run for name in found.contenders for trained in found.lengths for run in found.of(name, trained)]
    for run in inspected:
        seen = run.read("inspection.json")
        if not seen.get("penalty"):
            continue
        read.add(seen["text"]["tokens"])
        heads = seen["heads"]
        for layer, visited in enumerate(heads["visited"]):
            values = [statistics.fmean(heads[name][layer]) for name in ("reach", "needed")]
            cells = (f"{statistics.fmean(visited):.0%}", f"{values[0]:,.0f}", f"{max(heads['farthest'][layer]):,.0f}")
            first = f"{LABELS[run.contender]}, L = {run.train['length']:,}" if layer == 0 else ""
            rows.append((first, str(layer + 1), *cells, f"{values[1]:,.0f}"))
    if not rows:
        return ""
    columns = ("", "layer", "keys visited", "windows end, tokens away", "at most", "99% of attention within")
    of_text = " or ".join(sorted({f"{tokens:,}" for tokens in read}, key=len))
    intro = paragraph(
        f"Of a text of {of_text} tokens, the beginning of a book: the share of keys that attention visits, how many",
        "tokens away certified windows end (everything beyond provably can't matter), and within how many tokens 99%",
        "of the attention really lies; means over heads.",
    )
    return f"## How far heads can see\n\n{intro}\n" + table(columns, rows)


def rates(found: Found) -> str:
    tries = found.runs("rates")
    if not tries:
        return ""
    tried: dict[str, list[Run]] = {}
    for run in sorted(tries, key=lambda run: (list(LABELS).index(run.contender), run.train["lr"])):
        tried.setdefault(run.contender, []).append(run)
    rows = []
    for name, runs in tried.items():
        for run in runs:
            used = any(each.train["lr"] == run.train["lr"] for each in found.of(name, run.train["length"]))
            end = {runs[0]: "lowest", runs[-1]: "highest"}.get(run) if len(runs) > 1 else None
            said = "used everywhere" + (f"; the {end} that was tried: a better one may lie beyond" if end else "")
            loss = "diverged" if run.diverged else number(run.validation_loss, 4)
            rows.append((LABELS[name], f"{run.train['lr']:g}", loss, said if used else ""))
    intro = "Each method was tried with the same learning rates; the validation text is in no table above.\n"
    return f"## Learning rates\n\n{intro}\n" + table(("", "learning rate", "validation loss", ""), rows)


def how(found: Found) -> str:
    tf32 = all(run.made.get("environment", {}).get(TF32) == "1" for run in found.trained)
    products = ", with products in TF32" if tf32 else ""
    measured = f"Perplexities and recall are in {_dtypes(found)}{products}; speeds" if found.trained else "Speeds"
    again = paragraph(
        "`results/README.md` has the commands; `made.json` in the folder of each run lists those that made it. One",
        "seed where nothing else is said: differences of a percent between methods are no finding; ± is one standard",
        f"deviation over seeds. {measured} and inspections are in bfloat16.",
    )
    paper = paragraph(
        f"The paper is {PAPER['source']}. Its numbers were transcribed from its tables by third parties."
    )
    return f"## To do it again\n\n{again}\n{paper}"


def _dtypes(found: Found) -> str:
    return " and ".join(sorted({each["dtype"] for run in found.trained for each in run.records}))


if __name__ == "__main__":
    sys.exit(main())
