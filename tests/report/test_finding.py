"""The sentence that a report begins with and a comparison ends with, from the figures alone."""

from __future__ import annotations

from pathlib import Path

from tests.report.made import LENGTHS, change, make_run, make_runs, record, skipped
from tests.report.parsed import Page
from trainshort.report.build import build_report, content_of
from trainshort.report.page import Content
from trainshort.report.reading import read_runs


def content(folder: Path) -> Content:
    return content_of(read_runs([folder]), title=None)


def said(folder: Path) -> str:
    found = content(folder).finding
    assert found is not None
    return found.text


def test_it_names_every_method_and_the_best_at_the_training_length(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    sentence = (
        "Trained at 64 tokens and tested at 256 (4 times as long), ALiBi has perplexity 4.000 (×0.800 of its value "
        "at 64), T5 bias 6.000 (×1.09), Rotary 12.00 (×3.00) and Sinusoidal 24.00 (×4.00); at 64 tokens the best is "
        "Rotary with 4.000."
    )
    assert said(tmp_path / "runs") == sentence
    report = build_report([tmp_path / "runs"], tmp_path / "report", figures=False)
    assert report.finding == sentence
    text = Page(report.page).text
    assert text.index(sentence) < text.index("Perplexity by test length")


def test_facts_come_after_it(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"alibi-{seed}", seed=seed)
    facts = dict(content(tmp_path).facts)
    assert list(facts) == ["Data", "Model", "Training", "Seeds", "Made"]
    assert facts["Model"] == "2 layers, 16 wide, 2 heads"
    assert facts["Training"] == "10 steps of 128 tokens"
    assert facts["Seeds"] == "2"
    assert "1,024 validation tokens" in facts["Data"]


def test_with_seeds_it_says_the_spread(tmp_path: Path) -> None:
    for seed, factor in enumerate((0.9, 1.1)):
        make_run(tmp_path / f"alibi-{seed}", seed=seed, factor=factor)
        make_run(tmp_path / f"t5-{seed}", "t5", seed=seed, factor=factor)
    sentence = said(tmp_path)
    assert "ALiBi has perplexity 4.000 ± 0.566 (×0.800 of its value at 64) and T5 bias 6.000 ± 0.849" in sentence
    assert sentence.endswith("the best is ALiBi with 5.000 (T5 bias is within the spread of seeds).")


def test_positions_that_end_are_named(tmp_path: Path) -> None:
    make_runs(tmp_path)
    folder = make_run(tmp_path / "learned", "learned")
    ends = [skipped(length, "learned positions end at 64 tokens") for length in LENGTHS[1:]]
    change(folder / "evaluation.json", records=[record(64, 3.0), *ends])
    sentence = said(tmp_path)
    assert "tested at 256" in sentence
    assert (
        "; Learned has none there (learned positions end at 64 tokens); at 64 tokens the best is Learned" in sentence
    )


def test_a_length_that_one_method_alone_was_tested_at_is_not_the_headline(tmp_path: Path) -> None:
    folders = make_runs(tmp_path)
    change(folders[0] / "evaluation.json", records=[record(64, 5.0), record(256, 4.0), record(4096, 3.0)])
    assert "tested at 256 (4 times as long)" in said(tmp_path)


def test_training_lengths_may_differ(tmp_path: Path) -> None:
    make_run(tmp_path / "short")
    make_run(tmp_path / "long", length=128)
    sentence = said(tmp_path)
    assert sentence.startswith("Tested at 256 tokens, ALiBi, L = 64 has perplexity 4.000 (×0.800 of its value at 64)")
    assert "the best is" not in sentence


def test_tested_at_the_training_length_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alibi")
    change(folder / "evaluation.json", records=[record(64, 5.0)])
    assert said(tmp_path) == "Trained and tested at 64 tokens, ALiBi has perplexity 5.000."


def test_without_figures_there_is_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alibi")
    (folder / "evaluation.json").unlink()
    assert content(tmp_path).finding is None


def test_many_methods_are_counted(tmp_path: Path) -> None:
    for place in range(9):
        make_run(tmp_path / f"m{place}", f"m{place}", factor=1 + place / 10)
    sentence = said(tmp_path)
    assert " and 3 others up to 10.80" in sentence


def test_speed_says_whether_windows_pay(tmp_path: Path) -> None:
    folders = make_runs(tmp_path)
    cost = next(chart for chart in content(tmp_path).charts if chart.name == "cost")
    assert cost.lead.startswith("At 256 tokens, the longest tested here, certified windows do not make ALiBi faster")
    assert "keep 56% of the keys in sight, and finding them takes time" in cost.lead
    kept = {"kept": [[0.1, 0.3], [0.1, 0.1]], "tokens_per_second": 1536.0}
    change(folders[0] / "evaluation.json", records=[record(64, 5.0), record(256, 4.0) | kept])
    cost = next(chart for chart in content(tmp_path).charts if chart.name == "cost")
    assert cost.lead.startswith("At 256 tokens ALiBi scores 3.0 times as many tokens a second as ")
    assert "its windows keep 15% of the keys in sight and skip the rest" in cost.lead
