"""Draw the charts of the docs from the measured data beside this script.

python benchmarks/charts.py            # writes attention_gpu.svg, speed.svg and demo.svg into docs/
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from measured import RESULTS, ROOT, version

from trainshort.report.methods import COLORS, PREFERRED

COLOURS = {128: "#2f81c7", 64: "#d9536a"}
INK = "#7d8590"  # of middling lightness, like all colours here: the page behind may be light or dark


def ratio(ms: dict[str, dict[str, float]], other: str, ours: str = "ours") -> float:
    return ms[other]["both_gpu"] / ms[ours]["both_gpu"]


def speeds_by_doublings(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16, 32])
    axes.set_yticklabels(["1×", "2×", "4×", "8×", "16×", "32×"])


def by_length(axes: Any, records: list[dict[str, Any]]) -> None:
    styles = {
        ("FlexAttention", "ours"): "-",
        ("cuDNN, no bias", "ours"): "--",
        ("FlexAttention", "ours, tolerance 0"): ":",
    }
    names = {
        ("FlexAttention", "ours"): "of FlexAttention",
        ("cuDNN, no bias", "ours"): "of cuDNN without bias",
        ("FlexAttention", "ours, tolerance 0"): "nothing skipped, of FlexAttention",
    }
    for dim, colour in COLOURS.items():
        own = [record for record in records if record["dim"] == dim]
        for (other, ours), style in styles.items():
            axes.plot(
                [record["length"] for record in own],
                [ratio(record["ms"], other, ours) for record in own],
                style,
                color=colour,
                marker="o",
                markersize=3.5,
                label=f"{names[other, ours]}, {dim}",
            )
    axes.axhline(1.0, color=INK, linewidth=0.8)
    speeds_by_doublings(axes)
    axes.set_xticks([record["length"] for record in records if record["dim"] == 64])
    axes.set_xticklabels([f"{record['length']:,}" for record in records if record["dim"] == 64], fontsize=9)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("speed, forward + backward")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("random normal q, k, v; head_dim 64 and 128", fontsize=10)


def by_kept(axes: Any, data: dict[str, Any]) -> None:
    for dim, colour in COLOURS.items():
        own = [record for record in data["records"] if record["dim"] == dim]
        axes.plot(
            [record["kept"] for record in own],
            [ratio(record["ms"], "FlexAttention") for record in own],
            "o-",
            color=colour,
            markersize=3.5,
            linewidth=0.8,
            label=f"random normal, head_dim {dim}",
        )
    layers = data["trained"]["layers"]
    axes.plot(
        [layer["kept"] for layer in layers],
        [ratio(layer["ms"], "FlexAttention") for layer in layers],
        "x",
        color="#c98500",
        label="layers of a trained model",
    )
    speeds_by_doublings(axes)
    axes.set_xticks([0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0])
    axes.set_xticklabels(["3%", "6%", "12%", "25%", "50%", "100%"])
    axes.set_xlabel("keys that the forward pass visits")
    axes.set_ylabel("speed of FlexAttention's")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("what it depends on", fontsize=10)


def by_test_length(axes: Any, records: list[dict[str, Any]]) -> None:
    """Perplexity by test length, each line named at its right end."""
    names = {"alibi": "ALiBi", "rotary": "rotary", "t5": "T5", "sinusoidal": "sinusoidal"}
    colours = {name: COLORS[PREFERRED[name]] for name in names}  # as in reports
    trained, longest = records[0]["trained_length"], records[0]["lengths"][-1]
    for record in records:
        name, last = record["position"], record["perplexities"][-1]
        width = 2.6 if name == "alibi" else 1.4
        axes.plot(record["lengths"], record["perplexities"], "o-", color=colours[name], linewidth=width, markersize=4)
        label_at_end(axes, (longest, last), f"{names[name]} {last:.1f}", colours[name])
    axes.axvspan(trained, longest, color=INK, alpha=0.08, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(trained / 1.15, longest * 2)
    lengths = records[0]["lengths"]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_yticks([5, 10, 20], ["5", "10", "20"])
    axes.minorticks_off()
    axes.set_xlabel(f"test length in tokens; all trained at {trained}")
    axes.set_ylabel("perplexity, lower is better")


def label_at_end(axes: Any, place: tuple[float, float], text: str, colour: str) -> None:
    """The name of a line beside its last point."""
    axes.annotate(text, place, (7, -3), textcoords="offset points", color=colour)


def by_length_in_short(axes: Any, records: list[dict[str, Any]]) -> None:
    """What a reader of the README needs of `by_length`: one head_dim, each line named at its right end."""
    contenders = {
        "FlexAttention": ("FlexAttention", COLOURS[128], 2.6),
        "cuDNN, no bias": ("cuDNN, no bias", "#c98500", 1.4),
    }
    lengths = [record["length"] for record in records]
    for other, (name, colour, width) in contenders.items():
        speeds = [ratio(record["ms"], other) for record in records]
        axes.plot(lengths, speeds, "o-", color=colour, linewidth=width, markersize=4)
        label_at_end(axes, (lengths[-1], speeds[-1]), f"{speeds[-1]:.0f}× {name}", colour)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    speeds_by_doublings(axes)
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 4)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("times as fast, forward + backward")


def speed_in_short(dim: int = 128) -> None:
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    by_length_in_short(axes, [record for record in data["records"] if record["dim"] == dim])
    axes.spines[["top", "right"]].set_visible(False)
    about = f"ALiBi attention on {data['about']['machine']}, head_dim {dim}, random inputs"
    figure.suptitle(f"{about}\n{version('attention_gpu')}", fontsize=9.5)
    figure.savefig(ROOT / "docs" / "speed.svg", metadata={"Date": None}, transparent=True)


def extrapolation() -> None:
    data = json.loads((RESULTS / "demo.json").read_text())
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    by_test_length(axes, data["records"])
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"make demo: a small model, one seed, nothing tuned\n{version('demo')}", fontsize=9.5)
    figure.savefig(ROOT / "docs" / "demo.svg", metadata={"Date": None}, transparent=True)


def speed() -> None:
    data = json.loads((RESULTS / "attention_gpu.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    by_length(left, data["records"])
    by_kept(right, data)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    about = data["about"]
    figure.suptitle(
        f"ALiBi attention, {about['machine']}, {about['shapes']}\n{version('attention_gpu')}", fontsize=9.5
    )
    figure.savefig(ROOT / "docs" / "attention_gpu.svg", metadata={"Date": None}, transparent=True)


def main() -> None:
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    plt.rcParams.update({"svg.hashsalt": "trainshort", "svg.fonttype": "path", "font.size": 10})
    plt.rcParams.update(dict.fromkeys(inks, INK))
    speed()
    speed_in_short()
    extrapolation()


if __name__ == "__main__":
    main()
