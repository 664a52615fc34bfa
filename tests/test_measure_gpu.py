"""What runs on a GPU in limited time: results that are kept as they come, failures that stop nothing, tests again."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A benchmark: writes its result after every part. Parts called bad raise, slow ones don't end, nor does their child.
BENCHMARK = """
import argparse, json, os, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--parts", nargs="+")
parser.add_argument("--commit")
parser.add_argument("--out")
options = parser.parse_args()
results = {"about": {"machine": "M", "sources": os.environ.get("SOURCES", "s"), "commit": options.commit}}
for part in options.parts:
    print("begins", part, os.environ["TRITON_CACHE_DIR"])
    if part == "bad":
        raise ValueError("what went wrong")
    if part == "slow":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("child", child.pid, flush=True)
        time.sleep(60)
    results[part] = [part]
    open(options.out, "w").write(json.dumps(results))
"""


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With one kind of parts, the benchmark above."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    module = script("measure_gpu")
    (tmp_path / "speed.py").write_text(BENCHMARK)
    kind = module.Kind(
        str(tmp_path / "speed.py"), {"one": 30, "two": 30, "bad": 30, "slow": 1}, "speed", module._named
    )
    monkeypatch.setattr(module, "KINDS", {"tests": module.KINDS["tests"], "speed": kind})
    monkeypatch.setattr(module, "LEAST", 0.1)
    yield module
    signal.signal(signal.SIGTERM, on_sigterm)


def call(driver: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", "--out", str(out), "--commit", "c1", *words])
    status: int = driver.main()
    return status


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z" if Path("/proc/self/stat").exists() else True


def test_a_part_that_fails_or_does_not_end_stops_nothing(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["speed:one", "speed:bad", "speed:two,slow=3", "speed:two"]
    assert call(driver, monkeypatch, tmp_path / "out", "--parts", *parts) == 1
    rows = (tmp_path / "out/summary.txt").read_text().splitlines()[1:]
    assert [row.split("  ")[0].strip() for row in rows] == ["speed:one", "speed:bad", "speed:two,slow", "speed:two"]
    for row, outcome in zip(rows, ("ok", "failed", "out of time", "ok"), strict=True):
        assert f"  {outcome}" in row
    assert "ValueError: what went wrong" in rows[1]
    assert rows[1] in capsys.readouterr().out
    result = json.loads((tmp_path / "out/speed.json").read_text())
    assert result["one"] == ["one"]
    assert result["two"] == ["two"], "what a part had written before its time was over is kept"
    log = (tmp_path / "out/speed.two+slow.log").read_text().split()
    assert str(tmp_path / "out/caches/triton") in log
    child = int(log[log.index("child") + 1])
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_second_call_adds_to_the_first_unless_the_code_is_another(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert call(driver, monkeypatch, out, "--parts", "speed:one") == 0
    assert call(driver, monkeypatch, out, "--parts", "speed:two") == 0
    assert set(json.loads((out / "speed.json").read_text())) == {"about", "one", "two"}
    monkeypatch.setenv("SOURCES", "of other code")
    assert call(driver, monkeypatch, out, "--parts", "speed:two") == 0
    assert set(json.loads((out / "speed.json").read_text())) == {"about", "two"}


def test_what_is_cut_off_replaces_nothing_that_is_longer(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert call(driver, monkeypatch, out, "--parts", "speed:one") == 0
    whole = json.loads((out / "speed.json").read_text())
    (out / "speed.json").write_text(json.dumps({**whole, "two": ["two", "and more"]}))
    assert call(driver, monkeypatch, out, "--parts", "speed:two,slow=3") == 1
    assert json.loads((out / "speed.json").read_text())["two"] == ["two", "and more"]
    assert call(driver, monkeypatch, out, "--parts", "speed:two") == 0
    assert json.loads((out / "speed.json").read_text())["two"] == ["two"]


def test_what_has_no_time_left_does_not_begin(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(driver, monkeypatch, tmp_path / "out", "--limit", "0", "--parts", "speed:one") == 1
    assert "not started" in (tmp_path / "out/summary.txt").read_text()


def test_a_part_begins_only_with_time_to_end(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shorter one behind it the time is better spent."""
    words = ["--limit", "10", "--parts", "speed:one=30", "speed:two=15"]
    assert call(driver, monkeypatch, tmp_path / "out", *words) == 1
    rows = (tmp_path / "out/summary.txt").read_text().splitlines()[1:]
    assert ["not started" in row for row in rows] == [True, False]
    assert "s were left, and it begins with 15" in rows[0]
    assert "  ok" in rows[1]


