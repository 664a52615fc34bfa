"""From paths to runs, tolerantly: what cannot be read is named, and everything else is used.

A path may be the folder of a run, a folder of such folders (what compare leaves), a comparison.json, whose runs
stand in for folders that are not there any more, or the figures of a model whose own files lie elsewhere: its
evaluation.json says itself of which model it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainshort.common.checks import is_plain_name
from trainshort.common.files import sha256
from trainshort.common.reading import parse_json, read_text
from trainshort.report.records import Values, cells, is_identified, is_recall, mapping, whole, with_weights
from trainshort.report.text import clean

RUN_FILES = ("train.json", "config.json", "evaluation.json", "recall.json", "metrics.jsonl")
COMPARISON = "comparison.json"
BESIDE = ("tokens.bin", "report.html")  # folders with these stand beside runs and need no word
EVALUATION_VERSIONS = (1, 2)
UNKNOWN = "unknown"
LARGEST = 256 * 2**20  # bytes of a file that is read at all: nothing that a run writes comes near


@dataclass(frozen=True)
class UnreadableFile:
    """A file that is missing, damaged or not understood, and what that means for the page."""

    path: str
    what: str


@dataclass
class Run:
    """What the files of one run hold; empty where they hold nothing."""

    name: str
    folder: str
    train: Values = field(default_factory=dict)
    model: Values = field(default_factory=dict)
    state: Values = field(default_factory=dict)
    metrics: list[Values] = field(default_factory=list)
    records: list[Values] = field(default_factory=list)
    recall: list[Values] = field(default_factory=list)
    samples: list[Values] = field(default_factory=list)
    trainshort: str | None = None
    text: Values = field(default_factory=dict)  # what a comparison says of the data: sources, tokenizer
    about: Values = field(default_factory=dict)  # what evaluation.json says of a model that is no run of ours

    @property
    def kind(self) -> str:
        """What it is called and coloured by: runs by the name they were given or their position method, other models
        by their own name."""
        if self.about or self.position == UNKNOWN:
            return self.name
        given = self.train.get("name")
        return clean(given) if isinstance(given, str) and given.strip() else self.position

    @property
    def position(self) -> str:
        return clean(str(self.train.get("position") or self.model.get("position") or UNKNOWN))

    @property
    def length(self) -> int | None:
        """That it was trained at."""
        found = whole(self.train.get("length", self.about.get("length")))
        return found if found is not None and found > 0 else None

    @property
    def seed(self) -> int | None:
        return whole(self.train.get("seed"))

    @property
    def environment(self) -> Values:
        return mapping(self.state.get("environment"))

    @property
    def data(self) -> str | None:
        """The identity of the data it was trained on."""
        found = mapping(self.state.get("data")).get("identity")
        return found if isinstance(found, str) else None


@dataclass
class Found:
    runs: list[Run] = field(default_factory=list)
    problems: list[UnreadableFile] = field(default_factory=list)

    def problem(self, path: Path, what: str) -> None:
        found = UnreadableFile(clean(str(path)), clean(what))
        if found not in self.problems:
            self.problems.append(found)


def read_runs(paths: Iterable[str | Path]) -> Found:
    """Every run at the paths, each once, in the order of the paths and of their names."""
    found, paths = Found(), list(paths)
    folders: dict[Path, Path] = {}  # resolved to as it was given
    comparisons: dict[Path, Path] = {}
    for path in map(Path, paths):
        try:
            _sort_out(path, folders, comparisons, found)
        except OSError as error:
            found.problem(path, f"cannot be read ({error.strerror}): left out")
    parents = {folder.parent / COMPARISON for folder in folders.values()}
    for path in sorted(parents):
        if path.is_file():
            comparisons.setdefault(path.resolve(), path)
    compared: dict[Path, Values] = {}
    for path in comparisons.values():
        content = _object(path, found, "versions and missing runs cannot be taken from it")
        for entry in _entries(content):
            entry = entry | {"trainshort": content.get("trainshort"), "comparison": path, "text": content.get("data")}
            compared.setdefault((path.parent / str(entry["folder"])).resolve(), entry)
    asked = {path.resolve() for path in map(Path, paths)}
    for resolved, folder in folders.items():
        try:
            found.runs += _read(folder, compared.get(resolved, {}), found)
        except OSError as error:
            found.problem(folder, f"cannot be read ({error.strerror}): left out")
    for resolved, entry in compared.items():
        path = entry["comparison"]
        if resolved not in folders and (path.resolve() in asked or path.parent.resolve() in asked):
            found.problem(resolved, f"the folder is not there: its figures are taken from {path}")
            found.runs.append(_from_comparison(resolved, entry, found))
    return found


def _sort_out(path: Path, folders: dict[Path, Path], comparisons: dict[Path, Path], found: Found) -> None:
    if path.is_file():
        if path.name == COMPARISON:
            comparisons[path.resolve()] = path
        elif not path.name.startswith("."):
            found.problem(path, "not the folder of a run: left out")
    elif not path.is_dir():
        found.problem(path, "no such folder: left out")
    elif _is_run(path):
        folders.setdefault(path.resolve(), path)
    elif not any((path / name).exists() for name in BESIDE):
        inner = [child for child in sorted(path.iterdir()) if child.is_dir() and _is_run(child)]
        listed = _order(path / COMPARISON)
        for child in sorted(inner, key=lambda child: listed.get(child.name, len(listed))):
            folders.setdefault(child.resolve(), child)
        if (path / COMPARISON).is_file():
            comparisons[(path / COMPARISON).resolve()] = path / COMPARISON
        elif not inner:
            found.problem(path, f"no run in it (none of {', '.join(RUN_FILES)}): left out")


def _order(path: Path) -> dict[str, int]:
    """The places of runs in a comparison, which has them in the order that was asked for."""
    content = mapping(_json(path, Found(), "")) if path.is_file() else {}  # what is wrong with it is named later
    return {str(entry["folder"]): place for place, entry in enumerate(_entries(content))}


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def _read(folder: Path, compared: Values, found: Found) -> list[Run]:
    """The run in a folder, or the figures there of another model; none of a model that has no figures."""
    if (folder / "train.json").exists():
        return [_run(folder, compared, found)]
    figures = [path for name in ("evaluation.json", "recall.json") if (path := folder / name).is_file()]
    for path in figures:
        if about := mapping(mapping(_json(path, Found(), "")).get("about")):  # what is wrong with it is named later
            return [_elsewhere(folder, about, found)]
    if figures:
        return [_run(folder, compared, found)]
    config = mapping(_json(folder / "config.json", Found(), ""))
    if config and "format" not in config:
        what = "a model without figures: trainshort evaluate makes some, and says in which folder; name that one"
        found.problem(folder, what)
        return []
    return [_run(folder, compared, found)]


def _elsewhere(folder: Path, about: Values, found: Found) -> Run:
    """A model of which nothing is known but its figures and what stands beside them."""
    run = Run(clean(str(about.get("name") or folder.resolve().name)), clean(str(folder)), about=about)
    run.model = mapping(about.get("model"))
    if (folder / "evaluation.json").exists():
        run.records = _records(folder / "evaluation.json", run, found)
    run.recall = _recall(folder / "recall.json", run, found)
    return run


def _run(folder: Path, compared: Values, found: Found) -> Run:
    run = Run(clean(folder.resolve().name), clean(str(folder)))
    run.train = _object(folder / "train.json", found, "how it was trained is not known")
    config = _object(folder / "config.json", found, "the shape of its model is not known")
    run.model = mapping(config.get("model"))
    if run.train or (folder / "state").is_dir():
        run.state = _object(folder / "state" / "state.json", found, "its versions and times are not known")
    if not run.train:
        started = mapping(run.state.get("config"))
        run.train = started or {key: compared[key] for key in ("position", "length", "seed", "lr") if key in compared}
    run.metrics = _metrics(folder / "metrics.jsonl", found)
    run.records = _records(folder / "evaluation.json", run, found)
    path = folder / "evaluation.json"
    if not run.records and (kept := _of_its_weights(_of_comparison(compared, folder, found), path, run, found)):
        found.problem(folder / "evaluation.json", f"its records are taken from {compared['comparison']}")
        run.records = kept
    run.recall = _recall(folder / "recall.json", run, found)
    run.samples = _samples(folder / "samples.json", found)
    run.trainshort, run.text = _version(compared), mapping(compared.get("text"))
    return run


def _from_comparison(folder: Path, entry: Values, found: Found) -> Run:
    run = Run(clean(folder.name), clean(str(folder)))
    run.train = mapping(entry.get("config")) or {
        key: entry[key] for key in ("position", "length", "seed", "lr") if key in entry
    }
    run.records = _of_comparison(entry, folder, found)
    environment = mapping(entry.get("training"))
    run.state = {"environment": environment, "seconds": environment.get("seconds")}
    run.trainshort, run.text = _version(entry), mapping(entry.get("text"))
    return run


def _of_comparison(entry: Values, folder: Path, found: Found) -> list[Values]:
    """Records of a run in comparison.json; the first such files did not repeat the weights in each."""
    records = entry.get("records")
    return _valid_records(with_weights("", records) if isinstance(records, list) else records, folder, found)


def _version(entry: Values) -> str | None:
    return None if entry.get("trainshort") is None else clean(str(entry["trainshort"]))


def _entries(content: Values) -> list[Values]:
    runs = content.get("runs")
    if not isinstance(runs, list):
        return []
    return [each for each in runs if isinstance(each, dict) and is_plain_name(each.get("folder"))]


def _text(path: Path, found: Found, without: str) -> str | None:
    try:
        return read_text(path, without, largest=LARGEST)
    except FileNotFoundError:
        found.problem(path, f"missing: {without}")
    except ValueError as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix(f"; {without}")
        found.problem(path, f"damaged ({reason[:200]}): {without}")
    except OSError as error:
        found.problem(path, f"cannot be read ({error.strerror}): {without}")
    return None


def _json(path: Path, found: Found, without: str) -> Any:
    text = _text(path, found, without)
    if text is None:
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        found.problem(path, f"damaged (not valid JSON: {str(error)[:200]}): {without}")
        return None


def _object(path: Path, found: Found, without: str) -> Values:
    content = _json(path, found, without)
    if content is not None and not isinstance(content, dict):
        found.problem(path, f"damaged (holds {type(content).__name__}, not an object): {without}")
    return mapping(content)


def _metrics(path: Path, found: Found) -> list[Values]:
    text = _text(path, found, "there is no training curve of it")
    rows, damaged = [], 0
    for line in (text or "").splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and whole(row.get("step")) is not None:
            rows.append(row)
        else:
            damaged += 1
    if damaged:
        found.problem(path, f"{damaged:,} of {len(rows) + damaged:,} lines are damaged and left out")
    return rows


def _records(path: Path, run: Run, found: Found) -> list[Values]:
    """Those of the run's own weights; what else the file holds is named."""
    content = _object(path, found, "there are no perplexities of it; trainshort evaluate makes them")
    if not content:
        return []
    if content.get("version") not in EVALUATION_VERSIONS:
        found.problem(path, f"of version {content.get('version')!r}: shown as far as it is understood")
    records = content.get("records")
    if isinstance(content.get("model"), str) and isinstance(records, list):
        records = with_weights(content["model"], records)
    return _of_its_weights(_valid_records(records, path, found), path, run, found)


