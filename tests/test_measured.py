"""Results say of which code they are, and none that is of older code looks as if it were of today's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '"""Doc."""\n\ndef f(x: int) -> int:\n    """Says."""\n    return x + 1  # why\n'


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "measured", raising=False)
    import measured

    return measured


def test_results_and_the_list_of_stale_ones_agree_with_the_sources(measured: ModuleType) -> None:
    assert not measured.disagreements()


def test_comments_formatting_and_docstrings_do_not_count(measured: ModuleType) -> None:
    same = "def f( x:int )->int:\n\n    'Other words.'\n    return (x+1)\n"
    assert measured.code_hash(same) == measured.code_hash(SOURCE)
    for other in (SOURCE.replace("+ 1", "+ 2"), SOURCE.replace("x: int", "x: float"), SOURCE + "y = 1\n"):
        assert measured.code_hash(other) != measured.code_hash(SOURCE)


def test_a_text_that_is_no_docstring_counts(measured: ModuleType) -> None:
    assert measured.code_hash("x = 'a'\n") != measured.code_hash("x = 'b'\n")


def test_every_pattern_finds_sources(measured: ModuleType) -> None:
    for name, patterns in measured.MEASURED.items():
        for pattern in patterns:
            assert any(ROOT.glob(pattern)), (name, pattern)


def test_every_benchmark_stores_the_hash_of_what_it_measured(measured: ModuleType) -> None:
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if '"--out"' in path.read_text()]
    assert len(scripts) > 5
    for path in scripts:
        calls = re.findall(r"(?:sources_hash\(|about\(.*, )\"(\w+)\"\)", path.read_text())
        assert path.stem in calls, path.name
        assert {*calls} <= {path.stem, f"{path.stem}_gpu"}, path.name  # what runs on both has two results
        assert {*calls} <= measured.MEASURED.keys()


@pytest.fixture
def changed(measured: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A repository with one result, of one source."""
    for folder in ("trainshort/ops", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "trainshort/ops/bias.py").write_text(SOURCE)
    for name, path in {"ROOT": ".", "RESULTS": "benchmarks/results", "STALE": "benchmarks/stale.json"}.items():
        monkeypatch.setattr(measured, name, tmp_path / path)
    monkeypatch.setattr(measured, "MEASURED", {"speed": ("trainshort/ops/*.py",)})
    about = {"commit": "abc1234", "sources": measured.sources_hash("speed")}
    (tmp_path / "benchmarks/results/speed.json").write_text(json.dumps({"about": about}))
    measured.STALE.write_text("{}")
    return measured


def test_a_change_that_is_not_listed_is_noticed(changed: ModuleType) -> None:
    assert not changed.disagreements()
    source = changed.ROOT / "trainshort/ops/bias.py"
    source.write_text(SOURCE.replace("Says", "Tells"))
    assert not changed.disagreements()
    source.write_text(SOURCE.replace("+ 1", "+ 2"))
    (wrong,) = changed.disagreements()
    assert "Measure it again" in wrong
    changed.STALE.write_text('{"speed": "abc1234"}')
    assert not changed.disagreements()
    assert changed.version("speed") == "measured on an older version of the code (commit abc1234)"


def test_a_new_file_is_a_change(changed: ModuleType) -> None:
    (changed.ROOT / "trainshort/ops/more.py").write_text("x = 1\n")
    assert changed.disagreements()


def test_what_is_listed_must_be_stale(changed: ModuleType) -> None:
    changed.STALE.write_text('{"speed": "abc1234"}')
    (wrong,) = changed.disagreements()
    assert "take it out" in wrong
    changed.STALE.write_text('{"gone": "abc1234"}')
    (wrong,) = changed.disagreements()
    assert "no such result" in wrong


def test_the_commit_in_the_list_is_the_one_measured(changed: ModuleType) -> None:
    (changed.ROOT / "trainshort/ops/bias.py").write_text("")
    changed.STALE.write_text('{"speed": "fff0000"}')
    (wrong,) = changed.disagreements()
    assert "measured abc1234" in wrong


@pytest.mark.parametrize(
    ("chart", "name"),
    [
        ("attention_gpu", "attention_gpu"),
        ("speed", "attention_gpu"),
        ("models_gpu", "models_gpu"),
        ("demo", "demo"),
    ],
)
def test_the_chart_says_of_which_code_it_is(chart: str, name: str, measured: ModuleType) -> None:
    assert f"<!-- {measured.version(name)} -->" in (ROOT / "docs" / f"{chart}.svg").read_text()
