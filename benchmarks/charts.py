"""Draw the charts of the docs from the measured data beside this script.

python benchmarks/charts.py            # writes attention_gpu.svg, speed.svg, models_gpu.svg and demo.svg into docs/
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


def label_at_end(
    axes: Any, place: tuple[float, float], text: str, colour: str, offset: tuple[int, int] = (7, -3)
) -> None:
    """The name of a line beside its last point."""
    axes.annotate(text, place, offset, textcoords="offset points", color=colour)


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


def by_training_length(axes: Any, records: list[dict[str, Any]]) -> None:
    """Tokens a second of whole models in training; crosses are trained weights."""
    contenders = {"ours": ("ours", COLOURS[128], 2.6), "FlexAttention GPT": ("FlexAttention GPT", "#c98500", 1.4)}
    random = [record for record in records if record["weights"] == "random"]
    trained = [record for record in records if record["weights"] == "trained"]
    lengths = [record["length"] for record in random]
    for other, (name, colour, width) in contenders.items():
        speeds = [record[other]["tokens_per_second"] for record in random]
        axes.plot(lengths, speeds, "o-", color=colour, linewidth=width, markersize=4)
        marks = [record[other]["tokens_per_second"] for record in trained]
        axes.plot([record["length"] for record in trained], marks, "x", color=colour, markersize=8)
        label_at_end(axes, (lengths[-1], speeds[-1]), name, colour)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 14)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=9)
    speeds = range(0, 700_001, 100_000)
    axes.set_yticks(speeds, [f"{speed // 1000:,}k" if speed else "0" for speed in speeds])
    axes.minorticks_off()
    axes.set_xlabel("training length; crosses: trained weights")
    axes.set_ylabel("tokens a second")
    axes.set_title("training, 12 layers, 768 wide", fontsize=10)


def by_context(axes: Any, records: list[dict[str, Any]]) -> None:
    """Milliseconds of a token by what stands before it."""
    styles = {
        "ours, alibi": ("ours, ALiBi", COLOURS[128], 2.6),
        "ours, rotary": ("ours, rotary", COLOURS[64], 1.4),
        "transformers' BLOOM, static cache": ("transformers' BLOOM, static cache", "#c98500", 0),
        "transformers' BLOOM, dynamic cache": ("transformers' BLOOM, dynamic cache", "#c98500", 0),
    }
    for model, (name, colour, width) in styles.items():
        own = [record for record in records if record["model"] == model and record.get("rows") == 1]
        own = [record for record in own if record["weights"] == "random"]
        if not own:  # it failed
            continue
        contexts, times = [record["context"] for record in own], [record["ms"] for record in own]
        axes.plot(contexts, times, "o-", color=colour, linewidth=width, markersize=4)
        place = (7, -3) if len(own) > 1 else (-3, 8)  # a single point: above, where no line's end is named
        label_at_end(axes, (contexts[-1], times[-1]), f"{name} {times[-1]:.2f}", colour, place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    contexts = sorted({record["context"] for record in records if "context" in record})
    axes.set_xlim(contexts[0] / 1.3, contexts[-1] * 16)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=9)
    axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.set_ylim(0.5, 24)
    axes.minorticks_off()
    axes.set_xlabel("tokens before it")
    axes.set_ylabel("milliseconds a token, one row")
    axes.set_title("one token, 24 layers, 1,024 wide", fontsize=10)


def whole_models() -> None:
    data = json.loads((RESULTS / "models_gpu.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    by_training_length(left, data["training"])
    by_context(right, data["decoding"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Whole models on {data['about']['machine']}, bfloat16\n{version('models_gpu')}", fontsize=9.5)
    figure.savefig(ROOT / "docs" / "models_gpu.svg", metadata={"Date": None}, transparent=True)


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
    whole_models()
    extrapolation()


if __name__ == "__main__":
    main()