def test_who_ends_the_script_ends_the_part(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps what it had written."""
    out = tmp_path / "out"
    log = out / "speed.one+slow.log"

    def stop() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (log.exists() and "child" in log.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        call(driver, monkeypatch, out, "--parts", "speed:one,slow=30", "speed:two")
    thread.join()
    assert stopped.value.code == 143
    assert json.loads((out / "speed.json").read_text())["one"] == ["one"]
    rows = (out / "summary.txt").read_text().splitlines()[1:]
    assert "  stopped" in rows[0]
    assert "  not started" in rows[1]
    words = log.read_text().split()
    child = int(words[words.index("child") + 1])
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.parametrize(
    ("part", "said"), [("sped", "no part 'sped': choose from tests, speed"), ("speed:three", "no part 'three'")]
)
def test_an_unknown_part_is_refused_before_anything_runs(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        call(driver, monkeypatch, tmp_path / "out", "--parts", "speed:one", part)
    assert not (tmp_path / "out").exists()


def test_all_parts_are_parts_of_the_benchmarks() -> None:
    """The names and limits are written down here and there."""
    module = script("measure_gpu")
    for kind in module.KINDS.values():
        text = (ROOT / kind.script).read_text()
        assert all(f'"{part}"' in text for part in kind.limits if part and kind is not module.KINDS["tests"])
    assert module.parsed("models:decoding=7").limit == 7.0
    assert module.parsed("tests:bounded,decay").limit == 240.0
    assert module.KINDS["tests"].arguments(["bounded"]) == ["tests/gpu/test_bounded.py"]


@pytest.fixture
def tests_driver() -> ModuleType:
    module: ModuleType = script("test_gpu")
    return module


LOG = """GPU G; torch 2; commit {commit}; sources {sources}
failed      1.00s  tests/gpu/test_b.py::test_b[x y]
passed     12.34s  tests/gpu/test_a.py::test_a[{{'t': 0.0}}-1]  rows 611,720, forward 0.418433
skipped     0.00s  tests/gpu/test_c.py::test_c

== tests/gpu/test_b.py::test_b[x y]
passed 3 of 4
1 passed, 1 failed, 1 skipped in 14 s
"""


def test_what_passed_before_counts_if_it_was_of_the_same_code(tests_driver: Any, tmp_path: Path) -> None:
    log, about = tmp_path / "log.txt", "GPU G; torch 2; commit def; sources 123"
    log.write_text(LOG.format(commit="abc", sources="123"))
    done = tests_driver.done_before(log, about)
    assert list(done) == ["tests/gpu/test_a.py::test_a[{'t': 0.0}-1]", "tests/gpu/test_c.py::test_c"]
    first = done["tests/gpu/test_a.py::test_a[{'t': 0.0}-1]"]
    assert first == {"outcome": "passed", "seconds": 12.34, "numbers": {"rows": 611720.0, "forward": 0.418433}}
    log.write_text(LOG.format(commit="def", sources="456"))
    assert tests_driver.done_before(log, about) == {}


@pytest.mark.slow
def test_only_what_failed_or_did_not_run_is_run_again(tmp_path: Path) -> None:
    def collected(*words: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.shards", "--collect-only", *words]
        done = subprocess.run([*command, "tests/gpu/test_windows.py"], cwd=ROOT, capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    tests = collected()
    assert len(tests) > 3
    outcomes = ["passed", "failed", "skipped", *["crashed"] * (len(tests) - 4)]  # the last one never ran
    lines = [f"{outcome:8} {1.0:7.2f}s  {test}" for outcome, test in zip(outcomes, tests, strict=False)]
    log = tmp_path / "log.txt"
    log.write_text("\n".join(["GPU G", *lines, ""]))
    assert collected("--without", str(log)) == [tests[1], *tests[3:]]


@pytest.mark.slow
def test_processes_share_the_tests(tmp_path: Path) -> None:
    """Every test is one process's, but those that need the GPU alone; a process that starts again goes on."""
    taken = tmp_path / "taken"
    taken.mkdir()

    def start(shard: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.shards", "--shard", shard]
        command += ["--results", str(tmp_path / shard), *(["--taken", str(taken)] if shard != "alone" else [])]
        files = ["tests/gpu/test_windows.py", "tests/gpu/test_decay.py"]
        return subprocess.Popen([*command, *files], cwd=ROOT, stdout=subprocess.DEVNULL)

    def run_by(shard: str) -> set[str]:
        results = tmp_path / shard
        return {json.loads(line)["test"] for line in results.read_text().splitlines()} if results.exists() else set()

    assert [process.wait() for process in [start(shard) for shard in ("1", "2", "alone")]] == [0, 0, 0]
    one, two, alone = run_by("1"), run_by("2"), run_by("alone")
    assert not one & two
    assert len(one | two) > 20
    assert {test.partition("[")[0] for test in alone} == {"tests/gpu/test_decay.py::test_gradient_of_65536_gates"}
    (tmp_path / "1").unlink(missing_ok=True)
    start("1").wait()
    assert run_by("1") == one, "what it had taken before"
