"""Run the tests for a GPU on this machine's: those that need it alone, then the others in processes side by side.

They are all of tests/gpu, and the contract of attention (tests/ops/contract) at its places on a GPU.

    python3 scripts/test_gpu.py --log results.txt --commit $(git rev-parse --short HEAD)
    python3 scripts/test_gpu.py --log results.txt --again results.txt      only what failed there, or did not run

Needs torch with CUDA, Triton, pytest and hypothesis. The exit status is 0 if every test passed. A process that
crashes is started again behind the test it crashed in; that test counts as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRIES = 5  # starts of one shard
TESTS = ("tests/gpu", "tests/ops/contract")
LINE = re.compile(r"(passed|failed|crashed|skipped) +([\d.]+)s  (\S.*?)(?:  (.*))?$")  # of a log
NUMBER = re.compile(r"(\w+) (\S+?)(?:, |$)")


def numbers_of(result: dict[str, Any]) -> str:
    """What a test counted, for its line of the log."""
    numbers = result.get("numbers") or {}
    return "  " + ", ".join(f"{name} {value:,.6g}" for name, value in numbers.items()) if numbers else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"files or folders (default: {' '.join(TESTS)})")
    parser.add_argument("--shards", type=int, default=16, help="processes side by side (default: 16)")
    parser.add_argument("--log", type=Path, help="write machine, versions and every test's result to this file")
    parser.add_argument("--commit", default="", help="what is tested, for the log (default: ask git)")
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds for one shard (default: 560)")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for all; tests after them do not run")
    parser.add_argument("--again", type=Path, help="leave out what passed or was skipped by this earlier log")
    parser.add_argument("--sample", action="store_true", help="of the contract, only every fifth case of each test")
    parser.add_argument("-k", dest="keyword", help="only tests that match, as in pytest")
    options = parser.parse_args()

    began = time.monotonic()
    options.end = began + options.limit
    about = describe(options.commit)
    print(about, flush=True)
    earlier = done_before(options.again, about) if options.again else {}
    with tempfile.TemporaryDirectory() as folder:
        found = [run_shard("alone", Path(folder), options)]
        shards = [str(number) for number in range(1, options.shards + 1)]
        with ThreadPoolExecutor(options.shards) as pool:
            found += pool.map(lambda shard: run_shard(shard, Path(folder), options), shards)
    results = earlier | {test: result for tests, _ in found for test, result in tests.items()}
    troubles = [trouble for _, trouble in found if trouble]
    lines = [
        f"{r['outcome']:8} {r.get('seconds', 0.0):7.2f}s  {test}{numbers_of(r)}"
        for test, r in sorted(results.items())
    ]
    failures = [(test, r) for test, r in sorted(results.items()) if r["outcome"] not in ("passed", "skipped")]
    counts = {outcome: sum(r["outcome"] == outcome for r in results.values()) for outcome in
              ("passed", "failed", "crashed", "skipped")}  # fmt: skip
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no tests ran"
    summary += f" in {time.monotonic() - began:.0f} s"
    counted = [r["numbers"] for r in results.values() if r.get("numbers")]
    if counted:  # certificates: rows add up, of shares the worst counts
        rows = sum(numbers.get("rows", 0) for numbers in counted)
        shares = {name: max(numbers.get(name, 0.0) for numbers in counted) for name in counted[0] if name != "rows"}
        worst = ", ".join(f"{name} {share:.4f}" for name, share in shares.items())
        summary = f"certificates of {rows:,} query rows, worst shares of the tolerance: {worst}\n{summary}"
    report = [*(f"\n== {test}\n{r.get('message', '')}" for test, r in failures), *(f"\n== {t}" for t in troubles)]
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text("\n".join([about, *lines, *report, summary, ""]))
    print("\n".join(report))
    for test, result in failures:
        print(f"{result['outcome'].upper()} {test}")
    slowest = sorted(results.items(), key=lambda pair: -pair[1].get("seconds", 0.0))[:5]
    print("slowest:", ", ".join(f"{test.split('::')[-1]} {r.get('seconds', 0.0):.0f} s" for test, r in slowest))
    print(summary)
    return 0 if counts["passed"] and not failures and not troubles else 1


def done_before(log: Path, about: str) -> dict[str, dict]:
    """What passed or was skipped by an earlier log, for this one: nothing where that is of other code or machines."""
    first, *lines = log.read_text().splitlines()
    if without_commit(first) != without_commit(about):
        print(f"{log} is of another machine or other code: what it did well is left out, and not counted", flush=True)
        return {}
    matches = filter(None, map(LINE.match, lines))
    return {
        match[3]: {"outcome": match[1], "seconds": float(match[2]), "numbers": numbers_in(match[4] or "")}
        for match in matches
        if match[1] in ("passed", "skipped")
    }


def without_commit(about: str) -> str:
    """A commit may touch nothing that is tested: the hash of the sources says whether it does."""
    return re.sub(r"; commit [^;]*", "", about)


def numbers_in(text: str) -> dict[str, float]:
    """What `numbers_of` wrote."""
    return {match[1]: float(match[2].replace(",", "")) for match in NUMBER.finditer(text)}


def run_shard(shard: str, folder: Path, options: argparse.Namespace) -> tuple[dict[str, dict], str]:
    """The outcome of each test of a shard, and what went wrong besides."""
    results, log, taken = folder / f"{shard}.jsonl", folder / f"{shard}.log", folder / "taken"
    taken.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", *options.tests, "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", "gpu and not exhaustive" + " and not slow" * options.sample, "-p", "tests.gpu.shards"]
    command += ["--shard", shard, "--results", str(results)]
    command += [] if shard == "alone" else ["--taken", str(taken)]
    command += ["-k", options.keyword] if options.keyword else []
    command += ["--without", str(options.again.resolve())] if options.again else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of workers would outlive the tests
    environment.pop("TRITON_INTERPRET", None)
    trouble, end = "", min(time.monotonic() + options.timeout, options.end)
    if end < time.monotonic() + 1.0:
        return {}, f"shard {shard}: no time was left for it"
    for attempt in range(TRIES):
        before = len(read(results))
        with log.open("a") as file:
            try:
                left = max(end - time.monotonic(), 1.0)
                status = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=left
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
        for test, result in read(results).items():
            if result["outcome"] == "started":
                why = "out of time" if status == -1 else f"the process ended with status {status}"
                with results.open("a") as file:
                    file.write(json.dumps({"test": test, "outcome": "crashed", "message": why + tail(log)}) + "\n")
        if status in (0, 1, 5):  # passed, failed, nothing to run
            return read(results), trouble
        trouble = f"shard {shard}: status {status} at attempt {attempt + 1}{tail(log)}"
        if status == -1 or len(read(results)) == before:  # no time, or it never came to a test
            return read(results), trouble
        print(f"shard {shard} crashed (status {status}): going on behind it", flush=True)
    return read(results), trouble


def read(path: Path) -> dict[str, dict]:
    """The last word on each test, or the first that is not a success."""
    found: dict[str, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        result = json.loads(line)
        if found.get(result["test"], {}).get("outcome") not in ("failed", "crashed"):
            found[result["test"]] = result
    return found


def tail(log: Path) -> str:
    return "\n" + log.read_text(errors="replace")[-3000:]


def describe(commit: str) -> str:
    """Machine, versions and commit."""
    if not commit:
        try:
            asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
            commit = asked.stdout.strip() or "unknown"
        except OSError:
            commit = "unknown"
    code = (
        "import torch, importlib.util as u\n"
        "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'\n"
        "triton = __import__('triton').__version__ if u.find_spec('triton') else 'none'\n"
        "print(f'GPU {gpu}; torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton}')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    hashing = [sys.executable, str(ROOT / "benchmarks" / "measured.py"), "--hash", "test_gpu"]
    sources = subprocess.run(hashing, capture_output=True, text=True, check=True).stdout.strip()
    versions = asked.stdout.strip() or asked.stderr.strip()[-500:]
    machine = f"{versions}; Python {platform.python_version()}; {os.cpu_count()} CPU cores"
    return f"{machine}; commit {commit}; sources {sources}"


if __name__ == "__main__":
    sys.exit(main())
