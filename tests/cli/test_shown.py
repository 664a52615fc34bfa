"""Tables hold what they are given, and fit a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest

from trainshort.cli.shown import comparison_tables, number, percent, print_table

TEST = {"data": "text", "split": "validation", "first_token": 1, "end_token": 32769, "mode": "nonoverlapping"}
TEST |= {"dtype": "float32"}
LENGTHS = [64, 128, 256, 512, 1024]


def comparison(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tests": [{"trained": 64, **TEST, "lengths": LENGTHS, "strides": LENGTHS}], "runs": runs}


def record(length: int, perplexity: float) -> dict[str, Any]:
    return {
        "length": length,
        "stride": length,
        **TEST,
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
    (table,) = comparison_tables(comparison(runs))
    print_table(table)
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 80
    for expected in ("sinusoidal", "11.000", "22.000", "+100%", "+750%", "50.0%", "1,234 MB", "means of 2 seeds"):
        assert expected in shown
    assert "…" not in shown


def test_a_mean_is_never_over_other_tests(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run("alibi", seed, [10.0 + seed] * 5) for seed in (0, 1)]
    runs[1]["records"][1]["data"] = "other"
    runs[1]["records"][2]["dtype"] = "bfloat16"
    runs[1]["records"].insert(0, record(64, 999.0) | {"data": "other"})
    (table,) = comparison_tables(comparison([*runs, run("rotary", 0, [10.0] * 5)]))
    print_table(table)
    shown = capsys.readouterr().out
    assert "999" not in shown
    assert shown.count("10.500") == 3
    for length in (128, 256):
        assert f"alibi at {length}: left out, seed 1 was not tested like the rest" in shown
    assert "means over seeds: alibi 2, rotary 1" in shown


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (1.23456, "1.235"), (99.9, "99.900"), (123.4, "123"), (1.5e23, "1.5e+23")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_percents() -> None:
    assert [percent(change) for change in (-0.026, 0.5, 7.604, 12.5)] == ["-2.6%", "+50.0%", "+760%", "+1,250%"]
