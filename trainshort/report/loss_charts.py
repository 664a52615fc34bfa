"""Charts of the loss: by the place of a token in its window, and in the course of training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainshort.report.charts import (
    Chart,
    Plot,
    View,
    axis,
    band,
    labelled,
    line,
    plotly_text,
    rounded,
    template_text,
)
from trainshort.report.length_charts import trained_lengths
from trainshort.report.methods import Method
from trainshort.report.series import FEW, Curve, Protocols, loss_by_place, loss_by_position
from trainshort.report.tables import Table

FEW_WINDOWS = 16
OTHER_LOSSES = (
    "These models have different tokenizers: the heights of their lines, which are per token, can't be compared, "
    "only whether each rises or falls."
)


def by_position(
    methods: Sequence[Method], protocols: Protocols, protocol: str, lengths: Sequence[int], figure: str
) -> Chart:
    views, rows = [], []
    for length in _ordered(lengths, methods, protocols, protocol):
        traces = list[Plot]()
        for method in methods:
            rows += [
                (method.label, protocol, length, *each)
                for each in loss_by_position(method, protocols, protocol, length)
            ]
            traces += _places(method, protocols, protocol, length)
        if traces:
            layout = {"xaxis": axis("place in the window", "log"), "yaxis": axis("loss in nats per token")}
            views.append(View(f"windows of {length:,}", traces, layout, trained_lengths(methods)))
    columns = ("method", "windows", "tested_at", "first_place", "last_place", "loss", "scored_tokens")
    several = any(len(method.runs) > 1 for method in methods)
    bands = "; bands are one standard deviation over seeds" if several else ""
    return Chart(
        "loss_by_position",
        "Loss by place in the window",
        "Loss by place",
        f"Mean loss of the tokens at each place of {protocol} windows, over neighbouring places that have at least "
        f"{FEW} tokens together, where there are as many{bands}. Falling means that the model uses the longer "
        "context, rising in the shaded part that it is lost beyond its training length.",
        views,
        Table(columns, tuple(rows)),
        axes="xy",
        notes=[] if figure == "perplexity" else [OTHER_LOSSES],
    )


def _ordered(lengths: Sequence[int], methods: Sequence[Method], protocols: Protocols, protocol: str) -> list[int]:
    """Longest first, but those of which only a few windows were scored last: a hard page shows in all lines."""

    def has_few(length: int) -> bool:
        counts = [each.count for method in methods for each in loss_by_place(method, protocols, protocol, length)]
        return sum(counts) < FEW_WINDOWS * length * len(methods)

    return sorted(lengths, key=lambda length: (has_few(length), -length))


def _places(method: Method, protocols: Protocols, protocol: str, length: int) -> list[Plot]:
    bins = loss_by_place(method, protocols, protocol, length)
    if not bins:
        return []
    middles = [round(math.sqrt(each.first * each.last), 2) for each in bins]
    texts = [f"{each.loss:.2f}" for each in bins]
    trace = labelled(line(method, middles, [rounded(each.loss) for each in bins]), texts)
    trace["meta"]["value"] = texts[-1]
    spans = [f"{each.first:,} to {each.last:,}" for each in bins]
    trace["customdata"] = spans
    trace["hovertemplate"] = (
        f"<b>%{{text}}</b>  {template_text(trace['name'])}, places %{{customdata}}<extra></extra>"
    )
    if all(each.deviation is None for each in bins):
        return [trace]
    spread = [each.deviation or 0.0 for each in bins]
    low = [each.loss - deviation for each, deviation in zip(bins, spread, strict=True)]
    high = [each.loss + deviation for each, deviation in zip(bins, spread, strict=True)]
    return [trace, band(method, middles, low, high)]


def training(curves: Sequence[tuple[Method, Curve]]) -> Chart:
    views = []
    for name, title in (("steps", "step"), ("seconds", "seconds of training")):
        traces, named = list[Plot](), set[str]()
        for method, curve in curves:
            x = curve.steps if name == "steps" else curve.seconds
            run = template_text(plotly_text(curve.run.name))
            if curve.losses and any(each is not None for each in x):
                first = method.label not in named
                trace = labelled(
                    line(method, x, curve.losses, mode="lines"), [f"{each:.3f}" for each in curve.losses]
                )
                trace["line"] = trace["line"] | {"width": 2.5 if method.strong else 1.5}
                trace |= {"hovertemplate": f"<b>%{{text}}</b>  {run}<extra></extra>", "showlegend": first}
                traces.append(trace if first else trace | {"meta": {}})
                named.add(method.label)
            if curve.validation and name == "steps":
                steps, losses = zip(*curve.validation, strict=True)
                hover = f"<b>%{{y:.3f}}</b>  {run}, validation<extra></extra>"
                traces.append(
                    line(method, steps, losses, mode="markers", showlegend=False, hovertemplate=hover, meta={})
                )
        if traces:
            views.append(View(f"by {title}", traces, {"xaxis": axis(title), "yaxis": axis("loss in nats per token")}))
    rows = [
        (method.label, curve.run.name, curve.run.seed, step, seconds, loss)
        for method, curve in curves
        for step, seconds, loss in zip(curve.steps, curve.seconds, curve.losses, strict=True)
    ]
    return Chart(
        "training",
        "Training curves",
        "Training",
        "Training loss of every run as its metrics.jsonl logged it, averaged over stretches of steps where there "
        "are many; markers are validation losses at the training length, where they were asked for.",
        views,
        Table(("method", "run", "seed", "step", "seconds", "loss"), tuple(rows)),
        axes="xy",
    )
