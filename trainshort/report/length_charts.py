"""Charts over the test length: perplexity and its ratio, sliding windows beside others, speed and memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from trainshort.common.machine import LOADED
from trainshort.report.charts import Chart, Plot, View, axis, scale_of, template_text, with_band
from trainshort.report.heads import seen_by
from trainshort.report.methods import Method
from trainshort.report.records import number
from trainshort.report.series import Point, Protocols, points, ratios, records_at
from trainshort.report.tables import Table

FIGURES = {
    "perplexity": "perplexity per token",
    "bits_per_byte": "bits per byte",
    "perplexity_per_word": "perplexity per word",
}
OF_TEST = ("data", "split", "first_token", "end_token", "dtype", "position")  # columns for those who join files
RATIO = "ratio to the trained length"
WORDS = 100_000  # with a perplexity above this, guessing among all words of a large dictionary would do better
OTHER_TOKENS = (
    "These models have different tokenizers: lengths are in tokens of each, figures are per byte and per word of the "
    "same text. Figures per token can't be compared between them; the CSV file has them."
)
MACHINE = ("device", "threads")  # speed and memory are means over runs that were tested on the same
SPEED = ("tokens_per_second", "scored tokens per second", 1.0)
MEMORY = ("peak_memory_bytes", "peak memory in MB", 1e-6)
SAME = 0.05  # speeds that differ by less than this are called the same


def trained_lengths(methods: Sequence[Method]) -> tuple[int, ...]:
    return tuple(sorted({method.length for method in methods if method.length}))


def by_length(methods: Sequence[Method], found: Sequence[Sequence[Point]], title: str) -> View | None:
    """A figure against the test length, one line a method, on a scale that keeps methods apart."""
    traces, lengths, values = list[Plot](), set[int](), list[float]()
    for method, given in zip(methods, found, strict=True):
        known = [each for each in given if each.mean is not None]
        if known:
            lengths |= {each.length for each in known}
            traces += (drawn := with_band(method, known))
            values += [y for trace in drawn for y in trace["y"] if y is not None]
    if not values:
        return None
    kind, stretch, is_stretched = scale_of(values)
    layout = {
        "xaxis": axis("test length in tokens", "log", sorted(lengths)),
        "yaxis": axis(title, kind),
    }
    return View(title, traces, layout, trained_lengths(methods), stretch, is_stretched)


def _scaled(values: Sequence[Point], scale: float) -> list[Point]:
    return [
        replace(
            each,
            mean=None if each.mean is None else each.mean * scale,
            deviation=None if each.deviation is None else each.deviation * scale,
        )
        for each in values
    ]


def means_something(methods: Sequence[Method], protocols: Protocols, protocol: str) -> bool:
    """Whether figures per word say anything: of models that know little of words they are astronomical."""
    found = [points(method, protocols, protocol, "perplexity_per_word") for method in methods]
    means = [each.mean for values in found for each in values if each.mean is not None]
    return bool(means) and min(means) < WORDS


def extrapolation(
    methods: Sequence[Method], protocols: Protocols, protocol: str, table: Table, how: str, figure: str
) -> Chart:
    """figure: what is compared; where that is bits per byte, tokens differ, and figures per token are left out."""
    of_words = means_something(methods, protocols, protocol)
    names = [name for name in FIGURES if name != "perplexity_per_word" or of_words]
    if figure != "perplexity":
        names.remove("perplexity")
    found = {name: [points(method, protocols, protocol, name) for method in methods] for name in names}
    views = [by_length(methods, values, FIGURES[name]) for name, values in found.items()]
    views.insert(1, _ratio_view(methods, found[figure]))
    seeds = max((len(method.runs) for method in methods), default=1)
    bands = "; bands are one standard deviation over seeds" if seeds > 1 else ""
    what = "Perplexity" if figure == "perplexity" else "Bits per byte"
    empty = {f"{name}{each}" for name in FIGURES if name not in names for each in ("", "_deviation")}
    shown = [view for view in views if view is not None]
    captions = tuple(_caption(view.name, what, how, bands) for view in shown)
    return Chart(
        "extrapolation",
        f"{what} beyond the training length",
        "Result",
        captions[0] if captions else "",
        shown,
        table,
        axes="xy",
        listed=table.without(*empty, *OF_TEST, *_same(table, "trained_at", "windows", "seeds")),
        notes=[] if figure == "perplexity" else [OTHER_TOKENS],
        captions=captions,
    )


def _caption(view: str, what: str, how: str, bands: str) -> str:
    title = f"{view[0].upper()}{view[1:]} (lower is better)"
    if view == RATIO:
        title, bands = f"{what} divided by that at the training length (below 1 is better than there)", ""
    return (
        f"{title} by the length of the windows that a trained model is tested on, each over {how}; windows in the "
        f"shaded part are longer than those it was trained on{bands}."
    )


def _same(table: Table, *names: str) -> list[str]:
    """Of these columns, those in which all rows agree: nothing to tell them apart by."""
    return [name for name in names if name in table.split_common()[1]]


def _ratio_view(methods: Sequence[Method], found: Sequence[Sequence[Point]]) -> View | None:
    """Each figure over that at the training length: where a line stays below 1, longer texts cost nothing."""
    values = [
        [replace(each, mean=known.get(each.length), deviation=None) for each in given]
        for given, known in ((given, ratios(method, given)) for method, given in zip(methods, found, strict=True))
    ]
    return by_length(methods, values, RATIO)


def against_sliding(methods: Sequence[Method], protocols: Protocols, table: Table, figure: str) -> Chart:
    traces, lengths, heights = list[Plot](), set[int](), list[float]()
    for place, protocol in enumerate(protocols.names):
        for method in methods:
            values = [each for each in points(method, protocols, protocol, figure) if each.mean is not None]
            if not values:
                continue
            lengths |= {each.length for each in values}
            trace = with_band(method, values)[0]
            heights += [y for y in trace["y"] if y is not None]
            trace["name"] += f", {protocol}"
            trace["hovertemplate"] = f"<b>%{{text}}</b>  {template_text(trace['name'])}<extra></extra>"
            trace["line"] = trace["line"] | {"dash": ("solid", "dash", "dot", "dashdot")[place % 4]}
            if place:
                trace["marker"] = trace["marker"] | {"symbol": f"{method.marker}-open"}
                trace["meta"] = {}  # the name of the method stands at its first line
            traces.append(trace)
    kind, stretch, is_stretched = scale_of(heights) if heights else ("linear", None, False)
    layout = {"xaxis": axis("test length in tokens", "log", sorted(lengths)), "yaxis": axis(FIGURES[figure], kind)}
    drawn = ("full lines", "dashed lines", "dotted lines", "dash-dotted lines")
    which = ", ".join(f"{drawn[place % 4]} are {name}" for place, name in enumerate(protocols.names))
    return Chart(
        "sliding",
        "Nonoverlapping against sliding windows",
        "Sliding",
        "The same models with windows side by side, where the first tokens of each have little context, and with "
        "windows that overlap so that every token has much: the part of a gain that sliding windows do not show is "
        f"only the early token curse. {which[0].upper()}{which[1:]}.",
        [View(FIGURES[figure], traces, layout, trained_lengths(methods), stretch, is_stretched)] if traces else [],
        table,
        axes="xy",
    )


def cost(methods: Sequence[Method], protocols: Protocols, protocol: str, how: str) -> Chart:
    views, rows, notes = list[View | None](), [], list[str]()
    for name, title, scale in (SPEED, MEMORY):
        found = [_scaled(points(method, protocols, protocol, name, MACHINE), scale) for method in methods]
        view = by_length(methods, found, title)
        if view is not None and name == MEMORY[0]:
            view = replace(view, layout=view.layout | {"yaxis": axis(title) | {"rangemode": "tozero"}})
        views.append(None if view is None else replace(view, stretch=None, is_stretched=False))
    for method in methods:
        speed, memory = (points(method, protocols, protocol, name, MACHINE) for name, _, _ in (SPEED, MEMORY))
        for one, other in zip(speed, memory, strict=True):
            rows.append((method.label, protocol, one.length, one.mean, other.mean, one.seeds, one.skipped))
        notes += [f"{method.label} at {each.length:,}: {each.skipped}" for each in speed if each.skipped]
    notes += (loaded := _loaded(methods, protocols, protocol))
    columns = ("method", "windows", "tested_at", "tokens_per_second", "peak_memory_bytes", "seeds", "left_out")
    table, said = Table(columns, tuple(rows)), speed_sentence(methods, protocols, protocol)
    in_megabytes = tuple((*row[:4], None if row[4] is None else round(row[4] / 1e6), *row[5:]) for row in rows)
    listed = Table((*columns[:4], "peak_memory_in_MB", *columns[5:]), in_megabytes)
    return Chart(
        "cost",
        "Speed and memory by length",
        "Speed",
        "Scored tokens a second, and the peak memory of the whole process (of the GPU where there is one), while "
        f"each length was evaluated{how}.",
        [view for view in views if view is not None],
        table,
        axes="xy",
        listed=listed.without("windows", *_same(listed, "seeds")),
        notes=notes,
        lead=f"{said} Others were using the machine." if said and loaded else said,
    )


def speed_sentence(methods: Sequence[Method], protocols: Protocols, protocol: str) -> str:
    """Whether certified windows make attention faster at the longest length that was tested, or why not there."""
    speeds = {
        method.label: {
            each.length: each.mean for each in points(method, protocols, protocol, SPEED[0], MACHINE) if each.mean
        }
        for method in methods
    }
    skipping = {method.label: kept for method in methods if (kept := _kept(method, protocols, protocol))}
    lengths = [length for label, kept in skipping.items() for length in kept if length in speeds[label]]
    if not lengths:
        return ""
    longest = max(lengths)
    here = {label: found[longest] for label, found in speeds.items() if longest in found}
    ours = max((label for label in skipping if label in here), key=lambda label: here[label])
    share = skipping[ours][longest]
    windows = f"its windows keep {share:.0%} of the keys in sight"
    others = {label: speed for label, speed in here.items() if label not in skipping}
    if not others:
        return f"At {longest:,} tokens {ours} visits {share:.0%} of the keys in sight."
    best = max(others, key=lambda label: others[label])
    factor = here[ours] / others[best]
    if factor > 1 + SAME:
        return (
            f"At {longest:,} tokens {ours} scores {factor:.1f} times as many tokens a second as {best}, the fastest "
            f"of the others: {windows} and skip the rest."
        )
    reason = (
        "finding them takes time, which pays on longer texts, of which a smaller share is kept"
        if share < 1
        else "in texts as short as this there is nothing to skip"
    )
    return (
        f"At {longest:,} tokens, the longest tested here, certified windows do not make {ours} faster ({factor:.2f} "
        f"times the speed of {best}): {windows}, and {reason}."
    )


def _kept(method: Method, protocols: Protocols, protocol: str) -> dict[int, float]:
    """By length the share of key blocks that certified windows kept, over all layers and heads."""
    return {
        each.length: statistics.fmean(value for row in each.kept for value in row)
        for each in seen_by(method, protocols, protocol)
    }


def _loaded(methods: Sequence[Method], protocols: Protocols, protocol: str) -> list[str]:
    """Which speeds are not those of the machine, because others were using it."""
    found = []
    for method in methods:
        shares = {
            length: max((number(each.get("waiting")) or 0.0 for each in records), default=0.0)
            for length, records in records_at(method, protocols, protocol).items()
        }
        if loaded := [f"{length:,} ({share:.0%})" for length, share in shares.items() if share > LOADED]:
            found.append(f"{method.label} at {', '.join(loaded)}")
    what = "measured on a loaded machine; in brackets the part of the time that threads waited for a core"
    return [f"{'; '.join(found)}: {what}."] if found else []
