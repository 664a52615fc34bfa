"""What was found, in one sentence made from the figures, and the facts that it rests on.

Trained at a length and tested at the longest: each method's figure there and its ratio to the one at the training
length, and which method is best at the training length itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trainshort
from trainshort.report.methods import Method
from trainshort.report.reading import Run
from trainshort.report.records import whole
from trainshort.report.series import Point, Protocols, points, ratios
from trainshort.report.tested import Tested
from trainshort.report.text import clean, listed, significant, times

MOST = 6  # methods that a sentence can name
FIGURES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte"}
Part = str | Method


@dataclass(frozen=True)
class Finding:
    """The sentence in parts, so that a page can colour the names of methods."""

    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.label for part in self.parts)


@dataclass(frozen=True)
class _Figures:
    method: Method
    by_length: Mapping[int, Point]
    ratios: Mapping[int, float | None]

    def at(self, length: int) -> float | None:
        return self.by_length[length].mean if length in self.by_length else None


def finding(test: Tested, methods: Sequence[Method]) -> Finding | None:
    """Of the main windows of one test; None where nothing has a figure."""
    protocols = Protocols(test.runs)
    if protocols.main is None:
        return None
    found = []
    for method in test.methods(methods):
        values = points(method, protocols, protocols.main, test.figure)
        found.append(_Figures(method, {each.length: each for each in values}, ratios(method, values)))
    length = _longest(found)
    if length is None:
        return None
    there = sorted((each for each in found if each.at(length) is not None), key=lambda each: each.at(length) or 0.0)
    trained = {each.method.length for each in found}
    common = next(iter(trained)) if len(trained) == 1 else None
    parts: list[Part] = [_beginning(common, length)]
    comma, last = ("; ", "; and ") if any("," in each.method.label for each in there) else (", ", " and ")
    for place, each in enumerate(there[:MOST]):
        if place:
            parts.append(last if place == len(there) - 1 else comma)
        parts += [each.method, _figure(each, length, FIGURES[test.figure] if place == 0 else "")]
    if len(there) > MOST:
        parts.append(f" and {len(there) - MOST} others up to {significant(there[-1].at(length))}")
    parts += _missing(found, length)
    if common is not None and common != length:
        parts += _best_trained(found, common)
    return Finding((*parts, "."))


def _longest(found: Sequence[_Figures]) -> int | None:
    """The longest length of those beyond training that most methods have figures at; else the longest of all."""
    counts: dict[int, int] = {}
    for each in found:
        for length in each.by_length:
            if each.at(length) is not None:
                counts[length] = counts.get(length, 0) + 1
    trained = max((each.method.length or 0 for each in found), default=0)
    beyond = {length: count for length, count in counts.items() if length > trained} or counts
    return max(beyond, key=lambda length: (beyond[length], length)) if beyond else None


def _beginning(trained: int | None, length: int) -> str:
    if trained is None:
        return f"Tested at {length:,} tokens, "
    if trained == length:
        return f"Trained and tested at {length:,} tokens, "
    more = ""
    if length > trained:
        factor = length / trained
        more = f" ({factor:,.0f} times as long)" if factor == round(factor) else f" ({factor:.1f} times as long)"
    return f"Trained at {trained:,} tokens and tested at {length:,}{more}, "


def _figure(each: _Figures, length: int, name: str) -> str:
    """` has perplexity 5.799 (×0.978)` for the first, ` 11.25 (×1.56)` for others."""
    point, ratio = each.by_length[length], each.ratios.get(length)
    spread = "" if point.deviation is None else f" ± {significant(point.deviation, like=point.mean)}"
    shown = f"{significant(point.mean)}{spread}"
    value = shown if not name else f"has {name} {shown}" if name != "bits per byte" else f"has {shown} {name}"
    if ratio is None or length == each.method.length:
        return f" {value}"
    said = f"{times(ratio)} of its value at {each.method.length:,}" if name else times(ratio)
    return f" {value} ({said})"


def _missing(found: Sequence[_Figures], length: int) -> list[Part]:
    """Methods that were tested but have no figure there, such as positions that end."""
    parts: list[Part] = []
    for each in found:
        if each.at(length) is None and len(parts) < 3 * MOST:
            point = each.by_length.get(length)
            reason = f" ({point.skipped})" if point is not None and point.skipped else ""
            parts += ["; ", each.method, f" has none there{reason}"]
    return parts


def _best_trained(found: Sequence[_Figures], trained: int) -> list[Part]:
    """Who is best at the training length, where several have a figure."""
    there = sorted((value, place) for place, each in enumerate(found) if (value := each.at(trained)) is not None)
    if len(there) < 2:
        return []
    value, place = there[0]
    best: list[Part] = [f"; at {trained:,} tokens the best is ", found[place].method, f" with {significant(value)}"]
    spread = found[place].by_length[trained].deviation
    second = found[there[1][1]].by_length[trained]
    if spread is not None and second.deviation is not None and there[1][0] - value < spread + second.deviation:
        best += [" (", found[there[1][1]].method, " is within the spread of seeds)"]
    return best


def facts(runs: Sequence[Run], test: Tested | None) -> list[tuple[str, str]]:
    """What the sentence rests on: data, the size of the models, how they were trained, seeds and the date."""
    found = [("Data", _data(runs, test)), ("Model", _model(runs)), ("Training", _training(runs))]
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    if seeds:
        found.append(("Seeds", str(len(seeds))))
    made = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y").lstrip("0")
    found.append(("Made", f"{made} by trainshort {trainshort.__version__}"))
    return [(name, clean(value)) for name, value in found if value]


def _data(runs: Sequence[Run], test: Tested | None) -> str:
    texts = {tuple(map(str, sources)) for run in runs if isinstance(sources := run.text.get("sources"), list)}
    tokenizers = {str(run.text["tokenizer"]) for run in runs if "tokenizer" in run.text}
    parts = []
    if len(texts) == 1 and (sources := next(iter(texts))):
        shown = ["Python's standard library" if each == "stdlib" else each for each in sources[:3]]
        parts.append(listed(shown) + (f" and {len(sources) - 3} more" if len(sources) > 3 else ""))
    elif test is not None:
        parts.append(test.folder)
    if len(tokenizers) == 1:
        parts.append(f"in {tokenizers.pop()}")
    if test is not None and not test.is_text:
        parts.append(f"{test.tokens:,} {test.key[1]} tokens")
    return ", ".join(parts)


def _model(runs: Sequence[Run]) -> str:
    shapes = {tuple(whole(run.model.get(name)) for name in ("num_layers", "d_model", "num_heads")) for run in runs}
    if len(shapes) > 1:
        return "sizes differ"
    layers, width, heads = next(iter(shapes))
    if layers is None or width is None or heads is None:
        return ""
    return f"{layers} layer{'s' * (layers != 1)}, {width:,} wide, {heads} head{'s' * (heads != 1)}"


def _training(runs: Sequence[Run]) -> str:
    trained = {(whole(run.train.get("steps")), whole(run.train.get("batch_tokens"))) for run in runs if run.train}
    if len(trained) > 1:
        return "steps differ"
    steps, batch = next(iter(trained), (None, None))
    return "" if steps is None or batch is None else f"{steps:,} steps of {batch:,} tokens"
