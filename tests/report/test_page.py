"""The page: everything in it, nothing from outside, and text from runs stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import plotly.graph_objects
import pytest

import trainshort
from tests.report.made import change, make_run, make_runs, record, skipped, write
from tests.report.parsed import Page
from trainshort.report.build import LARGEST_PAGE, build_report, content_of
from trainshort.report.reading import read_runs
from trainshort.report.text import clean, for_spreadsheet, json_for_page, latex, significant, times

EVIL = "<script>alert('&amp;')</script><img src=x onerror=alert(2)>"
CHARTS = ["extrapolation", "sliding", "loss_by_position", "training", "cost", "kept", "bias"]


def built(tmp_path: Path) -> Page:
    return Page(build_report([tmp_path / "runs"], tmp_path / "report", figures=False).page)


def test_one_run_says_how_it_was_trained(tmp_path: Path) -> None:
    make_run(tmp_path / "alibi", steps=10)
    text = build_report([tmp_path / "alibi"], tmp_path / "out", figures=False).page.read_text()
    assert "This run: trained at 64, steps 10, tokens 1,280, lr 0.00" in text
    assert "The same for all" not in text


def test_every_chart_is_there_with_a_sentence(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", sliding=True)
    page = built(tmp_path)
    assert page.charts == CHARTS
    content = content_of(read_runs([tmp_path / "runs"]), title=None)
    for chart in content.charts:
        assert chart.sentence.endswith(".")
        assert len(chart.sentence) > 80
        assert chart.sentence in page.text
    for each in ("alibi-64-seed0", "2.13.0", '"num_layers": 2', f"by trainshort {trainshort.__version__}"):
        assert each in page.text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_plotly_knows_every_attribute(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", sliding=True)
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"alibi-seed{seed}", seed=seed, factor=1.0 + seed / 10)
    for chart in built(tmp_path).data["charts"]:
        for view in chart["views"]:
            plotly.graph_objects.Figure(view["traces"], view["layout"])  # refuses what it does not know


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    page = built(tmp_path)
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert tag not in ("iframe", "object", "embed", "base", "form")
        if "href" in attributes:
            assert (attributes["href"] or "").startswith(("#", "data:"))
    policy = next(each["content"] or "" for tag, each in page.tags if tag == "meta" and "http-equiv" in each)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    hashes = set(re.findall(r"'sha256-([^']+)'", policy))
    scripts = page.scripts[1:]  # the first is data
    assert hashes == {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts}
    assert len(scripts) == 2


def test_no_button_sends_anything_away(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    _, plotly, script = built(tmp_path).scripts
    settings = set(re.findall(r"(show\w*(?:Cloud|Studio|Link)):\{valType", plotly))
    assert settings  # plotly still calls them so
    assert "displayModeBar: false" in script  # none of plotly's buttons is there, whatever its next version brings
    for each in settings:
        assert f"{each}: false" in script
    assert 'plotlyServerURL: ""' in script


def test_text_from_runs_stays_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "<script>alert(1)<", EVIL, model=EVIL)
    make_run(tmp_path / "runs" / "alibi")
    write(
        folder / "samples.json", [{"prompt": EVIL, "text": EVIL + " and </pre> on"}, "</script>", 7, {"text": None}]
    )
    change(folder / "evaluation.json", records=[record(64, 5.0), skipped(128, EVIL)])
    state = {"environment": {"torch": EVIL, "device": EVIL}}
    change(folder / "state" / "state.json", **state)
    (folder / "metrics.jsonl").write_text(EVIL)
    page = Page(build_report([tmp_path / "runs"], tmp_path / "report", title=EVIL).page)
    assert len(page.scripts) == 3
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count(EVIL) >= 5
    assert "and </pre> on" in page.text
    assert "</script" not in page.scripts[0].lower()
    names = [
        trace["name"]
        for chart in page.data["charts"]
        for view in chart["views"]
        for trace in view["traces"]
        if "name" in trace
    ]
    assert any("&lt;script&gt;" in name for name in names)
    assert not any("<" in name for name in names)  # plotly reads tags in names


def test_helpers_against_hostile_text() -> None:
    hostile = "\ud800\x00</script><!-- & \x7f"
    assert clean(hostile) == "\ufffd\ufffd</script><!-- & \ufffd"
    text = json_for_page({hostile: [float("nan"), float("inf"), hostile]})
    assert not set("<>&") & set(text)
    assert for_spreadsheet("=1+1") == "'=1+1"
    assert json.loads(text) == {clean(hostile): [None, None, clean(hostile)]}
    assert latex(r"a_b \ {x} 50% $1 & #2 ^~") == (
        r"a\_b \textbackslash{} \{x\} 50\% \$1 \& \#2 \textasciicircum{}\textasciitilde{}"
    )


def test_numbers_in_tables_keep_what_matters() -> None:
    values = (5.00746, 17.7971, 123.456, 12345.6, 0.0039062, 0.0001, 3.4e9, None, 0.0)
    shown = ["5.007", "17.80", "123.5", "12,346", "0.00391", "0.0001", "3.40e+09", "–", "0"]
    assert [significant(value) for value in values] == shown
    assert [times(value) for value in (0.9777, 1.0, 4.3001, 24.26, 2431.4, 3e9)] == [
        "×0.978", "×1.00", "×4.30", "×24.3", "×2,431", "×3.0e+09",
    ]  # fmt: skip


DAMAGE = {
    "train.json": ("{", "how it was trained is not known"),
    "config.json": ("[1, 2]", "holds list, not an object"),
    "evaluation.json": ("{}", ""),
    "metrics.jsonl": ('{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "1 of 2 lines are damaged"),
    "state/state.json": ("null", ""),
    "samples.json": ('{"samples": 3}', "no list of samples"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    folders = make_runs(tmp_path / "runs")
    text, message = DAMAGE[name]
    (folders[1] / name).write_text(text)
    page = built(tmp_path)
    assert message in page.text
    if message:
        assert str(folders[1] / name) in page.text
    assert "extrapolation" in page.charts
    labels = {trace["name"] for trace in page.chart("extrapolation")["views"][0]["traces"]}
    assert {"ALiBi", "Sinusoidal", "T5 bias"} <= labels


@pytest.mark.parametrize(
    "name", ["train.json", "config.json", "evaluation.json", "metrics.jsonl", "state/state.json"]
)
@pytest.mark.parametrize("how", ["missing", "binary", "folder", "deep"])
def test_whatever_happened_to_a_file(tmp_path: Path, name: str, how: str) -> None:
    folders = make_runs(tmp_path / "runs")
    path = folders[0] / name
    path.unlink()
    if how == "binary":
        path.write_bytes(bytes(range(256)))
    elif how == "folder":
        path.mkdir()
    elif how == "deep":
        path.write_text("[" * 200_000)
    page = built(tmp_path)
    assert str(path) in page.text
    assert "Rotary" in {trace["name"] for trace in page.chart("extrapolation")["views"][0]["traces"]}


BROKEN: list[object] = [
    None, 7, "text", [], [7, None, {}],
    [{"length": "64", "mode": "sliding"}, {"length": -1, "mode": "sliding", "stride": 2}],
    [record(64, 5.0) | {"perplexity": "five", "loss_by_position": [1], "kept": [[1.0], [2.0, 3.0]], "stride": None}],
    [record(64, 5.0) | {"loss_by_position": {"edges": [0, None], "nll_sum": [1.0], "count": [0]}, "kept": "all"}],
    [record(64, 5.0) | {"perplexity": float("nan"), "seconds": float("inf"), "kept": [[None]], "stride": 0}],
    [record(64, 5.0) | {"kept": [[0.5]], "reach": [[1.0, 2.0]], "farthest": 3, "peak_memory_bytes": 10**400}],
]  # fmt: skip


@pytest.mark.parametrize("records", BROKEN, ids=range(len(BROKEN)))
def test_records_may_hold_anything(tmp_path: Path, records: object) -> None:
    make_runs(tmp_path / "runs")
    change(tmp_path / "runs" / "alibi-64-seed0" / "evaluation.json", records=records)
    page = built(tmp_path)
    labels = [trace["name"] for trace in page.chart("extrapolation")["views"][0]["traces"]]
    assert labels[-3:] == ["Rotary", "Sinusoidal", "T5 bias"]


def test_runs_of_another_version_and_other_weights(tmp_path: Path) -> None:
    folders = make_runs(tmp_path / "runs")
    change(folders[0] / "evaluation.json", version=9, unknown={"a": 1})
    change(folders[0] / "train.json", new_flag="x")
    change(folders[1] / "evaluation.json", model="ffff")
    page = built(tmp_path)
    assert "of version 9: shown as far as it is understood" in page.text
    assert f"{folders[1] / 'evaluation.json'}: nonoverlapping at 64, 128, 256: left out" in page.text
    assert "measured with other weights than the run has now" in page.text
    assert len(page.chart("extrapolation")["views"][0]["traces"]) == 3


def test_a_run_without_tests_still_shows_its_training(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "alibi")
    (folder / "evaluation.json").unlink()
    page = built(tmp_path)
    assert page.charts == ["training"]
    assert "No run has perplexities" in page.text
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == ["training", "runs"]  # nothing is shown of what is not there


@pytest.mark.slow
def test_the_page_stays_under_its_limit(tmp_path: Path) -> None:
    for seed in range(60):
        make_run(tmp_path / "runs" / f"alibi-{seed}", seed=seed, sliding=True, steps=3000, lr=0.001 * (1 + seed % 20))
    report = build_report([tmp_path / "runs"], tmp_path / "report", figures=False)
    assert report.page.stat().st_size <= LARGEST_PAGE
    page = Page(report.page)
    assert len(page.chart("training")["views"][0]["traces"]) == 60


@pytest.mark.slow
def test_many_heads_fit_too(tmp_path: Path) -> None:
    grid = [[0.123456 + head / 100 for head in range(40)] for _ in range(48)]
    for number in range(6):
        folder = make_run(tmp_path / "runs" / f"alibi-{number}", lr=0.001 * (number + 1))
        kept = {"kept": grid, "reach": grid, "farthest": grid}
        change(folder / "evaluation.json", records=[record(64 * 2**place, 5.0) | kept for place in range(6)])
    report = build_report([tmp_path / "runs"], tmp_path / "report", figures=False)
    assert report.page.stat().st_size <= LARGEST_PAGE
    page = Page(report.page)
    assert "There is more than fits into this page" in page.text
    assert len(page.chart("kept")["views"]) == 3 * 6
    rows = (tmp_path / "report" / "tables" / "kept.csv").read_text().splitlines()
    assert len(rows) == 1 + 6 * 6 * 48 * 40


@pytest.mark.slow
def test_building_again_replaces_and_removes_its_own(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", sliding=True)
    out = tmp_path / "report"
    build_report([tmp_path / "runs"], out, dots=60)
    (out / "notes.txt").write_text("mine")
    assert (out / "figures" / "bias.svg").exists()
    build_report([tmp_path / "runs" / "rotary-64-seed0"], out, dots=60)
    kept = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert not {"figures/bias.svg", "figures/kept.png", "tables/kept.csv", "tables/bias.csv"} & kept
    assert {"notes.txt", "report.html", "figures/extrapolation.svg", "tables/sliding.csv"} <= kept
    assert not [name for name in kept if "partial" in name]


def test_samples_stand_side_by_side_with_the_end_of_training(tmp_path: Path) -> None:
    folders = make_runs(tmp_path / "runs")
    for folder, inside in zip(folders, (3, 0, 99, "x"), strict=True):
        sample = {"prompt": "def ", "text": "f(x): <b>", "within_trained_length": inside}
        write(folder / "samples.json", {"samples": [sample]})
    page = built(tmp_path)
    assert sum(tag == "article" for tag, _ in page.tags) == 4
    assert page.text.count("64 tokens: longer than trained from here") == 2  # others end before, or do not say
    assert "def f(x 64 tokens: longer than trained from here ): <b>" in page.text


def test_many_problems_do_not_hide_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "alibi")
    paths = [tmp_path / "runs", *(tmp_path / f"nowhere{place}" for place in range(9))]
    report = build_report(paths, tmp_path / "report", figures=False)
    page = Page(report.page)
    assert len(report.problems) == 9
    assert all(f"nowhere{place}: no such folder" in page.text for place in range(9))
    assert "and 5 more" in page.text