def _of_its_weights(records: list[Values], path: Path, run: Run, found: Found) -> list[Values]:
    weights = _weights(path.parent, run, records)
    if weights is None:
        return records
    mine = [each for each in records if each["model"] and weights.startswith(each["model"])]
    if others := [each for each in records if not each["model"] or not weights.startswith(each["model"])]:
        what = "left out, measured with other weights than the run has now; evaluate again"
        found.problem(path, f"{cells(others)}: {what}")
    return mine


def _weights(folder: Path, run: Run, records: Sequence[Values]) -> str | None:
    """The sha256 of the weights of a run; None where nobody asks, because all records are of the same."""
    weights = run.about.get("weights") or mapping(mapping(run.state.get("files")).get("model")).get("sha256")
    if isinstance(weights, str):
        return weights
    if len({each["model"] for each in records}) < 2 or not (folder / "model.safetensors").is_file():
        return None
    return sha256(folder / "model.safetensors")


def _valid_records(records: Any, path: Path, found: Found) -> list[Values]:
    """Those that say what they are of: windows, tokens, data, dtype and weights."""
    if records is None:
        return []
    listed: Sequence[Any] = records if isinstance(records, list) else [records]
    valid, unknown = list[Values](), list[Values]()
    for each in listed:
        record = mapping(each)
        length, stride = whole(record.get("length")), whole(record.get("stride"))
        if length is None or length <= 0 or record.get("mode") not in ("nonoverlapping", "sliding"):
            continue
        record = record | {"stride": length if stride is None or stride < 1 else stride}
        (valid if is_identified(record) else unknown).append(record)
    if unknown:
        what = "left out, the records do not say of which weights, data or tokens they are; evaluate again"
        found.problem(path, f"{cells(unknown)}: {what}")
    if damaged := len(listed) - len(valid) - len(unknown):
        found.problem(path, f"{damaged:,} of {len(listed):,} records are damaged and left out")
    return valid


