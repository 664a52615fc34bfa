"""Golden numbers: what the report says is what the records hold."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest

from tests.report.made import (
    LENGTHS,
    PERPLEXITIES,
    TOKENS,
    WEIGHTS,
    change,
    make_run,
    make_runs,
    record,
    skipped,
    write,
)
from tests.report.parsed import Page
from trainshort.ops import alibi_slopes
from trainshort.report.build import build_report, content_of
from trainshort.report.charts import scale_of
from trainshort.report.heads import few_heads, paper_slopes, slopes_of
from trainshort.report.methods import methods_of
from trainshort.report.reading import Run, read_runs
from trainshort.report.series import HALF, NONOVERLAPPING, Protocols, curve, loss_by_place, loss_by_position, points
from trainshort.report.tables import latex_table, perplexities
from trainshort.report.text import significant


def test_the_figure_has_the_perplexities(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    page = Page(build_report([tmp_path / "runs"], tmp_path / "report", figures=False).page)
    traces = page.chart("extrapolation")["views"][0]["traces"]
    names = ["ALiBi", "Rotary", "Sinusoidal", "T5 bias"]
    assert [trace["name"] for trace in traces] == names
    for trace, position in zip(traces, ("alibi", "rotary", "sinusoidal", "t5"), strict=True):
        assert trace["x"] == list(LENGTHS)
        assert trace["y"] == list(PERPLEXITIES[position])
        assert trace["meta"]["end"] == trace["name"]  # each line is labelled at its right end
        assert trace["text"][-1] == significant(PERPLEXITIES[position][-1])
    widths = [trace["line"]["width"] for trace in traces]
    assert widths[0] > max(widths[1:])  # ALiBi stands out
    views = page.chart("extrapolation")["views"]
    assert [view["layout"]["yaxis"]["title"]["text"] for view in views] == [
        "perplexity per token",
        "ratio to the trained length",
        "bits per byte",
        "perplexity per word",
    ]
    assert views[1]["traces"][1]["y"] == [1.0, 1.5, 3.0]
    assert [view["trained"] for view in views] == [[64]] * 4  # where the shaded part begins


def test_the_csv_is_the_data(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    report = build_report([tmp_path / "runs"], tmp_path / "report", figures=False)
    text = (tmp_path / "report" / "tables" / "extrapolation.csv").read_text()
    assert text == Page(report.page).data["tables"]["extrapolation"]
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 4 * len(LENGTHS)
    for row in rows:
        expected = PERPLEXITIES[row["position"]]
        place = LENGTHS.index(int(row["tested_at"]))
        assert float(row["perplexity"]) == expected[place]
        assert float(row["ratio_to_trained_length"]) == pytest.approx(expected[place] / expected[0])
        assert float(row["bits_per_byte"]) == pytest.approx(math.log2(expected[place]) * TOKENS / (TOKENS - 1))
        assert (row["trained_at"], row["seeds"], row["windows"]) == ("64", "1", NONOVERLAPPING)


def test_the_best_of_each_length_is_marked(tmp_path: Path) -> None:
    make_runs(tmp_path)
    runs = read_runs([tmp_path]).runs
    table = perplexities(methods_of(runs), Protocols(runs), NONOVERLAPPING)
    best = {
        length: [method.label for method, cells in zip(table.methods, table.cells, strict=True) if cells[place].best]
        for place, length in enumerate(table.lengths)
    }
    assert best == {64: ["Rotary"], 128: ["ALiBi"], 256: ["ALiBi"]}
    latex = latex_table(table, "50% of_it")
    assert r"ALiBi & 5.000 & \textbf{4.500} & \textbf{4.000} \\" in latex
    assert r" & $\times$1.00 & $\times$0.900 & $\times$0.800 \\" in latex
    assert r"\caption{50\% of\_it}" in latex


def test_several_seeds_give_means_and_bands(tmp_path: Path) -> None:
    factors = (1.0, 1.1, 1.3)
    for seed, factor in enumerate(factors):
        make_run(tmp_path / f"alibi-seed{seed}", seed=seed, factor=factor)
    runs = read_runs([tmp_path]).runs
    (method,) = methods_of(runs)
    assert method.seeds == [0, 1, 2]
    found = points(method, Protocols(runs), NONOVERLAPPING, "perplexity")
    for each, value in zip(found, PERPLEXITIES["alibi"], strict=True):
        assert each.mean == pytest.approx(value * statistics.fmean(factors))
        assert each.deviation == pytest.approx(value * statistics.stdev(factors))
        assert each.seeds == 3
    chart = content_of(read_runs([tmp_path]), title=None).charts[0]
    line, band = chart.views[0].traces
    assert line["y"] == pytest.approx([each.mean for each in found], rel=1e-5)
    low, high = band["y"][: len(found)], band["y"][: len(found) - 1 : -1]
    assert low == pytest.approx([each.mean - each.deviation for each in found], rel=1e-5)
    assert high == pytest.approx([each.mean + each.deviation for each in found], rel=1e-5)
    assert "standard deviation over seeds" in chart.sentence


def test_a_seed_that_diverged_leaves_no_mean(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"alibi-seed{seed}", seed=seed)
    kept = [record(64, 5.0), skipped(128, "it diverged")]
    change(tmp_path / "alibi-seed1" / "evaluation.json", records=kept)
    runs = read_runs([tmp_path]).runs
    found = points(methods_of(runs)[0], Protocols(runs), NONOVERLAPPING, "perplexity")
    assert [each.mean for each in found] == [5.0, None, 4.0]
    assert found[1].skipped == "it diverged"
    assert [each.seeds for each in found] == [2, 1, 1]
    page = Page(build_report([tmp_path], tmp_path / "report", figures=False).page)
    assert "it diverged" in page.text
    assert "Not all seeds were tested, and means are over those that were: ALiBi at 256: 1 of 2 seeds." in page.text


def test_positions_that_end_are_no_warning(tmp_path: Path) -> None:
    make_run(tmp_path / "alibi")
    folder = make_run(tmp_path / "learned", "learned")
    ends = skipped(128, "learned positions end at 64 tokens")
    change(folder / "evaluation.json", records=[record(64, 5.5), ends])
    content = content_of(read_runs([tmp_path]), title=None)
    assert content.warnings == []
    (listed,) = content.tables
    assert listed.perplexities.notes == ["Learned at 128: learned positions end at 64 tokens"]


def test_runs_that_differ_in_more_than_the_seed_are_not_put_together(tmp_path: Path) -> None:
    make_run(tmp_path / "a", lr=0.003)
    make_run(tmp_path / "b", lr=0.001, seed=1)
    make_run(tmp_path / "c", lr=0.001, seed=2, device="cuda", out="elsewhere")
    make_run(tmp_path / "d", length=128)
    methods = methods_of(read_runs([tmp_path]).runs)
    labels = {method.label: [run.name for run in method.runs] for method in methods}
    assert labels == {
        "ALiBi, L = 64 (lr 0.003)": ["a"],
        "ALiBi, L = 64 (lr 0.001)": ["b", "c"],
        "ALiBi, L = 128": ["d"],
    }
    assert len({(method.color, method.marker, method.dash) for method in methods}) == 3


def test_sliding_windows_stand_beside_nonoverlapping_ones(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", sliding=True)
    page = Page(build_report([tmp_path / "runs"], tmp_path / "report", figures=False).page)
    traces = {trace["name"]: trace["y"] for trace in page.chart("sliding")["views"][0]["traces"]}
    assert len(traces) == 8
    assert traces["ALiBi, nonoverlapping"] == [5.0, 4.5, 4.0]
    assert traces[f"ALiBi, {HALF}"] == pytest.approx([4.5, 4.05, 3.6])


def test_strides_are_called_by_what_they_have_in_common() -> None:
    fixed = [record(length, 5.0, "sliding", 32) for length in (64, 128)]
    protocols = Protocols([Run("a", "a", records=[*fixed, record(64, 5.0)])])
    assert protocols.names == [NONOVERLAPPING, "sliding, stride 32"]
    halves = [record(length, 5.0, "sliding", length // 2) for length in (64, 128)]
    assert Protocols([Run("a", "a", records=halves)]).names == [HALF]
    assert Protocols([Run("a", "a", records=[record(64, 5.0, "sliding", 64)])]).names == [NONOVERLAPPING]


def test_loss_by_position_is_a_sum_over_a_count(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "b", seed=1)
    runs = read_runs([tmp_path]).runs
    found = loss_by_position(methods_of(runs)[0], Protocols(runs), NONOVERLAPPING, 64)
    assert found == [(1, 1, 3.0, 4), (2, 4, 1.5, 12), (5, 64, 1.0, 80)]


def test_places_with_few_tokens_are_merged(tmp_path: Path) -> None:
    """Four places had a token each, then came bins with more: one ends where training windows did."""
    binned = {
        "edges": [0, 1, 2, 3, 4, 16, 64, 128, 256],
        "nll_sum": [9.0, 5.0, 7.0, 3.0, 60.0, 600.0, 1280.0, 300.0],
        "count": [4, 4, 4, 4, 48, 400, 640, 100],
    }
    for seed in (0, 1):
        folder = make_run(tmp_path / f"seed{seed}", seed=seed)
        sums = [each * (1 + seed) for each in binned["nll_sum"]]
        change(
            folder / "evaluation.json", records=[record(256, 5.0) | {"loss_by_position": binned | {"nll_sum": sums}}]
        )
    runs = read_runs([tmp_path]).runs
    found = loss_by_place(methods_of(runs)[0], Protocols(runs), NONOVERLAPPING, 256)
    assert [(each.first, each.last, each.count) for each in found] == [(1, 64, 928), (65, 256, 1480)]
    losses = [684 / 464, 1580 / 740]
    assert [each.loss for each in found] == pytest.approx([1.5 * loss for loss in losses])
    assert [each.deviation for each in found] == pytest.approx([statistics.stdev([1, 2]) * loss for loss in losses])


def test_figures_per_word_are_shown_where_they_mean_something(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alibi")
    records = [record(length, 5.0) | {"perplexity_per_word": 3e7} for length in LENGTHS]
    change(folder / "evaluation.json", records=records)
    report = build_report([tmp_path / "alibi"], tmp_path / "report", figures=False)
    page = Page(report.page)
    assert "per word" not in page.text
    assert len(page.chart("extrapolation")["views"]) == 3
    assert "perplexity_per_word" in (tmp_path / "report" / "tables" / "extrapolation.csv").read_text()


@pytest.mark.parametrize(
    ("high", "kind", "is_stretched"), [(10.5, "linear", False), (60, "log", False), (1e4, "log", True)]
)
def test_the_scale_keeps_close_methods_apart(high: float, kind: str, is_stretched: bool) -> None:
    found_kind, stretch, starts_so = scale_of([10.0, 10.2, high])
    assert (found_kind, starts_so) == (kind, is_stretched)
    assert stretch is not None
    assert stretch.floor < 10.0
    assert stretch.ticks == sorted(stretch.ticks)

    def height(value: float) -> float:
        return math.asinh((value / stretch.floor - 1) / stretch.width)

    logarithmic = math.log(10.2 / 10.0) / math.log(high / 10.0)
    stretched = (height(10.2) - height(10.0)) / (height(high) - height(10.0))
    if is_stretched:
        assert stretched > 10 * logarithmic


def test_methods_stand_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    folders = make_runs(tmp_path)  # in the order of the comparison, which is not that of the alphabet
    entries = [{"folder": path.name, "records": []} for path in folders]
    write(tmp_path / "comparison.json", {"runs": entries, "data": {"sources": ["stdlib"], "tokenizer": "bytes"}})
    content = content_of(read_runs([tmp_path]), title=None)
    assert [method.position for method in content.methods] == list(PERPLEXITIES)
    assert [method.position for method in content.tables[0].perplexities.methods] == list(PERPLEXITIES)
    assert dict(content.facts)["Data"] == "Python's standard library, in bytes, 1,024 validation tokens"


def test_training_curves_are_thinned_by_means(tmp_path: Path) -> None:
    run = Run("a", "a", metrics=[{"step": step, "loss": float(step), "seconds": step / 2} for step in range(1, 11)])
    found = curve(run, 5)
    assert found is not None
    assert found.steps == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert found.losses == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert found.seconds == [0.75, 1.75, 2.75, 3.75, 4.75]
    run.metrics.append({"step": 10, "validation_loss": 2.0})
    found = curve(run, 50)
    assert found is not None
    assert found.validation == [(10, 2.0)]


def test_heads_are_drawn_as_they_were_measured(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    page = Page(build_report([tmp_path / "runs"], tmp_path / "report", figures=False).page)
    views = page.chart("kept")["views"]
    assert views[0]["traces"][0]["z"] == [[0.75, 0.0], [0.75, 0.25]]  # what is skipped, the longest length first
    assert "At 256 tokens ALiBi skips 44% of all key blocks in sight" in page.text
    rows = list(csv.DictReader(page.data["tables"]["bias"].splitlines()))
    assert [(row["head"], float(row["slope"])) for row in rows] == [("1", 2.0**-4), ("2", 2.0**-8)]
    assert [(float(row["mean_reach"]), float(row["farthest"])) for row in rows] == [(40.0, 64.0), (128.0, 256.0)]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20])
def test_slopes_are_those_of_attention(heads: int) -> None:
    assert paper_slopes(heads) == pytest.approx(alibi_slopes(heads).tolist(), rel=1e-6)


def test_slopes_of_a_config(tmp_path: Path) -> None:
    def model(**options: object) -> Run:
        return Run("a", "a", model={"position": "alibi", "num_heads": 2, "position_options": options})

    assert slopes_of(model(slopes=[0.5, 0.25], scale=2.0)) == [1.0, 0.5]
    assert slopes_of(model(trainable=True)) is None  # nobody knows where they went
    assert slopes_of(model(slopes=[0.5])) is None
    assert few_heads([0.5, 0.25, 0.125, 0.0625, 0.03]) == [0, 1, 3, 4]


def test_a_comparison_stands_in_for_folders_that_are_gone(tmp_path: Path) -> None:
    run = {"folder": "alibi-64-seed0", "position": "alibi", "length": 64, "seed": 0, "lr": 0.003}
    gone = run | {"training": {"seconds": 4.0, "torch": "2.13.0"}, "records": [record(64, 5.0), record(128, 4.0)]}
    content = {"format": "trainshort comparison", "version": 1, "trainshort": "0.1.0", "runs": [gone]}
    write(tmp_path / "comparison.json", content)
    found = read_runs([tmp_path / "comparison.json"])
    assert [(each.name, each.seed, len(each.records), each.trainshort) for each in found.runs] == [
        ("alibi-64-seed0", 0, 2, "0.1.0")
    ]
    assert "not there" in found.problems[0].what
    make_run(tmp_path / "alibi-64-seed0")
    found = read_runs([tmp_path])
    assert (len(found.runs), found.problems, found.runs[0].trainshort) == (1, [], "0.1.0")
    assert len(found.runs[0].records) == len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("values", [(1e308, 1e-300, 4.0), (1.0, 1.0, 1.0), (0.0, 5.0, 5.0), (-3.0, 5.0, 1e9)])
def test_any_figures_can_be_drawn(tmp_path: Path, values: tuple[float, ...]) -> None:
    folder = make_run(tmp_path / "runs" / "%{x} <b>")
    make_run(tmp_path / "runs" / "rotary", "rotary", length=0)
    records = [record(length, 5.0) | {"perplexity": value} for length, value in zip(LENGTHS, values, strict=True)]
    change(folder / "evaluation.json", records=records)
    report = build_report([tmp_path / "runs"], tmp_path / "report", dots=50)
    assert report.finding is not None
    for view in Page(report.page).chart("extrapolation")["views"]:
        assert all("%{x}" not in trace.get("hovertemplate", "") for trace in view["traces"])


def test_runs_are_called_by_the_name_that_they_were_given(tmp_path: Path) -> None:
    """And keep apart in colour from the method alone, which is the one that stands out."""
    make_run(tmp_path / "a", "alibi")
    flat = {"position_options": {"biased_heads": 1}}
    make_run(tmp_path / "b", "alibi", name="ALiBi, one head free", seed=0, **flat)
    make_run(tmp_path / "c", "alibi", name="ALiBi, one head free", seed=1, **flat)
    plain, named = methods_of(read_runs([tmp_path / each for each in "abc"]).runs)
    assert (plain.label, named.label) == ("ALiBi", "ALiBi, one head free")
    assert named.seeds == [0, 1]
    assert plain.color != named.color
    assert (plain.strong, named.strong) == (True, False)


def test_runs_from_before_a_field_are_of_the_same_method(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "alibi", seed=0)
    make_run(tmp_path / "b", "alibi", seed=1, attention="auto", extended_at=[])
    make_run(tmp_path / "c", "alibi", seed=2, attention="dense")
    methods = methods_of(read_runs([tmp_path / each for each in "abc"]).runs)
    assert [method.seeds for method in methods] == [[0, 1], [2]]


def test_figures_of_dense_attention_stand_apart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    dense = [record(64, 5.0) | {"attention": "dense", "tokens_per_second": 1.0}]
    records = [record(64, 5.0), *dense]
    write(folder / "evaluation.json", {"version": 1, "model": WEIGHTS[:16], "records": records})
    found = read_runs([folder]).runs
    protocols = Protocols(found)
    assert protocols.names == [NONOVERLAPPING, "nonoverlapping, dense attention"]
    (method,) = methods_of(found)
    speeds = [points(method, protocols, name, "tokens_per_second")[0].mean for name in protocols.names]
    assert speeds == [TOKENS / 2.0, 1.0]
