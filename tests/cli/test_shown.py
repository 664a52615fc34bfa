"""Tables hold what they are given, and fit a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest

from trainshort.cli.shown import comparison_tables, number, percent, print_table


def record(length: int, perplexity: float) -> dict[str, Any]:
    return {
        "length": length,
        "perplexity": perplexity,
        "tokens_per_second": 31234.5,
        "peak_memory_bytes": 1_234_000_000,
        "scored_tokens": 32768,
        "kept": [[0.25, 0.75]],
    }


def run(position: str, seed: int, perplexities: list[float]) -> dict[str, Any]:
    records = [record(64 * 2**place, value) for place, value in enumerate(perplexities)]
    return {
        "position": position,
        "length": 64,
        "seed": seed,
        "lr": 0.003,
        "records": records,
        "training": {"tokens": 5},
    }


def test_a_comparison_fits_and_shows_means_and_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [
        run("sinusoidal", 0, [10.0, 21.0, 30.0, 40.0, 90.0]),
        run("sinusoidal", 1, [12.0, 23.0, 36.0, 48.0, 97.0]),
    ]
    (table,) = comparison_tables({"config": {"length": [64], "seeds": [0, 1]}, "runs": runs})
    print_table(table)
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 80
    for expected in ("sinusoidal", "11.000", "22.000", "+100%", "+750%", "50.0%", "1,234 MB", "means of 2 seeds"):
        assert expected in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (1.23456, "1.235"), (99.9, "99.900"), (123.4, "123"), (1.5e23, "1.5e+23")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_percents() -> None:
    assert [percent(change) for change in (-0.026, 0.5, 7.604, 12.5)] == ["-2.6%", "+50.0%", "+760%", "+1,250%"]