def _recall(path: Path, run: Run, found: Found) -> list[Values]:
    """Records of recall.json of the run's own weights, with as many counts as depths; optional."""
    if not path.exists():
        return []
    records = _object(path, found, "what it recalls is not shown").get("records")
    listed: Sequence[Any] = records if isinstance(records, list) else []
    valid = [each for each in listed if isinstance(each, dict) and is_recall(each)]
    if damaged := len(listed) - len(valid):
        found.problem(path, f"{damaged:,} of {len(listed):,} records are damaged and left out")
    weights = _weights(path.parent, run, valid)
    mine = [each for each in valid if weights is None or weights.startswith(each["model"])]
    if len(mine) < len(valid):
        what = "left out, measured with other weights than the run has now; evaluate again"
        found.problem(path, f"{len(valid) - len(mine):,} of {len(valid):,} records: {what}")
    return mine


def _samples(path: Path, found: Found) -> list[Values]:
    """A list of objects with `prompt` and `text`, or an object with such a list as `samples`; optional."""
    if not path.exists():
        return []
    content = _json(path, found, "its samples are not shown")
    listed = content.get("samples") if isinstance(content, dict) else content
    if content is not None and not isinstance(listed, list):
        found.problem(path, "damaged (no list of samples in it): its samples are not shown")
    samples = listed if isinstance(listed, list) else []
    return [{"text": each} if isinstance(each, str) else each for each in samples if isinstance(each, (str, dict))]
